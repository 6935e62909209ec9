"""The page of a space: what it shows, as plain arrays; one self-contained HTML file, its images as sprite sheets.

    page = View("Faces", traversals=[Traversal("beard", "direction", (-1, 0, 1), images)], points=points)
    write_view(page, Path("faces.html"))

Whoever generates the images hands them over here, or a `LivePipeline`, with which the page generates those of its
sliders itself. Everything is checked when it is made. Scripts and style are files of this folder.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import numpy as np
from markupsafe import Markup

from netweight.core import quantities
from netweight.core.atomic_writes import whole_file
from netweight.errors import UsageError
from netweight.methods.space.points import POINTS_VERSION
from netweight.metrics.images import png_bytes
from netweight.report.page import page_template

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Images: TypeAlias = NDArray[np.uint8]

_NUMBER = (int, float, np.number, np.bool_)


@final
@dataclass(frozen=True, eq=False)
class Traversal:
    """A walk along one direction or component through a start point."""

    name: str
    """Name of the slider."""
    kind: Literal["direction", "component"]
    """"direction" if it was found from labels, "component" if it is a principal one."""
    strengths: Sequence[float]
    """Standard deviations of the training models along it, ascending, at least two."""
    images: Images | None
    """Shape `(strengths, noises, height, width, 3)`, uint8: the same noises at every strength. None on a live page."""
    note: str = ""
    """A line below the name, such as the held-out score or the share of variance."""

    def __post_init__(self) -> None:
        _check_strengths(self.name, self.strengths)
        if self.images is not None:
            _check_images(f"The images of {self.name!r}", self.images, (len(self.strengths), None))


@final
@dataclass(frozen=True, eq=False)
class NearestAdapters:
    """The adapters nearest to each of n points."""

    numbers: NDArray[np.int64]
    """Shape `(n, m)`: numbers of adapters on the map, the nearest first."""
    similarities: NDArray[np.float64]
    """Shape `(n, m)`, finite: how near, larger is nearer."""
    measure: str = "cosine of scores"
    """Name of the similarity, in a few words."""

    def __post_init__(self) -> None:
        if self.numbers.ndim != 2 or self.numbers.shape != self.similarities.shape or self.numbers.dtype.kind != "i":
            raise UsageError(
                f"Indices of nearest adapters with shape {self.numbers.shape} and type {self.numbers.dtype} do not "
                f"fit similarities {self.similarities.shape}.",
                cure="Give whole numbers and similarities of one shape (n, m).",
            )
        _check_finite("A similarity", self.similarities)


@final
@dataclass(frozen=True, eq=False)
class AdapterMap:
    """Positions of the adapters on the map, and facts about each."""

    names: Sequence[str]
    """One per adapter, no two alike."""
    coordinates: NDArray[np.float64]
    """Shape `(n, d)`, d at least 2: what can be put on the axes, such as scores in standard deviations."""
    axes: Sequence[str]
    """Names of the d coordinates."""
    thumbnails: Images
    """Shape `(n, height, width, 3)`, uint8: an image by each adapter."""
    labels: Mapping[str, Sequence[float | str | None]] = field(default_factory=dict)
    """Name → n values, all numbers or all texts (or truth values); None where one is not known."""
    neighbors: NearestAdapters | None = None
    note: str = ""
    """A line above the map, such as which adapters of how many are on it."""

    def __post_init__(self) -> None:
        n, repeated = len(self.names), _repeated(self.names)
        if not n:
            raise UsageError("A map needs at least one adapter.")
        if repeated is not None:
            raise UsageError(f"Two adapters on the map are called {repeated!r}.", cure="Give each a name of its own.")
        _check_coordinates("the map", self.coordinates, (n, len(self.axes)))
        if len(self.axes) < 2:
            raise UsageError("A map needs two axes.", cure="Fit at least two components.")
        _check_images("The thumbnails of the map", self.thumbnails, (n,))
        for name, values in self.labels.items():
            _check_label(name, values, n)
        if self.neighbors is not None:
            _check_neighbors("the map", self.neighbors, n, n)


@final
@dataclass(frozen=True, eq=False)
class Samples:
    """Models drawn from the space, which were not trained."""

    images: Images
    """Shape `(n, noises, height, width, 3)`, uint8."""
    neighbors: NearestAdapters | None = None
    coordinates: NDArray[np.float64] | None = None
    """Shape `(n, d)` as on the map, to show them there; None for not."""
    note: str = ""
    """A line above them, such as how they were drawn."""

    def __post_init__(self) -> None:
        _check_images("The images of samples", self.images, (None, None))


@final
@dataclass(frozen=True)
class SliderSpace:
    """The sliders' own space: what makes a point of their positions."""

    digest: str
    """Digest of the space's scores, the same as in points."""
    start: Sequence[float]
    """Scores where all sliders are at 0, shape `(k,)`."""
    vectors: Mapping[str, Sequence[float]]
    """Slider → scores of one standard deviation along it."""


