"""Read prompts out of files: a line each, or a column of a table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from netweight.data.row_layouts import UnusableText, is_blank, text_of
from netweight.data.rows import RowErrors, read_rows, read_text
from netweight.errors import UsageError

COLUMNS = ("prompt", "caption", "text")
"""Columns of prompts, as tables of pictures name them, the most particular first."""
# The ends of lines in a text file. Captions contain other characters at which Python would split, such as U+2028.
_LINE_END = re.compile(r"\r\n|\r|\n")


def read_prompts(path: str | Path, *, column: str | None = None, distinct: bool = True) -> list[str]:
    """Read prompts: the lines of a text file, or a column of what `read_rows` takes.

    Args:
        path: A `.txt` file with a prompt on each line, or a table.
        column: Names of the column, with commas between; the first that the table has is read. By default `COLUMNS`.
        distinct: Whether a prompt that comes several times is returned once.

    Returns:
        The prompts in their order, at least one.

    Raises:
        UsageError: The file cannot be read, or a row has no prompt.
        NameNotFound: The table has none of the columns.
    """
    path = Path(path)
    if path.name.lower().endswith((".txt", ".txt.gz")) and path.is_file():
        lines = _LINE_END.split(read_text(path))
        prompts = [line.strip() for line in lines if not is_blank(line)]
    else:
        rows = read_rows(path)
        named = COLUMNS if column is None else [name.strip() for name in column.split(",")]
        column = next((name for name in named if name in rows.columns), named[0])
        rows.need(column, by="--column")
        errors, prompts = RowErrors(rows.name), []
        for row in rows.rows:
            try:
                prompts.append(prompt_of(row.values.get(column), column))
            except UnusableText as error:
                errors.add(row.where, str(error))
        errors.refuse("Fill them in, or leave the rows out.")
    if not prompts:
        raise UsageError(f"{path} contains no prompt.", cure="Give at least one.")
    return list(dict.fromkeys(prompts)) if distinct else prompts


def prompt_of(value: Any, column: str) -> str:
    """Return a cell of a table as a prompt, without spaces around it.

    Args:
        value: The cell.
        column: The column's name, for errors.

    Raises:
        UnusableText: The cell is empty, has no visible character, is not text, or is a conversation.
    """
    text = text_of(value, column)
    if not isinstance(text, str):
        raise UnusableText(f"{column} is a conversation, not a prompt")
    return text.strip()
