"""The codec in numpy: the whole of docs/format.md as a program, and the place to start reading.

The functions at the top are those of the native module (`backend.Codec`), with the same bytes and the same refusals, a
hundred times slower and on one thread, whatever `threads` and `path` say. From the outside in, reading and writing:

    decode, encode              a blob: header, index of chunks, digest
    _read_chunk, _chunk         up to 2**chunk_log2 numbers: a plane of their top bytes, then one for every lower byte
    read_plane, _plane          one plane, in one of five modes: raw, constant, packed, rans, wide_rans
    decode_words, round_weights the arithmetic of lossy blobs

The last two modes are in `numpy_rans.py`, the choice between modes and tables in `numpy_tables.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from netweight.codec.dtypes import BY_NAME, Bytes, ElementType, memory_at
from netweight.codec.header import (
    MAGIC,
    VERSION,
    Reader,
    as_bytes,
    check_digest,
    checksum,
    corrupt,
    little,
    tensor_bytes,
    varint,
)
from netweight.codec.header import read_header as header_of
from netweight.codec.numpy_rans import Words, pack, read_rans, read_wide, unpack, write_rans, write_wide
from netweight.codec.numpy_tables import (
    CONSTANT,
    COST,
    PACKED,
    RANS,
    RAW,
    WIDE_RANS,
    Counts,
    Integers,
    Plane,
    choose,
    sampling,
)
from netweight.errors import Unsupported

Floats = npt.NDArray[np.float32]

SMALLEST = 512  # bytes; below this no table pays
_INFINITE = 0x7F800000  # bits of a float32
_LEAST_NORMAL = 0x00800000


def paths() -> list[str]:
    """The only code path."""
    return ["python"]


def trim_pool(keep: int) -> None:
    """There is no pool of buffers."""


def pooled_array(size: int) -> Bytes:
    """A new array."""
    return np.empty(size, np.uint8)


def encode(
    buffer: Any, dtype: str, shape: Sequence[int], level: int, chunk_log2: int, threads: int = 1, path: str = "python"
) -> bytes:
    """Encode a tensor's bytes; level by number, chunk_log2 0 for the default."""
    element = BY_NAME.get(dtype)
    if element is None:
        raise Unsupported(f"element type {dtype} is not known to this release")
    return _encode(buffer, element, shape, level, chunk_log2)


