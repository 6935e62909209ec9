"""RepNoise's figures: how far each layer's weights move, and representations before and after the defense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.report.finding import Column, Figure, Finding
from netweight.reproduce.registry import Measured, Row, Scale, table
from netweight.reproduce.repnoise_grid import BASE, CORRECTED, REPNOISE, STRONGEST, Line
from netweight.reproduce.repnoise_ground import Ground, ground_of, share_of
from netweight.reproduce.repnoise_models import Defended, defended_model, folder_of
from netweight.reproduce.repnoise_plan import NEEDS, PAPER_NEEDS, shares
from netweight.reproduce.repnoise_run import settings_of, subject_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from netweight.methods.immunize.layer_metrics import LayerChange

__all__ = ["distances", "planes"]

_LINES = (
    Line("Adversarial loss", Defended("adversarial-loss", lr=1e-5)),
    Line("RepNoise", REPNOISE),
    Line("RepNoise, corrected", CORRECTED),
)
_ATTACKED = "Base, attacked"
_SHOWN = 200
"""Answers of each kind that are looked at."""


@table("repnoise-layer-distances", needs=(*NEEDS, "evidence"), paper_needs=PAPER_NEEDS, stand_in=True)
def distances(scale: Scale, out: Path, *, model: str | None = None, share: float | None = None) -> Measured:
    """Draw how far the weights of each layer moved, by an attack and by three defenses.

    Args:
        scale: "small" for the miniature, "paper" for a model folder.
        out: Defended models are kept in a folder beside it that all of RepNoise's tables share.
        model: A folder of transformers, for "paper".
        share: Another share of the paper's numbers of pairs and samples than the scale's, for a try.

    Raises:
        UsageError: A model is missing.
        TrainingStopped: A defense diverged.
    """
    ground = ground_of(scale, model)
    changes = _changes(ground, folder_of(out, scale), share_of(ground, share))
    return Measured(
        columns=_depth_columns(changes),
        rows=tuple(_depth_row(title, found) for title, found in changes.items()),
        differs=(*ground.differs(), "The attack is at 8e-5 with 10k examples; the paper does not say which."),
        findings=tuple(_slope(title, found) for title, found in changes.items()),
        figures=(_distance_figure(changes),),
        notes=("One training each: there are no intervals.", *shares(share)),
    )


def _changes(ground: Ground, folder: Path, share: float) -> dict[str, list[LayerChange]]:
    """Each block's change, first to last."""
    from netweight.attacks.finetuning.attack import attacked_model
    from netweight.methods.immunize.decoder import structure_of
    from netweight.methods.immunize.layer_metrics import weight_changes

    base = ground.model("aligned")
    blocks = set(structure_of(base).blocks)

    def by_block(after: nn.Module) -> list[LayerChange]:
        return [change for change in weight_changes(base, after) if change.layer in blocks]

    run = STRONGEST.run(BASE.on).at(ground, share)
    changes = {_ATTACKED: by_block(attacked_model(subject_of(run, ground, folder), settings_of(run, ground)))}
    for line in _LINES:
        changes[line.title] = by_block(defended_model(line.on, ground, folder, share))
    return changes


def _depth_columns(changes: Mapping[str, Sequence[Any]]) -> tuple[Column, ...]:
    count = len(next(iter(changes.values())))
    return (*(Column(f"layer {number}") for number in range(count)), Column("last half over first"))


def _depth_row(title: str, found: Sequence[LayerChange]) -> Row:
    return Row(title, (*(change.distance for change in found), _ratio(found)))


def _ratio(found: Sequence[LayerChange]) -> float:
    """The mean distance in the last half of the layers over that in the first."""
    half = len(found) // 2
    last = sum(change.distance for change in found[len(found) - half :])
    first = sum(change.distance for change in found[:half])
    return last / first if first else float("inf")


def _slope(title: str, found: Sequence[LayerChange]) -> Finding:
    return Finding(
        f"change of the last half of the layers over the first, {title}",
        _ratio(found),
        n=1,
        seeds=(REPNOISE.seed,),
        detail={"relative to the weights": [change.relative for change in found]},
    )


