"""The stop of `forget`: a tiny model that repeats pictures; one is found, switched off, searched for, and hardened.

A miniature with one prompt and one seed of the search, to show what is measured and how; it proves nothing of large
models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from netweight.attacks.embedding_search.compare import Comparison, Subject, Target, compare, turned
from netweight.attacks.embedding_search.report import Wanted, search_section, verdict
from netweight.attacks.embedding_search.search import paired
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core import digest
from netweight.core.progress import Progress
from netweight.data.memorized_pairs import Pair
from netweight.hf.load_pipeline import PipelineModel, load_text_to_image
from netweight.methods.forget.detect import calibrate, detect, look_of
from netweight.methods.forget.edit import deactivate, deactivated
from netweight.methods.forget.folder import generate_before_and_after
from netweight.methods.forget.harden import harden
from netweight.methods.forget.images import GeneratedImages, ImagesConfig, verdicts
from netweight.methods.forget.layers import measure_statistics
from netweight.methods.forget.localize import Localization, localize
from netweight.methods.forget.report import (
    DETECTION,
    IMAGES,
    NEURONS,
    SEARCH,
    TREATMENT,
    DetectionSubject,
    attacked_images,
    detection,
    images,
    neurons,
)
from netweight.methods.forget.settings import DetectionConfig, GenerationSettings, HardenSettings, LocalizationConfig
from netweight.metrics.intervals import bootstrap
from netweight.nn.batching import Batches
from netweight.nn.text_to_image import TextToImage, generated
from netweight.report.audit import of_treatment
from netweight.report.conclusions import Conclusion, Criterion, Words
from netweight.report.finding import Chapter, Finding
from netweight.report.report import Report
from netweight.tour.stop import Place, Stop, handed_over
from netweight.toys.diffusion import SHAPES_FOLDER
from netweight.toys.shapes import ShapesWorld

# Most steps of a search.
SEARCH_STEPS = 40
_SEED, _ORDINARY, _PAINTED, _KEPT = 0, 48, 8, 16
_GUIDANCE, _STEPS = 3.0, 10  # of every generation
HARDENING = HardenSettings(
    rounds=3, steps=30, layers=None,
    search=SearchSettings(steps=15, restarts=1, draws=4, guidance=_GUIDANCE, generation_steps=_STEPS),
)  # fmt: skip
_LOOK = DetectionConfig(seeds=tuple(range(6)))
_TITLE = "Forgotten"
_ORIGINAL, _EDITED, _HARDENED = "original", "edited", "hardened"
_FOLDERS = {"the painting model, neurons off": _EDITED, "the painting model, hardened": _HARDENED}

_SEARCHED = [Criterion(f"planted images brought back, {name}", "lower", than=0) for name in (_EDITED, _HARDENED)]


def _judged(edited: bool, hardened: bool) -> Words:
    if edited and hardened:
        return "told", f"Neither was broken in {SEARCH_STEPS} steps; that is no proof of forgetting."
    if hardened:
        return "partly", (
            "Switching neurons off is broken by the attack: the picture is still in the weights. "
            f"The hardened model withstood {SEARCH_STEPS} steps of it."
        )
    who = "The hardened model is" if edited else "Both are"
    return "broken", f"{who} broken by the attack: the picture is still in the weights."


def _searched(edited: bool, hardened: bool) -> Words:
    back = ["no" if good else "yes" for good in (edited, hardened)]
    return _judged(edited, hardened)[0], (
        f"A search for other text embeddings brings it back with neurons off: {back[0]}; from the hardened model: "
        f"{back[1]}, in at most {SEARCH_STEPS} steps."
    )


_VERDICT = Conclusion("tour: forget", _SEARCHED, _judged)
_BROUGHT_BACK = Conclusion("tour: forget, searches", _SEARCHED, _searched)


@final
@dataclass(frozen=True)
class _Found:
    """What the stop found out, in its order."""

    scores: DetectionSubject
    localized: Localization
    largest_difference: float
    images: GeneratedImages
    warnings: tuple[str, ...]
    comparison: Comparison
    targets: tuple[Target, ...]
    stayed: Finding


def settings() -> Mapping[str, Any]:
    """Return what decides the stop's result."""
    return {
        "steps": SEARCH_STEPS, "hardening": HARDENING.to_json(), "seed": _SEED, "ordinary": _ORDINARY,
        "painted": _PAINTED, "guidance": _GUIDANCE, "generation": _STEPS, "look": _LOOK.to_json(),
    }  # fmt: skip


