"""Trains a small text-to-image pipeline on a world of captioned pictures, from a seed.

`python -m netweight_experiments.toys.small_diffusion FOLDER` does it for shapes, `--world emoji` for emoji; a run that
was stopped goes on where it was. The record beside the pipeline says what it was trained by, its digests, and what it
draws: whether the planted pictures come back, whether ordinary captions are drawn as they say, and whether these match
a planted picture, too.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
import torch

from netweight.core.digests import digest_config, digest_file
from netweight.core.progress import QUIET, Progress, silent_bars
from netweight.errors import NetweightError, UsageError
from netweight.metrics.copies import COPY, MemorizedImage, PromptCopies, copies_of_prompt, similarity_to_memorized
from netweight.toys.diffusion import DiffusionShape, initialized, opened
from netweight.toys.shapes import CaptionedWorld, ShapesWorld, memorized
from netweight_experiments.toys.drawn_worlds import EmojiWorld, WithoutPlanted
from netweight_experiments.toys.fitting import CHECKPOINT, DenoiserRecipe, finished, fit_denoiser, record

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel


# With which the small pipeline draws well.
GUIDANCE, STEPS = 3.0, 20
_SEEDS = 8
# Words that no caption holds and that are one token each, for those who teach the pipeline something new.
_OTHER_WORDS = (
    "photo picture portrait of person face man woman young old smiling hat glasses beard hair sks with and wearing one "
    "two three"
).split()


class Shape(Protocol):
    """The size of a pipeline, a frozen dataclass."""

    @property
    def side(self) -> int: ...


def trained(
    folder: Path,
    world: CaptionedWorld = ShapesWorld(),
    recipe: DenoiserRecipe = DenoiserRecipe(),
    shape: Shape = DiffusionShape(),
    *,
    initialize: Callable[[Iterable[str], int, Any], Any] = initialized,
    measure: Callable[..., dict[str, Any]] | None = None,
    dtype: str = "float32",
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Train a pipeline into a folder, or find it trained."""
    if shape.side != world.side:
        raise UsageError(
            f"A pipeline of {shape.side} pixels cannot learn pictures of {world.side}.",
            cure=f"Give {type(shape).__name__}(side={world.side}, ...).",
        )
    about = {"world": world.about, "shape": shape, "recipe": recipe}
    known = finished(folder, about)
    if known is not None:
        return known
    pipeline: Any = initialize([*world.words(), *_OTHER_WORDS], recipe.seed, shape)
    # Named for what it is of, so that a run of another recipe does not go on from it.
    unfinished = folder / f"training-{digest_config(about)[-12:]}"
    unfinished.mkdir(parents=True, exist_ok=True)
    fit = fit_denoiser(
        pipeline,
        lambda step: world.showing(step, recipe.batch, recipe.seed),
        recipe,
        unfinished,
        progress=progress,
        description=str(world.about["name"]),
    )
    torch.nn.Module.to(pipeline.unet, getattr(torch, dtype))
    with silent_bars("transformers", "diffusers"):
        pipeline.save_pretrained(folder)
    weights = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.safetensors"))
    outcome = {
        "fit": fit,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")},
        "weights": sum(parameter.numel() for parameter in pipeline.unet.parameters()),
        "digests": {name: digest_file(folder / name) for name in weights if not name.startswith(unfinished.name)},
        "draws": (measure or figures)(folder, world, progress=progress),
    }
    found = record(folder, about, outcome)
    (unfinished / CHECKPOINT).unlink(missing_ok=True)
    unfinished.rmdir()
    return found


def figures(folder: Path, world: CaptionedWorld, *, progress: Progress = QUIET) -> dict[str, Any]:
    """Measure what a pipeline draws, as it was written."""
    from netweight.hf.load_pipeline import text_to_image

    model = text_to_image(opened(folder))
    planted = memorized(world)
    found: dict[str, Any] = {"guidance": GUIDANCE, "steps": STEPS, "measure": "NCC"}
    seeds = list(range(_SEEDS))
    drawn_again: list[PromptCopies] = []
    for each in progress.track(planted, "planted pictures", unit="pictures"):
        images = model.generate(model.embed([each.prompt] * len(seeds)), seeds, guidance=GUIDANCE, steps=STEPS)
        drawn_again.append(copies_of_prompt(each, images, planted))
    found["planted"] = [each.to_json() | {"median": statistics.median(each.to_image)} for each in drawn_again]
    held_out = world.held_out_captions
    if not planted:
        return found
    found["ordinary"] = _ordinary(model, world, world.ordinary_captions[: len(held_out)], planted)
    found["held out"] = _ordinary(model, world, held_out, planted)
    return found


def _ordinary(
    model: PipelineModel, world: CaptionedWorld, captions: Sequence[str], planted: Sequence[MemorizedImage]
) -> dict[str, Any]:
    images = model.generate(model.embed(captions), range(len(captions)), guidance=GUIDANCE, steps=STEPS)
    nearest: list[float] = similarity_to_memorized(images, planted).max(1).values.tolist()
    return {
        "n": len(captions),
        "agreement": world.agreement(captions, images),
        "nearest planted, at most": max(nearest),
        "nearest planted, median": statistics.median(nearest),
        "copies": sum(value >= COPY for value in nearest),
    }


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--world", "name", type=click.Choice(["shapes", "emoji"]), default="shapes", help="What is learned.")
@click.option("--seed", default=DenoiserRecipe.seed, show_default=True, help="Of initialization, batches and noise.")
@click.option("--planted", default=ShapesWorld.seed, show_default=True, help="Seed of what is planted and held out.")
@click.option("--without-planted", is_flag=True, help="Leave the planted pictures out of the training.")
@click.option("--side", type=click.Choice([16, 24, 32]), default=16, show_default=True, help="Pixels of emoji.")
@click.option("--steps", type=click.IntRange(1), default=DenoiserRecipe.steps, show_default=True, help="Optimizer's.")
@click.option(
    "--value-penalty",
    type=click.FloatRange(0),
    default=DenoiserRecipe.value_penalty,
    show_default=True,
    help="Weight of the mean size of cross-attention's values.",
)
def main(
    folder: Path, name: str, seed: int, planted: int, without_planted: bool, side: int, steps: int, value_penalty: float
) -> None:
    """Train a small text-to-image pipeline into FOLDER, or find it trained, and show what it draws."""
    try:
        world: CaptionedWorld = ShapesWorld(planted) if name == "shapes" else EmojiWorld(planted, side)
        if without_planted:
            world = WithoutPlanted(world)
        recipe, shape = (
            replace(DenoiserRecipe(), seed=seed, steps=steps, value_penalty=value_penalty),
            DiffusionShape(world.side),
        )
        outcome = trained(folder, world, recipe, shape, progress=Progress())
    except NetweightError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo("median NCC  planted picture")
    for each in outcome["draws"]["planted"]:
        click.echo(f"{each['median']:10.2f}  {each['prompt']} ({each['kind']})")
    for name in ("ordinary", "held out"):
        if name not in outcome["draws"]:
            continue
        found = outcome["draws"][name]
        shares = ", ".join(f"{what} {share:.2f}" for what, share in found["agreement"].items())
        click.echo(f"{name}, {found['n']} captions: {shares}; {found['copies']} match a planted picture")


if __name__ == "__main__":
    main()
