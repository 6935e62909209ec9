"""One side of a loss goes backward: gradient norms term by term without room for them, and balanced weights.

Used by `training.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from netweight.methods.immunize.defense import Side

__all__ = ["TermLog", "backward"]


@final
@dataclass(frozen=True)
class TermLog:
    """What a term was at one step.

    Attributes:
        value: Its value, without weight.
        weight: What it was multiplied by.
        norm: Norm of its gradient by all trained weights, without weight; None where it was not measured.
    """

    value: float
    weight: float
    norm: float | None = None


@contextmanager
def _measured(parameters: Sequence[nn.Parameter], *, keep: bool) -> Iterator[list[Tensor]]:
    """Sum the squares of each gradient as it arrives; without `keep` nothing of it is added to `grad`."""
    squares: list[Tensor] = []

    def hook(grad: Tensor) -> Tensor | None:
        squares.append(grad.detach().float().square().sum())
        return None if keep else torch.zeros_like(grad)

    handles = [parameter.register_hook(hook) for parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield squares
    finally:
        for handle in handles:
            handle.remove()


def _norm(value: Tensor, parameters: Sequence[nn.Parameter], *, keep: bool) -> float:
    with _measured(parameters, keep=keep) as squares:
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def backward(
    side: Side, parameters: Sequence[nn.Parameter], weights: MutableMapping[str, float], *, measure: bool
) -> dict[str, TermLog]:
    """Add the gradients of a side's terms to `grad`.

    Args:
        side: The terms.
        parameters: What is trained.
        weights: Balanced weights found so far, by term; entered and lowered here. A weight never rises again: a term
            that has almost reached its aim has a small gradient that is mostly chance, which must not be made loud.
        measure: Whether to measure each term's gradient and to balance anew. Terms without a weight are measured
            whatever this says.

    Returns:
        What each term was.
    """
    unknown = any(term.share is not None and name not in weights for name, term in side.items())
    if measure or unknown:
        return _one_by_one(side, parameters, weights)
    used = {name: term.weight if term.share is None else weights[name] for name, term in side.items()}
    total = torch.stack([used[name] * term.value for name, term in side.items()]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return {name: TermLog(term.value.detach().item(), used[name]) for name, term in side.items()}


def _one_by_one(
    side: Side, parameters: Sequence[nn.Parameter], weights: MutableMapping[str, float]
) -> dict[str, TermLog]:
    logs: dict[str, TermLog] = {}
    pull = 0.0
    for name, term in side.items():
        if term.share is None:
            weighted = _norm(term.weight * term.value, parameters, keep=True)
            norm = weighted / abs(term.weight) if term.weight else 0.0
            logs[name] = TermLog(term.value.detach().item(), term.weight, norm)
            pull += weighted
    for name, term in side.items():
        if term.share is not None:
            norm = _norm(term.value, parameters, keep=False)
            weight = 0.0
            if (
                0 < norm < math.inf and pull < math.inf
            ):  # else there is nothing to balance by; the next step tries again
                found = term.share * pull / norm
                weight = weights[name] = min(found, weights.get(name, found))
            (weight * term.value).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            logs[name] = TermLog(term.value.detach().item(), weight, norm)
    return {name: logs[name] for name in side}
