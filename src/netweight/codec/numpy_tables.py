"""Splits of elements into symbol and raw bits, and frequency tables: the choices of the encoder in numpy.

A decoder takes whatever obeys docs/format.md. These are the choices of the native encoder (`plane.cpp`, `table.cpp` and
`wide.cpp`), in integers only, so that a tensor has one compressed form per level and chunk size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from netweight.codec.header import ElementType

Integers = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

RAW, CONSTANT, PACKED, RANS, WIDE_RANS, STEEP, SPARSE, PALETTE, HALVES, JOINT = range(10)  # modes of a plane
FAST, DEFAULT, HIGH, MAX = range(4)  # levels
# The unit of costs: this many units are one bit.
COST = 1 << 16
PATCH_COST = 33 * COST // 2
WIDE_SLOTS = 4096
_NEVER = np.iinfo(np.int64).max

# ---- splits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """Division of an element into a symbol, which is entropy coded, and raw bits, which are stored."""

    width: int
    """Bytes of an element, 1 or 2."""
    raw_bits: int
    """Less than 8 * width."""
    signed: bool
    """Floats: the top bit is the highest raw bit, the symbol starts below it; else the symbol is on top."""

    @property
    def symbol_bits(self) -> int:
        """Bits of a symbol."""
        return 8 * self.width - self.raw_bits

    @property
    def symbol_shift(self) -> int:
        """Bit offset of a symbol in its element."""
        return self.raw_bits - self.signed

    @property
    def low_bits(self) -> int:
        """Raw bits in the first region; those above eight are in the second."""
        return min(self.raw_bits, 8)

    def symbols(self, elements: Integers) -> Integers:
        """The symbols of elements."""
        return elements >> self.symbol_shift & ((1 << self.symbol_bits) - 1)

    def raw(self, elements: Counts) -> Counts:
        """The raw bits of elements."""
        if not self.signed:
            return elements & ((1 << self.raw_bits) - 1)
        low = self.raw_bits - 1
        return elements >> (8 * self.width - 1) << low | elements & ((1 << low) - 1)

    def place_raw(self, raw: Integers) -> Integers:
        """Raw bits where they stand in their elements."""
        if not self.signed:
            return raw
        low = self.raw_bits - 1
        return raw & ((1 << low) - 1) | (raw >> low) << (8 * self.width - 1)

    @property
    def byte(self) -> int:
        """The split in a plane's header."""
        return self.raw_bits | self.signed << 7


@dataclass(frozen=True, slots=True)
class PlaneStatistics:
    """The encoder's statistics of a plane."""

    width: int
    """Bytes of an element, 1 or 2."""
    fractions: int | None = None
    """Number of mantissa bits within the top bytes of floats; None for other planes."""
    exponent_bits: int = 0
    """Number of exponent bits within the top bytes of floats; None for other planes."""
    low_byte: bool = False
    """True for a plane of lower bytes of wider numbers, which are usually noise."""
    nested: bool = False
    """True for a plane within a coded plane of skewed data."""
    one_sign: bool = False
    """Floats whose top bits are all equal, as those of second moments are."""
    split_off: bool = False
    """True for the remainder of a sparse plane, from which no further value is split off."""

    @classmethod
    def head(cls, element: ElementType) -> PlaneStatistics:
        """The plane of the numbers' top bytes."""
        if element.exponent_bits == 0:
            return cls(element.head_bytes)
        inside = 8 * element.head_bytes - 1 - element.exponent_bits
        return cls(element.head_bytes, min(inside, element.mantissa_bits), element.exponent_bits)

    def splits(self, level: int) -> Iterator[Split]:
        """The splits worth trying, the widest symbol first; each folds pairs of its predecessor's symbols into one."""
        if self.fractions is None:
            least, most = (0, 5) if self.width == 1 else (6 if level == MAX else 8, 12)
        else:
            # Sign and mantissa are raw at most; then the symbol is the exponent.
            most = 1 + self.fractions
            narrow = self.width == 1 or self.exponent_bits == 5
            finest = {FAST: 0, DEFAULT: 1 + narrow, HIGH: 2 + narrow, MAX: 3}[level]
            least = max(1, most - finest) - self.one_sign
            most -= self.one_sign
        for raw_bits in range(least, most + 1):
            yield Split(self.width, raw_bits, self.fractions is not None and not self.one_sign)


