"""Prompts from files: plain text with one per line, or a named column of CSV or of JSON lines."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError

_KINDS = {".csv": ",", ".tsv": "\t"}


def read_prompts(path: str | Path, *, column: str = "prompt") -> list[str]:
    """Read prompts."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The prompts in {path} cannot be read: {error}.", cure="Give a text file in UTF-8.") from None
    if path.suffix == ".txt":
        found = [line.strip() for line in text.splitlines() if line.strip()]
    elif path.suffix in _KINDS:
        found = _from_table(path, text, column)
    elif path.suffix == ".jsonl":
        found = _from_lines(path, text, column)
    else:
        raise UsageError(f"{path} is no file of prompts.", cure="Give one that ends in .txt, .csv, .tsv or .jsonl.")
    if not found:
        raise UsageError(f"{path} holds no prompt.", cure="Give at least one.")
    return list(dict.fromkeys(found))


def _from_table(path: Path, text: str, column: str) -> list[str]:
    first = text.partition("\n")[0]
    separator = ";" if path.suffix == ".csv" and first.count(";") > first.count(",") else _KINDS[path.suffix]
    csv.field_size_limit(1 << 24)  # lists of neurons may be long
    rows = csv.DictReader(text.splitlines(keepends=True), delimiter=separator)
    _check_column(path, column, list(rows.fieldnames or ()))
    return [_prompt(path, row[column], number) for number, row in enumerate(rows, start=2)]


def _from_lines(path: Path, text: str, column: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UsageError(f"Line {number} of {path} is not a JSON object.", cure="Write one object per line.")
        _check_column(path, column, list(row))
        found.append(_prompt(path, row[column], number))
    return found


def _check_column(path: Path, column: str, columns: list[str]) -> None:
    if column not in columns:
        near = ", ".join(map(repr, nearest_names(column, columns))) or "none: there is no column"
        raise NameNotFound(f"{path} has no column {column!r}.", cure=f"Name one with --column; the nearest are {near}.")


def _prompt(path: Path, value: object, number: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"Line {number} of {path} has no prompt.", cure="Fill it in, or leave the line out.")
    return value.strip()
