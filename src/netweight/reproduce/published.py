"""The papers' numbers as data: one JSON file per table, read and checked.

The files live in `recipes/published/` of the source tree and in `netweight/published/` of an installed package; their
README says what each field means.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from netweight.errors import NetweightError, Unsupported
from netweight.report.finding import Column
from netweight.reproduce.registry import Row

__all__ = ["Published", "published", "published_folder", "published_ids"]


@dataclass(frozen=True)
class Published:
    """One table as its paper prints it.

    Attributes:
        id: Name of the file without ".json", and of the table that measures it.
        paper: Title of the paper.
        arxiv: Its number on arXiv.
        table: Where in the paper ("Table 3(a)").
        title: What the table shows, in our words.
        setup: How the numbers came about: stated, reference_code, inferred, rerun, unknown.
        columns: Columns with unit and direction.
        rows: One value per column; None where the paper has no number.
        notes: What a reader must know before comparing.
        source: Where the numbers were taken from.
    """

    id: str
    paper: str
    arxiv: str
    table: str
    title: str
    setup: dict[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    source: str


@cache
def published_folder() -> Path:
    """Return the folder that holds the files.

    Raises:
        NetweightError: Neither the installed package nor a source tree around it has them.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "published", package.parents[1] / "recipes" / "published"):
        if folder.is_dir():
            return folder
    raise NetweightError("The published numbers were not installed with netweight.", cure="Install it again.")


def published_ids() -> tuple[str, ...]:
    """Return the ids of all tables with published numbers, sorted by name and number."""
    return tuple(sorted((path.stem for path in published_folder().glob("*.json")), key=_natural))


def published(table_id: str) -> Published | None:
    """Return the published numbers of a table, or None where the paper gives none (most figures).

    Args:
        table_id: For example "neuzip-table1".

    Raises:
        Unsupported: The file is there and cannot be read as such a table.
    """
    path = published_folder() / f"{table_id}.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        fields = {name: data[name] for name in ("id", "paper", "arxiv", "table", "title", "setup", "source")}
        columns = tuple(Column(c["name"], unit=c["unit"], better=c["better"]) for c in data["columns"])
        rows = tuple(Row(row["name"], tuple(row["values"])) for row in data["rows"])
        return Published(**fields, columns=columns, rows=rows, notes=tuple(data["notes"]))
    except (ValueError, KeyError, TypeError) as error:
        what = f"{path} is not a table of published numbers: {error!r}."
        raise Unsupported(what, cure="Restore the file.") from error


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which table2 comes before table11."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
