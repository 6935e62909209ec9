"""Commands that make a model of a model: `netweight immunize`, and those of methods that other packages bring."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click

from netweight.cli import (
    FINDING_FAILED,
    FOLDER,
    NEW,
    OUTPUT_FOLDER,
    Output,
    card_option,
    command_line,
    output_option,
    write_card,
)
from netweight.core.files import refuse_existing
from netweight.core.progress import QUIET
from netweight.methods.immunize.settings import ImmunizeSettings
from netweight.registry import known_methods
from netweight.report.audit import run_audits
from netweight.settings import options


@click.command()
@click.argument("model", type=FOLDER)
@click.argument("destination", type=OUTPUT_FOLDER)
@options(ImmunizeSettings)
@card_option
@output_option
def immunize(model: Path, destination: Path, settings: ImmunizeSettings, card: bool, output: Output) -> None:
    """Train a defense against harmful fine-tuning into MODEL and write it to DESTINATION.

    MODEL is a folder of transformers and is not changed. DESTINATION is another, with immunize.json, what was done step
    by step, and immunize-report, what that changed inside the model. The same command continues a run that was stopped.
    `netweight attack finetune` measures how long the defense holds.
    """
    from netweight.methods.immunize.folder import immunize_folder
    from netweight.methods.immunize.train import RECORD

    done = immunize_folder(
        model, destination, settings,
        command=command_line(), progress=output.progress,
    )  # fmt: skip
    rows = [(name, f"{first:.4g}", f"{last:.4g}") for name, first, last in done.record.ends]
    if rows:
        output.table(("term of the loss", "first step", "last step"), rows, indent=2)
    if card:
        write_card(destination, output)
    output.line(f"Written to {destination}, with the record {RECORD}.", bold=True)
    if done.not_analyzed:
        output.line(f"The depth of the defense is not shown: {done.not_analyzed}")
    output.line(f"Report: {done.report}")
    attack = f"netweight attack finetune {destination} --base {model} --trained-on {settings.pairs} --out attacks"
    output.line(f"See how long it holds, under rows that it was not trained on: {attack} --harmful ROWS")
    output.result({
        "model": str(destination),
        "record": str(destination / RECORD),
        "steps": len(done.record.steps),
        "report": str(done.report),
    })  # fmt: skip


def command_of(verb: str) -> click.Command:
    """The command of a method that another package brings: SOURCE, DESTINATION, one option per setting, and audits."""
    method = known_methods()[verb]

    @click.command(method.verb, help=inspect.getdoc(method.config))
    @click.argument("source", type=click.Path(path_type=Path, exists=True))
    @click.argument("destination", type=NEW)
    @options(method.config)
    @card_option
    @output_option
    @click.pass_context
    def command(
        context: click.Context, /, source: Path, destination: Path, settings: Any, card: bool, output: Output
    ) -> None:
        refuse_existing(destination, overwrite=None)
        if method.check is not None:
            method.check(source, settings)
        method.apply(source, destination, settings, output.progress)
        findings = [
            finding
            for name in method.runnable
            for section in run_audits(
                method.verb, *method.examine(name, destination, source, settings, QUIET), seed=0, only=[name]
            ).values()
            for finding in section.findings
        ]
        output.findings(findings)
        if card:
            write_card(destination, output)
        output.line(f"Written to {destination}.", bold=True)
        output.result({"path": str(destination), "settings": settings.to_json(),
                       "findings": [finding.to_json() for finding in findings]})  # fmt: skip
        if any(finding.passed is False for finding in findings):
            context.exit(FINDING_FAILED)

    return command
