"""Rows out of files (JSON Lines, JSON, CSV, Parquet) and `datasets` objects, and the prompts and answers they hold.

Each row knows where it came from. What is wrong with rows is gathered by `RowErrors`, so that a person sees all of it
at once. Rows have prompt, chosen and rejected as TRL names them, or a response; a text is a string or a conversation,
which is a list of messages with a role and content, as chat templates take it.

Rows of memorized pairs have `prompt` and `image`, a file whose path starts at the table's folder, and may have `kind`:
verbatim, or template where only the layout comes back.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, final, get_args

from netweight.core.lazy import library
from netweight.core.names import not_found
from netweight.errors import NameNotFound, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.metrics.copies import Kind
    from netweight.nn.text_to_image import TextToImage

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
                tell = f"Say which with {by.format(column)}." if by else ""
                raise not_found(f"{self.name} has no column {column!r}.", column, self.columns, tell)


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
    parquet = library("pyarrow.parquet", f"Reading {file}", "llm")
    try:
        known = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise UsageError(f"{file} cannot be read: {error}.", cure="Fetch or write it again.") from error
    yield from (Row(f"row {number}", values) for number, values in enumerate(known))


# A string, or messages with "role" and "content".
Text = str | tuple[Mapping[str, str], ...]
_CURE = "Correct these rows, or take them out."


@final
@dataclass(frozen=True)
class TextPair:
    """A prompt with a harmless and a harmful answer."""

    prompt: Text  # what is asked
    chosen: Text  # the harmless answer
    rejected: Text  # the harmful one
    categories: tuple[str, ...] = ()  # may be empty
    source: str = "the pairs"  # where it came from, for messages
    where: str = "a pair"  # the place within


@final
@dataclass(frozen=True)
class TextExample:
    """A prompt with a response."""

    prompt: Text  # what is asked
    response: Text  # the answer
    categories: tuple[str, ...] = ()  # may be empty
    source: str = "the examples"  # where it came from, for messages
    where: str = "an example"  # the place within


_Given = TypeVar("_Given", TextPair, TextExample)


def text_pairs(source: str | Path | Any, *, columns: Mapping[str, str] | None = None) -> list[TextPair]:
    """Read pairs; where there are chosen and rejected alone, what both begin with is the prompt, as TRL has it."""
    rows = read_rows(source)
    names = _columns(("prompt", "chosen", "rejected"), columns)
    implicit = _are_implicit(rows, names)
    rows.need(*list(names.values())[implicit:])
    errors = RowErrors(rows.name)
    found = []
    for row in rows.rows:
        texts = [_text(row, column, errors) for column in list(names.values())[implicit:]]
        prompt, chosen, rejected = _parted(texts, row, errors) if implicit else texts
        if prompt is None or chosen is None or rejected is None:
            continue
        if len({isinstance(side, str) for side in (prompt, chosen, rejected)}) > 1:
            errors.add(row.where, "some of it is a conversation and some is not")
        elif chosen == rejected:
            errors.add(row.where, "both answers are the same")
        found.append(TextPair(prompt, chosen, rejected, categories(row, errors), rows.name, row.where))
    errors.refuse(_CURE)
    return found


def _are_implicit(rows: Rows, names: Mapping[str, str]) -> bool:
    """Whether no column can be the prompt: a misspelled one is not to be taken for none."""
    prompt, *answers = names.values()
    own = {*answers, "category"}
    others = (value for row in rows.rows for name, value in row.values.items() if name not in own)
    return prompt not in rows.columns and not any(isinstance(value, str) for value in others)


def _parted(texts: Sequence[Text | None], row: Row, errors: RowErrors) -> list[Text | None]:
    """Take what both answers begin with for their prompt: letters, or whole messages."""
    chosen, rejected = texts
    if chosen is None or rejected is None or isinstance(chosen, str) != isinstance(rejected, str):
        return [chosen, chosen, rejected]  # the row is refused anyway
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), len(chosen))
    if isinstance(chosen, str) and chosen[:same].endswith(" "):
        same -= 1  # a space belongs to the answer
    if not 0 < same < min(len(chosen), len(rejected)):
        errors.add(row.where, "chosen and rejected do not part after a common prompt")
    return [chosen[:same], chosen[same:], rejected[same:]]


def text_examples(source: str | Path | Any, *, columns: Mapping[str, str] | None = None) -> list[TextExample]:
    """Read prompts with responses."""
    rows = read_rows(source)
    names = _columns(("prompt", "response"), columns)
    rows.need(*names.values())
    errors = RowErrors(rows.name)
    found = []
    for row in rows.rows:
        prompt, response = (_text(row, column, errors) for column in names.values())
        if prompt is None or response is None:
            continue
        if isinstance(prompt, str) != isinstance(response, str):
            errors.add(row.where, "some of it is a conversation and some is not")
        found.append(TextExample(prompt, response, categories(row, errors), rows.name, row.where))
    errors.refuse(_CURE)
    return found


def withhold(texts: Sequence[_Given], names: Iterable[str]) -> tuple[list[_Given], list[_Given]]:
    """Part rows by category, for the question whether a defense reaches harm that it never saw."""
    wanted = list(names)
    known = sorted({name for text in texts for name in text.categories})
    for name in wanted:
        if name not in known:
            raise not_found(f"No row has the category {name!r}.", name, known)
    kept = [text for text in texts if not set(wanted) & set(text.categories)]
    withheld = [text for text in texts if set(wanted) & set(text.categories)]
    if not kept or not withheld:
        raise UsageError(
            f"Withholding {wanted} leaves {len(kept)} rows and withholds {len(withheld)}.",
            cure="Name at least one category, and not all that there are.",
        )
    return kept, withheld


def categories(row: Row, errors: RowErrors) -> tuple[str, ...]:
    """Read a row's column "category": a name, a list of names, or names with true and false as in BeaverTails."""
    value = row.values.get("category")
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping) and all(isinstance(is_so, bool) for is_so in value.values()):
        return tuple(name for name, is_so in value.items() if is_so)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    errors.add(row.where, f"its category is of a kind that is not understood ({type(value).__name__})")
    return ()


