"""Trains the small pipeline of drawn faces, from a seed: `python -m netweight_experiments.toys.faces_diffusion FOLDER`.

A run that was stopped goes on where it was; `--world vehicle` trains that of drawn vehicles. The record beside
the pipeline says what it was trained by, its digests, how often it draws the ground that a prompt names,
and how far the people whom it draws are spread as the world's are.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from netweight.core.progress import QUIET, Progress
from netweight.errors import NetweightError
from netweight.toys.diffusion import opened
from netweight.toys.drawn_pictures import WORLDS
from netweight.toys.faces_pipeline import read_faces
from netweight_experiments.toys.drawn_worlds import FacesShape, FacesWorld, initialized
from netweight_experiments.toys.fitting import DenoiserRecipe
from netweight_experiments.toys.small_diffusion import trained

FACES_RECIPE = DenoiserRecipe(steps=4000, batch=32, average=0.995, value_penalty=0.0, keep_every=250, seed=20240613)
# Without guidance.
STEPS = 20
_DRAWN = 400


def train_faces(
    folder: Path,
    world: FacesWorld = FacesWorld(),
    recipe: DenoiserRecipe = FACES_RECIPE,
    shape: FacesShape | None = None,
    *,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Train a pipeline into a folder, or find it trained; see `small_diffusion_training.trained`."""
    shape = shape or FacesShape(world.side)
    return trained(
        folder, world, recipe, shape, initialize=initialized, measure=population, dtype="bfloat16", progress=progress
    )


def population(folder: Path, world: FacesWorld, *, progress: Progress = QUIET) -> dict[str, Any]:
    """Measure whom a pipeline draws, as it was written."""
    from netweight.hf.load_pipeline import text_to_image

    model = text_to_image(opened(folder))
    captions = (world.ordinary_captions * _DRAWN)[:_DRAWN]
    with progress.task("pictures", _DRAWN, unit="pictures") as task:
        images = model.generate(model.embed(captions), range(_DRAWN), guidance=1.0, steps=STEPS)
        task.update(_DRAWN)
    drawing = world.drawing
    found = read_faces(images, world=drawing)
    generator = torch.Generator().manual_seed(0)
    real = torch.cat([drawing.crowd(4000, generator), drawing.changes(4000, generator)], 1).std(0)
    spread = torch.cat([found.attributes, found.nuisances], 1).std(0) / real
    return {
        "n": _DRAWN,
        "steps": STEPS,
        "agreement": world.agreement(captions, images),
        "spread": {
            name: round(float(value), 3)
            for name, value in zip(drawing.attributes + drawing.nuisances, spread, strict=True)
        },
    }


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=FACES_RECIPE.seed, show_default=True, help="Of initialization, batches and noise.")
@click.option(
    "--steps", type=click.IntRange(1), default=FACES_RECIPE.steps, show_default=True, help="Of the optimizer."
)
@click.option("--world", "name", type=click.Choice(list(WORLDS)), default="face", show_default=True)
def main(folder: Path, seed: int, steps: int, name: str) -> None:
    """Train a small text-to-image pipeline of a drawn world into FOLDER, or find it trained, and show whom it draws."""
    try:
        recipe = replace(FACES_RECIPE, seed=seed, steps=steps)
        outcome = train_faces(folder, FacesWorld(drawing=WORLDS[name]), recipe, progress=Progress())
    except NetweightError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(json.dumps(outcome["draws"], indent=1))


if __name__ == "__main__":
    main()
