"""Lossy blobs: rounded weights as words, which an ordinary blob holds, beside normalizers and weights kept exactly.

docs/format.md, "Lossy blobs", is the format; `rounding.py` is the arithmetic. A lossy blob decodes to the rounded
weights, always the same. `api.py` calls this for blobs that `recognizes` knows; loops over weights run in the native
module where it is there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from netweight.codec import backend
from netweight.codec.element_types import ELEMENT_TYPES
from netweight.codec.reference import FIXED_HEADER, Reader, read_varint, tensor_bytes, varint
from netweight.codec.rounding import FIDELITIES, Bytes, Precision, Rounding
from netweight.errors import CorruptBlob, Unsupported, UsageError

__all__ = [
    "LossyHeader",
    "decode",
    "decode_numbers",
    "encode",
    "normalizers_of",
    "put_kept",
    "read_header",
    "recognizes",
]

MAGIC = b"NWL"
VERSION = 1
MOST_ESCAPES = 16  # of so many weights at most one is kept exactly; else the tensor is not rounded at all
_STEP = 1 << 20  # weights rounded at a time


@dataclass(frozen=True, slots=True)
class LossyHeader:
    """What a lossy blob says before its sections.

    Attributes:
        rounding: How the tensor was rounded.
        shape: Its shape.
        digest: xxh3-128 of the rounded tensor's bytes, most significant byte first.
        worst: The largest relative change of a weight that rounding made.
        words_start: Where the blob of words starts, in bytes from the beginning.
        words: The blob of words.
        normalizers: The blob of normalizers; None without.
        gaps: The blob that says where weights are kept exactly; None if none are.
        kept: The blob of these weights; None if there are none.
    """

    rounding: Rounding
    shape: tuple[int, ...]
    digest: bytes
    worst: float
    words_start: int
    words: Bytes = field(repr=False)
    normalizers: Bytes | None = field(repr=False)
    gaps: Bytes | None = field(repr=False)
    kept: Bytes | None = field(repr=False)

    @property
    def count(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.count * self.rounding.element.number_bytes


def recognizes(blob: Any) -> bool:
    """Whether bytes begin as a lossy blob does.

    Args:
        blob: Anything with the buffer protocol.
    """
    return bytes(blob[:3]) == MAGIC


# ---- writing ---------------------------------------------------------------------------------------------------------


def encode(
    buffer: Any,
    shape: Sequence[int],
    rounding: Rounding,
    *,
    level: int,
    chunk_log2: int,
    threads: int,
    path: str,
) -> bytes | None:
    """Round a tensor and encode it.

    Args:
        buffer: The tensor's bytes; anything with the buffer protocol.
        shape: Its shape.
        rounding: How to round.
        level: The codec's level, by number.
        chunk_log2: See `backend.encode`.
        threads: Threads to encode with.
        path: The code path.

    Returns:
        The blob; None if there is nothing to round, or too many weights would have to be kept exactly.

    Raises:
        ValueError: The buffer's size does not fit dtype and shape.
    """
    number, nbytes = rounding.element.number_bytes, tensor_bytes(rounding.element, tuple(shape))
    if memoryview(buffer).nbytes != nbytes:
        raise ValueError("the buffer's size does not fit dtype and shape")
    if not nbytes:
        return None
    data, count = np.frombuffer(buffer, np.uint8), nbytes // number
    words = np.empty(count, np.uint16)
    normalizers: list[Bytes] = []
    escapes: list[npt.NDArray[np.int64]] = []
    digest, worst = xxhash.xxh3_128(), 0.0
    block = rounding.block_size or 1
    step = block * max(1, _STEP // block)
    for start in range(0, count, step):
        part = data[start * number : (start + step) * number]
        rounded = backend.round_weights(part, rounding, path)
        words[start : start + step] = rounded.words
        if rounded.normalizers is not None:
            normalizers.append(rounded.normalizers)
        escapes.append(rounded.escapes + start)
        digest.update(rounded.values.data)
        worst = max(worst, rounded.worst)
    places = np.concatenate(escapes) if escapes else np.empty(0, np.int64)
    if len(places) * MOST_ESCAPES > count:
        return None

    def blob(array: npt.NDArray[Any], dtype: str) -> bytes:
        flat = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        size = len(flat) // array.dtype.itemsize
        return backend.encode(flat, dtype, [size], level, 0, threads, path)

    sections = [
        backend.encode_words(words.view(np.uint8), rounding.mantissa_bits, level, chunk_log2, threads, path),
        blob(np.concatenate(normalizers), "U8") if normalizers else b"",
        b"",
        b"",
    ]
    if len(places):
        kept = data.reshape(-1, number)[places]
        sections[2] = blob(np.diff(places, prepend=-1) - 1, "U64")
        sections[3] = backend.encode(kept, rounding.element.name, [len(places)], level, 0, threads, path)
    fields = (VERSION, rounding.element.code, rounding.mantissa_bits, FIDELITIES.index(rounding.fidelity), len(shape))
    fixed = MAGIC + bytes(fields) + digest.digest()
    numbers = (*shape, rounding.block_size or 0, *map(len, sections))
    rest = struct.pack("<d", worst) + b"".join(map(varint, numbers))
    check = xxhash.xxh3_64_intdigest(fixed + rest) & 0xFFFFFFFF
    return b"".join((fixed, check.to_bytes(4, "little"), rest, *sections))


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_header(blob: Any) -> LossyHeader:
    """Read and check a lossy blob's header, and the headers of the blobs in it; no payload is touched.

    Args:
        blob: Anything with the buffer protocol.

    Returns:
        The header, with views of the blobs in it.

    Raises:
        CorruptBlob: The bytes are damaged.
        Unsupported: The blob is of a newer format.
    """
    data = np.frombuffer(blob, np.uint8)
    reader = Reader(data)
    if len(data) < FIXED_HEADER:
        raise _corrupt(f"it is shorter than a header ({len(data)} bytes)")
    fixed = reader.take(FIXED_HEADER, "the header").tobytes()
    version, code, mantissa_bits, fidelity, dimensions = fixed[3:8]
    if version != VERSION:
        raise Unsupported(f"version {version} of lossy blobs is newer than this release reads ({VERSION})")
    element = next((e for e in ELEMENT_TYPES if e.code == code), None)
    if element is None or fidelity >= len(FIDELITIES):
        raise Unsupported("its element type or arithmetic is not known to this release")
    if dimensions > 64:
        raise _corrupt("the header states an impossible number of dimensions")
    (worst,) = struct.unpack("<d", reader.take(8, "the header").tobytes())
    shape = tuple(read_varint(reader) for _ in range(dimensions))
    block_size, *sizes = (read_varint(reader) for _ in range(5))
    checked = fixed[:24] + data[FIXED_HEADER : reader.at].tobytes()
    if xxhash.xxh3_64_intdigest(checked) & 0xFFFFFFFF != int.from_bytes(fixed[24:28], "little"):
        raise _corrupt("the header's checksum does not fit its bytes")
    rounding = _rounding(element.name, mantissa_bits, block_size or None, FIDELITIES[fidelity])
    count = tensor_bytes(element, shape) // element.number_bytes
    if not 0 <= worst:
        raise _corrupt("the header states an impossible change")
    if sum(sizes) != len(data) - reader.at:
        raise _corrupt(f"it has {len(data) - reader.at} bytes of sections where they add up to {sum(sizes)}")
    words_start = reader.at
    words, *others = (reader.take(size, "a section") for size in sizes)
    normalizers, gaps, kept = (section if len(section) else None for section in others)
    if (normalizers is None) != (rounding.block_size is None or count == 0) or (gaps is None) != (kept is None):
        raise _corrupt("a section is missing or too many")
    _check_section(words, "U16", count)
    if normalizers is not None:
        _check_section(normalizers, "U8", -(-count // (rounding.block_size or 1)))
    if gaps is not None and kept is not None:
        size = _check_section(kept, element.name, None)
        if not 1 <= size * MOST_ESCAPES <= count:
            raise _corrupt("a section has the wrong size")
        _check_section(gaps, "U64", size)
    return LossyHeader(rounding, shape, fixed[8:24], worst, words_start, words, normalizers, gaps, kept)


def decode(blob: Any, threads: int, check: bool, path: str, out: Bytes | None = None) -> Bytes:
    """Decode a lossy blob to the rounded tensor's bytes.

    Args:
        blob: The blob.
        threads: Threads to decode with.
        check: Also compare the digest of the result with the one in the header.
        path: The code path.
        out: Where to write them; None for a new array.

    Raises:
        CorruptBlob: The blob is damaged.
        Unsupported: See `read_header`.
        ValueError: `out` has another size.
    """
    header = read_header(blob)
    if out is not None and out.nbytes != header.nbytes:
        raise ValueError(f"the output has {out.nbytes} bytes where the tensor has {header.nbytes}")
    result = _decode(header, 0, header.count, threads, path, out)
    if check and xxhash.xxh3_128_digest(result.data) != header.digest:
        raise _corrupt("the decoded bytes do not have the digest that was stored with them")
    return result


def decode_numbers(header: LossyHeader, first: int, last: int, threads: int, path: str) -> Bytes:
    """Decode weights `first` to `last` (exclusive); only the chunks that they touch are read.

    Args:
        header: The blob's header.
        first: The first weight.
        last: The weight after the last one.
        threads: How many threads may work at once, at least 1.
        path: Code path of the native codec, or "auto".

    Returns:
        The bytes of these weights, rounded as they are.

    Raises:
        CorruptBlob: The blob is damaged.
    """
    return _decode(header, first, last, threads, path, None)


def _decode(header: LossyHeader, first: int, last: int, threads: int, path: str, out: Bytes | None) -> Bytes:
    normalizers = normalizers_of(header, first, last, path)
    result = backend.decode_words(header.words, normalizers, header.rounding, first, last, threads, path, out)
    put_kept(header, first, last, path, result)
    return result


def normalizers_of(header: LossyHeader, first: int, last: int, path: str) -> Bytes | None:
    """The normalizers of the blocks that weights `first` to `last` (exclusive) touch; None without.

    Args:
        header: The blob's header.
        first: The first weight.
        last: The weight after the last one.
        path: Code path of the native codec, or "auto".

    Raises:
        CorruptBlob: The blob is damaged.
    """
    block = header.rounding.block_size
    if header.normalizers is None or block is None:
        return None
    blocks = (first // block, (last - 1) // block + 1) if first < last else (0, 0)
    return backend.decode_numbers(header.normalizers, *blocks, 1, path)


def put_kept(header: LossyHeader, first: int, last: int, path: str, weights: Bytes) -> None:
    """Put the weights that are kept exactly in their places among weights `first` to `last` (exclusive).

    Args:
        header: The blob's header.
        first: The first weight.
        last: The weight after the last one.
        path: Code path of the native codec, or "auto".
        weights: Bytes of the weights `first` to `last`; changed in place.

    Raises:
        CorruptBlob: The blob is damaged.
    """
    if header.gaps is None or header.kept is None:
        return
    places = _places(backend.decode(header.gaps, 1, False, path)[0], header.count)
    number = header.rounding.element.number_bytes
    kept = backend.decode(header.kept, 1, False, path)[0].reshape(-1, number)
    inside = (places >= first) & (places < last)
    weights.reshape(-1, number)[places[inside] - first] = kept[inside]


def _places(gaps: Bytes, count: int) -> npt.NDArray[np.int64]:
    """Places of the weights that are kept exactly, from the numbers of weights between them."""
    steps = gaps.view("<u8")
    if (steps >= count).any():
        raise _corrupt("a weight that is kept exactly lies outside the tensor")
    places = np.cumsum(steps.astype(np.int64) + 1) - 1
    if (np.diff(places, prepend=-1) <= 0).any() or places[-1] >= count:  # the sum may run over
        raise _corrupt("a weight that is kept exactly lies outside the tensor")
    return places


def _rounding(dtype: str, mantissa_bits: int, block_size: int | None, fidelity: str) -> Rounding:
    try:
        rounding = Precision(mantissa_bits, block_size, fidelity).rounding(dtype)
    except (Unsupported, UsageError) as error:
        raise _corrupt("the header states an impossible rounding") from error
    if rounding is None:
        raise _corrupt("the header states an impossible rounding")
    return rounding


def _check_section(section: Bytes, dtype: str, count: int | None) -> int:
    """Check that a section is a blob of one dimension with elements of this type; return their number."""
    name, shape, *_ = backend.read_header(section)
    if name != dtype or len(shape) != 1 or count not in (None, shape[0]):
        raise _corrupt("a section holds something else than it must")
    return shape[0]


def _corrupt(reason: str) -> CorruptBlob:
    return CorruptBlob(reason, cure="Fetch or compress the file again; its bytes were damaged.")