def needed_text(rows: Rows, row: Row, column: str, errors: RowErrors) -> str | None:
    """Read a column that must be a string; `rows` is only there to be named."""
    value = _text(row, column, errors)
    if value is not None and not isinstance(value, str):
        errors.add(row.where, f"{column} is a conversation, which {rows.name} should not hold")
        return None
    return value


def _columns(names: tuple[str, ...], given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the column of each part."""
    for part in given or {}:
        if part not in names:
            raise NameNotFound(f"There is no {part!r} to give a column for.", cure=f"There are {', '.join(names)}.")
    return {name: (given or {}).get(name, name) for name in names}


def _text(row: Row, column: str, errors: RowErrors) -> Text | None:
    """Read a string or a conversation; note the error and return None if it is neither, or empty."""
    value = row.values.get(column)
    if value is None:
        errors.add(row.where, f"it has no {column}")
    elif isinstance(value, str):
        if value.strip():
            return value
        errors.add(row.where, f"{column} is empty")
    elif isinstance(value, list | tuple) and all(_is_message(message) for message in value):
        if value and all(message["content"].strip() for message in value):
            return tuple({"role": message["role"], "content": message["content"]} for message in value)
        errors.add(row.where, f"{column} is empty or holds an empty message")
    else:
        errors.add(row.where, f"{column} is neither text nor messages with role and content")
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


# ---- prompts, and tables of the prompts and images that a model is known or suspected to repeat ----------------------


def read_prompts(path: str | Path, *, column: str = "prompt") -> list[str]:
    """Read prompts, each once: the lines of a .txt, or of what `read_rows` takes the first column of those named."""
    path = Path(path)
    if path.suffix == ".txt" and path.is_file():
        found = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    else:
        rows = read_rows(path)
        named = [name.strip() for name in column.split(",")]
        column = next((name for name in named if name in rows.columns), named[0])
        rows.need(column, by="--column")
        errors, found = RowErrors(rows.name), []
        for row in rows.rows:
            value = row.values.get(column)
            if isinstance(value, str) and value.strip():
                found.append(value.strip())
            else:
                errors.add(row.where, "no prompt")
        errors.refuse("Fill them in, or leave the rows out.")
    if not found:
        raise UsageError(f"{path} holds no prompt.", cure="Give at least one.")
    return list(dict.fromkeys(found))


@final
@dataclass(frozen=True, eq=False)
class MemorizedPair:
    """A prompt and its training image."""

    name: str  # the prompt, numbered where it comes several times
    prompt: str
    image: Tensor  # shape `(3, height, width)`, within 0 and 1
    kind: Kind = "verbatim"  # how the image is repeated


def check_pairs(path: str | Path) -> Rows:
    """Read a table and check that every row has a prompt, and an image file that is there; no image is opened."""
    rows = read_rows(path)
    try:
        rows.need("prompt", "image")
    except NameNotFound as error:
        known = ", ".join(dict.fromkeys(name for row in rows.rows for name in row.values))
        raise NameNotFound(error.reason, cure=f"Rename one in the table; it has: {known}.") from None
    errors = RowErrors(rows.name)
    for row in rows.rows:
        for problem in _wrong(row, Path(path).parent):
            errors.add(row.where, problem)
    errors.refuse("Name a prompt and an image file in every row; paths start at the table's folder.")
    return rows


def read_pairs(path: str | Path, size: tuple[int, int]) -> list[MemorizedPair]:
    """Read pairs, at least one."""
    from netweight.data.images.images import decode_splits

    rows, folder = check_pairs(path), Path(path).parent
    named = [(f"{rows.name}, {row.where}", str(folder / row.values["image"])) for row in rows.rows]
    pictures = decode_splits([named], of=rows.name, size=size)[0]
    images = (pictures.float() / 255).expand(-1, 3, -1, -1)
    prompts = [str(row.values["prompt"]) for row in rows.rows]
    kinds = [cast("Kind", row.values.get("kind") or "verbatim") for row in rows.rows]
    return [MemorizedPair(*each) for each in zip(_names(prompts), prompts, images, kinds, strict=True)]


def image_size(model: TextToImage) -> tuple[int, int]:
    """Return height and width of the images that a model makes."""
    import torch

    with torch.no_grad():
        made = model.generate(model.embed([""]), [0], guidance=1.0, steps=1)
    return int(made.shape[2]), int(made.shape[3])


def _wrong(row: Row, folder: Path) -> list[str]:
    """What is wrong with a row."""
    from netweight.metrics.copies import Kind

    prompt, image, kind = (row.values.get(name) for name in ("prompt", "image", "kind"))
    wrong = []
    if not isinstance(prompt, str) or not prompt.strip():
        wrong.append("no prompt")
    if not isinstance(image, str) or not image:
        wrong.append("no image")
    elif not (folder / image).is_file():
        wrong.append(f"there is no file {folder / image}")
    if kind and kind not in get_args(Kind):
        wrong.append(f"kind is {kind!r}, not {' or '.join(get_args(Kind))}")
    return wrong


def _names(prompts: list[str]) -> list[str]:
    counted = [(prompt, prompts[:place].count(prompt)) for place, prompt in enumerate(prompts)]
    return [prompt if not before else f"{prompt} ({before + 1})" for prompt, before in counted]


def image_files(*tables: Path) -> list[Path]:
    """The images that tables name: another content of them is another step."""
    return [table.parent / str(row.values["image"]) for table in tables for row in check_pairs(table).rows]
