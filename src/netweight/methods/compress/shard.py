"""One safetensors file, compressed or restored tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

import xxhash

from netweight import codec
from netweight.codec import ROUNDABLE, BlobInfo, Precision
from netweight.core.digest import ALGORITHM
from netweight.core.files import whole_file
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.reader import StoredFile
from netweight.store.safetensors import ONLY_COMPRESSED, Span, build_header
from netweight.store.writer import Level, StoreWriter


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
    ready: Mapping[str, memoryview] = MappingProxyType({}),
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ShardResult:
    """Compress a safetensors file."""
    with closing(StoredFile(source)) as file:
        before = os.stat(source)
        if file.description is not None:
            raise UsageError(f"{source} is compressed already.", cure="Decompress it first.")
        tally = _Tally(_head(file.header.raw))
        with StoreWriter(target, level=level, overwrite=overwrite, threads=threads, original=file.header) as writer:
            advance(file.header.data_start)
            for span in file.header.spans:
                content = file.raw(span.name)
                blob = _encoded(content, span, level, threads, precision, ready)
                size = writer.add_blob(span.name, blob)
                if codec.is_lossy(blob):
                    tally.add(codec.decode_raw(blob, threads=threads).data, size, codec.info(blob))
                else:
                    tally.add(content, size, None)
                del blob
                content.release()
                file.release(span.name)
                advance(span.nbytes)
            after = os.stat(source)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise UsageError(f"{source} changed while it was read.", cure="Wait until it is complete; try again.")
    return tally.result(plain=before.st_size, stored=target.stat().st_size)


def restore_shard(
    source: Path,
    target: Path,
    *,
    threads: int,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ShardResult:
    """Restore the safetensors file that a compressed one was made from; every tensor's digest is checked."""
    with closing(StoredFile(source)) as file:
        if file.description is None:
            raise UsageError(f"{source} is not compressed.", cure="Check the path.")
        head = plain_head(file)
        tally = _Tally(head)
        with whole_file(target, overwrite=overwrite) as output:
            output.write(head)
            advance(len(head))
            for name in file.names():
                content = file.content(name, threads=threads, check=True)
                output.write(content)
                tally.add(content, file.info(name).stored_nbytes, file.rounding(name))
                file.release(name)
                advance(file.info(name).nbytes)
    return tally.result(plain=target.stat().st_size, stored=source.stat().st_size)


class _Tally:
    """What is added up, tensor by tensor, over a plain file."""

    def __init__(self, head: bytes) -> None:
        self._whole = xxhash.xxh3_128(head)
        self._tensors = self._payload = self._rounded = 0
        self._bound = self._worst = 0.0

    def add(self, content: memoryview, payload: int, rounding: BlobInfo | None) -> None:
        self._whole.update(content)
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
    content: memoryview,
    span: Span,
    level: Level,
    threads: int,
    precision: Precision | None,
    ready: Mapping[str, memoryview],
) -> bytes | memoryview:
    """A tensor's blob: one that is ready, or a new one, rounded if it is to be."""
    if ready:
        known = ready.get(f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(content)}")
        if known is not None:
            return known
    if len(span.shape) < 2 or span.dtype not in ROUNDABLE:  # biases, norms, indices
        precision = None
    return codec.encode_raw(content, span.dtype, span.shape, level=level, threads=threads, precision=precision)


def _head(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + raw
