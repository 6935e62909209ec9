"""How commands open a space, and what they take for a point of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from netweight.cli.paths import FOLDER

if TYPE_CHECKING:
    from netweight.methods.space.method import WeightSpace
    from netweight.methods.space.points import Points

__all__ = ["opened", "points_of", "space_argument"]

F = TypeVar("F", bound=Callable[..., Any])
_POINT = "a model of the space, a file of points (FILE.json, or FILE.json:NAME), an adapter's file or folder, or mean"


def space_argument(command: F) -> F:
    """Give a command the argument SPACE and the option --bank."""
    bank = click.option("--bank", type=FOLDER, help="The bank that SPACE was fitted to, where it has moved.")
    return click.argument("folder", metavar="SPACE", type=FOLDER)(bank(command))


def opened(folder: Path, bank: Path | None) -> WeightSpace:
    """Open a space's folder, with its bank if there is one."""
    from netweight.methods.space.method import WeightSpace
    from netweight.store.adapter_bank import AdapterBank

    return WeightSpace.open(folder, None if bank is None else AdapterBank.open(bank))


def points_of(space: WeightSpace, text: str) -> Points:
    """Return the points that a text names: a model of the space, a file of points, an adapter, or the mean.

    Raises:
        NameNotFound: It is none of these; the nearest models are named.
        UsageError: The points are of another space.
    """
    from netweight.core.names import nearest_names
    from netweight.errors import NameNotFound
    from netweight.methods.space.directions import scores_digest
    from netweight.methods.space.points import Points, read_points
    from netweight.store.adapter_files import read_adapter

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
