"""IG, gradient matching by cosine: images whose update points where the client's did. Source: Geiping et al. 2020."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.descent import Schedule, descend, starting_points
from netweight.attacks.gradient_inversion.labels import labels_of_update
from netweight.attacks.gradient_inversion.observation import chosen_tensors
from netweight.attacks.gradient_inversion.reconstruction import Reconstruction
from netweight.attacks.gradient_inversion.victim import LocalUpdate, Tensors
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError

__all__ = ["Bounds", "MatchingConfig", "Term", "cosine_distance", "invert", "relative_distance", "total_variation"]

Bounds: TypeAlias = tuple[float | Tensor, float | Tensor]
"""Least and greatest value of a pixel: two numbers, or two tensors with one value per channel."""
Term: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A further term of the objective: a scalar from images and labels."""


@final
@dataclass(frozen=True)
class MatchingConfig:
    """How IG searches.

    Attributes:
        steps: Steps of Adam per restart.
        lr: Its learning rate; lowered tenfold after 3/8, 5/8 and 7/8 of the steps.
        signed: Whether only the signs of the gradient are used.
        total_variation: Weight of the mean absolute difference between neighboring pixels.
        distance: "cosine" compares directions, as the paper does; "squared" is half the squared distance over the
            squared length of the observed update: the same for equal lengths, and else it counts the length too.
        annealed: Whether that weight falls with the cube root of the learning rate, to a tenth at the end: smooth at
            first, then true to the update. The paper keeps it.
        restarts: Starting points; the one with the least objective is kept.
        tensors: Patterns (`netweight.Select`) of the tensors to compare; all that were observed by default.
        schedule: How the learning rate falls.

    Raises:
        UsageError: There is no such distance, a number is below 1, or a weight is negative.
    """

    steps: int = 4800
    lr: float = 0.1
    signed: bool = True
    total_variation: float = 0.01
    annealed: bool = True
    distance: Literal["cosine", "squared"] = "cosine"
    restarts: int = 1
    tensors: str | tuple[str, ...] | None = None
    schedule: Schedule = "steps"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.distance not in ("cosine", "squared"):
            raise UsageError(f"IG knows no distance {self.distance!r}.", cure='Use "cosine" or "squared".')
        if self.steps < 1 or self.restarts < 1 or self.lr <= 0 or self.total_variation < 0:
            raise UsageError(f"IG cannot run with {self}.", cure="Steps and restarts are at least 1, weights positive.")


def invert(
    local_update: LocalUpdate,
    params: Tensors,
    observed: Tensors,
    *,
    shape: tuple[int, ...],
    labels: Tensor | None = None,
    bounds: Bounds = (0.0, 1.0),
    config: MatchingConfig | None = None,
    terms: Sequence[Term] = (),
    seed: int,
    progress: Progress = QUIET,
) -> Reconstruction:
    """Search images whose update has the direction of the observed one, by Adam on 1 - cosine + total variation.

    Args:
        local_update: The client's training rule.
        params: The parameters the client started from.
        observed: What the client sent; names and shapes as `local_update` returns them.
        shape: Shape of the batch, `(n, c, h, w)`.
        labels: int64 of shape `(n,)`, or probabilities of shape `(n, classes)`; by default they are read off the
            update first (`labels_of_update`).
        bounds: Range of the pixels; the search never leaves it.
        config: How to search.
        terms: Further terms, added to the objective.
        seed: Seed of the starting points.
        progress: Where progress is shown.

    Returns:
        The best restart.

    Raises:
        NameNotFound: The patterns, or the observed names, match nothing the client would send.
        UsageError: Shapes do not fit, or the observed tensors hold NaN or infinity.

    Source: Geiping et al. 2020, "Inverting Gradients", section 4.
    """
    config = config or MatchingConfig()
    start = starting_points(params, shape, config.restarts, seed)
    low, high = _box(bounds, shape[1], start)
    start = start.clamp(low, high)
    if labels is None:
        labels = labels_of_update(local_update, params, observed, shape=shape, seed=seed)
    known = labels.to(start.device)
    chosen = chosen_tensors(observed, config.tensors, local_update(params, (start[0], known)))

    distance = cosine_distance if config.distance == "cosine" else relative_distance
    smoothness = config.total_variation

    def anneal(share: float) -> None:
        nonlocal smoothness
        smoothness = config.total_variation * (share ** (1 / 3) if config.annealed else 1)

    def objective(images: Tensor) -> Tensor:
        imitated = local_update(params, (images, known))
        value = distance(imitated, chosen) + smoothness * total_variation(images)
        for term in terms:
            value = value + term(images, known)
        return value

    def project(images: Tensor) -> None:
        images.clamp_(low, high)

    found = descend(
        objective,
        (start,),
        steps=config.steps,
        lr=config.lr,
        signed=config.signed,
        schedule=config.schedule,
        project=project,
        anneal=anneal,
        progress=progress,
    )
    return Reconstruction(
        images=found.variables[0],
        labels=known,
        objective=found.objectives[found.best],
        objectives_by_restart=found.objectives,
        history=found.history,
        steps=config.steps,
        attack="IG" if config.distance == "cosine" else "IG (squared distance)",
    )


def cosine_distance(imitated: Tensors, observed: Tensors) -> Tensor:
    """Return 1 - cosine between two updates, taken as single vectors over the names in `observed`.

    Args:
        imitated: What a client would send: tensors by name.
        observed: What it sent: tensors by name.
    """
    product, length, wanted = (
        sum((a[name] * b[name]).sum() for name in observed)
        for a, b in ((imitated, observed), (imitated, imitated), (observed, observed))
    )
    scale = (length * wanted) ** 0.5
    return 1 - product / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def relative_distance(imitated: Tensors, observed: Tensors) -> Tensor:
    """Return half the squared distance between two updates over the squared length of the observed one.

    Args:
        imitated: What a client would send: tensors by name.
        observed: What it sent: tensors by name.
    """
    apart = sum((imitated[name] - tensor).square().sum() for name, tensor in observed.items())
    length = sum(tensor.square().sum() for tensor in observed.values())
    return torch.as_tensor(apart / (2 * length))


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference between vertical neighbors plus that between horizontal ones.

    Args:
        images: Shape `(..., h, w)`.
    """
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    parts = [part.abs().mean() for part in (vertical, horizontal) if part.numel()]  # a line has neighbors one way only
    return torch.stack(parts).sum() if parts else images.sum() * 0


def _box(bounds: Bounds, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The range of pixels, shape `(channels or 1, 1, 1)` each."""
    low, high = (torch.as_tensor(end, dtype=like.dtype, device=like.device).reshape(-1, 1, 1) for end in bounds)
    if any(len(end) not in (1, channels) for end in (low, high)) or not (low < high).all():
        raise UsageError(f"The bounds {bounds} are no range of pixels for {channels} channels.")
    return low, high
