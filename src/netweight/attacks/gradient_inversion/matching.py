"""Gradient matching: search images whose update is like the observed one. IG, ROG and DLG.

Each takes the client's training rule (`local_update`), the parameters that the client started from (`params`), what it
sent (`observed`, tensors by name) and the shape of its batch, and returns the best of several restarts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from netweight.attacks.gradient_inversion.analytic import first_layer, labels_of_update
from netweight.attacks.gradient_inversion.checkpoints import (
    adam_tensors,
    checkpointed,
    is_due,
    lbfgs_state,
    restore_adam,
    restore_lbfgs,
    same_objectives,
)
from netweight.attacks.gradient_inversion.client import (
    LocalUpdate,
    Reconstruction,
    Tensors,
    chosen_tensors,
    sgd_difference,
)
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress, ProgressTask
from netweight.errors import UsageError
from netweight.job import Job

# A scalar from the variables of one restart, in their order; differentiable.
Objective: TypeAlias = Callable[..., Tensor]


Schedule: TypeAlias = Literal["steps", "cosine", "constant"]


_HISTORY = 100  # points of a history
# Networks of more weights are differentiated for one restart after another. Six restarts at once of a convolutional
# network of 0.03 million weights take 0.6 of the time on one core; with 0.12 million weights or more they take no less
# time, and with 6 million they need six times the memory.
_FEW_WEIGHTS = 100_000


@final
@dataclass(frozen=True, eq=False)
class DescentResult:
    """End point of a descent."""

    variables: tuple[Tensor, ...]
    """Those of the best restart, each of the shape that was searched, without the axis of restarts."""
    objectives: tuple[float, ...]
    """The objective of every restart at its end."""
    best: int
    """The restart with the least objective."""
    history: tuple[float, ...]
    """Objectives of the best restart over time."""
    every: tuple[Tensor, ...] = ()
    """The variables of all restarts, with the axis of restarts first; empty where only the best are kept."""

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
    constants: tuple[Tensor, ...] = (),
    weights: int = 0,
    folder: Path | None = None,
    progress: Progress = QUIET,
    description: str = "inverting",
) -> DescentResult:
    """Minimize an objective by Adam from several starting points; with a folder a second call continues the first.

    The objective takes the variables of one restart and then its row of each of `constants`, which stay as they are.
    `weights` is the number of weights of the network behind the objective: it decides whether all restarts are
    differentiated at once.
    """
    restarts = len(start[0])
    if steps < 1 or restarts < 1:
        raise UsageError(f"steps={steps} with {restarts} restarts cannot run.", cure="Each must be at least 1.")
    variables = [tensor.detach().clone().requires_grad_() for tensor in start]
    slopes = _at_once(objective, variables, constants) if restarts > 1 and weights <= _FEW_WEIGHTS else None
    slopes = slopes or _one_by_one(objective, variables, constants)
    optimizer = torch.optim.Adam(variables, lr=lr)
    values: list[list[float]] = []
    every, first = max(1, steps // _HISTORY), 0
    with checkpointed(folder, "search") as job, progress.task(description, steps, unit="steps") as task:
        saved = None if job is None else job.load()
        if saved is not None and same_objectives(saved[0]["values"][0], _differentiate(slopes, variables, signed)):
            first, values = saved[0]["step"], saved[0]["values"]
            restore_adam(optimizer, variables, saved[1])
            if anneal is not None:
                anneal(_factor(schedule, (first - 1) / steps))
            task.update(first)
        for step in range(first, steps):
            share = _factor(schedule, step / steps)
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            if anneal is not None:
                anneal(share)
            losses = _differentiate(slopes, variables, signed)
            if step % every == 0:
                values.append(losses)
            optimizer.step()
            if project is not None:
                with torch.no_grad():
                    project(*variables)
            if job is not None and is_due(step + 1, steps):
                job.save({"step": step + 1, "values": values}, adam_tensors(optimizer, variables))
            task.update()
    final = _differentiate(slopes, variables, signed)
    best = min(range(restarts), key=lambda restart: _order(final[restart]))
    best_variables = tuple(variable.detach()[best] for variable in variables)
    every_variable = tuple(variable.detach() for variable in variables)
    history = (*(row[best] for row in values), final[best])
    return DescentResult(best_variables, tuple(final), best, history, every_variable)


def _factor(schedule: Schedule, done: float) -> float:
    if schedule == "steps":
        return 0.1 ** sum(done >= part / 8 for part in (3, 5, 7))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1.0


# The objectives of all restarts, shape `(restarts,)`, and their gradients by every variable, with the axis of restarts.
_Slopes: TypeAlias = Callable[[], tuple[Tensor, tuple[Tensor, ...]]]


def _at_once(objective: Objective, variables: list[Tensor], constants: tuple[Tensor, ...]) -> _Slopes | None:
    """Differentiate all restarts together, or None if the model does not allow it.

    Models with dropout, or with a normalization that writes its statistics, do not.
    """
    together = vmap(objective)
    # vmap may refuse the objective. An error of the objective itself is raised again where restarts come one by one.
    with contextlib.suppress(RuntimeError):
        together(*(variable.detach() for variable in variables), *constants)

        def slopes() -> tuple[Tensor, tuple[Tensor, ...]]:
            values = together(*variables, *constants)
            return values.detach(), torch.autograd.grad(values.sum(), variables)

        return slopes
    return None


def _one_by_one(objective: Objective, variables: list[Tensor], constants: tuple[Tensor, ...]) -> _Slopes:
    """Differentiate one restart after another, in the memory of one."""

    def slopes() -> tuple[Tensor, tuple[Tensor, ...]]:
        values, found = [], []
        for row in range(len(variables[0])):
            own = [variable.detach()[row].requires_grad_() for variable in variables]
            value = objective(*own, *(constant[row] for constant in constants))
            found.append(torch.autograd.grad(value, own))
            values.append(value.detach())
        return torch.stack(values), tuple(torch.stack(rows) for rows in zip(*found, strict=True))

    return slopes


def _differentiate(slopes: _Slopes, variables: list[Tensor], signed: bool) -> list[float]:
    """Set the gradients of all restarts and return their objectives."""
    values, found = slopes()
    for variable, slope in zip(variables, found, strict=True):
        variable.grad = slope.sign() if signed else slope
    return [float(value) for value in values]


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


def number_of(weights: Tensors) -> int:
    """Return the number of weights in tensors by name."""
    return sum(tensor.numel() for tensor in weights.values())


# Least and greatest value of a pixel: two numbers, or two tensors with one value per channel.
Bounds: TypeAlias = tuple[float | Tensor, float | Tensor]


# A further term of the objective: a scalar from images and labels.
Term: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@final
@dataclass(frozen=True)
class MatchingConfig:
    """Settings of IG's search."""

    steps: int = 4800
    """Steps of Adam per restart."""
    lr: float = 0.1
    """Learning rate, which falls by `schedule`."""
    signed: bool = True
    """True to use only the signs of the gradient."""
    total_variation: float | tuple[float, ...] = 0.01
    """Weight of the mean absolute difference between neighboring pixels; a tuple has one for each restart."""
    annealed: bool = True
    """True if that weight falls with the cube root of the learning rate: smooth at first, then true to the update.
    The paper keeps it.
    """
    distance: Literal["cosine", "squared"] = "cosine"
    """"cosine" compares directions, as the paper does; "squared" is half the squared distance over the squared
    length of the observed update: the same for equal lengths, and else it counts the length too.
    """
    restarts: int = 1
    """Starting points; the one with the least objective is kept."""
    tensors: str | tuple[str, ...] | None = None
    """Patterns (`netweight.Select`) of the tensors to compare; None: all."""
    schedule: Schedule = "steps"
    """"steps" lowers the rate tenfold after 3/8, 5/8 and 7/8 of the steps."""

    def __post_init__(self) -> None:
        """Refuse what is not valid."""
        if self.distance not in ("cosine", "squared"):
            raise UsageError(f"IG has no distance {self.distance!r}.", cure='Use "cosine" or "squared".')
        weights = self.weights
        if self.steps < 1 or self.restarts < 1 or self.lr <= 0 or min(weights) < 0 or len(weights) != self.restarts:
            raise UsageError(
                f"IG cannot run with {self}.",
                cure="Use at least 1 step and 1 restart, and positive weights, one for each restart or one for all.",
            )

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of the total variation in each restart."""
        weight = self.total_variation
        return weight if isinstance(weight, tuple) else (weight,) * self.restarts


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
    start: Tensor | None = None,
    seed: int,
    folder: Path | None = None,
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
        start: Images to begin with, of shape `(restarts, n, c, h, w)`; None draws them.
        seed: Seed of the starting points that are drawn.
        folder: Folder of checkpoints, of this search alone: a second call with the same arguments continues the first;
            None to keep none.
        progress: Where progress is shown.

    Returns:
        The restart with the least objective, and the images of all. If restarts have different weights, their
        objectives cannot be compared, so that the choice says little.

    Raises:
        NameNotFound: The patterns, or the observed names, match nothing the client would send.
        UsageError: Shapes do not fit, or the observed tensors hold NaN or infinity.

    Source: Geiping et al. 2020, "Inverting Gradients", section 4.
    """
    config = config or MatchingConfig()
    drawn = starting_points(params, shape, config.restarts, seed)
    if start is not None and start.shape != drawn.shape:
        raise UsageError(f"The images to begin with have the shape {tuple(start.shape)}, not {tuple(drawn.shape)}.")
    start = drawn if start is None else start.to(drawn)
    low, high = _box(bounds, shape[1], start)
    start = start.clamp(low, high)
    if labels is None:
        labels = labels_of_update(local_update, params, observed, shape=shape, seed=seed)
    classes = labels.to(start.device)
    chosen = chosen_tensors(observed, config.tensors, local_update(params, (start[0], classes)))

    distance = cosine_distance if config.distance == "cosine" else relative_distance
    weights = torch.tensor(config.weights, dtype=start.dtype, device=start.device)
    smoothness = 1.0

    def anneal(share: float) -> None:
        nonlocal smoothness
        smoothness = share ** (1 / 3) if config.annealed else 1.0

    def objective(images: Tensor, weight: Tensor) -> Tensor:
        imitated = local_update(params, (images, classes))
        value = distance(imitated, chosen) + smoothness * weight * total_variation(images)
        for term in terms:
            value = value + term(images, classes)
        return value

    def project(images: Tensor) -> None:
        images.clamp_(low, high)

    descended = descend(
        objective, (start,), steps=config.steps, lr=config.lr, signed=config.signed, schedule=config.schedule,
        project=project, anneal=anneal, constants=(weights,), weights=number_of(params), folder=folder,
        progress=progress,
    )  # fmt: skip
    name = "IG" if config.distance == "cosine" else "IG (squared distance)"
    made = descended.reconstruction(descended.variables[0], classes, steps=config.steps, attack=name)
    return replace(made, every=descended.every[0])


