"""Trains Concept Sliders: one adapter per attribute, which added makes it more and subtracted makes it less.

    sliders = train_sliders(text_to_image(pipeline), [SliderPairs("beard", before, after, prompts)])

Both sides of a pair show the same thing but for the attribute. With the adapter the model learns to denoise those with
more of it, with its negative those with less, from the same noise, so that what pairs have in common moves neither way.
"""

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
from netweight.generate.adapter_fitting import AdapterRecipe, FittedAdapters, fit_adapters
from netweight.generate.lowrank import linear_layers
from netweight.integrations.adapter_training import ATTENTION
from netweight.integrations.diffusion_pipeline import PipelineModel

__all__ = ["SliderPairs", "train_sliders"]


@final
@dataclass(frozen=True, eq=False)
class SliderPairs:
    """What one slider is to learn.

    Attributes:
        name: Of the slider.
        before: Images with less of the attribute, shape `(k, 3, height, width)`, within 0 and 1.
        after: The same images with more of it.
        prompts: One for each pair.

    Raises:
        UsageError: There is no pair, images and prompts differ in number, or images hold NaN or leave 0 to 1.
    """

    name: str
    before: Tensor
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
    """Train sliders, all in one forward pass for each side of their pairs.

    Args:
        model: A pipeline, whose weights are fixed; they stay as they are.
        pairs: What they learn.
        recipe: How, as adapters are trained.
        layers: Linear layers of the denoiser, by the grammar of `Select`.
        each: Noisy pairs of each slider at a step.
        progress: Where progress is shown.

    Raises:
        UsageError: Two sliders have one name, or there is none.
        NameNotFound, Unsupported: `layers` match nothing, or what is no linear layer.
        TrainingStopped: A loss became NaN or infinite.

    Source: Gandikota et al., Concept Sliders, 2024, the sliders from pairs of images.
    """
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
