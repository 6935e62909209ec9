"""Images into a space: the scores of a point whose model makes them, found by gradient descent, many at once.

found = invert(space, loss, count=8)        # loss(changes, generator) -> one number per target
found.scores

Descent goes in standard deviations of the training models per component, so that components of little spread move as
readily as others, from the mean model. Each target is on its own: nothing of one enters another's steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import TrainingStopped, UsageError

__all__ = ["SETTINGS", "InversionSettings", "Inverted", "Loss", "Space", "invert"]


class Space(Protocol):
    """What is asked of a space.

    Attributes:
        deviations: Standard deviations of the training scores, shape `(k,)`.
    """

    @property
    def deviations(self) -> Tensor: ...  # noqa: D102 - standard deviations of the training scores, shape (k,)

    def changes(self, scores: Tensor) -> Mapping[str, Tensor]:
        """Return module name → ΔW, shape `(b, rows, columns)`, of scores `(b, k)`; gradients flow to these."""


class Loss(Protocol):
    """How far the models of points are from their targets."""

    def __call__(self, changes: Mapping[str, Tensor], generator: torch.Generator, /) -> Tensor:
        """Return one number per target, shape `(b,)`.

        Args:
            changes: Module name → ΔW, shape `(b, rows, columns)`.
            generator: What is drawn in this step comes from here.
        """


@final
@dataclass(frozen=True)
class InversionSettings:
    """How points are sought.

    Attributes:
        steps: Of Adam.
        learning_rate: In standard deviations of the training models, if `scaled`.
        components: Only the first so many components move; None for all. A space of fewer moves all of them.
        prior: Weight of ½ Σ (score / deviation)², a Gaussian prior, against the loss of a target. A denoising loss is a
            mean over pixels, so a prior that a Bayesian would call 1 is tiny here: 1e-4 is too strong in the miniature.
        weight_decay: Of Adam, on what is moved.
        scaled: Whether components are moved in units of their deviations, or as they are.
        averaged: The point is the mean over this last share of the steps, since single steps are noisy; 0 for the last.

    Raises:
        UsageError: A number is out of its range.
    """

    steps: int = 400
    learning_rate: float = 0.05
    components: int | None = None
    prior: float = 0.0
    weight_decay: float = 0.0
    scaled: bool = True
    averaged: float = 0.25

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        wrong = self.steps < 1 or not self.learning_rate > 0 or self.prior < 0 or self.weight_decay < 0
        if wrong or not 0 <= self.averaged <= 1 or (self.components is not None and self.components < 1):
            raise UsageError(
                f"These settings of an inversion cannot be meant: {self}.", cure="Begin with the defaults."
            )


SETTINGS: Mapping[str, InversionSettings] = {
    "default": InversionSettings(),
    "reference": InversionSettings(
        learning_rate=0.1, components=10_000, weight_decay=1e-10, scaled=False, averaged=0.0
    ),
    "reference out of distribution": InversionSettings(
        steps=800, learning_rate=1.0, components=1_000, scaled=False, averaged=0.0
    ),
}
"""Ours, those of the authors' code, and those that it takes for images that are no photographs of faces."""


@final
@dataclass(frozen=True, eq=False)
class Inverted:
    """Where targets were found.

    Attributes:
        scores: Shape `(b, k)`, fp32.
        losses: Before each step, the prior left out, shape `(steps, b)`, fp32.
        distances: Root mean square of the scores in standard deviations, over the components that moved, shape `(b,)`:
            about 1 for training models; much more is outside of what they span.
    """

    scores: Tensor
    losses: Tensor
    distances: Tensor

    @property
    def improvements(self) -> Tensor:
        """Mean loss of the first tenth of the steps over that of the last tenth, shape `(b,)`."""
        tenth = max(1, len(self.losses) // 10)
        return self.losses[:tenth].mean(0) / self.losses[-tenth:].mean(0)


def invert(
    space: Space,
    loss: Loss,
    count: int,
    settings: InversionSettings | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress = QUIET,
) -> Inverted:
    """Seek points of targets.

    Args:
        space: The space; weights are made of the points once per step, whatever the loss draws.
        loss: How far the models are from their targets.
        count: Number of targets, b.
        settings: How; None for the defaults, `SETTINGS` has others.
        seed: Decides on the draws of every step.
        device: Where points, and so the weights made of them, are: the model's.
        progress: Told of every step.

    Raises:
        UsageError: There is no target, or the loss does not return one number per target.
        TrainingStopped: The loss of a target became NaN or infinite; the step and the targets are named.

    Source: weights2weights (arXiv 2406.09413), inversion of single images.
    """
    if count < 1:
        raise UsageError("There is no target to invert.", cure="Give at least one image.")
    settings = settings or SETTINGS["default"]
    deviations = space.deviations.detach().float().to(device)
    moving = min(settings.components or len(deviations), len(deviations))
    unit = deviations[:moving] if settings.scaled else torch.ones(moving, device=deviations.device)
    moved = torch.zeros(count, moving, device=deviations.device, requires_grad=True)
    adam = torch.optim.Adam([moved], lr=settings.learning_rate, weight_decay=settings.weight_decay)
    still = torch.zeros(count, len(deviations) - moving, device=deviations.device)
    first = settings.steps - max(1, round(settings.averaged * settings.steps))
    total, losses = torch.zeros_like(moved), []
    with progress.task("invert", settings.steps, unit="steps") as task:
        for step in range(settings.steps):
            scores = torch.cat([moved * unit, still], 1)
            found = loss(space.changes(scores), torch_generator(seed, "step", step))
            _check(found, count, step)
            losses.append(found.detach().float().cpu())
            whole = found.sum()
            if settings.prior:
                whole = whole + 0.5 * settings.prior * (moved * unit / _apart(deviations[:moving])).square().sum()
            adam.zero_grad(set_to_none=True)
            moved.grad = torch.autograd.grad(whole, moved)[0]
            adam.step()
            if step >= first:
                total += moved.detach()
            task.update()
    mean = total * unit / (settings.steps - first)
    distances = (mean / _apart(deviations[:moving])).square().mean(1).sqrt()
    return Inverted(torch.cat([mean, still], 1).cpu(), torch.stack(losses), distances.cpu())


def _apart(deviations: Tensor) -> Tensor:
    """Deviations to divide by."""
    return deviations.clamp_min(1e-12)


def _check(losses: Tensor, count: int, step: int) -> None:
    if losses.shape != (count,):
        raise UsageError(f"The loss of {count} targets has shape {tuple(losses.shape)}.", cure="Return one per target.")
    bad = (~losses.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        raise TrainingStopped(
            f"The loss of target {', '.join(map(str, bad))} is not finite at step {step}: the inversion diverged.",
            cure="Lower the learning rate, or move fewer components; look at the images if this is step 0.",
        )
