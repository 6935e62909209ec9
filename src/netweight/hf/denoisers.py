"""Which denoisers of diffusers are known, and how each is called. Used by `diffusion_pipeline.py` only."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from netweight.errors import Unsupported
from netweight.nn.text_to_image import Text


class Denoiser(Protocol):
    """A network that a pipeline removes noise with, and how it is called."""

    network: Any

    @property
    def latent_shape(self) -> tuple[int, int, int]: ...

    @property
    def device(self) -> torch.device: ...

    def text(self, encoded: Any) -> Text:
        """Take what the pipeline's `encode_prompt` returned."""

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text) -> Tensor:
        """Return what the network says, of the latents' shape."""


def denoiser_of(pipeline: Any) -> Denoiser:
    """Find the denoiser of a pipeline."""
    from diffusers import PixArtTransformer2DModel, UNet2DConditionModel

    unet, transformer = (getattr(pipeline, part, None) for part in ("unet", "transformer"))
    if isinstance(unet, UNet2DConditionModel):
        _refuse_conditions(unet, pipeline)
        return _UNet(unet)
    if isinstance(transformer, PixArtTransformer2DModel):
        return _PixArt(transformer)
    found = unet if unet is not None else transformer
    what = type(pipeline).__name__ if found is None else type(found).__name__
    raise Unsupported(
        f"The denoiser is a {what}." if found is not None else f"The {what} has neither unet nor transformer.",
        cure="Supported are UNet2DConditionModel, as in Stable Diffusion 1 and 2, and PixArtTransformer2DModel.",
    )


def _refuse_conditions(unet: Any, pipeline: Any) -> None:
    """Refuse U-Nets that want more than latents, a timestep and text."""
    config = unet.config
    wants = [
        name
        for name in ("addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim")
        if config.get(name) is not None
    ]
    if config.in_channels != pipeline.vae.config.latent_channels:
        wants.append(f"in_channels={config.in_channels}")
    if wants:
        raise Unsupported(
            f"The UNet2DConditionModel of this {type(pipeline).__name__} takes more than latents, timestep and text "
            f"({', '.join(wants)}).",
            cure="Supported are those of Stable Diffusion 1 and 2; SDXL, inpainting and adapters are not.",
        )


class _Wrapped:
    """A network, and what all kinds are asked alike."""

    def __init__(self, network: Any) -> None:
        self.network = network

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return _latent_shape(self.network)

    @property
    def device(self) -> torch.device:
        return _device(self.network)


@final
class _UNet(_Wrapped):
    """Stable Diffusion's: it attends to every token, padding too."""

    def text(self, encoded: Any) -> Text:
        return Text(encoded[0])

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text) -> Tensor:
        dtype = self.network.dtype
        said: Tensor = self.network(
            latents.to(dtype), timestep.to(latents.device), text.states.to(dtype), return_dict=False
        )[0]
        return said


@final
class _PixArt(_Wrapped):
    """PixArt-Alpha and -Sigma: padding is masked, and a learned variance is cut off."""

    def text(self, encoded: Any) -> Text:
        return Text(encoded[0], encoded[1].bool())

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text) -> Tensor:
        dtype, count = self.network.dtype, len(latents)
        said: Tensor = self.network(
            latents.to(dtype),
            encoder_hidden_states=text.states.to(dtype),
            encoder_attention_mask=None if text.mask is None else text.mask.to(dtype),
            timestep=timestep.to(latents.device).expand(count),
            added_cond_kwargs=self._sizes(latents),
            return_dict=False,
        )[0]
        return said[:, : latents.shape[1]]

    def _sizes(self, latents: Tensor) -> dict[str, Tensor | None]:
        """What PixArt-Alpha's largest network is told of the image, as its pipeline does for square ones."""
        if not self.network.use_additional_conditions:
            return {"resolution": None, "aspect_ratio": None}
        count, _, height, width = latents.shape
        made: dict[str, Any] = {"dtype": self.network.dtype, "device": latents.device}
        resolution = torch.tensor([[height * 8.0, width * 8.0]], **made).repeat(count, 1)
        return {"resolution": resolution, "aspect_ratio": torch.full((count, 1), height / width, **made)}


def _latent_shape(network: Any) -> tuple[int, int, int]:
    size = network.config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    return int(network.config.in_channels), int(height), int(width)


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device
