"""Prompts and answers as text: rows with prompt, chosen and rejected as TRL names them, and rows with a response.

Text is either a string or a conversation, a list of messages with a role and content, as chat templates take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from netweight.core.names import nearest_names
from netweight.data.rows import Row, RowErrors, Rows, read_rows
from netweight.errors import NameNotFound, UsageError

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


Kind = TypeVar("Kind", TextPair, TextExample)


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


def withhold(texts: Sequence[Kind], names: Iterable[str]) -> tuple[list[Kind], list[Kind]]:
    """Part rows by category, for the question whether a defense reaches harm that it never saw."""
    wanted = list(names)
    known = sorted({name for text in texts for name in text.categories})
    for name in wanted:
        if name not in known:
            near = nearest_names(name, known)
            raise NameNotFound(f"No row has the category {name!r}.", cure=f"The nearest are {near}.")
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
