"""The page of a view: one self-contained HTML file, its images as sprite sheets, its script from this folder."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from netweight.core.files import whole_file
from netweight.errors import UsageError
from netweight.methods.space.points import POINTS_VERSION
from netweight.methods.space.view.content import (
    AdapterMap,
    DirectionPlane,
    Neighbors,
    Samples,
    SliderSpace,
    Traversal,
    View,
)
from netweight.metrics.images import png_bytes
from netweight.report.page import page_template
from netweight.report.report import MAX_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HERE = "netweight.methods.space.view"
_SMALL = 96  # pixels: images below are enlarged without smoothing, so that their pixels can be seen
_HIGH, _COLUMN = 48, 20  # pixels of a drawing of traces: its height, and the width of one position
_NAMED = 2  # traces that have a color and a name; the others are thin
_KINDS = {
    "direction": ("Directions", "Found from labels: each changes one attribute, as far as the models allow."),
    "component": ("Principal components", "Where models differ most; nobody named what they change."),
}


def write_view(view: View, path: Path, *, overwrite: bool = False) -> Path:
    """Write the page of a view."""
    page = render_view(view).encode()
    if len(page) > MAX_BYTES:
        raise UsageError(
            f"The page would have {len(page) / 2**20:.1f} MB, more than {MAX_BYTES / 2**20:.0f} MB: {_largest(view)}.",
            cure="Show fewer adapters, strengths, noises or samples, or generate smaller images.",
        )
    with whole_file(path, overwrite=overwrite) as file:
        file.write(page)
    return path


def render_view(view: View) -> str:
    """Return the page of a view as HTML."""
    script = resources.files(_HERE).joinpath("script.js").read_text(encoding="utf-8")
    groups = _groups(view.traversals)
    planes = [{**_stage(plane), "traces": None} for plane in view.planes]
    stages = [card for group in groups for card in group["cards"]] + planes
    for number, card in enumerate(stages):
        card["number"] = number
    height, width = view.traversals[0].images.shape[-3:-1]
    data = {
        "stages": [card.pop("data") for card in stages],
        "map": None if view.points is None else _map_data(view.points),
        "samples": None if view.samples is None else _sample_data(view.samples),
        "size": [height, width],
        "gap": _gap(width),
        "together": None if view.sliders is None else _together(view.sliders),
    }
    return page_template(_HERE, "template.html").render(
        view=view,
        own_style=Markup(resources.files(_HERE).joinpath("style.css").read_text(encoding="utf-8")),  # our own file
        script=Markup(script),  # our own file
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        groups=groups,
        planes=planes,
        map=None if view.points is None else _map(view.points),
        samples=None if view.samples is None else _samples(view.samples, view.points),
        data=data,
        smooth=max(height, width) >= _SMALL,
    )


def _together(sliders: SliderSpace) -> dict[str, Any]:
    """A file of one point but for its scores, and what makes these."""
    return {
        "record": {"version": POINTS_VERSION, "points": {"names": ["page"], "space": sliders.digest}},
        "start": _rounded(np.array([sliders.start]), 7)[0],
        "vectors": {name: _rounded(np.array([vector]), 7)[0] for name, vector in sliders.vectors.items()},
    }


def _groups(traversals: Sequence[Traversal]) -> list[dict[str, Any]]:
    groups, scale = [], scale_of(traversals)
    for kind, (title, line) in _KINDS.items():
        cards = [{**_stage(each), "traces": traces(each, scale)} for each in traversals if each.kind == kind]
        if cards:
            groups.append({"title": title, "line": line, "cards": cards})
    return groups


def _stage(shown: Traversal | DirectionPlane) -> dict[str, Any]:
    """A card with one slider or two: its sheet has a column per strength of the first."""
    # Its rows are, noise by noise, the strengths of the second, the highest on top.
    names: tuple[str, ...]
    if isinstance(shown, Traversal):
        names, strengths, images = (shown.name,), [list(shown.strengths)], shown.images[:, None]
    else:
        names, strengths, images = shown.names, [list(shown.strengths), list(shown.others)], shown.images
    columns, rows, noises, height, width = images.shape[:5]
    sheet = images[:, ::-1].transpose(2, 1, 3, 0, 4, 5).reshape(noises * rows * height, columns * width, 3)
    return {
        "names": names,
        "note": shown.note,
        "sheet": _data_uri(sheet),
        "width": columns * width,
        "height": noises * rows * height,
        "columns": columns,
        "rows": rows,
        "noises": noises,
        "look": (noises * width + (noises - 1) * _gap(width), height),
        "ratio": f"{columns * width} / {rows * height}",
        "alt": _stage_alt(names, strengths, noises),
        "sliders": [
            {"name": name, "last": len(each) - 1, "start": int(np.abs(np.array(each)).argmin())}
            for name, each in zip(names, strengths, strict=True)
        ],
        "ticks": [_tick(each) if columns <= 7 or each == int(each) else "" for each in strengths[0]],
        "data": {
            "columns": columns,
            "rows": rows,
            "noises": noises,
            "names": names,
            "strengths": strengths,
            "readings": _readings(shown),
        },
    }


def _readings(shown: Traversal | DirectionPlane) -> dict[str, list[float]]:
    readings = shown.readings if isinstance(shown, Traversal) else {}
    return {name: [round(float(value), 3) for value in values] for name, values in readings.items()}


def _stage_alt(names: Sequence[str], strengths: Sequence[Sequence[float]], noises: int) -> str:
    across = f"{names[0]} from {_tick(strengths[0][0])} to {_tick(strengths[0][-1])} standard deviations, left to right"
    down = ""
    if len(names) > 1:
        down = f"; {names[1]} from {_tick(strengths[1][-1])} to {_tick(strengths[1][0])}, top to bottom"
    return f"Painted pictures of {across}{down}; {noises} {'noise' if noises == 1 else 'noises'}, one below the other."


def _gap(width: int) -> int:
    """Empty pixels between two pictures side by side."""
    return max(1, round(width / 16))


def _tick(strength: float) -> str:
    return f"{strength:+.3g}".replace("-", "\u2212") if strength else "0"


def _map(points: AdapterMap) -> dict[str, Any]:
    n, height, width = points.thumbnails.shape[:3]
    across = math.ceil(math.sqrt(n))
    filled = np.zeros((-(-n // across) * across, height, width, 3), np.uint8)
    filled[:n] = points.thumbnails
    sheet = filled.reshape(-1, across, height, width, 3).transpose(0, 2, 1, 3, 4).reshape(-1, across * width, 3)
    return {"sheet": _data_uri(sheet), "across": across}


def _map_data(points: AdapterMap) -> dict[str, Any]:
    return {
        "names": list(points.names),
        "axes": list(points.axes),
        "coordinates": _rounded(points.coordinates, 4),
        "labels": {name: [_plain(each) for each in values] for name, values in points.labels.items()},
        "neighbors": _neighbor_data(points.neighbors),
        "across": math.ceil(math.sqrt(len(points.names))),
    }


def _samples(samples: Samples, points: AdapterMap | None) -> list[dict[str, Any]]:
    tiles = []
    for number, images in enumerate(samples.images):
        row = images.transpose(1, 0, 2, 3).reshape(images.shape[1], -1, 3)
        tile: dict[str, Any] = {"image": _data_uri(row), "width": row.shape[1], "height": row.shape[0], "near": []}
        if samples.neighbors is not None and points is not None:
            numbers, similarities = samples.neighbors.numbers[number], samples.neighbors.similarities[number]
            tile["near"] = [
                {"name": points.names[each], "similarity": f"{value:.2f}".replace("-", "\u2212")}
                for each, value in zip(numbers, similarities, strict=True)
            ]
        tiles.append(tile)
    return tiles


def _sample_data(samples: Samples) -> dict[str, Any]:
    coordinates = None if samples.coordinates is None else _rounded(samples.coordinates, 4)
    return {"count": len(samples.images), "coordinates": coordinates, "neighbors": _neighbor_data(samples.neighbors)}


def _neighbor_data(neighbors: Neighbors | None) -> dict[str, Any] | None:
    if neighbors is None:
        return None
    return {
        "numbers": neighbors.numbers.tolist(),
        "similarities": _rounded(neighbors.similarities, 3),
        "measure": neighbors.measure,
    }


def _rounded(values: NDArray[np.float64], digits: int) -> list[list[float]]:
    """Numbers rounded to significant digits, to keep the page small."""
    return [[float(f"{each:.{digits}g}") for each in row] for row in values.tolist()]


def _plain(value: Any) -> Any:
    """A label as JSON has it; numpy's numbers are none to it."""
    return value.item() if isinstance(value, np.generic) else value


