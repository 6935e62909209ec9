"""The one thing that workers of a distributed fit exchange: sums. Alone, a sum is what one has.

Every worker reads its own rows; after each pass the workers add up what they found, and go on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from netweight.errors import UsageError

__all__ = ["Alone", "ProcessGroup", "ShardSum"]


class ShardSum(Protocol):
    """Adds up tensors over workers."""

    @property
    def number(self) -> int:
        """This worker's, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers, which call this with the same shapes.

        Args:
            tensors: Of any shapes and of a dtype that can be summed; changed in place.
        """
        ...


@final
class Alone:
    """A single worker."""

    number = 0
    count = 1

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Leave them as they are."""


@final
class ProcessGroup:
    """The processes of `torch.distributed`, which must be initialized; gloo or NCCL.

    Raises:
        UsageError: It is not initialized.
    """

    def __init__(self) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise UsageError(
                "torch.distributed is not initialized.", cure="Start with torchrun and call init_process_group."
            )
        self.number = torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each over all processes."""
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
