"""Writing a compressed safetensors file one tensor at a time, in memory of one tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, final

from netweight import codec
from netweight.codec.header import content_of
from netweight.core.atomic_writes import whole_file
from netweight.core.bounded_json import is_text
from netweight.core.digests import digest_config
from netweight.errors import CorruptBlob, UsageError
from netweight.store.choices import LEAST, Level, choose_base, finer_chunks
from netweight.store.reader import Base
from netweight.store.safetensors import (
    KEY,
    MOST_LINKS,
    REFUSALS,
    SUFFIX,
    BaseNote,
    Description,
    Header,
    Original,
    build_header,
    name_of,
    refuse_many,
)

# Files and names of tensors by digest, dtype and shape.
StoredTensors = dict[tuple[str, str, tuple[int, ...]], tuple[str, str]]
# Bytes that are reserved for the header unless the caller gives a better number.
_ROOM = 1 << 16
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
        mode: Permissions of the file; None for those that new files get.
        base: A file or folder with tensors of the same names, compressed or not: tensors are stored as differences from
            those that have their dtype and shape. Reading them needs it again.
        stored_tensors: Files and names of the folder's tensors that are stored already, by digest, dtype and shape: a
            tensor that equals one of them is not stored again. The writer adds its own.

    Raises:
        UsageError: The file would be its own base, or the base ends a chain of 8.
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
        mode: int | None = None,
        base: str | Path | Base | None = None,
        stored_tensors: StoredTensors | None = None,
    ) -> None:
        self.path = Path(path)
        self._level = level
        self._overwrite = overwrite
        self._threads = threads
        self._mode = mode
        self.base = base if base is None or isinstance(base, Base) else Base(Path(base))
        if self.base is not None and self.base.path.resolve() == self.path.resolve():
            raise UsageError(f"{path} cannot be its own base.", cure="Give another file, or another base.")
        self._stored_tensors: StoredTensors = {} if stored_tensors is None else stored_tensors
        self._same: dict[str, tuple[str, str]] = {}
        # The digests of the tensors from which differences are stored, by name.
        self._differences: dict[str, str] = {}
        self._original = original
        # The names, sizes and starts of digests, and the old header deflated: hardly ever longer than this.
        self._room = _ROOM if original is None else 3 * len(original.raw) + 80 * len(original.spans) + 1024
        self._tensors: dict[str, Original] = {}
        self._sizes: dict[str, int] = {}
        self._file: IO[bytes] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Open the temporary file."""
        if self.base is not None and self.base.links > MOST_LINKS:
            raise UsageError(
                f"{self.base.path} is the end of a chain of {MOST_LINKS} models, each stored as differences from the "
                "one before.",
                cure="Give a base that is stored whole, or compress without --base.",
            )
        self._file = self._stack.enter_context(whole_file(self.path, overwrite=self._overwrite, mode=self._mode))
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
        return self.add_raw(name, *content_of(tensor))

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
        content = memoryview(buffer)
        place, _ = choose_base(
            self.base, name, dtype, shape, lambda start, stop: content.cast("B")[start:stop], self._level
        )
        base = None if place is None else place[0].content(place[1], threads=self._threads)
        finer = finer_chunks(name, shape, self._level)
        how: dict[str, Any] = {"level": self._level, "threads": self._threads, "chunk_log2": finer}
        blob = codec.encode_raw(buffer, dtype, shape, base=base, **how)
        if (same := self._place_of_equal(name, codec.info(blob))) is not None:
            blob = codec.encode_raw(buffer, dtype, shape, base=buffer, **how)
            self._same[name] = same
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
        info = codec.info(blob)
        alone = info.base_digest is None and info.mantissa_bits is None
        if alone and self.base is not None and self.base.find(name, info.dtype, tuple(info.shape)) is not None:
            return self.add_raw(name, codec.decode_raw(blob, threads=self._threads), info.dtype, tuple(info.shape))
        self._opened(name).write(blob)
        return self._note(name, info, len(blob))

    def add_chunks(self, name: str, encoder: codec.ChunkEncoder, chunks: Iterator[bytes]) -> int:
        """Append a tensor that is encoded chunk by chunk.

        Args:
            name: Its name, new to this file.
            encoder: What encodes it.
            chunks: All its chunks, encoded while they are taken.

        Returns:
            The bytes that it takes in the file.

        Raises:
            UsageError: The name was added before, or the writer is not open.
        """
        file = self._opened(name)
        begin = file.tell()
        file.seek(encoder.header_size, os.SEEK_CUR)
        for chunk in chunks:
            file.write(chunk)
        end = file.tell()
        file.seek(begin)
        file.write(header := encoder.header())
        file.seek(end)
        return self._note(name, codec.info(header, size=end - begin), end - begin)

    def withdraw_if_stored(self, name: str) -> tuple[str, str] | None:
        """Remove the tensor that was added last if the folder already contains the same one.

        Args:
            name: Its name.

        Returns:
            The file and name of the other; the tensor is to be added again, with its own bytes as its base. None if it
            stays.
        """
        info, size = self._last
        if (place := self._place_of_equal(name, info)) is None:
            return None
        assert self._file is not None
        self._file.seek(-size, os.SEEK_CUR)
        del self._tensors[name], self._sizes[name]
        self._differences.pop(name, None)
        self._same[name] = place
        return place

    def _place_of_equal(self, name: str, info: codec.BlobInfo) -> tuple[str, str] | None:
        """Return the place of an equal tensor; the first of its kind is remembered."""
        if info.nbytes < LEAST or info.mantissa_bits is not None or name in self._same:
            return None
        file, first = self._stored_tensors.setdefault(
            (info.digest, info.dtype, tuple(info.shape)), (self.path.name, name)
        )
        if (file, first) == (self.path.name, name):
            return None
        return ("" if file == self.path.name else file), first

    def _opened(self, name: str) -> IO[bytes]:
        """The file, for a tensor of a new name."""
        if name in self._tensors:
            raise UsageError(f"{self.path}: the tensor {name!r} was added before.", cure="Give it another name.")
        if self._file is None:
            raise UsageError(f"{self.path} is not open.", cure="Use `with StoreWriter(...) as writer:`.")
        if not is_text(name):
            raise UsageError(
                f"{self.path}: {name!r} is not a text that can be stored in a file.", cure="Give it another name."
            )
        refuse_many(len(self._tensors))
        return self._file

    def _note(self, name: str, info: codec.BlobInfo, size: int) -> int:
        self._tensors[name] = Original(info.dtype, tuple(info.shape), info.digest)
        self._sizes[name] = size
        if info.base_digest is not None and name not in self._same:
            self._differences[name] = info.base_digest
        self._last = info, size
        return size

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
        note = None
        if self.base is not None and self._differences:
            digest = digest_config(self._differences)
            note = BaseNote(name_of(self.base.path), self.base.within, self.base.links, digest)
        description = Description.of(self._tensors, self._original, note, self._same)
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
