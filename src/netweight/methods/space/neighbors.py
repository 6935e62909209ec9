"""The training models nearest to points of a space, by the change of weights that lies between them.

Axes of a space are orthonormal, so distances of scores are distances of the changes ΔW (within the space), and cosines
are taken of what each model adds to the mean model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError

__all__ = ["Measure", "Neighbor", "nearest", "nearest_distances", "row_of"]

Measure: TypeAlias = Literal["cosine", "distance"]

_AT_ONCE = 1024


@final
@dataclass(frozen=True)
class Neighbor:
    """A training model near a point.

    Attributes:
        name: The model.
        number: Its row in the space.
        cosine: Of the angle between what the two add to the mean model; NaN for the mean model, which has no direction.
        distance: Norm of the difference of the two changes.
    """

    name: str
    number: int
    cosine: float
    distance: float


def nearest(
    points: Tensor, scores: Tensor, names: Sequence[str], *, count: int = 5, measure: Measure = "cosine"
) -> list[list[Neighbor]]:
    """Find the training models nearest to points.

    Args:
        points: Shape `(b, k)` or `(k,)`.
        scores: Of the training models, shape `(n, k)`.
        names: Of the training models.
        count: How many; all models if there are fewer.
        measure: Which are nearest: those of the highest cosine, or of the least distance.

    Returns:
        For each point its neighbors, the nearest first. A training model is its own nearest one.

    Raises:
        UsageError: The numbers of components or names do not fit, or a value is not finite.
    """
    points = points.detach().double().cpu().reshape(-1, points.shape[-1])
    scores = scores.detach().double().cpu()
    if points.shape[1] != scores.shape[1] or len(names) != len(scores):
        raise UsageError(
            f"Points of {points.shape[1]} components came with {len(scores)} models of {scores.shape[1]} "
            f"and {len(names)} names.",
            cure="Give points, scores and names of one space.",
        )
    if not points.isfinite().all():
        raise UsageError("A point holds NaN or infinity.", cure="Did an inversion diverge? Look at its losses.")
    if measure not in ("cosine", "distance"):
        raise UsageError(f"There is no measure {measure!r}.", cure="Use cosine or distance.")
    center = scores.mean(0)
    cosines = torch.nn.functional.normalize(points - center) @ torch.nn.functional.normalize(scores - center).T
    apart = _apart(points, scores)
    order = (-cosines if measure == "cosine" else apart).argsort(dim=1, stable=True)[:, :count]
    undirected = (points - center).norm(dim=1) <= 1e-6 * (scores - center).norm(dim=1).mean()
    return [
        [
            Neighbor(names[at], at, float("nan") if undirected[row] else float(cosines[row, at]), float(apart[row, at]))
            for at in chosen
        ]
        for row, chosen in enumerate(order.tolist())
    ]


def nearest_distances(points: Tensor, others: Tensor | None = None, *, rank: int = 1) -> Tensor:
    """Return how far each point is from its nearest other.

    Args:
        points: Shape `(b, k)`.
        others: Shape `(n, k)`; None for the points themselves, each but itself.
        rank: 1 for the nearest, 2 for the second and so on.

    Returns:
        Shape `(b,)`, fp64.

    Raises:
        UsageError: There are not as many others.
    """
    points = points.detach().double().cpu()
    among = points if others is None else others.detach().double().cpu()
    if rank > len(among) - (others is None):
        raise UsageError(f"There is no neighbor number {rank} among {len(among)} models.", cure="Give more models.")
    found = []
    for rows in _blocks(len(points)):
        apart = _apart(points[rows], among)
        if others is None:
            apart[torch.arange(len(apart)), torch.arange(rows.start, rows.start + len(apart))] = torch.inf
        found.append(apart.kthvalue(rank, dim=1).values)
    return torch.cat(found)


def row_of(name: str, names: Sequence[str]) -> int:
    """Return the number of a model.

    Args:
        name: What is looked for.
        names: Of all models.

    Raises:
        NameNotFound: There is none of this name; the nearest are named.
    """
    if name not in names:
        near = ", ".join(map(repr, nearest_names(name, names)))
        raise NameNotFound(f"There is no model {name!r} in the space.", cure=f"The nearest names are {near}.")
    return list(names).index(name)


def _apart(points: Tensor, others: Tensor) -> Tensor:
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _AT_ONCE):
        yield slice(start, start + _AT_ONCE)