def encode_words(
    words: Any, mantissa_bits: int, level: int, chunk_log2: int, threads: int = 1, path: str = "python"
) -> bytes:
    """Encode the words of a lossy blob: a U16 blob whose splits are those of floats."""
    element = replace(BY_NAME["U16"], exponent_bits=15 - mantissa_bits, mantissa_bits=mantissa_bits)
    return _encode(words, element, [len(words) // 2], level, chunk_log2)


def _encode(buffer: Any, element: ElementType, shape: Sequence[int], level: int, chunk_log2: int) -> bytes:
    data = as_bytes(buffer)
    if tensor_bytes(element, tuple(shape)) != len(data):
        raise ValueError("the buffer's size does not fit dtype and shape")
    chunk_log2 = chunk_log2 or element.default_chunk_log2
    step = element.number_bytes << chunk_log2
    chunks = [_chunk(data[start : start + step], element, level) for start in range(0, len(data), step)]
    fields = bytes((VERSION, element.code, level, chunk_log2, len(shape)))
    start = MAGIC + fields + xxhash.xxh3_128_digest(data.data)
    rest = b"".join(map(varint, shape)) + b"".join(little(len(chunk), 4) for chunk in chunks)
    return b"".join((start, checksum(start, rest), rest, *chunks))


def read_header(blob: Any) -> tuple[str, tuple[int, ...], int, int, int, bytes, tuple[int, ...], int]:
    """Type, shape, bytes of the tensor, level, chunk_log2, digest, starts of chunks and the blob's size, numbers."""
    h = header_of(blob)
    return h.element.name, h.shape, h.nbytes, h.level, h.chunk_log2, h.digest, h.chunk_starts, h.numbers


def decode(
    blob: Any, threads: int = 1, check: bool = False, path: str = "python"
) -> tuple[Bytes, str, tuple[int, ...]]:
    """A tensor's bytes, the name of its element type, its shape."""
    header = header_of(blob)
    out = decode_numbers(blob, 0, header.numbers)
    if check:
        check_digest(out, header.digest)
    return out, header.element.name, header.shape


def decode_into(blob: Any, out: Bytes, threads: int = 1, check: bool = False, path: str = "python") -> None:
    """Decode into an array of as many bytes as the tensor has."""
    expected = header_of(blob).nbytes
    if expected != out.nbytes:
        raise ValueError(f"the output has {out.nbytes} bytes where the tensor has {expected}")
    out[:] = decode(blob, check=check)[0]


def decode_to_address(
    blob: Any, address: int, nbytes: int, threads: int = 1, check: bool = False, path: str = "python"
) -> None:
    """`decode_into` memory that is known by its address."""
    decode_into(blob, memory_at(address, nbytes), check=check)


def decode_numbers(blob: Any, first: int, last: int, threads: int = 1, path: str = "python") -> Bytes:
    """The bytes of numbers `first` to `last` (exclusive); only the chunks that they touch are read."""
    header, data = header_of(blob), as_bytes(blob)
    size = header.element.number_bytes
    out = np.empty((last - first) * size, np.uint8)
    step = 1 << header.chunk_log2
    for chunk in range(first // step, -(-last // step) if last > first else 0):
        start = chunk * step
        count = min(step, header.numbers - start)
        body = data[header.chunk_starts[chunk] : header.chunk_starts[chunk + 1]]
        numbers = _read_chunk(Reader(body), header.element, count)
        begin, end = max(first, start), min(last, start + count)
        out[(begin - first) * size : (end - first) * size] = numbers[(begin - start) * size : (end - start) * size]
    return out


# ---- chunks and planes -----------------------------------------------------------------------------------------------


def _chunk(data: Bytes, element: ElementType, level: int) -> bytes:
    numbers = data.reshape(-1, element.number_bytes)
    head = np.ascontiguousarray(numbers[:, element.tails :]).reshape(-1)
    planes = [_plane(Plane.head(element), head, level)]
    for tail in reversed(range(element.tails)):
        planes.append(_plane(Plane(1, tail=True), np.ascontiguousarray(numbers[:, tail]), level))
    return b"".join(planes)


def _read_chunk(reader: Reader, element: ElementType, count: int) -> Bytes:
    """The bytes of a chunk of `count` numbers."""
    numbers = np.empty((count, element.number_bytes), np.uint8)
    head = element.head_bytes
    numbers[:, element.tails :] = read_plane(reader, head, count).view(np.uint8).reshape(count, head)
    for tail in reversed(range(element.tails)):
        numbers[:, tail] = read_plane(reader, 1, count)
    if reader.at != len(reader.data):
        raise corrupt("a chunk holds more bytes than its planes")
    return numbers.reshape(-1)


def _plane(plane: Plane, data: Bytes, level: int) -> bytes:
    """A plane in the mode that costs least."""
    elements = data.view("u1" if plane.width == 1 else "<u2")
    count = len(elements)
    if count > 1 and (elements == elements[0]).all():
        return bytes((CONSTANT,)) + data[: plane.width].tobytes()
    raw = bytes((RAW,)) + data.tobytes()
    if len(data) < SMALLEST:
        return raw
    worthwhile = (len(data) * 8 * COST) // 200 * 199  # half a percent at least
    packed = len(data)
    if plane.width == 1:
        widths = _packed_widths(elements)
        packed = 1 + -(-len(widths) // 2) + 8 * int(widths.sum())
    sample = 1 if count < 1 << 16 else sampling(level)
    streams = 1 if count < 1 << 14 else 2 if count < 1 << 18 else 4
    while True:
        choice = choose(plane, elements, level, sample)
        if packed * 8 * COST < worthwhile and (choice is None or packed * 8 * COST <= choice.cost):
            return _packed(elements, widths)
        if choice is None or choice.cost >= worthwhile:
            return raw
        coded = write_rans(choice, elements, streams) if choice.mode == RANS else write_wide(choice, elements)
        if coded is not None and len(coded) <= len(data):
            return coded
        if sample == 1:
            return raw
        sample = 1  # the sample misled: look at everything


def read_plane(reader: Reader, width: int, count: int) -> Integers:
    """One plane: `count` unsigned elements of `width` bytes, 1 or 2."""
    mode = reader.number(1, "a plane")
    kind = np.dtype("u1" if width == 1 else "<u2")
    if mode == RAW:
        return reader.take(count * width, "a raw plane").view(kind)
    if mode == CONSTANT:
        return np.full(count, reader.number(width, "a constant plane"), kind)
    if mode == PACKED:
        if width != 1:
            raise corrupt("a packed plane must have one-byte elements")
        return _read_packed(reader, count)
    if mode == RANS:
        return read_rans(reader, width, count).astype(kind)
    if mode == WIDE_RANS:
        return read_wide(reader, width, count).astype(kind)
    raise corrupt("a plane has an unknown mode")


def _blocks(elements: Bytes) -> Bytes:
    blocks = np.zeros((-(-len(elements) // 64), 64), np.uint8)
    blocks.reshape(-1)[: len(elements)] = elements
    return blocks


def _packed_widths(elements: Bytes) -> Counts:
    """By block of 64 bytes: 8 less the number of low bits that are zero in all of them."""
    used = np.bitwise_or.reduce(_blocks(elements), axis=1)
    widths = np.zeros(256, np.int64)
    for value in range(1, 256):
        widths[value] = 9 - (value & -value).bit_length()
    return widths[used]


def _packed(elements: Bytes, widths: Counts) -> bytes:
    """Blocks of 64 bytes of which only the upper `width` bits are stored; all widths, four bits each, come first."""
    nibbles = np.append(widths, 0)[: len(widths) + len(widths) % 2].astype(np.uint8).reshape(-1, 2)
    blocks = _blocks(elements)
    fields = np.empty(8 * int(widths.sum()), np.uint8)
    for width, here, places in _of_width(widths):
        fields[places] = pack(blocks[here] >> (8 - width), width)
    return bytes((PACKED,)) + (nibbles[:, 0] | nibbles[:, 1] << 4).tobytes() + fields.tobytes()


def _read_packed(reader: Reader, count: int) -> Bytes:
    blocks = -(-count // 64)
    pairs = reader.take(-(-blocks // 2), "packed widths")
    widths = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:blocks].astype(np.int64)
    if widths.max(initial=0) > 8:
        raise corrupt("a packed block is wider than a byte")
    fields = reader.take(8 * int(widths.sum()), "a packed block")
    elements = np.zeros((blocks, 64), np.uint8)
    for width, here, places in _of_width(widths):
        elements[here] = unpack(fields[places], width) << (8 - width)
    return elements.reshape(-1)[:count]


def _of_width(widths: Counts) -> list[tuple[int, Counts, Counts]]:
    """For each width from 1 to 8: the blocks that have it, and where their bytes are."""
    ends = 8 * np.cumsum(widths)
    found = [(width, np.flatnonzero(widths == width)) for width in range(1, 9)]
    return [(width, here, (ends[here] - 8 * width)[:, None] + np.arange(8 * width)) for width, here in found]


# ---- the arithmetic of lossy blobs -----------------------------------------------------------------------------------
# A word is what is kept of a weight: its sign in bit 15; below, right-aligned, the 8 exponent bits of a float32 and the
# top k bits of its mantissa, rounded. With blocks, weights are divided by their block's normalizer before, and what is
# read is multiplied by it: 1 + n / 256, of which n is stored. `native/rounding.h` does the same.


def round_weights(
    data: Bytes, dtype: str, mantissa_bits: int, block: int, reference: bool, numerator: float, denominator: float,
    words: Words, normalizers: Bytes, out: Bytes, path: str = "python",
) -> tuple[float, list[int]]:  # fmt: skip
    """Round weights, of which the first begins a block (0 for no blocks), into words, normalizers and rounded bytes.

    Returned are the largest relative change, and the weights that change by more than numerator / denominator or cannot
    be rounded: they are kept exactly, and their words are 0.
    """
    weights = _widened(data, dtype)
    bits = weights.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    finite = magnitude < _INFINITE
    quotient = weights
    if block:
        sound = np.where(finite & (magnitude >= _LEAST_NORMAL), magnitude, 0)
        largest = np.maximum.reduceat(sound, np.arange(0, len(weights), block))
        normalizers[:] = (largest >> 15).astype(np.uint8)
        with np.errstate(invalid="ignore", under="ignore"):
            quotient = weights / _factors(normalizers, block, 0, len(weights))
        if reference:
            quotient = _widened(_narrowed(quotient, dtype), dtype)
    code = _codes(quotient, mantissa_bits, reference)
    code[~finite] = 0
    words[:] = bits >> 16 & np.uint32(0x8000) | code
    out[:] = _weights_of(words, normalizers, dtype, mantissa_bits, block, reference, 0)
    rounded = _widened(out, dtype)

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        size = np.abs(weights.astype(np.float64))
        change = np.abs(rounded.astype(np.float64) - weights.astype(np.float64))
        within = change * denominator <= size * numerator  # exact: both sides have less than 53 bits
        if reference:
            within |= np.isinf(rounded)
        kept = finite & within & ((code != 0) | (magnitude == 0))
        changes = (change / size)[kept & (magnitude != 0)]
    escapes = np.flatnonzero(~kept)
    words[escapes] = 0
    number = BY_NAME[dtype].number_bytes
    out.reshape(-1, number)[escapes] = data.reshape(-1, number)[escapes]
    return float(changes.max(initial=0.0)), escapes.tolist()


def decode_words(
    blob: Any, normalizers: Any, dtype: str, mantissa_bits: int, block: int, reference: bool, first: int, last: int,
    address: int, nbytes: int, threads: int = 1, path: str = "python",
) -> None:  # fmt: skip
    """Decode words `first` to `last` to weights at an address, with the normalizers of the blocks that they touch."""
    words = decode_numbers(blob, first, last).view("<u2")
    place = first % block if block else 0
    memory_at(address, nbytes)[:] = _weights_of(
        words, as_bytes(normalizers), dtype, mantissa_bits, block, reference, place
    )


def _weights_of(
    words: Words, normalizers: Bytes, dtype: str, mantissa_bits: int, block: int, reference: bool, first: int
) -> Bytes:
    """The bytes of weights, without those kept exactly; `first` is the first word's place in its block."""
    code = (words & np.uint16(0x7FFF)).astype(np.uint32)
    most = (255 << mantissa_bits) - (not reference)  # infinity has the largest word
    if ((code > most) | ((code != 0) & (code < 1 << mantissa_bits))).any():
        raise corrupt("a word stands for no number")
    bits = code << np.uint32(23 - mantissa_bits) | (words & np.uint16(0x8000)).astype(np.uint32) << 16
    values = bits.view(np.float32)
    if block:
        with np.errstate(over="ignore"):
            values = values * _factors(normalizers, block, first, len(words))
    return _narrowed(values, dtype)


def _codes(quotient: Floats, mantissa_bits: int, reference: bool) -> npt.NDArray[np.uint32]:
    """Words without signs; 0 for what cannot be rounded."""
    magnitude = quotient.view(np.uint32) & np.uint32(0x7FFFFFFF)
    shift, infinite = 23 - mantissa_bits, 255 << mantissa_bits
    half = np.uint32(1 << (shift - 1))
    if reference:  # half up
        code = (magnitude + half) >> np.uint32(shift)
        code[code > infinite] = 0
    else:  # half to even
        code = (magnitude + (half - np.uint32(1)) + (magnitude >> np.uint32(shift) & np.uint32(1))) >> np.uint32(shift)
        code[code >= infinite] = 0
    code[magnitude < _LEAST_NORMAL] = 0
    return code


def _factors(normalizers: Bytes, block: int, first: int, count: int) -> Floats:
    """The number that each weight was divided by: of nine bits, so exact."""
    blocks = np.arange(first, first + count) // block
    factors: Floats = (np.float32(1) + normalizers.astype(np.float32) / np.float32(256))[blocks]
    return factors


def _widened(data: Bytes, dtype: str) -> Floats:
    """Weights as float32, exactly."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        with np.errstate(invalid="ignore"):  # signaling NaNs
            return data.view("<f2").astype(np.float32)
    floats: Any = data.view("<f4")
    return floats  # type: ignore[no-any-return]


def _narrowed(values: Floats, dtype: str) -> Bytes:
    """The bytes of float32 numbers, none of them NaN, in the weights' own type; half to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return rounded.astype("<u2").view(np.uint8)
    if dtype == "F16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype("<f2").view(np.uint8)
    return values.astype("<f4").view(np.uint8)
