"""Steps that several defenses take: disturbed states, gradients at other weights, blocks by their depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.data.tokens import Batch
from netweight.errors import Unsupported
from netweight.hf.load_language_model import structure_of
from netweight.methods.immunize.defense import Defense
from netweight.methods.immunize.distributed import (
    ProcessGroup,
    is_sharded,
)
from netweight.methods.immunize.gradients import same_draws_after
from netweight.methods.immunize.pairs import blank
from netweight.nn.hooks import edit_outputs


def disturbed(model: nn.Module, shifts: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Add to what modules put out at the first tokens."""

    def adding(states: Tensor, shift: Tensor) -> Tensor:
        shift = shift[:, : states.shape[1]].to(states.dtype)
        return states + functional.pad(shift, (0, 0, 0, states.shape[1] - shift.shape[1]))

    return edit_outputs(model, {name: partial(adding, shift=shift) for name, shift in shifts.items()})


def slopes(model: nn.Module, shifts: Mapping[str, Tensor], loss: Callable[[], Tensor]) -> list[Tensor]:
    """Gradients of a loss by what disturbs it, with the dropout that comes next."""
    for shift in shifts.values():
        shift.requires_grad_(True)
    with same_draws_after(model.parameters()), disturbed(model, shifts):
        return list(torch.autograd.grad(loss(), list(shifts.values())))


def blocks_at(model: nn.Module, *numbers: int) -> list[str]:
    """The blocks at the depths of some of 32, counted from 1."""
    blocks = list(structure_of(model).blocks)
    return list(dict.fromkeys(blocks[math.ceil(number / 32 * len(blocks)) - 1] for number in numbers))


def refuse_sharded(defense: Defense[Any], model: nn.Module) -> None:
    if any(map(is_sharded, model.parameters())):
        raise Unsupported(
            f"The defense {defense.name} copies weights, which is not possible if they are sharded.",
            cure="Use DistributedDataParallel or one process, or another defense.",
        )


def rows_of(batch: Batch, chosen: Tensor) -> Batch:
    """Some rows of a batch; where there are none, the batch with nothing to be predicted."""
    parts = (batch.input_ids, batch.attention_mask, batch.labels)
    return Batch(*(part[chosen] for part in parts)) if chosen.any() else blank(batch)


@contextmanager
def returning(weights: Sequence[Tensor]) -> Iterator[None]:
    """Put weights back after a block in which they change; gradients that it left stay."""
    before = [value.detach().clone() for value in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for value, old in zip(weights, before, strict=True):
                value.copy_(old)


def gradients_of(loss: Tensor, weights: Sequence[Tensor], group: ProcessGroup, *, keep: bool = False) -> list[Tensor]:
    """The gradients by all weights of all processes' loss; no weight's `grad` changes."""
    gradients = torch.autograd.grad(loss, weights, retain_graph=keep, allow_unused=True, materialize_grads=True)
    group.average(gradients)
    return list(gradients)
