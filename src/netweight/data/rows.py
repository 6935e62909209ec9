"""Read rows out of files (JSON Lines, JSON, CSV, Parquet), public data sets and `datasets` objects.

Each row knows where it came from. What is wrong with rows is gathered by `RowErrors`, so that a person sees all of it
at once, and either refuses the source or leaves these rows out, counted and named.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from netweight.core.bounded_json import unique_fields
from netweight.core.digests import digest_bytes
from netweight.core.lazy import library
from netweight.core.names import not_found
from netweight.errors import UsageError

# By default, Python's csv module refuses fields of more than 128 KiB.
_LONGEST_FIELD = 1 << 24
# Separators of files named .csv: the most frequent one in the header counts, and of equally frequent ones the first.
_SEPARATORS = ",;\t|"
# In a header, a separator between quotes does not separate.
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
# Characters in which the header ends, for the search for its separator.
_HEADER = 1 << 16
# Spreadsheets state the separator on a line of its own before the header.
_STATED_SEPARATOR = re.compile(r"sep=(.)\r?\n")
_QUOTES_AFTER_SPACE = re.compile(r'\s+".*"\s*', re.DOTALL)
# Bad rows that a message names; the others are counted.
_NAMED = 5

CURE = "Correct these rows, or leave them out with --unusable drop."
"""Cure for rows that contain no usable text, where the command has that option."""
Unusable = Literal["refuse", "drop"]
"""Treatment of rows that cannot be used: the source is refused, or they are left out, counted and named."""
Report = Callable[[str], object]
"""Receives one sentence about rows that were left out."""
HUB = "hub:"
"""Prefix of the name of a public data set: `hub:NAME`, `hub:NAME:SPLIT` or `hub:NAME:CONFIGURATION:SPLIT`."""


def warn(text: str) -> None:
    """Report rows that were left out as a warning of Python, where no other place was given."""
    warnings.warn(text, stacklevel=2)


@final
@dataclass(frozen=True)
class DataRow:
    """One row."""

    where: str
    """The place within its source, for messages, such as "line 3"."""
    values: Mapping[str, Any]
    """Values by column."""


@final
@dataclass(frozen=True)
class DataRows:
    """Rows of one source; at least one."""

    name: str
    """The source, for messages."""
    rows: Sequence[DataRow]
    """All rows in their order."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns that any row has."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def digest(self) -> str:
        """Return a digest of all values, the same wherever the rows are stored."""
        values = [{name: row.values[name] for name in sorted(row.values)} for row in self.rows]
        return digest_bytes(json.dumps(values, default=str).encode())

    def need(self, *columns: str, by: str = "columns={{{!r}: ...}}") -> None:
        """Check that columns are there; `by` is how a person says which one is meant, "" for no way."""
        for column in columns:
            if column not in self.columns:
                tell = f"Name it with {by.format(column)}." if by else ""
                nested = next((name for name in self.columns if self._nests(name, column)), None)
                if nested is not None:
                    tell = f"The column {nested!r} contains objects with {column!r}: write their fields as columns."
                raise not_found(f"{self.name} has no column {column!r}.", column, self.columns, tell)

    def _nests(self, name: str, column: str) -> bool:
        """Return whether a column of the first row is an object that has a field of this name."""
        value = self.rows[0].values.get(name)
        return isinstance(value, Mapping) and column in value


