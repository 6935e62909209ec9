"""The stop of `space`: a few hundred adapters of a tiny pipeline as one space; edited, sampled, and inverted into.

A miniature with drawn faces, and a small one of these: it shows what is measured and how, and proves nothing of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET
from netweight.hf.load_pipeline import PipelineModel, text_to_image, trained_prediction
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import COST_TARGET, EditCurve, Move, agreement, curve_findings, edit, edit_curve
from netweight.methods.space.inversion import InversionTask, Target, generate_images, invert_targets
from netweight.methods.space.labels import Labels, read_labels
from netweight.methods.space.points import Direction, nearest
from netweight.methods.space.report import SampleSubject, sample_findings
from netweight.methods.space.sampling import KernelSampler
from netweight.methods.space.settings import InversionSettings
from netweight.methods.space.space import WeightSpace
from netweight.report.conclusions import Conclusion, Criterion, Words
from netweight.report.finding import Chapter, Figure, Finding
from netweight.report.plots import image_grid
from netweight.report.report import Report
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.files import export_adapter, read_adapter
from netweight.tour.stop import Place, Stop, handed_over
from netweight.toys.faces import ATTRIBUTES, GROUNDS, caption
from netweight.toys.faces_pipeline import FACES_BANK, FACES_FOLDER, FACES_LABELS, FaceBank, faces_pipeline, read

# The default is 400.
INVERSION_STEPS = 150
_TITLE = "A space of adapters"
_FOLDERS = {"an edited person, whole": "edited-person", "an edited person, rank 4": "edited-person-small"}
_COLUMN, _STRENGTHS = "beard", (1.0, 2.0, 3.0)
_PEOPLE, _SAMPLES, _SHOWN = 8, 24, 5
_SEED, _STRANGERS, _STEPS = 0, 977, 15
_CAPTIONS = [caption(ground) for ground in GROUNDS]
_INVERTED = "attributes of the inverted person, mean error as a share of their range"


def _judged(edited: bool, new: bool, inverted: bool) -> Words:
    works = [name for name, good in (("editing", edited), ("sampling", new)) if good]
    fails = [name for name, good in (("editing", edited), ("sampling", new)) if not good]
    words = f"{' and '.join(works).capitalize()} work{'s' * (len(works) == 1)} on this miniature; " if works else ""
    words += f"{' and '.join(fails)} did not work; " if fails else ""
    words += (
        "one image is inverted into somebody more alike than the mean."
        if inverted
        else "inversion is no better than the mean person."
    )
    return "partly" if fails or not inverted else "holds", words[0].upper() + words[1:]


_VERDICT = Conclusion(
    "tour: space",
    [  # an edit moves its attribute by more than all others; most samples are nobody in the bank
        Criterion(
            f"effect of {_COLUMN} by encoder at a cost of {COST_TARGET}", "higher", than=COST_TARGET, strict=True
        ),
        Criterion("samples that copy a training model", "lower", than=0.5),
        Criterion(_INVERTED, "lower", strict=True),
    ],
    _judged,
)


@final
@dataclass(frozen=True, eq=False)
class _World:
    """The pipeline, the bank's space, and its labels."""

    model: PipelineModel
    space: WeightSpace
    labels: Labels

    def generate(self, scores: Tensor) -> Tensor:
        seeds = range(len(_CAPTIONS))
        return generate_images(self.model, self.space, scores, _CAPTIONS, seeds, guidance=1.0, steps=_STEPS)

    def read(self, scores: Tensor) -> Tensor:
        """Attributes of points, the mean over their images."""
        images = self.generate(scores)
        return _attributes(images.flatten(0, 1)).view(len(scores), len(_CAPTIONS), -1).mean(1)


def settings() -> Mapping[str, Any]:
    """Return what decides the stop's result."""
    return {
        "steps": INVERSION_STEPS, "column": _COLUMN, "strengths": _STRENGTHS, "people": _PEOPLE, "samples": _SAMPLES,
        "seeds": [_SEED, _STRANGERS], "generation": _STEPS,
    }  # fmt: skip