def sampling(level: int) -> int:
    """Number of groups of eight elements of which one is sampled first, in planes of 2^16 elements and more."""
    return {FAST: 16, DEFAULT: 8, HIGH: 2, MAX: 1}[level]


# ---- frequency tables ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoderChoice:
    """An entropy coder for a plane, with its estimated cost in 1/65536 bits."""

    mode: int
    """RANS, STEEP or WIDE_RANS."""
    cost: int
    """Cost of the whole plane."""
    split: Split
    symbols: list[int]
    """Symbols in the order of their slots."""
    frequencies: list[int]
    second_class: list[bool]
    """For rANS: True for symbols of the second class, in the same order."""
    substitute: int
    """The symbol that is coded in place of those not listed, before patches correct it."""


def choose(plane: PlaneStatistics, elements: Integers, level: int, sample: int, skewed: bool) -> CoderChoice | None:
    """The cheapest split and table for a plane; None for noise."""
    best: CoderChoice | None = None
    counts: Counts | None = None
    for split in plane.splits(level):
        if counts is None:
            counts, total = histogram(elements, split, sample)
            # How much more often symbols are equal than in noise; up to 1.1 coding saves less than 1/20 bit.
            collisions = int((counts * counts).sum()) * len(counts)
            if plane.low_byte and collisions <= total * total // 10 * 11:
                return None
            skewed = skewed and (not plane.low_byte or plane.nested or collisions > total * total // 10 * 20)
        else:
            counts = counts[0::2] + counts[1::2]
        raw_cost = len(elements) * split.raw_bits * COST
        choice = table(counts, split, exhaustive=level == MAX)
        cost = choice.cost * len(elements) // total + raw_cost
        if best is None or cost < best.cost:
            best = replace(choice, cost=cost)
        if level != MAX or len(elements) < 1 << 12:
            continue
        wide = wide_table(counts, split)
        if wide is not None and wide.cost + raw_cost < best.cost:
            best = replace(wide, cost=wide.cost + raw_cost)
    if best is None or not skewed or plane.width == 2:
        return best
    return choose_whole(elements, level, sample, best)


def choose_whole(elements: Integers, level: int, sample: int, best: CoderChoice | None = None) -> CoderChoice:
    """The cheapest table for bytes as they are, steep ones among them; or `best`, if nothing is cheaper."""
    whole = Split(1, 0, False)
    counts, total = histogram(elements, whole, sample)
    for steep in (False, True):
        choice = table(counts, whole, exhaustive=level == MAX, steep=steep)
        cost = choice.cost * len(elements) // total
        if best is None or cost < best.cost:
            best = replace(choice, cost=cost)
    assert best is not None
    wide = wide_table(counts, whole)
    if wide is not None:
        cost = wide.cost * len(elements) // total
        # The table must save 1/32, because it decodes more slowly.
        if (cost if level == MAX else cost + cost // 32) < best.cost:
            best = replace(wide, cost=cost)
    return best


def histogram(elements: Integers, split: Split, sample: int) -> tuple[Counts, int]:
    """Count symbols: all, or of every `sample` groups of eight elements one, which moves on from run to run."""
    if sample > 1:
        runs = len(elements) // 8 // sample
        groups = np.arange(runs) * sample + np.arange(runs) % sample
        elements = elements[: len(elements) // 8 * 8].reshape(-1, 8)[groups].reshape(-1)
    symbols = split.symbols(elements)
    return np.bincount(symbols, minlength=1 << split.symbol_bits).astype(np.int64), len(symbols)


@cache
def costs(slots: int, most: int) -> Counts:
    """By frequency up to `most`, of so many slots: the cost of an occurrence."""
    return np.array([0, *(math.floor(COST * math.log2(slots / f) + 0.5) for f in range(1, most + 1))])


@cache
def gains() -> Counts:
    """By frequency 1 to 255 of 256: the gain per occurrence of one slot more."""
    return np.array([0, *(math.floor(COST * math.log2((f + 1) / f) + 0.5) for f in range(1, 256))])


def _balanced(weights: Counts, frequencies: Counts, most: int, slots: int, gain: Callable[[Counts], Counts]) -> None:
    """Make frequencies add up to `slots`, in place, by the cheapest moves; `gain` of a slot more, by frequency."""
    used = int(frequencies.sum())
    while used > slots:
        frequencies[np.argmin(np.where(frequencies == 1, _NEVER, weights * gain(frequencies - 1)))] -= 1
        used -= 1
    while used < slots:
        frequencies[np.argmax(np.where(frequencies == most, -1, weights * gain(frequencies)))] += 1
        used += 1


def table(counts: Counts, split: Split, *, exhaustive: bool, steep: bool = False) -> CoderChoice:
    """The cheapest table of 2 to 63 symbols; the cost is that of the counted elements, raw bits not included."""
    largest = 255 if steep else 127
    bits, total = costs(256, 255), int(counts.sum())
    present = np.flatnonzero(counts)
    order = present[np.lexsort((present, -counts[present]))].tolist()
    # At least this many frequencies are needed for a sum of 256.
    fewest = -(-256 // largest)
    for symbol in range(fewest):
        if len(order) < fewest and symbol not in order:
            order.append(symbol)
    occurrences = counts[order]

    most = min(63, len(order))
    # A symbol that occurs less than about once in 2048 elements takes fewer bits as a patch.
    estimate = fewest
    while estimate < most and int(occurrences[estimate]) * 2048 >= total:
        estimate += 1
    lowest, highest = (fewest, most) if exhaustive else (max(fewest, estimate - 1), min(most, estimate + 1))
    best_cost, best = -1, np.empty(0, np.int64)
    for size in range(lowest, highest + 1):
        weights = occurrences[:size].copy()
        rest = total - int(weights.sum())
        # Rare symbols are encoded as the most frequent one, and then corrected by patches.
        weights[0] += rest
        frequencies = np.clip(weights * 256 // max(total, 1), 1, largest)
        _balanced(weights, frequencies, largest, 256, lambda f: gains()[f])
        cost = rest * PATCH_COST + size * 8 * COST + int((weights * bits[frequencies]).sum())
        if best_cost < 0 or cost < best_cost:
            best_cost, best = cost, frequencies

    # Slot order: symbols that got less than their share first, because low slots leave a smaller state.
    second_class = (occurrences[: len(best)] * 256 < total * best) & (not steep)
    rows = sorted(zip(second_class.tolist(), order, best.tolist(), strict=False))
    mode = STEEP if steep else RANS
    return CoderChoice(
        mode, best_cost, split, [r[1] for r in rows], [r[2] for r in rows], [r[0] for r in rows], order[0]
    )


def wide_table(counts: Counts, split: Split) -> CoderChoice | None:
    """A table of 4,096 slots for all symbols that are worth a quarter of a slot; None where that cannot be."""
    bits, total = costs(WIDE_SLOTS, WIDE_SLOTS), int(counts.sum())
    listed = np.flatnonzero((counts > 0) & (counts * (4 * WIDE_SLOTS) >= total))
    if not 2 <= len(listed) <= 1024:
        return None
    weights = counts[listed]
    rest = total - int(weights.sum())
    weights[np.argmax(weights)] += rest
    frequencies = np.clip(weights * WIDE_SLOTS // total, 1, WIDE_SLOTS - 1)
    _balanced(weights, frequencies, WIDE_SLOTS - 1, WIDE_SLOTS, lambda f: bits[f] - bits[np.minimum(f + 1, WIDE_SLOTS)])
    cost = rest * PATCH_COST + len(listed) * 3 // 2 * 8 * COST + int((weights * bits[frequencies]).sum())
    substitute = int(listed[np.argmax(frequencies)])
    return CoderChoice(WIDE_RANS, cost, split, listed.tolist(), frequencies.tolist(), [], substitute)


@dataclass(frozen=True, slots=True)
class Slots:
    """A frequency table by slot: its symbol, that symbol's frequency, and the slot's rank among that symbol's slots."""

    symbol: Counts
    frequency: Counts
    rank: Counts

    @classmethod
    def of(cls, symbols: list[int], frequencies: list[int]) -> Slots:
        """Give out slots in the order of the symbols."""
        frequency = np.array(frequencies, np.int64)
        start = np.cumsum(frequency) - frequency
        rank = np.arange(int(frequency.sum())) - np.repeat(start, frequency)
        return cls(np.repeat(np.array(symbols, np.int64), frequency), np.repeat(frequency, frequency), rank)
