"""Models of a space as marks on a page's map: which are shown, where, beside which others; drawn models likewise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.methods.space.labels import Labels
from netweight.methods.space.method import WeightSpace
from netweight.methods.space.sampling import KernelSampler, Sampler
from netweight.methods.space.view import AdapterMap, Neighbors, Samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["map_of", "samples_of", "thinned"]

_AXES = 4  # components that can be put on the map's axes


def thinned(n: int, most: int) -> list[int]:
    """Return the numbers of at most so many of n models, evenly chosen.

    Args:
        n: How many there are.
        most: How many to show, at least 1.

    Raises:
        UsageError: None is to be shown.
    """
    if most < 1:
        raise UsageError("A map of no adapter cannot be drawn.", cure="Show at least one.")
    found: list[int] = torch.linspace(0, n - 1, min(n, most)).round().long().tolist()
    return found


def map_of(
    space: WeightSpace, shown: Sequence[int], faces: NDArray[np.uint8], labels: Labels | None, neighbors: int
) -> AdapterMap:
    """Put models on a map of the first components.

    Args:
        space: The space.
        shown: Numbers of the models.
        faces: A picture of each, shape `(shown, height, width, 3)`.
        labels: Of all models of the space.
        neighbors: How many of each, among those shown.
    """
    names = [space.names[number] for number in shown]
    known = {} if labels is None else {name: column.values[list(shown)] for name, column in labels.columns.items()}
    scores = space.scores[list(shown)]
    fewer = f"{len(shown)} of {len(space.names)} are shown. " if len(shown) < len(space.names) else ""
    return AdapterMap(
        names,
        _coordinates(space, scores),
        [f"component {number + 1} (σ)" for number in range(min(_AXES, space.components))],
        faces,
        {name: [None if value != value else value for value in values.tolist()] for name, values in known.items()},
        _nearest(space, scores, shown, neighbors, themselves=True),
        f"{fewer}Its picture is painted at its place in the space of {space.components} components.",
    )


def samples_of(
    space: WeightSpace,
    shown: Sequence[int],
    drawn: Tensor,
    images: NDArray[np.uint8],
    neighbors: int,
    sampler: Sampler,
) -> Samples:
    """Put drawn models beside the models on the map that are nearest to them.

    Args:
        space: The space.
        shown: Numbers of the models on the map.
        drawn: Points, shape `(n, k)`.
        images: Of each, shape `(n, noises, height, width, 3)`.
        neighbors: How many of each.
        sampler: That drew them.
    """
    width = f" of bandwidth {sampler.bandwidth:.2f}" if isinstance(sampler, KernelSampler) else ""
    note = f"A {type(sampler).__name__}{width} drew them."
    return Samples(images, _nearest(space, drawn, shown, neighbors), _coordinates(space, drawn), note)


def _coordinates(space: WeightSpace, points: Tensor) -> NDArray[np.float64]:
    """First components in standard deviations; one in which no model differs is 0 everywhere."""
    axes = min(_AXES, space.components)
    scale = space.deviations[:axes].double().clamp_min(torch.finfo(torch.float32).tiny)
    found: NDArray[np.float64] = (points[:, :axes].double() / scale).numpy()
    return found


def _nearest(
    space: WeightSpace, points: Tensor, shown: Sequence[int], count: int, *, themselves: bool = False
) -> Neighbors | None:
    """Models on the map nearest to points, by the cosine of what both add to the mean of all models.

    Where the points are the models on the map themselves, none is its own neighbor.
    """
    count = min(count, len(shown) - themselves)
    if count < 1:
        return None
    center = space.scores.double().mean(0)
    towards = torch.nn.functional.normalize(space.scores[list(shown)].double() - center)
    cosines = torch.nn.functional.normalize(points.double() - center) @ towards.T
    if themselves:
        cosines.fill_diagonal_(-torch.inf)
    found = cosines.topk(count)
    return Neighbors(found.indices.numpy(), found.values.numpy())
