"""How far directions of different attributes point the same way, by how many models they were found from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.methods.space.direction_fit import fit_direction
from netweight.methods.space.labels import Column, Labels
from netweight.report.finding import Finding

__all__ = ["Entanglement", "entanglement", "entanglement_findings"]

_TRIES = 20  # draws for one subsample that has both classes of every attribute


@final
@dataclass(frozen=True)
class Entanglement:
    """Directions found from subsamples of one size.

    Attributes:
        models: Size of a subsample.
        each: Of every subsample the mean of |cosine| over all pairs of attributes.
    """

    models: int
    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over subsamples."""
        return sum(self.each) / len(self.each)

    @property
    def middle(self) -> tuple[float, float]:
        """The middle 95 % of the subsamples."""
        ends = torch.tensor(self.each).double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
        return float(ends[0]), float(ends[1])


def entanglement(
    scores: Tensor,
    labels: Labels,
    columns: Sequence[str],
    sizes: Sequence[int],
    *,
    repeats: int = 20,
    kind: Literal["encoder", "decoder", "difference"] = "difference",
    fidelity: Literal["corrected", "reference"] = "corrected",
    seed: int = 0,
) -> list[Entanglement]:
    """Find directions from subsamples and take the cosines between them.

    The axes stay those of all models: what is seen is how many models directions need, not axes.

    Args:
        scores: Shape `(n, k)`.
        labels: Of the same models.
        columns: At least two attributes.
        sizes: Numbers of models, at most n.
        repeats: Subsamples of each size.
        kind: Of the directions; the joint regression of encoders would take attributes apart that go together.
        fidelity: "reference" for the directions of the authors' code.
        seed: Decides on the subsamples.

    Returns:
        One entry per size, in their order.

    Raises:
        UsageError: There are fewer than two attributes, a size is above n, or subsamples of it lack a class.

    Source: weights2weights, figure 8: mean absolute cosine between pairs of directions.
    """
    if len(columns) < 2 or not sizes or max(sizes) > len(scores) or min(sizes) < 4 or repeats < 1:
        raise UsageError(
            f"{len(columns)} attributes in subsamples of {list(sizes)} of {len(scores)} models cannot be compared.",
            cure="Give two attributes or more, and sizes from 4 to the number of models.",
        )
    found = []
    for size in sizes:
        draws = [_drawn(labels, columns, size, seed, number) for number in range(repeats if size < len(scores) else 1)]
        found.append(Entanglement(size, tuple(_mean_cosine(scores, labels, columns, d, kind, fidelity) for d in draws)))
    return found


def entanglement_findings(found: Sequence[Entanglement], *, attributes: int, seed: int = 0) -> list[Finding]:
    """Return one finding per number of models, the smallest number as their baseline.

    Args:
        found: What `entanglement` returned.
        attributes: Number of attributes compared.
        seed: That it was given.
    """
    first = found[0].mean
    return [
        Finding(
            f"mean |cos| between directions, {each.models} models",
            each.mean,
            ci95=each.middle if len(each.each) > 1 else None,
            n=len(each.each),
            better="lower",
            baseline=first,
            seeds=(seed,),
            detail={"attributes": attributes, "subsamples": len(each.each)},
        )
        for each in found
    ]


def _drawn(labels: Labels, columns: Sequence[str], size: int, seed: int, number: int) -> Tensor:
    """A subsample in which every attribute can be told."""
    generator = torch_generator(seed, "subsample", size, number)
    for _ in range(_TRIES):
        rows = torch.randperm(len(labels.names), generator=generator)[:size]
        parts = [Column(name, labels[name].values[rows]) for name in columns]
        if all(len(part.levels) > 1 and _counts(part) >= 2 for part in parts):
            return rows
    raise UsageError(f"Subsamples of {size} models lack a class of an attribute.", cure="Take larger ones.")


def _counts(column: Column) -> int:
    if column.kind == "continuous":
        return int(column.known.sum())
    return min(int((column.values == level).sum()) for level in column.levels)


def _mean_cosine(
    scores: Tensor,
    labels: Labels,
    columns: Sequence[str],
    rows: Tensor,
    kind: Literal["encoder", "decoder", "difference"],
    fidelity: Literal["corrected", "reference"],
) -> float:
    part = Labels(
        tuple(labels.names[row] for row in rows.tolist()),
        {name: Column(name, labels[name].values[rows]) for name in columns},
    )
    directions = [fit_direction(scores[rows], part, name, kind=kind, fidelity=fidelity, folds=0) for name in columns]
    cosines = [abs(one.cosine(other)) for one, other in itertools.combinations(directions, 2)]
    return sum(cosines) / len(cosines)