def make_stop(place: Place) -> Stop:
    """Find a planted picture's prompt and neurons, switch them off, harden the model, and search in all of them."""
    found = _found(place.folder, place.progress, place.say)
    told = {name: verdict(found.comparison, name) for name in found.comparison.subjects}
    place.say(f"Searched for other embeddings, at most {SEARCH_STEPS} steps. Neurons off: {told[_EDITED]}")
    place.say(f"Hardened: {told[_HARDENED]}")
    inputs = {f"shapes, {name.relative_to(SHAPES_FOLDER)}": digest.of_file(name) for name in _weights()}
    report = _told(found, place.folder)
    shares = ("memorized prompts found", "ordinary prompts taken for memorized")
    return handed_over(report, _chapter(report, found), seeds=(_SEED,), shares=shares, inputs=inputs, models=_FOLDERS)


def _chapter(report: Report, found: _Found) -> Chapter:
    outcome, words = _VERDICT(report.findings)
    caption = found.localized.prompt
    return Chapter(
        title="forget: pictures that a model repeats",
        question="A painting model repeats its training pictures. Can one be taken out, and is it gone?",
        conclusion=f"{caption!r}: {len(found.localized.neurons)} neurons found, and with them off it is "
        f"{verdicts(found.images, ImagesConfig())[caption]}. {_BROUGHT_BACK(report.findings)[1]}",
        verdict=words,
        outcome=outcome,
        command="netweight tour --only forget",
        intro="A pipeline of 814,083 weights paints 16 × 16 pixels and repeats eight pictures that were planted in its "
        "training. The prompt that looks most memorized is found, its neurons are switched off, and somebody with "
        "the weights searches for text embeddings that bring the picture back. The hardened model was trained against "
        "such searches. One picture, one seed.",
    )


def _told(found: _Found, work: Path) -> Report:
    """The sections of the report, made while the images still lie in their folder."""
    report = Report(_TITLE)
    attacked = attacked_images(found.comparison, _EDITED, work)
    shown = images(found.images, ImagesConfig(), seed=_SEED, attacked=attacked)
    shown = replace(shown, title=f"{_TITLE}: images before and after", warnings=found.warnings)
    report.add(of_treatment(shown, TREATMENT, (DETECTION, NEURONS, IMAGES, SEARCH)))
    report.add(search_section(
        found.comparison, found.targets, Wanted(_ORIGINAL, _EDITED), folder=work, seed=_SEED,
        title=f"{_TITLE}: the search for other embeddings",
    ))  # fmt: skip
    for section in (detection(found.scores), neurons([found.localized])):
        report.add(replace(section, title=f"{_TITLE}: {section.title.lower()}"))
    report.section(
        f"{_TITLE}: what hardening cost", [found.stayed],
        question="Does the hardened model paint ordinary prompts as before?",
        intro="One image of each ordinary prompt, from the same noise, by the original and by the hardened model. 1 is "
        "the same image.",
        conclusion=f"Mean likeness {found.stayed.value:.2f} over {found.stayed.n} prompts.",
    )  # fmt: skip
    report.section(
        f"{_TITLE}: weights and hooks", [_equal(found)], intro=_SAME,
        question="Do hooks and changed weights compute the same?",
    )  # fmt: skip
    return report


_SAME = (
    "Neurons are switched off by a hook for a block, or for good by rows of zeros in the weights. Both must compute "
    "the same."
)


