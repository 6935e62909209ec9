"""Writing compressed safetensors files one tensor at a time, in memory of one tensor; whole files there and back.

A checkpoint is such a file: what a piece of work has come to, as an account in JSON (a tensor of bytes named "about",
the first of the file) and tensors by name. Trainings and federations are kept this way.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Self, final

import numpy
import xxhash

from netweight import codec
from netweight.codec import ROUNDABLE, BlobInfo, Precision
from netweight.codec.header import content_of
from netweight.core.files import ALGORITHM, digest_config, in_order, is_text, mode_of, parse_json, whole_file
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.reader import BATCH, Base, Store, StoredFile, open_store
from netweight.store.safetensors import (
    KEY,
    MOST_LINKS,
    ONLY_COMPRESSED,
    REFUSALS,
    SUFFIX,
    BaseNote,
    Description,
    Header,
    Original,
    Span,
    build_header,
    name_of,
    nbytes_of,
    refuse_many,
)

if TYPE_CHECKING:
    import torch


Level = Literal["fast", "default", "max"]
# Files and names of tensors by digest, dtype and shape.
Seen = dict[tuple[str, str, tuple[int, ...]], tuple[str, str]]
_ROOM = 1 << 16  # bytes kept free for the header unless the caller knows better
_BLOCK = 1 << 22  # bytes copied at a time
LEAST = 1 << 12  # bytes of tensors that are worth to be told equal


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
        seen: Where tensors of other files of the folder are, by digest, dtype and shape: those that are equal are not
            stored again. The writer adds its own.

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
        seen: Seen | None = None,
    ) -> None:
        self.path = Path(path)
        self._level = level
        self._overwrite = overwrite
        self._threads = threads
        self._mode = mode
        self.base = base if base is None or isinstance(base, Base) else Base(Path(base))
        if self.base is not None and self.base.path.resolve() == self.path.resolve():
            raise UsageError(f"{path} cannot be its own base.", cure="Give another file, or another base.")
        self._seen: Seen = {} if seen is None else seen
        self._same: dict[str, tuple[str, str]] = {}
        self._differences: dict[str, str] = {}  # digests of what tensors are differences from, by name
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
                f"{self.base.path} is the last of {MOST_LINKS} models that are differences from each other.",
                cure="Give one that is stored whole, or compress it without --base.",
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
        below = None if self.base is None else self.base.find(name, dtype, shape)
        base = None if below is None else below[0].content(below[1], threads=self._threads)
        if base is not None and not _pays(buffer, base, dtype, self._level):
            base = None
        finer = finer_chunks(name, shape, self._level)
        how: dict[str, Any] = {"level": self._level, "threads": self._threads, "chunk_log2": finer}
        blob = codec.encode_raw(buffer, dtype, shape, base=base, **how)
        if (place := self._equal(name, codec.info(blob))) is not None:
            blob = codec.encode_raw(buffer, dtype, shape, base=buffer, **how)
            self._same[name] = place
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

    def equal(self, name: str) -> tuple[str, str] | None:
        """Take back the tensor that was added last if the folder holds the same one already.

        Args:
            name: Its name.

        Returns:
            The file and name of the other; the tensor is to be added again, with its own bytes as its base. None if it
            stays.
        """
        info, size = self._last
        if (place := self._equal(name, info)) is None:
            return None
        assert self._file is not None
        self._file.seek(-size, os.SEEK_CUR)
        del self._tensors[name], self._sizes[name]
        self._differences.pop(name, None)
        self._same[name] = place
        return place

    def _equal(self, name: str, info: codec.BlobInfo) -> tuple[str, str] | None:
        """Return the place of an equal tensor; the first of its kind is remembered."""
        if info.nbytes < LEAST or info.version == 1 or info.mantissa_bits is not None or name in self._same:
            return None
        file, first = self._seen.setdefault((info.digest, info.dtype, tuple(info.shape)), (self.path.name, name))
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
            raise UsageError(f"{self.path}: {name!r} is not a text that a file can hold.", cure="Give it another name.")
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


# Heads, too: where they equal the embedding they are stored once, which is noticed of tensors cut alike.
_EMBEDDING = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|shared|lm_head)\.weight$")
_ROW_CHUNKS = 14  # binary logarithm of the numbers in a chunk of an embedding


def finer_chunks(name: str, shape: tuple[int, ...], level: Level) -> int | None:
    """Choose the chunks of a tensor: small ones for embeddings, of which a loaded model reads few rows at a time.

    Args:
        name: The tensor's name, by which embeddings are recognized.
        shape: Its shape.
        level: The codec's level; `"max"` keeps the largest chunks.

    Returns:
        The binary logarithm of the numbers per chunk; None for the codec's own choice.
    """
    small = len(shape) != 2 or shape[0] * shape[1] <= 1 << _ROW_CHUNKS
    return None if small or level == "max" or not _EMBEDDING.search(name) else _ROW_CHUNKS


_SAMPLE = 1 << 15  # numbers by which it is found out whether a base pays


def _pays(content: Any, base: Any, dtype: str, level: Level) -> bool:
    """Return whether a tensor gets smaller as a difference from a base, by three samples of it."""
    width = nbytes_of(dtype, (8,)) // 8
    if not width or not len(content):
        return True  # several numbers share a byte, or there are none
    mine, theirs = (memoryview(each).cast("B") for each in (content, base))
    numbers, alone, beside = len(mine) // width, 0, 0
    for start in {0, max((numbers - _SAMPLE) // 2, 0), max(numbers - _SAMPLE, 0)}:
        cut = slice(start * width, (start + _SAMPLE) * width)
        own, below = bytes(mine[cut]), bytes(theirs[cut])
        shape = (len(own) // width,)
        alone += len(codec.encode_raw(own, dtype, shape, level=level))
        beside += len(codec.encode_raw(own, dtype, shape, level=level, base=below))
    return beside < alone


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


# ---- a whole file, compressed or restored ----------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class ShardResult:
    """Result of one file; a `FileEntry` has the same fields."""

    tensors: int  # number of tensors
    nbytes: int  # size of the plain file in bytes
    digest: str  # digest of the plain file; of the one that comes back if tensors were rounded
    stored_nbytes: int  # size of the compressed file in bytes
    payload: int  # bytes of the compressed tensors alone
    rounded: int = 0  # number of tensors that are rounded
    bound: float = 0.0  # how much rounding may have changed a weight at most, relative to it; 0 if nothing is rounded
    worst_change: float = 0.0  # how much it did change one at most
    differences: int = 0  # number of tensors that are stored as differences from a base
    # Tensors that are not, though a base was given, counted by the reason.
    unlike_base: Mapping[str, int] = field(default_factory=dict)


def compress_shard(
    source: Path,
    target: Path,
    *,
    level: Level,
    threads: int,
    overwrite: bool = False,
    precision: Precision | None = None,
    blobs: Callable[[str], bytes | memoryview] | None = None,
    base: Base | None = None,
    seen: Seen | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ShardResult:
    """Compress a safetensors file, a few megabytes at a time; where `blobs` gives its tensors, no data is read."""
    # `blobs`: gives each tensor's codec bytes by its name; `base`, `seen`: see `StoreWriter`
    with closing(StoredFile(source)) as file:
        before = os.stat(source)
        if file.description is not None:
            raise UsageError(f"{source} is compressed already.", cure="Decompress it first.")
        tally = _Tally(_head(file.header.raw))
        whole = {span.name for span in file.header.spans if blobs is not None or _rounds(span, precision)}
        encoding = _Encoding(file, [span for span in file.header.spans if span.name not in whole], level, base, threads)
        with StoreWriter(
            target, level=level, overwrite=overwrite, threads=threads, original=file.header, mode=mode_of(source),
            base=base, seen=seen,
        ) as writer:  # fmt: skip
            advance(file.header.data_start)
            for span in file.header.spans:
                rounding = None
                if span.name in whole:
                    if blobs is None:
                        content: Any = file.raw(span.name)
                        blob = _encoded(content, span, level, threads, precision)
                    else:
                        blob = blobs(span.name)
                    lossy = codec.is_lossy(blob)
                    rounding = codec.info(blob) if lossy else None
                    for piece in codec.pieces(blob, threads=threads) if lossy or blobs is not None else [content]:
                        tally.update(piece)
                    size = writer.add_blob(span.name, blob)
                    del blob
                else:
                    size = writer.add_chunks(span.name, *encoding.next(tally.update))
                    if writer.equal(span.name) is not None:
                        size = writer.add_chunks(span.name, *encoding.as_equal(span))
                tally.add(size, rounding)
                advance(span.nbytes)
            after = os.stat(source)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise UsageError(f"{source} changed while it was read.", cure="Wait until it is complete; try again.")
    result = tally.result(plain=before.st_size, stored=target.stat().st_size)
    return replace(result, differences=encoding.differences, unlike_base=dict(encoding.unlike))


@dataclass(frozen=True)
class _Piece:
    """Chunks of one tensor that are encoded together."""

    span: Span
    encoder: codec.ChunkEncoder
    below: tuple[StoredFile, str] | None  # where the tensor is that this one is a difference from
    first: int  # the first chunk
    last: int  # after the last one


class _Encoding:
    """The tensors of a plain file, encoded on several threads, a few megabytes each at a time, in order."""

    def __init__(self, file: StoredFile, spans: Sequence[Span], level: Level, base: Base | None, threads: int) -> None:
        self._file, self._level, self._base = file, level, base
        self.differences = 0  # tensors that are stored as differences from the base
        self.unlike: Counter[str] = Counter()  # those that are not, by the reason
        self._done = chain.from_iterable(in_order(self._encode, self._batches(spans), threads))

    def next(self, update: Callable[[Any], None]) -> tuple[codec.ChunkEncoder, Iterator[bytes]]:
        """The next tensor: its encoder and its chunks; its bytes go to `update` meanwhile."""
        first = next(self._done)
        return first[0].encoder, self._chunks(first, update)

    def _chunks(self, done: tuple[_Piece, Any, list[Any]], update: Callable[[Any], None]) -> Iterator[bytes]:
        while True:
            piece, content, prepared = done
            update(content)
            yield from map(piece.encoder.take, prepared)
            if piece.last == piece.encoder.chunks:
                return
            done = next(self._done)

    def as_equal(self, span: Span) -> tuple[codec.ChunkEncoder, Iterator[bytes]]:
        """A tensor once more, as a difference from one that equals it."""
        finer = finer_chunks(span.name, span.shape, self._level)
        encoder = codec.ChunkEncoder(span.dtype, span.shape, level=self._level, base=True, chunk_log2=finer)

        def chunks() -> Iterator[bytes]:
            for start in range(0, span.nbytes, encoder.chunk_bytes):
                content = self._file.part(span.name, start, min(start + encoder.chunk_bytes, span.nbytes))
                yield encoder.encode(content, content)

        return encoder, chunks()

    def _batches(self, spans: Iterable[Span]) -> Iterator[list[_Piece]]:
        batch: list[_Piece] = []
        room = BATCH
        for span in spans:
            below = self._below(span)
            finer = finer_chunks(span.name, span.shape, self._level)
            encoder = codec.ChunkEncoder(
                span.dtype, span.shape, level=self._level, base=below is not None, chunk_log2=finer
            )
            step = max(BATCH // encoder.chunk_bytes, 1)
            for first in range(0, encoder.chunks, step) or (0,):
                last = min(first + step, encoder.chunks)
                batch.append(_Piece(span, encoder, below, first, last))
                room -= (last - first) * encoder.chunk_bytes
                if room <= 0:
                    yield batch
                    batch, room = [], BATCH
        yield batch

    def _below(self, span: Span) -> tuple[StoredFile, str] | None:
        """Return the place of the tensor from which this one is stored as a difference; None without a gain."""
        if self._base is None:
            return None
        below = self._base.find(span.name, span.dtype, span.shape)
        if below is None:
            self.unlike[self._base.lack(span.name, span.dtype, span.shape)] += 1
            return None
        if not self._pays(span, below):
            self.unlike["not smaller as differences"] += 1
            return None
        self.differences += 1
        return below

    def _pays(self, span: Span, below: tuple[StoredFile, str]) -> bool:
        """Return whether a tensor gets smaller as a difference, by a few samples of it."""
        width = nbytes_of(span.dtype, (8,)) // 8
        if not width or not span.nbytes:
            return True  # several numbers share a byte, or there are none
        size = _SAMPLE * width
        starts = {0, (span.nbytes // width - _SAMPLE) // 2 * width, span.nbytes - size} if span.nbytes > size else {0}
        cuts = [(start, min(start + size, span.nbytes)) for start in sorted(starts)]
        content, base = (
            b"".join(bytes(file.part(name, *cut)) for cut in cuts) for file, name in ((self._file, span.name), below)
        )
        return _pays(content, base, span.dtype, self._level)

    def _encode(self, batch: list[_Piece]) -> list[tuple[_Piece, Any, list[Any]]]:
        done = []
        for piece in batch:
            size = piece.encoder.chunk_bytes
            start, stop = piece.first * size, min(piece.last * size, piece.span.nbytes)
            content = self._file.part(piece.span.name, start, stop)
            base = None if piece.below is None else piece.below[0].part(piece.below[1], start, stop)
            cuts = [slice(at, at + size) for at in range(0, stop - start, size)]
            prepared = [piece.encoder.prepare(content[cut], None if base is None else base[cut]) for cut in cuts]
            done.append((piece, content, prepared))
        return done


def restore_shard(
    source: Path,
    target: Path,
    *,
    threads: int,
    overwrite: bool = False,
    base: Path | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ShardResult:
    """Restore the safetensors file that a compressed one was made from; every chunk is checked."""
    with closing(StoredFile(source, base=base)) as file:
        if file.description is None:
            raise UsageError(f"{source} is not compressed.", cure="Check the path.")
        head = plain_head(file)
        tally = _Tally(head)
        with whole_file(target, overwrite=overwrite, mode=mode_of(source)) as output:
            output.write(head)
            advance(len(head))
            for name, start, content in file.blocks(threads=threads):
                if isinstance(content, CorruptBlob):
                    raise content
                output.write(content.data)
                tally.update(content)
                if not start:
                    tally.add(file.info(name).stored_nbytes, file.rounding(name))
                advance(len(content))
    return tally.result(plain=target.stat().st_size, stored=source.stat().st_size)


class _Tally:
    """Running totals of a plain file: tensors, bytes and digest."""

    def __init__(self, head: bytes) -> None:
        self._whole = xxhash.xxh3_128(head)
        self._tensors = self._payload = self._rounded = 0
        self._bound = self._worst = 0.0

    def update(self, content: Any) -> None:
        self._whole.update(content)

    def add(self, payload: int, rounding: BlobInfo | None) -> None:
        self._tensors += 1
        self._payload += payload
        if rounding is not None:
            self._rounded += 1
            self._bound = max(self._bound, rounding.bound)
            self._worst = max(self._worst, rounding.worst_change)

    def result(self, *, plain: int, stored: int) -> ShardResult:
        digest = f"{ALGORITHM}:{self._whole.hexdigest()}"
        return ShardResult(self._tensors, plain, digest, stored, self._payload, self._rounded, self._bound, self._worst)


def plain_size(source: Path) -> int:
    """Bytes of the plain file that a weights file holds or is."""
    with closing(StoredFile(source)) as file:
        return file.nbytes + len(plain_head(file))


def check_digest(path: Path, found: str, recorded: str) -> None:
    """Compare a restored file with what was recorded of the original."""
    if found != recorded:
        raise CorruptBlob(
            f"{path}: the restored content has digest {found}, recorded is {recorded}.",
            cure="The compressed folder is damaged: fetch or make it again.",
        )


def plain_head(file: StoredFile) -> bytes:
    """The bytes before the data of the plain file: the original's if there was one, else new ones."""
    if file.description is not None:
        file.nbytes  # noqa: B018  a file that declares more than it can hold is refused before any work
    if file.original_header is not None:
        return _head(file.original_header.raw)
    infos = [file.info(name) for name in file.names()]
    if lacking := [info for info in infos if info.dtype in ONLY_COMPRESSED]:
        raise Unsupported(
            f"{file.path}: safetensors has no dtype {lacking[0].dtype}, which tensor {lacking[0].name!r} has.",
            cure="Read it with netweight.open_store.",
        )
    return _head(build_header([(i.name, i.dtype, i.shape, i.nbytes) for i in infos], {"format": "pt"}))


