"""`netweight reproduce`: measure a table or figure of the papers again, or list all of them with their state."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli.output import Output, output_option

if TYPE_CHECKING:
    from netweight.reproduce import Reproduction
    from netweight.reproduce.catalog import Item


@click.command()
@click.argument("table", required=False)
@click.option("--list", "list_all", is_flag=True, help="Show every table and figure of the five papers with its state.")
@click.option(
    "--scale",
    type=click.Choice(["small", "paper"]),
    default="small",
    show_default=True,
    help="small: minutes on a laptop, often on a stand-in; paper: the paper's size.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("reproductions"),
    show_default=True,
    help="Folder for results; each table gets its own in it.",
)
@click.option("--model", help="A .safetensors file or model folder, for the tables that can use one.")
@click.option(
    "--judge", metavar="MODULE:FUNCTION", help="Your judge, texts to numbers, for the tables that can use one."
)
@click.option(
    "--recipe",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What the paper's scale is measured on, for the tables whose recipe is in recipes/.",
)
@click.option("--only", metavar="PATTERN", help="Measure only these rows, for the tables that run row by row.")
@click.option("--overwrite", is_flag=True, help="Measure again although a result is there.")
@output_option
@click.pass_context
def reproduce(
    context: click.Context,
    table: str | None,
    list_all: bool,
    scale: Any,
    out: Path,
    model: str | None,
    judge: str | None,
    recipe: Path | None,
    only: str | None,
    overwrite: bool,
    output: Output,
) -> None:
    """Measure TABLE again and lay it beside what was published.

    A finished result in the output folder is reused. Ends with exit code 1 when a finding failed.
    """
    from netweight.cli import FINDING_FAILED
    from netweight.reproduce import run_table

    if list_all or table is None:
        if table is not None or not list_all:
            raise click.UsageError("Name one table, or ask for --list.", context)
        _list(output)
        return
    command = f"netweight reproduce {table} --scale {scale}" + (f" --model {model}" if model else "")
    command += f" --judge {judge}" if judge else ""
    command += f" --recipe {recipe}" if recipe else ""
    command += f" --only {shlex.quote(only)}" if only else ""
    options = {"model": model, "judge": judge, "recipe": recipe, "only": only}
    result = run_table(table, scale=scale, out=out, overwrite=overwrite, options=options, command=command)
    _show(result, output)
    output.result(result.to_json())
    if any(finding.passed is False for finding in result.measured.findings):
        context.exit(FINDING_FAILED)


def _list(output: Output) -> None:
    from netweight.reproduce.catalog import PAPERS, items

    everything = items()
    for paper in PAPERS.values():
        output.line(paper, bold=True)
        rows = [(item.id, item.state, _told(item)) for item in everything if item.paper == paper]
        output.table([], rows, indent=2)
        output.line()
    counts = {state: sum(item.state == state for item in everything) for state in {item.state for item in everything}}
    output.line("; ".join(f"{count} {state}" for state, count in sorted(counts.items())) + ".")
    output.line("A small stand-in is measured by: netweight reproduce ID")
    keys = ("id", "paper", "title", "state", "reason", "numbers", "command")
    output.result({"tables": [{key: getattr(item, key) for key in keys} for item in everything]})


def _told(item: Item) -> str:
    """What it shows, what is missing, and the command for where it is not."""
    if not item.reason:
        return item.title
    return f"{item.title} ({item.reason}{': ' + item.command if item.command else ''})"


def _show(result: Reproduction, output: Output) -> None:
    from netweight.report.text import format_number

    numbers = result.published
    where = f"{numbers.table}, {numbers.title}" if numbers else "no published numbers"
    output.line(f"{result.id} ({result.scale}): {where}", bold=True)
    headers = ["row", "column", "unit", result.published_name, "measured", "difference"]
    output.table(headers, [
        (c.row, c.column, c.unit, *(format_number(value) for value in (c.published, c.measured, c.difference)))
        for c in result.comparisons
    ])  # fmt: skip
    for sentence in result.measured.differs:
        output.line(f"Differs: {sentence}")
    for finding in result.measured.findings:
        mark = {True: "met", False: "MISSED", None: "reported"}[finding.passed]
        output.line(f"{mark}: {finding.name} = {format_number(finding.value)} {finding.unit}".rstrip())
    output.line(f"{'Reused' if result.reused else 'Written'}: {result.folder / 'report.html'}")
