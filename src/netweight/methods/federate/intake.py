"""What a server does with updates before it joins them: the sound ones pass, the others are named. Engines call it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.methods.federate.updates import LowRank, Tensors, Update

__all__ = ["Intake", "examine", "fault_of"]


@final
@dataclass(frozen=True)
class Intake:
    """What came in.

    Attributes:
        accepted: Sound updates, in the order of client numbers, one per client.
        refused: Client number → why its update was left out.
    """

    accepted: tuple[Update, ...]
    refused: Mapping[int, str]


def examine(sent: Mapping[int, Tensors], updates: Sequence[Update], *, round: int) -> Intake:
    """Sort updates into those that may be aggregated and those that may not.

    Args:
        sent: What every asked client was sent; its update must have the same names and shapes. Who was asked and
            sent nothing is named, and who was not asked is refused.
        updates: What came in, in any order.
        round: The round under way, from 1; an update of another round is a replay or a latecomer.
    """
    accepted: dict[int, Update] = {}
    refused: dict[int, str] = {}
    for update in sorted(updates, key=lambda update: update.client):
        client = update.client
        if client not in sent:
            refused[client] = "was not asked in this round"
        elif client in accepted or client in refused:
            accepted.pop(client, None)
            refused[client] = "sent two updates in one round"
        elif (fault := fault_of(sent[client], update, round=round)) is not None:
            refused[client] = fault
        else:
            accepted[client] = update
    silent = {client: "sent nothing" for client in sent if client not in accepted and client not in refused}
    return Intake(tuple(accepted.values()), {**refused, **silent})


def fault_of(sent: Tensors, update: Update, *, round: int) -> str | None:
    """Say what is wrong with one update, or None: round, number of examples, names, shapes, kinds, finite values.

    Args:
        sent: What the server sent: tensors by name.
        update: What came back.
        round: The round, from 1.
    """
    if update.round != round:
        return f"answers round {update.round}, not {round}: replayed or late"
    if not 1 <= update.n < 2**53:
        return f"says that it has {update.n} examples"
    missing, extra = sorted(set(sent) - set(update.tensors)), sorted(set(update.tensors) - set(sent))
    if missing or extra:
        return "; ".join(f"{word} tensors {names}" for word, names in (("missing", missing), ("extra", extra)) if names)
    for name, base in sent.items():
        fault = _tensor_fault(base, update.tensors[name])
        if fault is not None:
            return f"tensor {name!r} {fault}"
    return None


def _tensor_fault(base: Tensor, value: Tensor | LowRank) -> str | None:
    if value.shape != base.shape:
        return f"has shape {tuple(value.shape)}, not {tuple(base.shape)}"
    parts = (value,) if isinstance(value, Tensor) else (value.left, value.right)
    for part in parts:
        if part.dtype != base.dtype:
            return f"has dtype {part.dtype}, not {base.dtype}"
    largest = [_largest(part) for part in parts]
    if not all(math.isfinite(size) for size in largest):
        return "holds NaN or Inf"
    if isinstance(value, LowRank):
        # Finite factors alone do not say that their product is.
        bound = largest[0] * largest[1] * value.left.shape[1]
        if not math.isfinite(value.scale) or not bound < torch.finfo(base.dtype).max:
            return "holds NaN or Inf, or factors whose product could overflow"
    return None


def _largest(part: Tensor) -> float:
    """Return the largest magnitude, NaN if there is one and 0 for an empty tensor: one pass, in the order of memory."""
    if not part.numel():
        return 0.0
    low, high = torch.aminmax(part.T if part.ndim == 2 and part.stride(0) < part.stride(1) else part)
    return max(-low.item(), high.item()) if low == low else math.nan
