"""A worker's largest tensors in memory that is used again in the next round. Training of hypernetworks calls it.

The system's allocator gives blocks of this size back at once, and memory's first touch costs as much as the work on it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

__all__ = ["ReusedMemory"]

_OWN_REFERENCES = 2
"""What `sys.getrefcount` says of an array that nobody else holds: the dictionary's reference and its argument."""


@final
class ReusedMemory:
    """Blocks of memory by name, each given out again once no tensor lies in it any more."""

    def __init__(self) -> None:
        self._blocks: dict[str, np.ndarray] = {}

    def empty(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor with any values, of the kind and on the device of `like`.

        Args:
            name: The block. While tensors still lie in it, a new one takes its name, and theirs goes with them.
            shape: The tensor's.
            like: Gives dtype and device; memory is used again on a CPU only, torch does so itself on a GPU.
        """
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        if not self._is_free(name, size):
            self._blocks[name] = np.empty(size, dtype=np.uint8)
        return torch.from_numpy(self._blocks[name])[:size].view(like.dtype).view(shape)

    def _is_free(self, name: str, size: int) -> bool:
        """Whether a block is at hand: large enough, and without tensors, each of which holds a reference to it."""
        if name not in self._blocks:
            return False
        return len(self._blocks[name]) >= size and sys.getrefcount(self._blocks[name]) == _OWN_REFERENCES