@final
@dataclass
class RowErrors:
    """Errors in the rows of a source."""

    name: str
    """The source, for messages."""
    by_row: dict[str, list[str]] = field(default_factory=dict)
    """Errors by the row's place."""

    def add(self, where: str, error: str) -> None:
        """Note what is wrong with a row."""
        errors = self.by_row.setdefault(where, [])
        if error not in errors:
            errors.append(error)

    def refuse(self, cure: str) -> None:
        """Raise if anything was wrong."""
        if not self.by_row:
            return
        count = f"{len(self.by_row)} rows" if len(self.by_row) > 1 else "a row"
        raise UsageError(f"{self.name} has {count} that cannot be used. {self._named()}.", cure=cure)

    def refuse_or_report(self, unusable: Unusable, rows: int, report: Report, *, cure: str = CURE) -> None:
        """Refuse the source, or report the rows that are left out of it; at least one of `rows` must remain.

        Args:
            unusable: Whether the source is refused.
            rows: How many rows the source has.
            report: Receives how many rows are left out, and which.
            cure: What to do about a source that is refused.

        Raises:
            UsageError: Rows cannot be used and are not to be left out, or no row remains.
        """
        if unusable == "refuse" or len(self.by_row) >= rows:
            self.refuse(cure if unusable == "refuse" else "Correct these rows: no other row remains.")
        elif self.by_row:
            report(f"{self.name}: {len(self.by_row)} of {rows} rows were left out. {self._named()}.")

    def _named(self) -> str:
        """The first bad rows with what is wrong, and how many more there are."""
        named = "; ".join(f"{where}: {', '.join(errors)}" for where, errors in list(self.by_row.items())[:_NAMED])
        return named + (f"; and {len(self.by_row) - _NAMED} more" if len(self.by_row) > _NAMED else "")


def read_rows(source: str | Path | DataRows | Any, *, key: str | None = None) -> DataRows:
    """Read all rows of a source.

    Args:
        source: A file, `hub:NAME` or `hub:NAME:SPLIT`, a `datasets.Dataset`, mappings, or rows that were read before.
        key: A JSON object of objects holds a row for each of its names, which goes into this column; None takes it for
            columns, as pandas writes them.

    Returns:
        The rows, at least one.

    Raises:
        UsageError: There is no such file or set, it cannot be read, or it contains no rows.
    """
    if isinstance(source, DataRows):
        return source
    if isinstance(source, str) and source.startswith(HUB):
        name, rows = source, _of_object(_public_set(source))
    elif isinstance(source, str | Path):
        name, rows = str(source), _of_file(Path(source), key)
    else:
        name, rows = "the data set", _of_object(source)
    records = list(rows)
    if not records:
        raise UsageError(f"{name} contains no rows.", cure="Give at least one.")
    return DataRows(name, records)


def _public_set(source: str) -> Any:
    """Load a set that `datasets` knows, the split "train" where none is named."""
    name, *parts = source.removeprefix(HUB).split(":")
    if len(parts) > 2:
        raise UsageError(
            f"{source} has too many parts.", cure=f"Give {HUB}NAME:SPLIT or {HUB}NAME:CONFIGURATION:SPLIT."
        )
    if not all((name, *parts)):
        raise UsageError(f"{source} does not name a data set.", cure=f"Give {HUB}NAME or {HUB}NAME:SPLIT.")
    configuration, split = (parts[0], parts[1]) if len(parts) == 2 else (None, "".join(parts))
    datasets = library("datasets", "A named data set", "llm")
    try:
        if Path(name).is_dir():
            _refuse_unread_files(Path(name), datasets)
        return datasets.load_dataset(name, configuration or None, split=split or "train")
    except RuntimeError as error:
        # The data set is a program, which newer versions of datasets do not run.
        raise UsageError(
            f"The data set {name!r} cannot be loaded: {error}",
            cure="Give a copy of its rows as a file, such as Parquet.",
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The data set {name!r} cannot be loaded: {str(error).rstrip('.')}.",
            cure=f"Check the network, and the name and the split of the data set: {HUB}NAME:SPLIT. If it has several "
            f"configurations, name one: {HUB}NAME:CONFIGURATION:SPLIT.",
        ) from error
    except datasets.exceptions.DatasetsError as error:
        lines = str(error.__cause__ or error).strip().split("\n")
        reason = " ".join(dict.fromkeys((lines[0], lines[-1]))).rstrip(".:")
        raise UsageError(
            f"The rows of the data set {name!r} cannot be read: {reason}.",
            cure="Correct its files: all of them need the same columns, with values of one kind. Or give one of its "
            "files by its path.",
        ) from error


