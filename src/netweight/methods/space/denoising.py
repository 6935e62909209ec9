"""The loss of inversion: how badly the models of points denoise their target images, with masks where wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.attacks.embedding_search.denoising import chosen
from netweight.attacks.embedding_search.settings import Said
from netweight.errors import UsageError
from netweight.generate.lowrank import applied
from netweight.methods.space.painting import of_denoiser
from netweight.probe.diffusion import Prediction, TextToImage

__all__ = ["DenoisingLoss"]


@final
class DenoisingLoss:
    """Mean squared error of denoising images at uniformly drawn timesteps, one number per target.

    Args:
        model: The base model.
        images: Of each target, shape `(b, m, 3, height, width)`, within 0 and 1: m images that show the same thing; or
            `(b, 3, height, width)`, one each. Images of the model's own size only.
        prompts: One for all, or one per target.
        masks: What counts, 1, and what does not, 0: shape `(b, m, height, width)` or `(b, height, width)`; None for
            everything. They are brought to the size of latents, and the mean is taken over what counts.
        draws: Timesteps and noises per image and step.
        steps: Timesteps are drawn from a schedule of so many steps; as many as the model was trained with are all.
        said: The prediction that the error is counted in: "noise" for networks that predict noise.

    Raises:
        UsageError: Shapes do not fit, values lie outside of 0 and 1, a mask has nothing that counts, or images have
            another size than the model makes.
    """

    def __init__(
        self,
        model: TextToImage,
        images: Tensor,
        prompts: Sequence[str],
        *,
        masks: Tensor | None = None,
        draws: int = 1,
        steps: int = 50,
        said: Said = "noise",
    ) -> None:
        images = images[:, None] if images.ndim == 4 else images
        _check(images, prompts, draws)
        self._model, self._said, self._draws = model, said, draws
        self._each = images.shape[1] * draws
        latents = model.to_latents(images.flatten(0, 1))
        _check_size(model, latents, images)
        self._groups = torch.arange(len(images), device=latents.device).repeat_interleave(self._each)
        self._latents = latents.detach().repeat_interleave(draws, 0)
        self._masks = None if masks is None else _masks(masks, images, latents).repeat_interleave(draws, 0)
        texts = list(prompts) if len(prompts) == len(images) else list(prompts) * len(images)
        self._text = model.embed(texts).rows([row for row in range(len(images)) for _ in range(self._each)])
        self._schedule = model.timesteps(steps)

    def __call__(self, changes: Mapping[str, Tensor], generator: torch.Generator, /) -> Tensor:
        """Return the error of each target, shape `(b,)`; gradients flow to the changes."""
        latents, model = self._latents, self._model
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        drawn = torch.randint(len(self._schedule), (len(latents),), generator=generator)
        times = self._schedule.cpu()[drawn].to(latents.device)
        with applied(model.denoiser, of_denoiser(changes, model.denoiser), self._groups):
            told = model.predict(model.add_noise(latents, noise, times), times, self._text)
        first, second = (
            chosen(model, one, times, self._said) for one in (told, Prediction(noise=noise, sample=latents))
        )
        errors = (first - second).float().square()
        if self._masks is None:
            found = errors.flatten(1).mean(1)
        else:
            found = (errors * self._masks).flatten(1).sum(1) / self._masks.expand_as(errors).flatten(1).sum(1)
        return found.reshape(-1, self._each).mean(1)


def _check(images: Tensor, prompts: Sequence[str], draws: int) -> None:
    if images.ndim != 5 or images.shape[2] != 3 or not images.numel():
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be inverted.",
            cure="Give (targets, 3, height, width), or (targets, images, 3, height, width).",
        )
    if not (images.isfinite().all() and images.min() >= 0 and images.max() <= 1):
        raise UsageError("Images hold values outside of 0 and 1, or NaN.", cure="Divide bytes by 255.")
    if len(prompts) not in (1, len(images)) or draws < 1:
        raise UsageError(
            f"{len(images)} targets came with {len(prompts)} prompts and {draws} draws.",
            cure="Give one prompt, or one per target, and at least one draw.",
        )


def _check_size(model: TextToImage, latents: Tensor, images: Tensor) -> None:
    wanted = model.initial_noise([0]).shape[1:]
    if latents.shape[1:] != wanted:
        scale = images.shape[-1] / latents.shape[-1]
        sides = " × ".join(str(round(side * scale)) for side in wanted[1:])
        raise UsageError(
            f"The images are {images.shape[-2]} × {images.shape[-1]} pixels, and {model.name} makes {sides}.",
            cure="Cut and resize them to that size.",
        )


def _masks(masks: Tensor, images: Tensor, latents: Tensor) -> Tensor:
    """Masks at the size of the latents, shape `(b * m, 1, h, w)`."""
    masks = (masks[:, None] if masks.ndim == 3 else masks).float()
    if masks.shape != (*images.shape[:2], *images.shape[3:]):
        raise UsageError(
            f"Masks of shape {tuple(masks.shape)} do not fit images of {tuple(images.shape)}.",
            cure="Give one per image, of its height and width.",
        )
    if not (masks.isfinite().all() and masks.min() >= 0 and masks.max() <= 1):
        raise UsageError("Masks hold values outside of 0 and 1, or NaN.", cure="1 is what counts.")
    small = F.interpolate(masks.flatten(0, 1)[:, None], latents.shape[2:], mode="bilinear", antialias=True)
    empty = (small.flatten(1).sum(1) == 0).nonzero()[:, 0].tolist()
    if empty:
        raise UsageError(f"The mask of image {empty[0]} has nothing that counts.", cure="1 is what counts.")
    return small.to(latents)
