"""Gradients of a defense's terms, which go backward group by group, are measured and balanced against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.seeds import derive, torch_generator
from netweight.data.tokens import Batch
from netweight.errors import UsageError
from netweight.methods.immunize.defense import Defense, TermGroup
from netweight.methods.immunize.distributed import (
    ALONE,
    ProcessGroup,
    average_gradients,
    common_norm,
    is_sharded,
)
from netweight.methods.immunize.pairs import PairBatch


@final
@dataclass(frozen=True)
class TermLog:
    """Value of a term at one step."""

    value: float
    """Value of the term, without weight."""
    weight: float
    """Factor of the term in the loss."""
    norm: float | None = None
    """Norm of its gradient by all trained weights, without weight; None where it was not measured."""


def add_gradients(
    defense: Defense[Any],
    model: nn.Module,
    batch: PairBatch,
    retained: Batch | None,
    parameters: Sequence[nn.Parameter],
    balance: MutableMapping[str, float],
    *,
    draws: tuple[int, ...],
    measure: bool,
    scale: float = 1.0,
    then: Callable[[], None] = lambda: None,
) -> dict[str, TermLog]:
    """Add to `grad` what a batch and retained rows give: the part of a step that all ways of training share."""
    # Groups of terms go forward and backward one after the other: before the next one is computed, the graph of the
    # last one is gone. `then` is done after each. `draws`, a seed and the number of the step, decides on noise and
    # dropout. `balance`: term → the weight that balances it, which is updated.

    if retained is None and defense.needs_retained:
        raise UsageError(
            f"{defense.name} needs rows of answers that the model should keep, and none were given.",
            cure="Give rows to keep (--retain).",
        )

    def groups() -> Iterator[TermGroup]:
        yield from defense.term_groups(model, batch, torch_generator(draws[0], "noise", *draws[1:]))
        if retained is not None:
            yield defense.retained_terms(model, retained, batch.group)

    logs: dict[str, TermLog] = {}
    with same_draws_after(parameters), closing(groups()) as all_groups:  # type: ignore[type-var]
        # Other rows would be dropped out in another way.
        others = (batch.group.rank,) if batch.group.rank else ()
        torch.manual_seed(derive(draws[0], "dropout", *draws[1:], *others))
        for terms in all_groups:
            logs |= backward(terms, parameters, balance, measure=measure, group=batch.group, scale=scale)
            del terms
            then()
    return logs


def same_draws_after(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let what comes after a block draw the random numbers that it would have drawn without it, such as dropout."""
    cuda = sorted({value.device for value in parameters if value.device.type == "cuda"}, key=str)
    return torch.random.fork_rng(devices=cuda)


def backward(
    terms: TermGroup,
    parameters: Sequence[nn.Parameter],
    balance: MutableMapping[str, float],
    *,
    measure: bool,
    group: ProcessGroup = ALONE,
    scale: float = 1.0,
) -> dict[str, TermLog]:
    """Add a group's gradients, times `scale`, to `grad`; `balance` keeps the weights of balanced terms."""
    # Where processes share the batch, values and norms are those of the whole batch, and what is measured needs room
    # for one more gradient.
    values = _values(terms, group)
    if scale != 1.0:
        terms = {name: replace(term, value=term.value * scale) for name, term in terms.items()}
    unknown = any(term.share is not None and name not in balance for name, term in terms.items())
    if measure or unknown:
        logs = _one_by_one(terms, values, parameters, balance, group)
        return {name: replace(log, norm=log.norm and log.norm / scale) for name, log in logs.items()}
    used = {name: term.weight if term.share is None else balance[name] for name, term in terms.items()}
    total = torch.stack([used[name] * term.value for name, term in terms.items()]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return {name: TermLog(value, used[name]) for name, value in values.items()}


def _one_by_one(
    terms: TermGroup,
    values: Mapping[str, float],
    parameters: Sequence[nn.Parameter],
    balance: MutableMapping[str, float],
    group: ProcessGroup,
) -> dict[str, TermLog]:
    logs: dict[str, TermLog] = {}
    pull = 0.0
    for name, term in terms.items():
        if term.share is None:
            weighted = _norm(term.weight * term.value, parameters, group, keep=True)
            norm = weighted / abs(term.weight) if term.weight else 0.0
            logs[name] = TermLog(values[name], term.weight, norm)
            pull += weighted
    for name, term in terms.items():
        if term.share is not None:
            norm = _norm(term.value, parameters, group, keep=False)
            weight = 0.0
            # Else there is nothing to balance by; the next step tries again.
            if 0 < norm < math.inf and pull < math.inf:
                proposed = term.share * pull / norm
                weight = balance[name] = min(proposed, balance.get(name, proposed))
            (weight * term.value).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            logs[name] = TermLog(values[name], weight, norm)
    return {name: logs[name] for name in terms}


def _values(terms: TermGroup, group: ProcessGroup) -> dict[str, float]:
    """The terms of the whole batch."""
    values = [term.value.detach().item() for term in terms.values()]
    if group.size > 1:
        values = group.mean(torch.tensor(values, dtype=torch.float64)).tolist()
    return dict(zip(terms, values, strict=True))


def _norm(value: Tensor, parameters: Sequence[nn.Parameter], group: ProcessGroup, *, keep: bool) -> float:
    """The norm of a scalar's gradient, without room for it; `keep` adds the gradient to `grad` on the way."""
    # Hooks receive gradients before they are averaged, or none at all.
    if group.size > 1 or any(map(is_sharded, parameters)):
        norm = gradient_norm(value, parameters, group)
        if keep:
            value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return norm
    with _measured(parameters, keep=keep) as squares:
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


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


def gradient_norm(value: Tensor, parameters: Iterable[nn.Parameter], group: ProcessGroup = ALONE) -> float:
    """The norm of a scalar's gradient by all parameters; the graph is kept, no parameter's `grad` changes."""
    parameters = list(parameters)
    if any(is_sharded(parameter) for parameter in parameters):
        return _norm_of_shards(value, parameters, group)
    grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    # The gradients are averaged one after the other. A parameter without a gradient in one process may have one in
    # another.
    if group.size > 1:
        squares = [
            group.mean(torch.zeros_like(parameter) if grad is None else grad).float().square().sum()
            for parameter, grad in zip(parameters, grads, strict=True)
        ]
        return float(torch.stack(squares).sum().sqrt())
    norms = [grad.float().norm() for grad in grads if grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _norm_of_shards(value: Tensor, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> float:
    """As above: FSDP computes with other tensors than its parts, and only going backward it gives these a gradient."""
    held = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        average_gradients(parameters, group)
        return common_norm([parameter.grad for parameter in parameters if parameter.grad is not None], group)
    finally:
        for parameter, grad in zip(parameters, held, strict=True):
            parameter.grad = grad
