"""`netweight report`: make the page of a run again from its report.json."""

from __future__ import annotations

from pathlib import Path

import click

from netweight.cli.output import Output, output_option

__all__ = ["report"]


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@output_option
def report(run: Path, output: Output) -> None:
    """Write RUN/report.html again from RUN/report.json and say what it found.

    RUN is the folder of a run. Ends with exit code 2 when its report.json is missing or does not fit the schema.
    """
    from netweight.evidence.page import verdict
    from netweight.evidence.report import read_report, rewrite

    page = rewrite(run)
    document = read_report(run)
    verdicts = {section.title: verdict(section) for section in document.sections}
    output.line(document.title, bold=True)
    words = {"pass": "passed", "fail": "failed", "none": "reported"}
    output.table(
        ["section", "", "verdict"], [(title, words[kind], text) for title, (kind, text) in verdicts.items()], indent=2
    )
    output.line(f"Page: {page}")
    sections = [{"title": title, "verdict": kind, "text": text} for title, (kind, text) in verdicts.items()]
    output.result({"title": document.title, "page": str(page), "sections": sections})
