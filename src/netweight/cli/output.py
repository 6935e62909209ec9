"""What commands write: lines and tables for people, or one JSON object for machines; never both. Used by commands only.

A command takes `@output_option` and receives `output: Output`. Everything meant for people goes through `line`,
`table` and `warn`; at the end `result` is called once with the same content as data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import click

if TYPE_CHECKING:
    from netweight.report.finding import Finding

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
        if not self.as_json:
            from netweight.report.text import aligned

            for number, text in enumerate(aligned(headers, rows, indent=indent)):
                click.secho(text, bold=bool(headers) and number == 0)

    def findings(self, findings: Iterable[Finding], *, indent: int = 2, **words: str) -> None:
        """Write findings as a table; `words` as for `report.text.finding_row`."""
        if not self.as_json:
            from netweight.report.text import finding_row

            self.table((), [finding_row(finding, **words) for finding in findings], indent=indent)

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
