"""One safetensors file, compressed or restored tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

import xxhash

from netweight import codec
from netweight.codec import ROUNDABLE, BlobInfo, Precision
from netweight.core.files import ALGORITHM, in_order, mode_of, whole_file
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.reader import BATCH, Base, StoredFile
from netweight.store.safetensors import ONLY_COMPRESSED, Span, build_header
from netweight.store.writer import Level, Seen, StoreWriter


@final
@dataclass(frozen=True)
class ShardResult:
    """What one file gave; all fields are those of a `FileEntry`, too."""

    tensors: int  # number of tensors
    nbytes: int  # size of the plain file in bytes
    digest: str  # digest of the plain file; of the one that comes back if tensors were rounded
    stored_nbytes: int  # size of the compressed file in bytes
    payload: int  # bytes of the compressed tensors alone
    rounded: int = 0  # number of tensors that are rounded
    bound: float = 0.0  # how much rounding may have changed a weight at most, relative to it; 0 if nothing is rounded
    worst_change: float = 0.0  # how much it did change one at most


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
    return tally.result(plain=before.st_size, stored=target.stat().st_size)


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
        encoder = codec.ChunkEncoder(span.dtype, span.shape, level=self._level, base=True)

        def chunks() -> Iterator[bytes]:
            for start in range(0, span.nbytes, encoder.chunk_bytes):
                content = self._file.part(span.name, start, min(start + encoder.chunk_bytes, span.nbytes))
                yield encoder.encode(content, content)

        return encoder, chunks()

    def _batches(self, spans: Iterable[Span]) -> Iterator[list[_Piece]]:
        batch: list[_Piece] = []
        room = BATCH
        for span in spans:
            below = None if self._base is None else self._base.find(span.name, span.dtype, span.shape)
            encoder = codec.ChunkEncoder(span.dtype, span.shape, level=self._level, base=below is not None)
            step = max(BATCH // encoder.chunk_bytes, 1)
            for first in range(0, encoder.chunks, step) or (0,):
                last = min(first + step, encoder.chunks)
                batch.append(_Piece(span, encoder, below, first, last))
                room -= (last - first) * encoder.chunk_bytes
                if room <= 0:
                    yield batch
                    batch, room = [], BATCH
        yield batch

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
    """What is added up, tensor by tensor, over a plain file."""

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


def threads_or_cores(threads: int | None) -> int:
    """So many threads, or as many as this process may use cores."""
    return threads if threads is not None else len(os.sched_getaffinity(0))


def plain_size(source: Path) -> int:
    """Bytes of the plain file that a weights file holds or is."""
    with closing(StoredFile(source)) as file:
        return len(plain_head(file)) + sum(file.info(name).nbytes for name in file.names())


def check_digest(path: Path, found: str, recorded: str) -> None:
    """Compare a restored file with what was recorded of the original."""
    if found != recorded:
        raise CorruptBlob(
            f"{path}: the restored content has digest {found}, recorded is {recorded}.",
            cure="The compressed folder is damaged: fetch or make it again.",
        )


def plain_head(file: StoredFile) -> bytes:
    """The bytes before the data of the plain file: the original's if there was one, else new ones."""
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
    """Whether a tensor is to be rounded; biases, norms and indices are not."""
    return precision is not None and len(span.shape) >= 2 and span.dtype in ROUNDABLE


def _head(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + raw
