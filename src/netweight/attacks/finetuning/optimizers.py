"""Optimizers of an attack."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import nn

from netweight.attacks.finetuning.settings import AttackSettings
from netweight.core.lazy import library

# Sides of a matrix above this have no preconditioner in SOAP.
_LARGEST = 2048
# Iterations of Newton and Schulz in a step of Muon.
_ITERATIONS = 5


def has_soap() -> bool:
    """Return whether the package of the second-order optimizer is installed."""
    return importlib.util.find_spec("pytorch_optimizer") is not None


def optimizers_of(parameters: list[nn.Parameter], settings: AttackSettings) -> list[torch.optim.Optimizer]:
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    if settings.optimizer == "sgd":
        return [torch.optim.SGD(parameters, settings.lr, momentum=0.9, fused=fused)]
    if settings.optimizer == "adam":
        return [torch.optim.Adam(parameters, settings.lr, fused=fused)]
    if settings.optimizer == "soap":
        soap = library("pytorch_optimizer", "SOAP", "attacks").SOAP
        # Preconditioners of every step: attacks are so short that older ones would hardly be used.
        return [
            soap(parameters, lr=settings.lr, weight_decay=0.0, precondition_frequency=1, max_precondition_dim=_LARGEST)
        ]
    if settings.optimizer == "lion":
        return [Lion(parameters, settings.lr)]
    if settings.optimizer == "schedule-free":
        return [ScheduleFree(parameters, settings.lr)]
    if settings.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, settings.lr, weight_decay=0.01, fused=fused)]
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made += [Muon(matrices, settings.lr)]
    return made + ([torch.optim.AdamW(rest, settings.lr, weight_decay=0.0, fused=fused)] if rest else [])


def operations_per_step(shapes: Iterable[Sequence[int]], optimizer: str) -> float:
    """Estimate the operations of one step of an optimizer beyond those that grow with the number of weights alone.

    Muon multiplies each matrix of s rows and l columns (s ≤ l) three times in each iteration; SOAP factorizes one or
    two matrices of each side up to 2,048 in every step and multiplies by them. Others have none.
    """
    operations = 0.0
    for shape in shapes:
        if len(shape) != 2:
            continue
        short, long = min(shape), max(shape)
        if optimizer == "muon":
            operations += _ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)
        elif optimizer == "soap":
            sides = [(side, short * long / side) for side in shape if side <= _LARGEST]
            operations += sum(10.0 * side**3 + 10.0 * side**2 * other for side, other in sides)
    return operations


@final
class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` without weight decay, in float32: processors without bfloat16 need a quarter of the time."""

    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; rates are as AdamW's."""
        for matrix in self.param_groups[0]["params"]:
            if matrix.grad is not None:
                mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix.grad))
                update = matrix.grad.lerp(mean.lerp_(matrix.grad, 0.05), 0.95).float()
                wide = update.T if len(update) > len(update.T) else update
                wide = wide / wide.norm().clamp(min=1e-7)
                for _ in range(_ITERATIONS):
                    gram = wide @ wide.T
                    change = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
                    wide = torch.addmm(wide, change, wide, beta=3.4445)
                rate = 0.2 * max(update.shape) ** 0.5 * self.param_groups[0]["lr"]
                matrix.sub_((wide.T if len(update) > len(update.T) else wide).to(matrix), alpha=rate)


@final
class Lion(torch.optim.Optimizer):
    """Lion without weight decay: every weight moves by the learning rate. Source: arXiv 2302.06675, algorithm 2."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter.grad))
                parameter.sub_(parameter.grad.lerp(mean, 0.9).sign(), alpha=self.param_groups[0]["lr"])
                mean.lerp_(parameter.grad, 0.01)


@final
class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW without weight decay: gradients are taken near the mean of all steps, which is the result.

    Source: arXiv 2405.15682, algorithm 1, with a second moment of 0.99, as attacks are short.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for parameter in parameters:
            start = parameter.detach()
            self.state[parameter] = {
                "fast": start.clone(), "mean": start.clone(), "square": torch.zeros_like(start), "steps": 0
            }  # fmt: skip

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["steps"] += 1
                state["square"].lerp_(parameter.grad.square(), 0.01)
                spread = (state["square"] / (1 - 0.99 ** state["steps"])).sqrt().add_(1e-8)
                state["fast"].addcdiv_(parameter.grad, spread, value=-self.param_groups[0]["lr"])
                state["mean"].lerp_(state["fast"], 1 / state["steps"])
                parameter.copy_(state["fast"].lerp(state["mean"], 0.9))

    def means(self) -> list[torch.Tensor]:
        """Return the weights that are the result, in the order of the parameters."""
        return [self.state[parameter]["mean"] for parameter in self.param_groups[0]["params"]]
