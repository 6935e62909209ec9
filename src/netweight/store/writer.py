"""Writing compressed safetensors files one tensor at a time, in memory of one tensor."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self, final

from netweight import codec
from netweight.core.files import whole_file
from netweight.errors import CorruptBlob, UsageError
from netweight.store.safetensors import KEY, REFUSALS, SUFFIX, Description, Header, Original, build_header

Level = Literal["fast", "default", "max"]
_ROOM = 1 << 16  # bytes kept free for the header unless the caller knows better
_BLOCK = 1 << 22  # bytes copied at a time


@final
class StoreWriter:
    """Write a compressed safetensors file; the file appears whole when the block ends, or not at all.

    Every tensor becomes a U8 tensor `name.net` in the order in which it was added. What does not compress is kept in
    the codec's raw form, at most 0.1 % and 64 bytes larger.

    Args:
        path: The file to write, usually `*.safetensors`.
        level: The codec's level.
        overwrite: Whether an existing file may be replaced.
        threads: Threads of the encoder.
        original: Header of the safetensors file that is being compressed, if there is one; it is kept, so that the file
            can be restored byte for byte, and exactly its tensors must be added.

    Raises:
        OutputExists: On entering: the file exists and `overwrite` is false.
        OutputFailed: The disk is full or the place cannot be written; nothing is left behind.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        level: Level = "default",
        overwrite: bool = False,
        threads: int = 1,
        original: Header | None = None,
    ) -> None:
        self.path = Path(path)
        self._level = level
        self._overwrite = overwrite
        self._threads = threads
        self._original = original
        # Two copies of the names, shapes and digests, and the old header deflated: never longer than this.
        self._room = _ROOM if original is None else 3 * len(original.raw) + 160 * len(original.spans) + 1024
        self._tensors: dict[str, Original] = {}
        self._sizes: dict[str, int] = {}
        self._rounded = False
        self._file: IO[bytes] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Open the temporary file."""
        self._file = self._stack.enter_context(whole_file(self.path, overwrite=self._overwrite))
        self._file.seek(8 + self._room)
        return self

    def add(self, name: str, tensor: Any) -> int:
        """Encode a tensor and append it.

        Args:
            name: Its name, new to this file.
            tensor: A torch tensor or numpy array, any dtype and shape.

        Returns:
            The bytes that it takes in the file.

        Raises:
            UsageError: The name was added before.
        """
        return self.add_blob(name, codec.encode(tensor, level=self._level, threads=self._threads))

    def add_raw(self, name: str, buffer: Any, dtype: str, shape: tuple[int, ...]) -> int:
        """Encode a tensor given by its bytes and append it.

        Args:
            name: Its name, new to this file.
            buffer: Its bytes: little-endian, contiguous.
            dtype: Its safetensors dtype, e.g. `"BF16"`; also those that torch and numpy lack.
            shape: Its shape.

        Returns:
            The bytes that it takes in the file.

        Raises:
            UsageError: The name was added before.
        """
        blob = codec.encode_raw(buffer, dtype, shape, level=self._level, threads=self._threads)
        return self.add_blob(name, blob)

    def add_blob(self, name: str, blob: Any) -> int:
        """Append a tensor that is encoded already.

        Args:
            name: Its name, new to this file.
            blob: The codec's bytes.

        Returns:
            The bytes that it takes in the file.

        Raises:
            UsageError: The name was added before, or the writer is not open.
            CorruptBlob: The bytes are not the codec's.
        """
        if name in self._tensors:
            raise UsageError(f"{self.path}: the tensor {name!r} was added before.", cure="Give it another name.")
        if self._file is None:
            raise UsageError(f"{self.path} is not open.", cure="Use `with StoreWriter(...) as writer:`.")
        info = codec.info(blob)
        self._tensors[name] = Original(info.dtype, tuple(info.shape), info.digest)
        self._sizes[name] = len(blob)
        self._rounded |= info.mantissa_bits is not None
        self._file.write(blob)
        return len(blob)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the header, sync and rename; after an exception remove the temporary file instead."""
        file, self._file = self._file, None
        with self._stack.pop_all() as stack:
            if error is not None:
                # Handed to the stack by raising, so that it removes the file; the caller's traceback stays as it was.
                stack.__exit__(kind, error, trace)
                return
            assert file is not None
            self._finish(file)

    def _finish(self, file: IO[bytes]) -> None:
        """Put the header before the payload."""
        if self._original is not None and {span.name for span in self._original.spans} != set(self._tensors):
            raise CorruptBlob(f"{self.path}: the tensors added are not those of the header.")
        description = Description(self._tensors, self._original, self._rounded)
        tensors = [(name + SUFFIX, "U8", (size,), size) for name, size in self._sizes.items()]
        metadata = {**REFUSALS, KEY: description.to_json()}
        payload = sum(self._sizes.values())
        header = build_header(tensors, metadata)
        # Spare room may be filled with spaces as long as it is next to nothing; else the payload moves.
        if len(header) <= self._room <= len(header) + payload // 1000:
            header = header.ljust(self._room)
        else:
            _move(file, 8 + self._room, 8 + len(header), payload)
        file.seek(0)
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + payload)


def _move(file: IO[bytes], source: int, target: int, size: int) -> None:
    """Move bytes within a file; the ranges may overlap."""
    file.flush()
    descriptor = file.fileno()
    starts = range(0, size, _BLOCK)
    for start in starts if target <= source else reversed(starts):
        block = os.pread(descriptor, min(_BLOCK, size - start), source + start)
        view = memoryview(block)
        while view:
            written = os.pwrite(descriptor, view, target + start + len(block) - len(view))
            view = view[written:]
