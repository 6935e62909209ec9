"""NeuZip's figure 3: perplexity against memory, the paper's numbers beside those measured here.

Points are kinds of weight formats; a line joins those that no other format beats in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from netweight.report.finding import Figure
from netweight.report.plots import canvas, series_color, to_figure
from netweight_experiments.tables.neuzip.inference_runs import BLOCKS, WeightFormat
from netweight_experiments.tables.published import Published

Point = tuple[str, str, float, float]  # kind, label or "", memory, perplexity

# Kind → color, marker, size.
_KINDS = {
    "bf16": (5, "*", 70),
    "bitsandbytes": (1, "s", 26),
    "torchao": (4, "^", 30),
    "NeuZip": (0, "o", 30),
    "NeuZip, other blocks": (0, ".", 22),
    "NeuZip, as the reference code": (3, "x", 24),
    "NeuZip, embeddings too": (2, "D", 24),
}
_PAPER_MODEL = "Llama-3 8B"


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return which points no other point beats: none is as good in both and better in one."""
    return {
        number
        for number, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a < x or b < y) for a, b in points)
    }


def trade_off(
    points: Sequence[tuple[WeightFormat, float, float]], *, name: str, unit: str, paper: Published | None
) -> Figure:
    """Draw the figure: the paper's model on the left, if there are numbers, the measured one on the right."""
    measured = [(_kind(way), _label(way), memory, value) for way, memory, value in points]
    panels = [(f"{_PAPER_MODEL}, published", "GiB", _published(paper))] if paper else []
    panels.append((f"{name}, measured", unit, measured))
    with canvas(len(panels), width=3.9 * len(panels), height=4.3) as (drawing, axes):
        for panel, (title, memory_unit, shown) in zip(axes, panels, strict=True):
            _draw(panel, shown)
            panel.set_title(title)
            panel.set_xlabel(f"memory of the whole model, {memory_unit}")
            panel.set_ylabel("perplexity per word")
        handles: dict[str, Any] = {}
        for panel in axes:
            found, names = panel.get_legend_handles_labels()
            handles.update(zip(names, found, strict=True))
        drawing.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8)
        drawing.draw_without_rendering()  # so that places in pixels hold
        for panel, (_, _, shown) in zip(axes, panels, strict=True):
            _write_labels(panel, shown)
        best = [points[number][0].name for number in sorted(front([(x, y) for _, x, y in points]))]
        alt = f"Perplexity against memory of {name}. No other way beats these in both: {', '.join(best)}."
        return to_figure(drawing, alt=alt, caption="Perplexity against memory; the line joins what nothing else beats.")


def _draw(panel: Any, points: Sequence[Point]) -> None:
    from matplotlib import ticker

    chosen = front([(x, y) for *_, x, y in points])
    line = sorted((points[number][2], points[number][3]) for number in chosen)
    panel.plot(*zip(*line, strict=True), color=series_color(5), linewidth=0.9, alpha=0.6, zorder=1)
    for kind, (color, marker, size) in _KINDS.items():
        own = [(x, y) for found, _, x, y in points if found == kind]
        if own:
            xs, ys = zip(*own, strict=True)
            panel.scatter(xs, ys, s=size, color=series_color(color), marker=marker, label=kind, zorder=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_minor_locator(ticker.NullLocator())
    panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    panel.grid(axis="y")
    panel.margins(x=0.2, y=0.12)


def _write_labels(panel: Any, points: Sequence[Point]) -> None:
    """Put each label at the first of some places around its point where it covers no point, line or other label."""
    from matplotlib.text import Text

    renderer = panel.figure.canvas.get_renderer()
    taken = [panel.transData.transform((x, y)) for *_, x, y in points]
    corners = [panel.transData.transform(place) for place in zip(*panel.lines[0].get_data(), strict=True)]
    for left, right in itertools.pairwise(corners):
        taken += [left + (right - left) * step / 40 for step in range(1, 40)]
    boxes: list[Any] = []
    for _, label, x, y in sorted(points, key=lambda point: (point[0] != "NeuZip", point[2])):
        if not label:
            continue
        for dx, dy, ha, va in _PLACES:
            text = panel.annotate(
                label, (x, y), (dx, dy), textcoords="offset points", fontsize=7, ha=ha, va=va, zorder=3,
                arrowprops=_LEADER if max(abs(dx), abs(dy)) > 6 else None,
            )  # fmt: skip
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the leader, which begins at the point
            point = panel.transData.transform((x, y))
            leader = [point + (box.get_points().mean(0) - point) * step / 10 for step in range(10)]
            if _is_free(box, leader, boxes, taken, panel.bbox):
                break
            text.remove()
        else:
            continue  # crowded: the table has the numbers
        boxes.append(box)


def _is_free(box: Any, leader: Sequence[Any], boxes: Sequence[Any], taken: Sequence[Any], panel: Any) -> bool:
    """Whether a label at `box` lies within the panel and meets neither points nor labels, and its leader no label."""
    within = all(panel.contains(*corner) for corner in box.corners())
    crossed = any(other.overlaps(box) or any(other.contains(*at) for at in leader) for other in boxes)
    return within and not crossed and not any(box.padded(_RADIUS).contains(*place) for place in taken)


_LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3, "color": series_color(5)}
_RADIUS = 3.5  # of a marker, in pixels
# Where a label may be put, from its point: beside it first, then farther away with a line to it.
_PLACES = [
    (6, 0, "left", "center"), (-6, 0, "right", "center"), (0, 6, "center", "bottom"), (0, -6, "center", "top"),
    *((x, y, "left" if x > 0 else "right", "bottom" if y > 0 else "top")
      for side, height in ((5, 5), (14, 12)) for y in (height, -height) for x in (side, -side)),
    (26, 30, "left", "bottom"), (-8, 30, "right", "bottom"), (-8, 44, "right", "bottom"),
]  # fmt: skip


def _kind(way: WeightFormat) -> str:
    if way.quantizer:
        return "torchao" if way.name.startswith("torchao") else "bitsandbytes"
    if way.bits is None:
        return "bf16"
    if way.whole:
        return "NeuZip, embeddings too"
    if way.fidelity == "reference":
        return "NeuZip, as the reference code"
    return "NeuZip" if way.block == BLOCKS[-1] or way.bits == 7 else "NeuZip, other blocks"


def _label(way: WeightFormat) -> str:
    """A short label for the points that a reader looks for; none for the sweep."""
    kind = _kind(way)
    if kind == "NeuZip":
        return "lossless" if way.bits == 7 else f"{way.bits}-bit"
    if kind in ("bitsandbytes", "torchao"):
        return way.name.removeprefix("Quant ").removeprefix("torchao ").replace(", groups of ", "/")
    return "bf16" if kind == "bf16" else ""


def _published(paper: Published) -> list[Point]:
    names = [column.name for column in paper.columns]
    at: Mapping[str, int] = {what: names.index(f"{_PAPER_MODEL} {what}") for what in ("memory", "perplexity")}
    points: list[Point] = []
    for row in paper.rows:
        memory, value = row.values[at["memory"]], row.values[at["perplexity"]]
        if memory is None or value is None:
            continue
        kind = "NeuZip" if row.name.startswith("NeuZip") else "bf16" if row.name == "Vanilla" else "bitsandbytes"
        label = row.name.removeprefix("NeuZip ").removeprefix("Quant ").replace("7-bit (lossless)", "lossless")
        points.append((kind, "bf16" if kind == "bf16" else label, float(memory), float(value)))
    return points
