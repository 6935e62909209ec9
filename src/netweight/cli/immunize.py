"""`netweight immunize`: a folder of transformers in, the same model with a defense against harmful fine-tuning out."""

from __future__ import annotations

from pathlib import Path

import click

from netweight.cli import FOLDER, OUTPUT_FOLDER, Output, card_option, command_line, output_option, write_card
from netweight.methods.immunize.settings import ImmunizeSettings
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
