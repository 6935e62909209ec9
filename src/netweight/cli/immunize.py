"""`netweight immunize`: a folder of transformers in, the same model with a defense against harmful fine-tuning out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from netweight.cli.output import Output, output_option
from netweight.core.progress import QUIET, Progress
from netweight.errors import OutputExists, UsageError

if TYPE_CHECKING:
    from netweight.methods.immunize.record import Record
    from netweight.methods.immunize.settings import Settings

__all__ = ["immunize"]

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_SETTINGS = ("lr", "epochs", "batch_size", "seed", "save_every")


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("destination", type=click.Path(path_type=Path, file_okay=False))
@click.option("--pairs", required=True, type=_FILE, help="Rows with prompt, chosen (harmless) and rejected (harmful).")
@click.option("--retain", type=_FILE, help="Rows with prompt and response: what the model is to keep besides.")
@click.option("--defense", default="repnoise", show_default=True, help="Which defense: see docs/immunize.md.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), help="Highest learning rate; each defense has its own.")
@click.option("--epochs", type=click.IntRange(1), help="Passes over the pairs; 1 by default.")
@click.option("--batch-size", type=click.IntRange(1), help="Pairs per step; 8 by default.")
@click.option("--save-every", type=click.IntRange(1), help="Steps between checkpoints; 100 by default.")
@click.option("--chat", is_flag=True, help="Put prompts through the tokenizer's chat template.")
@click.option("--device", default="cpu", show_default=True, help="Where the model goes, such as cuda.")
@click.option("--seed", type=int, help="Seed of the order of pairs, of noise and of dropout; 42 by default.")
@output_option
def immunize(model: Path, destination: Path, output: Output, **options: Any) -> None:
    """Train a defense against harmful fine-tuning into MODEL and write it to DESTINATION.

    MODEL is a folder of transformers and stays as it is. DESTINATION is an ordinary one, with immunize.json beside the
    weights: what was done, step by step. The same command goes on where an earlier one was stopped. How long the
    defense holds is for `netweight attack finetune` to say.
    """
    from netweight.methods.immunize.training import CHECKPOINT, RECORD
    from netweight.methods.immunize.training import immunize as train

    defense, settings = _chosen(options)
    if destination.exists():
        raise OutputExists(f"{destination} exists.", cure="Give another folder, or move this one away.")
    from netweight.integrations.causal_lm import context_of, load_causal_lm
    from netweight.zoo.language import BELOW, Template, load_examples, load_pairs, padding_of

    network, tokenizer = load_causal_lm(model, device=options["device"])
    form: Template | Literal["chat"] = "chat" if options["chat"] else BELOW
    how: Any = {"context": context_of(network, tokenizer), "template": form}
    pairs = load_pairs(options["pairs"], tokenizer, **how)
    kept = [] if options["retain"] is None else load_examples(options["retain"], tokenizer, **how)
    output.line(f"{len(pairs)} pairs and {len(kept)} rows to keep, by {defense}.")
    part = destination.with_name(f".{destination.name}.netweight-part")
    done = train(
        network, pairs, kept, defense=defense, settings=settings, folder=part, pad_id=padding_of(tokenizer),
        progress=QUIET if output.as_json else Progress(),
    )  # fmt: skip
    network.save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / CHECKPOINT).unlink(missing_ok=True)
    part.rename(destination)
    _show(output, done)
    output.line(f"Written to {destination}, with the record {RECORD}.", bold=True)
    attack = f"netweight attack finetune {destination} --base {model} --harmful {options['pairs']} --out attacks"
    output.line(f"See how long it holds: {attack}")
    output.result({"model": str(destination), "record": str(destination / RECORD), "steps": len(done.steps)})


def _chosen(options: dict[str, Any]) -> tuple[str, Settings]:
    """Return the defense's name, and its settings with those that were given."""
    from netweight.methods.immunize.catalog import named_defense

    entry = named_defense(options["defense"])
    if entry.defense.name == "security-vectors":
        raise UsageError(
            "A security vector protects while it is at work in a model that others train, so no folder can hold it.",
            cure="Use netweight.methods.immunize.training.immunize where the training is yours, or another defense.",
        )
    given = {name: options[name] for name in _SETTINGS if options[name] is not None}
    return options["defense"], dataclasses.replace(entry.settings, **given)


def _show(output: Output, done: Record) -> None:
    if not done.steps:
        return
    first, last = done.steps[0].terms, done.steps[-1].terms
    rows = [(name, f"{first[name].value:.4g}", f"{term.value:.4g}") for name, term in last.items() if name in first]
    output.table(("term of the loss", "first step", "last step"), rows, indent=2)