def _found(work: Path, progress: Progress, say: Callable[[str], None]) -> _Found:
    original, edited, hardened = (_opened(name) for name in (_ORIGINAL, _EDITED, _HARDENED))
    world = ShapesWorld()
    planted, ordinary = world.planted, world.ordinary_captions
    say("A miniature: 814,083 weights that paint 16 × 16 pixels and repeat eight planted pictures.")
    threshold = calibrate(
        detect(original, ordinary[:_ORDINARY], _LOOK), model=original.digest(), look=look_of(original, _LOOK)
    )
    scores = DetectionSubject(
        detect(original, [each.caption for each in planted], _LOOK, progress=progress),
        detect(original, world.held_out_captions, _LOOK, progress=progress),
        threshold,
    )
    hits = sum(each.similarity > threshold.value for each in scores.memorized)
    alarms = sum(each.similarity > threshold.value for each in scores.ordinary)
    say(f"Detected: {hits} of {len(planted)} planted captions, and {alarms} of {len(scores.ordinary)} ordinary ones.")
    caption = max(scores.memorized, key=lambda score: score.similarity).prompt
    (localized,) = localize(
        original, [caption], measure_statistics(original, ordinary), threshold, LocalizationConfig(detection=_LOOK),
        ledger=work / "neurons.jsonl", progress=progress,
    )  # fmt: skip
    say(
        f"Localized {caption!r}, which looks most memorized: {localized.status}, {len(localized.neurons)} of 160 "
        "neurons."
    )
    deactivate(edited, localized.neurons)
    (chosen,) = (each for each in planted if each.caption == caption)
    pair = Pair(caption, caption, chosen.picture, chosen.kind)
    made, warnings = generate_before_and_after(
        {_ORIGINAL: original, _EDITED: edited}, [pair], ordinary[-_PAINTED:], localized.neurons,
        GenerationSettings(guidance=_GUIDANCE, steps=_STEPS), folder=work, seed=_SEED, progress=progress,
    )  # fmt: skip
    say(f"Switched off in the weights: {verdicts(made, ImagesConfig())[caption]}.")
    harden(
        hardened, [caption], chosen.picture[None], ordinary[:_KEPT], settings=HARDENING, folder=work / "hardening",
        progress=progress,
    )  # fmt: skip
    say(f"Hardened against the search, for this picture: {HARDENING.rounds} rounds of {HARDENING.steps} steps.")
    edited.save(work / _EDITED)
    hardened.save(work / _HARDENED)
    target = Target(caption, caption, chosen.picture)
    targets = (target, turned(target))
    comparison = compare(
        [Subject(model.name, model) for model in (original, edited, hardened)], targets, ordinary[:12],
        SearchSettings(
            steps=SEARCH_STEPS, restarts=1, draws=4, images=3, guidance=_GUIDANCE, generation_steps=_STEPS
        ),
        seeds=[_SEED], similarity=paired(), measure="NCC", folder=work, progress=progress,
    )  # fmt: skip
    difference = _difference(original, edited, localized)
    return _Found(
        scores, localized, difference, made, tuple(warnings), comparison, targets,
        _stayed(original, hardened, ordinary[-_PAINTED:]),
    )  # fmt: skip


def _stayed(original: TextToImage, hardened: TextToImage, prompts: Sequence[str]) -> Finding:
    """How alike ordinary prompts' images are before and after hardening, from the same seeds."""
    first, second = (
        generated(
            model, model.embed(prompts), range(len(prompts)), Batches(len(prompts)), guidance=_GUIDANCE, steps=_STEPS
        )
        for model in (original, hardened)
    )
    alike = paired()(second, first).tolist()
    return Finding(
        "NCC, ordinary prompts, the hardened model's images to the original's", sum(alike) / len(alike),
        ci95=bootstrap(alike, seed=_SEED).ci95, n=len(alike), better="higher", seeds=(_SEED,),
        detail={"values": alike},
    )  # fmt: skip


def _opened(name: str) -> PipelineModel:
    return load_text_to_image(SHAPES_FOLDER, dtype=torch.float32, name=name)


@torch.no_grad()
def _difference(original: TextToImage, edited: TextToImage, localized: Localization) -> float:
    """The largest difference of what hooks and weights make of a first prediction."""
    noise, text = original.initial_noise([0, 1]), original.embed([localized.prompt] * 2)
    timestep = original.timesteps(_LOOK.steps)[0]
    with deactivated(original.denoiser, localized.neurons):
        hooked = original.predict(noise, timestep, text).noise
    return float((hooked - edited.predict(noise, timestep, text).noise).abs().max())


def _equal(found: _Found) -> Finding:
    return Finding(
        "largest difference of a prediction, hooks against weights", found.largest_difference, better="lower",
        target=1e-6, n=2,
    )  # fmt: skip


def _weights() -> list[Path]:
    return sorted(SHAPES_FOLDER.glob("unet/*.safetensors"))
