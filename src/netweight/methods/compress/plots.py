"""The histograms of sign, exponent and mantissa as a picture, in the manner of the paper's figures 1 and 5.

Used by `netweight inspect --plot` and by the reproductions of the two figures. Drawing needs the `evidence` extra.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.errors import UsageError
from netweight.methods.compress.bits import BitStatistics
from netweight.report.finding import Figure
from netweight.report.plots import canvas, series_color, to_figure
from netweight.store.atomic import whole_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["bits_figure", "plot_bits"]

SUFFIXES = (".svg", ".png", ".pdf")
MOST_BINS = 256


def plot_bits(stats_by_label: Mapping[str, BitStatistics], file: str | os.PathLike[str]) -> Path:
    """Draw the histograms of one or more tensors or models into a file.

    Args:
        stats_by_label: Name of each → its statistics; one row of three panels (sign, exponent, mantissa) per name.
        file: Where to; the suffix says how: .svg, .png or .pdf. It appears whole or not at all.

    Returns:
        The path of the file.

    Raises:
        UsageError: The suffix is another one, there is nothing to draw, or the folder does not exist.
        OutputFailed: The folder cannot be written.
        MissingExtra: matplotlib is not installed.

    Source: NeuZip (arXiv 2410.20650), figures 1 and 5.
    """
    path = Path(file)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"A plot cannot be written as {path.name!r}.", cure=f"End the name in {', '.join(SUFFIXES)}.")
    with canvas(3 * len(_checked(stats_by_label)), page=False, across=3, **_size(stats_by_label)) as (drawing, axes):
        _draw(stats_by_label, axes)
        with whole_file(path, overwrite=True) as opened:
            drawing.savefig(opened, format=path.suffix[1:].lower(), dpi=160, metadata=_no_date(path))
    return path


def bits_figure(stats_by_label: Mapping[str, BitStatistics], *, caption: str = "") -> Figure:
    """Draw the same histograms for a report.

    Args:
        stats_by_label: Name of each → its statistics.
        caption: Line below the figure.

    Raises:
        UsageError: There is nothing to draw.
        MissingExtra: matplotlib is not installed.
    """
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
