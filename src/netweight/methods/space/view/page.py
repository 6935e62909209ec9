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
    LivePipeline,
    NearestAdapters,
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
    script, engine = _file("script.js"), _file("engine.js")
    groups = _groups(view.traversals)
    stages = [card for group in groups for card in group["cards"]]
    for number, card in enumerate(stages):
        card["number"] = number
    height, width = view.size
    index, blob = ([], "") if view.live is None else _packed(view.live)
    data = {
        "stages": [card.pop("data") for card in stages],
        "map": None if view.points is None else _map_data(view.points),
        "samples": None if view.samples is None else _sample_data(view.samples),
        "size": [height, width],
        "gap": _gap(width),
        "together": None if view.sliders is None else _together(view.sliders),
        "live": view.live and {"config": view.live.config, "reads": view.live.reads, "index": index},
    }
    return page_template(_HERE, "template.html").render(
        view=view,
        own_style=Markup(_file("style.css")),  # our own file
        script=Markup(script),  # our own file
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        engine=Markup(engine),  # our own file
        weights=blob,
        firsts=[_data_uri(face) for face in view.first]
        if view.first is not None
        else [""] * (len(view.live.tensors["noise"]) if view.live else 1),
        groups=groups,
        map=None if view.points is None else _map(view.points),
        samples=None if view.samples is None else _samples(view.samples, view.points),
        data=data,
        smooth=max(height, width) >= _SMALL,
    )


def _file(name: str) -> str:
    return resources.files(_HERE).joinpath(name).read_text(encoding="utf-8")


def _packed(live: LivePipeline) -> tuple[list[list[Any]], str]:
    """Arrays one behind the other, each at a multiple of four bytes, in base64; and where each is."""
    index, parts, at = [], [], 0
    for name, array in live.tensors.items():
        index.append([name, array.dtype.str[1:], array.shape, at])
        parts += [np.ascontiguousarray(array).tobytes(), bytes(-array.nbytes % 4)]
        at += array.nbytes + -array.nbytes % 4
    return index, base64.b64encode(b"".join(parts)).decode()


def _together(sliders: SliderSpace) -> dict[str, Any]:
    """A file of one point but for its scores, and what makes these."""
    return {
        "record": {"version": POINTS_VERSION, "points": {"names": ["page"], "space": sliders.digest}},
        "start": _rounded(np.array([sliders.start]), 7)[0],
        "vectors": {name: _rounded(np.array([vector]), 7)[0] for name, vector in sliders.vectors.items()},
    }


def _groups(traversals: Sequence[Traversal]) -> list[dict[str, Any]]:
    cards = {kind: [_stage(each) for each in traversals if each.kind == kind] for kind in _KINDS}
    return [{"title": _KINDS[kind][0], "line": _KINDS[kind][1], "cards": each} for kind, each in cards.items() if each]


def _stage(shown: Traversal) -> dict[str, Any]:
    """A card with a slider; its sheet has a column per strength and a row per noise."""
    strengths, images = list(shown.strengths), shown.images
    card: dict[str, Any] = {
        "name": shown.name,
        "note": shown.note,
        "ticks": [_tick(each) if len(strengths) <= 7 or each == int(each) else "" for each in strengths],
        "last": len(strengths) - 1,
        "start": int(np.abs(np.array(strengths)).argmin()),
        "low": strengths[0],
        "high": strengths[-1],
        "data": {"name": shown.name, "strengths": strengths},
    }
    if images is None:
        return card
    columns, noises, height, width = images.shape[:4]
    sheet = images.transpose(1, 2, 0, 3, 4).reshape(noises * height, columns * width, 3)
    card["data"]["noises"] = noises
    across = f"{shown.name} from {_tick(strengths[0])} to {_tick(strengths[-1])} standard deviations, left to right"
    return card | {
        "sheet": _data_uri(sheet),
        "width": columns * width,
        "height": noises * height,
        "columns": columns,
        "noises": noises,
        "look": (noises * width + (noises - 1) * _gap(width), height),
        "ratio": f"{columns * width} / {height}",
        "alt": f"Painted pictures of {across}; {noises} {'noise' if noises == 1 else 'noises'}, one below the other.",
    }


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


def _neighbor_data(neighbors: NearestAdapters | None) -> dict[str, Any] | None:
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
        f"{len(view.traversals)} traversals": sum(len(_stage(each).get("sheet", "")) for each in view.traversals),
        "weights": 0 if view.live is None else view.live.nbytes * 4 // 3,
    }
    if view.points is not None:
        sizes[f"{len(view.points.names)} thumbnails"] = len(_map(view.points)["sheet"])
    if view.samples is not None:
        tiles = _samples(view.samples, None)
        sizes[f"{len(tiles)} samples"] = sum(len(each["image"]) for each in tiles)
    return ", ".join(f"{name} take {size / 2**20:.1f} MB" for name, size in sizes.items() if size)
