"""`netweight space invert`: images turned into points of a space."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli.opened_space import opened, space_argument
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FOLDER, NEW
from netweight.core.progress import QUIET, Progress

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.methods.space.inversion import InversionSettings, Target

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_CHANGED = ("steps", "learning_rate", "components", "prior")


@click.command()
@space_argument
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--pipeline", required=True, type=FOLDER, help="The base model: a folder of a diffusers pipeline.")
@click.option("--prompt", required=True, help="What the adapters' own prompt was, such as 'sks person'.")
@click.option("--masks", type=FOLDER, help="Folder with masks of the images' names; white is what counts.")
@click.option("--settings", type=click.Choice(["default", "reference", "reference out of distribution"]),
              default="default", show_default=True, help="Ours, or those of the authors' code.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="Of the descent, in place of the settings' own.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), help="In place of the settings' own.")
@click.option("--components", type=click.IntRange(1), help="Move only the first so many.")
@click.option("--prior", type=click.FloatRange(0), help="Weight of the Gaussian prior, per image loss.")
@click.option("--draws", type=click.IntRange(1), default=1, show_default=True, help="Timesteps per image and step.")
@click.option("--together", type=click.IntRange(1), default=8, show_default=True, help="Most targets in a batch.")
@click.option("--device", default="cpu", show_default=True, help="Where the pipeline goes, such as cuda.")
@click.option("--seed", default=0, show_default=True, help="Of all draws.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--out", required=True, type=NEW,
              help="The .json file of points to write; what is done is remembered in a .jsonl beside it.")  # fmt: skip
@output_option
def invert(
    folder: Path, bank: Path | None, images: tuple[Path, ...], pipeline: Path, prompt: str, masks: Path | None,
    draws: int, together: int, device: str, seed: int, overwrite: bool, out: Path, output: Output, **options: Any,
) -> None:  # fmt: skip
    """Find the points whose models make IMAGE: a picture each, or a folder with pictures of the same thing.

    A call that was interrupted goes on where it stopped when it is made again.
    """
    from netweight.core.files import refuse_existing
    from netweight.hf.load_pipeline import load_text_to_image, trained_prediction
    from netweight.methods.space.inversion import InversionTask, invert_targets
    from netweight.methods.space.points import write_points

    refuse_existing(out, overwrite=overwrite)
    settings = _settings(options)
    targets = [_target(path, masks) for path in images]
    space = opened(folder, bank)
    model = load_text_to_image(pipeline, device=device)
    task = InversionTask(prompt, settings, trained_prediction(model), draws=draws, together=together, seed=seed)
    progress = QUIET if output.as_json else Progress()
    found = invert_targets(model, space, targets, task, ledger=out.with_suffix(".jsonl"), progress=progress)
    write_points(found, out, overwrite=overwrite)
    distances, improvements = found.origin["distances"], found.origin["improvements"]
    rows = [(name, f"{distances[name]:.2f}", f"{improvements[name]:.2f}") for name in found.names]
    output.table(("target", "distance from the mean, in deviations", "loss at first over last"), rows)
    output.line(f"{len(rows)} {'point' if len(rows) == 1 else 'points'}: {out}")
    output.result({"points": str(out), "distances": distances, "improvements": improvements})


def _settings(options: dict[str, Any]) -> InversionSettings:
    from dataclasses import replace

    from netweight.methods.space.inversion import SETTINGS

    changed = {name: options[name] for name in _CHANGED if options[name] is not None}
    return replace(SETTINGS[options["settings"]], **changed)


def _target(path: Path, masks: Path | None) -> Target:
    """Read a target's pictures, in color, within 0 and 1."""
    from netweight.errors import UsageError
    from netweight.methods.space.inversion import Target

    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix.lower() in _SUFFIXES)
    if not files:
        raise UsageError(f"{path} holds no picture.", cure=f"Give files that end in {', '.join(_SUFFIXES)}.")
    pictures = _pictures(files, 3)
    if masks is None:
        return Target(path.stem, pictures)
    found = [next((each for each in masks.iterdir() if each.stem == file.stem), None) for file in files]
    missing = [file.name for file, mask in zip(files, found, strict=True) if mask is None]
    if missing:
        raise UsageError(f"{masks} holds no mask for {missing[0]}.", cure="Name masks as the images are named.")
    return Target(path.stem, pictures, _pictures([file for file in found if file is not None], 1)[:, 0])


def _pictures(files: list[Path], channels: int) -> Tensor:
    """Pictures as `(m, channels, height, width)`, within 0 and 1."""
    from netweight.data.images.sources import decode_splits

    [pixels] = decode_splits([[(file.name, file) for file in files]], of=str(files[0].parent))
    found = pixels.float() / 255
    return found.mean(1, keepdim=True) if channels == 1 else found.expand(-1, 3, -1, -1)