def cosine_distance(imitated: Tensors, observed: Tensors) -> Tensor:
    """Return 1 - cosine between two updates, taken as single vectors over the names in `observed`."""
    product, length, target_length = (
        sum((a[name] * b[name]).sum() for name in observed)
        for a, b in ((imitated, observed), (imitated, imitated), (observed, observed))
    )
    scale = (length * target_length) ** 0.5
    return 1 - product / scale.clamp_min(torch.finfo(scale.dtype).tiny)


def relative_distance(imitated: Tensors, observed: Tensors) -> Tensor:
    """Return half the squared distance between two updates over the squared length of the observed one."""
    apart = sum((imitated[name] - tensor).square().sum() for name, tensor in observed.items())
    length = sum(tensor.square().sum() for tensor in observed.values())
    return torch.as_tensor(apart / (2 * length))


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference between vertical neighbors plus that between horizontal ones."""
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    # An image of one row or column has neighbors in one direction only.
    parts = [part.abs().mean() for part in (vertical, horizontal) if part.numel()]
    return torch.stack(parts).sum() if parts else images.sum() * 0


def _box(bounds: Bounds, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The range of pixels, shape `(channels or 1, 1, 1)` each."""
    low, high = (torch.as_tensor(end, dtype=like.dtype, device=like.device).reshape(-1, 1, 1) for end in bounds)
    if any(len(end) not in (1, channels) for end in (low, high)) or not (low < high).all():
        raise UsageError(f"The bounds {bounds} are not a range of pixels for {channels} channels.")
    return low, high


