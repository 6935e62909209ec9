"""Statistics of the parts of numbers: counts of every sign, exponent and mantissa in a tensor, and their entropies.

This is the observation on which lossless compression of weights rests (NeuZip, arXiv 2410.20650, section 3.1, figures 1
and 5): signs and mantissas look random, exponents do not. Integers and truth values have no such parts and are counted
as whole bytes. Entropies are Shannon's of order 0. Needs numpy alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netweight.core.tensor_bytes import row_major_bytes
from netweight.errors import Unsupported, UsageError

if TYPE_CHECKING:
    import torch

# At most 2^12 bins for a mantissa; of a longer one the top bits are counted and the rest apart.
MANTISSA_BINS = 12
# Elements looked at at a time, so that a tensor larger than memory's leftovers can be measured.
BLOCK = 1 << 15


@dataclass(frozen=True)
class BitLayout:
    """Widths of a number's parts, from the highest bit down: sign, exponent, mantissa."""

    bits: int
    """Width of the number."""
    sign: int
    """Number of sign bits; 0 for types without a separate sign."""
    exponent: int
    """Bits of the exponent; 0 for integers."""
    mantissa: int
    """Bits of the mantissa; all bits for integers."""


_LAYOUTS = {
    "bfloat16": BitLayout(16, 1, 8, 7),
    "float16": BitLayout(16, 1, 5, 10),
    "float32": BitLayout(32, 1, 8, 23),
    "float64": BitLayout(64, 1, 11, 52),
    "float8_e4m3fn": BitLayout(8, 1, 4, 3),
    "float8_e4m3fnuz": BitLayout(8, 1, 4, 3),
    "float8_e5m2": BitLayout(8, 1, 5, 2),
    "float8_e5m2fnuz": BitLayout(8, 1, 5, 2),
    "float8_e8m0fnu": BitLayout(8, 0, 8, 0),
    "bool": BitLayout(8, 0, 0, 8),
} | {f"{kind}{width}": BitLayout(width, 0, 0, width) for kind in ("int", "uint") for width in (8, 16, 32, 64)}


