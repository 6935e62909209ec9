"""Tensors of a model in memory as a source that is written as a compressed file: see `TensorSource`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch

from netweight import codec
from netweight.codec.header import Bytes, dtype_name
from netweight.methods.compress.runtime.storage import CompressedStorage, check_whole
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.store.choices import Level
from netweight.store.safetensors import build_header, parse_header


@final
class ModelSource:
    """Tensors in memory, dense and compressed, in the order in which safetensors would write them.

    Args:
        tensors: Tensors by name. Compressed ones are written as they are, without decoding them.
        level: The codec's level, for views of compressed weights.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], level: Level = "default") -> None:
        self._tensors, self._level = tensors, level
        self._contiguous: tuple[str | None, torch.Tensor] = None, torch.empty(0)
        ordered = sorted((-tensor.element_size(), name) for name, tensor in tensors.items())
        entries = [
            (name, dtype_name((tensor := tensors[name]).dtype), tuple(tensor.shape), _nbytes(tensor))
            for _, name in ordered
        ]
        self.header = parse_header(build_header(entries, {"format": "pt"}))
        self.mode: int | None = None

    def part(self, name: str, start: int, stop: int) -> Bytes:
        """Return bytes of a dense tensor.

        Args:
            name: The tensor's name.
            start: The first byte.
            stop: After the last one.
        """
        # A tensor that is not contiguous is copied once, and not once for each part.
        held, numbers = self._contiguous
        if held != name:
            numbers = self._tensors[name].detach().reshape(-1)
            self._contiguous = name, numbers
        content: Bytes = np.empty(0, np.uint8)
        if numbers.numel():
            content = numbers.view(torch.uint8)[start:stop].cpu().numpy()
        return content

    def is_encoded(self, name: str) -> bool:
        """Return whether a tensor is a compressed weight.

        Args:
            name: The tensor's name.
        """
        return isinstance(self._tensors[name], CompressedTensor)

    def blob(self, name: str) -> bytes | memoryview:
        """Return the codec's bytes of a compressed weight; a view of one is decoded and encoded again.

        Args:
            name: The tensor's name, of one that `is_encoded`.
        """
        tensor: Any = self._tensors[name]
        if not tensor.views:
            stored: CompressedStorage = tensor.stored
            check_whole(stored.payload)
            return stored.blob
        return codec.encode(tensor.dense().detach().cpu(), level=self._level, threads=torch.get_num_threads())

    def refuse_changes(self) -> None:
        """Do nothing: whoever saves a model does not change it meanwhile."""


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
