"""What a page about a weight space shows, as plain arrays: traversals, planes, a map of the models, samples.

    page = View("Faces", traversals=[Traversal("beard", "direction", (-1, 0, 1), images)], points=points)
    write_view(page, Path("faces.html"))                # view_page.py

Whoever paints the pictures (`zoo/space_view.py` does so with a pipeline) hands them over here, one for every point that
can be looked at: the page never mixes two pictures into a third. Everything is checked when it is made.
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

from netweight.core.files import whole_file
from netweight.errors import UsageError
from netweight.metrics.images import png_bytes
from netweight.report.page import page_template
from netweight.report.report import MAX_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray


if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pictures: TypeAlias = NDArray[np.uint8]


_NUMBER = (int, float, np.number, np.bool_)


@final
@dataclass(frozen=True, eq=False)
class Traversal:
    """A walk along one direction or component through a start point, painted at every step.

    Attributes:
        name: What the slider is called.
        kind: "direction" if it was found from labels, "component" if it is a principal one.
        strengths: Standard deviations of the training models along it, ascending, at least two.
        images: Shape `(strengths, noises, height, width, 3)`, uint8: the same noises at every strength.
        note: A line below the name, such as the held-out score or the share of variance.
        readings: Attribute → what was measured in the images, one number per strength (the mean over noises): what the
            walk changes, and what else changes with it.

    Raises:
        UsageError: Strengths or readings are not finite, strengths do not ascend, or something does not fit them.
    """

    name: str
    kind: Literal["direction", "component"]
    strengths: Sequence[float]
    images: Pictures
    note: str = ""
    readings: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what makes no slider."""
        _check_strengths(self.name, self.strengths)
        _check_images(f"The images of {self.name!r}", self.images, (len(self.strengths), None))
        for attribute, values in self.readings.items():
            if len(values) != len(self.strengths) or not all(map(math.isfinite, values)):
                raise UsageError(
                    f"The readings of {attribute!r} along {self.name!r} are no {len(self.strengths)} finite numbers.",
                    cure="Give one per strength.",
                )


