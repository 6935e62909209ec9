"""Chunks and planes in numpy: each writer beside its reader.

The native counterparts are `chunk.cpp`, `plane.cpp`, `skew.cpp` and `difference.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from netweight.codec.header import BY_NAME, ByteReader, Bytes, ElementType, corrupt, little
from netweight.codec.numpy_rans import pack, read_rans, read_split, read_wide, unpack, write_rans, write_wide
from netweight.codec.numpy_tables import (
    CONSTANT,
    COST,
    HALVES,
    HIGH,
    JOINT,
    MAX,
    PACKED,
    PALETTE,
    RANS,
    RAW,
    SPARSE,
    STEEP,
    WIDE_RANS,
    Counts,
    Integers,
    PlaneStatistics,
    Split,
    choose,
    choose_whole,
    histogram,
    sampling,
    table,
)

# Below this number of bytes, a table takes more than it saves.
SMALLEST = 512
# Modes of a whole chunk, whose bytes are then not those of a plane.
SPARSE_CHUNK, DELTA, DIFFERENCE, CLASSES, RUNS = range(16, 21)
# How deep planes may be nested. FLAT, for GPUs: there are no nested planes, and no modes after WIDE_RANS.
NESTING, FLAT = 8, -1
SAMPLES, MORE_SAMPLES = 64, 512
# The fewest bytes per stream of a skewed plane, whose result would otherwise consist mostly of states.
_LEAST_PER_STREAM = 1 << 12


# ---- chunks ----------------------------------------------------------------------------------------------------------

# Number of classes of numbers, by the magnitude of the number in the base.
_CLASSES = 8
# Below this count of numbers, classes take more than they save.
_LEAST_OF_CLASSES = 1 << 14


def write_chunk(data: Bytes, element: ElementType, level: int, base: Bytes | None) -> tuple[bytes, bool]:
    """A chunk, and whether it has a transform or a mode that the GPU kernels do not decode."""
    chunk, cpu_modes = _write_body(data, element, level)
    numbers = data.view(f"<u{element.number_bytes}")
    if _goes_on(numbers, element):
        deltas = np.diff(numbers, prepend=numbers.dtype.type(0))
        trial = bytes((DELTA,)) + _write_body(deltas.view(np.uint8), element, level)[0]
        if len(trial) < len(chunk):
            chunk, cpu_modes = trial, True
    if element.number_bytes == 1 and (runs := _write_runs(data, level)) and len(runs) < len(chunk):
        chunk, cpu_modes = runs, True
    if base is not None:
        other = base.view(numbers.dtype)
        steps = _folded_steps(numbers, other, element)
        trial = bytes((DIFFERENCE,)) + _step_planes(steps, element, level)
        if len(trial) < len(chunk):
            chunk, cpu_modes = trial, True
            if element.number_bytes == 2 and element.exponent_bits and len(numbers) >= _LEAST_OF_CLASSES:
                chunk = min(chunk, bytes((CLASSES,)) + _write_classes(steps, other, element, level), key=len)
    return chunk, cpu_modes


def read_chunk(reader: ByteReader, element: ElementType, count: int, cpu_modes: bool, base: Bytes | None) -> Bytes:
    """The bytes of a chunk of `count` numbers; `base` holds those of the base, if the blob has one."""
    first = int(reader.data[reader.at]) if reader.at < len(reader.data) else RAW
    if not cpu_modes:
        numbers = read_planes(reader, element, count, FLAT)
    elif first == DELTA and element.number_bytes > 1:
        reader.at += 1
        deltas = _read_body(reader, element, count).view(f"<u{element.number_bytes}")
        numbers = np.cumsum(deltas, dtype=deltas.dtype).view(np.uint8)
    elif first == RUNS and element.number_bytes == 1:
        reader.at += 1
        numbers = _read_runs(reader, count)
    elif first == DIFFERENCE and base is not None:
        reader.at += 1
        numbers = _add_steps(read_planes(reader, _unsigned(element), count, NESTING), base, element)
    elif first == CLASSES and base is not None and element.number_bytes == 2:
        reader.at += 1
        numbers = _add_steps(_read_classes(reader, base.view("<u2"), element), base, element)
    else:
        numbers = _read_body(reader, element, count)
    if reader.at != len(reader.data):
        raise corrupt("a chunk holds more bytes than its planes")
    return numbers


def _write_body(data: Bytes, element: ElementType, level: int) -> tuple[bytes, bool]:
    """Planes, or what is left of wider numbers when their likeliest value is split off."""
    planes = _planes(data, element, level, NESTING, nested=False)
    chunk, cpu_modes = b"".join(planes), any(plane[0] > WIDE_RANS for plane in planes)
    if element.number_bytes < 4:
        return chunk, cpu_modes
    numbers = data.view(f"<u{element.number_bytes}")
    probe = Probe.of(numbers)
    if not probe.often:
        return chunk, cpu_modes

    def write_rest(rest: Integers) -> bytes:
        return b"".join(_planes(rest.view(np.uint8), element, level, NESTING - 1, nested=True))

    trial = bytes((SPARSE_CHUNK,)) + _sparse(numbers, probe.value, level, NESTING, write_rest)
    return (trial, True) if len(trial) < len(chunk) else (chunk, cpu_modes)


def _read_body(reader: ByteReader, element: ElementType, count: int) -> Bytes:
    if element.number_bytes < 4 or reader.at == len(reader.data) or reader.data[reader.at] != SPARSE_CHUNK:
        return read_planes(reader, element, count, NESTING)
    reader.at += 1
    kind = f"<u{element.number_bytes}"

    def read_rest(left: int) -> Integers:
        return read_planes(reader, element, left, NESTING - 1).view(kind)

    return _read_sparse(reader, np.dtype(kind), count, NESTING, read_rest).view(np.uint8)


def _goes_on(numbers: Integers, element: ElementType) -> bool:
    """Return whether integers of a sample mostly grow by the same step."""
    if element.exponent_bits or element.number_bytes == 1 or len(numbers) < 256:
        return False
    places = sample_places(SAMPLES, len(numbers) - 2)
    first, second = numbers[places + 1] - numbers[places], numbers[places + 2] - numbers[places + 1]
    return 2 * int((first == second).sum()) >= SAMPLES


# ---- runs of two values, as of masks ---------------------------------------------------------------------------------

# Type of lengths, the longest run, the least mean length.
_PAIRS, _LONGEST, _LEAST_OF_RUNS = BY_NAME["U32"], 65535, 64


def _write_runs(data: Bytes, level: int) -> bytes:
    """A chunk of two values as pairs of lengths, of the first and of the second; empty if runs are short."""
    ends = np.append(np.flatnonzero(data[1:] != data[:-1]) + 1, len(data))
    values = data[ends[:2] - 1]
    if len(data) < 1024 or len(ends) < 2 or Probe.of(data).distinct > 2 or not np.isin(data, values).all():
        return b""
    lengths: list[int] = []
    for length in np.diff(ends, prepend=0).tolist():
        lengths += [_LONGEST, 0] * ((length - 1) // _LONGEST) + [(length - 1) % _LONGEST + 1]
    lengths += [0] * (len(lengths) % 2)
    if _LEAST_OF_RUNS * len(lengths) > len(data):
        return b""
    pairs = write_chunk(np.array(lengths, "<u2").view(np.uint8), _PAIRS, level, None)[0]
    return bytes((RUNS, *values)) + little(len(lengths) // 2, 3) + pairs


def _read_runs(reader: ByteReader, count: int) -> Bytes:
    values, size = reader.read(2, "runs"), reader.number(3, "runs")
    if not 0 < 4 * size <= count:
        raise corrupt("a chunk has an impossible number of runs")
    lengths = read_chunk(reader, _PAIRS, size, True, None).view("<u2").astype(np.int64)
    if lengths.sum() != count:
        raise corrupt("runs are not as long as their chunk")
    return np.repeat(np.resize(values, 2 * size), lengths)


# ---- differences from a base -----------------------------------------------------------------------------------------


def _ordered(numbers: Integers, element: ElementType) -> Integers:
    """Numbers as ones that grow with the floats they stand for, and back: negative floats count down from -1."""
    if element.exponent_bits == 0:
        return numbers
    kind = numbers.dtype.type
    negative = numbers >> kind(8 * numbers.itemsize - 1) != 0
    return np.where(negative, numbers ^ kind((1 << (8 * numbers.itemsize - 1)) - 1), numbers)


def _unsigned(element: ElementType) -> ElementType:
    return replace(element, exponent_bits=0, mantissa_bits=0)


def _folded_steps(numbers: Integers, base: Integers, element: ElementType) -> Integers:
    """Steps from the base: 0, -1, 1, -2, ... as 0, 1, 2, 3, ...."""
    kind = numbers.dtype.type
    step = _ordered(numbers, element) - _ordered(base, element)
    sign = kind(0) - (step >> kind(8 * numbers.itemsize - 1))
    folded: Integers = (step << kind(1)) ^ sign
    return folded


def _step_planes(steps: Integers, element: ElementType, level: int) -> bytes:
    return b"".join(_planes(steps.view(np.uint8), _unsigned(element), level, NESTING, nested=True))


def _add_steps(steps: Bytes, base: Bytes, element: ElementType) -> Bytes:
    folded = steps.view(f"<u{element.number_bytes}")
    kind = folded.dtype.type
    step = (folded >> kind(1)) ^ (kind(0) - (folded & kind(1)))
    return _ordered(_ordered(base.view(folded.dtype), element) + step, element).view(np.uint8)


def _magnitudes(base: Integers) -> Integers:
    return base >> np.uint16(7) & np.uint16(255)


def _write_classes(steps: Integers, base: Integers, element: ElementType, level: int) -> bytes:
    """Steps in classes of about equal size by the magnitude of the base's numbers, each with planes of its own."""
    magnitudes = _magnitudes(base)
    below = np.cumsum(np.bincount(magnitudes, minlength=256))[:254]
    thresholds = np.searchsorted(_CLASSES * np.concatenate(([0], below)), np.arange(1, _CLASSES) * len(base))
    which = np.searchsorted(thresholds, magnitudes, "right")
    members = [steps[which == k] for k in range(_CLASSES)]
    return bytes(thresholds.astype(np.uint8)) + b"".join(
        _step_planes(some, element, level) for some in members if len(some)
    )


