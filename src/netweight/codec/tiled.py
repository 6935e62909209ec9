"""The blob of a tensor that never exists whole: encoded tile by tile, in the memory of an older blob as that is read.

A tile is a run of whole chunks. Chunks are encoded independently, so that the blob has the same bytes as if the whole
tensor had been encoded at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from netweight.codec.api import LEVELS, encode_raw
from netweight.codec.header import (
    Bytes,
    HeaderWriter,
    as_bytes,
    bytes_of,
    element_type,
    read_header,
    read_index,
)
from netweight.errors import UsageError


@final
class TiledBlob:
    """Builds a lossless blob from tiles, front to back, and may replace an older blob of the same tensor.

    Tiles go to the memory of the older blob as soon as those that were there have been replaced; until then they wait.
    The header is written at the end, so that all chunks that were not replaced yet can be decoded from that memory.

    Args:
        dtype: Safetensors' name of the element type.
        shape: Shape of the tensor.
        level: Level of the codec.
        chunk_log2: Binary logarithm of the numbers per chunk; None for the codec's own choice, or the older blob's.
        threads: Threads to encode with, at least 1.
        older: Memory that begins with the older blob and may be written; None to begin from nothing.
        size: Bytes of the older blob.

    Raises:
        UsageError: The older blob has a base.
    """

    def __init__(
        self,
        dtype: str,
        shape: Sequence[int],
        *,
        level: str,
        chunk_log2: int | None = None,
        threads: int = 1,
        older: Bytes | None = None,
        size: int = 0,
    ) -> None:
        element = element_type(dtype)
        self._older = older
        # Ends of the chunks of the older blob.
        self._ends: npt.NDArray[np.int64] = np.empty(0, np.int64)
        # End of the new chunks in the older blob's memory.
        self._placed = 0
        if older is not None:
            header = read_header(older[:size])
            if header.base_digest:
                raise UsageError("Only a blob without a base can be replaced by tiles.")
            self._index = read_index(older[:size])
            self._placed = self._index.start
            self._ends = self._placed + np.cumsum(self._index.lengths, dtype=np.int64)
            chunk_log2 = header.chunk_log2
        chunk_log2 = chunk_log2 or element.default_chunk_log2
        self._header = HeaderWriter(element, tuple(shape), LEVELS.index(level), chunk_log2)
        self._threads, self._ended = threads, False
        # Number of chunks that were encoded.
        self._chunks = 0
        # Encoded tiles for which there is no room yet.
        self._waiting: deque[Bytes] = deque()

    @property
    def chunk(self) -> int:
        """Numbers in a chunk; all tiles but the last have a multiple of it."""
        return 1 << self._header.chunk_log2

    def add(self, numbers: npt.NDArray[Any] | Any) -> None:
        """Encode the next tile.

        Args:
            numbers: Contiguous little-endian memory of the tile's numbers; afterwards those in the older blob are lost.

        Raises:
            UsageError: The last tile before this one was not a multiple of a chunk.
        """
        if self._ended:
            raise UsageError(f"Only the last tile may have a size that is not a multiple of {self.chunk} numbers.")
        name, chunk_log2 = self._header.element.name, self._header.chunk_log2
        data = bytes_of(numbers)
        shape = (memoryview(data).nbytes * 8 // self._header.element.bits,)
        self._ended = bool(shape[0] % self.chunk)
        level = LEVELS[self._header.level]
        blob = encode_raw(data, name, shape, level=level, threads=self._threads, chunk_log2=chunk_log2)
        index = read_index(blob)
        self._note(index.lengths, index.checks, index.cpu_modes)
        self._waiting.append(as_bytes(blob)[index.start :])
        if self._older is not None:
            self._write_waiting(self._older, int(self._ends[self._chunks - 1]))

    def _note(self, lengths: npt.NDArray[Any], checks: npt.NDArray[Any], cpu_modes: bool) -> None:
        """Take down further chunks."""
        self._header.lengths += lengths.tolist()
        self._header.checks += checks.tolist()
        self._header.cpu_modes |= cpu_modes
        self._chunks += len(lengths)

    def _write_waiting(self, memory: Bytes, end: int) -> None:
        """Move tiles that wait to memory before `end`, as far as there is room."""
        while self._waiting and self._placed + len(self._waiting[0]) <= end:
            tile = self._waiting.popleft()
            memory[self._placed : self._placed + len(tile)] = tile
            self._placed += len(tile)

    def keep(self, last: int) -> None:
        """Keep the next chunks of the older blob as they are.

        Args:
            last: The number (exclusive) at which they end: a multiple of a chunk, or the end of the tensor.

        Raises:
            UsageError: There is no older blob.
        """
        if self._older is None:
            raise UsageError("There is no older blob whose chunks could be kept.")
        first, stop = self._chunks, -(-last // self.chunk)
        if stop <= first:
            return
        start, end = int(self._ends[first] - self._index.lengths[first]), int(self._ends[stop - 1])
        self._note(self._index.lengths[first:stop], self._index.checks[first:stop], self._index.cpu_modes)
        if self._waiting:
            self._waiting.append(self._older[start:end].copy())
            self._write_waiting(self._older, end)
        else:
            if self._placed != start:
                self._older[self._placed : self._placed + end - start] = self._older[start:end]
            self._placed += end - start

    def keep_rest(self) -> None:
        """Keep the chunks of the older blob that were not replaced."""
        if self._older is not None:
            self.keep(len(self._ends) << self._header.chunk_log2)

    @property
    def size(self) -> int:
        """Bytes of the new blob, after the last tile."""
        return len(self._header.header()) + sum(self._header.lengths)

    def finish(self, memory: Bytes) -> None:
        """Complete the blob in memory of at least `size` bytes, which may be that of the older one."""
        header = self._header.header()
        start = len(header)
        if self._older is None:
            # All tiles still wait.
            self._placed = start
        elif memory.ctypes.data != self._older.ctypes.data:
            memory[start : self._placed] = self._older[start : self._placed]
        memory[:start] = as_bytes(header)
        self._write_waiting(memory, len(memory))
