"""Blocks of memory that one round after another uses, so that large tensors are not allocated anew in each."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor


@final
class ReusedMemory:
    """Blocks of memory by name, each reused once no tensor uses it any more."""

    # The system's allocator returns blocks of this size at once, and the first touch of memory costs as much as the
    # work on it. A tensor made of an array keeps that very array alive: while it lives, its block is taken.

    def __init__(self) -> None:
        # The values are the memory, and the array that was last given out.
        self._blocks: dict[str, tuple[np.ndarray, weakref.ref[np.ndarray]]] = {}

    def empty(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor with any values, of the kind and on the device of `like`."""
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        entry = self._blocks.get(name)
        free = entry is not None and len(entry[0]) >= size and entry[1]() is None
        block = entry[0] if entry is not None and free else np.empty(size, dtype=np.uint8)
        given = block[:size]
        self._blocks[name] = block, weakref.ref(given)
        return torch.from_numpy(given).view(like.dtype).view(shape)
