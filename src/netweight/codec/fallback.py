"""The encoder in numpy, for machines where the native module could not be built: the same bytes, far slower.

A decoder accepts any blob that obeys docs/format.md; this encoder also makes every choice that the native one makes
(which plane is stored how, where numbers are split, which frequencies a table gets), so that a tensor has one
compressed form per level and chunk size. All arithmetic that decides is in integers. `native/plane.cpp`, `table.cpp`
and `wide.cpp` are the counterparts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from netweight.codec.element_types import ELEMENT_TYPES, ElementType
from netweight.codec.reference import (
    CONSTANT,
    LANE_ORDER,
    LITERAL,
    MAGIC,
    PACKED,
    RANS,
    RAW,
    SKIP,
    VERSION,
    WIDE_RANS,
    Bytes,
    Split,
    tensor_bytes,
    varint,
)
from netweight.errors import Unsupported

__all__ = ["encode", "head_splits", "sampling"]

Counts = npt.NDArray[np.int64]
Patches = list[tuple[int, int]]  # position and symbol, ascending

FAST, DEFAULT, MAX = range(3)
SMALLEST = 512  # bytes; below this no table pays
COST = 1 << 16  # unit of costs: this many make a bit
PATCH_COST = 33 * COST // 2
SPREAD = 4096  # gaps that a patch can state


def encode(
    buffer: Any, dtype: str, shape: Sequence[int], level: int, chunk_log2: int, *, mantissa_bits: int | None = None
) -> bytes:
    """Encode a tensor's bytes.

    Args:
        buffer: The tensor's little-endian bytes; anything with the buffer protocol.
        dtype: safetensors' name of the element type.
        shape: Shape of the tensor.
        level: 0, 1 or 2.
        chunk_log2: Binary logarithm of the numbers in a chunk; 0 for the default.
        mantissa_bits: Of the words of a lossy blob, which are split as floats with so many are; None for other tensors.

    Returns:
        The blob's bytes.

    Raises:
        Unsupported: There is no such element type, or the tensor is too large or ends inside a byte.
        ValueError: The buffer's size does not fit dtype and shape.
    """
    element = next((e for e in ELEMENT_TYPES if e.name == dtype), None)
    if element is None:
        raise Unsupported(f"element type {dtype} is not known to this release")
    if mantissa_bits is not None:
        element = replace(element, exponent_bits=15 - mantissa_bits, mantissa_bits=mantissa_bits)
    view = memoryview(buffer)
    data = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    if tensor_bytes(element, tuple(shape)) != len(data):
        raise ValueError("the buffer's size does not fit dtype and shape")
    chunk_log2 = chunk_log2 or (18 if element.number_bytes <= 2 else 17)

    step = element.number_bytes << chunk_log2
    chunks = [_chunk(data[start : start + step], element, level) for start in range(0, len(data), step)]
    fields = bytes((VERSION, element.code, level, chunk_log2, len(shape)))
    start = MAGIC + fields + xxhash.xxh3_128_digest(data.data)
    rest = b"".join(map(varint, shape)) + b"".join(_little(len(chunk), 4) for chunk in chunks)
    check = xxhash.xxh3_64_intdigest(start + rest) & 0xFFFFFFFF
    return b"".join((start, _little(check, 4), rest, *chunks))


def _little(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


# ---- chunks and planes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plane:
    """What the encoder knows about a plane.

    Attributes:
        width: Bytes of an element, 1 or 2.
        fractions: For the top bytes of floating-point numbers, the bits of the mantissa that are inside; else None.
        exponent_bits: For the same.
        tail: The plane holds lower bytes of wider numbers: usually noise.
    """

    width: int
    fractions: int | None = None
    exponent_bits: int = 0
    tail: bool = False

    def splits(self, level: int) -> Iterator[Split]:
        """The splits worth trying, the widest symbol first; each folds pairs of its predecessor's symbols into one."""
        if self.fractions is None:
            least, most = (0, 5) if self.width == 1 else (6 if level == MAX else 8, 12)
        else:
            most = 1 + self.fractions  # sign and mantissa raw: the symbol is the exponent
            narrow = self.width == 1 or self.exponent_bits == 5
            finest = {FAST: 0, DEFAULT: 2 if narrow else 1, MAX: 3}[level]
            least = max(1, most - finest)
        for raw_bits in range(least, most + 1):
            yield Split(self.width, raw_bits, self.fractions is not None)


