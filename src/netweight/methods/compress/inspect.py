"""How the bits of weights are spread: sign, exponent and mantissa, their histograms and entropies.

This is the observation on which lossless compression of weights rests: signs and mantissas look random, exponents do
not. Integers and truth values have no such parts and are counted as whole bytes. Used by `netweight inspect` and by
the reproductions of figures 1 and 5.
"""

# Source: NeuZip (arXiv 2410.20650), section 3.1 and figures 1 and 5; the entropies are Shannon's of order 0.

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.codec import BlobInfo
from netweight.core.files import whole_file
from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress
from netweight.errors import Unsupported, UsageError
from netweight.report.finding import Figure
from netweight.report.plots import canvas, series_color, to_figure
from netweight.store.reader import Store, TensorInfo, open_store

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


# At most 2^12 bins for a mantissa; of a longer one the top bits are counted and the rest apart.
MANTISSA_BINS = 12
# Elements looked at at a time, so that a tensor larger than memory's leftovers can be measured.
BLOCK = 1 << 22


@dataclass(frozen=True)
class Layout:
    """Where the parts of a number lie, from the highest bit down: sign, exponent, mantissa."""

    bits: int  # width of the number
    sign: int  # bits of the sign; 0 for types without one apart
    exponent: int  # bits of the exponent; 0 for integers
    mantissa: int  # bits of the mantissa; all bits for integers


_FLOATS = {
    "bfloat16": Layout(16, 1, 8, 7),
    "float16": Layout(16, 1, 5, 10),
    "float32": Layout(32, 1, 8, 23),
    "float64": Layout(64, 1, 11, 52),
    "float8_e4m3fn": Layout(8, 1, 4, 3),
    "float8_e4m3fnuz": Layout(8, 1, 4, 3),
    "float8_e5m2": Layout(8, 1, 5, 2),
    "float8_e5m2fnuz": Layout(8, 1, 5, 2),
    "float8_e8m0fnu": Layout(8, 0, 8, 0),
}
_INTEGERS = {"bool": 8, "int8": 8, "int16": 16, "int32": 32, "int64": 64}
_INTEGERS |= {f"u{name}": width for name, width in _INTEGERS.items() if name != "bool"}
_LAYOUTS = _FLOATS | {name: Layout(width, 0, 0, width) for name, width in _INTEGERS.items()}


