"""What models paint for memorized prompts and for ordinary ones, with the same seeds before and after an edit.

painted = Painted(memorized, ordinary, paint(original, prompts, settings), paint(edited, prompts, settings))
image_findings(painted, ImagesConfig(), seed=0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from netweight.core.digest import of_config
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.metrics.copies import Memorized
from netweight.probe.batches import Batches
from netweight.probe.diffusion import TextToImage
from netweight.probe.generation import generated
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

__all__ = ["PaintSettings", "Painted", "paint"]

_PAINTED = "painted"  # folder of the images of every prompt


@final
@dataclass(frozen=True)
class PaintSettings:
    """How images are made.

    Attributes:
        seeds: One image each, the same for every prompt and model.
        guidance: Of their generation.
        steps: Of their scheduler.
        rows: Most images at a time; halved where memory runs out.

    Raises:
        UsageError: A value cannot be meant.
    """

    seeds: tuple[int, ...] = tuple(range(8))
    guidance: float = 7.0
    steps: int = 50
    rows: int = 64

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or self.steps < 1 or self.rows < 1:
            raise UsageError(
                f"Seeds {self.seeds}, {self.steps} steps and {self.rows} rows cannot be meant.",
                cure="Give at least one seed, each once, one step and one row.",
            )


@final
@dataclass(frozen=True, eq=False)
class Painted:
    """Images of memorized and ordinary prompts; all of `paint` with the same settings.

    Attributes:
        memorized: Training images with their prompts.
        ordinary: Prompts whose images an edit is to leave as they are.
        original: Of the model before the edit, by prompt, shape `(seeds, 3, height, width)`.
        edited: Of the model after it. Shape `(seeds, 3, height, width)`.
        controls: What to compare with, by its name, such as as many random neurons switched off; memorized prompts
            alone suffice. Shape `(seeds, 3, height, width)`.
    """

    memorized: Sequence[Memorized]
    ordinary: Sequence[str]
    original: Mapping[str, Tensor]
    edited: Mapping[str, Tensor]
    controls: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def paint(
    model: TextToImage,
    prompts: Sequence[str],
    settings: PaintSettings,
    *,
    setting: str = "",
    folder: str | Path | None = None,
    progress: Progress = QUIET,
) -> dict[str, Tensor]:
    """Generate the images of prompts, remembering those of each as soon as they are there.

    Args:
        model: The model, as it is in the block that this is called in.
        prompts: At least one.
        settings: How.
        setting: What tells the model from others of its weights, such as its switched-off neurons in JSON.
        folder: Where images are kept; a second call with the same model and settings takes them from there.
        progress: Told of every prompt.

    Returns:
        By prompt, shape `(seeds, 3, height, width)`, of 256 levels within 0 and 1.

    Raises:
        UsageError: There is no prompt.
        CorruptBlob: A file of images is damaged.
    """
    if not prompts:
        raise UsageError("There is no prompt to paint.", cure="Give at least one.")
    about = {"model": model.digest(), "setting": setting, **asdict(settings)}
    del about["rows"]  # which does not change what is painted
    keys = {prompt: of_config({**about, "prompt": prompt}) for prompt in prompts}
    files = {} if folder is None else {prompt: _path(Path(folder), key) for prompt, key in keys.items()}
    found = {prompt: _kept(files[prompt], keys[prompt]) for prompt in files if files[prompt].exists()}
    missing = [prompt for prompt in keys if prompt not in found]
    at_once = max(1, settings.rows // len(settings.seeds))
    batches = Batches(settings.rows)
    with progress.task(f"paint: {model.name}", len(keys), unit="prompts") as task:
        task.update(len(found))
        for start in range(0, len(missing), at_once):
            group = missing[start : start + at_once]
            for prompt, images in zip(group, _generated(model, group, settings, batches), strict=True):
                levels = (images * 255).round().to(torch.uint8)
                if files:
                    write_checkpoint(files[prompt], {"of": keys[prompt]}, [("images", levels)])
                found[prompt] = levels.float() / 255
            task.update(len(group))
    return {prompt: found[prompt] for prompt in keys}


def _generated(
    model: TextToImage, prompts: Sequence[str], settings: PaintSettings, batches: Batches
) -> tuple[Tensor, ...]:
    count, seeds = len(settings.seeds), [*settings.seeds] * len(prompts)
    text = model.embed(prompts).rows([row // count for row in range(len(seeds))])
    images = generated(model, text, seeds, batches, guidance=settings.guidance, steps=settings.steps)
    return torch.split(images, count)


def _path(folder: Path, key: str) -> Path:
    return folder / _PAINTED / f"{key.rpartition(':')[2]}.net.safetensors"


def _kept(path: Path, key: str) -> Tensor:
    with open_checkpoint(path, {"of": key}) as (_, store, _):
        images: Tensor = store.get("images", check=True)
        return images.float() / 255