def _head(element: ElementType) -> _Plane:
    if element.exponent_bits == 0:
        return _Plane(element.head_bytes)
    inside = 8 * element.head_bytes - 1 - element.exponent_bits
    return _Plane(element.head_bytes, min(inside, element.mantissa_bits), element.exponent_bits)


def head_splits(element: ElementType, level: int) -> list[Split]:
    """The splits that the encoder tries for the heads of an element type, the widest symbol first; level by number.

    Args:
        element: The element type.
        level: 0, 1 or 2.
    """
    return list(_head(element).splits(level))


def sampling(level: int) -> int:
    """Of so many groups of eight elements, in planes of 2^16 and more, one is looked at first; level by number.

    Args:
        level: 0, 1 or 2.

    Returns:
        The number of groups.
    """
    return {FAST: 16, DEFAULT: 8, MAX: 1}[level]


def _chunk(data: Bytes, element: ElementType, level: int) -> bytes:
    numbers = data.reshape(-1, element.number_bytes)
    head = np.ascontiguousarray(numbers[:, element.tails :]).reshape(-1)
    planes = [_plane(_head(element), head, level)]
    for tail in reversed(range(element.tails)):
        planes.append(_plane(_Plane(1, tail=True), np.ascontiguousarray(numbers[:, tail]), level))
    return b"".join(planes)


def _plane(plane: _Plane, data: Bytes, level: int) -> bytes:
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
    while True:
        choice = _choose_split(plane, elements, level, sample)
        if packed * 8 * COST < worthwhile and (choice is None or packed * 8 * COST <= choice.cost):
            return _packed(elements, widths)
        if choice is None or choice.cost >= worthwhile:
            return raw
        coded = _rans(choice, elements, _streams(count)) if choice.mode == RANS else _wide_rans(choice, elements)
        if coded is not None and len(coded) <= len(data):
            return coded
        if sample == 1:
            return raw
        sample = 1  # the sample misled: look at everything


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
    nibbles = np.append(widths, 0)[: len(widths) + len(widths) % 2].astype(np.uint8).reshape(-1, 2)
    blocks = _blocks(elements)
    ends = 8 * np.cumsum(widths)
    fields = np.empty(int(ends[-1]), np.uint8)
    for width in range(1, 9):
        here = np.flatnonzero(widths == width)
        places = (ends[here] - 8 * width)[:, None] + np.arange(8 * width)
        fields[places] = _pack((blocks[here] >> (8 - width)).astype(np.int64), width)
    return bytes((PACKED,)) + (nibbles[:, 0] | nibbles[:, 1] << 4).tobytes() + fields.tobytes()


def _pack(fields: Counts, width: int) -> Bytes:
    """Rows of 64 fields as rows of 8 * width bytes."""
    low = fields.astype(np.uint8)[..., None]
    bits = np.unpackbits(low, axis=-1, bitorder="little", count=width)
    return np.packbits(bits.reshape(*fields.shape[:-1], 64 * width), axis=-1, bitorder="little")


