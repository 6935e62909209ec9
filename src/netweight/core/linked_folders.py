"""The files below a folder, also those behind links, which `Path.rglob` leaves out without a word."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from netweight.errors import UsageError


def files_below(folder: Path, *, without: Collection[str] = ()) -> Iterator[Path]:
    """Yield the files below a folder, also behind links; a link back to a folder around it is not followed.

    Args:
        folder: The folder.
        without: Names of folders that are not entered.

    Raises:
        UsageError: A link leads to nothing, as where a file was not fetched.
    """
    yield from _files(folder, frozenset(without), ())


def _files(folder: Path, without: Collection[str], above: tuple[Path, ...]) -> Iterator[Path]:
    place = folder.resolve()
    if place in above:
        return
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name not in without:
                yield from _files(entry, without, (*above, place))
        else:
            refuse_broken_link(entry)
            if entry.is_file():
                yield entry


def refuse_broken_link(path: Path) -> None:
    """Refuse a link that leads to nothing, unless it is hidden.

    Raises:
        UsageError: The file that it names does not exist.
    """
    if path.is_symlink() and not path.exists() and not path.name.startswith("."):
        raise UsageError(
            f"{path} is a link to {path.readlink()}, which is not there.",
            cure="Fetch the file that it leads to, or remove the link.",
        )
