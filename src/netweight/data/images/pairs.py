"""Memorized pairs: rows of a table with the prompt, and the file of the picture, that a model repeats.

A row has `prompt` and `image`, a file whose path starts at the table's folder, and may have `kind`: verbatim, or
template where only the layout comes back. One prompt may have several pictures, and one picture several prompts: each
row is a target of its own. Tables of picture folders, such as `metadata.csv` of the library datasets, name the same
`text` or `caption`, and `file_name` or `path`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final, get_args

from torch import Tensor

from netweight.data.images.pictures import Fit, decode_pictures
from netweight.data.prompts import COLUMNS, prompt_of
from netweight.data.row_layouts import UnusableText
from netweight.data.rows import DataRow, DataRows, RowErrors, read_rows
from netweight.errors import NameNotFound

if TYPE_CHECKING:
    from netweight.metrics.copies import Kind


# Columns of picture files, as tables name them.
_IMAGES = ("image", "file_name", "image_path", "path", "file")
# A message shows this many characters of a path. A longer text is not a path, but an encoded picture.
_SHOWN_PATH = 200


@final
@dataclass(frozen=True, eq=False)
class MemorizedPair:
    """A prompt and one of its training pictures."""

    name: str
    """The prompt, numbered where it comes several times."""
    prompt: str
    """Prompt under which the image was memorized."""
    image: Tensor
    """The picture, float32 of shape `(3, height, width)`, within 0 and 1."""
    kind: Kind = "verbatim"
    """Kind of repetition: the picture as it is, or its layout alone."""


@final
@dataclass(frozen=True)
class Pairs:
    """The pairs of a table."""

    pairs: tuple[MemorizedPair, ...]
    """One for each row."""
    remarks: tuple[str, ...]
    """Decisions of the reader of their pictures."""

    @property
    def prompts(self) -> list[str]:
        """The prompts, each once, in their order."""
        return list(dict.fromkeys(pair.prompt for pair in self.pairs))


def check_pairs(path: str | Path) -> DataRows:
    """Read a table and check that every row has a prompt, and an image file that is there; no image is opened."""
    table, folder = read_rows(path), Path(path).parent
    prompt, image = (_column(table, names) for names in (COLUMNS, _IMAGES))
    errors, rows = RowErrors(table.name), []
    for row in table.rows:
        values, problems = _values(row, prompt, image, folder)
        for problem in problems:
            errors.add(row.where, problem)
        rows.append(DataRow(row.where, values))
    errors.refuse("Name a prompt and an image file in every row; paths start at the table's folder.")
    return DataRows(table.name, rows)


def read_pairs(path: str | Path, size: tuple[int, int], fit: Fit = "crop") -> Pairs:
    """Read pairs, at least one.

    Args:
        path: The table.
        size: Height and width of the pictures that the model makes, to which they are brought.
        fit: How pictures of another shape are brought to that size; models are trained on pictures cut in the middle.

    Returns:
        The pairs; a row that is there twice counts once.

    Raises:
        UsageError: A row lacks a prompt or a file, or a picture cannot be read.
    """
    rows, folder = check_pairs(path), Path(path).parent
    distinct = {(str(row.values["prompt"]), str(row.values["image"])): row for row in rows.rows}
    named = [
        (f"{folder / image} ({rows.name}, {row.where})", str(folder / image)) for (_, image), row in distinct.items()
    ]
    decoded = decode_pictures([named], of=rows.name, size=size, fit=fit)
    images = (decoded.splits[0].float() / 255).expand(-1, 3, -1, -1)
    prompts = [prompt for prompt, _ in distinct]
    kinds = [cast("Kind", row.values.get("kind") or "verbatim") for row in distinct.values()]
    made = zip(_names(prompts), prompts, images, kinds, strict=True)
    return Pairs(tuple(MemorizedPair(*each) for each in made), decoded.remarks)


def _column(table: DataRows, names: Sequence[str]) -> str:
    """Return the first of some columns that a table has."""
    column = next((name for name in names if name in table.columns), None)
    if column is None:
        raise NameNotFound(
            f"{table.name} has no column {names[0]!r}.", cure=f"Rename one in the table; it has: "
            f"{', '.join(table.columns)}. The names that are read are {', '.join(names)}.",
        )  # fmt: skip
    return column


def _values(row: DataRow, prompt: str, image: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the prompt, the image's path and the kind of a row, and what is wrong with them."""
    from netweight.metrics.copies import Kind

    values: dict[str, Any] = {"kind": row.values.get("kind") or None}
    wrong = []
    try:
        values["prompt"] = prompt_of(row.values.get(prompt), prompt)
    except UnusableText as error:
        wrong.append(str(error))
    path = row.values.get(image)
    if isinstance(path, Mapping):
        wrong.append("its image is inside the table itself")
    elif not isinstance(path, str) or not path.strip():
        wrong.append("no image")
    elif (written := _written(path, folder)) is None:
        shown = path if len(path) <= _SHOWN_PATH else f"{path[:_SHOWN_PATH]}… ({len(path)} characters)"
        wrong.append(f"there is no file {folder / shown}")
    else:
        values["image"] = written
    if values["kind"] is not None and values["kind"] not in get_args(Kind):
        wrong.append(f"kind is {values['kind']!r}, not {' or '.join(get_args(Kind))}")
    return values, wrong


def _written(path: str, folder: Path) -> str | None:
    """Return the path of an image as it is written here, or None if there is no such file.

    Tables from Windows separate folders with backslashes.
    """
    for way in (path, path.strip(), path.strip().replace("\\", "/")):
        try:
            if (folder / way).is_file():
                return way
        except OSError:
            # The text is too long for a path.
            return None
    return None


def _names(prompts: Sequence[str]) -> list[str]:
    counted = [(prompt, prompts[:place].count(prompt)) for place, prompt in enumerate(prompts)]
    return [prompt if not before else f"{prompt} ({before + 1})" for prompt, before in counted]


def image_files(*tables: Path) -> list[Path]:
    """Return the images that tables name: another content of them is another step."""
    return [table.parent / str(row.values["image"]) for table in tables for row in check_pairs(table).rows]


def pair_prompts(tables: Iterable[Path]) -> list[str]:
    """Return the prompts of tables of pairs, each once."""
    return list(dict.fromkeys(str(row.values["prompt"]) for table in tables for row in check_pairs(table).rows))
