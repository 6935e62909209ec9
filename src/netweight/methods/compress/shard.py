"""One safetensors file compressed, or restored byte for byte, in memory of one tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

import xxhash

from netweight import codec
from netweight.codec import ROUNDABLE, Precision
from netweight.core.digest import ALGORITHM
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.atomic import whole_file
from netweight.store.header import ONLY_COMPRESSED, Span, build_header
from netweight.store.reading import StoredFile
from netweight.store.writing import Level, StoreWriter

__all__ = ["ShardResult", "check_digest", "compress_shard", "plain_head", "plain_size", "restore_shard"]


@final
@dataclass(frozen=True)
class ShardResult:
    """What one file gave.

    Attributes:
        tensors: Number of tensors.
        nbytes: Size of the plain file in bytes.
        digest: Digest of the plain file; of the one that comes back if tensors were rounded.
        stored_nbytes: Size of the compressed file in bytes.
        payload: Bytes of the compressed tensors alone.
        rounded: Number of tensors that are rounded.
        bound: How much rounding may have changed a weight at most, relative to it; 0 if nothing is rounded.
        worst_change: How much it did change one at most.
    """

    tensors: int
    nbytes: int
    digest: str
    stored_nbytes: int
    payload: int
    rounded: int = 0
    bound: float = 0.0
    worst_change: float = 0.0


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
    """Compress a safetensors file.

    Args:
        source: The plain file.
        target: The compressed file; it appears whole or not at all.
        level: The codec's level.
        threads: Threads of the encoder.
        overwrite: Whether `target` may be replaced.
        precision: How much of weights to keep; None keeps everything.
        ready: Blobs to take as they are for tensors with these digests.
        advance: Called with the bytes of the header, and of each tensor when it is done.

    Raises:
        Unsupported: Tensors of this dtype cannot be rounded with this fidelity.
        UsageError: The file is compressed already, or changed while it was read.
        CorruptBlob: The file is damaged.
        OutputExists: `target` exists.
        OutputFailed: `target` could not be written.
    """
    file = StoredFile(source)
    before = os.stat(source)
    if file.description is not None:
        raise UsageError(f"{source} is compressed already.", cure="Decompress it first.")
    whole = xxhash.xxh3_128(_head(file.header.raw))
    payload = rounded = 0
    bound = worst = 0.0
    try:
        with StoreWriter(target, level=level, overwrite=overwrite, threads=threads, original=file.header) as writer:
            advance(file.header.data_start)
            for span in file.header.spans:
                content = file.raw(span.name)
                blob = _encoded(content, span, level, threads, precision, ready)
                payload += writer.add_blob(span.name, blob)
                if codec.is_lossy(blob):
                    found = codec.info(blob)
                    rounded += 1
                    bound, worst = max(bound, found.bound), max(worst, found.worst_change)
                    whole.update(codec.decode_raw(blob, threads=threads).data)
                else:
                    whole.update(content)
                del blob
                content.release()
                file.release(span.name)
                advance(span.nbytes)
            after = os.stat(source)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise UsageError(f"{source} changed while it was read.", cure="Wait until it is complete; try again.")
    finally:
        file.close()
    digest = f"{ALGORITHM}:{whole.hexdigest()}"
    stored = target.stat().st_size
    return ShardResult(len(file.header.spans), before.st_size, digest, stored, payload, rounded, bound, worst)


def restore_shard(
    source: Path,
    target: Path,
    *,
    threads: int,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ShardResult:
    """Restore the safetensors file that a compressed one was made from; every tensor's digest is checked.

    Args:
        source: The compressed file.
        target: The plain file; it appears whole or not at all.
        threads: Threads of the decoder.
        overwrite: Whether `target` may be replaced.
        advance: Called with the bytes of the header, and of each tensor when it is done.

    Returns:
        The digest is that of the restored file.

    Raises:
        UsageError: The file is not compressed.
        CorruptBlob: The file is damaged; the tensor is named.
        OutputExists: `target` exists.
        OutputFailed: `target` could not be written.
    """
    file = StoredFile(source)
    if file.description is None:
        raise UsageError(f"{source} is not compressed.", cure="Check the path.")
    head = plain_head(file)
    whole = xxhash.xxh3_128(head)
    payload = rounded = 0
    bound = worst = 0.0
    try:
        with whole_file(target, overwrite=overwrite) as output:
            output.write(head)
            advance(len(head))
            for name in file.names():
                content = file.content(name, threads=threads, check=True)
                output.write(content)
                whole.update(content)
                found = file.rounding(name)
                if found is not None:
                    rounded += 1
                    bound, worst = max(bound, found.bound), max(worst, found.worst_change)
                payload += file.info(name).stored_nbytes
                file.release(name)
                advance(file.info(name).nbytes)
    finally:
        file.close()
    digest = f"{ALGORITHM}:{whole.hexdigest()}"
    sizes = target.stat().st_size, digest, source.stat().st_size
    return ShardResult(len(file.names()), *sizes, payload, rounded, bound, worst)


def plain_size(source: Path) -> int:
    """Bytes of the plain file that a weights file holds or is.

    Args:
        source: The file, compressed or not.

    Returns:
        Bytes, header included.

    Raises:
        CorruptBlob: The file is damaged.
        Unsupported: A newer release wrote it, or no plain file can hold its dtypes.
    """
    file = StoredFile(source)
    try:
        return len(plain_head(file)) + sum(file.info(name).nbytes for name in file.names())
    finally:
        file.close()


def check_digest(path: Path, found: str, recorded: str) -> None:
    """Compare a restored file with what was recorded of the original.

    Args:
        path: The restored file, for the message.
        found: Digest of what was restored.
        recorded: Digest of the original.

    Raises:
        CorruptBlob: They differ.
    """
    if found != recorded:
        raise CorruptBlob(
            f"{path}: the restored content has digest {found}, recorded is {recorded}.",
            cure="The compressed folder is damaged: fetch or make it again.",
        )


def plain_head(file: StoredFile) -> bytes:
    """The bytes before the data of the plain file: the original's if there was one, else new ones.

    Args:
        file: The open file.

    Raises:
        Unsupported: No plain file can hold one of its dtypes.
    """
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