# Images, shape `(n, c, h, w)`, to better ones of the same shape: the trained network of stage 2, which users bring.
PostProcessing: TypeAlias = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class ROGConfig:
    """Settings of ROG's search."""

    steps: int = 100
    """Steps of Adam per restart."""
    lr: float = 0.05
    """Learning rate, lowered to a tenth along a cosine."""
    factor: int = 4
    """Factor by which the latent is coarser than the images, in each direction."""
    restarts: int = 1
    """Number of starting points."""

    def __post_init__(self) -> None:
        """Refuse what is not valid."""
        if min(self.steps, self.factor, self.restarts) < 1 or self.lr <= 0:
            raise UsageError(f"ROG cannot run with {self}.", cure="Use positive numbers.")


def rog_client(model: nn.Module) -> LocalUpdate:
    """Return the client that ROG's authors attack: 5 local steps of SGD at rate 0.003, on batches of 16."""
    return sgd_difference(model, lr=0.003, steps=5, batch_size=16)


def rog(
    local_update: LocalUpdate,
    params: Tensors,
    observed: Tensors,
    *,
    shape: tuple[int, ...],
    labels: Tensor,
    config: ROGConfig | None = None,
    post_processing: PostProcessing | None = None,
    seed: int,
    folder: Path | None = None,
    progress: Progress = QUIET,
) -> Reconstruction:
    """Search a coarse latent whose enlargement gives the observed update, by the squared distance (stage 1 of ROG).

    The second stage of the paper is a generator and a denoiser trained on public images. They are not part of this
    library: bring one, or the result is labeled "no post-processing" and will be blurred, and is not to be set beside
    the paper's numbers.

    Args:
        local_update: The client's training rule, `rog_client` for the paper's.
        params: The parameters the client started from.
        observed: What the client sent. Tensors by name.
        shape: Shape of the batch, `(n, c, h, w)`.
        labels: The labels, which ROG takes as known. Shape `(n,)`, int64.
        config: How to search.
        post_processing: The second stage.
        seed: Seed of the starting points.
        folder: Folder of checkpoints, of this search alone: a second call with the same arguments continues the first;
            None to keep none.
        progress: Where progress is shown.

    Returns:
        The best restart. The objective is half the squared distance over the squared length of the observed
        update, and is that of stage 1 even where a network came after it.

    Raises:
        NameNotFound: The observed names match nothing that the client would send.
        UsageError: Shapes do not fit or values are not finite; or the network returned another shape.

    Source: Yue et al. 2023, "Gradient Obfuscation Gives a False Sense of Security in Federated Learning", section 4.
    """
    config = config or ROGConfig()
    size = shape[2:]
    coarse = (*shape[:2], *(-(-side // config.factor) for side in size))
    latents = starting_points(params, coarse, config.restarts, seed)
    labels = labels.to(latents.device)
    chosen = chosen_tensors(observed, None, local_update(params, (_enlarge(latents[0], size), labels)))
    # Relative, since Adam's epsilon is absolute and updates after small local steps are tiny.
    if not any(tensor.any() for tensor in chosen.values()):
        raise UsageError("The observed update is zero, so there is nothing to match.")

    def objective(latent: Tensor) -> Tensor:
        return relative_distance(local_update(params, (_enlarge(latent, size), labels)), chosen)

    descended = descend(
        objective, (latents,), steps=config.steps, lr=config.lr, schedule="cosine", weights=number_of(params),
        folder=folder, progress=progress, description="ROG",
    )  # fmt: skip
    images, second = _enlarge(descended.variables[0], size), "no post-processing"
    if post_processing is not None:
        images, second = _polished(images, post_processing), "the user's post-processing"
    return descended.reconstruction(images, labels, steps=config.steps, attack=f"ROG ({second})")


def _enlarge(latent: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.interpolate(latent, size=list(size), mode="bicubic", align_corners=False)


def _polished(images: Tensor, network: PostProcessing) -> Tensor:
    better = network(images).detach()
    if better.shape != images.shape:
        raise UsageError(
            f"The post-processing returned images of shape {tuple(better.shape)}, not {tuple(images.shape)}."
        )
    return better


@final
@dataclass(frozen=True)
class DLGConfig:
    """Settings of DLG's search."""

    steps: int = 300
    """Steps of L-BFGS per restart."""
    restarts: int = 1
    """Starting points, on which DLG depends; the one with the least objective is kept."""

    def __post_init__(self) -> None:
        """Refuse what is not valid."""
        if self.steps < 1 or self.restarts < 1:
            raise UsageError(f"DLG cannot run with {self}.", cure="Use at least 1 step and 1 restart.")


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
    folder: Path | None = None,
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
        folder: Folder of checkpoints, of this search alone: a second call with the same arguments continues the first;
            None to keep none.
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
        raise UsageError(
            "DLG takes the labels, or the number of classes to find them.",
            cure="Give one of the two (--labels or --classes).",
        )
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
        for number, start in enumerate(zip(starts, scores, strict=True)):
            with checkpointed(folder, f"restart-{number}") as job:
                ends.append(_search(objective, start, config.steps, task, job))
    objectives = tuple(history[-1] for _, history in ends)
    best = min(range(len(ends)), key=lambda end: objectives[end] if math.isfinite(objectives[end]) else math.inf)
    variables, history = ends[best]
    images, soft_labels = batch(*variables)
    descended = DescentResult(variables, objectives, best, history)
    return descended.reconstruction(images, soft_labels, steps=config.steps, attack="DLG")


def squared_distance(imitated: Tensors, observed: Tensors) -> Tensor:
    """Return the squared Euclidean distance between two updates over the names in `observed`."""
    return torch.stack([(imitated[name] - tensor).square().sum() for name, tensor in observed.items()]).sum()


def _search(
    objective: Callable[[Tensor, Tensor], Tensor],
    start: tuple[Tensor, Tensor],
    steps: int,
    task: ProgressTask,
    job: Job | None,
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

    history: list[float] = []
    saved = None if job is None else job.load()
    if saved is not None and same_objectives(saved[0]["history"][:1], [float(objective(images, score).detach())]):
        history = saved[0]["history"]
        restore_lbfgs(optimizer, [images, score], saved[0]["optimizer"], saved[1])
        task.update(len(history))
    for step in range(len(history), steps):
        history.append(float(optimizer.step(slope)))  # type: ignore[no-untyped-call]
        if job is not None and is_due(step + 1, steps):
            numbers, tensors = lbfgs_state(optimizer, [images, score])
            job.save({"history": history, "optimizer": numbers}, tensors)
        task.update()
    history.append(float(objective(images, score).detach()))
    return (images.detach(), score.detach()), tuple(history)


# The generic attacks by name.
Name: TypeAlias = Literal["ig", "dlg", "rog", "first-layer"]


def run_attack(
    name: Name,
    local_update: LocalUpdate,
    params: Tensors,
    observed: Tensors,
    *,
    shape: tuple[int, ...],
    labels: Tensor | None = None,
    classes: int | None = None,
    layer: str | None = None,
    bounds: Bounds = (0.0, 1.0),
    steps: int | None = None,
    restarts: int = 1,
    total_variation: float | None = None,
    seed: int,
    folder: Path | None = None,
    progress: Progress = QUIET,
) -> Reconstruction:
    """Run one of the generic attacks; with a folder of its own for checkpoints, a second call continues the first."""
    _check(name, {"layer": layer, "classes": classes, "total_variation": total_variation}, labels)
    given = {"steps": steps, "total_variation": total_variation}
    search: dict[str, Any] = {"restarts": restarts, **{key: value for key, value in given.items() if value is not None}}
    about: dict[str, Any] = {"shape": shape, "seed": seed, "folder": folder, "progress": progress}
    if name == "dlg":
        about |= {"classes": classes, "labels": labels, "config": DLGConfig(**search)}
        return dlg(local_update, params, observed, **about)
    if labels is None:
        labels = labels_of_update(local_update, params, observed, shape=shape, seed=seed)
    if name == "first-layer":
        return first_layer(observed, layer or "", shape=shape, labels=labels)
    if name == "rog":
        return rog(local_update, params, observed, labels=labels, config=ROGConfig(**search), **about)
    config = MatchingConfig(**search)
    return invert(local_update, params, observed, labels=labels, bounds=bounds, config=config, **about)


def _check(name: Name, settings: dict[str, object], labels: Tensor | None) -> None:
    """Refuse settings of other attacks, which would pass unseen, and name those that are missing."""
    owners = {"layer": "first-layer", "classes": "dlg", "total_variation": "ig"}
    for setting, value in settings.items():
        if value is not None and owners[setting] != name:
            raise UsageError(
                f"The setting {setting!r} belongs to the attack {owners[setting]!r}, not {name!r}.",
                cure=f"Leave it out (--{setting.replace('_', '-')}), or choose --attack {owners[setting]}.",
            )
    if name == "first-layer" and settings["layer"] is None:
        raise UsageError(
            "The attack 'first-layer' needs the name of the layer.", cure='Give it, such as "fc1" (--layer fc1).'
        )
    if name == "dlg" and (labels is None) == (settings["classes"] is None):
        raise UsageError(
            "The attack 'dlg' needs the labels or the number of classes, not both.",
            cure="Give one of the two (--labels or --classes).",
        )