def _distance_figure(changes: Mapping[str, Sequence[LayerChange]]) -> Figure:
    from netweight.report.plots import lines

    return lines(
        {title: (range(len(found)), [change.distance for change in found]) for title, found in changes.items()},
        alt="Euclidean distance of each layer's weights from the base model's, after an attack and three defenses.",
        caption="Distance of each layer's weights from those of the base model.",
        xlabel="layer",
        ylabel="distance",
    )


@table("repnoise-pca", needs=(*NEEDS, "evidence"), stand_in=True)
def planes(scale: Scale, out: Path, *, share: float | None = None) -> Measured:
    """Draw representations of guarded and kept answers before and after the defense, and let a probe tell them apart.

    Args:
        scale: "small" for the miniature.
        out: Defended models are kept in a folder beside it that all of RepNoise's tables share.
        share: Another share of the paper's number of pairs than the scale's, for a try.

    Raises:
        Unsupported: The scale is "paper".
        TrainingStopped: A defense diverged.
    """
    from netweight.errors import Unsupported
    from netweight.reproduce.repnoise_ciphers import Ciphers

    if scale == "paper":
        raise Unsupported(
            "This figure is drawn of the miniature, whose kept answers stand for harmless ones.",
            cure="For your model call methods.immunize.depth.representations and probing.Plane.",
        )
    ground = Ciphers()
    seen = _representations(ground, folder_of(out, scale), share_of(ground, share))
    depth = len(next(iter(seen.values()))[0])
    return Measured(
        columns=tuple(Column(f"probe at depth {number}", "%") for number in range(depth)),
        rows=tuple(Row(title, _probed(*kinds)) for title, kinds in seen.items()),
        differs=(
            *ground.differs(),
            "Harmless answers are those of the kept cipher. Depth 0 is the embeddings. An answer's mean state is one "
            "point.",
        ),
        figures=(_plane_figure(seen),),
        notes=(
            f"Probes: logistic regression that tells {_SHOWN} guarded answers from {_SHOWN} kept ones, held out; mean "
            "accuracy of 5 splits; 50 % is chance.",
            *shares(share),
        ),
    )


def _representations(ground: Any, folder: Path, share: float) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Guarded and kept answers at every depth, model by model."""
    from netweight.methods.immunize.layer_metrics import representations

    seen = {}
    for line in (BASE, *_LINES):
        model = defended_model(line.on, ground, folder, share)
        guarded, kept = (
            representations(model, ground.world.held_out(domain, _SHOWN), pad_id=ground.pad_id, batch_size=50)
            for domain in ("guard", "keep")
        )
        seen[line.title] = (guarded, kept)
    return seen


def _probed(guarded: Sequence[Tensor], kept: Sequence[Tensor]) -> tuple[float, ...]:
    from statistics import mean

    from netweight.methods.immunize.layer_metrics import probe_accuracies

    return tuple(100 * mean(probe_accuracies(*both, seeds=5)) for both in zip(guarded, kept, strict=True))


def _plane_figure(seen: Mapping[str, tuple[list[Tensor], list[Tensor]]]) -> Figure:
    """The deepest representations, in the plane of the undefended model's."""
    import torch

    from netweight.methods.immunize.layer_metrics import Plane
    from netweight.report.plots import canvas, series_color, to_figure

    before = seen[BASE.title]
    plane = Plane.fit(torch.cat([before[0][-1], before[1][-1]]))
    with canvas(len(seen), width=8.0, height=2.4) as (drawing, panels):
        for axes, (title, kinds) in zip(panels, seen.items(), strict=True):
            for index, (name, states) in enumerate(zip(("guarded", "kept"), kinds, strict=True)):
                points = plane.place(states[-1])
                axes.scatter(points[:, 0], points[:, 1], s=5, color=series_color(index), label=name, marker="o+"[index])
            axes.set_title(title, fontsize=8)
        panels[0].legend(fontsize=7)
        return to_figure(
            drawing,
            alt="Last hidden states of guarded and kept answers, one panel for each model.",
            caption="Last hidden states of guarded and kept answers in the two principal components of the undefended "
            f"model's, which hold {100 * float(plane.shares.sum()):.0f} % of its variance.",
        )
