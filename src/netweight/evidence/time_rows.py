"""A picture of times that were not all seen to their end: one row of marks per group, with median and interval.

Beside a survival curve it shows every single repetition, and which of them were stopped before anything happened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from netweight.errors import UsageError
from netweight.report.finding import Figure
from netweight.report.plots import canvas, series_color, to_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["TimeRow", "time_rows"]

_SPREAD = 0.5  # of the distance between rows, over which equal times are set beside each other


@final
@dataclass(frozen=True)
class TimeRow:
    """The times of one group.

    Attributes:
        name: Of the group.
        happened: Times of events.
        stopped: Times at which repetitions ended without one.
        median: Of the time; infinite where fewer than half were seen.
        interval: Of the median; ends may be infinite.
    """

    name: str
    happened: Sequence[float]
    stopped: Sequence[float]
    median: float
    interval: tuple[float, float]


def time_rows(rows: Sequence[TimeRow], *, alt: str, caption: str = "", xlabel: str = "") -> Figure:
    """Draw one row of marks for each group: dots for events, triangles for repetitions that were stopped before one.

    Args:
        rows: At least one, each with a time.
        alt: Text alternative.
        caption: Line below the figure.
        xlabel: Name and unit of the axis.

    Raises:
        UsageError: There is no row, or one has no time.
        MissingExtra: matplotlib is not installed.
    """
    if not rows or not all(row.happened or row.stopped for row in rows):
        raise UsageError("A picture of times needs a time in every row.", cure="Leave empty rows out.")
    most = max(time for row in rows for time in (*row.happened, *row.stopped))
    with canvas(1, height=0.8 + 0.5 * len(rows)) as (drawing, (axes,)):
        for place, row in enumerate(rows):
            _draw(axes, place, row, most * 1.08)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, most * 1.08 or 1)
        axes.grid(axis="x")
        axes.tick_params(length=3)
        axes.set_xlabel(xlabel)
        return to_figure(drawing, alt=alt, caption=caption)


def _draw(axes: Axes, place: int, row: TimeRow, end: float) -> None:
    color = series_color(place)
    low, high = (min(value, end) for value in row.interval)
    axes.barh(place, high - low, 0.7, left=low, color=color, alpha=0.18, linewidth=0)
    if math.isfinite(row.median):
        axes.plot([row.median] * 2, [place - 0.35, place + 0.35], color=color, linewidth=1.8)
    for times, marker in ((row.happened, "o"), (row.stopped, ">")):
        face = color if marker == "o" else "none"
        axes.scatter(times, _beside(times, place), s=16, marker=marker, facecolors=face, edgecolors=color, zorder=3)


def _beside(times: Sequence[float], place: int) -> list[float]:
    """Heights at which equal times do not hide each other."""
    count, seen = Counter(times), Counter[float]()
    heights = []
    for time in times:
        seen[time] += 1
        heights.append(place + _SPREAD * (seen[time] / (count[time] + 1) - 0.5))
    return heights