# ---- choosing a split and a table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """An entropy coder for a plane, with its estimated cost in 1/65536 bits.

    Attributes:
        mode: RANS or WIDE_RANS.
        cost: Of the whole plane.
        split: How elements fall into symbols and raw bits.
        symbols: In slot order.
        frequencies: Of these.
        second: For RANS, which of these are of the second class.
        host: The symbol that stands in for those not listed.
    """

    mode: int
    cost: int
    split: Split
    symbols: list[int]
    frequencies: list[int]
    second: list[bool]
    host: int


def _histogram(elements: npt.NDArray[Any], split: Split, sample: int) -> tuple[Counts, int]:
    """Count symbols: all, or of every `sample` groups of eight elements one, which moves on from run to run."""
    if sample > 1:
        runs = len(elements) // 8 // sample
        groups = np.arange(runs) * sample + np.arange(runs) % sample
        elements = elements[: len(elements) // 8 * 8].reshape(-1, 8)[groups].reshape(-1)
    symbols = elements >> split.symbol_shift & ((1 << split.symbol_bits) - 1)
    return np.bincount(symbols, minlength=1 << split.symbol_bits).astype(np.int64), len(symbols)


def _choose_split(plane: _Plane, elements: npt.NDArray[Any], level: int, sample: int) -> _Choice | None:
    best: _Choice | None = None
    counts: Counts | None = None
    for split in plane.splits(level):
        if counts is None:
            counts, total = _histogram(elements, split, sample)
            if plane.tail and int((counts * counts).sum()) * len(counts) <= total * total // 10 * 11:
                return None  # coding would save less than about a twentieth of a bit
        else:
            counts = counts[0::2] + counts[1::2]
        raw_cost = len(elements) * split.raw_bits * COST
        choice = _table(counts, split, exhaustive=level == MAX)
        cost = choice.cost * len(elements) // total + raw_cost
        if best is None or cost < best.cost:
            best = _Choice(RANS, cost, split, choice.symbols, choice.frequencies, choice.second, choice.host)
        if level != MAX or len(elements) < 1 << 12:
            continue
        wide = _wide_table(counts, split)
        if wide is not None and wide.cost + raw_cost < best.cost:
            cost = wide.cost + raw_cost
            best = _Choice(WIDE_RANS, cost, split, wide.symbols, wide.frequencies, [], wide.host)
    return best


@cache
def _logarithms() -> tuple[Counts, Counts]:
    """By frequency 1 to 127 of 256 slots: the gain per occurrence of one slot more, and the cost of an occurrence."""
    gain = [0, *(math.floor(COST * math.log2((f + 1) / f) + 0.5) for f in range(1, 128))]
    bits = [0, *(math.floor(COST * math.log2(256 / f) + 0.5) for f in range(1, 128))]
    return np.array(gain), np.array(bits)


def _quantized(weights: Counts, total: int) -> Counts:
    """Frequencies that add up to 256: shares rounded down, at least 1, at most 127, then the cheapest slots to move."""
    gain, _ = _logarithms()
    frequencies = np.clip(weights * 256 // max(total, 1), 1, 127)
    used = int(frequencies.sum())
    never = np.iinfo(np.int64).max
    while used > 256:
        loss = np.where(frequencies == 1, never, weights * gain[frequencies - 1])
        frequencies[np.argmin(loss)] -= 1
        used -= 1
    while used < 256:
        won = np.where(frequencies == 127, -1, weights * gain[frequencies])
        frequencies[np.argmax(won)] += 1
        used += 1
    return frequencies


def _table(counts: Counts, split: Split, *, exhaustive: bool) -> _Choice:
    """The cheapest table of 3 to 63 symbols; the cost is that of the counted elements, raw bits not included."""
    _, bits = _logarithms()
    total = int(counts.sum())
    present = np.flatnonzero(counts)
    order = present[np.lexsort((present, -counts[present]))].tolist()
    for symbol in range(3):  # three symbols at least, since two frequencies of at most 127 cannot add up to 256
        if len(order) < 3 and symbol not in order:
            order.append(symbol)
    occurrences = counts[order]

    most = min(63, len(order))
    estimate = 3  # a symbol rarer than about 1 in 2048 is cheaper as a patch
    while estimate < most and int(occurrences[estimate]) * 2048 >= total:
        estimate += 1
    lowest, highest = (3, most) if exhaustive else (max(3, estimate - 1), min(most, estimate + 1))
    best_cost, best = -1, np.empty(0, np.int64)
    for size in range(lowest, highest + 1):
        weights = occurrences[:size].copy()
        rest = total - int(weights.sum())
        weights[0] += rest  # rare symbols are coded as the likeliest one
        frequencies = _quantized(weights, total)
        cost = rest * PATCH_COST + size * 8 * COST + int((weights * bits[frequencies]).sum())
        if best_cost < 0 or cost < best_cost:
            best_cost, best = cost, frequencies

    # Slot order: symbols that got less than their share first, because low slots leave a smaller state.
    second = occurrences[: len(best)] * 256 < total * best
    rows = sorted(zip(second.tolist(), order, best.tolist(), strict=False))
    return _Choice(RANS, best_cost, split, [r[1] for r in rows], [r[2] for r in rows], [r[0] for r in rows], order[0])


@cache
def _wide_logarithms() -> Counts:
    """By frequency 1 to 4096 of 4,096 slots: the cost of an occurrence."""
    return np.array([0, *(math.floor(COST * math.log2(4096 / f) + 0.5) for f in range(1, 4097))])


def _wide_table(counts: Counts, split: Split) -> _Choice | None:
    """A table of 4,096 slots for all symbols that are worth a quarter of a slot; None where that cannot be."""
    bits = _wide_logarithms()
    total = int(counts.sum())
    listed = np.flatnonzero((counts > 0) & (counts * (4 * 4096) >= total))
    if not 2 <= len(listed) <= 1024:
        return None
    weights = counts[listed]
    rest = total - int(weights.sum())
    weights[np.argmax(weights)] += rest
    frequencies = np.clip(weights * 4096 // total, 1, 4095)
    used = int(frequencies.sum())
    never = np.iinfo(np.int64).max
    while used < 4096:
        won = np.where(frequencies == 4095, -1, weights * (bits[frequencies] - bits[np.minimum(frequencies + 1, 4096)]))
        frequencies[np.argmax(won)] += 1
        used += 1
    while used > 4096:
        loss = np.where(frequencies == 1, never, weights * (bits[frequencies - 1] - bits[frequencies]))
        frequencies[np.argmin(loss)] -= 1
        used -= 1
    cost = rest * PATCH_COST + len(listed) * 3 // 2 * 8 * COST + int((weights * bits[frequencies]).sum())
    host = int(listed[np.argmax(frequencies)])
    return _Choice(WIDE_RANS, cost, split, listed.tolist(), frequencies.tolist(), [], host)


# ---- entropy coding --------------------------------------------------------------------------------------------------


def _raw_of(elements: Counts, split: Split) -> Counts:
    """The raw bits of elements."""
    if not split.signed:
        return elements & ((1 << split.raw_bits) - 1)
    low = split.raw_bits - 1
    return elements >> (8 * split.width - 1) << low | elements & ((1 << low) - 1)


def _coded(choice: _Choice, symbols: Counts) -> tuple[Counts, Counts, npt.NDArray[np.bool_]]:
    """Frequency and first slot by element, and which elements are not in the table and coded as the host."""
    size = 1 << choice.split.symbol_bits
    frequency, start = np.zeros(size, np.int64), np.zeros(size, np.int64)
    frequency[choice.symbols] = choice.frequencies
    start[choice.symbols] = np.cumsum(choice.frequencies) - choice.frequencies
    rare = frequency[symbols] == 0
    coded = np.where(rare, choice.host, symbols)
    return frequency[coded], start[coded], rare


def _runs(symbols: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending symbols as runs of consecutive ones: base and length."""
    runs: list[tuple[int, int]] = []
    for symbol in symbols:
        if runs and symbol == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((symbol, 1))
    return runs