def make_stop(place: Place) -> Stop:
    """Fit the space of the bank in the package, edit along a direction, sample, invert an image, and export."""
    world, report = _opened(place.say), Report("space")
    edited = _edited(world, place, report)
    sampled = _sampled(world, place.say, report)
    apart, usual = _inverted(world, place, report)
    inputs = {"faces, bank": world.space.bank_digest, "faces, pipeline": world.model.digest()}
    outcome, verdict = _VERDICT(report.findings)
    chapter = Chapter(
        title="space: hundreds of adapters as one space",
        question="Can people be edited, made up and found in a space of adapters, with no model trained anew?",
        conclusion=f"{edited} {sampled} {_said_of_inversion(apart, usual)}",
        verdict=verdict,
        outcome=outcome,
        command="netweight tour --only space",
        intro="256 adapters of a pipeline that draws faces, each trained on one made-up person, are fitted as one "
        "space. A direction of it is a property, a point is a person. A miniature: it proves nothing of real faces.",
    )
    shares = ("samples that copy a training model", "precision of samples", "recall of samples")
    return handed_over(report, chapter, seeds=(_SEED,), shares=shares, inputs=inputs, models=_FOLDERS)


def _said_of_inversion(apart: float, usual: float) -> str:
    return f"Inverted one image of a stranger: off by {apart:.2f} of attributes' ranges, the mean model by {usual:.2f}."


def _opened(say: Callable[[str], None]) -> _World:
    bank = AdapterBank.open(FACES_BANK)
    bank.verify()
    space = WeightSpace.fit(bank, halves=False)
    say(f"A miniature: {len(bank)} adapters of a pipeline that draws faces; checked, and fitted as one space.")
    return _World(text_to_image(faces_pipeline(FACES_FOLDER)), space, read_labels(FACES_LABELS, space.names))


def _attributes(images: Tensor) -> Tensor:
    return read(images).attributes


def _edited(world: _World, place: Place, report: Report) -> str:
    """A direction, edits along it, and one of them as an adapter's file; what came of it, in words."""
    space, labels = world.space, world.labels
    others = [name for name in ATTRIBUTES if name != _COLUMN]
    direction = fit_direction(space.scores, labels, _COLUMN, confounders=others)
    rows = (labels[_COLUMN].values < 0).nonzero()[:_PEOPLE, 0]
    kept = agreement(lambda images: read(images).ground, "prompt")
    curve = edit_curve(
        world.generate, _attributes, space.scores[rows], direction, names=ATTRIBUTES, ranges=[2.0] * len(ATTRIBUTES),
        strengths=_STRENGTHS, compare=dict([kept]),
    )  # fmt: skip
    effect = float(curve.effects[-1].mean())
    told = (
        f"Edited {_PEOPLE} people along {_COLUMN!r}: by {effect:.2f} of its range, others by "
        f"{float(curve.costs[-1].mean()):.2f} of theirs."
    )
    place.say(told)
    figure = _row_by_strength(world, curve, direction, rows)
    point = edit(space.scores[rows[0]], [Move(direction, _STRENGTHS[-1], "reach")])
    findings = [*direction.findings, *_without_targets(curve_findings(curve, kept=kept[0])),
                *_exported(space, point, place.folder)]  # fmt: skip
    report.section(
        f"{_TITLE}: edits", findings, figures=[figure], conclusion=told,
        question="What does a direction change, and what else?",
        intro="A direction is found from adapters and labels, other attributes held; people without a beard are moved "
        "along it, and a network reads what that does to their images. Strengths are multiples of the farthest model.",
    )  # fmt: skip
    return told


def _row_by_strength(world: _World, curve: EditCurve, direction: Direction, rows: Tensor) -> Figure:
    strengths = curve.strengths.tolist()
    points = torch.stack([
        edit(world.space.scores[rows[:3]], [Move(direction, strength, "reach")]) for strength in strengths
    ], 1)  # fmt: skip
    images = world.generate(points.flatten(0, 1))
    images = images.reshape(len(points), len(strengths), *images.shape[1:])
    return image_grid(
        [[each[0].permute(1, 2, 0) for each in row] for row in images],
        rows=[world.space.names[row] for row in rows[:3].tolist()],
        columns=["before" if not strength else f"{strength:g} × reach" for strength in strengths],
        alt="Three people, moved farther and farther along the direction of beards.",
        caption=f"Moved along {_COLUMN!r}; the same noise everywhere.", pixels=64,
    )  # fmt: skip


