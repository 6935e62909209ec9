"""Figures for reports: small plot functions that return inline SVG or PNG in one consistent look.

The SVG takes its colors from CSS variables of the page (`--ink`, `--grid`, `--series-1` …) and falls back to fixed
colors outside of one, so the same figure suits light mode, dark mode and print. matplotlib belongs to the `evidence`
extra and is imported when a figure is drawn.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from netweight.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["Figure", "bars", "canvas", "image_grid", "lines", "paired_dots", "series_color", "to_figure"]

SERIES = ("#2f6f9f", "#c2571a", "#3d8159", "#8a4f9e", "#a0782c", "#5b6472")
"""Colors of the data series in files outside a report; a report's style sheet sets its own for light and dark."""
_LETTERS, _NAME = 15, 20  # of an image grid's names: letters per inch, and in a line of a row's name
INK, GRID = "#24292f", "#d5d9de"
INK_MARK, GRID_MARK = "#010101", "#020202"
SERIES_MARKS = tuple(f"#03030{i}" for i in range(1, len(SERIES) + 1))
# Colors that matplotlib is told to draw with for a page, and what stands for them in the SVG.
_MARKS = {
    INK_MARK: f"var(--ink, {INK})",
    GRID_MARK: f"var(--grid, {GRID})",
    **{mark: f"var(--series-{i}, {SERIES[i - 1]})" for i, mark in enumerate(SERIES_MARKS, start=1)},
}


@dataclass(frozen=True)
class Figure:
    """One picture of a report.

    Attributes:
        kind: "svg" (data is the SVG element as text) or "png" (data is the file in base64).
        data: The picture.
        alt: What it shows, for a reader who cannot see it: the message, not "a plot".
        caption: The line below it.
    """

    kind: Literal["svg", "png"]
    data: str
    alt: str
    caption: str = ""


def series_color(index: int) -> str:
    """Return the color to give matplotlib for the data series `index` (0, 1, …; repeats after six)."""
    return f"C{index % len(SERIES)}"


def bars(
    groups: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    *,
    alt: str,
    caption: str = "",
    xlabel: str = "",
    ylabel: str = "",
    log: bool = False,
    errors: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """Draw bars side by side, one group of bars per label.

    Args:
        groups: Name of each data series → its heights, one per label.
        labels: Names below the bars.
        alt: Text alternative.
        caption: Line below the figure.
        xlabel: Name of the horizontal axis.
        ylabel: Name and unit of the vertical axis.
        log: Whether the vertical axis is logarithmic.
        errors: Ends `(low, high)` of an interval per bar, for any of the series.

    Raises:
        UsageError: A series has not one height per label.
        MissingExtra: matplotlib is not installed.
    """
    for name, heights in groups.items():
        if len(heights) != len(labels):
            raise UsageError(f"Series {name!r} has {len(heights)} bars for {len(labels)} labels.")
    with canvas(1) as (drawing, (axes,)):
        width = 0.8 / max(len(groups), 1)
        for index, (name, heights) in enumerate(groups.items()):
            where = [place + (index - (len(groups) - 1) / 2) * width for place in range(len(labels))]
            axes.bar(where, heights, width * 0.92, color=series_color(index), label=name)
            for x, (low, high) in zip(where, (errors or {}).get(name, ()), strict=False):
                axes.plot([x, x], [low, high], color=_ink(), linewidth=1.2)
        axes.set_xticks(range(len(labels)), labels)
        _finish(axes, xlabel, ylabel, log=log, legend=len(groups) > 1)
        return to_figure(drawing, alt=alt, caption=caption)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    alt: str,
    caption: str = "",
    xlabel: str = "",
    ylabel: str = "",
    log: Literal["", "x", "y", "xy"] = "",
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    ylim: tuple[float, float] | None = None,
) -> Figure:
    """Draw lines, each with an interval band if it has one.

    Args:
        series: Name → `(x, y)` of equal length.
        alt: Text alternative.
        caption: Line below the figure.
        xlabel: Name and unit of the horizontal axis.
        ylabel: Name and unit of the vertical axis.
        log: Which axes are logarithmic.
        bands: Name → `(low, high)`, each as long as the line of that name.
        ylim: Least and greatest value that the vertical axis shows, such as those of a share; by default as drawn.

    Raises:
        UsageError: Lengths differ.
        MissingExtra: matplotlib is not installed.
    """
    dashes = ("-", "--", "-.", ":")  # a second cue beside color
    with canvas(1) as (drawing, (axes,)):
        for index, (name, (x, y)) in enumerate(series.items()):
            band = (bands or {}).get(name)
            if any(len(x) != len(part) for part in (y, *(band or ()))):
                raise UsageError(f"Line {name!r} has parts of different length.")
            axes.plot(x, y, dashes[index % 4], color=series_color(index), label=name, linewidth=1.8)
            if band:
                axes.fill_between(x, *band, color=series_color(index), alpha=0.18, linewidth=0)
        _finish(axes, xlabel, ylabel, log="y" in log, legend=len(series) > 1)
        if "x" in log:
            axes.set_xscale("log")
        elif all(isinstance(value, int) for x, _ in series.values() for value in x):  # rounds, steps: no halves
            axes.locator_params(axis="x", integer=True)
        if ylim is not None:
            edge = 0.03 * (ylim[1] - ylim[0])  # so that a line along the end is seen whole
            axes.set_ylim(ylim[0] - edge, ylim[1] + edge)
        return to_figure(drawing, alt=alt, caption=caption)