def _streams(count: int) -> int:
    """Streams for a plane of so many elements."""
    return 1 if count < 1 << 14 else 2 if count < 1 << 18 else 4


def _rans(choice: _Choice, elements: npt.NDArray[Any], streams: int) -> bytes | None:
    """A plane in the rans mode; None when there are too many patches for this table to be the right one."""
    split, count = choice.split, len(elements)
    rows = -(-count // (64 * streams))
    padded = np.full(rows * streams * 64, choice.host << split.symbol_shift, np.int64)
    padded[:count] = elements
    lanes = padded.reshape(rows, streams, 64)[:, :, LANE_ORDER[split.width]]
    symbols = lanes >> split.symbol_shift & ((1 << split.symbol_bits) - 1)
    frequency, start, rare = _coded(choice, symbols)

    # The encoder works from the last row to the first and gives up before a row with patches once there are too many.
    patched = rare.sum(axis=2)
    before = np.cumsum(patched[::-1], axis=0)[::-1] - patched
    if ((patched > 0) & (before > 2 * rows + 128)).any():
        return None

    raw = _raw_of(lanes, split)
    low_bits = min(split.raw_bits, 8)
    low = _pack(raw & 255, low_bits)
    rest = _pack(raw >> 8, split.raw_bits - low_bits)
    row_bytes = 8 * low_bits
    folded = min(row_bytes, 64 - row_bytes) if rows > 1 else 0
    state = np.full((streams, 64), 256, np.int64)
    state[:, :row_bytes] += low[-1]
    if rows > 1:
        state[:, row_bytes : row_bytes + folded] += low[-2][:, row_bytes - folded :]

    limit, complement = frequency << 8, 256 - frequency
    given = np.empty((rows, streams, 64), np.uint8)
    gives = np.empty((rows, streams, 64), np.bool_)
    for row in reversed(range(rows)):
        full = state >= limit[row]
        gives[row] = full
        given[row] = state & 255
        state = np.where(full, state >> 8, state)
        state = state + start[row] + state // frequency[row] * complement[row]

    positions = [np.flatnonzero(rare[:, g]) for g in range(streams)]
    patches = [
        list(zip(p.tolist(), symbols[:, g].reshape(-1)[p].tolist(), strict=True)) for g, p in enumerate(positions)
    ]
    rare_symbols = _rare_symbols(patches)
    words = [_patch_words(p, rare_symbols) for p in patches]
    bodies = [given[:, g][gives[:, g]].tobytes() for g in range(streams)]

    entries = sorted(zip(choice.symbols, choice.frequencies, choice.second, strict=True))
    runs = _runs([entry[0] for entry in entries])
    out = b"".join(
        (
            bytes((RANS, split.raw_bits | split.signed << 7, streams, len(runs))),
            *(_little(base, 2) + _little(length, 1) for base, length in runs),
            bytes(frequency | second << 7 for _, frequency, second in entries),
            *(_little(len(body), 3) + _little(len(w) // 2, 3) for body, w in zip(bodies, words, strict=True)),
            np.stack([state & 255, state >> 8], axis=1).astype(np.uint8).tobytes(),
            low[:-2].tobytes(),
            low[-2][:, : row_bytes - folded].tobytes() if rows > 1 else b"",
            rest.tobytes(),
            *bodies,
            _rare_list(rare_symbols),
            *words,
        )
    )
    return out if len(out) < count * split.width + 4096 else None


def _wide_rans(choice: _Choice, elements: npt.NDArray[Any]) -> bytes | None:
    """A plane in the wide_rans mode; None as for `_rans`."""
    split, count = choice.split, len(elements)
    blocks = -(-count // 64)
    padded = np.full(blocks * 64, choice.host << split.symbol_shift, np.int64)
    padded[:count] = elements
    symbols = padded >> split.symbol_shift & ((1 << split.symbol_bits) - 1)
    frequency, start, rare = _coded(choice, symbols)
    patched = rare.reshape(blocks, 64).sum(axis=1)
    if (np.cumsum(patched[::-1])[::-1] - patched > count // 16).any():
        return None

    raw = _raw_of(padded, split).reshape(blocks, 64)
    low_bits = min(split.raw_bits, 8)
    low, rest = _pack(raw & 255, low_bits), _pack(raw >> 8, split.raw_bits - low_bits)
    state = np.full(32, 1 << 16, np.int64)
    frequency, start = frequency.reshape(-1, 32), start.reshape(-1, 32)
    given, gives = np.empty((2 * blocks, 32), "<u2"), np.empty((2 * blocks, 32), np.bool_)
    for row in reversed(range(2 * blocks)):
        full = state >> 20 >= frequency[row]
        gives[row] = full
        given[row] = state & 0xFFFF
        state = np.where(full, state >> 16, state)
        quotient, remainder = np.divmod(state, frequency[row])
        state = (quotient << 12) + remainder + start[row]

    positions = np.flatnonzero(rare)
    patches = list(zip(positions.tolist(), symbols[positions].tolist(), strict=True))
    rare_symbols = _rare_symbols([patches])
    words = _patch_words(patches, rare_symbols)
    body = given[gives].tobytes()
    runs = _runs(choice.symbols)
    out = b"".join(
        (
            bytes((WIDE_RANS, split.raw_bits | split.signed << 7)),
            _little(len(runs), 2),
            *(_little(base, 2) + _little(length, 2) for base, length in runs),
            *(bytes((128 | f >> 8, f & 255)) if f >= 128 else bytes((f,)) for f in choice.frequencies),
            _little(len(body) // 2, 3),
            _little(len(words) // 2, 3),
            state.astype("<u4").tobytes(),
            low.tobytes(),
            rest.tobytes(),
            body,
            _rare_list(rare_symbols),
            words,
        )
    )
    return out if len(out) < count * split.width + 4096 else None


# ---- patches ---------------------------------------------------------------------------------------------------------


def _rare_symbols(streams: list[Patches]) -> list[int]:
    """The 14 symbols that patches need most, the most frequent first."""
    seen: dict[int, int] = {}
    for patches in streams:
        for _, symbol in patches:
            seen[symbol] = seen.get(symbol, 0) + 1
    return sorted(seen, key=lambda symbol: (-seen[symbol], symbol))[:14]


def _rare_list(symbols: list[int]) -> bytes:
    return bytes((len(symbols),)) + b"".join(_little(symbol, 2) for symbol in symbols)


def _patch_words(patches: Patches, rare: list[int]) -> bytes:
    codes = {symbol: code for code, symbol in enumerate(rare)}
    words: list[int] = []
    following = 0
    for position, symbol in patches:
        gap = position - following
        words += [SKIP << 12 | (SPREAD - 1)] * (gap // SPREAD)
        code = codes.get(symbol, LITERAL)
        words.append(code << 12 | gap % SPREAD)
        if code == LITERAL:
            words.append(symbol)
        following = position + 1
    return np.array(words, "<u2").tobytes()
