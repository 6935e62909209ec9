"""Rows out of files (JSON Lines, JSON, CSV, Parquet) and out of `datasets` objects, each knowing where it came from.

What is wrong with rows is gathered by `RowErrors`, so that a person sees all of it at once.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from netweight.core.names import nearest_names
from netweight.errors import MissingExtra, NameNotFound, UsageError

_LONGEST_FIELD = 1 << 24  # Python's csv refuses fields above 128 KiB unless told otherwise
_NAMED = 5  # bad rows that a message names; the others are counted


@final
@dataclass(frozen=True)
class Row:
    """One row."""

    where: str  # for messages: the place within its source, such as "line 3"
    values: Mapping[str, Any]  # by column


@final
@dataclass(frozen=True)
class Rows:
    """Rows of one source; at least one."""

    name: str
    rows: Sequence[Row]  # in their order

    @property
    def columns(self) -> list[str]:
        """Names of the columns that any row has."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def need(self, *columns: str, by: str = "columns={{{!r}: ...}}") -> None:
        """Check that columns are there; `by` is how a person says which one is meant, "" for no way."""
        for column in columns:
            if column not in self.columns:
                near = ", ".join(map(repr, nearest_names(column, self.columns))) or "none: there is no column"
                tell = f"; say which with {by.format(column)}" if by else ""
                raise NameNotFound(f"{self.name} has no column {column!r}.", cure=f"The nearest are {near}{tell}.")


@final
@dataclass
class RowErrors:
    """What is wrong with the rows of a source."""

    name: str
    found: dict[str, list[str]] = field(default_factory=dict)  # what is wrong, by place

    def add(self, where: str, error: str) -> None:
        """Note what is wrong with a row."""
        known = self.found.setdefault(where, [])
        if error not in known:
            known.append(error)

    def refuse(self, cure: str) -> None:
        """Raise if anything was wrong."""
        if not self.found:
            return
        first = list(self.found.items())[:_NAMED]
        named = "; ".join(f"{where}: {', '.join(errors)}" for where, errors in first)
        more = f"; and {len(self.found) - _NAMED} more" if len(self.found) > _NAMED else ""
        count = f"{len(self.found)} rows" if len(self.found) > 1 else "a row"
        raise UsageError(f"{self.name} has {count} that cannot be used. {named}{more}.", cure=cure)


def read_rows(source: str | Path | Any, *, key: str | None = None) -> Rows:
    """Read all rows of a source."""
    # `key`: a JSON object of objects holds a row for each of its names, which goes into this column; None takes it for
    # columns, as pandas writes them
    if isinstance(source, str | Path):
        name, rows = str(source), _of_file(Path(source), key)
    else:
        name, rows = "the data set", _of_object(source)
    found = list(rows)
    if not found:
        raise UsageError(f"{name} holds no rows.", cure="Give at least one.")
    return Rows(name, found)


def _of_object(source: Any) -> Iterator[Row]:
    if isinstance(source, Mapping):
        raise UsageError(
            f"The data set has splits ({', '.join(map(str, source))}).", cure='Give one of them, such as data["train"].'
        )
    if not isinstance(source, Iterable):
        raise UsageError(
            f"Rows cannot be read from a {type(source).__name__}.",
            cure="Give a file, a datasets.Dataset or a list of mappings.",
        )
    for number, values in enumerate(source):
        if not isinstance(values, Mapping):
            raise UsageError(f"Row {number} of the data set is no mapping but a {type(values).__name__}.")
        yield Row(f"row {number}", values)


def _of_file(file: Path, key: str | None) -> Iterator[Row]:
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".jsonl": _json_lines,
        ".jsonl.gz": _json_lines,
        ".jsonl.xz": _json_lines,
        ".json": lambda path: _json(path, key),
        ".csv": lambda path: _delimited(path, ","),
        ".tsv": lambda path: _delimited(path, "\t"),
        ".parquet": _parquet,
    }
    if not file.is_file():
        raise UsageError(f"There is no file {file}.", cure="Check the path.")
    ending = next((ending for ending in readers if file.name.lower().endswith(ending)), None)
    if ending is None:
        raise UsageError(f"{file} is of a kind that is not read here.", cure=f"Use one of {', '.join(readers)}.")
    return readers[ending](file)


def read_text(file: Path) -> str:
    """Read a file's text, unpacked, without a mark of byte order."""
    data = file.read_bytes()
    try:
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        elif file.suffix == ".xz":
            data = lzma.decompress(data)
        return data.decode("utf-8-sig")
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UsageError(f"{file} cannot be unpacked: {error}.", cure="Fetch it again.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not in UTF-8: {error}.", cure="Save it in UTF-8.") from error


def _json_lines(file: Path) -> Iterator[Row]:
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        values = _parsed(line, f"{file}, line {number},")
        if not isinstance(values, dict):
            raise UsageError(f"{file}, line {number}, is no JSON object.", cure="Put one object on each line.")
        yield Row(f"line {number}", values)


def _json(file: Path, key: str | None) -> Iterator[Row]:
    known = _parsed(read_text(file), str(file))
    if isinstance(known, dict) and key is not None:
        known = [{key: name, **values} if isinstance(values, dict) else values for name, values in known.items()]
    if isinstance(known, dict) and known and all(isinstance(column, dict) for column in known.values()):
        numbers = dict.fromkeys(number for column in known.values() for number in column)
        known = [{name: column[n] for name, column in known.items() if n in column} for n in numbers]
    if not isinstance(known, list) or not all(isinstance(values, dict) for values in known):
        raise UsageError(f"{file} is no list of JSON objects.", cure="Use a list of objects, or JSON Lines.")
    yield from (Row(f"row {number}", values) for number, values in enumerate(known))


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{what} is not JSON: {error}.", cure="Correct it.") from error


def _delimited(file: Path, delimiter: str) -> Iterator[Row]:
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        text = read_text(file)
        first = text.partition("\n")[0]
        if delimiter == "," and first.count(";") > first.count(","):
            delimiter = ";"
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        for values in reader:
            where = f"line {reader.line_num}"
            if None in values or None in values.values():
                raise UsageError(
                    f"{file}, {where}, has not as many fields as the header.",
                    cure="Quote fields that hold a delimiter.",
                )
            yield Row(where, values)
    except csv.Error as error:
        raise UsageError(f"{file} is not well-formed: {error}.", cure="Correct it.") from error
    finally:
        csv.field_size_limit(before)


def _parquet(file: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra(
            f"{file} is read by pyarrow, which is not installed.", cure='Run: pip install "netweight[llm]"'
        ) from error
    try:
        known = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise UsageError(f"{file} cannot be read: {error}.", cure="Fetch or write it again.") from error
    yield from (Row(f"row {number}", values) for number, values in enumerate(known))
