"""`netweight tour`: everything at work on small models, with a report at the end."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from netweight.cli import FINDING_FAILED
from netweight.cli.options import Output, output_option

_OUT = Path("out") / "tour"


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=_OUT,
    show_default=True,
    help="Folder for the report.",
)
@click.option("--only", metavar="NAMES", help="Chapters to run, such as federate,forget; all by default.")
@click.option("--keep", is_flag=True, help="Keep the recipe and the models that are made, about 400 MB, in OUT/models.")
@output_option
@click.pass_context
def tour(context: click.Context, out: Path, only: str | None, keep: bool, output: Output) -> None:
    """Show everything at work on small models.

    A recipe, whose chapters are federate (sites train together, and a server looks), forget and distil (a painting
    model that repeats pictures), immunize (a language model that resists fine-tuning), space and adapters (hundreds of
    adapters as one space), compress and bf16 (a real model of 22.7 million weights, bit for bit). Writes a report.
    Needs the extra `tour` and no network; takes some minutes. The same command continues a tour that was interrupted,
    step by step. Exits with 1 if a target is missed; the report names attacks that succeed.
    """
    from netweight.core.progress import QUIET, Progress
    from netweight.tour import run_tour

    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else None
    try:
        done = run_tour(
            out,
            only=names,
            keep=keep,
            command=_as_given(out, only, keep),
            progress=QUIET if output.as_json else Progress(),
            say=lambda text: output.line(text),
        )
    except KeyboardInterrupt:
        output.warn(f"What is done so far is kept in {out / 'models'}: the same command continues from there.")
        raise
    missed = [finding.name for finding in done.findings if finding.passed is False]
    for name in missed:
        output.line(f"MISSED: {name}", fg="red")
    output.line()
    for title, verdict in done.verdicts.items():
        output.line(f"{title}. {verdict}")
    output.line(f"\nDone in {done.seconds:.0f} s. Report: {done.report}\nTo try next: netweight init DIR")
    output.result({
        "report": str(done.report), "passed": done.passed, "seconds": done.seconds, "taken over": done.taken_over,
        "verdicts": done.verdicts,
        "findings": [finding.to_json() for finding in done.findings],
    })  # fmt: skip
    if not done.passed:
        context.exit(FINDING_FAILED)


def _as_given(out: Path, only: str | None, keep: bool) -> str:
    parts = ["netweight", "tour", "--out", str(out)]
    return shlex.join([*parts, *(["--only", only] if only is not None else []), *(["--keep"] if keep else [])])
