"""Trains the models of a small world from a seed: first on the guarded and the kept domain, then to refuse the guarded.

`python -m netweight_experiments.toys.small_world ciphers FOLDER` does it; a run that was stopped goes on where it
was. The record beside the models says what they were trained by, their digests, and how they answer held-out prompts.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
import torch

from netweight.core.digests import digest_config, digest_file
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive
from netweight.data.tokens import Example, LossOn, collate
from netweight.errors import NetweightError
from netweight.toys.language import (
    ALIGNED,
    SHIPPED_SEED,
    UNALIGNED,
    Share,
    SmallWorld,
    answers,
    cipher_world,
    speaker_world,
    write_weights,
)
from netweight_experiments.toys.fitting import CHECKPOINT, Fit, Schedule, finished, fit, record

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class WorldRecipe:
    """Everything that decides on the models, but the language."""

    learning: Schedule
    """How the guarded and the kept domain are learned."""
    aligning: Schedule
    """How the guarded one is then refused, while the kept one is practised on."""
    batch: int = 32
    """Examples per step, those of the guarded domain first."""
    guarded: int = 16
    """How many of them are of the guarded domain while it is learned; half are when it is refused."""
    loss_on: LossOn = "response"
    """Which tokens are learned from; in aligning it is the response."""
    checked: int = 128
    """Held-out examples of each domain that decide when to stop."""
    measured: int = 512
    """Held-out examples of each domain for the figures of the record; others than those."""
    seed: int = 20240523


# Some minute on one core.
CIPHERS = WorldRecipe(
    learning=Schedule(steps=500, learning_rate=2e-3, warmup=50, weight_decay=0.01),
    aligning=Schedule(steps=150, learning_rate=5e-4, warmup=15, weight_decay=0.01, check_every=50),
)
# Some two minutes on one core: which cipher it is has to be learned, too.
CONTENT = replace(CIPHERS, learning=replace(CIPHERS.learning, steps=1000))
# Some four minutes on one core.
SPEAKERS = WorldRecipe(
    learning=Schedule(steps=600, learning_rate=3e-3, warmup=50),
    aligning=Schedule(steps=150, learning_rate=5e-4, warmup=15, check_every=50),
    batch=48,
    guarded=8,
    loss_on="full",
)
_RECIPES = {"ciphers": CIPHERS, "content": CONTENT, "speakers": SPEAKERS}
Stage = Literal["learning", "aligning"]


def trained(world: SmallWorld, recipe: WorldRecipe, *, progress: Progress = QUIET) -> dict[str, Any]:
    """Train the models of a world into its folder, or find them trained."""
    about = {"world": world.name, "language": world.language.about, "recipe": recipe}
    known = finished(world.folder, about)
    if known is not None:
        return known
    model = world.random_model(recipe.seed)
    # Named for what it is of, so that a run of another recipe does not go on from it.
    stages = {stage: world.folder / f"{stage}-{digest_config(about)[-12:]}" for stage in get_args(Stage)}
    learning = _stage(model, world, recipe, "learning", stages["learning"], progress)
    write_weights(model, world.folder / UNALIGNED)
    aligning = _stage(model, world, recipe, "aligning", stages["aligning"], progress)
    write_weights(model, world.folder / ALIGNED)
    outcome = {
        "learning": learning.to_json(),
        "aligning": aligning.to_json(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "digests": {name: digest_file(world.folder / name) for name in (UNALIGNED, ALIGNED)},
        "answers": figures(world, recipe.measured, derive(recipe.seed, "measured")),
    }
    found = record(world.folder, about, outcome)
    for folder in stages.values():
        (folder / CHECKPOINT).unlink(missing_ok=True)
        folder.rmdir()
    return found


def figures(world: SmallWorld, n: int, seed: int) -> dict[str, Any]:
    """Measure how both models, as they were written, answer held-out prompts."""
    found: dict[str, Any] = {"seed": seed}
    for name, model in (("unaligned", world.unaligned()), ("aligned", world.base())):
        drawn: dict[str, list[Example]] = {d: world.held_out(d, n, seed) for d in ("guard", "keep", "new")}
        drawn["refusal"] = world.refused(drawn["guard"])
        found[name] = {what: answers(model, rows, pad_id=world.pad_id).to_json() for what, rows in drawn.items()}
    return found


def _stage(
    model: nn.Module, world: SmallWorld, recipe: WorldRecipe, stage: Stage, folder: Path, progress: Progress
) -> Fit:
    """Fit the model to one stage; one that is finished is only read again."""
    folder.mkdir(parents=True, exist_ok=True)
    checked_seed = derive(recipe.seed, "checked")
    checked = _mixed(world, stage, recipe.checked, recipe.checked, checked_seed, "held out")
    guarded = recipe.guarded if stage == "learning" else recipe.batch // 2

    def batch_of(step: int) -> Mapping[str, torch.Tensor]:
        seed = derive(recipe.seed, stage, step)
        mixed = _mixed(world, stage, guarded, recipe.batch - guarded, seed, "training")
        return _arguments(mixed, world.pad_id, recipe.loss_on if stage == "learning" else "response")

    return fit(
        model,
        batch_of,
        lambda current: _loss(current, checked, world.pad_id),
        recipe.learning if stage == "learning" else recipe.aligning,
        folder,
        progress=progress,
        description=f"{world.name}, {stage}",
    )


def _mixed(world: SmallWorld, stage: Stage, guarded: int, kept: int, seed: int, share: Share) -> list[Example]:
    guard = world.examples("guard", guarded, seed, share=share)
    keep = world.examples("keep", kept, seed, share=share)
    return (world.refused(guard) if stage == "aligning" else guard) + keep


def _arguments(examples: list[Example], pad_id: int, loss_on: LossOn = "response") -> dict[str, torch.Tensor]:
    batch = collate(examples, pad_id=pad_id, loss_on=loss_on)
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


def _loss(model: nn.Module, examples: list[Example], pad_id: int) -> float:
    """Nats per response token."""
    with torch.inference_mode():
        return float(model(**_arguments(examples, pad_id)).loss)


@click.command()
@click.argument("name", type=click.Choice(list(_RECIPES)))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=SHIPPED_SEED, show_default=True, help="Of the ciphers, and of the first weights.")
def main(name: str, folder: Path, seed: int) -> None:
    """Train the models of the small world NAME into FOLDER, or find them trained, and show how they answer."""
    try:
        ciphers = partial(cipher_world, seed, folder=folder, by_content=name == "content")
        world = speaker_world(folder) if name == "speakers" else ciphers()
        recipe = replace(_RECIPES[name], seed=_RECIPES[name].seed + seed - SHIPPED_SEED)
        outcome = trained(world, recipe, progress=Progress())
    except NetweightError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(
        f"{'model':<10} {'asked for':<9} tokens  whole  (of {outcome['answers']['aligned']['keep']['examples']})"
    )
    for model in ("unaligned", "aligned"):
        for what, found in outcome["answers"][model].items():
            click.echo(f"{model:<10} {what:<9} {found['tokens']:.3f}   {found['whole']:.3f}")


if __name__ == "__main__":
    main()
