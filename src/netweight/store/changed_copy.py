"""Copies of a plain safetensors file in which some tensors are changed: piece by piece, and read back."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import torch
import xxhash

from netweight.codec.header import torch_dtype
from netweight.core.tensor_bytes import row_major_bytes
from netweight.errors import OutputFailed
from netweight.store.reader import StoredFile

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 19
"""Bytes that are read, changed and written at once: as many as stay in a processor's cache."""
# Bytes of the new file that are compared at once.
_MAPPED = 1 << 22


@final
class ChangedCopy:
    """A copy of a plain safetensors file that is being written, tensor by tensor in the order of the data.

    All bytes pass through one buffer, so that the system provides no new memory for them. A digest of what is written
    is compared with that of the file at the end.

    Args:
        source: The file that is copied.
        out: The new file, open for writing and reading.
    """

    def __init__(self, source: StoredFile, out: IO[bytes]) -> None:
        self._source, self._out = source, out
        self._spans = {span.name: span for span in source.header.spans}
        self._digest = xxhash.xxh3_128()
        self._narrow = torch.empty(PIECE, dtype=torch.uint8)
        self._wide = torch.empty(0)

    def head(self, head: bytes) -> None:
        """Write the bytes before the data.

        Args:
            head: The header with its length; it must declare the tensors of the source, in their order.
        """
        self._write(memoryview(head))

    def copy(self, name: str) -> None:
        """Copy a tensor byte for byte.

        Args:
            name: The tensor.
        """
        span = self._spans[name]
        for start in range(0, span.nbytes, PIECE):
            piece = self._piece(min(PIECE, span.nbytes - start))
            self._source.read_into(span, start, piece)
            self._write(piece)

    def change(self, name: str, dtype: torch.dtype, change: Callable[[int, Tensor], None]) -> bool:
        """Change a tensor some rows at a time.

        Args:
            name: The tensor, with at least one dimension.
            dtype: The data type in which rows are changed; they are rounded once to the tensor's own.
            change: Takes the number of the first row, and rows of shape `(n, …)`, which it changes in place.

        Returns:
            Whether any byte of the tensor is another one now.
        """
        span, own = self._spans[name], torch_dtype(self._spans[name].dtype)
        rows = span.shape[0]
        width = span.nbytes // rows if rows else 0
        step = max(1, PIECE // max(width, 1))
        differs = False
        for start in range(0, rows, step):
            shape = (min(step, rows - start), *span.shape[1:])
            piece = self._piece(shape[0] * width)
            self._source.read_into(span, start * width, piece)
            before = None if differs else xxhash.xxh3_64_intdigest(piece)
            stored = torch.frombuffer(piece, dtype=own).view(shape) if piece.nbytes else torch.empty(shape, dtype=own)
            values = self._values(stored.numel(), dtype).view(shape)
            values.copy_(stored)
            change(start, values)
            stored.copy_(values)
            differs = differs or xxhash.xxh3_64_intdigest(piece) != before
            self._write(piece)
        return differs

    def replace(self, name: str, tensor: Tensor) -> bool:
        """Write another tensor in the place of one.

        Args:
            name: The tensor that is replaced.
            tensor: The new one, of the same shape and data type.

        Returns:
            Whether any byte of it is another one.
        """
        span = self._spans[name]
        whole: Any = row_major_bytes(tensor).numpy()
        # The header declares the source's size.
        assert whole.nbytes == span.nbytes
        differs = False
        for start in range(0, span.nbytes, PIECE):
            piece = memoryview(whole)[start : start + PIECE]
            if not differs:
                before = self._piece(len(piece))
                self._source.read_into(span, start, before)
                differs = before != piece
            self._write(piece)
        return differs

    def check(self, target: Path) -> None:
        """Read the new file back.

        Args:
            target: The file's name to be, for the message.

        Raises:
            OutputFailed: It does not contain what was written.
        """
        self._out.flush()
        again = xxhash.xxh3_128()
        # Mapped, since nobody else can shorten this file, and mapping costs a third of reading; window by window, since
        # mapped pages count as memory of this process.
        size = os.fstat(self._out.fileno()).st_size
        for start in range(0, size, _MAPPED):
            length = min(_MAPPED, size - start)
            with mmap.mmap(self._out.fileno(), length, access=mmap.ACCESS_READ, offset=start) as window:
                again.update(window)
        if again.digest() != self._digest.digest():
            raise OutputFailed(
                f"{target} was written, and other bytes were read back.",
                cure="Check the disk and its free space, or write to another place.",
            )

    def _write(self, piece: memoryview) -> None:
        self._digest.update(piece)
        self._out.write(piece)

    def _piece(self, nbytes: int) -> memoryview:
        if nbytes > len(self._narrow):
            self._narrow = torch.empty(nbytes, dtype=torch.uint8)
        whole: Any = self._narrow.numpy()
        return memoryview(whole)[:nbytes]

    def _values(self, count: int, dtype: torch.dtype) -> Tensor:
        if count > len(self._wide) or self._wide.dtype != dtype:
            self._wide = torch.empty(count, dtype=dtype)
        return self._wide[:count]
