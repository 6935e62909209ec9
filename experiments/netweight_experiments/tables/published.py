"""The papers' numbers as data: one JSON file per table, read and checked.

The files live in `netweight_experiments/published/`; their README says what each field means.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netweight.errors import Unsupported
from netweight_experiments.tables.registry import Column, Row


@dataclass(frozen=True)
class Published:
    """One table as its paper prints it."""

    id: str  # name of the file without ".json", and of the table that measures it
    paper: str  # title of the paper
    arxiv: str  # its number on arXiv
    table: str  # where in the paper ("Table 3(a)")
    title: str  # what the table shows, in our words
    setup: dict[str, Any]  # how the numbers came about: stated, reference_code, inferred, rerun, unknown
    columns: tuple[Column, ...]  # columns with unit and direction
    rows: tuple[Row, ...]  # one value per column; None where the paper has no number
    notes: tuple[str, ...]  # what a reader must know before comparing
    source: str  # where the numbers were taken from


def published_folder() -> Path:
    """Return the folder that holds the files."""
    return Path(__file__).resolve().parents[1] / "published"


def published_ids() -> tuple[str, ...]:
    """Return the ids of all tables with published numbers, sorted by name and number."""
    return tuple(sorted((path.stem for path in published_folder().glob("*.json")), key=_natural))


def published(table_id: str) -> Published | None:
    """Return the published numbers of a table, or None where the paper gives none (most figures)."""
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


def required(table_id: str) -> Published:
    """Return the published numbers of a table that has some."""
    numbers = published(table_id)
    assert numbers is not None
    return numbers


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which table2 comes before table11."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
