"""Figures of reports: small plot functions that return inline SVG or PNG in one look.

The SVG takes its colors from CSS variables of the page (`--ink`, `--grid`, `--series-1` …) and falls back to fixed
colors outside of one, so the same figure suits light mode, dark mode and print. matplotlib belongs to the `evidence`
extra and is imported when a figure is drawn.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from netweight.core.lazy import extra
from netweight.errors import MissingExtra, UsageError
from netweight.report.finding import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

SERIES = ("#2f6f9f", "#c2571a", "#3d8159", "#8a4f9e", "#a0782c", "#5b6472")
"""Colors of the data series in files outside a report; a report's style sheet sets its own for light and dark."""
# For the names of an image grid: letters per inch, and letters in a line of a row's name.
_LETTERS, _NAME = 13, 20
INK, GRID = "#24292f", "#d5d9de"
INK_MARK, GRID_MARK = "#010101", "#020202"
SERIES_MARKS = tuple(f"#03030{i}" for i in range(1, len(SERIES) + 1))
# Colors that matplotlib is told to draw with for a page, and what stands for them in the SVG.
_MARKS = {
    INK_MARK: f"var(--ink, {INK})",
    GRID_MARK: f"var(--grid, {GRID})",
    **{mark: f"var(--series-{i}, {SERIES[i - 1]})" for i, mark in enumerate(SERIES_MARKS, start=1)},
}


def missing_for_figures() -> str:
    """Return the names of libraries that reports need and that are not installed; empty if all are there."""
    return " and ".join(name for name in ("matplotlib", "scipy") if importlib.util.find_spec(name) is None)


def check_figures() -> None:
    """Refuse to begin what would end in a report that cannot be drawn."""
    if missing := missing_for_figures():
        raise MissingExtra(
            f"The report needs {missing}, which is not installed.", cure='Run: pip install "netweight[evidence]"'
        )


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
    errors: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """Draw bars side by side, one group of bars per label."""
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
        _finish(axes, xlabel, ylabel, log=False, legend=len(groups) > 1)
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
    """Draw lines, each with an interval band if it has one."""
    # Dashes are a second cue beside color.
    dashes = ("-", "--", "-.", ":")
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
        elif all(isinstance(value, int) for x, _ in series.values() for value in x):
            # Rounds and steps have no fractions.
            axes.locator_params(axis="x", integer=True)
        if ylim is not None:
            # With this margin, a line along the edge is completely visible.
            edge = 0.03 * (ylim[1] - ylim[0])
            axes.set_ylim(ylim[0] - edge, ylim[1] + edge)
        return to_figure(drawing, alt=alt, caption=caption)