def _read_classes(reader: ByteReader, base: Integers, element: ElementType) -> Bytes:
    thresholds = np.asarray(reader.read(_CLASSES - 1, "thresholds of classes"))
    if (thresholds[1:] < thresholds[:-1]).any():
        raise corrupt("thresholds of classes do not ascend")
    which = np.searchsorted(thresholds, _magnitudes(base), "right")
    steps = np.empty(len(base), "<u2")
    for k in range(_CLASSES):
        here = which == k
        if here.any():
            steps[here] = read_planes(reader, _unsigned(element), int(here.sum()), NESTING).view("<u2")
    return steps.view(np.uint8)


# ---- planes ----------------------------------------------------------------------------------------------------------


def write_planes(data: Bytes, element: ElementType, level: int, nesting: int) -> bytes:
    """Numbers taken apart into planes."""
    return b"".join(_planes(data, element, level, nesting, nested=False))


def _planes(data: Bytes, element: ElementType, level: int, nesting: int, *, nested: bool) -> list[bytes]:
    numbers = data.reshape(-1, element.number_bytes)
    head = np.ascontiguousarray(numbers[:, element.tails :]).reshape(-1)
    planes = [write_plane(replace(PlaneStatistics.head(element), nested=nested), head, level, nesting)]
    for tail in reversed(range(element.tails)):
        column = np.ascontiguousarray(numbers[:, tail])
        planes.append(write_plane(PlaneStatistics(1, low_byte=True, nested=nested), column, level, nesting))
    return planes