def _encoded(
    content: memoryview, span: Span, level: Level, threads: int, precision: Precision | None
) -> bytes | memoryview:
    chosen = precision if _rounds(span, precision) else None
    return codec.encode_raw(content, span.dtype, span.shape, level=level, threads=threads, precision=chosen)


def _rounds(span: Span, precision: Precision | None) -> bool:
    """Return whether a tensor is to be rounded; biases, norms and indices are not."""
    return precision is not None and len(span.shape) >= 2 and span.dtype in ROUNDABLE


def _head(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + raw


# ---- checkpoints -----------------------------------------------------------------------------------------------------

_ABOUT = "about"


def write_checkpoint(path: Path, about: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a checkpoint over the one before it, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with StoreWriter(path, level="fast", overwrite=True) as writer:
        writer.add(_ABOUT, numpy.frombuffer(json.dumps(about).encode(), numpy.uint8))
        for name, value in tensors:
            writer.add(name, value.detach().cpu().contiguous())


@contextmanager
def open_checkpoint(
    path: Path, same: Mapping[str, Any] | None = None, *, refusal: str = "holds other work"
) -> Iterator[tuple[dict[str, Any], Store, list[str]]]:
    """Open a checkpoint."""
    # `same`: entries that the account must have, such as a digest of what was asked for: only the same may go on
    with open_store(path) as store:
        names = store.names()
        if _ABOUT not in names:
            raise CorruptBlob(f"{path} is not a checkpoint: it holds no account of itself.")
        about: dict[str, Any] = parse_json(bytes(store.content(_ABOUT)))
        if any(about.get(key) != value for key, value in (same or {}).items()):
            raise UsageError(f"{path} {refusal}.", cure="Choose another folder, or delete the file to begin anew.")
        yield about, store, [name for name in names if name != _ABOUT]
