"""The decoder in plain numpy: the whole of docs/format.md as a program, and the place to start reading.

It makes every check that the native decoder makes and refuses the same blobs. From the outside in:

    decode          a blob: header, index of chunks, digest
    _chunk          up to 2**chunk_log2 numbers: a plane of their top bytes, then a plane for every lower byte
    _plane          one plane, in one of five modes: raw, constant, packed, rans, wide_rans
    _patches        corrections of the symbols that an entropy coder's table does not hold

Numbers are little-endian everywhere. `netweight.codec` calls this where the native module is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from netweight.codec.element_types import ELEMENT_TYPES, ElementType
from netweight.errors import CorruptBlob, Unsupported

__all__ = [
    "LANE_ORDER",
    "Header",
    "Split",
    "decode",
    "decode_numbers",
    "index_end",
    "read_header",
    "read_varint",
    "tensor_bytes",
    "varint",
]

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Integers = npt.NDArray[Any]

MAGIC = b"NWT"
VERSION = 1
FIXED_HEADER = 28
RAW, CONSTANT, PACKED, RANS, WIDE_RANS = range(5)
LITERAL, SKIP = 14, 15  # codes of a patch; smaller ones number the rare symbols

# Lane i of a row of 64 holds the row's element LANE_ORDER[element_bytes][i]. Two-byte elements stand in the order in
# which vector instructions interleave two registers of bytes.
LANE_ORDER = {1: np.arange(64), 2: np.array([(i >> 3 & 1) * 32 + (i >> 4) * 8 + (i & 7) for i in range(64)])}


def _corrupt(reason: str) -> CorruptBlob:
    return CorruptBlob(reason, cure="Fetch or compress the file again; its bytes were damaged.")


class Reader:
    """Takes bytes from the front of a buffer and never passes its end.

    Args:
        data: A one-dimensional array of bytes.
    """

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int, what: str) -> Bytes:
        """The next `size` bytes; `what` names them in the error."""
        if size > len(self.data) - self.at:
            raise _corrupt(f"the data ends inside {what}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int, what: str) -> int:
        """The next `size` bytes as an unsigned number."""
        return int.from_bytes(self.take(size, what).tobytes(), "little")


# ---- blobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """What a blob says before its chunks.

    Attributes:
        element: The element type.
        shape: The tensor's shape.
        level: 0 fast, 1 default, 2 max: how hard the encoder tried. Decoders need not know.
        chunk_log2: Binary logarithm of the numbers in a chunk.
        digest: xxh3-128 of the tensor's bytes, most significant byte first.
        nbytes: Bytes of the tensor.
        chunk_starts: Where each chunk starts in the blob, and the blob's size.
    """

    element: ElementType
    shape: tuple[int, ...]
    level: int
    chunk_log2: int
    digest: bytes
    nbytes: int
    chunk_starts: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """Numbers in the tensor: elements, or twice as many for complex types."""
        return self.nbytes // self.element.number_bytes


def tensor_bytes(element: ElementType, shape: tuple[int, ...]) -> int:
    """The size of a tensor in bytes.

    Args:
        element: The element type.
        shape: The tensor's shape.

    Raises:
        Unsupported: It has 2**62 bits or more, or elements of less than a byte that end inside one.
    """
    bits = math.prod(shape) * element.bits
    if bits >= 1 << 62:
        raise Unsupported("a tensor of this shape is too large")
    if bits % 8:
        raise Unsupported(f"a tensor of type {element.name} must fill whole bytes")
    return bits // 8


def read_header(blob: Any, *, size: int | None = None) -> Header:
    """Read and check a blob's header and index of chunks; no payload is touched.

    Args:
        blob: Anything with the buffer protocol.
        size: Bytes of the whole blob, of which `blob` may then be only the beginning, up to the end of its index at
            least (see `index_end`); None if `blob` is all of it.

    Returns:
        The header, with views of the blob's sections.

    Raises:
        CorruptBlob: The bytes are damaged or not a blob.
        Unsupported: The blob is of a newer format or of a size that no machine holds.
    """
    reader = Reader(_as_bytes(blob))
    size = len(reader.data) if size is None else size
    start = _read_start(reader, size)
    lengths = reader.take(4 * start.chunks, "the index of chunks").view("<u4")
    checked = start.fixed[:24] + reader.data[FIXED_HEADER : reader.at].tobytes()
    if xxhash.xxh3_64_intdigest(checked) & 0xFFFFFFFF != int.from_bytes(start.fixed[24:28], "little"):
        raise _corrupt("the header's checksum does not fit its bytes")
    starts = (reader.at, *(reader.at + np.cumsum(lengths, dtype=np.int64)).tolist())
    if starts[-1] != size:
        raise _corrupt(f"it has {size} bytes where its index adds up to {starts[-1]}")
    level, chunk_log2 = start.fixed[5:7]
    return Header(start.element, start.shape, level, chunk_log2, start.fixed[8:24], start.nbytes, starts)


def index_end(beginning: Any, size: int) -> int:
    """Where the index of a blob ends, whose first bytes are at hand.

    Args:
        beginning: The first 1,024 bytes of the blob at least, or all of it.
        size: Bytes of the whole blob.

    Raises:
        CorruptBlob, Unsupported: See `read_header`.
    """
    reader = Reader(_as_bytes(beginning))
    chunks = _read_start(reader, size).chunks
    return reader.at + 4 * chunks


@dataclass(frozen=True, slots=True)
class _Start:
    """What stands before a blob's index."""

    fixed: bytes
    element: ElementType
    shape: tuple[int, ...]
    nbytes: int
    chunks: int


