"""Pairs of answers to one prompt, a harmless and a harmful one, that no shuffling can part. Defenses train on them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.data.examples import IGNORED, Batch, Pair, collate
from netweight.methods.immunize.distributed import ALONE, Ranks


@final
@dataclass(frozen=True)
class PairBatch:
    """Pairs side by side: row i of both batches is one pair."""

    harmless: Batch  # prompts with chosen answers
    harmful: Batch
    ranks: Ranks = ALONE  # the processes that share the batch; the rows are this one's

    def to(self, device: torch.device | str) -> PairBatch:
        """Return both on a device."""
        return PairBatch(self.harmless.to(device), self.harmful.to(device), self.ranks)


def collate_pairs(pairs: Sequence[Pair], *, pad_id: int, aligned: bool = False) -> PairBatch:
    """Put pairs side by side; losses look at answers alone, padding is ignored."""
    harmless = collate([pair.harmless for pair in pairs], pad_id=pad_id)
    harmful = collate([pair.harmful for pair in pairs], pad_id=pad_id)
    if aligned:
        width = max(harmless.input_ids.shape[1], harmful.input_ids.shape[1])
        harmless, harmful = (_widened(batch, width, pad_id) for batch in (harmless, harmful))
    return PairBatch(harmless, harmful)


def own_rows(rows: Sequence[int], ranks: Ranks) -> list[int]:
    """A process's part of a batch's rows: neighbors, as many as others have or one fewer; may be none."""
    bounds = [len(rows) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1)]
    return list(rows[slice(*bounds)])


def blank(batch: Batch) -> Batch:
    """The same rows with nothing to be predicted: what a process runs that has no rows of a batch."""
    return Batch(batch.input_ids, batch.attention_mask, torch.full_like(batch.labels, IGNORED))


def _widened(batch: Batch, width: int, pad_id: int) -> Batch:
    def pad(values: Tensor, filling: int) -> Tensor:
        return functional.pad(values, (0, width - values.shape[1]), value=filling)

    return Batch(pad(batch.input_ids, pad_id), pad(batch.attention_mask, 0), pad(batch.labels, IGNORED))


@final
@dataclass(frozen=True)
class Term:
    """A term of a loss."""

    value: Tensor  # a scalar in the graph
    weight: float = 1.0  # what it is multiplied by; negative for what is to grow
    # If given, the weight is found such that the norm of this term's gradient is that of the side's other terms times
    # this number, and `weight` is not used.
    share: float | None = None


# Terms by name whose graphs may be shared and that go backward together.
Side = Mapping[str, Term]


class Defense(Protocol):
    """A way to immunize a model; a frozen dataclass whose fields are its settings, so that a record can hold it."""

    @property
    def name(self) -> str:
        """What the catalog, records and tables call it."""

    @property
    def aligned(self) -> bool:
        """Whether the sides of a batch must have one width."""

    @property
    def trains(self) -> bool:
        """Whether there is anything to train; else `prepared` does it all."""

    def prepared(self, model: nn.Module, *, seed: int) -> AbstractContextManager[None]:
        """Check the model and make it ready; it is trained within the block, and left as a user wants it after."""

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """Compute the loss of a batch, each side when it is asked for, after the one before went backward."""
