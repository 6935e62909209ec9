"""Images of memorized and ordinary prompts, generated with the same seeds before and after an edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from netweight.core.digests import digest_config
from netweight.core.names import Units
from netweight.core.progress import QUIET, Progress
from netweight.data.images.pairs import MemorizedPair
from netweight.errors import UsageError
from netweight.methods.forget.mitigations import DeactivatedNeurons, neuron_counts, random_units
from netweight.methods.forget.settings import GenerationSettings
from netweight.metrics.copies import MemorizedImage
from netweight.nn.text_to_image import Batches, TextToImage, generated, most_rows
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

# Folder of the images of all prompts.
_FOLDER = "images"


@final
@dataclass(frozen=True, eq=False)
class GeneratedImages:
    """Images of memorized and ordinary prompts, all with the same settings, each `(seeds, 3, height, width)`."""

    memorized: Sequence[MemorizedImage]
    """Training images with their prompts; a prompt may have several."""
    ordinary: Sequence[str]
    """Prompts whose images an edit is to leave as they are."""
    original: Mapping[str, Tensor]
    """Images of the model before the edit, by prompt."""
    edited: Mapping[str, Tensor]
    """Images of the edited model, by prompt."""
    controls: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Images of other edits to compare with, such as as many random neurons switched off, by name and prompt;
    memorized prompts alone suffice."""
    warnings: Sequence[str] = ()
    """Remarks for readers."""
    others: Sequence[str] = ()
    """Prompts that the edit was given neither to forget nor to keep."""


def generate_images(
    model: TextToImage,
    prompts: Sequence[str],
    settings: GenerationSettings,
    *,
    setting: str = "",
    folder: str | Path | None = None,
    progress: Progress = QUIET,
) -> dict[str, Tensor]:
    """Generate the images of prompts; those of each are kept in a folder as soon as they are there.

    Args:
        model: The model.
        prompts: The prompts, at least one.
        settings: Seeds, guidance and steps.
        setting: Distinguishes images of the same weights, such as neurons that are switched off for a block.
        folder: Where images are kept, and found again; None keeps none.
        progress: Reports prompts.

    Returns:
        By prompt its images, float32 of shape `(seeds, 3, height, width)`, of 256 levels within 0 and 1.
    """
    if not prompts:
        raise UsageError("There is no prompt to generate images of.", cure="Give at least one.")
    about = {"model": model.identity(), "setting": setting, **settings.to_json()}
    # The number of rows at once does not change the images.
    del about["rows"]
    keys = {prompt: digest_config({**about, "prompt": prompt}) for prompt in prompts}
    files = {} if folder is None else {prompt: _path(Path(folder), key) for prompt, key in keys.items()}
    images = {prompt: _kept(files[prompt], keys[prompt]) for prompt in files if files[prompt].exists()}
    missing = [prompt for prompt in keys if prompt not in images]
    at_once = max(1, settings.rows // len(settings.seeds))
    batches = Batches(most_rows(model, settings.rows))
    with progress.task(f"generate: {model.name}", len(keys), unit="prompts") as task:
        task.update(len(images))
        for start in range(0, len(missing), at_once):
            group = missing[start : start + at_once]
            for prompt, made in zip(group, _seeded(model, group, settings, batches), strict=True):
                levels = (made * 255).round().to(torch.uint8)
                if files:
                    write_checkpoint(files[prompt], {"of": keys[prompt]}, [("images", levels)])
                images[prompt] = levels.float() / 255
            task.update(len(group))
    return {prompt: images[prompt] for prompt in keys}


def generate_before_and_after(
    models: Mapping[str, TextToImage],
    pairs: Sequence[MemorizedPair],
    ordinary: Sequence[str],
    units: Units,
    settings: GenerationSettings,
    *,
    folder: Path,
    seed: int,
    others: Sequence[str] = (),
    progress: Progress = QUIET,
) -> GeneratedImages:
    """Generate memorized and ordinary prompts by the original, by its edit, and with as many random neurons off."""
    memorized = [MemorizedImage(pair.prompt, pair.kind, pair.image, name=pair.name) for pair in pairs]
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    made = {
        name: generate_images(
            model, [*prompts, *ordinary, *others] if name in ("original", "edited") else prompts, settings,
            folder=folder, progress=progress,
        )
        for name, model in models.items()
    }  # fmt: skip
    original, edited = made.pop("original"), made.pop("edited")
    warnings: tuple[str, ...] = ()
    # Other edits do not have neurons with which random ones could be compared.
    if units:
        name, random = _random(models["original"], units, seed)
        if random is None:
            warnings = (f"There is no control of random neurons: {name}.",)
        else:
            with DeactivatedNeurons(random)(models["original"], prompts) as model:
                made[name] = generate_images(
                    model, prompts, settings, setting=random.to_json(), folder=folder, progress=progress
                )
    return GeneratedImages(memorized, list(ordinary), original, edited, made, warnings, list(others))


def _random(model: TextToImage, units: Units, seed: int) -> tuple[str, Units | None]:
    """Return as many other neurons, matched by layer where a layer has enough; or the reason why there are none."""
    counts = neuron_counts(model.denoiser, scope="all")
    reason = ""
    for matched, name in ((True, "random neurons, matched by layer"), (False, "random neurons")):
        try:
            return name, random_units(units, counts, layer_matched=matched, seed=seed)
        except UsageError as error:
            # If more than half of a layer is edited, too few neurons remain for the control.
            reason = error.reason.rstrip(".")
    return reason, None


def _seeded(
    model: TextToImage, prompts: Sequence[str], settings: GenerationSettings, batches: Batches
) -> tuple[Tensor, ...]:
    count, seeds = len(settings.seeds), [*settings.seeds] * len(prompts)
    text = model.embed(prompts).rows([row // count for row in range(len(seeds))])
    images = generated(model, text, seeds, batches, guidance=settings.guidance, steps=settings.steps)
    return torch.split(images, count)


def _path(folder: Path, key: str) -> Path:
    return folder / _FOLDER / f"{key.rpartition(':')[2]}.net.safetensors"


def _kept(path: Path, key: str) -> Tensor:
    with open_checkpoint(path, {"of": key}) as (_, store, _):
        images: Tensor = store.get("images", check=True)
        return images.float() / 255
