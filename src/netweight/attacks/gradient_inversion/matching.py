"""Adam with the schedules of the inversion attacks, over restarts side by side. Attacks call it; it knows no model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import vmap

from netweight.attacks.gradient_inversion.client import LocalUpdate, Reconstruction, Tensors, chosen_tensors
from netweight.attacks.gradient_inversion.labels import labels_of_update
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress
from netweight.errors import Unsupported, UsageError

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
        raise UsageError(f"A descent of {steps} steps from {restarts} starting points cannot be.")
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


def starting_points(params: Tensors, shape: tuple[int, ...], restarts: int, seed: int) -> Tensor:
    """Draw starting points from a standard normal distribution."""
    if len(shape) != 4 or min(shape) < 1:
        raise UsageError(f"The shape of a batch is (n, c, h, w), not {shape}.")
    if not params:
        raise UsageError("The attack needs the parameters that the client started from; none were given.")
    drawn = [torch.randn(shape, generator=seeds.torch_generator(seed, "restart", r)) for r in range(restarts)]
    return torch.stack(drawn).to(next(iter(params.values())))


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


_CURE = "Peeling needs convolutions, max pooling and (leaky) ReLU in a chain; match gradients by descent instead."


@final
@dataclass(frozen=True)
class Block:
    """One convolution with what follows it, up to the next."""

    name: str  # module name of the convolution
    stride: int
    padding: int  # its zero padding
    pool: int  # side of the square, non-overlapping windows of max pooling; 1 without pooling
    slope: float  # slope of the activation below zero; 1 without activation


@final
@dataclass(frozen=True)
class Chain:
    """The blocks in order, and the name of the first linear layer, which sees their flattened result."""

    blocks: tuple[Block, ...]  # the convolutional blocks
    linear: str  # full name of the layer


def read_chain(body: nn.Module) -> Chain:
    """Return the chain that a body begins with, up to its first linear layer."""
    try:
        graph = fx.symbolic_trace(body)
    except Exception as reason:  # whatever a foreign forward raises when values are symbols
        raise Unsupported(f"The body could not be traced: {reason}.", cure=_CURE) from reason
    modules = dict(graph.named_modules())
    blocks: list[Block] = []
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or _is(node, modules, nn.Identity, nn.Flatten, "flatten"):
            continue
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Linear):
            if not blocks or module.bias is None:
                raise Unsupported(f"The layer {node.target!r} has no convolution before it or no bias.", cure=_CURE)
            return Chain(tuple(blocks), str(node.target))
        if isinstance(module, nn.Conv2d):
            blocks.append(_convolution(str(node.target), module))
        elif not blocks:
            raise Unsupported(f"{node.name!r} comes before the first convolution.", cure=_CURE)
        elif _is(node, modules, nn.ReLU, "relu"):
            blocks[-1] = _with(blocks[-1], slope=0.0)
        elif _is(node, modules, nn.LeakyReLU, "leaky_relu"):
            slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else _argument(node, 1, 0.01)
            blocks[-1] = _with(blocks[-1], slope=float(slope))
        elif _is(node, modules, nn.MaxPool2d, "max_pool2d", "boolean_dispatch"):
            blocks[-1] = _with(blocks[-1], pool=_window(node, module))
        else:
            raise Unsupported(f"{node.name!r} is no part of a chain.", cure=_CURE)
    raise Unsupported("The body has no linear layer.", cure=_CURE)


def _is(node: fx.Node, modules: dict[str, nn.Module], *kinds: type[nn.Module] | str) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], tuple(kind for kind in kinds if isinstance(kind, type)))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in kinds and (name != "boolean_dispatch" or node.target is F.max_pool2d)


def _argument(node: fx.Node, index: int, default: Any) -> Any:
    names = ("input", "negative_slope")
    return node.args[index] if len(node.args) > index else node.kwargs.get(names[index], default)


def _convolution(name: str, layer: nn.Conv2d) -> Block:
    square = all(len(set(pair)) == 1 for pair in (layer.stride, layer.dilation)) and not isinstance(layer.padding, str)
    if not square or layer.dilation[0] != 1 or layer.groups != 1 or layer.bias is None:
        raise Unsupported(f"The convolution {name!r} is dilated, grouped, without bias or not square.", cure=_CURE)
    if len(set(layer.padding)) != 1 or layer.padding_mode != "zeros":
        raise Unsupported(f"The convolution {name!r} pads unevenly or not with zeros.", cure=_CURE)
    return Block(name, int(layer.stride[0]), int(layer.padding[0]), 1, 1.0)


def _window(node: fx.Node, module: nn.Module | None) -> int:
    kernel: Any
    stride: Any
    padding: Any
    dilation: Any
    if isinstance(module, nn.MaxPool2d):
        kernel, stride, padding, dilation = module.kernel_size, module.stride, module.padding, module.dilation
    else:
        kernel = node.args[1] if len(node.args) > 1 else node.kwargs["kernel_size"]
        stride = node.kwargs.get("stride") or kernel
        padding, dilation = node.kwargs.get("padding", 0), node.kwargs.get("dilation", 1)
    if not isinstance(kernel, int) or stride != kernel or padding != 0 or dilation != 1:
        raise Unsupported(f"The windows of {node.name!r} overlap, are padded or not square.", cure=_CURE)
    return kernel


def _with(block: Block, *, pool: int | None = None, slope: float | None = None) -> Block:
    """The block with pooling or an activation, which may come in either order: leaky ReLU is monotone."""
    if (pool is not None and block.pool != 1) or (slope is not None and block.slope != 1):
        raise Unsupported(f"Two poolings or two activations follow {block.name!r}.", cure=_CURE)
    return Block(
        block.name,
        block.stride,
        block.padding,
        block.pool if pool is None else pool,
        block.slope if slope is None else slope,
    )


# Least and greatest value of a pixel: two numbers, or two tensors with one value per channel.
Bounds: TypeAlias = tuple[float | Tensor, float | Tensor]
# A further term of the objective: a scalar from images and labels.
Term: TypeAlias = Callable[[Tensor, Tensor], Tensor]


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
    """Return 1 - cosine between two updates, taken as single vectors over the names in `observed`."""
    product, length, wanted = (
        sum((a[name] * b[name]).sum() for name in observed)
        for a, b in ((imitated, observed), (imitated, imitated), (observed, observed))
    )
    scale = (length * wanted) ** 0.5
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
    parts = [part.abs().mean() for part in (vertical, horizontal) if part.numel()]  # a line has neighbors one way only
    return torch.stack(parts).sum() if parts else images.sum() * 0


def _box(bounds: Bounds, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The range of pixels, shape `(channels or 1, 1, 1)` each."""
    low, high = (torch.as_tensor(end, dtype=like.dtype, device=like.device).reshape(-1, 1, 1) for end in bounds)
    if any(len(end) not in (1, channels) for end in (low, high)) or not (low < high).all():
        raise UsageError(f"The bounds {bounds} are no range of pixels for {channels} channels.")
    return low, high