def _refuse_unread_files(folder: Path, datasets: Any) -> None:
    """Refuse a folder of files of several formats, of which datasets reads the most frequent one and leaves out others.

    A folder whose README.md names configurations says itself which files belong together.
    """
    if datasets.get_dataset_config_names(str(folder)) != ["default"]:
        return
    files = datasets.load_dataset_builder(str(folder)).config.data_files
    read = {Path(file).resolve() for split in files.values() for file in split}
    files_of_rows = (file for file in sorted(folder.rglob("*")) if _ending(file) and file.name not in _ABOUT_SETS)
    others = [file for file in files_of_rows if file.resolve() not in read]
    if read and others:
        raise UsageError(
            f"{folder} contains rows in several formats: {min(read).name} would be read, and {others[0].name} would "
            "not.",
            cure="Give one of the files by its path, or leave files of one format in the folder.",
        )


def _of_object(source: Any) -> Iterator[DataRow]:
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
            raise UsageError(f"Row {number} of the data set is not a mapping but a {type(values).__name__}.")
        yield DataRow(f"row {number}", values)


_PACKED: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress,
}  # fmt: skip


# Files in which datasets keeps what it knows of a set that it saved.
_ABOUT_SETS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def _ending(file: Path) -> str:
    """Return the ending of a file of rows, without that of its packing; "" for other files."""
    name = file.name.lower()
    packed = next((ending for ending in _PACKED if name.endswith(ending)), "")
    ending = next((ending for ending in _ENDINGS if name.removesuffix(packed).endswith(ending)), "")
    return "" if packed and ending == ".parquet" else ending


def _of_file(file: Path, key: str | None) -> Iterator[DataRow]:
    readers: dict[str, Callable[[Path], Iterator[DataRow]]] = {
        ".jsonl": lambda path: _json(path, key, lines=True),
        ".ndjson": lambda path: _json(path, key, lines=True),
        ".json": lambda path: _json(path, key, lines=False),
        ".csv": lambda path: _delimited(path, ","),
        ".tsv": lambda path: _delimited(path, "\t"),
        ".parquet": _parquet,
    }
    if file.is_dir():
        raise UsageError(
            f"{file} is a folder, not a file of rows.",
            cure=f"Give one of its files, or {HUB}{file} for a folder that the library datasets loads.",
        )
    if not file.is_file():
        raise UsageError(f"There is no file {file}.", cure="Check the path.")
    ending = _ending(file)
    if not ending:
        raise UsageError(
            f"{file} has a format that is not supported.",
            cure=f"Use one of {', '.join(_ENDINGS)}; texts may be packed as {', '.join(_PACKED)}.",
        )
    return readers[ending](file)


def read_text(file: Path) -> str:
    """Read a file's text, unpacked, without a mark of byte order."""
    data = file.read_bytes()
    try:
        if unpack := _PACKED.get(file.suffix.lower()):
            data = unpack(data)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise UsageError(f"{file} is not in UTF-8: {error}.", cure="Save it in UTF-8.") from error
        raise UsageError(f"{file} cannot be unpacked: {error}.", cure="Fetch it again.") from error
    if "\0" in text:
        raise UsageError(
            f"{file} contains NUL characters, as text in UTF-16 does that is read as UTF-8.", cure="Save it in UTF-8."
        )
    return text