def paired_dots(
    before: Sequence[float],
    after: Sequence[float],
    labels: Sequence[str],
    *,
    names: tuple[str, str] = ("before", "after"),
    alt: str,
    caption: str = "",
    xlabel: str = "",
    log: bool = False,
) -> Figure:
    """Draw one row per label with two dots and a line between them: what changed, and how far.

    Args:
        before: First value of each row.
        after: Second value of each row.
        labels: Name of each row.
        names: What the two dots are called.
        alt: Text alternative.
        caption: Line below the figure.
        xlabel: Name and unit of the axis.
        log: Whether the axis is logarithmic.

    Raises:
        UsageError: The three lists differ in length.
        MissingExtra: matplotlib is not installed.
    """
    if not len(before) == len(after) == len(labels):
        raise UsageError(f"paired_dots got {len(before)} and {len(after)} values for {len(labels)} labels.")
    with canvas(1, height=0.7 + 0.28 * len(labels)) as (drawing, (axes,)):
        rows = range(len(labels))
        axes.hlines(rows, before, after, color=_ink(), linewidth=1, zorder=1)
        axes.scatter(before, rows, color=series_color(0), marker="o", label=names[0], zorder=2)
        axes.scatter(after, rows, color=series_color(1), marker="D", label=names[1], zorder=2)
        axes.set_yticks(rows, labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        _finish(axes, xlabel, "", log=False, legend=True, grid="x")
        if log:
            axes.set_xscale("log")
        return to_figure(drawing, alt=alt, caption=caption)


def image_grid(
    images: Sequence[Sequence[Any]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    alt: str,
    caption: str = "",
    pixels: int = 96,
) -> Figure:
    """Draw images in a labeled grid, as one inline PNG that reads well on light and dark pages.

    Args:
        images: Rows of images; each an array or tensor `(height, width)` or `(height, width, 1 | 3)`, uint8, or
            floating point within 0 and 1 (values outside are cut off). None leaves a cell empty.
        rows: Name of each row.
        columns: Name of each column.
        alt: Text alternative.
        caption: Line below the figure.
        pixels: Height of a cell; small images are enlarged without smoothing.

    Raises:
        UsageError: The grid does not fit its names, or an image has another shape.
        MissingExtra: matplotlib is not installed.
    """
    if len(images) != len(rows) or any(len(row) != len(columns) for row in images):
        raise UsageError(f"The image grid does not have {len(rows)} rows of {len(columns)} images.")
    inch = pixels / 96
    heads = [textwrap.fill(name, max(8, int(inch * _LETTERS))) for name in columns]
    names = [textwrap.fill(name, _NAME) for name in rows]
    longest = max((len(line) for name in names for line in name.splitlines()), default=0)
    lines = max((name.count("\n") + 1 for name in heads), default=1)
    size = (0.1 + longest / _LETTERS + inch * 1.06 * len(columns), 0.1 + 0.15 * lines + inch * 1.06 * len(rows))
    with canvas(len(rows) * len(columns), width=size[0], height=size[1], across=len(columns), page=False) as (
        drawing,
        cells,
    ):
        for place, cell in enumerate(cells):
            row, column = divmod(place, len(columns))
            _image_cell(cell, images[row][column])
            if row == 0:
                cell.set_title(heads[column], fontsize=8, loc="center")
            if column == 0:
                cell.set_ylabel(names[row], fontsize=8, rotation=0, ha="right", va="center")
        file = io.BytesIO()
        drawing.savefig(file, format="png", dpi=144, facecolor="white", metadata={"Software": None})
    return Figure("png", base64.b64encode(file.getvalue()).decode(), alt, caption)


@contextmanager
def canvas(
    panels: int, *, width: float = 6.6, height: float = 2.9, across: int | None = None, page: bool = True
) -> Iterator[tuple[Canvas, list[Axes]]]:
    """Open a matplotlib figure in the house style, for plots that the functions here do not cover.

    Args:
        panels: Number of axes.
        width: Width in inches.
        height: Height in inches.
        across: Panels per row; all in one row by default.
        page: Whether the drawing will go through `to_figure`, which lets the page set the colors; False for a file,
            which is drawn in fixed colors on white.

    Yields:
        The matplotlib figure and its axes. Color with `series_color`; turn it into a `Figure` by `to_figure`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError as error:
        raise MissingExtra(
            "Plots need matplotlib, which is not installed.", cure='Run: pip install "netweight[evidence]"'
        ) from error
    across = across or panels
    with matplotlib.rc_context(_style(page)):
        drawing = MatplotlibFigure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(drawing)  # without pyplot: no global state, no window, safe in threads
        axes = drawing.subplots(-(-panels // across), across, squeeze=False).ravel().tolist()
        yield drawing, axes[:panels]


def to_figure(drawing: Canvas, *, alt: str, caption: str = "") -> Figure:
    """Turn a figure drawn inside `canvas` into inline SVG that follows the colors of the page.

    Args:
        drawing: The matplotlib figure.
        alt: Text alternative.
        caption: Line below the figure.
    """
    file = io.StringIO()
    drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Figure("svg", inline_svg(file.getvalue(), alt), alt, caption)


def inline_svg(document: str, alt: str) -> str:
    """Turn an SVG file of matplotlib into an element for a page: own ids, page colors and fonts, a text alternative."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)  # it would style the whole page
    for mark, color in _MARKS.items():
        svg = svg.replace(mark, color)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    prefix = "f" + hashlib.sha256((svg + alt).encode()).hexdigest()[:10]
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)
    size = box.group(1) if box else "0 0 475 209"
    title = alt.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{size}"'
    opening += ' stroke-linejoin="round" stroke-linecap="butt"'
    return f'{opening} role="img" aria-labelledby="{prefix}-alt"><title id="{prefix}-alt">{title}</title>{body}'.strip()


def _style(page: bool) -> Any:
    from cycler import cycler

    ink, grid = (INK_MARK, GRID_MARK) if page else (INK, GRID)
    back = "none" if page else "white"
    colored = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
    return {
        "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
        "svg.hashsalt": "netweight",  # the same plot gives the same bytes
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=SERIES_MARKS if page else SERIES),
        "grid.color": grid,
        "grid.linewidth": 0.7,
        "legend.frameon": False,
        "figure.facecolor": back,
        "axes.facecolor": back,
        **dict.fromkeys(colored, ink),
    }


def _ink() -> str:
    import matplotlib

    return str(matplotlib.rcParams["text.color"])


def _finish(axes: Axes, xlabel: str, ylabel: str, *, log: bool, legend: bool, grid: Literal["x", "y"] = "y") -> None:
    if log:
        axes.set_yscale("log")
    axes.grid(axis=grid)
    axes.tick_params(length=3)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if legend:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, fontsize=8.5)


def _image_cell(cell: Axes, image: Any) -> None:
    import numpy as np

    cell.set_xticks([])
    cell.set_yticks([])
    for spine in cell.spines.values():
        spine.set_visible(False)
    if image is None:
        return
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim != 2 and (pixels.ndim != 3 or pixels.shape[2] != 3):
        raise UsageError(f"An image has shape {pixels.shape};", cure="give (height, width) or (height, width, 3).")
    top = 255 if pixels.dtype == np.uint8 else 1
    cell.imshow(np.clip(pixels, 0, top), cmap="gray", vmin=0, vmax=top, interpolation="nearest")
