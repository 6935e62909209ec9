"""Concept Sliders from pairs of images (Gandikota et al., 2024): images with an attribute pull an adapter one way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.hf.load_pipeline import PipelineModel
from netweight.hf.train_adapters import ATTENTION
from netweight.nn.apply_lora import linear_layers
from netweight.nn.train_lora import AdapterRecipe, FittedAdapters, fit_adapters


@final
@dataclass(frozen=True, eq=False)
class SliderPairs:
    """What one slider is to learn."""

    name: str
    before: Tensor  # images with less of the attribute, shape `(k, 3, height, width)`, within 0 and 1
    after: Tensor
    prompts: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be learned."""
        if self.before.ndim != 4 or self.before.shape != self.after.shape or len(self.before) != len(self.prompts):
            raise UsageError(
                f"The slider {self.name!r} has images {tuple(self.before.shape)} and {tuple(self.after.shape)} and "
                f"{len(self.prompts)} prompts.",
                cure="Give (k, 3, height, width) twice, and k prompts.",
            )
        both = torch.stack([self.before, self.after])
        if not both.numel() or not bool(((both >= 0) & (both <= 1)).all()):  # false for NaN, too
            raise UsageError(f"The images of the slider {self.name!r} are not within 0 and 1, or there are none.")


def train_sliders(
    model: PipelineModel,
    pairs: Sequence[SliderPairs],
    recipe: AdapterRecipe = AdapterRecipe(),
    *,
    layers: Select | str | tuple[str, ...] = ATTENTION,
    each: int = 4,
    progress: Progress = QUIET,
) -> FittedAdapters:
    """Train sliders, all in one forward pass for each side of their pairs."""
    latents = {
        1: [model.to_latents(pair.after) for pair in pairs],
        -1: [model.to_latents(pair.before) for pair in pairs],
    }
    said = sorted({prompt for pair in pairs for prompt in pair.prompts})
    text, rows = model.embed(said), [[said.index(prompt) for prompt in pair.prompts] for pair in pairs]

    def losses(step: int, sign: int) -> Tensor:
        generator = torch_generator(recipe.seed, "slider", step)  # so that both sides see the same
        chosen = [torch.randint(len(pair.prompts), (each,), generator=generator) for pair in pairs]
        noise = torch.randn(each, *model.latent_shape, generator=generator).repeat(len(pairs), 1, 1, 1).to(model.device)
        times = torch.randint(model.levels, (each,), generator=generator).repeat(len(pairs)).to(model.device)
        shown = torch.tensor([rows[place][at] for place, index in enumerate(chosen) for at in index.tolist()])
        clean = torch.cat([one[index.to(one.device)] for one, index in zip(latents[sign], chosen, strict=True)])
        errors = model.training_errors(clean, noise, times, text.rows(shown.to(clean.device)))
        return errors.view(len(pairs), each).mean(1)

    names = [pair.name for pair in pairs]
    wanted = linear_layers(model.denoiser, layers, component=model.component)
    return fit_adapters(
        model.denoiser, names, wanted, losses, recipe, each=each, signs=(1, -1), component=model.component,
        progress=progress,
    )  # fmt: skip
