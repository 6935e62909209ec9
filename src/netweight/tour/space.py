"""The stop of `space`: a few hundred adapters of a tiny pipeline as one space; edited, sampled, and inverted into.

A miniature with drawn faces, and a small one of these: it shows what is measured and how, and proves nothing of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.evidence.figures import Figure, image_grid
from netweight.evidence.finding import Finding
from netweight.evidence.report import Report
from netweight.integrations.diffusion_pipeline import PipelineModel, text_to_image
from netweight.integrations.trained_prediction import trained_prediction
from netweight.methods.space.audit import SampleSubject, sample_findings
from netweight.methods.space.comparisons import agreement
from netweight.methods.space.direction_fit import fit_direction
from netweight.methods.space.directions import Direction
from netweight.methods.space.edit_curves import EditCurve, curve_findings, edit_curve
from netweight.methods.space.edits import Move, edit
from netweight.methods.space.exporting import export_adapter
from netweight.methods.space.inversion import InversionSettings
from netweight.methods.space.inversion_runs import InversionTask, Target, invert_targets
from netweight.methods.space.labels import Labels, read_labels
from netweight.methods.space.method import WeightSpace
from netweight.methods.space.neighbors import nearest
from netweight.methods.space.painting import paint
from netweight.methods.space.sampling import KernelSampler
from netweight.store.adapter_bank import AdapterBank
from netweight.store.adapter_files import read_adapter
from netweight.tour.stop import Stop
from netweight.zoo.drawn_faces import ATTRIBUTES, GROUNDS, caption
from netweight.zoo.face_bank import FACES_BANK, FACES_LABELS, FaceBank
from netweight.zoo.face_reading import read
from netweight.zoo.faces_diffusion import FACES_FOLDER, faces_pipeline

__all__ = ["INVERSION_STEPS", "space_stop"]

INVERSION_STEPS = 150
"""Of the inversion; the default is 400."""
_TITLE = "A space of adapters, a miniature"
_COLUMN, _STRENGTHS = "beard", (1.0, 2.0, 3.0)
_PEOPLE, _SAMPLES, _SHOWN = 8, 24, 5
_SEED, _STRANGERS, _STEPS = 0, 977, 15
_CAPTIONS = [caption(ground) for ground in GROUNDS]


@final
@dataclass(frozen=True, eq=False)
class _World:
    """The pipeline, the bank's space, and its labels."""

    model: PipelineModel
    space: WeightSpace
    labels: Labels

    def paint(self, scores: Tensor) -> Tensor:
        return paint(self.model, self.space, scores, _CAPTIONS, range(len(_CAPTIONS)), guidance=1.0, steps=_STEPS)

    def read(self, scores: Tensor) -> Tensor:
        """Attributes of points, the mean over their images."""
        images = self.paint(scores)
        return _attributes(images.flatten(0, 1)).view(len(scores), len(_CAPTIONS), -1).mean(1)


def space_stop(models: Path, progress: Progress, say: Callable[[str], None]) -> Stop:
    """Fit the space of the bank in the package, edit along a direction, sample, invert an image, and export.

    Args:
        models: A folder for what is made.
        progress: Where progress is shown.
        say: Is told what was done.
    """
    world = _opened(say)
    sections = [_edited(world, models, say), _sampled(world, say), _inverted(world, models, progress, say)]
    inputs = {"faces, bank": world.space.bank_digest, "faces, pipeline": world.model.digest()}
    return Stop(tuple(sections), inputs)


def _opened(say: Callable[[str], None]) -> _World:
    bank = AdapterBank.open(FACES_BANK)
    bank.verify()
    space = WeightSpace.fit(bank, halves=False)
    say(f"A miniature: {len(bank)} adapters of a pipeline that draws faces; checked, and fitted as one space.")
    return _World(text_to_image(faces_pipeline(FACES_FOLDER)), space, read_labels(FACES_LABELS, space.names))


def _attributes(images: Tensor) -> Tensor:
    return read(images).attributes


