"""DLG, deep leakage from gradients: images and labels together, by L-BFGS on the squared distance of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.client import LocalUpdate, Reconstruction, Tensors, chosen_tensors
from netweight.attacks.gradient_inversion.matching import starting_points
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress, Task
from netweight.errors import UsageError


@final
@dataclass(frozen=True)
class DLGConfig:
    """How DLG searches.

    Attributes:
        steps: Steps of L-BFGS per restart.
        restarts: Starting points; DLG depends on its start, and the one with the least objective is kept.

    Raises:
        UsageError: A number is below 1.
    """

    steps: int = 300
    restarts: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.steps < 1 or self.restarts < 1:
            raise UsageError(f"DLG cannot run with {self}.", cure="Steps and restarts are at least 1.")


def dlg(
    local_update: LocalUpdate,
    params: Tensors,
    observed: Tensors,
    *,
    shape: tuple[int, ...],
    classes: int | None = None,
    labels: Tensor | None = None,
    config: DLGConfig | None = None,
    seed: int,
    progress: Progress = QUIET,
) -> Reconstruction:
    """Search images, and labels if they are unknown, whose update is nearest to the observed one.

    Needs a smooth network (sigmoid, tanh, GELU); with ReLU the distance has no useful curvature. Unlike the paper's,
    the line search keeps Wolfe's conditions, without which most starts diverge. There is no box.

    Args:
        local_update: The client's training rule, with a loss that takes class probabilities.
        params: The parameters the client started from.
        observed: What the client sent. Tensors by name.
        shape: Shape of the batch, `(n, c, h, w)`.
        classes: Number of classes, if the labels are to be found.
        labels: The labels, if they are known: then only the images are searched.
        config: How to search.
        seed: Seed of the starting points.
        progress: Where progress is shown.

    Returns:
        The best restart; labels as given, or as probabilities of shape `(n, classes)`.

    Raises:
        NameNotFound: The observed names match nothing that the client would send.
        UsageError: Shapes do not fit, values are not finite, or both or neither of `classes` and `labels` are given.

    Source: Zhu et al. 2019, "Deep Leakage from Gradients", algorithm 1.
    """
    config = config or DLGConfig()
    if (labels is None) == (classes is None):
        raise UsageError("DLG takes the labels, or the number of classes to find them.", cure="Give one of the two.")
    starts = starting_points(params, shape, config.restarts, seed)
    scores = [
        torch.randn((shape[0], classes or 0), generator=seeds.torch_generator(seed, "labels", restart)).to(starts)
        for restart in range(config.restarts)
    ]

    def batch(images: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        return images, score.softmax(dim=1) if labels is None else labels.to(images.device)

    chosen = chosen_tensors(observed, None, local_update(params, batch(starts[0], scores[0])))

    def objective(images: Tensor, score: Tensor) -> Tensor:
        return squared_distance(local_update(params, batch(images, score)), chosen)

    ends = []
    with progress.task("DLG", config.steps * config.restarts, unit="steps") as task:
        for start in zip(starts, scores, strict=True):
            ends.append(_search(objective, start, config.steps, task))
    variables, history = min(ends, key=lambda end: end[1][-1] if math.isfinite(end[1][-1]) else math.inf)
    images, found = batch(*variables)
    return Reconstruction(
        images=images,
        labels=found,
        objective=history[-1],
        objectives_by_restart=tuple(history[-1] for _, history in ends),
        history=history,
        steps=config.steps,
        attack="DLG",
    )


def squared_distance(imitated: Tensors, observed: Tensors) -> Tensor:
    """Return the squared Euclidean distance between two updates over the names in `observed`."""
    return torch.stack([(imitated[name] - tensor).square().sum() for name, tensor in observed.items()]).sum()


def _search(
    objective: Callable[[Tensor, Tensor], Tensor], start: tuple[Tensor, Tensor], steps: int, task: Task
) -> tuple[tuple[Tensor, Tensor], tuple[float, ...]]:
    """Run L-BFGS from one start; return where it ended and the objective from start to end."""
    images, score = (part.clone().requires_grad_() for part in start)
    optimizer = torch.optim.LBFGS(
        [images, score], max_iter=1, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def slope() -> Tensor:
        optimizer.zero_grad()
        value = objective(images, score)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    history = []
    for _ in range(steps):
        history.append(float(optimizer.step(slope)))  # type: ignore[no-untyped-call]
        task.update()
    history.append(float(objective(images, score).detach()))
    return (images.detach(), score.detach()), tuple(history)