@final
@dataclass(frozen=True, eq=False)
class Plane:
    """Two directions or components walked together, painted at every pair of steps.

    Attributes:
        names: What the two sliders are called.
        strengths: Of the first, as in `Traversal`.
        others: Of the second.
        images: Shape `(strengths, others, noises, height, width, 3)`, uint8.
        note: A line below the names.

    Raises:
        UsageError: As for `Traversal`.
    """

    names: tuple[str, str]
    strengths: Sequence[float]
    others: Sequence[float]
    images: Pictures
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse what makes no pair of sliders."""
        for name, strengths in zip(self.names, (self.strengths, self.others), strict=True):
            _check_strengths(name, strengths)
        what = f"The images of {self.names[0]!r} with {self.names[1]!r}"
        _check_images(what, self.images, (len(self.strengths), len(self.others), None))


@final
@dataclass(frozen=True, eq=False)
class Neighbors:
    """The adapters nearest to each of n points.

    Attributes:
        numbers: Shape `(n, m)`: numbers of adapters on the map, the nearest first.
        similarities: Shape `(n, m)`, finite: how near, larger is nearer.
        measure: What the similarity is, in a few words.

    Raises:
        UsageError: The two do not fit each other, or a similarity is not finite.
    """

    numbers: NDArray[np.int64]
    similarities: NDArray[np.float64]
    measure: str = "cosine of scores"

    def __post_init__(self) -> None:
        """Refuse neighbors without a similarity each."""
        if self.numbers.ndim != 2 or self.numbers.shape != self.similarities.shape or self.numbers.dtype.kind != "i":
            raise UsageError(
                f"Neighbors {self.numbers.shape} of type {self.numbers.dtype} do not fit similarities "
                f"{self.similarities.shape}.",
                cure="Give whole numbers and similarities of one shape (n, m).",
            )
        _check_finite("A similarity", self.similarities)


@final
@dataclass(frozen=True, eq=False)
class AdapterMap:
    """Where the adapters lie, and what is known of each.

    Attributes:
        names: One per adapter, no two alike.
        coordinates: Shape `(n, d)`, d at least 2: what can be put on the axes, such as scores in standard deviations.
        axes: d names.
        thumbnails: Shape `(n, height, width, 3)`, uint8: a picture painted with each adapter.
        labels: Name → n values, all numbers or all texts (or truth values); None where one is not known.
        neighbors: Of each adapter among the others.
        note: A line above the map, such as which adapters of how many are on it.

    Raises:
        UsageError: Something does not fit, two names are alike, or a number is not finite.
    """

    names: Sequence[str]
    coordinates: NDArray[np.float64]
    axes: Sequence[str]
    thumbnails: Pictures
    labels: Mapping[str, Sequence[float | str | None]] = field(default_factory=dict)
    neighbors: Neighbors | None = None
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse a map that does not fit together."""
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
    """Models drawn from the space, which nobody trained.

    Attributes:
        images: Shape `(n, noises, height, width, 3)`, uint8.
        neighbors: Of each sample among the adapters on the map.
        coordinates: Shape `(n, d)` as on the map, to show them there; None for not.
        note: A line above them, such as how they were drawn.

    Raises:
        UsageError: Something does not fit, or there is none.
    """

    images: Pictures
    neighbors: Neighbors | None = None
    coordinates: NDArray[np.float64] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse images of another shape."""
        _check_images("The images of samples", self.images, (None, None))


@final
@dataclass(frozen=True, eq=False)
class View:
    """A page about a space.

    Attributes:
        title: Heading.
        traversals: At least one; all images of one size.
        planes: Pairs of directions.
        points: The map.
        samples: Drawn models; their neighbors need a map.
        summary: A sentence or two below the heading.
        reader: What took the readings, in a few words.
        facts: Name → what was shown and how: model, collection, prompt, seeds, versions.
        command: The command line that made the page.

    Raises:
        UsageError: There is no traversal, two have one name, images differ in size, or samples do not fit the map.
    """

    title: str
    traversals: Sequence[Traversal]
    planes: Sequence[Plane] = ()
    points: AdapterMap | None = None
    samples: Samples | None = None
    summary: str = ""
    reader: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None

    def __post_init__(self) -> None:
        """Refuse a page without a slider, or whose parts do not fit each other."""
        if not self.traversals:
            raise UsageError("There is no traversal to show.", cure="Name a direction, or ask for components.")
        repeated = _repeated([each.name for each in self.traversals])
        if repeated is not None:
            raise UsageError(f"Two traversals are called {repeated!r}.", cure="Give each a name of its own.")
        self._check_sizes()
        if self.samples is not None:
            self._check_samples(self.samples)

    def _check_sizes(self) -> None:
        sizes = {each.name: each.images.shape[-3:-1] for each in self.traversals}
        sizes |= {" with ".join(each.names): each.images.shape[-3:-1] for each in self.planes}
        sizes |= {"the samples": self.samples.images.shape[-3:-1]} if self.samples is not None else {}
        sizes |= {"the map": self.points.thumbnails.shape[-3:-1]} if self.points is not None else {}
        first, size = next(iter(sizes.items()))
        for name, other in sizes.items():
            if other != size:
                raise UsageError(
                    f"Images of {name} have {other[1]} × {other[0]} pixels, those of {first} {size[1]} × {size[0]}.",
                    cure="Paint all with one model, in one size.",
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
    fits = fits and all(want in (None, found) for want, found in zip(lead, shape, strict=False))
    if not fits or images.dtype != np.uint8:
        wanted = ", ".join(["any" if each is None else str(each) for each in lead] + ["height", "width", "3"])
        raise UsageError(
            f"{what} have shape {shape} and type {getattr(images, 'dtype', type(images).__name__)}.",
            cure=f"Give a numpy array, uint8, of shape ({wanted}), all of one size.",
        )


def _check_coordinates(what: str, coordinates: NDArray[np.float64], shape: tuple[int, int]) -> None:
    if coordinates.shape != shape:
        raise UsageError(f"The coordinates of {what} have shape {coordinates.shape}, not {shape}.")
    _check_finite(f"A coordinate of {what}", coordinates)


def _check_label(name: str, values: Sequence[Any], n: int) -> None:
    known = [each for each in values if each is not None]
    if len(values) != n:
        raise UsageError(f"The label {name!r} has {len(values)} values for {n} adapters.")
    if not (all(isinstance(each, str) for each in known) or all(isinstance(each, _NUMBER) for each in known)):
        raise UsageError(f"The label {name!r} mixes texts and numbers.", cure="Give one kind, and None for unknown.")
    if not all(isinstance(each, str) or math.isfinite(each) for each in known):
        raise UsageError(f"A value of the label {name!r} is NaN or infinite.", cure="Give None for unknown.")


def _check_neighbors(what: str, neighbors: Neighbors, n: int, adapters: int) -> None:
    if len(neighbors.numbers) != n or (neighbors.numbers < 0).any() or (neighbors.numbers >= adapters).any():
        raise UsageError(
            f"Neighbors of {what} are {neighbors.numbers.shape} numbers, some outside 0 to {adapters - 1}."
            if len(neighbors.numbers) == n
            else f"There are neighbors of {len(neighbors.numbers)} points, and {what} has {n}.",
            cure=f"Give {n} rows of numbers of adapters.",
        )


def _check_finite(what: str, values: NDArray[np.float64]) -> None:
    if not np.isfinite(values).all():
        raise UsageError(f"{what} is NaN or infinite.", cure="Leave the model out that it belongs to.")


def _repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


_HIGH, _COLUMN = 48, 20  # of the drawing: its height, and the width of one position
_NAMED = 2  # lines that have a color and a name; the others are thin


def scale_of(traversals: Sequence[Traversal]) -> tuple[float, float]:
    """Return the least and the largest change of any reading, against the position nearest to 0.

    Args:
        traversals: At least one.
    """
    changes = [change for each in traversals for values in _changes(each).values() for change in values]
    return min(changes, default=0.0), max(changes, default=0.0)


def traces(traversal: Traversal, scale: tuple[float, float]) -> dict[str, Any] | None:
    """Return lines for the page, or None where nothing was measured.

    Args:
        traversal: With its readings.
        scale: From `scale_of`.

    Returns:
        `lines`, the thin ones first: `points` of a polyline, its `place` among the named ones (0 is the attribute that
        the slider is called after, or the one that changes most; None for the others) and `name`; `named`, in order;
        the `width` and `height` of the drawing, the height `zero` of no change, and `alt`, all of it in words.
    """
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
    told = "; ".join(f"{name} {changes[name][0]:+.2f} to {changes[name][-1]:+.2f}" for name in order)
    return {
        "lines": lines[::-1],
        "named": order[:_NAMED],
        "width": _COLUMN * len(traversal.strengths),
        "height": _HIGH,
        "zero": height(0.0),
        "alt": f"Measured in the pictures, first to last position, against 0: {told}.".replace("-", "\u2212"),
    }


def _changes(traversal: Traversal) -> dict[str, list[float]]:
    start = int(np.abs(np.array(traversal.strengths)).argmin())
    return {name: [value - values[start] for value in values] for name, values in traversal.readings.items()}


_HERE = "netweight.methods.space"
_SMALL = 96  # pixels: pictures below are enlarged without smoothing, so that their pixels can be seen
_KINDS = {
    "direction": ("Directions", "Found from labels: each changes one attribute, as far as the models allow."),
    "component": ("Principal components", "Where models differ most; nobody named what they change."),
}


def write_view(view: View, path: Path, *, overwrite: bool = False) -> Path:
    """Write the page of a view.

    Args:
        view: What to show.
        path: The HTML file.
        overwrite: Whether one that is there may be replaced.

    Returns:
        The path.

    Raises:
        UsageError: The page would have more than 5 MB, and the message says what takes the room.
        OutputExists: The file exists already.
        OutputFailed: It cannot be written.
    """
    page = render_view(view).encode()
    if len(page) > MAX_BYTES:
        raise UsageError(
            f"The page would have {len(page) / 2**20:.1f} MB, more than {MAX_BYTES / 2**20:.0f} MB: {_largest(view)}.",
            cure="Show fewer adapters, strengths, noises or samples, or paint smaller pictures.",
        )
    with whole_file(path, overwrite=overwrite) as file:
        file.write(page)
    return path


def render_view(view: View) -> str:
    """Return the page of a view as HTML.

    Args:
        view: What is shown.
    """
    script = resources.files(_HERE).joinpath("page_script.js").read_text(encoding="utf-8")
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
    }
    return page_template(_HERE, "page_template.html").render(
        view=view,
        own_style=Markup(resources.files(_HERE).joinpath("page_style.css").read_text(encoding="utf-8")),  # our own file
        script=Markup(script),  # our own file
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        groups=groups,
        planes=planes,
        map=None if view.points is None else _map(view.points),
        samples=None if view.samples is None else _samples(view.samples, view.points),
        data=data,
        smooth=max(height, width) >= _SMALL,
    )


def _groups(traversals: Sequence[Traversal]) -> list[dict[str, Any]]:
    groups, scale = [], scale_of(traversals)
    for kind, (title, line) in _KINDS.items():
        cards = [{**_stage(each), "traces": traces(each, scale)} for each in traversals if each.kind == kind]
        if cards:
            groups.append({"title": title, "line": line, "cards": cards})
    return groups


def _stage(shown: Traversal | Plane) -> dict[str, Any]:
    """A card with one slider or two: its sheet has a column per strength of the first.

    Its rows are, noise by noise, the strengths of the second, the highest on top.
    """
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


def _readings(shown: Traversal | Plane) -> dict[str, list[float]]:
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
    """Numbers with so many significant digits: they are for the eye, and a page has little room."""
    return [[float(f"{each:.{digits}g}") for each in row] for row in values.tolist()]


def _plain(value: Any) -> Any:
    """A label as JSON has it; numpy's numbers are none to it."""
    return value.item() if isinstance(value, np.generic) else value


def _data_uri(pixels: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(png_bytes(np.ascontiguousarray(pixels))).decode()


def _largest(view: View) -> str:
    """What takes the room, so that the reader knows what to leave out."""
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
