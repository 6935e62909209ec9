"""How commands open a space, and what they take for a point of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from netweight.cli.paths import FOLDER

if TYPE_CHECKING:
    from netweight.methods.space.points import Points
    from netweight.methods.space.space import WeightSpace

F = TypeVar("F", bound=Callable[..., Any])


def space_argument(command: F) -> F:
    """Give a command the argument SPACE and the option --bank."""
    bank = click.option("--bank", type=FOLDER, help="The bank that SPACE was fitted to, where it has moved.")
    return click.argument("folder", metavar="SPACE", type=FOLDER)(bank(command))


def opened(folder: Path, bank: Path | None) -> WeightSpace:
    """Open a space's folder, with its bank if there is one."""
    from netweight.methods.space.space import WeightSpace
    from netweight.store.bank.bank import AdapterBank

    return WeightSpace.open(folder, None if bank is None else AdapterBank.open(bank))


def points_of(space: WeightSpace, text: str) -> Points:
    """Return the points that a text names; see `methods.space.named_points`."""
    from netweight.methods.space.folder import points_of as named

    return named(space, text)
