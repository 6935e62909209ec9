"""The kinds of paths that commands take."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import click

from netweight.cli import FINDING_FAILED

if TYPE_CHECKING:
    from netweight.report.finding import Finding
    from netweight.report.report import Report


# A file that is there.
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
# A folder that is there.
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
# What is written.
NEW = click.Path(path_type=Path)
# A folder that results go to; it may be there.
OUTPUT_FOLDER = click.Path(path_type=Path, file_okay=False)


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


def card_option(command: F) -> F:
    """Give a command the flag `--card`."""
    return click.option(
        "--card", is_flag=True, help="Say in the folder's README.md what was done; see docs/ecosystem.md."
    )(command)


def write_card(folder: Path, output: Output) -> None:
    """Write or update the card of a folder that a command has just written."""
    from netweight.plugins.model_card import update_card

    card = update_card(folder, command=shlex.join(["netweight", *sys.argv[1:]]))
    output.line(f"Card: {card}")


def new_report(title: str, summary: str, *, seed: int, files: Iterable[Path]) -> Report:
    """Begin a report of this command line."""
    from netweight.core.digest import of_file
    from netweight.report.report import Report

    command = shlex.join(["netweight", *sys.argv[1:]])
    inputs = {path.name: of_file(path) for path in files}
    return Report(title, summary=summary, command=command, seeds=(seed,), inputs=inputs)


def end_attack(
    context: click.Context,
    output: Output,
    report: Report,
    findings: Sequence[Finding],
    *,
    out: Path,
    verdicts: Iterable[str],
    result: Mapping[str, Any],
) -> None:
    """Write the report and tell what was found; exits with 1 if a finding failed."""
    page = report.write(out)
    output.findings(findings)
    for words in verdicts:
        output.line(words, bold=True)
    output.line(f"Report: {page}")
    output.result({**result, "findings": [finding.to_json() for finding in findings], "report": str(page)})
    if any(finding.passed is False for finding in findings):
        context.exit(FINDING_FAILED)