def _exported(space: WeightSpace, point: Tensor, models: Path) -> list[Finding]:
    """An edited person as files, whole and at rank 4, and read again."""
    whole = export_adapter(space.adapter(point), models / "edited-person")
    small = export_adapter(space.adapter(point), models / "edited-person-small", rank=4)
    again = read_adapter(whole.path)
    meant = space.changes(point)
    apart = max(float((again.factors[name].dense() - change).abs().max()) for name, change in meant.items())
    return [
        Finding("an edited person exported and read again: largest difference", apart, better="lower", target=1e-4),
        Finding("the same at rank 4: relative error of the change", small.relative_error, better="lower"),
    ]


def _sampled(world: _World, say: Callable[[str], None], report: Report) -> str:
    """New people, beside those in the bank who are nearest to them; what came of it, in words."""
    space = world.space
    points = KernelSampler.fit(space.scores).draw(_SAMPLES, seed=_SEED)
    subject = SampleSubject(points, space.scores, world.read(points), world.read(space.scores[:_SAMPLES]), ATTRIBUTES)
    findings = sample_findings(subject, None, seed=_SEED, progress=QUIET)
    told = f"Sampled {_SAMPLES} people: their attributes spread {findings[0].value:.2f} as far as trained people's."
    say(told)
    near = [found[0] for found in nearest(points[:_SHOWN], space.scores, space.names, count=1)]
    both = world.generate(torch.cat([points[:_SHOWN], space.scores[[each.number for each in near]]]))
    figure = image_grid(
        [[each[0].permute(1, 2, 0) for each in part] for part in (both[:_SHOWN], both[_SHOWN:])],
        rows=["sampled", "nearest in the bank"], columns=[f"cosine {each.cosine:.2f}" for each in near],
        alt="Sampled people above the trained people nearest to them.",
        caption="People who were never trained, and whom they are nearest to.", pixels=64,
    )  # fmt: skip
    report.section(
        f"{_TITLE}: samples", _without_targets(findings), figures=[figure], conclusion=told,
        question="Are people who are made up new, and as different as real ones?",
        intro="Points drawn near training models, spread as they are. Attributes are read from images.",
    )  # fmt: skip
    return told


def _inverted(world: _World, place: Place, report: Report) -> tuple[float, float]:
    """One image of a stranger into the space; how far off it is, and the mean model."""
    strangers = FaceBank(seed=_STRANGERS)
    prompts, images = strangers.photographs(0)
    truth = strangers.faces([0])
    settings = InversionSettings(steps=INVERSION_STEPS)
    task = InversionTask(prompts[0], settings, said=trained_prediction(world.model), draws=strangers.each, seed=_SEED)
    found = invert_targets(
        world.model, world.space, [Target("stranger", images[:1])], task, ledger=place.folder / "inversions.jsonl",
        progress=place.progress,
    )  # fmt: skip
    apart = float((world.read(found.scores) - truth).abs().mean() / 2)
    usual = float((world.read(torch.zeros_like(found.scores)) - truth).abs().mean() / 2)
    place.say(_said_of_inversion(apart, usual))
    painted = world.generate(found.scores)[0]
    figure = image_grid(
        [[images[0].permute(1, 2, 0), *(each.permute(1, 2, 0) for each in painted)]],
        rows=["a stranger"], columns=["the image", *GROUNDS],
        alt="An image of a stranger, and images of the point that it was inverted into.",
        caption="The image that was inverted, and what its point draws on each ground.", pixels=64,
    )  # fmt: skip
    finding = Finding(
        _INVERTED, apart, n=1, better="lower",
        baseline=usual, seeds=(_SEED,),
        detail={"steps": INVERSION_STEPS, "distance from the mean": found.origin["distances"]["stranger"]},
    )  # fmt: skip
    report.section(
        f"{_TITLE}: inversion", [finding], figures=[figure], conclusion=_said_of_inversion(apart, usual),
        question="Whose model draws this image?",
        intro="A point is sought whose model denoises one image of somebody who is in no bank. The baseline is the "
        "mean model. One person: no measurement of inversion.",
    )  # fmt: skip
    return apart, usual


def _without_targets(findings: list[Finding]) -> list[Finding]:
    """As targets are for banks of a thousand people, and for more images than a tour paints."""
    return [replace(each, target=None) for each in findings]