@final
@dataclass(frozen=True, eq=False)
class LivePipeline:
    """A pipeline and the adapters of a space, with which a page generates images of any point itself."""

    tensors: Mapping[str, NDArray[Any]]
    """Little-endian f2, f4 or i1; "scores" are those of the map's."""
    config: Mapping[str, Any]
    """Configuration of the models for the page's engine."""
    reads: Sequence[str]
    """Names of the attributes that the page's reader measures."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.nbytes for each in self.tensors.values())


@final
@dataclass(frozen=True, eq=False)
class View:
    """A page about a space."""

    title: str
    """Heading of the page."""
    traversals: Sequence[Traversal]
    """At least one; all images of one size."""
    points: AdapterMap | None = None
    """The map of the adapters."""
    samples: Samples | None = None
    """Drawn models; their neighbors need a map."""
    summary: str = ""
    """A sentence or two below the heading."""
    reader: str = ""
    """Name of the reader that measured the attributes, in a few words."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name → what was shown and how: model, collection, prompt, seeds, versions."""
    command: str | None = None
    """The command line that made the page."""
    sliders: SliderSpace | None = None
    """Scores and directions from which the page makes points of all sliders together, for download."""
    painted: str = ""
    """Reason why images of its sliders were generated in advance."""
    live: LivePipeline | None = None
    """Generates images of these points in the page; None if they are added up there."""
    first: Images | None = None
    """Images that the page shows until it has generated some, shape `(noises, height, width, 3)`."""

    def __post_init__(self) -> None:
        if not self.traversals:
            raise UsageError("There is no traversal to show.", cure="Name a direction, or ask for components.")
        repeated = _repeated([each.name for each in self.traversals])
        if repeated is not None:
            raise UsageError(f"Two traversals are called {repeated!r}.", cure="Give each a name of its own.")
        if (self.live is None or self.sliders is None) and any(each.images is None for each in self.traversals):
            raise UsageError("A traversal has no images.", cure="Give them, or a live pipeline and the sliders' space.")
        self._check_sizes()
        if self.samples is not None:
            self._check_samples(self.samples)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of its images."""
        images = self.traversals[0].images if self.live is None else self.live.tensors["noise"]
        assert images is not None  # refused above
        return images.shape[-3], images.shape[-2]

    def _check_sizes(self) -> None:
        sizes = {each.name: each.images.shape[-3:-1] for each in self.traversals if each.images is not None}
        sizes |= {"the live pipeline": self.size} if self.live is not None else {}
        sizes |= {"the samples": self.samples.images.shape[-3:-1]} if self.samples is not None else {}
        sizes |= {"the map": self.points.thumbnails.shape[-3:-1]} if self.points is not None else {}
        first, size = next(iter(sizes.items()))
        for name, other in sizes.items():
            if other != size:
                raise UsageError(
                    f"Images of {name} have {other[1]} × {other[0]} pixels, those of {first} {size[1]} × {size[0]}.",
                    cure="Generate all with one model, in one size.",
                )

    def _check_samples(self, samples: Samples) -> None:
        if self.points is None and (samples.neighbors is not None or samples.coordinates is not None):
            raise UsageError("Samples have neighbors or places on a map, and there is no map.", cure="Give points.")
        if self.points is not None and samples.neighbors is not None:
            _check_neighbors("the samples", samples.neighbors, len(samples.images), len(self.points.names))
        if self.points is not None and samples.coordinates is not None:
            _check_coordinates("the samples", samples.coordinates, (len(samples.images), len(self.points.axes)))


def _check_strengths(name: str, strengths: Sequence[float]) -> None:
    if not all(math.isfinite(each) for each in strengths):
        raise UsageError(f"A strength of {name!r} is NaN or infinite.", cure="Give finite standard deviations.")
    if len(strengths) < 2 or any(a >= b for a, b in itertools.pairwise(strengths)):
        raise UsageError(f"The strengths of {name!r} do not ascend.", cure="Give two or more, from low to high.")


def _check_images(what: str, images: Any, lead: tuple[int | None, ...]) -> None:
    """Lead is what stands before height, width, 3; None for any number above 0."""
    shape: tuple[int, ...] = images.shape if isinstance(images, np.ndarray) else ()
    fits = len(shape) == len(lead) + 3 and shape[-1] == 3 and 0 not in shape
    fits = fits and all(want in (None, side) for want, side in zip(lead, shape, strict=False))
    if not fits or images.dtype != np.uint8:
        expected = ", ".join(["any" if each is None else str(each) for each in lead] + ["height", "width", "3"])
        raise UsageError(
            f"{what} have shape {shape} and type {getattr(images, 'dtype', type(images).__name__)}.",
            cure=f"Give a numpy array, uint8, of shape ({expected}), all of one size.",
        )


def _check_coordinates(what: str, coordinates: NDArray[np.float64], shape: tuple[int, int]) -> None:
    if coordinates.shape != shape:
        raise UsageError(f"The coordinates of {what} have shape {coordinates.shape}, not {shape}.")
    _check_finite(f"A coordinate of {what}", coordinates)


def _check_label(name: str, values: Sequence[Any], n: int) -> None:
    present = [each for each in values if each is not None]
    if len(values) != n:
        raise UsageError(f"The label {name!r} has {len(values)} values for {n} adapters.")
    if not (all(isinstance(each, str) for each in present) or all(isinstance(each, _NUMBER) for each in present)):
        raise UsageError(f"The label {name!r} mixes texts and numbers.", cure="Give one kind, and None for unknown.")
    if not all(isinstance(each, str) or math.isfinite(each) for each in present):
        raise UsageError(f"A value of the label {name!r} is NaN or infinite.", cure="Give None for unknown.")


def _check_neighbors(what: str, neighbors: NearestAdapters, n: int, adapters: int) -> None:
    if len(neighbors.numbers) != n or (neighbors.numbers < 0).any() or (neighbors.numbers >= adapters).any():
        raise UsageError(
            f"The nearest adapters of {what} have indices outside 0 to {adapters - 1}."
            if len(neighbors.numbers) == n
            else f"There are neighbors of {len(neighbors.numbers)} points, and {what} has {n}.",
            cure=f"Give {n} rows of numbers of adapters.",
        )


def _check_finite(what: str, values: NDArray[np.float64]) -> None:
    if not np.isfinite(values).all():
        raise UsageError(f"{what} is NaN or infinite.", cure="Leave the model out that it belongs to.")


def _repeated(names: Sequence[str]) -> str | None:
    earlier: set[str] = set()
    return next((name for name in names if name in earlier or earlier.add(name)), None)  # type: ignore[func-returns-value]


_HERE = "netweight.methods.space.view"
# A pipeline inside the page takes up to 5 MB as text; the pictures may take as much again.
MAX_BYTES = 10_000_000
# Images of fewer pixels a side are enlarged without smoothing, so that their pixels can be seen.
_SMALL = 96
_KINDS = {
    "direction": ("Directions", "Found from labels: each changes one attribute, as far as the models allow."),
    "component": ("Principal components", "Directions in which the models differ most. Their effect has no name."),
}


def write_view(view: View, path: Path, *, overwrite: bool = False) -> Path:
    """Write the page of a view."""
    page = render_view(view).encode()
    if len(page) > MAX_BYTES:
        raise UsageError(
            f"The page would have {quantities.size(len(page))}, more than {quantities.size(MAX_BYTES)}: "
            f"{_largest(view)}.",
            cure="Show fewer adapters (--adapters), samples (--samples), noises (--noises) or positions of a slider "
            "(--set strengths=-2,0,2).",
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
        "alt": f"Generated pictures of {across}; {noises} {'noise' if noises == 1 else 'noises'}, one below the other.",
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
        "labels": {name: [_json_label(each) for each in values] for name, values in points.labels.items()},
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


def _json_label(value: Any) -> Any:
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
    return ", ".join(f"{name} take {quantities.size(size)}" for name, size in sizes.items() if size)
