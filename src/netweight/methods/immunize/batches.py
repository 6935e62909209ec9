"""Rows of each step, drawn from a seed, and a process's part of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from netweight.core.seeds import torch_generator
from netweight.data.tokens import Batch, Example, collate
from netweight.methods.immunize.distributed import ProcessGroup
from netweight.methods.immunize.pairs import blank


def drawn_rows(count: int, size: int, step: int, *, seed: int, stream: str) -> list[int]:
    """Return the indices of a step's rows: all rows in a random order, then all again in another order."""
    per_pass = math.ceil(count / size)
    generator = torch_generator(seed, stream, step // per_pass)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    first = step % per_pass * size
    return order[first : first + size]


def collate_part(examples: Sequence[Example], rows: Sequence[int], group: ProcessGroup, *, pad_id: int) -> Batch:
    """Put a process's part of a batch of examples together; where it has none, one in which nothing is predicted."""
    chosen = [examples[row] for row in group.part(rows)]
    batch = collate(chosen or [examples[rows[0]]], pad_id=pad_id)
    return batch if chosen else blank(batch)