def _read_start(reader: Reader, size: int) -> _Start:
    if len(reader.data) < FIXED_HEADER:
        raise _corrupt(f"it is shorter than a header ({len(reader.data)} bytes)")
    fixed = reader.take(FIXED_HEADER, "the header").tobytes()
    version, code, level, chunk_log2, dimensions = fixed[3:8]
    if fixed[:3] != MAGIC:
        raise _corrupt("it does not start with the marker NWT")
    if version != VERSION:
        raise Unsupported(f"format version {version} is newer than this release reads ({VERSION})")
    element = next((e for e in ELEMENT_TYPES if e.code == code), None)
    if element is None:
        raise Unsupported(f"element type number {code} is not known to this release")
    if level > 2:
        raise Unsupported(f"level number {level} is not known to this release")
    if not 10 <= chunk_log2 <= 22:
        raise _corrupt("the header states an impossible chunk size")
    if dimensions > 64:
        raise _corrupt("the header states an impossible number of dimensions")
    shape = tuple(read_varint(reader) for _ in range(dimensions))
    nbytes = tensor_bytes(element, shape)
    chunks = -(-nbytes // element.number_bytes >> chunk_log2)
    if chunks > (size - reader.at) // 4:
        raise _corrupt("the data ends inside the index of chunks")
    return _Start(fixed, element, shape, nbytes, chunks)


def decode(blob: Any, *, check: bool = False, out: Bytes | None = None) -> Bytes:
    """Decode a blob to the tensor's bytes.

    Args:
        blob: Anything with the buffer protocol.
        check: Also compare the digest of the result with the one in the header.
        out: Where to write them, of exactly their number; None for a new array.

    Returns:
        The tensor's bytes, little-endian.

    Raises:
        CorruptBlob: The blob is damaged.
        Unsupported: See `read_header`.
    """
    header = read_header(blob)
    result = decode_numbers(blob, 0, header.numbers, out=out)
    if check and xxhash.xxh3_128_digest(result.data) != header.digest:
        raise _corrupt("the decoded bytes do not have the digest that was stored with them")
    return result


def decode_numbers(blob: Any, first: int, last: int, *, out: Bytes | None = None) -> Bytes:
    """Decode numbers `first` to `last` (exclusive); only the chunks that they touch are read.

    Args and errors: see `decode`.

    Args:
        blob: Anything with the buffer protocol.
        first: The first number.
        last: The number after the last one.
        out: Receives the bytes of these numbers.

    Returns:
        The bytes of these numbers.
    """
    header, data = read_header(blob), _as_bytes(blob)
    size = header.element.number_bytes
    if out is None:
        out = np.empty((last - first) * size, np.uint8)
    step = 1 << header.chunk_log2
    for chunk in range(first // step, -(-last // step) if last > first else 0):
        start = chunk * step
        count = min(step, header.numbers - start)
        body = data[header.chunk_starts[chunk] : header.chunk_starts[chunk + 1]]
        numbers = _chunk(Reader(body), header.element, count)
        begin, end = max(first, start), min(last, start + count)
        out[(begin - first) * size : (end - first) * size] = numbers[(begin - start) * size : (end - start) * size]
    return out


def _as_bytes(buffer: Any) -> Bytes:
    return np.frombuffer(buffer, np.uint8) if memoryview(buffer).nbytes else np.empty(0, np.uint8)


def varint(value: int) -> bytes:
    """Write a number as varint, the other way round than `read_varint`.

    Args:
        value: Not negative.

    Returns:
        Its bytes.
    """
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def read_varint(reader: Reader) -> int:
    """Seven bits a byte, least significant first; the last byte is below 128.

    Args:
        reader: Stands at the number, and after it when done.

    Returns:
        The number, at least 0.
    """
    value = 0
    for shift in range(0, 63, 7):
        byte = reader.number(1, "the header")
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise _corrupt("a dimension in the header is too large")


# ---- chunks and planes -----------------------------------------------------------------------------------------------


def _chunk(reader: Reader, element: ElementType, count: int) -> Bytes:
    """The bytes of a chunk of `count` numbers."""
    numbers = np.empty((count, element.number_bytes), np.uint8)
    head = element.head_bytes
    numbers[:, element.tails :] = _plane(reader, head, count).view(np.uint8).reshape(count, head)
    for tail in reversed(range(element.tails)):
        numbers[:, tail] = _plane(reader, 1, count)
    if reader.at != len(reader.data):
        raise _corrupt("a chunk holds more bytes than its planes")
    return numbers.reshape(-1)


def _plane(reader: Reader, width: int, count: int) -> Integers:
    """One plane: `count` unsigned elements of `width` bytes, 1 or 2."""
    mode = reader.number(1, "a plane")
    kind = np.dtype("u1" if width == 1 else "<u2")
    if mode == RAW:
        return reader.take(count * width, "a raw plane").view(kind)
    if mode == CONSTANT:
        return np.full(count, reader.number(width, "a constant plane"), kind)
    if mode == PACKED:
        if width != 1:
            raise _corrupt("a packed plane must have one-byte elements")
        return _packed(reader, count)
    if mode == RANS:
        return _rans(reader, width, count).astype(kind)
    if mode == WIDE_RANS:
        return _wide_rans(reader, width, count).astype(kind)
    raise _corrupt("a plane has an unknown mode")


def _packed(reader: Reader, count: int) -> Bytes:
    """Blocks of 64 bytes of which only the upper `width` bits are stored; all widths, four bits each, come first."""
    blocks = -(-count // 64)
    pairs = reader.take(-(-blocks // 2), "packed widths")
    widths = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:blocks].astype(np.int64)
    if widths.max(initial=0) > 8:
        raise _corrupt("a packed block is wider than a byte")
    ends = 8 * np.cumsum(widths)
    fields = reader.take(int(ends[-1]), "a packed block")
    elements = np.zeros((blocks, 64), np.uint8)
    for width in range(1, 9):
        here = np.flatnonzero(widths == width)
        places = (ends[here] - 8 * width)[:, None] + np.arange(8 * width)
        elements[here] = _unpack(fields[places], width) << (8 - width)
    return elements.reshape(-1)[:count]


def _unpack(blocks: Bytes, width: int) -> Words:
    """Fields of `width` bits in blocks of 64: field i is bits i * width and on of 8 * width bytes, lowest bit first."""
    if width == 0:
        return np.zeros((*blocks.shape[:-1], 64), np.uint16)
    bits = np.unpackbits(blocks, axis=-1, bitorder="little").reshape(*blocks.shape[:-1], 64, width)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0].astype(np.uint16)


# ---- entropy coding --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """How an element falls into a symbol, which is entropy coded, and raw bits, which are stored.

    Attributes:
        width: Bytes of an element, 1 or 2.
        raw_bits: Number of raw bits, less than 8 * width.
        signed: The top bit is the highest raw bit and the symbol starts below it (floats); otherwise the symbol is the
            top bits (integers).
    """

    width: int
    raw_bits: int
    signed: bool

    @property
    def symbol_bits(self) -> int:
        """Bits of a symbol."""
        return 8 * self.width - self.raw_bits

    @property
    def symbol_shift(self) -> int:
        """Where a symbol stands in its element."""
        return self.raw_bits - self.signed

    def place_raw(self, raw: Integers) -> Integers:
        """Raw bits where they stand in their elements.

        Args:
            raw: Raw bits of each number.

        Returns:
            Integers of the elements' width with these bits in place, all others 0.
        """
        if not self.signed:
            return raw
        low = self.raw_bits - 1
        return raw & ((1 << low) - 1) | (raw >> low) << (8 * self.width - 1)


def _read_split(reader: Reader, width: int) -> Split:
    byte = reader.number(1, "a plane's header")
    split = Split(width, byte & 127, byte >= 128)
    if split.raw_bits >= 8 * width or (split.signed and split.raw_bits == 0):
        raise _corrupt("a plane's header asks for impossible raw bits")
    return split


def _read_symbols(reader: Reader, what: str, runs: int, length_bytes: int, most: int, symbol_bits: int) -> list[int]:
    """Runs of consecutive symbols, ascending: a 16-bit base and a length each."""
    symbols: list[int] = []
    for _ in range(runs):
        base, length = reader.number(2, what), reader.number(length_bytes, what)
        following = symbols[-1] + 1 if symbols else 0
        if base < following or length == 0 or len(symbols) + length > most or base + length > 1 << symbol_bits:
            raise _corrupt(f"{what} lists symbols that cannot be")
        symbols += range(base, base + length)
    return symbols


@dataclass(frozen=True, slots=True)
class _Slots:
    """A frequency table by slot: its symbol, that symbol's frequency, and the slot's rank among that symbol's slots."""

    symbol: npt.NDArray[np.int64]
    frequency: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int64]


def _slots(symbols: list[int], frequencies: list[int]) -> _Slots:
    frequency = np.array(frequencies, np.int64)
    start = np.cumsum(frequency) - frequency
    rank = np.arange(int(frequency.sum())) - np.repeat(start, frequency)
    return _Slots(np.repeat(np.array(symbols, np.int64), frequency), np.repeat(frequency, frequency), rank)


def _rans(reader: Reader, width: int, count: int) -> Words:
    """Up to four streams, each of 64 lanes with states of 16 bits that give away and take in bytes."""
    split = _read_split(reader, width)
    streams = reader.number(1, "a plane's header")
    if streams not in (1, 2, 4):
        raise _corrupt("a plane's header asks for an impossible number of streams")
    rows = -(-count // (64 * streams))  # row r of stream g holds elements 64 * (r * streams + g) and on

    # The table: symbols, and for each a byte, 7 bits of frequency and the class. Slots go to class 0 first, then to 1.
    what = "a frequency table"
    symbols = _read_symbols(reader, what, reader.number(1, what), 1, 63, split.symbol_bits)
    entries = reader.take(len(symbols), what).tolist()
    order = sorted(range(len(symbols)), key=lambda i: entries[i] >> 7)
    frequencies = [entries[i] & 127 for i in order]
    if 0 in frequencies or sum(frequencies) != 256:
        raise _corrupt("a frequency table does not add up to 256")
    table = _slots([symbols[i] for i in order], frequencies)

    sizes = [(reader.number(3, "a plane's header"), reader.number(3, "a plane's header")) for _ in range(streams)]
    halves = reader.take(128 * streams, "a plane's states").reshape(streams, 2, 64).astype(np.int64)
    state = halves[:, 0] | halves[:, 1] << 8  # 64 low bytes, then 64 high bytes
    if (state < 256).any():
        raise _corrupt("a plane's states are out of range")

    # Raw bits: the low eight of each element in one region, the others in the next. Of the first region the last row of
    # each stream is missing, and the end of the last row but one, as far as the 64 final states have room for both.
    low_bits = min(split.raw_bits, 8)
    low_row, rest_row = 8 * low_bits, 8 * (split.raw_bits - low_bits)
    folded = min(low_row, 64 - low_row) if rows > 1 else 0
    whole_rows = max(rows - 2, 0) * streams * low_row
    raw_low = reader.take((low_row * (rows - 1) - folded) * streams, "raw bits")
    raw_rest = reader.take(rest_row * rows * streams, "raw bits")

    # A step of every lane for each row: a state's low byte is a slot; below 256 it takes in a byte, low lanes first.
    at = np.cumsum([0, *(length for length, _ in sizes)])
    body = np.append(reader.take(int(at[-1]), "an entropy-coded stream"), np.uint8(0)).astype(np.int64)
    at, ends = at[:-1], at[1:]
    slots = np.empty((rows, streams, 64), np.uint8)
    for row in range(rows):
        slot = state & 255
        slots[row] = slot
        state = table.frequency[slot] * (state >> 8) + table.rank[slot]
        hungry = state < 256
        taken = np.cumsum(hungry, axis=1)
        fresh = np.minimum(at[:, None] + taken - 1, len(body) - 1)  # past the end only in damaged streams
        state = np.where(hungry, state << 8 | body[fresh], state)
        at = at + taken[:, -1]
    final = (state & 255).astype(np.uint8)
    if (at != ends).any() or (state >> 8 != 1).any() or final[:, low_row + folded :].any():
        raise _corrupt("an entropy-coded stream does not end where it should")

    fields = np.empty((rows, streams, low_row), np.uint8)
    fields[:-2] = raw_low[:whole_rows].reshape(-1, streams, low_row) if whole_rows else 0
    if rows > 1:
        fields[-2, :, : low_row - folded] = raw_low[whole_rows:].reshape(streams, low_row - folded)
        fields[-2, :, low_row - folded :] = final[:, low_row : low_row + folded]
    fields[-1] = final[:, :low_row]
    rest = _unpack(raw_rest.reshape(rows, streams, rest_row), split.raw_bits - low_bits)
    placed = (table.symbol << split.symbol_shift).astype(np.uint16)[slots]
    lanes = placed | split.place_raw(_unpack(fields, low_bits) | rest << 8)
    elements = np.empty_like(lanes)
    elements[:, :, LANE_ORDER[width]] = lanes
    elements = elements.reshape(-1)[:count]

    rare = _read_rare(reader, split.symbol_bits)
    for stream, (_, words) in enumerate(sizes):

        def place(position: Integers, stream: int = stream) -> Integers:
            indices: Integers = (position // 64 * streams + stream) * 64 + LANE_ORDER[width][position % 64]
            return indices

        _patches(reader, words, rare, split, elements, place)
    return elements


def _wide_rans(reader: Reader, width: int, count: int) -> Words:
    """One stream of 32 lanes with states of 32 bits that give away and take in 16 bits; 4,096 slots."""
    split = _read_split(reader, width)
    what = "a wide table"
    symbols = _read_symbols(reader, what, reader.number(2, what), 2, 1024, split.symbol_bits)
    frequencies: list[int] = []
    for _ in symbols:
        frequency = reader.number(1, what)
        if frequency >= 128:
            frequency = (frequency & 127) << 8 | reader.number(1, what)
        if frequency in (0, 4096):
            raise _corrupt("a wide table does not add up to 4,096")
        frequencies.append(frequency)
    if sum(frequencies) != 4096:
        raise _corrupt("a wide table does not add up to 4,096")
    table = _slots(symbols, frequencies)

    length, words = reader.number(3, "a plane's header"), reader.number(3, "a plane's header")
    state = reader.take(128, "a plane's states").view("<u4").astype(np.int64)
    if (state < 1 << 16).any():
        raise _corrupt("a plane's states are out of range")
    blocks = -(-count // 64)  # block b holds elements 64 * b and on; element i is lane i % 32's
    low_bits = min(split.raw_bits, 8)
    rest_bits = split.raw_bits - low_bits
    raw_low = reader.take(blocks * 8 * low_bits, "raw bits").reshape(blocks, 8 * low_bits)
    raw_rest = reader.take(blocks * 8 * rest_bits, "raw bits").reshape(blocks, 8 * rest_bits)

    body = np.append(reader.take(2 * length, "an entropy-coded stream").view("<u2"), np.uint16(0)).astype(np.int64)
    slots = np.empty((2 * blocks, 32), np.int64)
    at = 0
    for row in range(2 * blocks):
        slot = state & 4095
        slots[row] = slot
        state = table.frequency[slot] * (state >> 12) + table.rank[slot]
        hungry = state < 1 << 16
        taken = np.cumsum(hungry)
        fresh = np.minimum(at + taken - 1, length)  # past the end only in damaged streams
        state = np.where(hungry, state << 16 | body[fresh], state)
        at += int(taken[-1])
    if at != length or (state != 1 << 16).any():
        raise _corrupt("an entropy-coded stream does not end where it should")

    placed = (table.symbol << split.symbol_shift).astype(np.uint16)[slots].reshape(blocks, 64)
    elements = placed | split.place_raw(_unpack(raw_low, low_bits) | _unpack(raw_rest, rest_bits) << 8)
    elements = elements.reshape(-1)[:count]
    _patches(reader, words, _read_rare(reader, split.symbol_bits), split, elements, lambda position: position)
    return elements


# ---- patches ---------------------------------------------------------------------------------------------------------


def _read_rare(reader: Reader, symbol_bits: int) -> list[int]:
    """The symbols that patches name by number, at most 14."""
    what = "the list of rare symbols"
    count = reader.number(1, what)
    if count > 14:
        raise _corrupt(f"{what} is too long")
    rare = [reader.number(2, what) for _ in range(count)]
    if any(symbol >> symbol_bits for symbol in rare):
        raise _corrupt(f"{what} holds one that cannot be")
    return rare


def _patches(
    reader: Reader,
    words: int,
    rare: list[int],
    split: Split,
    elements: Words,
    place: Callable[[Integers], Integers],
) -> None:
    """Replace the symbols of some elements, in place.

    Args:
        reader: Where the patches are: 16-bit words with a code in the upper 4 bits and a gap in the lower 12.
        words: Their number.
        rare: Symbols by code.
        split: How elements fall into symbols and raw bits.
        elements: The plane's elements.
        place: Indices of elements from positions in a stream.
    """
    stream = reader.take(2 * words, "patches").view("<u2").tolist()
    positions: list[int] = []
    symbols: list[int] = []
    position = -1
    coming = iter(stream)
    for word in coming:
        code = word >> 12
        position += (word & 4095) + 1
        if code == SKIP:
            continue
        if code == LITERAL:
            symbol = next(coming, None)
            if symbol is None:
                raise _corrupt("a patch lacks its symbol")
            if symbol >> split.symbol_bits:
                raise _corrupt("a patch holds a symbol that cannot be")
        elif code < len(rare):
            symbol = rare[code]
        else:
            raise _corrupt("a patch names a rare symbol that is not listed")
        positions.append(position)
        symbols.append(symbol)
    at = place(np.array(positions, np.int64))
    if (at >= len(elements)).any():
        raise _corrupt("a patch lies outside its chunk")
    symbol_mask = ((1 << split.symbol_bits) - 1) << split.symbol_shift
    placed = np.array(symbols, np.int64) << split.symbol_shift
    elements[at] = elements[at] & ~np.uint16(symbol_mask) | placed.astype(np.uint16)