def _json(file: Path, key: str | None, *, lines: bool) -> Iterator[DataRow]:
    """Read JSON Lines or JSON; the content decides where it contradicts the file's name, as files of both are common.

    Args:
        file: The file.
        key: As of `read_rows`.
        lines: Whether the name says JSON Lines.
    """
    text = read_text(file)
    if _holds_lines(text) if not lines else not text.lstrip().startswith("["):
        yield from _json_lines(text, file)
        return
    values = _parsed(text, str(file))
    if isinstance(values, dict) and key is not None:
        values = [{key: name, **entry} if isinstance(entry, dict) else entry for name, entry in values.items()]
    if isinstance(values, dict) and values and all(isinstance(column, dict) for column in values.values()):
        numbers = dict.fromkeys(number for column in values.values() for number in column)
        values = [{name: column[n] for name, column in values.items() if n in column} for n in numbers]
    if not isinstance(values, list) or not all(isinstance(entry, dict) for entry in values):
        lists = [name for name, value in values.items() if isinstance(value, list)] if isinstance(values, dict) else []
        cure = "Use a list of objects, or JSON Lines."
        if len(lists) == 1:
            cure = f"Write the list under {lists[0]!r} as the whole file."
        raise UsageError(f"{file} is not a list of JSON objects.", cure=cure)
    yield from (DataRow(f"row {number}", entry) for number, entry in enumerate(values))


def _holds_lines(text: str) -> bool:
    """Return whether a text is several JSON objects, each on a line of its own, and no single value."""
    lines = [line for line in text.split("\n", 64)[:64] if line.strip()]
    try:
        return len(lines) > 1 and all(isinstance(json.loads(line), dict) for line in lines[:2])
    except (ValueError, RecursionError):
        return False


def _json_lines(text: str, file: Path) -> Iterator[DataRow]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        values = _parsed(line, f"{file}, line {number},")
        if not isinstance(values, dict):
            raise UsageError(f"{file}, line {number}, is not a JSON object.", cure="Put one object on each line.")
        yield DataRow(f"line {number}", values)


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_fields)
    except RecursionError as error:
        raise UsageError(f"{what} is nested too deeply.", cure="Correct it.") from error
    except ValueError as error:
        cure = "Correct it (JSON has double quotes, no comments, and no comma after the last entry or between lines)."
        raise UsageError(f"{what} is not JSON: {error}.", cure=cure) from error


def _delimited(file: Path, delimiter: str) -> Iterator[DataRow]:
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        whole = read_text(file)
        text = whole.lstrip("\r\n")
        if stated := _STATED_SEPARATOR.match(text):
            delimiter, text = stated[1], text[stated.end() :]
        header = re.split(r"[\r\n]", _QUOTED.sub("", text[:_HEADER]), maxsplit=1)[0]
        # Spreadsheets write the separator of their country under the same ending.
        if delimiter == "," and not stated:
            delimiter = max(_SEPARATORS, key=header.count)
        skipped = whole[: len(whole) - len(text)].count("\n")
        # A space after the separator belongs to it, where the header has one.
        spaced = f"{delimiter} " in header
        lines = io.StringIO(text, newline="")
        reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=spaced, strict=True)
        names = [name.strip() for name in reader.fieldnames or ()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"{file} has two columns {twice!r}.", cure="Rename or remove one of them.")
        reader.fieldnames = names
        for values in reader:
            where = f"line {skipped + reader.line_num}"
            if None in values or None in values.values():
                raise UsageError(
                    f"{file}, {where}, does not have as many fields as the header.",
                    cure="Quote fields that contain a delimiter.",
                )
            if any(_QUOTES_AFTER_SPACE.fullmatch(value) for value in values.values()):
                raise UsageError(
                    f"{file}, {where}, has a space before a quoted field, so that the quotes would belong to the text.",
                    cure="Remove spaces after the separator.",
                )
            yield DataRow(where, values)
    except csv.Error as error:
        raise UsageError(f"{file} is not well-formed: {error}.", cure="Correct it.") from error
    finally:
        csv.field_size_limit(before)


def _parquet(file: Path) -> Iterator[DataRow]:
    parquet = library("pyarrow.parquet", f"Reading {file}", "llm")
    try:
        records = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:
        # The errors of pyarrow are subclasses of these.
        reason = str(error).rstrip(".")
        raise UsageError(f"{file} cannot be read: {reason}.", cure="Fetch or write it again.") from error
    yield from (DataRow(f"row {number}", values) for number, values in enumerate(records))