def _edited(world: _World, models: Path, say: Callable[[str], None]) -> Callable[[Report], object]:
    """A direction, edits along it, and one of them as an adapter's file."""
    space, labels = world.space, world.labels
    others = [name for name in ATTRIBUTES if name != _COLUMN]
    direction = fit_direction(space.scores, labels, _COLUMN, confounders=others)
    rows = (labels[_COLUMN].values < 0).nonzero()[:_PEOPLE, 0]
    kept = agreement(lambda images: read(images).ground, "prompt")
    curve = edit_curve(
        world.paint, _attributes, space.scores[rows], direction, names=ATTRIBUTES, ranges=[2.0] * len(ATTRIBUTES),
        strengths=_STRENGTHS, compare=dict([kept]),
    )  # fmt: skip
    effect = float(curve.effects[-1].mean())
    say(
        f"Edited {_PEOPLE} people along {_COLUMN!r}: by {effect:.2f} of its range, others by "
        f"{float(curve.costs[-1].mean()):.2f} of theirs."
    )
    figure = _row_by_strength(world, curve, direction, rows)
    point = edit(space.scores[rows[0]], [Move(direction, _STRENGTHS[-1], "reach")])
    findings = [*direction.findings, *_without_targets(curve_findings(curve, kept=kept[0])),
                *_exported(space, point, models)]  # fmt: skip
    return lambda report: report.section(
        f"{_TITLE}: edits", findings, figures=[figure],
        intro="A direction is found from adapters and labels, other attributes held; people without a beard are moved "
        "along it, and a network reads what that does to their images. Strengths are multiples of the farthest model.",
    )  # fmt: skip


def _row_by_strength(world: _World, curve: EditCurve, direction: Direction, rows: Tensor) -> Figure:
    strengths = curve.strengths.tolist()
    points = torch.stack([
        edit(world.space.scores[rows[:3]], [Move(direction, strength, "reach")]) for strength in strengths
    ], 1)  # fmt: skip
    images = world.paint(points.flatten(0, 1))
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


def _sampled(world: _World, say: Callable[[str], None]) -> Callable[[Report], object]:
    space = world.space
    points = KernelSampler.fit(space.scores).draw(_SAMPLES, seed=_SEED)
    subject = SampleSubject(points, space.scores, world.read(points), world.read(space.scores[:_SAMPLES]), ATTRIBUTES)
    findings = sample_findings(subject, None, seed=_SEED, progress=QUIET)
    say(f"Sampled {_SAMPLES} people: their attributes spread {findings[0].value:.2f} as far as trained people's.")
    near = [found[0] for found in nearest(points[:_SHOWN], space.scores, space.names, count=1)]
    both = world.paint(torch.cat([points[:_SHOWN], space.scores[[each.number for each in near]]]))
    figure = image_grid(
        [[each[0].permute(1, 2, 0) for each in part] for part in (both[:_SHOWN], both[_SHOWN:])],
        rows=["sampled", "nearest in the bank"], columns=[f"cosine {each.cosine:.2f}" for each in near],
        alt="Sampled people above the trained people nearest to them.",
        caption="People who were never trained, and whom they are nearest to.", pixels=64,
    )  # fmt: skip
    return lambda report: report.section(
        f"{_TITLE}: samples", _without_targets(findings), figures=[figure],
        intro="Points drawn near training models, spread as they are. Attributes are read from images.",
    )  # fmt: skip


def _inverted(
    world: _World, models: Path, progress: Progress, say: Callable[[str], None]
) -> Callable[[Report], object]:
    """One image of a stranger into the space."""
    strangers = FaceBank(seed=_STRANGERS)
    prompts, images = strangers.photographs(0)
    truth = strangers.faces([0])
    settings = InversionSettings(steps=INVERSION_STEPS)
    task = InversionTask(prompts[0], settings, said=trained_prediction(world.model), draws=strangers.each, seed=_SEED)
    found = invert_targets(
        world.model, world.space, [Target("stranger", images[:1])], task, ledger=models / "inversions.jsonl",
        progress=progress,
    )  # fmt: skip
    apart = (world.read(found.scores) - truth).abs().mean() / 2
    usual = (world.read(torch.zeros_like(found.scores)) - truth).abs().mean() / 2
    say(f"Inverted one image of a stranger: off by {apart:.2f} of attributes' ranges, the mean model by {usual:.2f}.")
    painted = world.paint(found.scores)[0]
    figure = image_grid(
        [[images[0].permute(1, 2, 0), *(each.permute(1, 2, 0) for each in painted)]],
        rows=["a stranger"], columns=["the image", *GROUNDS],
        alt="An image of a stranger, and images of the point that it was inverted into.",
        caption="The image that was inverted, and what its point draws on each ground.", pixels=64,
    )  # fmt: skip
    finding = Finding(
        "attributes of the inverted person, mean error as a share of their range", float(apart), n=1, better="lower",
        baseline=float(usual), seeds=(_SEED,),
        detail={"steps": INVERSION_STEPS, "distance from the mean": found.origin["distances"]["stranger"]},
    )  # fmt: skip
    return lambda report: report.section(
        f"{_TITLE}: inversion", [finding], figures=[figure],
        intro="A point is sought whose model denoises one image of somebody who is in no bank. The baseline is the "
        "mean model. One person: no measurement of inversion.",
    )  # fmt: skip


def _without_targets(findings: list[Finding]) -> list[Finding]:
    """As targets are for banks of a thousand people, and for more images than a tour paints."""
    return [replace(each, target=None) for each in findings]