def _data_uri(pixels: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(png_bytes(np.ascontiguousarray(pixels))).decode()


def _largest(view: View) -> str:
    """Sizes of the parts of a page, for the message that it is too large."""
    sizes = {
        f"{len(view.traversals)} traversals": sum(len(_stage(each)["sheet"]) for each in view.traversals),
        f"{len(view.planes)} planes": sum(len(_stage(each)["sheet"]) for each in view.planes),
    }
    if view.points is not None:
        sizes[f"{len(view.points.names)} thumbnails"] = len(_map(view.points)["sheet"])
    if view.samples is not None:
        tiles = _samples(view.samples, None)
        sizes[f"{len(tiles)} samples"] = sum(len(each["image"]) for each in tiles)
    return ", ".join(f"{name} take {size / 2**20:.1f} MB" for name, size in sizes.items() if size)


def scale_of(traversals: Sequence[Traversal]) -> tuple[float, float]:
    """Return the least and the largest change of any reading, against the position nearest to 0."""
    # `traversals`: at least one
    changes = [change for each in traversals for values in _changes(each).values() for change in values]
    return min(changes, default=0.0), max(changes, default=0.0)


def traces(traversal: Traversal, scale: tuple[float, float]) -> dict[str, Any] | None:
    """Return lines for the page, or None where nothing was measured."""
    # Returns: `lines`, the thin ones first: `points` of a polyline, its `place` among the named ones (0 is the
    # attribute that the slider is called after, or the one that changes most; None for the others) and `name`; `named`,
    # in order; the `width` and `height` of the drawing, the height `zero` of no change, and `alt`, all of it in words.
    changes = _changes(traversal)
    if not changes:
        return None
    low, high = scale
    spread = (high - low) or 1.0

    def height(change: float) -> float:
        return round(2 + (_HIGH - 4) * (high - change) / spread, 1)

    order = sorted(changes, key=lambda name: (name != traversal.name, -np.ptp(changes[name])))
    lines = [
        {
            "points": " ".join(f"{_COLUMN * (i + 0.5):g},{height(value)}" for i, value in enumerate(changes[name])),
            "place": place if place < _NAMED else None,
            "name": name,
        }
        for place, name in enumerate(order)
    ]
    words = "; ".join(f"{name} {changes[name][0]:+.2f} to {changes[name][-1]:+.2f}" for name in order)
    return {
        "lines": lines[::-1],
        "named": order[:_NAMED],
        "width": _COLUMN * len(traversal.strengths),
        "height": _HIGH,
        "zero": height(0.0),
        "alt": f"Measured in the pictures, first to last position, against 0: {words}.".replace("-", "\u2212"),
    }


def _changes(traversal: Traversal) -> dict[str, list[float]]:
    start = int(np.abs(np.array(traversal.strengths)).argmin())
    return {name: [value - values[start] for value in values] for name, values in traversal.readings.items()}