@dataclass(frozen=True)
class BitStatistics:
    """The histograms of one tensor's parts, or of several tensors' together."""

    dtype: str  # name of the element type, as torch writes it without "torch."
    shape: tuple[int, ...]  # shape of the tensor; `(n,)` for several merged ones
    sign: NDArray[np.int64]  # count of sign 0 and of sign 1, shape `(2,)`; empty for types without sign
    exponent: NDArray[np.int64]  # count of every exponent value, shape `(2^exponent bits,)`; empty for integers
    # Count of every value of the top mantissa bits (at most 12), shape `(2^min(bits, 12),)`. For integers of more than
    # one byte these are the counts of the top 12 bits.
    mantissa: NDArray[np.int64]
    # Count of every byte value at each byte position, lowest byte first, shape `(itemsize, 256)`.
    bytes: NDArray[np.int64]

    @property
    def layout(self) -> Layout:
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
        """Entropy of the mantissa in bits per weight."""
        # Exact up to 12 mantissa bits. Above, the top 12 bits count with their joint entropy and the lower ones with
        # the entropies of the bytes they lie in, as if independent: an upper bound that sees low bytes left at zero, as
        # in fp32 weights that were bf16 once.
        return _entropy(self.mantissa) + self._low_entropy()

    @property
    def bits_per_weight(self) -> float:
        """Bits that an ideal coder of order 0 needs when it codes the parts one by one."""
        return self.sign_entropy + self.exponent_entropy + self.mantissa_entropy

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
        parts = {"sign": self.sign_entropy, "exponent": self.exponent_entropy, "mantissa": self.mantissa_entropy}
        return {name: part / total if total else 0.0 for name, part in parts.items()}

    def to_json(self, *, histograms: bool = False) -> dict[str, Any]:
        """Return the numbers as a JSON value."""
        values: dict[str, Any] = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bits": self.layout.bits,
            "bits_per_weight": self.bits_per_weight,
            "exponent_only_bits": self.exponent_only_bits,
            "entropy": {
                "sign": self.sign_entropy,
                "exponent": self.exponent_entropy,
                "mantissa": self.mantissa_entropy,
            },
            "share": self.shares,
            "exponents_used": self.exponents_used,
        }
        if histograms:
            parts = {"sign": self.sign, "exponent": self.exponent, "mantissa": self.mantissa}
            values["histograms"] = {name: counts.tolist() for name, counts in parts.items()}
        return values

    def _low_entropy(self) -> float:
        """Entropy of the mantissa bits below the top twelve, byte by byte from the lowest."""
        # The byte that straddles the boundary is folded to its lower bits.
        low, total = self.layout.mantissa - MANTISSA_BINS, 0.0
        for position in range(max(0, -(-low // 8))):
            width = min(8, low - 8 * position)
            total += _entropy(self.bytes[position].reshape(-1, 1 << width).sum(axis=0))
        return total


def bit_statistics(tensor: torch.Tensor | NDArray[Any]) -> BitStatistics:
    """Count the signs, exponents and mantissas of a tensor."""
    # Works through the tensor in blocks of 4 million elements, so that it needs little memory beside it.
    # Source: NeuZip, figures 1 and 5.
    name = getattr(tensor.dtype, "name", None) or str(tensor.dtype).removeprefix("torch.")
    if name not in _LAYOUTS:
        raise Unsupported(
            f"The bits of a tensor of dtype {name} cannot be told apart.",
            cure="View it as an integer or floating-point type first.",
        )
    layout = _LAYOUTS[name]
    counts = _Counts(layout)
    for block in _blocks(tensor, layout.bits // 8):
        counts.add(block)
    shape = tuple(int(size) for size in tensor.shape)
    return BitStatistics(name, shape, counts.sign, counts.exponent, counts.mantissa, counts.bytes)


def merge(statistics: Iterable[BitStatistics]) -> BitStatistics:
    """Add up the statistics of several tensors of one dtype, as if they had been one."""
    parts = list(statistics)
    if not parts or len({part.dtype for part in parts}) > 1:
        found = sorted({part.dtype for part in parts}) or "nothing"
        raise UsageError(f"Statistics of {found} cannot be merged.", cure="Merge those of one dtype at a time.")
    return BitStatistics(
        parts[0].dtype,
        (sum(part.count for part in parts),),
        sum((part.sign for part in parts[1:]), parts[0].sign),
        sum((part.exponent for part in parts[1:]), parts[0].exponent),
        sum((part.mantissa for part in parts[1:]), parts[0].mantissa),
        sum((part.bytes for part in parts[1:]), parts[0].bytes),
    )


class _Counts:
    """Histograms while they grow."""

    def __init__(self, layout: Layout) -> None:
        import numpy as np

        self.layout = layout
        self.top = min(layout.mantissa, MANTISSA_BINS)
        self.sign = np.zeros(2 if layout.sign else 0, np.int64)
        self.exponent = np.zeros(1 << layout.exponent if layout.exponent else 0, np.int64)
        self.mantissa = np.zeros(1 << self.top if self.top else 0, np.int64)
        self.bytes = np.zeros((layout.bits // 8, 256), np.int64)

    def add(self, block: NDArray[np.uint8]) -> None:
        """Count a block of elements given as bytes, shape `(elements, itemsize)`, lowest byte first."""
        import numpy as np

        for position in range(block.shape[1]):
            self.bytes[position] += np.bincount(block[:, position], minlength=256)
        # The top 24 bits hold sign, exponent and the counted mantissa bits of every type (64-bit floats: 1 + 11 + 12).
        width = min(self.layout.bits, 24)
        head = np.zeros(len(block), np.int32)
        for position in range(block.shape[1] - width // 8, block.shape[1]):
            head = block[:, position].astype(np.int32) << (8 * (position - block.shape[1] + width // 8)) | head
        if self.layout.sign:
            self.sign += np.bincount(head >> (width - 1), minlength=2)
        if self.layout.exponent:
            below = width - self.layout.sign - self.layout.exponent
            self.exponent += np.bincount(head >> below & (len(self.exponent) - 1), minlength=len(self.exponent))
        if self.top:
            below = width - self.layout.sign - self.layout.exponent - self.top
            self.mantissa += np.bincount(head >> below & (len(self.mantissa) - 1), minlength=len(self.mantissa))


def _blocks(tensor: Any, itemsize: int) -> Iterator[NDArray[np.uint8]]:
    """The elements as rows of bytes, lowest byte first, a few million at a time, on the CPU."""
    import numpy as np

    if isinstance(tensor, np.ndarray):
        flat = tensor.reshape(-1)
        little = tensor.dtype.newbyteorder("<")
        for start in range(0, flat.size, BLOCK):
            part = np.ascontiguousarray(flat[start : start + BLOCK].astype(little, copy=False))
            yield part.view(np.uint8).reshape(-1, itemsize)
        return
    import torch

    flat_tensor = tensor.detach().reshape(-1)
    for start in range(0, flat_tensor.numel(), BLOCK):
        part_tensor = flat_tensor[start : start + BLOCK].contiguous().cpu().view(torch.uint8)
        rows: NDArray[np.uint8] = part_tensor.numpy().reshape(-1, itemsize)
        yield rows if _little_endian() else rows[:, ::-1]


def _little_endian() -> bool:
    import sys

    return sys.byteorder == "little"


def _entropy(counts: NDArray[np.int64]) -> float:
    """Shannon's entropy of a histogram, in bits; 0 for an empty one."""
    import numpy as np

    total = int(counts.sum()) if counts.size else 0
    if total == 0:
        return 0.0
    shares = counts[counts > 0] / total
    return float(-(shares * np.log2(shares)).sum()) + 0.0


@final
@dataclass(frozen=True)
class TensorReport:
    """What was found of one tensor."""

    info: TensorInfo  # its name, dtype, shape and sizes
    # How its bits are spread; None if its dtype has no such parts (e.g. complex or sub-byte ones).
    bits: BitStatistics | None
    rounding: BlobInfo | None = None  # what rounding did to it; None if it is not rounded

    @property
    def stored_bits(self) -> float:
        """Bits that the file spends on each weight; 0 if there is none."""
        count = math.prod(self.info.shape)
        return 8 * self.info.stored_nbytes / count if count else 0.0

    def to_json(self, *, histograms: bool = False) -> dict[str, Any]:
        """Return the report as a JSON value."""
        info, rounding = self.info, self.rounding
        return {
            "name": info.name,
            "file": str(info.file),
            "dtype": info.dtype,
            "shape": list(info.shape),
            "nbytes": info.nbytes,
            "stored_nbytes": info.stored_nbytes,
            "compressed": info.compressed,
            "stored_bits_per_weight": self.stored_bits,
            "digest": info.digest,
            "rounding": None
            if rounding is None
            else {
                "mantissa_bits": rounding.mantissa_bits,
                "block_size": rounding.block_size,
                "fidelity": rounding.fidelity,
                "bound": rounding.bound,
                "worst_change": rounding.worst_change,
            },
            "bits": None if self.bits is None else self.bits.to_json(histograms=histograms),
        }


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that a path stands for: itself, or all in a folder and its sub-folders."""
    if path.is_file():
        return [path]
    files = [Path(folder) / leaf for folder, _, leaves in os.walk(path) for leaf in leaves]
    weights = sorted(file for file in files if file.suffix == ".safetensors")
    if not weights:
        raise UsageError(f"{path} holds no safetensors weights.", cure="Check the path.")
    return weights


def inspect_tensors(
    path: str | Path, *, tensor: str | None = None, threads: int = 1, progress: Progress = QUIET
) -> Iterator[TensorReport]:
    """Look at every tensor of a file or folder, compressed or not, holding one at a time."""
    stores = [open_store(file) for file in weight_files(Path(path))]
    try:
        names = {name for store in stores for name in store.names()}
        chosen = names if tensor is None else set(Select(tensor).keys(sorted(names)))
        todo = [(store, name) for store in stores for name in store.names() if name in chosen]
        total = sum(store.info(name).nbytes for store, name in todo)
        with progress.task(f"inspect {Path(path).name}", total) as task:
            for store, name in todo:
                yield TensorReport(store.info(name), _bits(store, name, threads), store.rounding(name))
                task.update(store.info(name).nbytes)
    finally:
        for store in stores:
            store.close()


def _bits(store: Store, name: str, threads: int) -> BitStatistics | None:
    try:
        statistics = bit_statistics(store.get(name, threads=threads))
    except Unsupported:  # torch lacks the dtype, or its numbers have no sign, exponent and mantissa
        return None
    store.release(name)
    return statistics


SUFFIXES = (".svg", ".png", ".pdf")
MOST_BINS = 256


def plot_bits(stats_by_label: Mapping[str, BitStatistics], file: str | os.PathLike[str]) -> Path:
    """Draw the histograms of one or more tensors or models into a file."""
    # Source: NeuZip (arXiv 2410.20650), figures 1 and 5.
    path = Path(file)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"A plot cannot be written as {path.name!r}.", cure=f"End the name in {', '.join(SUFFIXES)}.")
    with canvas(3 * len(_checked(stats_by_label)), page=False, across=3, **_size(stats_by_label)) as (drawing, axes):
        _draw(stats_by_label, axes)
        with whole_file(path, overwrite=True) as opened:
            drawing.savefig(opened, format=path.suffix[1:].lower(), dpi=160, metadata=_no_date(path))
    return path


def bits_figure(stats_by_label: Mapping[str, BitStatistics], *, caption: str = "") -> Figure:
    """Draw the same histograms for a report."""
    with canvas(3 * len(_checked(stats_by_label)), across=3, **_size(stats_by_label)) as (drawing, axes):
        _draw(stats_by_label, axes)
        return to_figure(drawing, alt=_in_words(stats_by_label), caption=caption)


def _checked(stats_by_label: Mapping[str, BitStatistics]) -> Mapping[str, BitStatistics]:
    if not any(statistics.count for statistics in stats_by_label.values()):
        raise UsageError("There are no weights to draw.", cure="Give at least one tensor with elements.")
    return stats_by_label


def _size(stats_by_label: Mapping[str, BitStatistics]) -> dict[str, Any]:
    return {"width": 7.4, "height": 0.25 + 1.95 * len(stats_by_label)}


def _draw(stats_by_label: Mapping[str, BitStatistics], axes: list[Any]) -> None:
    for row, (label, statistics) in enumerate(stats_by_label.items()):
        parts = {
            "sign": (statistics.sign, statistics.sign_entropy, statistics.layout.sign),
            "exponent": (statistics.exponent, statistics.exponent_entropy, statistics.layout.exponent),
            "mantissa": (statistics.mantissa, statistics.mantissa_entropy, statistics.layout.mantissa),
        }
        for column, (name, (counts, entropy, width)) in enumerate(parts.items()):
            panel = axes[3 * row + column]
            panel.set_title(f"{name}: {entropy:.2f} of {width} bits", fontsize=8.5)
            _histogram(panel, counts, column)
        axes[3 * row].set_ylabel(f"{label}\nshare of weights")


def _histogram(panel: Any, counts: NDArray[np.int64], color: int) -> None:
    """One panel: two bars for the sign, a staircase for the rest, nothing where the type has no such part."""
    if not counts.size:
        panel.set_axis_off()
        return
    if len(counts) == 2:
        panel.bar([0, 1], counts / max(int(counts.sum()), 1), width=0.6, color=series_color(color))
        panel.set_xticks([0, 1], ["0 (+)", "1 (−)"])
        panel.set_xlim(-0.6, 1.6)
    else:
        _staircase(panel, counts, color)
    panel.set_ylim(bottom=0)
    panel.grid(axis="y")
    panel.locator_params(axis="y", nbins=5)


def _staircase(panel: Any, counts: NDArray[np.int64], color: int) -> None:
    """A filled staircase; thousands of bins are folded to 256, which the eye cannot tell apart."""
    import numpy as np

    folded = counts.reshape(min(len(counts), MOST_BINS), -1).sum(axis=1)
    step = len(counts) // len(folded)
    edges = np.arange(len(folded) + 1) * step - 0.5
    panel.stairs(folded / max(int(counts.sum()), 1), edges, fill=True, color=series_color(color))
    panel.locator_params(axis="x", integer=True, nbins=5)


def _in_words(stats_by_label: Mapping[str, BitStatistics]) -> str:
    sentences = [
        f"{label}: sign {s.sign_entropy:.2f} of {s.layout.sign} bits, exponent {s.exponent_entropy:.2f} of "
        f"{s.layout.exponent} in {s.exponents_used} values, mantissa {s.mantissa_entropy:.2f} of {s.layout.mantissa}"
        for label, s in stats_by_label.items()
    ]
    return f"Histograms of sign, exponent and mantissa. {'; '.join(sentences)}."


def _no_date(path: Path) -> dict[str, Any]:
    """Metadata that keeps the date out, so that the same numbers give the same file."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}[path.suffix.lower()]