def read_planes(reader: ByteReader, element: ElementType, count: int, nesting: int) -> Bytes:
    """The bytes of `count` numbers."""
    numbers = np.empty((count, element.number_bytes), np.uint8)
    head = element.head_bytes
    numbers[:, element.tails :] = read_plane(reader, head, count, nesting).view(np.uint8).reshape(count, head)
    for tail in reversed(range(element.tails)):
        numbers[:, tail] = read_plane(reader, 1, count, nesting)
    return numbers.reshape(-1)


def write_plane(plane: PlaneStatistics, data: Bytes, level: int, nesting: int) -> bytes:
    """A plane in the mode that costs least."""
    elements = data.view("u1" if plane.width == 1 else "<u2")
    if len(elements) > 1 and (elements == elements[0]).all():
        return bytes((CONSTANT,)) + data[: plane.width].tobytes()
    if nesting <= 0 or len(elements) < 32:
        return _dense(plane, elements, level, plane.nested)
    probe = Probe.of(elements)
    floats = plane.fractions is not None
    signs = elements >> (8 * plane.width - 1)
    plane = replace(plane, one_sign=floats and bool((signs == signs[0]).all()))
    skewed = plane.nested or not floats or probe.often or probe.few(plane.width)
    small, finer = len(elements) < 1 << 16, (2,) if level == HIGH else (2, 3) if level == MAX else ()
    joints: list[bytes] = []
    if floats and plane.width == 2 and not plane.one_sign and (level == MAX or small or not skewed):
        joints = [joint for bits in finer if (joint := _joint(plane, elements, bits, level)) is not None]
    if joints and level == HIGH and not small:
        return joints[0]
    dense = min((_dense(plane, elements, level, skewed), *joints), key=len)
    if plane.low_byte and not plane.nested and len(elements) >= SMALLEST and dense[0] == RAW:
        # Lower bytes are usually noise.
        return dense
    trial = _skewed(plane, probe, elements, level, nesting) if skewed else None
    return dense if trial is None or 200 * len(trial) > 199 * len(dense) else trial


