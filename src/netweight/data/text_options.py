"""Options of every command that reads rows of text: names of columns, long rows, unusable rows, the chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from netweight.core.names import not_found
from netweight.settings import Cli, Settings

if TYPE_CHECKING:
    from netweight.data.rows import DataRows

HUB = "hub:"


def _existing(value: object) -> object:
    """Refuse a file that does not exist, before anything is loaded; public sets are looked up when they are read."""
    named = f"A public set is named {HUB}NAME or {HUB}NAME:SPLIT."
    if not isinstance(value, str | Path):
        raise _refusal(f"{value!r} is neither a path nor the name of a public set. {named}")
    if value == "" or str(value).startswith(HUB):
        return str(value)
    if Path(value).is_dir():
        raise _refusal(f"{value} is a folder. Give a file of rows, or {HUB}{value} for a folder that `datasets` loads.")
    if not Path(value).is_file():
        raise _refusal(f"There is no file {value}. {named}")
    return Path(value)


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError("check", "{message}", {"message": message})


RowSource = Annotated[
    Path | str, BeforeValidator(_existing), WithJsonSchema({"type": "string"}), Cli(metavar="ROWS", type=str)
]
"""A file of rows, a path; or `hub:NAME` or `hub:NAME:SPLIT`, a string, for a set that `datasets` loads.

What reads settings for the files that they name, such as the ledger of recipes, recognizes files by their type."""


class TextOptions(Settings):
    """Options of reading rows of text, the same in every command."""

    columns: Annotated[Mapping[str, str], Cli(metavar="PART=COLUMN")] = Field(
        {},
        description="Column of a part (prompt, response, chosen, rejected) where it has another name, such as "
        "prompt=question; may be given several times.",
    )
    too_long: Literal["refuse", "cut", "drop"] = Field(
        "refuse",
        description="What happens to rows longer than the model's context: refuse the file, cut answers, or drop rows.",
    )
    unusable: Literal["refuse", "drop"] = Field(
        "refuse",
        description="What happens to rows without usable text (missing, empty, refused by the chat template): refuse "
        "the file, or drop them; dropped rows are counted and named.",
    )
    template: Annotated[Mapping[str, str], Cli(metavar="OPTION=VALUE")] = Field(
        {}, description="Option of the chat template, such as enable_thinking=false; may be given several times."
    )

    @property
    def template_options(self) -> dict[str, Any]:
        """Options of the chat template as YAML values: `false` is a truth value, `3` a number."""
        return {
            name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in self.template.items()
        }

    def columns_in(self, rows: DataRows) -> dict[str, str]:
        """Return the given columns that a source has; a command reads several sources, and not all are alike."""
        return {part: column for part, column in self.columns.items() if column in rows.columns}

    def reading(self, rows: DataRows, report: Callable[[str], object]) -> dict[str, Any]:
        """Return what the readers of `data.text` take: columns, unusable rows, and who hears of them."""
        return {"columns": self.columns_in(rows), "unusable": self.unusable, "report": report}

    def tokenizing(self, report: Callable[[str], object]) -> dict[str, Any]:
        """Return what the tokenizing functions of `data.tokens` take: long and unusable rows, and who hears of them."""
        return {"too_long": self.too_long, "unusable": self.unusable, "report": report}

    def check_columns(self, sources: Iterable[DataRows]) -> None:
        """Refuse a named column that no source has.

        Raises:
            NameNotFound: No source has the column, or there is no such part.
        """
        from netweight.data.row_layouts import PARTS

        every = list(dict.fromkeys(name for rows in sources for name in rows.columns))
        for part, column in self.columns.items():
            if part not in PARTS:
                raise not_found(f"--columns {part}={column}: there is no part {part!r}.", part, PARTS)
            if column not in every:
                raise not_found(f"--columns {part}={column}: no file has a column {column!r}.", column, every)
