"""What a blob says before its chunks, as docs/format.md specifies it; all is checked before anything is allocated.

Numbers are little-endian everywhere. Lossy blobs and the GPU's encoder and decoder share the reader and the checksum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from netweight.codec.dtypes import BY_CODE, Bytes, ElementType
from netweight.errors import CorruptBlob, Unsupported

MAGIC = b"NWT"
VERSION = 2  # written unless 1 is asked for; both are read
HAS_BASE, HAS_NEW_MODES = 0x80, 0x40  # flags beside the level
FIXED_HEADER = 28  # marker, five fields of a byte, digest (16 bytes), checksum (4 bytes)


def corrupt(reason: str) -> CorruptBlob:
    """The error for damaged bytes."""
    return CorruptBlob(reason, cure="Fetch or compress the file again; its bytes were damaged.")


class Reader:
    """Takes bytes from the front of a one-dimensional array and never passes its end."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int, what: str) -> Bytes:
        """The next `size` bytes; `what` names them in the error."""
        if size > len(self.data) - self.at:
            raise corrupt(f"the data ends inside {what}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int, what: str) -> int:
        """The next `size` bytes as an unsigned number."""
        return int.from_bytes(self.take(size, what).tobytes(), "little")

    def varint(self) -> int:
        """A number of the header: seven bits a byte, least significant first; the last byte is below 128."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self.number(1, "the header")
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise corrupt("a dimension in the header is too large")


def varint(value: int) -> bytes:
    """A number as `Reader.varint` reads it."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def little(value: int, size: int) -> bytes:
    """A number as `size` bytes."""
    return value.to_bytes(size, "little")


def checksum(start: bytes, rest: bytes) -> bytes:
    """The four bytes between the first 24 of a header and the rest of it, which protect both."""
    return little(xxhash.xxh3_64_intdigest(start + rest) & 0xFFFFFFFF, 4)


def check_header(fixed: bytes, reader: Reader) -> None:
    """Compare the checksum with a header that ends where the reader stands."""
    if checksum(fixed[:24], reader.data[FIXED_HEADER : reader.at].tobytes()) != fixed[24:28]:
        raise corrupt("the header's checksum does not fit its bytes")


def take_fixed(reader: Reader) -> bytes:
    """The part of a header that has one length in all blobs."""
    if len(reader.data) < FIXED_HEADER:
        raise corrupt(f"it is shorter than a header ({len(reader.data)} bytes)")
    return reader.take(FIXED_HEADER, "the header").tobytes()


def refuse_inflated(nbytes: int, stored: int) -> None:
    """Refuse to allocate what few bytes declare, as `bind.cpp` does; with default chunks no encoder goes so far."""
    if nbytes > 1 << 28 and nbytes >> 17 >= stored:
        raise ValueError(
            f"its {stored} bytes declare {nbytes}; decode it chunk by chunk, or to memory of your own (decode_into)"
        )


def check_digest(content: Bytes, digest: bytes) -> None:
    """Compare a decoded tensor's digest with the stored one."""
    if xxhash.xxh3_128_digest(content.data) != digest:
        raise corrupt("the decoded bytes do not have the digest that was stored with them")


def digest_of_checks(checks: Sequence[int]) -> bytes:
    """The digest of a tensor in version 2, from the checks of its chunks."""
    return xxhash.xxh3_128_digest(np.array(checks, "<u8").tobytes())


def named_digest(digest: bytes, version: int) -> str:
    """A digest with the name of its algorithm."""
    return f"{'xxh3-128' if version == 1 else 'xxh3-chunks'}:{digest.hex()}"


@dataclass(frozen=True, slots=True)
class Header:
    """What a blob says before its chunks."""

    element: ElementType
    shape: tuple[int, ...]
    level: int  # 0 fast, 1 default, 2 max; decoders need not know
    chunk_log2: int
    digest: bytes  # version 1: xxh3-128 of the tensor's bytes; 2: of the checks; most significant byte first
    nbytes: int  # of the tensor
    chunk_starts: tuple[int, ...]  # in the blob; the last one is the blob's size
    version: int = 1
    new_modes: bool = False  # whether a decoder of version 1's chunks cannot read some chunk
    base_digest: bytes = b""  # of the tensor that the blob holds differences from; empty if it holds none
    checks: tuple[int, ...] = ()  # XXH3-64 of every chunk's numbers; version 1 has none

    @property
    def numbers(self) -> int:
        """Numbers in the tensor: elements, or twice as many for complex types."""
        return self.nbytes // self.element.number_bytes


def tensor_bytes(element: ElementType, shape: tuple[int, ...]) -> int:
    """The size of a tensor in bytes."""
    bits = math.prod(shape) * element.bits
    if bits >= 1 << 62:
        raise Unsupported("a tensor of this shape is too large")
    if bits % 8:
        raise Unsupported(f"a tensor of type {element.name} must fill whole bytes")
    return bits // 8


def read_header(blob: Any, *, size: int | None = None) -> Header:
    """Read and check header and index; with the whole blob's `size`, `blob` may end at `index_end`."""
    reader = Reader(as_bytes(blob))
    size = len(reader.data) if size is None else size
    fixed, element, shape, nbytes, base_digest, chunks = _read_start(reader, size)
    version, level = fixed[3], fixed[5]
    lengths = reader.take(4 * chunks, "the index of chunks").view("<u4")
    checks = reader.take(8 * chunks, "the index of chunks").view("<u8").tolist() if version > 1 else []
    check_header(fixed, reader)
    if version > 1 and digest_of_checks(checks) != fixed[8:24]:
        raise corrupt("the header's digest does not fit its checks")
    starts = (reader.at, *(reader.at + np.cumsum(lengths, dtype=np.int64)).tolist())
    if starts[-1] != size:
        raise corrupt(f"it has {size} bytes where its index adds up to {starts[-1]}")
    new_modes = version > 1 and bool(level & HAS_NEW_MODES)
    return Header(
        element, shape, level & 3, fixed[6], fixed[8:24], nbytes, starts, version, new_modes, base_digest, tuple(checks)
    )


def index_end(beginning: Any, size: int) -> int:
    """Where the index of a blob of `size` bytes ends, of which the first 1,024 bytes at least are at hand."""
    reader = Reader(as_bytes(beginning))
    fixed, *_, chunks = _read_start(reader, size)
    return reader.at + chunks * (4 if fixed[3] == 1 else 12)


def _read_start(reader: Reader, size: int) -> tuple[bytes, ElementType, tuple[int, ...], int, bytes, int]:
    """What stands before the index: fixed part, element type, shape, bytes of the tensor, base's digest, chunks."""
    fixed = take_fixed(reader)
    version, code, level, chunk_log2, dimensions = fixed[3:8]
    if fixed[:3] != MAGIC:
        raise corrupt("it does not start with the marker NWT")
    if version not in (1, VERSION):
        raise Unsupported(f"format version {version} is newer than this release reads ({VERSION})")
    element = BY_CODE.get(code)
    if element is None:
        raise Unsupported(f"element type number {code} is not known to this release")
    flags = HAS_BASE | HAS_NEW_MODES if version > 1 else 0
    if level & ~flags > 2:
        raise Unsupported(f"level number {level & ~flags} is not known to this release")
    if not 10 <= chunk_log2 <= 22:
        raise corrupt("the header states an impossible chunk size")
    if dimensions > 64:
        raise corrupt("the header states an impossible number of dimensions")
    shape = tuple(reader.varint() for _ in range(dimensions))
    nbytes = tensor_bytes(element, shape)
    base_digest = reader.take(16, "the header").tobytes() if level & flags & HAS_BASE else b""
    chunks = -(-nbytes // element.number_bytes >> chunk_log2)
    if chunks > (size - reader.at) // (4 if version == 1 else 12):
        raise corrupt("the data ends inside the index of chunks")
    return fixed, element, shape, nbytes, base_digest, chunks


@dataclass
class HeaderWriter:
    """The header and index of a blob whose chunks are encoded one by one."""

    element: ElementType
    shape: tuple[int, ...]
    level: int
    chunk_log2: int
    version: int = VERSION
    has_base: bool = False
    new_modes: bool = False
    lengths: list[int] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    base_checks: list[int] = field(default_factory=list)

    def add(self, encoded: tuple[bytes, int, int, bool]) -> bytes:
        """Take down and return the next chunk, as `backend.Codec.encode_chunk` returns it."""
        chunk, check, base_check, new_modes = encoded
        self.lengths.append(len(chunk))
        self.checks.append(check)
        self.base_checks.append(base_check)
        self.new_modes |= new_modes
        return chunk

    def header(self, digest: bytes | None = None) -> bytes:
        """The bytes before the chunks; `digest` is that of a tensor of version 1."""
        flags = (HAS_BASE if self.has_base else 0) | (HAS_NEW_MODES if self.new_modes else 0)
        fields = (self.version, self.element.code, self.level | flags, self.chunk_log2, len(self.shape))
        start = MAGIC + bytes(fields) + (digest_of_checks(self.checks) if digest is None else digest)
        rest = b"".join(map(varint, self.shape)) + (digest_of_checks(self.base_checks) if self.has_base else b"")
        rest += np.array(self.lengths, "<u4").tobytes()
        rest += np.array(self.checks, "<u8").tobytes() if self.version > 1 else b""
        return start + checksum(start, rest) + rest


def as_bytes(buffer: Any) -> Bytes:
    """Anything with the buffer protocol as an array."""
    return np.frombuffer(buffer, np.uint8) if memoryview(buffer).nbytes else np.empty(0, np.uint8)
