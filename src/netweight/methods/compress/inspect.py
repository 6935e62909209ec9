"""Inspection of the tensors of a file or folder: sizes, dtypes, entropies of their bits, and plots of these.

Used by `netweight inspect`; `bits.py` counts the bits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from netweight.codec import BlobInfo
from netweight.codec.header import torch_dtype
from netweight.core.atomic_writes import whole_file
from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress
from netweight.errors import Unsupported, UsageError
from netweight.methods.compress.bits import BitStatistics, count_bits
from netweight.report.finding import Figure
from netweight.report.plots import canvas, series_color, to_figure
from netweight.store.reader import INDEX_SUFFIX, Store, TensorInfo, open_store, weight_map
from netweight.store.safetensors import nbytes_of
from netweight.store.shards import refuse_missing_shards

_SUFFIXES = (".svg", ".png", ".pdf")
_DRAWN_BINS = 256


# ---- files -----------------------------------------------------------------------------------------------------------


_ROUNDING = ("mantissa_bits", "block_size", "fidelity", "bound", "worst_change")


@final
@dataclass(frozen=True)
class TensorReport:
    """Report on one tensor."""

    info: TensorInfo
    """Name, dtype, shape and sizes of the tensor."""
    bits: BitStatistics | None
    """Histograms of the parts of its numbers; None if its dtype has no such parts (complex types, and types of fewer
    than 8 bits).
    """
    rounding: BlobInfo | None = None
    """Effect of rounding on the tensor; None if it is not rounded."""

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
            "rounding": None if rounding is None else {name: getattr(rounding, name) for name in _ROUNDING},
            "bits": None if self.bits is None else self.bits.to_json(histograms=histograms),
        }


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a path: the file itself, or all files in a folder and its subfolders."""
    if path.is_file():
        return [path]
    weights: list[Path] = []
    for folder, _, leaves in os.walk(path):
        own = [leaf for leaf in leaves if leaf.endswith(".safetensors")]
        indexes = [Path(folder, leaf) for leaf in leaves if leaf.endswith(INDEX_SUFFIX)]
        indexed = [name for index in indexes for name in weight_map(index).values()]
        refuse_missing_shards(Path(folder), own, indexed=indexed)
        weights += [Path(folder, leaf) for leaf in own]
    weights.sort()
    if not weights:
        raise UsageError(f"{path} contains no safetensors weights.", cure="Check the path.")
    return weights


def inspect_tensors(
    path: str | Path,
    *,
    tensor: str | None = None,
    base: Path | None = None,
    progress: Progress = QUIET,
) -> Iterator[TensorReport]:
    """Look at every tensor of a file or folder, compressed or not, holding a few megabytes at a time."""
    stores = [open_store(file, base=base) for file in weight_files(Path(path))]
    try:
        names = {name for store in stores for name in store.names()}
        chosen = names if tensor is None else set(Select(tensor).keys(sorted(names)))
        todo = [(store, name) for store in stores for name in store.names() if name in chosen]
        total = (
            sum(file.nbytes for store in stores for file in store.files)
            if tensor is None
            else sum(store.info(name).nbytes for store, name in todo)
        )
        with progress.task(f"inspect {Path(path).name}", total) as task:
            for store, name in todo:
                yield TensorReport(store.info(name), _bits(store, name), store.rounding(name))
                task.update(store.info(name).nbytes)
    finally:
        for store in stores:
            store.close()


def _bits(store: Store, name: str) -> BitStatistics | None:
    info = store.info(name)
    try:
        element = str(torch_dtype(info.dtype)).removeprefix("torch.")
        width = max(nbytes_of(info.dtype, (1,)), 1)
        blocks = (content.reshape(-1, width) for content in store.blocks(name))
        return count_bits(element, info.shape, blocks)
    except Unsupported:
        # torch does not have this dtype, or its numbers have no sign, exponent and mantissa.
        return None


# ---- plots -----------------------------------------------------------------------------------------------------------


def plot_bits(stats_by_label: Mapping[str, BitStatistics], file: str | os.PathLike[str]) -> Path:
    """Draw the histograms of one or more tensors or models into a file.

    Source: NeuZip (arXiv 2410.20650), figures 1 and 5.
    """
    path = Path(file)
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"A plot cannot be written as {path.name!r}.", cure=f"End the name in {', '.join(_SUFFIXES)}.")
    # The date is kept out, so that the same numbers give the same file.
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}
    suffix = path.suffix.lower()
    with _drawn(stats_by_label, page=False) as drawing, whole_file(path, overwrite=True) as opened:
        drawing.savefig(opened, format=suffix[1:], dpi=160, metadata=dates[suffix])
    return path


def bits_figure(stats_by_label: Mapping[str, BitStatistics], *, caption: str = "") -> Figure:
    """Draw the same histograms for a report."""
    with _drawn(stats_by_label) as drawing:
        return to_figure(drawing, alt=_in_words(stats_by_label), caption=caption)


@contextmanager
def _drawn(stats_by_label: Mapping[str, BitStatistics], *, page: bool = True) -> Iterator[Any]:
    """A figure with a row of histograms for each."""
    if not any(statistics.count for statistics in stats_by_label.values()):
        raise UsageError("There are no weights to draw.", cure="Give at least one tensor with elements.")
    rows = len(stats_by_label)
    with canvas(3 * rows, width=6.4, height=0.25 + 1.95 * rows, across=3, page=page) as (drawing, axes):
        for row, (label, statistics) in enumerate(stats_by_label.items()):
            for column, (name, entropy) in enumerate(statistics.entropies.items()):
                panel = axes[3 * row + column]
                panel.set_title(f"{name}: {entropy:.2f} of {getattr(statistics.layout, name)} bits", fontsize=8.5)
                _histogram(panel, getattr(statistics, name), column)
            axes[3 * row].set_ylabel(f"{label}\nshare of weights")
        yield drawing


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
    """Draw a filled staircase; thousands of bins are merged to 256, without a visible difference."""
    folded = counts.reshape(min(len(counts), _DRAWN_BINS), -1).sum(axis=1)
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