@dataclass(frozen=True)
class BitStatistics:
    """The histograms of one tensor's parts, or of several tensors' together."""

    dtype: str
    """Name of the element type, as torch writes it without "torch."."""
    shape: tuple[int, ...]
    """Shape of the tensor; `(n,)` for several merged ones."""
    sign: NDArray[np.int64]
    """Count of sign 0 and of sign 1, shape `(2,)`; empty for types without sign."""
    exponent: NDArray[np.int64]
    """Count of every exponent value, shape `(2^exponent bits,)`; empty for integers."""
    mantissa: NDArray[np.int64]
    """Count of every value of the top mantissa bits (at most 12), shape `(2^min(bits, 12),)`. For integers of more
    than one byte these are the counts of the top 12 bits.
    """
    bytes: NDArray[np.int64]
    """Count of every byte value at each byte position, lowest byte first, shape `(itemsize, 256)`."""

    @property
    def layout(self) -> BitLayout:
        """Widths of the parts."""
        return _LAYOUTS[self.dtype]

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.bytes[0].sum())

    @property
    def sign_entropy(self) -> float:
        """Entropy of the sign in bits per weight; 0 for types without sign."""
        return _entropy(self.sign)

    @property
    def exponent_entropy(self) -> float:
        """Entropy of the exponent in bits per weight; 0 for integers."""
        return _entropy(self.exponent)

    @property
    def mantissa_entropy(self) -> float:
        """Entropy of the mantissa in bits per weight; above 12 bits an upper bound."""
        # Of a longer mantissa the top 12 bits count with their joint entropy, and the lower ones, from the lowest byte,
        # with the entropies of the bytes they lie in, as if independent. That sees low bytes left at zero, as in fp32
        # weights that were bf16 once. The byte that straddles the boundary is folded to its lower bits.
        low, total = self.layout.mantissa - MANTISSA_BINS, 0.0
        for position in range(max(0, -(-low // 8))):
            width = min(8, low - 8 * position)
            total += _entropy(self.bytes[position].reshape(-1, 1 << width).sum(axis=0))
        return _entropy(self.mantissa) + total

    @property
    def entropies(self) -> dict[str, float]:
        """The three by name."""
        return {"sign": self.sign_entropy, "exponent": self.exponent_entropy, "mantissa": self.mantissa_entropy}

    @property
    def bits_per_weight(self) -> float:
        """Bits that an ideal coder of order 0 needs when it codes the parts one by one."""
        return sum(self.entropies.values())

    @property
    def exponent_only_bits(self) -> float:
        """Bits per weight when only the exponent is coded and the rest is kept raw, as the paper does."""
        return self.layout.sign + self.exponent_entropy + self.layout.mantissa

    @property
    def exponents_used(self) -> int:
        """Number of exponent values that occur."""
        return int((self.exponent > 0).sum())

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in `bits_per_weight`; they add up to 1, and are all 0 for a constant tensor."""
        total = self.bits_per_weight
        return {name: part / total if total else 0.0 for name, part in self.entropies.items()}

    def to_json(self, *, histograms: bool = False) -> dict[str, Any]:
        """Return the numbers as a JSON value."""
        values: dict[str, Any] = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bits": self.layout.bits,
            "bits_per_weight": self.bits_per_weight,
            "exponent_only_bits": self.exponent_only_bits,
            "entropy": self.entropies,
            "share": self.shares,
            "exponents_used": self.exponents_used,
        }
        if histograms:
            values["histograms"] = {name: getattr(self, name).tolist() for name in values["entropy"]}
        return values


def bit_statistics(tensor: torch.Tensor | NDArray[Any]) -> BitStatistics:
    """Count the signs, exponents and mantissas of a tensor, in blocks that need little memory beside it."""
    name = getattr(tensor.dtype, "name", None) or str(tensor.dtype).removeprefix("torch.")
    itemsize = tensor.dtype.itemsize
    return count_bits(name, tuple(int(size) for size in tensor.shape), _blocks(tensor, itemsize))


def count_bits(name: str, shape: tuple[int, ...], blocks: Iterable[NDArray[np.uint8]]) -> BitStatistics:
    """Count the signs, exponents and mantissas of a tensor that comes in pieces.

    Args:
        name: The element type, as torch writes it without "torch.", such as "bfloat16".
        shape: The tensor's shape, which the result repeats.
        blocks: The elements as rows of bytes, lowest byte first; each array has the shape `(elements, itemsize)`.

    Returns:
        The counts.

    Raises:
        Unsupported: Numbers of this type have no sign, exponent and mantissa.
    """
    if name not in _LAYOUTS:
        raise Unsupported(
            f"The bits of a tensor of dtype {name} cannot be separated.",
            cure="View it as an integer or floating-point type first.",
        )
    layout = _LAYOUTS[name]
    itemsize, top = layout.bits // 8, min(layout.mantissa, MANTISSA_BINS)
    # Counts of sign, exponent and top of the mantissa, which lie side by side; a part of no bits has no counts.
    widths = (layout.sign, layout.exponent, top)
    counts = [np.zeros(1 << width if width else 0, np.int64) for width in widths]
    bytes_ = np.zeros((itemsize, 256), np.int64)
    # The top 24 bits hold them for every type (64-bit floats: 1 + 11 + 12).
    head_bytes = min(itemsize, 3)
    for block in (piece[at : at + BLOCK] for piece in blocks for at in range(0, len(piece), BLOCK)):
        for position in range(itemsize):
            bytes_[position] += np.bincount(block[:, position], minlength=256)
        head = np.zeros(len(block), np.int32)
        for place, position in enumerate(range(itemsize - head_bytes, itemsize)):
            head |= block[:, position].astype(np.int32) << (8 * place)
        below = 8 * head_bytes
        for width, count in zip(widths, counts, strict=True):
            below -= width
            if width:
                count += np.bincount(head >> below & (len(count) - 1), minlength=len(count))
    sign, exponent, mantissa = counts
    return BitStatistics(name, shape, sign, exponent, mantissa, bytes_)


def merge(statistics: Iterable[BitStatistics]) -> BitStatistics:
    """Add up the statistics of several tensors of one dtype, as if they had been one."""
    parts = list(statistics)
    if not parts or len({part.dtype for part in parts}) > 1:
        dtypes = sorted({part.dtype for part in parts}) or "nothing"
        raise UsageError(f"Statistics of {dtypes} cannot be merged.", cure="Merge those of one dtype at a time.")
    counts = [sum(getattr(part, name) for part in parts) for name in ("sign", "exponent", "mantissa", "bytes")]
    return BitStatistics(parts[0].dtype, (sum(part.count for part in parts),), *counts)


def _blocks(tensor: Any, itemsize: int) -> Iterator[NDArray[np.uint8]]:
    """The elements as rows of bytes, lowest byte first, a few million at a time, on the CPU."""
    if isinstance(tensor, np.ndarray):
        flat = tensor.reshape(-1)
        little = tensor.dtype.newbyteorder("<")
        for start in range(0, flat.size, BLOCK):
            part = np.ascontiguousarray(flat[start : start + BLOCK].astype(little, copy=False))
            yield part.view(np.uint8).reshape(-1, itemsize)
        return
    import torch

    for some in torch.split(tensor.detach().reshape(-1), BLOCK) if tensor.numel() else ():
        rows: NDArray[np.uint8] = row_major_bytes(some.cpu()).numpy().reshape(-1, itemsize)
        yield rows if sys.byteorder == "little" else rows[:, ::-1]


def _entropy(counts: NDArray[np.int64]) -> float:
    """Shannon's entropy of a histogram, in bits; 0 for an empty one."""
    total = int(counts.sum()) if counts.size else 0
    if total == 0:
        return 0.0
    shares = counts[counts > 0] / total
    return float(-(shares * np.log2(shares)).sum()) + 0.0
