"""Pairs of a harmless and a harmful answer to one prompt, in the same row of a batch: shuffling cannot part them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from netweight.data.tokens import IGNORED, AnswerPair, Batch, collate
from netweight.methods.immunize.distributed import (
    ALONE,
    ProcessGroup,
)


@final
@dataclass(frozen=True)
class PairBatch:
    """Pairs side by side: row i of both batches is one pair."""

    harmless: Batch
    """Prompts with chosen answers."""
    harmful: Batch
    """Prompts with rejected answers."""
    group: ProcessGroup = ALONE
    """The processes that share the batch; the rows are this one's."""

    def to(self, device: torch.device | str) -> PairBatch:
        """Return both on a device."""
        return PairBatch(self.harmless.to(device), self.harmful.to(device), self.group)


def collate_pairs(pairs: Sequence[AnswerPair], *, pad_id: int, aligned: bool = False) -> PairBatch:
    """Put pairs side by side; losses are of answers alone, and padding is ignored."""
    harmless = collate([pair.harmless for pair in pairs], pad_id=pad_id)
    harmful = collate([pair.harmful for pair in pairs], pad_id=pad_id)
    if aligned:
        width = max(harmless.input_ids.shape[1], harmful.input_ids.shape[1])
        harmless, harmful = (_widened(batch, width, pad_id) for batch in (harmless, harmful))
    return PairBatch(harmless, harmful)


def _widened(batch: Batch, width: int, pad_id: int) -> Batch:
    def pad(values: Tensor, filling: int) -> Tensor:
        return functional.pad(values, (0, width - values.shape[1]), value=filling)

    return Batch(pad(batch.input_ids, pad_id), pad(batch.attention_mask, 0), pad(batch.labels, IGNORED))


def blank(batch: Batch) -> Batch:
    """Return the same rows without targets, for a process that has no rows of a batch."""
    return Batch(batch.input_ids, batch.attention_mask, torch.full_like(batch.labels, IGNORED))
