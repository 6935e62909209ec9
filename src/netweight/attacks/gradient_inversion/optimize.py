"""Adam with the schedules of the inversion attacks, over restarts side by side. Attacks call it; it knows no model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.func import vmap

from netweight.attacks.gradient_inversion.client import Reconstruction, Tensors
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError

# A scalar from the variables of one restart, in their order; differentiable.
Objective: TypeAlias = Callable[..., Tensor]


Schedule: TypeAlias = Literal["steps", "cosine", "constant"]


_HISTORY = 100  # points of a history


@final
@dataclass(frozen=True, eq=False)
class Descended:
    """Where a descent ended."""

    # Those of the best restart, each of the shape that was searched, without the axis of restarts.
    variables: tuple[Tensor, ...]
    objectives: tuple[float, ...]  # the objective of every restart at its end
    best: int  # the restart with the least objective
    history: tuple[float, ...]  # objectives of the best restart over time

    def reconstruction(self, images: Tensor, labels: Tensor, *, steps: int, attack: str) -> Reconstruction:
        """Return the outcome of the attack that searched."""
        return Reconstruction(images, labels, self.objectives[self.best], self.objectives, self.history, steps, attack)


def descend(
    objective: Objective,
    start: tuple[Tensor, ...],
    *,
    steps: int,
    lr: float,
    signed: bool = False,
    schedule: Schedule = "steps",
    project: Callable[..., None] | None = None,
    anneal: Callable[[float], None] | None = None,
    progress: Progress = QUIET,
    description: str = "inverting",
) -> Descended:
    """Minimize an objective by Adam from several starting points."""
    restarts = len(start[0])
    if steps < 1 or restarts < 1:
        raise UsageError(f"steps={steps} with {restarts} restarts finds nothing.", cure="Each must be at least 1.")
    variables = [tensor.detach().clone().requires_grad_() for tensor in start]
    objectives = _side_by_side(objective, variables)
    optimizer = torch.optim.Adam(variables, lr=lr)
    values: list[list[float]] = []
    every = max(1, steps // _HISTORY)
    with progress.task(description, steps, unit="steps") as task:
        for step in range(steps):
            share = _factor(schedule, step / steps)
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            if anneal is not None:
                anneal(share)
            found = _differentiate(objectives, variables, signed)
            if step % every == 0:
                values.append(found)
            optimizer.step()
            if project is not None:
                with torch.no_grad():
                    project(*variables)
            task.update()
    final = _differentiate(objectives, variables, signed)
    best = min(range(restarts), key=lambda restart: _order(final[restart]))
    kept = tuple(variable.detach()[best] for variable in variables)
    return Descended(kept, tuple(final), best, (*(row[best] for row in values), final[best]))


def _factor(schedule: Schedule, done: float) -> float:
    if schedule == "steps":
        return 0.1 ** sum(done >= part / 8 for part in (3, 5, 7))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1.0


def _side_by_side(objective: Objective, variables: list[Tensor]) -> Callable[..., Tensor]:
    """The objectives of all restarts at once, shape `(restarts,)`."""
    # By vmap where the model allows it: four restarts of a small convolutional network take 0.57 of a loop's time on
    # one core. Not every model does (dropout, normalization that writes its statistics); then one after another.
    if len(variables[0]) > 1:
        together = vmap(objective)
        with contextlib.suppress(RuntimeError):  # vmap's refusal; what is wrong with the objective shows again below
            together(*(variable.detach() for variable in variables))
            return together
    return lambda *parts: torch.stack([objective(*rows) for rows in zip(*parts, strict=True)])


def _differentiate(objectives: Callable[..., Tensor], variables: list[Tensor], signed: bool) -> list[float]:
    """Set the gradients of all restarts and return their objectives."""
    values = objectives(*variables)
    for variable, slope in zip(variables, torch.autograd.grad(values.sum(), variables), strict=True):
        variable.grad = slope.sign() if signed else slope
    return [float(value) for value in values.detach()]


def _order(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def starting_points(params: Tensors, shape: tuple[int, ...], restarts: int, seed: int) -> Tensor:
    """Draw starting points from a standard normal distribution."""
    if len(shape) != 4 or min(shape) < 1:
        raise UsageError(f"The shape of a batch is (n, c, h, w), not {shape}.")
    if not params:
        raise UsageError("The attack needs the parameters that the client started from; none were given.")
    drawn = [torch.randn(shape, generator=seeds.torch_generator(seed, "restart", r)) for r in range(restarts)]
    return torch.stack(drawn).to(next(iter(params.values())))
