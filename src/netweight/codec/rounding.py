"""The arithmetic of lossy coding, in plain numpy: weights to words and back, and the bound on what that changes.

A *word* is what is kept of a weight: its sign in bit 15; below, right-aligned, the 8 exponent bits of a float32 and the
top k bits of its mantissa, rounded. With blocks, weights are divided by their block's *normalizer* before, and what is
read is multiplied by it: 1 + n / 256, of which n is stored. `native/rounding.h` does the same, faster; `lossy.py` makes
blobs of it. The source is NeuZip (arXiv 2410.20650), lossy compression; see docs/differences.md for what differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from netweight.codec.element_types import ELEMENT_TYPES, ElementType
from netweight.errors import CorruptBlob, Unsupported, UsageError

__all__ = [
    "FIDELITIES",
    "ROUNDABLE",
    "Precision",
    "Rounded",
    "Rounding",
    "relative_bound",
    "round_weights",
    "weights_of",
]

FIDELITIES = ("corrected", "reference")
LOSSLESS_BITS = 7  # bf16's own: with so many nothing is rounded, in any dtype
ROUNDABLE = {e.name: e for e in ELEMENT_TYPES if e.name in ("BF16", "F16", "F32")}

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]

_INFINITE = 0x7F800000  # bits of a float32
_LEAST_NORMAL = 0x00800000


@dataclass(frozen=True, slots=True)
class Rounding:
    """How weights are rounded.

    Attributes:
        element: Their type: BF16, F16 or F32.
        mantissa_bits: Bits of the mantissa that are kept, 0 to 6.
        block_size: Weights that share a normalizer; None for no normalizer.
        fidelity: "corrected" or "reference".
    """

    element: ElementType
    mantissa_bits: int
    block_size: int | None
    fidelity: str

    @property
    def infinite_word(self) -> int:
        """The word of infinity, without its sign; no finite weight has a larger one."""
        return 255 << self.mantissa_bits

    @property
    def bound(self) -> Fraction:
        """The largest relative change of a weight; see `relative_bound`."""
        kept = 2 ** (self.mantissa_bits + 1) + 1
        rounding = Fraction(1, kept)
        if self.block_size is None:
            return rounding
        # Nine bits of normalizer times seven at most fit the mantissa of a float32, so that no rounding follows there.
        own = Fraction(1, 2 ** (self.element.mantissa_bits + 1) + 1) if self.element.mantissa_bits < 15 else Fraction(0)
        times = 2 if self.fidelity == "reference" else 1  # the quotient is rounded, too
        return (1 + rounding) * (1 + own) ** times - 1


@dataclass(frozen=True, slots=True)
class Precision:
    """How much of weights to keep, for weights of any dtype.

    Attributes:
        mantissa_bits: Bits of the mantissa, 0 to 6; 7 keeps everything.
        block_size: Weights that share a normalizer, at least 1; None for no normalizers.
        fidelity: "corrected" or "reference".

    Raises:
        UsageError: A value is out of its range.

    Source: NeuZip (arXiv 2410.20650), lossy compression.
    """

    mantissa_bits: int = LOSSLESS_BITS
    block_size: int | None = 512
    fidelity: str = "corrected"

    def __post_init__(self) -> None:
        """Check the values."""
        if type(self.mantissa_bits) is not int or not 0 <= self.mantissa_bits <= LOSSLESS_BITS:
            raise UsageError(f"mantissa_bits is {self.mantissa_bits!r}.", cure="Choose 0 to 6, or 7 to round nothing.")
        if self.block_size is not None and (type(self.block_size) is not int or not 1 <= self.block_size < 1 << 62):
            raise UsageError(f"block_size is {self.block_size!r}.", cure="Choose 1 or more, or None for none.")
        if self.fidelity not in FIDELITIES:
            cure = f"Choose one of {', '.join(FIDELITIES)}."
            raise UsageError(f"There is no fidelity {self.fidelity!r}.", cure=cure)

    @property
    def lossless(self) -> bool:
        """Whether nothing is rounded."""
        return self.mantissa_bits == LOSSLESS_BITS

    def rounding(self, dtype: str) -> Rounding | None:
        """How to round weights of a dtype, given by safetensors' name; None to leave them as they are.

        Args:
            dtype: A name such as "BF16".

        Raises:
            Unsupported: Weights of this dtype cannot be rounded, or not with this fidelity.
        """
        if self.lossless:
            return None
        if dtype not in ROUNDABLE:
            raise Unsupported(
                f"Tensors of type {dtype} cannot be rounded to {self.mantissa_bits} mantissa bits.",
                cure=f"Only {', '.join(ROUNDABLE)} can; leave others lossless: mantissa_bits=7.",
            )
        if self.fidelity == "reference" and dtype != "BF16":
            raise Unsupported(
                f"The reference arithmetic is defined for BF16, not for {dtype}.", cure='Use fidelity="corrected".'
            )
        return Rounding(ROUNDABLE[dtype], self.mantissa_bits, self.block_size, self.fidelity)


def relative_bound(
    mantissa_bits: int, normalized: bool = True, fidelity: str = "corrected", dtype: str = "BF16"
) -> float:
    """How much lossy coding may change a weight w at most: |rounded - w| / |w|.

    Rounding a number to k mantissa bits changes it by at most 1 / (2^(k+1) + 1) of itself, which a number halfway
    between a power of two and its successor attains. Without normalizers that is all. With them the quotient is rounded
    so, and its product with the normalizer, which is the same number on both sides, once more to the p mantissa bits of
    the dtype: (1 + 1/(2^(k+1) + 1)) (1 + 1/(2^(p+1) + 1)) - 1. For F32 the product is exact and the second factor 1.
    The reference rounds the quotient to p bits, too, before it is rounded to k: the second factor is squared. Its bound
    does not hold for numbers that it rounds up to infinity.

    Args:
        mantissa_bits: Bits of the mantissa that are kept, 0 to 7; with 7 nothing changes.
        normalized: Whether blocks have normalizers.
        fidelity: "corrected" or "reference".
        dtype: safetensors' name of the dtype: "BF16", "F16" or "F32".

    Returns:
        The bound; 0 for 7 bits. What would change more is kept exactly (weights that are not finite or subnormal).

    Raises:
        UsageError: A setting is out of its range.
        Unsupported: Weights of this dtype cannot be rounded.
    """
    rounding = Precision(mantissa_bits, 1 if normalized else None, fidelity).rounding(dtype)
    return 0.0 if rounding is None else float(rounding.bound)


@dataclass(frozen=True, slots=True)
class Rounded:
    """What rounding gave for some weights.

    Attributes:
        words: One for each weight.
        normalizers: One for each block; None without.
        escapes: Which weights are to be kept exactly, ascending; their words are 0.
        values: The rounded weights' bytes, escapes included.
        worst: The largest relative change.
    """

    words: Words
    normalizers: Bytes | None
    escapes: npt.NDArray[np.int64]
    values: Bytes
    worst: float


def round_weights(data: Bytes, rounding: Rounding) -> Rounded:
    """Round weights, of which the first begins a block.

    Args:
        data: Their bytes.
        rounding: How.

    Returns:
        The rounded weights' bytes, with what rounding changed.
    """
    weights = _widened(data, rounding.element)
    bits = weights.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    finite = magnitude < _INFINITE
    normalizers, quotient = None, weights
    if rounding.block_size is not None:
        starts = np.arange(0, len(weights), rounding.block_size)
        sound = np.where(finite & (magnitude >= _LEAST_NORMAL), magnitude, 0)
        largest = np.maximum.reduceat(sound, starts) if len(starts) else sound
        normalizers = (largest >> 15).astype(np.uint8)
        with np.errstate(invalid="ignore", under="ignore"):
            quotient = weights / _factors(normalizers, rounding.block_size, 0, len(weights))
        if rounding.fidelity == "reference":
            quotient = _widened(_narrowed(quotient, rounding.element), rounding.element)
    code = _codes(quotient, rounding)
    code[~finite] = 0
    words = (bits >> 16 & np.uint32(0x8000) | code).astype(np.uint16)
    values = weights_of(words, normalizers, 0, rounding)
    rounded = _widened(values, rounding.element)

    bound = rounding.bound
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        size = np.abs(weights.astype(np.float64))
        change = np.abs(rounded.astype(np.float64) - weights.astype(np.float64))
        within = change * bound.denominator <= size * bound.numerator  # exact: both sides have less than 53 bits
        if rounding.fidelity == "reference":
            within |= np.isinf(rounded)
        kept = finite & within & ((code != 0) | (magnitude == 0))
        changes = (change / size)[kept & (magnitude != 0)]
    escapes = np.flatnonzero(~kept)
    words[escapes] = 0
    number = rounding.element.number_bytes
    values.reshape(-1, number)[escapes] = data.reshape(-1, number)[escapes]
    return Rounded(words, normalizers, escapes, values, float(changes.max(initial=0.0)))


def weights_of(words: Words, normalizers: Bytes | None, first: int, rounding: Rounding) -> Bytes:
    """Weights from words, those that are kept exactly not included.

    Args:
        words: The words.
        normalizers: Of the blocks that they belong to.
        first: The first word's place in its block.
        rounding: How they were rounded.

    Returns:
        The weights' bytes.

    Raises:
        CorruptBlob: A word cannot be.
    """
    code = (words & np.uint16(0x7FFF)).astype(np.uint32)
    most = rounding.infinite_word - (rounding.fidelity == "corrected")
    if ((code > most) | ((code != 0) & (code < 1 << rounding.mantissa_bits))).any():
        raise CorruptBlob("a word stands for no number")
    bits = code << np.uint32(23 - rounding.mantissa_bits) | (words & np.uint16(0x8000)).astype(np.uint32) << 16
    values = bits.view(np.float32)
    if normalizers is not None and rounding.block_size is not None:
        with np.errstate(over="ignore"):
            values = values * _factors(normalizers, rounding.block_size, first, len(words))
    return _narrowed(values, rounding.element)


def _codes(quotient: Floats, rounding: Rounding) -> npt.NDArray[np.uint32]:
    """Words without signs; 0 for what cannot be rounded."""
    magnitude = quotient.view(np.uint32) & np.uint32(0x7FFFFFFF)
    shift = 23 - rounding.mantissa_bits
    half = np.uint32(1 << (shift - 1))
    if rounding.fidelity == "reference":  # half up
        code = (magnitude + half) >> np.uint32(shift)
        code[code > rounding.infinite_word] = 0
    else:  # half to even
        code = (magnitude + (half - np.uint32(1)) + (magnitude >> np.uint32(shift) & np.uint32(1))) >> np.uint32(shift)
        code[code >= rounding.infinite_word] = 0
    code[magnitude < _LEAST_NORMAL] = 0
    return code


def _factors(normalizers: Bytes, block_size: int, first: int, count: int) -> Floats:
    """The number that each weight was divided by: of nine bits, so exact."""
    blocks = np.arange(first, first + count) // block_size
    factors: Floats = (np.float32(1) + normalizers.astype(np.float32) / np.float32(256))[blocks]
    return factors


def _widened(data: Bytes, element: ElementType) -> Floats:
    """Weights as float32, exactly."""
    if element.name == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if element.name == "F16":
        with np.errstate(invalid="ignore"):  # signaling NaNs
            return data.view("<f2").astype(np.float32)
    floats: Any = data.view("<f4")
    return floats  # type: ignore[no-any-return]


def _narrowed(values: Floats, element: ElementType) -> Bytes:
    """The bytes of float32 numbers, none of them NaN, in the weights' own type; half to even."""
    if element.name == "BF16":
        bits = values.view(np.uint32)
        return (
            ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16))
            .astype("<u2")
            .view(np.uint8)
        )
    if element.name == "F16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype("<f2").view(np.uint8)
    return values.astype("<f4").view(np.uint8)
