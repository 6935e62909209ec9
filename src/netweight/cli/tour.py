"""`netweight tour`: everything at work on small models, with a report at the end."""

from __future__ import annotations

from pathlib import Path

import click

from netweight.cli import FINDING_FAILED
from netweight.cli.output import Output, output_option

__all__ = ["tour"]


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out") / "tour",
    show_default=True,
    help="Folder for the report.",
)
@click.option("--keep", is_flag=True, help="Keep the models that are made, about 300 MB, in OUT/models.")
@output_option
@click.pass_context
def tour(context: click.Context, out: Path, keep: bool, output: Output) -> None:
    """Show everything at work on small models.

    Compresses a model of 22.7 million trained weights as published and as bf16, proves that nothing changed, restores
    it and uses it. Immunizes a miniature against fine-tuning and attacks it before and after. Switches off what a
    small painting model repeats and searches for it. Writes a report. Needs the extra `tour` and no network; takes
    about three minutes. Exits with 1 if anything is not as it should be.
    """
    from netweight.core.progress import QUIET, Progress
    from netweight.tour import run_tour

    command = f"netweight tour --out {out}" + (" --keep" if keep else "")
    done = run_tour(
        out,
        keep=keep,
        command=command,
        progress=QUIET if output.as_json else Progress(),
        say=lambda text: output.line(text),
    )
    missed = [finding.name for finding in done.findings if finding.passed is False]
    for name in missed:
        output.line(f"MISSED: {name}", fg="red")
    output.line(f"\nDone in {done.seconds:.0f} s. Report: {done.report}")
    findings = [finding.to_json() for finding in done.findings]
    output.result({"report": str(done.report), "passed": done.passed, "seconds": done.seconds, "findings": findings})
    if not done.passed:
        context.exit(FINDING_FAILED)
