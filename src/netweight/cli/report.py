"""`netweight report`: make the page of a run again from its report.json."""

from __future__ import annotations

from pathlib import Path

import click

from netweight.cli.output import FOLDER, Output, output_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--card", "model", type=FOLDER, help="Say in README.md of this model's folder what RUN found.")
@output_option
def report(run: Path, model: Path | None, output: Output) -> None:
    """Write RUN/report.html again from RUN/report.json and say what it found.

    RUN is the folder of a run. With --card the model's card gets a section with all findings, and one with what the
    records in its folder tell of what was done to it; see docs/ecosystem.md. Ends with exit code 2 when there is no
    report.json in RUN, or it does not fit the schema.
    """
    from netweight.report.report import read_report, rewrite
    from netweight.report.text import verdict

    page = rewrite(run)
    document = read_report(run)
    verdicts = {section.title: verdict(section) for section in document.sections}
    output.line(document.title, bold=True)
    words = {"pass": "passed", "fail": "failed", "none": "reported"}
    output.table(
        ["section", "", "verdict"], [(title, words[kind], text) for title, (kind, text) in verdicts.items()], indent=2
    )
    output.line(f"Page: {page}")
    card = None if model is None else _card(model, run)
    if card is not None:
        output.line(f"Card: {card}")
    sections = [{"title": title, "verdict": kind, "text": text} for title, (kind, text) in verdicts.items()]
    output.result({"title": document.title, "page": str(page), "sections": sections,
                   **({} if card is None else {"card": str(card)})})  # fmt: skip


def _card(model: Path, run: Path) -> Path:
    from netweight.plugins.model_card import add_evidence, entries_of, update_card

    if entries_of(model):
        update_card(model)
    return add_evidence(model, run)