def _dense(plane: PlaneStatistics, elements: Integers, level: int, skewed: bool) -> bytes:
    """Raw, packed or entropy coded, and no larger than raw; for GPUs all that there is."""
    data, count = elements.view(np.uint8), len(elements)
    raw = bytes((RAW,)) + data.tobytes()
    packed = len(data)
    if plane.width == 1:
        widths = _packed_widths(elements)
        packed = 1 + -(-len(widths) // 2) + 8 * int(widths.sum())
    if len(data) < SMALLEST:
        return _packed(elements, widths) if plane.nested and plane.width == 1 and packed < len(data) else raw
    # At least half a percent must be saved.
    worthwhile = (len(data) * 8 * COST) // 200 * 199
    sample = 1 if plane.nested or count < 1 << 16 else sampling(level)
    streams = 1 if count < 1 << (17 if plane.nested else 14) else 2 if count < 1 << 18 else 4
    least = _LEAST_PER_STREAM * 8 * COST if skewed else 0
    while True:
        choice = choose(plane, elements, level, sample, skewed)
        if packed * 8 * COST < worthwhile and (choice is None or packed * 8 * COST <= choice.cost):
            return _packed(elements, widths)
        if choice is None or choice.cost >= worthwhile:
            return raw
        while streams > 1 and choice.cost < least * streams:
            streams //= 2
        write = choice.mode != WIDE_RANS
        coded = write_rans(choice, elements, streams) if write else write_wide(choice, elements)
        if coded is not None and len(coded) <= len(data):
            return coded
        if sample == 1:
            return raw
        # The sample was not representative, so all numbers are counted.
        sample = 1


def read_plane(reader: ByteReader, width: int, count: int, nesting: int) -> Integers:
    """One plane: `count` unsigned elements of `width` bytes, 1 or 2."""
    mode = reader.number(1, "a plane")
    kind = np.dtype("u1" if width == 1 else "<u2")
    if mode > JOINT or (mode > WIDE_RANS and nesting == FLAT):
        raise corrupt("a plane has an unknown mode")
    if mode > STEEP and nesting == 0:
        raise corrupt("planes lie too deep in planes")
    if mode >= PALETTE and width == 1:
        raise corrupt("a plane of one-byte elements has a mode of two-byte ones")
    if mode == RAW:
        return reader.read(count * width, "a raw plane").view(kind)
    if mode == CONSTANT:
        return np.full(count, reader.number(width, "a constant plane"), kind)
    if mode == PACKED:
        if width != 1:
            raise corrupt("a packed plane must have one-byte elements")
        return _read_packed(reader, count)
    if mode in (RANS, STEEP):
        return read_rans(reader, width, count, mode == STEEP).astype(kind)
    if mode == WIDE_RANS:
        return read_wide(reader, width, count).astype(kind)
    if mode == SPARSE:
        return _read_sparse(reader, kind, count, nesting, lambda left: read_plane(reader, width, left, nesting - 1))
    if mode == PALETTE:
        values = reader.read(2 * (reader.number(1, "a palette") + 1), "a palette").view("<u2")
        index = read_plane(reader, 1, count, nesting - 1)
        if index.max() >= len(values):
            raise corrupt("a palette lacks a value")
        return values[index]
    if mode == JOINT:
        return _read_joint(reader, count, nesting)
    high = read_plane(reader, 1, count, nesting - 1).astype(kind)
    return high << 8 | read_plane(reader, 1, count, nesting - 1)


# ---- skewed data: one value split off, a palette, bytes apart --------------------------------------------------------


def sample_places(samples: int, count: int) -> Counts:
    """Places of a sample among `count`; they are not multiples of a number, because data often repeats."""
    return np.arange(samples, dtype=np.int64) * 0x9E3779B1 % (1 << 32) * count >> 32


@dataclass(frozen=True, slots=True)
class Probe:
    """The likeliest of a few numbers, spread over all, and how varied they are."""

    value: int
    """The most frequent number of the sample."""
    sampled: int
    """Count of numbers in the sample."""
    occurrences: int
    """Number of occurrences of the most frequent number in the sample."""
    distinct: int
    """Count of different numbers in the sample."""
    varied: bool
    """Two-byte elements: whether more samples than usual held too many values."""

    @classmethod
    def of(cls, numbers: Integers) -> Probe:
        """Look at numbers, one at least."""
        sampled = min(SAMPLES, len(numbers))
        values, counts = np.unique(numbers[sample_places(sampled, len(numbers))], return_counts=True)
        # Of equally likely symbols the smallest is taken.
        likeliest = int(np.argmax(counts))
        probe = cls(int(values[likeliest]), sampled, int(counts[likeliest]), len(values), False)
        if numbers.itemsize != 2 or not probe.few(2):
            return probe
        more = numbers[sample_places(min(MORE_SAMPLES, len(numbers)), len(numbers))]
        return replace(probe, varied=2 * len(np.unique(more)) > len(more))

    @property
    def often(self) -> bool:
        """True if one value is worth splitting off."""
        return 4 * self.occurrences >= self.sampled

    def few(self, width: int) -> bool:
        """Return whether elements of `width` bytes seem to have few values."""
        return not self.varied and 64 * self.distinct <= (20 if width == 1 else 58) * self.sampled


def _skewed(plane: PlaneStatistics, probe: Probe, elements: Integers, level: int, nesting: int) -> bytes | None:
    """A plane of skewed data in the mode that suits it; None when none does."""
    # The bytes of what a sparse plane left may have a likeliest value of their own, which may be split off.
    part = PlaneStatistics(1, nested=True)
    if plane.width == 2 and probe.few(2):
        values, index = np.unique(elements, return_inverse=True)
        if len(values) <= 256:
            head = bytes((PALETTE, len(values) - 1)) + values.astype("<u2").tobytes()
            return head + write_plane(part, index.reshape(-1).astype(np.uint8), level, nesting - 1)
    if probe.often and not plane.split_off:
        left = replace(plane, nested=True, split_off=True)

        def write_rest(rest: Integers) -> bytes:
            return write_plane(left, rest.view(np.uint8), level, nesting - 1)

        return bytes((SPARSE,)) + _sparse(elements, probe.value, level, nesting, write_rest)
    if plane.width == 1 or ((plane.low_byte or plane.fractions is not None) and not probe.few(2)):
        return None
    high, low = (elements >> 8).astype(np.uint8), elements.astype(np.uint8)
    return bytes((HALVES,)) + b"".join(write_plane(part, half, level, nesting - 1) for half in (high, low))


def _sparse(numbers: Integers, value: int, level: int, nesting: int, write_rest: Callable[[Integers], bytes]) -> bytes:
    """A value; a plane of nibbles, in upper halves of bytes, whose bits say which numbers differ from it; and these."""
    differs = numbers != value
    bits = np.zeros((-(-len(numbers) // 4), 4), np.uint8)
    bits.reshape(-1)[: len(numbers)] = differs
    nibbles = (bits << np.arange(4, 8, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
    rest = np.ascontiguousarray(numbers[differs])
    head = little(value, numbers.itemsize) + write_plane(PlaneStatistics(1, nested=True), nibbles, level, nesting - 1)
    return head + (write_rest(rest) if len(rest) else b"")


def _read_sparse(
    reader: ByteReader, kind: np.dtype[np.uint8] | np.dtype[np.uint16], count: int, nesting: int,
    read_rest: Callable[[int], Integers],
) -> Integers:  # fmt: skip
    value = reader.number(kind.itemsize, "a sparse plane")
    nibbles = read_plane(reader, 1, -(-count // 4), nesting - 1)
    bits = (nibbles[:, None] >> np.arange(4, 8, dtype=np.uint8) & 1).reshape(-1)
    if (nibbles & 15).any() or bits[count:].any():
        raise corrupt("a sparse plane marks elements that it does not have")
    numbers = np.full(count, value, kind)
    differs = bits[:count] != 0
    if differs.any():
        numbers[differs] = read_rest(int(differs.sum()))
    return numbers


# ---- joint: numbers of symbols, which raw bits complete, and of whole values, such as zeros --------------------------

_MOST_NUMBERS, _MOST_VALUES = 255, 8
# Below this count of elements, the lists take more than they save.
_LEAST_OF_JOINT = 1 << 13
# Bytes of lists and header at most.
_LISTS = 1024
# An exponent of at least one element in this many is also distinguished by bits of the mantissa.
_FINE_SHARE = 64


def _joint(plane: PlaneStatistics, elements: Integers, finer: int, level: int) -> bytes | None:
    """A plane of floats of which some are equal; None when that does not pay.

    Symbols of likely exponents have `finer` bits of the mantissa.
    """
    assert plane.fractions is not None
    whole, count = 1 + plane.fractions, len(elements)
    if count < _LEAST_OF_JOINT or whole > 8 or whole <= finer:
        return None
    split = Split(2, whole - finer, True)
    values, occurrences, sampled = _repeated_values(elements, split)
    if not len(values) and count >= 1 << 16:
        return None

    symbols = split.symbols(elements)
    counts = np.bincount(symbols, minlength=1 << split.symbol_bits)
    # These are about the counts without the values.
    left = counts.copy()
    for symbol, often in zip(split.symbols(values).tolist(), occurrences.tolist(), strict=True):
        left[symbol] -= min(int(left[symbol]), often * count // sampled)
    by_exponent = left.reshape(-1, 1 << finer).sum(axis=1)
    fine = np.repeat(by_exponent * _FINE_SHARE >= count, 1 << finer)
    listed = np.flatnonzero((counts > 0) & fine)
    coarse = np.flatnonzero((counts > 0).reshape(-1, 1 << finer).any(axis=1) & ~fine[:: 1 << finer])
    before_coarse = len(listed) + len(values)
    if before_coarse + len(coarse) > _MOST_NUMBERS:
        return None
    number_of = np.zeros(1 << split.symbol_bits, np.uint8)
    number_of[listed] = np.arange(len(listed))
    places = (coarse[:, None] << finer) + np.arange(1 << finer)
    number_of[places] = np.arange(before_coarse, before_coarse + len(coarse))[:, None]
    numbers = number_of[symbols]
    for number, value in enumerate(values.tolist(), len(listed)):
        numbers[elements == value] = number
    is_coarse = numbers >= before_coarse
    raw = split.raw(elements[(numbers < len(listed)) | is_coarse].astype(np.int64))
    more = elements[is_coarse] >> split.symbol_shift & ((1 << finer) - 1)
    if 8 * (-(-len(raw) // 64) * split.raw_bits + -(-len(more) // 64) * finer) + _LISTS > count:
        return None
    joint = b"".join(
        (
            bytes((JOINT, split.byte, finer, len(listed), len(values), len(coarse))),
            *(part.astype("<u2").tobytes() for part in (listed, values, coarse)),
            little(len(raw), 3),
            little(len(more), 3),
            pack(_in_blocks(raw), split.raw_bits).tobytes(),
            pack(_in_blocks(more), finer).tobytes(),
            _numbers(numbers, level),
        )
    )
    # At least half a percent must be saved.
    return joint if 100 * len(joint) <= 199 * count else None


def _in_blocks(fields: Integers) -> Bytes:
    blocks = np.zeros((-(-len(fields) // 64), 64), np.uint8)
    blocks.reshape(-1)[: len(fields)] = fields
    return blocks


def _repeated_values(elements: Integers, split: Split) -> tuple[Counts, Counts, int]:
    """Values that make up a 256th of a sample and an eighth of what it has with their symbol; at most eight.

    With them come their occurrences in the sample, and its size. It is all groups of eight elements, or where there are
    many one of 32, which moves on from run to run.
    """
    stride = 1 if len(elements) < 1 << 16 else 32
    runs = len(elements) // 8 // stride
    groups = np.arange(runs) * stride + np.arange(runs) % stride
    sample = elements[: len(elements) // 8 * 8].reshape(-1, 8)[groups].reshape(-1)
    counts = np.bincount(sample, minlength=1 << 16).astype(np.int64)
    with_symbol = np.bincount(split.symbols(sample), minlength=1 << split.symbol_bits)
    values = np.flatnonzero((counts > 0) & (256 * counts >= len(sample)))
    values = values[8 * counts[values] >= with_symbol[split.symbols(values)]]
    values = np.sort(values[np.argsort(-counts[values], kind="stable")][:_MOST_VALUES])
    return values, counts[values], len(sample)


def _numbers(numbers: Bytes, level: int) -> bytes:
    """A plane of one-byte elements as whole symbols."""
    count = len(numbers)
    if (numbers == numbers[0]).all():
        return bytes((CONSTANT, numbers[0]))
    if level == MAX:
        choice = choose_whole(numbers, level, 1)
    else:
        whole = Split(1, 0, False)
        choice = table(histogram(numbers, whole, 1)[0], whole, exhaustive=False)
    streams = 1 if count < 1 << 14 else 2 if count < 1 << 18 else 4
    coded = write_wide(choice, numbers) if choice.mode == WIDE_RANS else write_rans(choice, numbers, streams)
    return coded if coded is not None and len(coded) <= count else bytes((RAW,)) + numbers.tobytes()


def _read_joint(reader: ByteReader, count: int, nesting: int) -> Integers:
    what = "a joint plane"
    split = read_split(reader, 2)
    more_bits = reader.number(1, what)
    coarse_split = replace(split, raw_bits=split.raw_bits + more_bits)
    if split.raw_bits == 0 or more_bits == 0 or coarse_split.raw_bits > 8:
        raise corrupt("a plane's header asks for impossible raw bits")
    symbols, values, coarse = (reader.number(1, what) for _ in range(3))
    before_coarse, listed = symbols + values, symbols + values + coarse
    if listed > _MOST_NUMBERS:
        raise corrupt(f"{what} lists too many symbols and values")
    words = reader.read(2 * listed, what).view("<u2").astype(np.int64)
    for part, own in ((words[:symbols], split), (words[before_coarse:], coarse_split)):
        if (part >> own.symbol_bits).any():
            raise corrupt(f"{what} lists a symbol that cannot be")
        part <<= own.symbol_shift
    fields, more_fields = reader.number(3, what), reader.number(3, what)
    if fields > count or more_fields > count:
        raise corrupt(f"{what} has more raw bits than elements")
    raw, more = (
        unpack(reader.read(-(-some // 64) * 8 * bits, "raw bits").reshape(-1, 8 * bits), bits).reshape(-1)[:some]
        for some, bits in ((fields, split.raw_bits), (more_fields, more_bits))
    )
    numbers = read_plane(reader, 1, count, nesting - 1)
    is_coarse = numbers >= before_coarse
    completed = (numbers < symbols) | is_coarse
    needed = int(completed.sum()), int(is_coarse.sum())
    if (numbers >= listed).any() or needed[0] > fields or needed[1] > more_fields:
        raise corrupt(f"{what} lacks a value or raw bits")
    if needed != (fields, more_fields):
        raise corrupt(f"{what} has raw bits left over")
    elements = words.astype(np.uint16)[numbers]
    elements[completed] |= split.place_raw(raw).astype(np.uint16)
    elements[is_coarse] |= more.astype(np.uint16) << split.symbol_shift
    return elements


# ---- packed ----------------------------------------------------------------------------------------------------------


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


def _read_packed(reader: ByteReader, count: int) -> Bytes:
    blocks = -(-count // 64)
    pairs = reader.read(-(-blocks // 2), "packed widths")
    widths = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[:blocks].astype(np.int64)
    if widths.max(initial=0) > 8:
        raise corrupt("a packed block is wider than a byte")
    fields = reader.read(8 * int(widths.sum()), "a packed block")
    elements = np.zeros((blocks, 64), np.uint8)
    for width, here, places in _of_width(widths):
        elements[here] = unpack(fields[places], width) << (8 - width)
    return elements.reshape(-1)[:count]


def _of_width(widths: Counts) -> list[tuple[int, Counts, Counts]]:
    """For each width from 1 to 8: the blocks that have it, and where their bytes are."""
    ends = 8 * np.cumsum(widths)
    by_width = [(width, np.flatnonzero(widths == width)) for width in range(1, 9)]
    return [(width, here, (ends[here] - 8 * width)[:, None] + np.arange(8 * width)) for width, here in by_width]
