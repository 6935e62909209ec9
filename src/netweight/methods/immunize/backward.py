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
from netweight.methods.immunize.gradient_norms import gradient_norm
from netweight.methods.immunize.ranks import ALONE, Ranks
from netweight.methods.immunize.sharded import is_sharded

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


def _norm(value: Tensor, parameters: Sequence[nn.Parameter], ranks: Ranks, *, keep: bool) -> float:
    if ranks.size > 1 or any(map(is_sharded, parameters)):  # hooks see gradients before they are averaged, or nothing
        norm = gradient_norm(value, parameters, ranks)
        if keep:
            value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return norm
    with _measured(parameters, keep=keep) as squares:
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def backward(
    side: Side,
    parameters: Sequence[nn.Parameter],
    weights: MutableMapping[str, float],
    *,
    measure: bool,
    ranks: Ranks = ALONE,
) -> dict[str, TermLog]:
    """Add the gradients of a side's terms to `grad`.

    Where processes share the batch, values and norms are those of the whole batch, and what is measured needs room for
    one more gradient.

    Args:
        side: The terms.
        parameters: What is trained.
        weights: Balanced weights found so far, by term; entered and lowered here. A weight never rises again: a term
            that has almost reached its aim has a small gradient that is mostly chance, which must not be made loud.
        measure: Whether to measure each term's gradient and to balance anew. Terms without a weight are measured
            whatever this says.
        ranks: The processes that share the batch.

    Returns:
        What each term was.
    """
    unknown = any(term.share is not None and name not in weights for name, term in side.items())
    if measure or unknown:
        return _one_by_one(side, parameters, weights, ranks)
    used = {name: term.weight if term.share is None else weights[name] for name, term in side.items()}
    total = torch.stack([used[name] * term.value for name, term in side.items()]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    values = _values(side, ranks)
    return {name: TermLog(values[name], used[name]) for name in side}


def _values(side: Side, ranks: Ranks) -> dict[str, float]:
    """The terms of the whole batch."""
    values = [term.value.detach().item() for term in side.values()]
    if ranks.size > 1:
        values = ranks.mean(torch.tensor(values, dtype=torch.float64)).tolist()
    return dict(zip(side, values, strict=True))


def _one_by_one(
    side: Side, parameters: Sequence[nn.Parameter], weights: MutableMapping[str, float], ranks: Ranks
) -> dict[str, TermLog]:
    logs: dict[str, TermLog] = {}
    values = _values(side, ranks)
    pull = 0.0
    for name, term in side.items():
        if term.share is None:
            weighted = _norm(term.weight * term.value, parameters, ranks, keep=True)
            norm = weighted / abs(term.weight) if term.weight else 0.0
            logs[name] = TermLog(values[name], term.weight, norm)
            pull += weighted
    for name, term in side.items():
        if term.share is not None:
            norm = _norm(term.value, parameters, ranks, keep=False)
            weight = 0.0
            if (
                0 < norm < math.inf and pull < math.inf
            ):  # else there is nothing to balance by; the next step tries again
                found = term.share * pull / norm
                weight = weights[name] = min(found, weights.get(name, found))
            (weight * term.value).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            logs[name] = TermLog(values[name], weight, norm)
    return {name: logs[name] for name in side}
