"""What commands write: lines and tables for people, or one JSON object for machines; never both. Used by commands only.

A command takes `@output_option` and receives `output: Output`. Everything meant for people goes through `line`,
`table` and `warn`; at the end `result` is called once with the same content as data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import click

_NUMBER = re.compile(r"[-\u2212]?\d[\d.,\u2009e+-]*[×%]?|[-\u2013]?|inf|nan")  # or nothing, or a dash
F = TypeVar("F", bound=Callable[..., Any])


@final
class Output:
    """Standard output of one command."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def line(self, text: str = "", **style: Any) -> None:
        """Write a line for people; `style` as for `click.style`, e.g. `fg="red"`."""
        if not self.as_json:
            click.secho(text, **style)

    def warn(self, text: str) -> None:
        """Write a warning to standard error, in either mode."""
        click.secho(f"Warning: {text}", fg="yellow", err=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]], *, indent: int = 0) -> None:
        """Write a table for people: columns aligned, columns of numbers to the right."""
        if self.as_json or not rows:
            return
        cells = [[str(cell) for cell in row] for row in rows]
        numeric = [all(_NUMBER.fullmatch(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = [list(headers), *cells] if headers else cells
        widths = [max(len(line[i]) for line in lines) for i in range(len(cells[0]))]
        for number, line in enumerate(lines):
            text = "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, numeric, strict=True)
            )
            click.secho(" " * indent + text.rstrip(), bold=bool(headers) and number == 0)

    def result(self, payload: Mapping[str, Any]) -> None:
        """Write the command's result as one JSON object, if a machine reads."""
        if self.as_json:
            click.echo(json.dumps(payload, indent=2, ensure_ascii=False, default=str))


def output_option(command: F) -> F:
    """Give a command the flag `--json` and the argument `output: Output`."""
    return click.option(
        "--json",
        "output",
        is_flag=True,
        help="Write one JSON object for machines instead of text for people.",
        callback=_make_output,
    )(command)


def _make_output(context: click.Context, parameter: click.Parameter, value: bool) -> Output:
    output = Output(as_json=value)
    context.meta["netweight.output"] = output
    return output
