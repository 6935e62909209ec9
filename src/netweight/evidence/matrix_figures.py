"""Figures of matrices and of distributions, in the look of `figures.py`: heat maps with their numbers, histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from netweight.errors import UsageError
from netweight.report.finding import Figure
from netweight.report.plots import canvas, series_color, to_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["heat_maps", "histogram"]


def heat_maps(
    panels: Mapping[str, Sequence[Sequence[float | None]]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    alt: str,
    caption: str = "",
    xlabel: str = "",
    ylabel: str = "",
    digits: int = 2,
) -> Figure:
    """Draw matrices side by side, each with its numbers in its cells and a scale of its own.

    Args:
        panels: Title → rows of numbers; None or NaN leaves a cell empty.
        rows: Names of the rows, the first on top.
        columns: Names of the columns.
        alt: Text alternative.
        caption: Line below the figure.
        xlabel: What columns are.
        ylabel: What rows are.
        digits: Decimals of the numbers.

    Raises:
        UsageError: A matrix does not fit the names, or there is none.
        MissingExtra: matplotlib is not installed.
    """
    for title, values in panels.items():
        if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
            raise UsageError(f"The matrix {title!r} does not have {len(rows)} rows of {len(columns)} numbers.")
    if not panels or not rows or not columns:
        raise UsageError("There is no matrix to draw.", cure="Give one with at least a row and a column.")
    across = min(2, len(panels))
    deep = -(-len(panels) // across)
    size = (max(3.2, 1.4 + 0.55 * len(columns)) * across, (1.1 + 0.34 * len(rows)) * deep)
    with canvas(len(panels), width=size[0], height=size[1], across=across) as (drawing, places):
        for axes, (title, values) in zip(places, panels.items(), strict=True):
            _heat(axes, [[math.nan if value is None else float(value) for value in row] for row in values], digits)
            axes.set_title(title)
            axes.set_xticks([place + 0.5 for place in range(len(columns))], columns)
            axes.set_yticks([place + 0.5 for place in range(len(rows))], rows)
            axes.tick_params(length=0, labelsize=8)
            axes.set_xlabel(xlabel)
            axes.set_ylabel(ylabel)
        return to_figure(drawing, alt=alt, caption=caption)


def histogram(
    groups: Mapping[str, Sequence[float]],
    *,
    alt: str,
    caption: str = "",
    xlabel: str = "",
    ylabel: str = "",
    bins: int = 20,
) -> Figure:
    """Draw how often values occur, one outline per group over common bins.

    Args:
        groups: Name → values; groups without any are left out.
        alt: Text alternative.
        caption: Line below the figure.
        xlabel: Name and unit of the values.
        ylabel: What is counted.
        bins: How many bins.

    Raises:
        UsageError: There is no value, or one is not finite.
        MissingExtra: matplotlib is not installed.
    """
    filled = {name: [float(value) for value in values] for name, values in groups.items() if len(values)}
    every = [value for values in filled.values() for value in values]
    if not every or not all(map(math.isfinite, every)):
        raise UsageError("A histogram needs values, all of them finite.", cure="Leave out what was not measured.")
    low, high = min(every), max(every)
    width = (high - low) / bins or 1.0
    edges = [low + place * width for place in range(bins + 1)]
    with canvas(1) as (drawing, (axes,)):
        for index, (name, values) in enumerate(filled.items()):
            axes.hist(
                values, edges, histtype="stepfilled", alpha=0.35, color=series_color(index),
                edgecolor=series_color(index), linewidth=1.6, label=f"{name} (n = {len(values)})",
            )  # fmt: skip
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.grid(axis="y")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, fontsize=8.5)
        return to_figure(drawing, alt=alt, caption=caption)


def _heat(axes: Axes, values: list[list[float]], digits: int) -> None:
    import numpy as np

    table = np.ma.masked_invalid(np.array(values))
    known = table.compressed()
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    middle = (low + high) / 2
    mesh = axes.pcolormesh(
        np.arange(table.shape[1] + 1), np.arange(table.shape[0] + 1), table, cmap="viridis", vmin=low, vmax=high
    )
    mesh.set_rasterized(False)  # an SVG of a report must not hold pictures
    axes.invert_yaxis()
    for (row, column), value in np.ndenumerate(np.array(values)):
        if math.isfinite(value):
            ink = "#000000" if value > middle else "#ffffff"  # viridis is bright above its middle
            text = f"{value:.{digits}f}" if digits else f"{value:.0f}"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7.5, color=ink)
