"""What a text names as points of a space: a model, a file of points, an adapter, the mean. For commands and recipes."""

from __future__ import annotations

from pathlib import Path

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound
from netweight.methods.space.directions import scores_digest
from netweight.methods.space.method import WeightSpace
from netweight.methods.space.points import Points, read_points
from netweight.store.adapter_files import read_adapter

__all__ = ["points_of"]

_POINT = "a model of the space, a file of points (FILE.json, or FILE.json:NAME), an adapter's file or folder, or mean"


def points_of(space: WeightSpace, text: str) -> Points:
    """Return the points that a text names: a model of the space, a file of points, an adapter, or the mean.

    Args:
        space: The space.
        text: The name of one of its models, "mean", FILE.json or FILE.json:NAME, or the path of an adapter, which is
            projected into the space.

    Raises:
        NameNotFound: It is none of these; the nearest models are named.
        UsageError: The points are of another space.
    """
    identity = scores_digest(space.scores)
    if text in space.names:
        row = list(space.names).index(text)
        return Points((text,), space.scores[row : row + 1].float().cpu(), identity)
    if text == "mean":
        return Points((text,), space.scores.new_zeros(1, space.scores.shape[1]).float().cpu(), identity)
    file, _, name = text.rpartition(".json:")
    path = Path(f"{file}.json") if file else Path(text)
    if path.suffix == ".json" and path.is_file():
        points = read_points(path)
        points.check(space.scores)
        return points.only(name) if file else points
    if path.exists():
        scores = space.project(read_adapter(path))
        return Points((path.stem,), scores[None].float().cpu(), identity, {"projected": str(path)})
    near = ", ".join(map(repr, nearest_names(text, space.names)))
    raise NameNotFound(f"{text!r} is no point: give {_POINT}.", cure=f"The nearest models are {near}.")
