"""Entropy coding in numpy: the two rANS modes of a plane, each writer beside its reader, and patches.

The native counterparts are `plane.cpp` and `wide.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from netweight.codec.header import ByteReader, Bytes, corrupt, little
from netweight.codec.numpy_tables import WIDE_RANS, WIDE_SLOTS, CoderChoice, Counts, Integers, Slots, Split

Words = npt.NDArray[np.uint16]
# Each entry is a position and a symbol; positions ascend.
Patches = list[tuple[int, int]]

# Codes of a patch; smaller ones number the rare symbols.
LITERAL, SKIP = 14, 15
SPREAD = 4096  # gaps that a patch can state

# Lane i of a row of 64 holds the row's element LANE_ORDER[element_bytes][i]. Two-byte elements stand in the order in
# which vector instructions interleave two registers of bytes.
LANE_ORDER = {1: np.arange(64), 2: np.array([(i >> 3 & 1) * 32 + (i >> 4) * 8 + (i & 7) for i in range(64)])}


def pack(fields: Integers, width: int) -> Bytes:
    """Rows of 64 fields as rows of 8 * width bytes: field i is bits i * width and on, lowest bit first."""
    low = fields.astype(np.uint8)[..., None]
    bits = np.unpackbits(low, axis=-1, bitorder="little", count=width)
    return np.packbits(bits.reshape(*fields.shape[:-1], 64 * width), axis=-1, bitorder="little")


def unpack(blocks: Bytes, width: int) -> Words:
    """The fields that `pack` packed."""
    if width == 0:
        return np.zeros((*blocks.shape[:-1], 64), np.uint16)
    bits = np.unpackbits(blocks, axis=-1, bitorder="little").reshape(*blocks.shape[:-1], 64, width)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0].astype(np.uint16)


# ---- what both modes share -------------------------------------------------------------------------------------------


def read_split(reader: ByteReader, width: int) -> Split:
    """The split of an element into symbol and raw bits."""
    byte = reader.number(1, "a plane's header")
    split = Split(width, byte & 127, byte >= 128)
    if split.raw_bits >= 8 * width or (split.signed and split.raw_bits == 0):
        raise corrupt("a plane's header asks for impossible raw bits")
    return split


def _by_element(choice: CoderChoice, symbols: Integers) -> tuple[Counts, Counts, npt.NDArray[np.bool_]]:
    """Frequency and first slot by element, and which elements are not in the table and coded as the host."""
    size = 1 << choice.split.symbol_bits
    frequency, start = np.zeros(size, np.int64), np.zeros(size, np.int64)
    frequency[choice.symbols] = choice.frequencies
    start[choice.symbols] = np.cumsum(choice.frequencies) - choice.frequencies
    rare = frequency[symbols] == 0
    coded = np.where(rare, choice.substitute, symbols)
    return frequency[coded], start[coded], rare


def _symbol_runs(symbols: Sequence[int], size: int) -> bytes:
    """Ascending symbols as runs of consecutive ones: their number, a 16-bit base and a length each."""
    runs: list[tuple[int, int]] = []
    for symbol in symbols:
        if runs and symbol == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((symbol, 1))
    return little(len(runs), size) + b"".join(little(base, 2) + little(length, size) for base, length in runs)


def _read_symbols(reader: ByteReader, what: str, size: int, most: int, symbol_bits: int) -> list[int]:
    """Read what `_symbol_runs` wrote."""
    symbols: list[int] = []
    for _ in range(reader.number(size, what)):
        base, length = reader.number(2, what), reader.number(size, what)
        following = symbols[-1] + 1 if symbols else 0
        if base < following or length == 0 or len(symbols) + length > most or base + length > 1 << symbol_bits:
            raise corrupt(f"{what} lists symbols that cannot be")
        symbols += range(base, base + length)
    return symbols


# ---- the modes rans and steep: up to four streams of 64 lanes, states of 16 bits that give away and take in bytes ----


def write_rans(choice: CoderChoice, elements: Integers, streams: int) -> bytes | None:
    """A plane in the rans or steep mode; None when there are too many patches for this table to be the right one."""
    split, count = choice.split, len(elements)
    # Row r of stream g contains the elements from 64 * (r * streams + g) on.
    rows = -(-count // (64 * streams))
    padded = np.full(rows * streams * 64, choice.substitute << split.symbol_shift, np.int64)
    padded[:count] = elements
    lanes = padded.reshape(rows, streams, 64)[:, :, LANE_ORDER[split.width]]
    symbols = split.symbols(lanes)
    frequency, start, rare = _by_element(choice, symbols)

    # The encoder works from the last row to the first and gives up before a row with patches once there are too many.
    patched = rare.sum(axis=2)
    before = np.cumsum(patched[::-1], axis=0)[::-1] - patched
    if ((patched > 0) & (before > 2 * rows + 128)).any():
        return None

    # Raw bits: the low eight of each element in one region, the others in the next. Of the first region the last row of
    # each stream is missing, and the end of the last row but one, as far as the 64 final states have room for both.
    raw, low_bits = split.raw(lanes), split.low_bits
    low, rest = pack(raw & 255, low_bits), pack(raw >> 8, split.raw_bits - low_bits)
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
    entries = sorted(zip(choice.symbols, choice.frequencies, choice.second_class, strict=True))
    out = b"".join(
        (
            bytes((choice.mode, split.byte, streams)),
            _symbol_runs([entry[0] for entry in entries], 1),
            bytes(frequency | second_class << 7 for _, frequency, second_class in entries),
            *(little(len(body), 3) + little(len(w) // 2, 3) for body, w in zip(bodies, words, strict=True)),
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


def read_rans(reader: ByteReader, width: int, count: int, steep: bool) -> Words:
    """`count` elements of a plane in the rans or steep mode."""
    split = read_split(reader, width)
    streams = reader.number(1, "a plane's header")
    if streams not in (1, 2, 4):
        raise corrupt("a plane's header asks for an impossible number of streams")
    rows = -(-count // (64 * streams))

    # The table: symbols, and for each a byte, 7 bits of frequency and the class (steep: 8 bits of frequency). Slots go
    # to class 0 first, then to 1.
    what = "a frequency table"
    symbols = _read_symbols(reader, what, 1, 63, split.symbol_bits)
    entries = reader.read(len(symbols), what).tolist()
    order = list(range(len(symbols))) if steep else sorted(range(len(symbols)), key=lambda i: entries[i] >> 7)
    frequencies = [entries[i] & (255 if steep else 127) for i in order]
    if 0 in frequencies or sum(frequencies) != 256:
        raise corrupt("a frequency table does not add up to 256")
    slots_of = Slots.of([symbols[i] for i in order], frequencies)

    sizes = [(reader.number(3, "a plane's header"), reader.number(3, "a plane's header")) for _ in range(streams)]
    halves = reader.read(128 * streams, "a plane's states").reshape(streams, 2, 64).astype(np.int64)
    # The states are stored as 64 low bytes, then 64 high bytes.
    state = halves[:, 0] | halves[:, 1] << 8
    if (state < 256).any():
        raise corrupt("a plane's states are out of range")

    low_bits = split.low_bits
    low_row, rest_row = 8 * low_bits, 8 * (split.raw_bits - low_bits)
    folded = min(low_row, 64 - low_row) if rows > 1 else 0
    whole_rows = max(rows - 2, 0) * streams * low_row
    raw_low = reader.read((low_row * (rows - 1) - folded) * streams, "raw bits")
    raw_rest = reader.read(rest_row * rows * streams, "raw bits")

    # A step of every lane for each row: a state's low byte is a slot; below 256 it takes in a byte, low lanes first.
    at = np.cumsum([0, *(length for length, _ in sizes)])
    body = np.append(reader.read(int(at[-1]), "an entropy-coded stream"), np.uint8(0)).astype(np.int64)
    at, ends = at[:-1], at[1:]
    slots = np.empty((rows, streams, 64), np.uint8)
    for row in range(rows):
        slot = state & 255
        slots[row] = slot
        state = slots_of.frequency[slot] * (state >> 8) + slots_of.rank[slot]
        hungry = state < 256
        taken = np.cumsum(hungry, axis=1)
        # Only damaged streams run past the end.
        fresh = np.minimum(at[:, None] + taken - 1, len(body) - 1)
        state = np.where(hungry, state << 8 | body[fresh], state)
        at = at + taken[:, -1]
    final = (state & 255).astype(np.uint8)
    if (at != ends).any() or (state >> 8 != 1).any() or final[:, low_row + folded :].any():
        raise corrupt("an entropy-coded stream does not end where it should")

    fields = np.empty((rows, streams, low_row), np.uint8)
    fields[:-2] = raw_low[:whole_rows].reshape(-1, streams, low_row) if whole_rows else 0
    if rows > 1:
        fields[-2, :, : low_row - folded] = raw_low[whole_rows:].reshape(streams, low_row - folded)
        fields[-2, :, low_row - folded :] = final[:, low_row : low_row + folded]
    fields[-1] = final[:, :low_row]
    rest = unpack(raw_rest.reshape(rows, streams, rest_row), split.raw_bits - low_bits)
    placed = (slots_of.symbol << split.symbol_shift).astype(np.uint16)[slots]
    lanes = placed | split.place_raw(unpack(fields, low_bits) | rest << 8)
    elements = np.empty_like(lanes)
    elements[:, :, LANE_ORDER[width]] = lanes
    elements = elements.reshape(-1)[:count]

    rare = _read_rare(reader, split.symbol_bits)
    for stream, (_, words) in enumerate(sizes):

        def place(position: Integers, stream: int = stream) -> Integers:
            indices: Integers = (position // 64 * streams + stream) * 64 + LANE_ORDER[width][position % 64]
            return indices

        _patch(reader, words, rare, split, elements, place)
    return elements


# ---- the wide_rans mode: one stream of 32 lanes with states of 32 bits that give away and take in 16 bits ------------


def write_wide(choice: CoderChoice, elements: Integers) -> bytes | None:
    """A plane in the wide_rans mode; None as for `write_rans`."""
    split, count = choice.split, len(elements)
    # Block b contains the elements from 64 * b on; element i belongs to lane i % 32.
    blocks = -(-count // 64)
    padded = np.full(blocks * 64, choice.substitute << split.symbol_shift, np.int64)
    padded[:count] = elements
    symbols = split.symbols(padded)
    frequency, start, rare = _by_element(choice, symbols)
    patched = rare.reshape(blocks, 64).sum(axis=1)
    if (np.cumsum(patched[::-1])[::-1] - patched > count // 16).any():
        return None

    raw, low_bits = split.raw(padded).reshape(blocks, 64), split.low_bits
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
    words, body = _patch_words(patches, rare_symbols), given[gives].tobytes()
    out = b"".join(
        (
            bytes((WIDE_RANS, split.byte)),
            _symbol_runs(choice.symbols, 2),
            *(bytes((128 | f >> 8, f & 255)) if f >= 128 else bytes((f,)) for f in choice.frequencies),
            little(len(body) // 2, 3),
            little(len(words) // 2, 3),
            state.astype("<u4").tobytes(),
            pack(raw & 255, low_bits).tobytes(),
            pack(raw >> 8, split.raw_bits - low_bits).tobytes(),
            body,
            _rare_list(rare_symbols),
            words,
        )
    )
    return out if len(out) < count * split.width + 4096 else None


def read_wide(reader: ByteReader, width: int, count: int) -> Words:
    """`count` elements of a plane in the wide_rans mode."""
    split = read_split(reader, width)
    what = "a wide table"
    symbols = _read_symbols(reader, what, 2, 1024, split.symbol_bits)
    frequencies: list[int] = []
    for _ in symbols:
        frequency = reader.number(1, what)
        if frequency >= 128:
            frequency = (frequency & 127) << 8 | reader.number(1, what)
        if frequency in (0, WIDE_SLOTS):
            raise corrupt("a wide table does not add up to 4,096")
        frequencies.append(frequency)
    if sum(frequencies) != WIDE_SLOTS:
        raise corrupt("a wide table does not add up to 4,096")
    slots_of = Slots.of(symbols, frequencies)

    length, words = reader.number(3, "a plane's header"), reader.number(3, "a plane's header")
    state = reader.read(128, "a plane's states").view("<u4").astype(np.int64)
    if (state < 1 << 16).any():
        raise corrupt("a plane's states are out of range")
    blocks = -(-count // 64)
    low_bits, rest_bits = split.low_bits, split.raw_bits - split.low_bits
    raw_low = reader.read(blocks * 8 * low_bits, "raw bits").reshape(blocks, 8 * low_bits)
    raw_rest = reader.read(blocks * 8 * rest_bits, "raw bits").reshape(blocks, 8 * rest_bits)

    body = np.append(reader.read(2 * length, "an entropy-coded stream").view("<u2"), np.uint16(0)).astype(np.int64)
    slots = np.empty((2 * blocks, 32), np.int64)
    at = 0
    for row in range(2 * blocks):
        slot = state & (WIDE_SLOTS - 1)
        slots[row] = slot
        state = slots_of.frequency[slot] * (state >> 12) + slots_of.rank[slot]
        hungry = state < 1 << 16
        taken = np.cumsum(hungry)
        # Only damaged streams run past the end.
        fresh = np.minimum(at + taken - 1, length)
        state = np.where(hungry, state << 16 | body[fresh], state)
        at += int(taken[-1])
    if at != length or (state != 1 << 16).any():
        raise corrupt("an entropy-coded stream does not end where it should")

    placed = (slots_of.symbol << split.symbol_shift).astype(np.uint16)[slots].reshape(blocks, 64)
    elements = placed | split.place_raw(unpack(raw_low, low_bits) | unpack(raw_rest, rest_bits) << 8)
    elements = elements.reshape(-1)[:count]
    _patch(reader, words, _read_rare(reader, split.symbol_bits), split, elements, lambda position: position)
    return elements


# ---- patches: elements whose symbols are not in the table ------------------------------------------------------------


def _rare_symbols(streams: list[Patches]) -> list[int]:
    """The 14 symbols that patches need most, the most frequent first."""
    counts: dict[int, int] = {}
    for patches in streams:
        for _, symbol in patches:
            counts[symbol] = counts.get(symbol, 0) + 1
    return sorted(counts, key=lambda symbol: (-counts[symbol], symbol))[:LITERAL]


def _rare_list(symbols: list[int]) -> bytes:
    return bytes((len(symbols),)) + b"".join(little(symbol, 2) for symbol in symbols)


def _read_rare(reader: ByteReader, symbol_bits: int) -> list[int]:
    """The symbols that patches name by number."""
    what = "the list of rare symbols"
    count = reader.number(1, what)
    if count > LITERAL:
        raise corrupt(f"{what} is too long")
    rare = [reader.number(2, what) for _ in range(count)]
    if any(symbol >> symbol_bits for symbol in rare):
        raise corrupt(f"{what} holds one that cannot be")
    return rare


def _patch_words(patches: Patches, rare: list[int]) -> bytes:
    """16-bit words: a code in the upper 4 bits, the gap to the patch before in the lower 12."""
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


def _patch(
    reader: ByteReader,
    words: int,
    rare: list[int],
    split: Split,
    elements: Words,
    place: Callable[[Integers], Integers],
) -> None:
    """Replace the symbols of some elements, in place; `place` gives their indices from positions in a stream."""
    positions: list[int] = []
    symbols: list[int] = []
    position = -1
    coming = iter(reader.read(2 * words, "patches").view("<u2").tolist())
    for word in coming:
        code = word >> 12
        position += (word & (SPREAD - 1)) + 1
        if code == SKIP:
            continue
        if code == LITERAL:
            symbol = next(coming, None)
            if symbol is None:
                raise corrupt("a patch lacks its symbol")
            if symbol >> split.symbol_bits:
                raise corrupt("a patch holds a symbol that cannot be")
        elif code < len(rare):
            symbol = rare[code]
        else:
            raise corrupt("a patch names a rare symbol that is not listed")
        positions.append(position)
        symbols.append(symbol)
    at = place(np.array(positions, np.int64))
    if (at >= len(elements)).any():
        raise corrupt("a patch lies outside its chunk")
    symbol_mask = ((1 << split.symbol_bits) - 1) << split.symbol_shift
    placed = np.array(symbols, np.int64) << split.symbol_shift
    elements[at] = elements[at] & ~np.uint16(symbol_mask) | placed.astype(np.uint16)
