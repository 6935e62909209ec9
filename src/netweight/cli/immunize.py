"""`netweight immunize`: a folder of transformers in, the same model with a defense against harmful fine-tuning out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli.card import card_option, write_card
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, FOLDER, OUTPUT_FOLDER
from netweight.core.progress import QUIET, Progress

if TYPE_CHECKING:
    from netweight.methods.immunize.train import Record


@click.command()
@click.argument("model", type=FOLDER)
@click.argument("destination", type=OUTPUT_FOLDER)
@click.option("--pairs", required=True, type=FILE, help="Rows with prompt, chosen (harmless) and rejected (harmful).")
@click.option("--retain", type=FILE, help="Rows with prompt and response: what the model is to keep besides.")
@click.option("--defense", default="repnoise", show_default=True, help="Which defense: see docs/immunize.md.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), help="Highest learning rate; each defense has its own.")
@click.option("--epochs", type=click.IntRange(1), help="Passes over the pairs; 1 by default.")
@click.option("--batch-size", type=click.IntRange(1), help="Pairs per step; 8 by default.")
@click.option("--save-every", type=click.IntRange(1), help="Steps between checkpoints; 100 by default.")
@click.option("--freeze", "frozen", metavar="LAYERS", help="Layers not to train, such as 0-3,head: for ablations.")
@click.option("--withhold", multiple=True, metavar="CATEGORY", help="Category of the pairs that is not to be seen.")
@click.option("--chat", is_flag=True, help="Put prompts through the tokenizer's chat template.")
@click.option("--device", default="cpu", show_default=True, help="Where the model goes, such as cuda.")
@click.option("--seed", type=int, help="Seed of the order of pairs, of noise and of dropout; 42 by default.")
@card_option
@output_option
def immunize(model: Path, destination: Path, card: bool, output: Output, **options: Any) -> None:
    """Train a defense against harmful fine-tuning into MODEL and write it to DESTINATION.

    MODEL is a folder of transformers and stays as it is. DESTINATION is an ordinary one; beside the weights lie
    immunize.json, what was done step by step, and immunize-report, what that changed inside of the model. The same
    command goes on where an earlier one was stopped. How long the defense holds is for `netweight attack finetune` to
    say.
    """
    from netweight.methods.immunize.folder import FolderDefense, immunize_folder
    from netweight.methods.immunize.train import RECORD

    defense = FolderDefense(**options)
    done = immunize_folder(
        model, destination, defense,
        command=shlex.join(["netweight", *sys.argv[1:]]), progress=QUIET if output.as_json else Progress(),
    )  # fmt: skip
    _show(output, done.record)
    if card:
        write_card(destination, output)
    output.line(f"Written to {destination}, with the record {RECORD}.", bold=True)
    if done.not_looked_at:
        output.line(f"The depth of the defense is not shown: {done.not_looked_at}")
    output.line(f"Report: {done.report}")
    attack = f"netweight attack finetune {destination} --base {model} --harmful {options['pairs']} --out attacks"
    output.line(f"See how long it holds: {attack}")
    output.result({
        "model": str(destination),
        "record": str(destination / RECORD),
        "steps": len(done.record.steps),
        "report": str(done.report),
    })  # fmt: skip


def _show(output: Output, done: Record) -> None:
    if not done.steps:
        return
    first, last = done.steps[0].terms, done.steps[-1].terms
    rows = [(name, f"{first[name].value:.4g}", f"{term.value:.4g}") for name, term in last.items() if name in first]
    output.table(("term of the loss", "first step", "last step"), rows, indent=2)
