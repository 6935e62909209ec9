"""Training many adapters of one frozen model at once: one forward pass for all of them, one elementwise optimizer.

Each sample runs with its own adapter's factors, the losses are summed, and Adam treats every number by itself, so that
each adapter ends as if it had been trained alone. What the model is and what its loss, is up to the caller:
`netweight.hf.adapters` has losses for diffusers and transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import TrainingStopped, UsageError
from netweight.nn.apply_lora import applied
from netweight.nn.lora import AdapterStack


@final
@dataclass(frozen=True)
class AdapterRecipe:
    """Settings of the training of adapters."""

    rank: int = 1
    """Rank of each adapter."""
    scale: float = 1.0
    """ΔW = scale · up @ down: alpha / rank."""
    steps: int = 100
    """Optimizer steps."""
    learning_rate: float = 0.03
    """Adam's at the first step; it falls linearly to nothing."""
    start: Literal["shared", "independent"] = "shared"
    """Start of all adapters from the same `down`, or of each from its own, which its name determines; `up`
    starts at 0.
    """
    train_down: bool = True
    """True to train `down`; if not, every change is linear in `up` (LoRA-FA)."""
    seed: int = 0
    """Adapters of one seed see the same noise."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.rank < 1 or self.steps < 1 or not self.learning_rate > 0 or not self.scale > 0:
            raise UsageError(
                f"rank={self.rank}, steps={self.steps}, learning_rate={self.learning_rate} or scale={self.scale} is "
                "out of range.",
                cure="Give ranks and steps of at least 1, and a positive rate and scale.",
            )
        if self.start not in ("shared", "independent"):
            raise UsageError(f"start is {self.start!r}.", cure="Choose shared or independent.")


@final
@dataclass(frozen=True, eq=False)
class FittedAdapters:
    """Adapters that were trained together."""

    names: tuple[str, ...]
    """Names of the adapters."""
    stack: AdapterStack
    """The adapters, fp32."""
    losses: Tensor
    """Each one's mean loss over the last tenth of its steps, shape `(n,)`."""


def _initial_adapters(
    names: Sequence[str],
    layers: Mapping[str, tuple[int, int]],
    recipe: AdapterRecipe,
    device: torch.device | str = "cpu",
) -> AdapterStack:
    """Return adapters that change nothing yet: `down` even within ±1/√columns as in peft, `up` 0."""
    if not names or not layers or len(set(names)) != len(names):
        raise UsageError(
            f"There are {len(names)} adapters with {len(set(names))} different names, and {len(layers)} layers.",
            cure="Give at least one adapter and one layer, and each adapter a name of its own.",
        )
    down, up = {}, {}
    for module, (rows, columns) in layers.items():
        seeds = [()] if recipe.start == "shared" else [(name,) for name in names]
        starts = [
            torch.rand(recipe.rank, columns, generator=torch_generator(recipe.seed, "down", module, *path))
            for path in seeds
        ]
        start = (torch.stack(starts) * 2 - 1) / math.sqrt(columns)
        down[module] = start.expand(len(names), -1, -1).clone().to(device)
        up[module] = torch.zeros(len(names), rows, recipe.rank, device=device)
    scale = {module: torch.full((len(names),), recipe.scale, dtype=torch.float64) for module in layers}
    ranks = {module: torch.full((len(names),), recipe.rank) for module in layers}
    return AdapterStack(down, up, scale, ranks)


def fit_adapters(
    model: nn.Module,
    names: Sequence[str],
    layers: Mapping[str, tuple[int, int]],
    losses: Callable[[int, int], Tensor],
    recipe: AdapterRecipe,
    *,
    each: int,
    signs: Sequence[int] = (1,),
    component: str = "",
    progress: Progress = QUIET,
) -> FittedAdapters:
    """Train adapters of one model together.

    `losses`: step and sign → one loss for each adapter, shape `(n,)`; runs the model once on a batch in which the
    samples of the first adapter come first, then those of the second; what it draws depends on the step alone, or on
    the adapter's name, never on who else is trained. `signs`: what adapters are multiplied with while a loss is
    computed, one loss after the other; 1 and -1 for adapters whose negative has to be of use, too.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    stack = _initial_adapters(names, layers, recipe, device)
    trained = [*stack.up.values(), *(stack.down.values() if recipe.train_down else ())]
    for factor in trained:
        factor.requires_grad_(True)
    optimizer = torch.optim.Adam(trained, lr=recipe.learning_rate, fused=True)
    groups = torch.arange(len(names), device=device).repeat_interleave(each)
    last, late = torch.zeros(len(names), device=device), max(recipe.steps // 10, 1)
    what = f"{len(names)} adapters"
    with _frozen(model), applied(model, stack, groups, component=component):
        for step in progress.track(range(recipe.steps), what, recipe.steps, unit="steps"):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * (1 - step / recipe.steps)
            for sign in signs:
                _scale_(stack, recipe.scale * sign)
                step_losses = _checked(losses(step, sign), names, step)
                step_losses.sum().backward()  # type: ignore[no-untyped-call]
                if step >= recipe.steps - late:
                    last += step_losses.detach() / (late * len(signs))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    _scale_(stack, recipe.scale)
    for factor in trained:
        factor.requires_grad_(False)
    return FittedAdapters(tuple(names), stack, last.cpu())


def _scale_(stack: AdapterStack, scale: float) -> None:
    """Scale adapters in place: a model that they are applied to reads the scale whenever it runs."""
    for values in stack.scale.values():
        values.fill_(scale)


def _checked(losses: Tensor, names: Sequence[str], step: int) -> Tensor:
    if losses.shape != (len(names),):
        raise UsageError(
            f"Losses have shape {tuple(losses.shape)}.", cure=f"Return one for each of {len(names)} adapters."
        )
    finite = losses.detach().isfinite()
    if not bool(finite.all()):
        worst = int((~finite).nonzero()[0])
        raise TrainingStopped(
            f"The loss of adapter {names[worst]!r} became {float(losses.detach()[worst])} at step {step}.",
            cure="Check what it is trained on, or choose a lower learning rate.",
        )
    return losses


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Keep a model's weights out of the backward pass, and out of training mode."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    for parameter in trained:
        parameter.requires_grad_(False)
    model.eval()
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
