"""The stop of `forget`: a tiny model that repeats pictures; one of them is found, switched off, and searched for.

A miniature with one prompt and one seed of the search, to show what is measured and how; it proves nothing of large
models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from netweight.attacks.embedding_search.comparison import Comparison, Subject, Target, compare, turned
from netweight.attacks.embedding_search.findings import Wanted, verdict
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.attacks.embedding_search.showing import add_section
from netweight.attacks.embedding_search.similarity import paired
from netweight.core import digest
from netweight.core.progress import Progress
from netweight.evidence.document import SectionDocument
from netweight.evidence.finding import Finding
from netweight.evidence.report import Report
from netweight.methods.forget.audit import DETECTION, IMAGES, NEURONS, SEARCH, DetectionSubject
from netweight.methods.forget.config import DetectionConfig, LocalizationConfig
from netweight.methods.forget.deactivation import deactivated
from netweight.methods.forget.detection import calibrate, detect, look_of
from netweight.methods.forget.edit_record import apply_edit_
from netweight.methods.forget.images import ImagesConfig, verdicts
from netweight.methods.forget.method import localize
from netweight.methods.forget.painting import Painted, PaintSettings
from netweight.methods.forget.results import Localization
from netweight.methods.forget.showing import add_finding_sections, add_images_section, attacked_images
from netweight.methods.forget.statistics import measure_statistics
from netweight.probe.diffusion import TextToImage
from netweight.tour.stop import Stop
from netweight.zoo.captioned_shapes import ShapesWorld
from netweight.zoo.forget_audit import pictured
from netweight.zoo.memorized_pairs import Pair
from netweight.zoo.small_diffusion import SHAPES_FOLDER

__all__ = ["SEARCH_STEPS", "forget_stop"]

SEARCH_STEPS = 40
"""Most steps of a search."""
_SEED, _ORDINARY, _PAINTED = 0, 48, 8
_GUIDANCE, _STEPS = 3.0, 10  # of every generation
_LOOK = DetectionConfig(tuple(range(6)))
_TITLE = "Forgotten, a miniature"


@final
@dataclass(frozen=True)
class _Found:
    """What the stop found out, in its order."""

    scores: DetectionSubject
    localized: Localization
    largest_difference: float
    painted: Painted
    warnings: tuple[str, ...]
    comparison: Comparison
    targets: tuple[Target, ...]


def forget_stop(models: Path, progress: Progress, say: Callable[[str], None]) -> Stop:
    """Find a planted picture's prompt and neurons, switch them off, look at images, and search for embeddings.

    Args:
        models: A folder for what is made.
        progress: Where progress is shown.
        say: Is told what was done.
    """
    work = models / "forget"
    found = _found(work, progress, say)
    told = {name: verdict(found.comparison, name) for name in found.comparison.subjects}
    say(f"Searched for other embeddings, at most {SEARCH_STEPS} steps. Edited: {told['edited']}")
    inputs = {f"shapes, {name.relative_to(SHAPES_FOLDER)}": digest.of_file(name) for name in _weights()}
    return Stop(tuple(map(_including, _told(found, work))), inputs)


def _including(section: SectionDocument) -> Callable[[Report], object]:
    return lambda report: report.include(section)


def _told(found: _Found, work: Path) -> tuple[SectionDocument, ...]:
    """The sections of the report, made while the images still lie in their folder."""
    report = Report(_TITLE)
    add_images_section(
        report, found.painted, ImagesConfig(), seed=_SEED, title=f"{_TITLE}: images before and after",
        attacked=attacked_images(found.comparison, "edited", work), warnings=found.warnings,
        audits=(DETECTION, NEURONS, IMAGES, SEARCH),
    )  # fmt: skip
    add_section(
        report, found.comparison, found.targets, Wanted("original", "edited"), folder=work, seed=_SEED,
        title=f"{_TITLE}: the search for other embeddings",
    )  # fmt: skip
    add_finding_sections(report, found.scores, [found.localized], title=f"{_TITLE}: ")
    report.section(f"{_TITLE}: weights and hooks", [_equal(found)], intro=_SAME)
    return report.document().sections


_SAME = (
    "Neurons are switched off by a hook for a block, or for good by rows of zeros in the weights. Both must compute "
    "the same."
)


def _found(work: Path, progress: Progress, say: Callable[[str], None]) -> _Found:
    original, edited = _opened("original"), _opened("edited")
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
        original, [caption], measure_statistics(original, ordinary), threshold, LocalizationConfig(_LOOK),
        ledger=work / "neurons.jsonl", progress=progress,
    )  # fmt: skip
    say(
        f"Localized {caption!r}, which looks most memorized: {localized.status}, {len(localized.neurons)} of 160 "
        "neurons."
    )
    apply_edit_(edited, localized.neurons)
    (chosen,) = (each for each in planted if each.caption == caption)
    pair = Pair(caption, caption, chosen.picture, chosen.kind)
    painted, warnings = pictured(
        {"original": original, "edited": edited}, [pair], ordinary[-_PAINTED:], localized.neurons,
        PaintSettings(guidance=_GUIDANCE, steps=_STEPS), folder=work, seed=_SEED, progress=progress,
    )  # fmt: skip
    say(f"Switched off in the weights: {verdicts(painted, ImagesConfig())[caption]}.")
    target = Target(caption, caption, chosen.picture)
    targets = (target, turned(target))
    comparison = compare(
        [Subject("original", original), Subject("edited", edited)], targets, ordinary[:12],
        SearchSettings(
            steps=SEARCH_STEPS, restarts=1, draws=4, images=3, guidance=_GUIDANCE, generation_steps=_STEPS
        ),
        seeds=[_SEED], similarity=paired(), measure="NCC", folder=work, progress=progress,
    )  # fmt: skip
    difference = _difference(original, edited, localized)
    return _Found(scores, localized, difference, painted, tuple(warnings), comparison, targets)


def _opened(name: str) -> TextToImage:
    from netweight.integrations.diffusion_pipeline import load_text_to_image

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