def image_grid(
    images: Sequence[Sequence[Any]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    alt: str,
    caption: str = "",
    pixels: int = 72,
) -> Figure:
    """Draw images in a labeled grid: inline SVG with PNGs in it, whose names have the page's colors."""
    # Images: arrays or tensors `(height, width)` or `(height, width, 1 | 3)`, uint8, or floating point within 0 and 1
    # (values outside are clipped); None leaves a cell empty. `pixels` is the height of a cell; small images are
    # enlarged without smoothing, large ones are reduced, so that a page with many of them stays small.
    if len(images) != len(rows) or any(len(row) != len(columns) for row in images):
        raise UsageError(f"The image grid does not have {len(rows)} rows of {len(columns)} images.")
    inch = pixels / 96
    side = _largest_side(sum(image is not None for row in images for image in row), pixels)
    heads = [textwrap.fill(name, max(8, int(inch * _LETTERS))) for name in columns]
    names = [textwrap.fill(name, _NAME) for name in rows]
    longest = max((len(line) for name in names for line in name.splitlines()), default=0)
    lines = max((name.count("\n") + 1 for name in heads), default=1)
    size = (0.1 + longest / _LETTERS + inch * 1.06 * len(columns), 0.1 + 0.15 * lines + inch * 1.06 * len(rows))
    with canvas(len(rows) * len(columns), width=size[0], height=size[1], across=len(columns)) as (drawing, cells):
        for place, cell in enumerate(cells):
            row, column = divmod(place, len(columns))
            _image_cell(cell, images[row][column], side)
            if row == 0:
                cell.set_title(heads[column], fontsize=9, loc="center")
            if column == 0:
                cell.set_ylabel(names[row], fontsize=9, rotation=0, ha="right", va="center")
        return to_figure(drawing, alt=alt, caption=caption)


@contextmanager
def canvas(
    panels: int, *, width: float = 6.0, height: float = 2.8, across: int | None = None, page: bool = True
) -> Iterator[tuple[Canvas, list[Axes]]]:
    """Open a matplotlib figure in the style of reports, for plots that the functions here do not cover."""
    # Sizes are inches; `across` is the number of panels per row. Color with `series_color`. With `page` the page sets
    # the colors and the drawing goes through `to_figure`; without, it has fixed colors on white, for a file.
    with extra("evidence", "Plots need matplotlib"):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as MatplotlibFigure
    across = across or panels
    with matplotlib.rc_context(_style(page)):
        drawing = MatplotlibFigure(figsize=(width, height), layout="constrained")
        # pyplot is avoided: this has no global state and no window, and is safe in threads.
        FigureCanvasAgg(drawing)
        axes = drawing.subplots(-(-panels // across), across, squeeze=False).ravel().tolist()
        yield drawing, axes[:panels]


def to_figure(drawing: Canvas, *, alt: str, caption: str = "") -> Figure:
    """Turn a figure drawn inside `canvas` into inline SVG that follows the colors of the page."""
    file = io.StringIO()
    drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Figure("svg", inline_svg(file.getvalue(), alt), alt, caption)


def inline_svg(document: str, alt: str) -> str:
    """Turn an SVG file of matplotlib into an element for a page: own ids, page colors and fonts, a text alternative."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    # This style would apply to the whole page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
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
    # The unit is rem, so the letters stay readable; on a phone, the figure scrolls.
    wide = float(size.split()[2]) / 12
    opening += f' style="min-width: {wide:.1f}rem; max-width: {1.6 * wide:.1f}rem" stroke-linejoin="round"'
    opening += ' stroke-linecap="butt"'
    return f'{opening} role="img" aria-labelledby="{prefix}-alt"><title id="{prefix}-alt">{title}</title>{body}'.strip()


def _style(page: bool) -> Any:
    from cycler import cycler

    ink, grid = (INK_MARK, GRID_MARK) if page else (INK, GRID)
    back = "none" if page else "white"
    colored = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
    return {
        # Text is stored as text: small, searchable, in the page's font.
        "svg.fonttype": "none",
        # With a fixed salt, the same plot gives the same bytes.
        "svg.hashsalt": "netweight",
        "font.size": 10,
        "axes.titlesize": 10,
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
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, fontsize=9.5)


# The most bytes of a grid's pixels: noise cannot be compressed, and a page has several grids.
_GRID_BYTES = 600_000
_LEAST_SIDE = 64


def _largest_side(images: int, pixels: int) -> int:
    """Return the most pixels on a side of an image in a grid: sharp in its cell, and few enough in sum."""
    return max(_LEAST_SIDE, min(3 * pixels, int(math.sqrt(_GRID_BYTES / (3 * max(1, images))))))


def _image_cell(cell: Axes, image: Any, side: int) -> None:
    import numpy as np
    from PIL import Image

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
    pixels = np.clip(pixels, 0, top)
    if max(pixels.shape[:2]) > side:
        levels = pixels if top == 255 else np.rint(np.nan_to_num(pixels) * 255).astype(np.uint8)
        small = Image.fromarray(levels)
        small.thumbnail((side, side), Image.Resampling.BOX)
        pixels, top = np.asarray(small), 255
    cell.imshow(pixels, cmap="gray", vmin=0, vmax=top, interpolation="none")


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
    """Draw matrices side by side, each with its numbers in its cells and a scale of its own."""
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


def _heat(axes: Axes, values: list[list[float]], digits: int) -> None:
    import numpy as np

    table = np.ma.masked_invalid(np.array(values))
    numbers = table.compressed()
    low, high = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 1.0)
    middle = (low + high) / 2
    mesh = axes.pcolormesh(
        np.arange(table.shape[1] + 1), np.arange(table.shape[0] + 1), table, cmap="viridis", vmin=low, vmax=high
    )
    # An SVG of a report must not contain raster images.
    mesh.set_rasterized(False)
    axes.invert_yaxis()
    for (row, column), value in np.ndenumerate(np.array(values)):
        if math.isfinite(value):
            # Viridis is bright above its middle.
            ink = "#000000" if value > middle else "#ffffff"
            text = f"{value:.{digits}f}" if digits else f"{value:.0f}"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7.5, color=ink)


def histogram(
    groups: Mapping[str, Sequence[float]],
    *,
    alt: str,
    caption: str = "",
    xlabel: str = "",
    ylabel: str = "",
    bins: int = 20,
) -> Figure:
    """Draw how often values occur, one outline per group over common bins."""
    filled = {name: [float(value) for value in values] for name, values in groups.items() if len(values)}
    every = [value for values in filled.values() for value in values]
    if not every or not all(map(math.isfinite, every)):
        raise UsageError(
            "A histogram needs values, all of them finite.", cure="Leave out values that were not measured."
        )
    low, high = min(every), max(every)
    width = (high - low) / bins or 1.0
    edges = [low + place * width for place in range(bins + 1)]
    with canvas(1) as (drawing, (axes,)):
        for index, (name, values) in enumerate(filled.items()):
            axes.hist(
                values, edges, histtype="stepfilled", alpha=0.35, color=series_color(index),
                edgecolor=series_color(index), linewidth=1.6, label=f"{name} (n = {len(values)})",
            )  # fmt: skip
        _finish(axes, xlabel, ylabel, log=False, legend=True)
        return to_figure(drawing, alt=alt, caption=caption)


# Equal times are spread over this share of the distance between rows.
_SPREAD = 0.5


@final
@dataclass(frozen=True)
class TimeRow:
    """The times of one group."""

    name: str
    """Name of the group."""
    events: Sequence[float]
    """Times of the events."""
    censored: Sequence[float]
    """Times at which repetitions ended without the event."""
    median: float
    """Median time of the event; infinite if fewer than half of the events were observed."""
    interval: tuple[float, float]
    """Confidence interval of the median; its ends may be infinite."""


def time_rows(rows: Sequence[TimeRow], *, alt: str, caption: str = "", xlabel: str = "") -> Figure:
    """Draw one row of marks for each group: dots for events, triangles for repetitions that were stopped before one."""
    if not rows or not all(row.events or row.censored for row in rows):
        raise UsageError("A chart of times needs a time in every row.", cure="Leave empty rows out.")
    most = max(time for row in rows for time in (*row.events, *row.censored))
    with canvas(1, height=0.8 + 0.5 * len(rows)) as (drawing, (axes,)):
        for place, row in enumerate(rows):
            _draw(axes, place, row, most * 1.08)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, most * 1.08 or 1)
        _finish(axes, xlabel, "", log=False, legend=False, grid="x")
        return to_figure(drawing, alt=alt, caption=caption)


def _draw(axes: Axes, place: int, row: TimeRow, end: float) -> None:
    color = series_color(place)
    # A single time does not have an interval.
    if len(row.events) + len(row.censored) > 1:
        low, high = (min(value, end) for value in row.interval)
        axes.barh(place, high - low, 0.7, left=low, color=color, alpha=0.18, linewidth=0)
    if math.isfinite(row.median):
        axes.plot([row.median] * 2, [place - 0.35, place + 0.35], color=color, linewidth=1.8)
    for times, marker in ((row.events, "o"), (row.censored, ">")):
        face = color if marker == "o" else "none"
        axes.scatter(times, _beside(times, place), s=16, marker=marker, facecolors=face, edgecolors=color, zorder=3)


def _beside(times: Sequence[float], place: int) -> list[float]:
    """Heights at which equal times do not hide each other."""
    count, drawn = Counter(times), Counter[float]()
    heights = []
    for time in times:
        drawn[time] += 1
        heights.append(place + _SPREAD * (drawn[time] / (count[time] + 1) - 0.5))
    return heights
