"""The denoisers of diffusers pipelines: their inputs beside latents, and the embedding of prompts by their pipelines.

Stable Diffusion's U-Net, SDXL's, PixArt's transformer, and the transformers of joint attention of SD3 and Flux. Adding
a kind is a class here and a line in `denoiser_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from netweight.core.lazy import library
from netweight.core.progress import quiet_imports
from netweight.errors import Unsupported, UsageError
from netweight.hf.noise_schedules import Flow, NoiseSchedule, noise_schedule
from netweight.nn.text_to_image import Text


def import_diffusers() -> Any:
    """Import diffusers; say which extra it is in where it is missing."""
    with quiet_imports():
        return library("diffusers", "Opening a diffusion pipeline", "diffusion")


def denoiser_of(pipeline: Any) -> Denoiser:
    """Find the denoiser of a pipeline.

    Raises:
        Unsupported: It is of a kind that is not supported, takes inputs that are not known here, or is compiled.
    """
    diffusers = import_diffusers()
    unet, transformer = (getattr(pipeline, part, None) for part in ("unet", "transformer"))
    if isinstance(unet, diffusers.UNet2DConditionModel):
        _refuse_conditions(unet, pipeline)
        return _XLUNet(unet, pipeline) if _is_xl(unet, pipeline) else _UNet(unet, pipeline)
    if isinstance(transformer, diffusers.PixArtTransformer2DModel):
        return _PixArt(transformer, pipeline)
    for kind, network in ((_SD3, "SD3Transformer2DModel"), (_Flux, "FluxTransformer2DModel")):
        if isinstance(transformer, getattr(diffusers, network)):
            return kind(transformer, pipeline)
    denoiser = unet if unet is not None else transformer
    if hasattr(denoiser, "_orig_mod"):
        raise Unsupported(
            "The denoiser is compiled, so that its layers cannot be read or edited one by one.",
            cure="Give the pipeline with the network from before torch.compile, which is in _orig_mod.",
        )
    what = type(pipeline).__name__ if denoiser is None else type(denoiser).__name__
    raise Unsupported(
        f"The denoiser is a {what}." if denoiser is not None else f"The {what} has neither unet nor transformer.",
        cure="Supported are UNet2DConditionModel, as in Stable Diffusion 1 and 2 and SDXL, PixArtTransformer2DModel, "
        "SD3Transformer2DModel and FluxTransformer2DModel.",
    )


def _is_xl(unet: Any, pipeline: Any) -> bool:
    """Return whether a U-Net takes SDXL's pooled text and sizes; the refiner's aesthetic score is another condition."""
    return (
        unet.config.get("addition_embed_type") == "text_time"
        and getattr(pipeline, "text_encoder_2", None) is not None
        and not pipeline.config.get("requires_aesthetics_score", False)
    )


def _refuse_conditions(unet: Any, pipeline: Any) -> None:
    """Refuse U-Nets with inputs beside latents, a timestep and text."""
    config = unet.config
    wants = [
        name
        for name in ("addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim")
        if config.get(name) is not None and not (name == "addition_embed_type" and _is_xl(unet, pipeline))
    ]
    if config.in_channels != pipeline.vae.config.latent_channels:
        wants.append(f"in_channels={config.in_channels}")
    if wants:
        raise Unsupported(
            f"The UNet2DConditionModel of this {type(pipeline).__name__} takes more than latents, timestep and text "
            f"({', '.join(wants)}).",
            cure="Supported are those of Stable Diffusion 1 and 2 and SDXL's base; refiners, inpainting and "
            "adapters are not.",
        )


class Denoiser:
    """The denoiser of a pipeline, its noise schedule, and the size of its latents.

    Attributes:
        network: The network of diffusers.
        schedule: The noise levels and the scheduler.
        scale: Pixels of an image along a side of a latent.
    """

    flow = False
    """True if it is one of flow matching."""
    multiple = 1
    """Divisor of the sides of its latents."""
    guided_inside = False
    """True if guidance is an input of the network, or nothing to it, so that no second prediction is made."""

    def __init__(self, network: Any, pipeline: Any) -> None:
        self.network = network
        self.pipeline = pipeline
        self.schedule: NoiseSchedule = noise_schedule(pipeline.scheduler, flow=self.flow)
        self.scale = 2 ** (len(pipeline.vae.config.block_out_channels) - 1)
        self._size: tuple[int, int] | None = None
        # What the pipeline's own class takes where the network's configuration does not say it.
        self._usual = getattr(pipeline, "default_sample_size", None)

    def choose_size(self, size: tuple[int, int] | None) -> None:
        """Fix the size of images in pixels: the one given, or what the configuration says."""
        if size is not None:
            unit = self.scale * self.multiple
            if any(side < unit or side % unit for side in size):
                raise UsageError(
                    f"Images of {size[0]} × {size[1]} pixels cannot be made: sides are multiples of {unit}.",
                    cure="Give another --size.",
                )
            self._size = size[0] // self.scale, size[1] // self.scale
            return
        given = self.network.config.get("sample_size") or self._usual
        if given is None:
            raise UsageError(
                f"The configuration of the {type(self.network).__name__} has no sample_size, so that the size of its "
                "images is not known.",
                cure="Give it in pixels: --size 512.",
            )
        height, width = (given, given) if isinstance(given, int) else given
        self._size = int(height), int(width)

    @property
    def channels(self) -> int:
        """Channels of its latents."""
        return int(self.network.config.in_channels)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the latents of one image."""
        assert self._size is not None  # see `text_to_image`
        return (self.channels, *self._size)

    @property
    def tokens(self) -> int:
        """Image tokens of a network of joint attention, on which timesteps may depend."""
        _, height, width = self.latent_shape
        return height * width // self.multiple**2

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return next(self.network.parameters()).device  # type: ignore[no-any-return]

    @property
    def tokenizers(self) -> list[tuple[Any, int]]:
        """The tokenizers of its text encoders, each with the number of tokens that the pipeline lets it read."""
        parts = [getattr(self.pipeline, name, None) for name in ("tokenizer", "tokenizer_2", "tokenizer_3")]
        return [(each, int(each.model_max_length)) for each in parts if each is not None]

    def embedded(self, prompts: Sequence[str]) -> Text:
        """Return prompts as the pipeline itself embeds them; long ones are cut as it cuts them."""
        encoded = self.pipeline.encode_prompt(
            list(prompts), num_images_per_prompt=1, do_classifier_free_guidance=False, device=self.device
        )
        return self.text(encoded, prompts)

    def text(self, encoded: Any, prompts: Sequence[str]) -> Text:
        """Return what the pipeline's `encode_prompt` returned, as the network receives it."""
        return Text(encoded[0])

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text, guidance: float | None = None) -> Tensor:
        """Run the network once.

        Args:
            latents: Noisy latents, shape `(n, channels, height, width)`.
            timestep: A scalar, or shape `(n,)`.
            text: A prompt for each.
            guidance: The scale, for networks of which it is an input; None takes their pipeline's default.

        Returns:
            What it answers, shape `(n, channels, height, width)`.
        """
        raise NotImplementedError


class _UNet(Denoiser):
    """Stable Diffusion's: it attends to every token, padding too."""

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text, guidance: float | None = None) -> Tensor:
        dtype = self.network.dtype
        output: Tensor = self.network(
            latents.to(dtype), timestep.to(latents.device), text.states.to(dtype), return_dict=False,
            added_cond_kwargs=self.conditions(latents, text),
        )[0]  # fmt: skip
        return output

    def conditions(self, latents: Tensor, text: Text) -> dict[str, Tensor] | None:
        """Inputs beside latents, timestep and text."""
        return None


class _XLUNet(_UNet):
    """SDXL's: states of two encoders, pooled text, and the image's size, uncropped, as its pipeline gives them."""

    def __init__(self, network: Any, pipeline: Any) -> None:
        super().__init__(network, pipeline)
        self._zeros = bool(pipeline.config.get("force_zeros_for_empty_prompt", True))

    def text(self, encoded: Any, prompts: Sequence[str]) -> Text:
        given = torch.tensor([bool(prompt) or not self._zeros for prompt in prompts], device=encoded[0].device)
        return Text(encoded[0] * given[:, None, None], pooled=encoded[2] * given[:, None])

    def conditions(self, latents: Tensor, text: Text) -> dict[str, Tensor] | None:
        assert text.pooled is not None  # see `text`
        height, width = (float(side * self.scale) for side in latents.shape[-2:])
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=self.network.dtype, device=latents.device)
        pooled = text.pooled.to(device=latents.device, dtype=self.network.dtype)
        return {"text_embeds": pooled, "time_ids": sizes.repeat(len(latents), 1)}


class _PixArt(Denoiser):
    """PixArt-Alpha and -Sigma: padding is masked, and a learned variance is cut off."""

    @property
    def tokenizers(self) -> list[tuple[Any, int]]:
        return [(self.pipeline.tokenizer, _cut_at(self.pipeline))]

    def text(self, encoded: Any, prompts: Sequence[str]) -> Text:
        return Text(encoded[0], encoded[1].bool())

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text, guidance: float | None = None) -> Tensor:
        dtype, count = self.network.dtype, len(latents)
        output: Tensor = self.network(
            latents.to(dtype),
            encoder_hidden_states=text.states.to(dtype),
            encoder_attention_mask=None if text.mask is None else text.mask.to(dtype),
            timestep=timestep.to(latents.device).expand(count),
            added_cond_kwargs=self._sizes(latents),
            return_dict=False,
        )[0]
        return output[:, : latents.shape[1]]

    def _sizes(self, latents: Tensor) -> dict[str, Tensor | None]:
        """The image's size, an input of PixArt-Alpha's largest network, as its pipeline gives it for square ones."""
        if not self.network.use_additional_conditions:
            return {"resolution": None, "aspect_ratio": None}
        count, _, height, width = latents.shape
        made: dict[str, Any] = {"dtype": self.network.dtype, "device": latents.device}
        resolution = torch.tensor([[height * 8.0, width * 8.0]], **made).repeat(count, 1)
        return {"resolution": resolution, "aspect_ratio": torch.full((count, 1), height / width, **made)}


class _Joint(Denoiser):
    """Joint attention of text and image: states of all text encoders, and pooled text; flow matching."""

    flow = True
    multiple = 2

    def __init__(self, network: Any, pipeline: Any) -> None:
        super().__init__(network, pipeline)
        if self.channels != pipeline.vae.config.latent_channels:
            raise Unsupported(
                f"The {type(network).__name__} takes {self.channels} channels of latents, and the autoencoder has "
                f"{pipeline.vae.config.latent_channels}: it reads more than latents, a timestep and text.",
                cure="Supported are text-to-image networks; those of inpainting and control are not.",
            )

    @property
    def tokenizers(self) -> list[tuple[Any, int]]:
        # T5, the last one, is cut at a length of the call; the others at their own.
        last = "3" if hasattr(self.pipeline, "tokenizer_3") else "2"
        tokenizers = super().tokenizers
        if getattr(self.pipeline, f"text_encoder_{last}", None) is not None:
            tokenizers[-1] = tokenizers[-1][0], _cut_at(self.pipeline, tokenizers[-1][0])
        return tokenizers


class _SD3(_Joint):
    """Stable Diffusion 3's and 3.5's."""

    def __init__(self, network: Any, pipeline: Any) -> None:
        self.multiple = int(network.config.patch_size)
        super().__init__(network, pipeline)

    def embedded(self, prompts: Sequence[str]) -> Text:
        encoded = self.pipeline.encode_prompt(
            list(prompts), None, None, do_classifier_free_guidance=False, device=self.device
        )
        return Text(encoded[0], pooled=encoded[2])

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text, guidance: float | None = None) -> Tensor:
        assert text.pooled is not None  # see `embedded`
        dtype = self.network.dtype
        output: Tensor = self.network(
            hidden_states=latents.to(dtype),
            timestep=timestep.to(latents.device).expand(len(latents)),
            encoder_hidden_states=text.states.to(dtype),
            pooled_projections=text.pooled.to(dtype),
            return_dict=False,
        )[0]
        return output


class _Flux(_Joint):
    """Flux's: latents in patches of two by two, and guidance as an input, or none in networks that were distilled."""

    guided_inside = True

    def __init__(self, network: Any, pipeline: Any) -> None:
        super().__init__(network, pipeline)
        assert isinstance(self.schedule, Flow)  # see `flow`
        self.schedule.evenly = True
        self._guidance = float(inspect.signature(pipeline.__call__).parameters["guidance_scale"].default)

    @property
    def channels(self) -> int:
        return int(self.network.config.in_channels) // 4

    def embedded(self, prompts: Sequence[str]) -> Text:
        states, pooled, _ = self.pipeline.encode_prompt(list(prompts), None, device=self.device)
        return Text(states, pooled=pooled)

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text, guidance: float | None = None) -> Tensor:
        assert text.pooled is not None  # see `embedded`
        dtype, count = self.network.dtype, len(latents)
        height, width = latents.shape[-2:]
        patches = (
            latents.to(dtype).reshape(count, self.channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        )
        scale = None
        if self.network.config.guidance_embeds:
            scale = torch.full((count,), self._guidance if guidance is None else guidance, device=latents.device)
        output: Tensor = self.network(
            hidden_states=patches.reshape(count, height * width // 4, 4 * self.channels),
            # In the dtype of the text, as the pipeline's own call rounds it.
            timestep=timestep.to(latents.device).expand(count).to(dtype) / 1000,
            guidance=scale,
            pooled_projections=text.pooled.to(dtype),
            encoder_hidden_states=text.states.to(dtype),
            txt_ids=torch.zeros(text.states.shape[1], 3, device=latents.device, dtype=dtype),
            img_ids=self._places(height // 2, width // 2).to(device=latents.device, dtype=dtype),
            return_dict=False,
        )[0]
        answers = output.reshape(count, height // 2, width // 2, self.channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return answers.reshape(count, self.channels, height, width)

    @staticmethod
    def _places(height: int, width: int) -> Tensor:
        """The places of patches: 0, row and column of each."""
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        return torch.stack([torch.zeros_like(rows), rows, columns], 2).reshape(-1, 3)


def _cut_at(pipeline: Any, tokenizer: Any = None) -> int:
    """The tokens that a pipeline's call reads of a prompt by T5, which has no length of its own."""
    parameters = inspect.signature(pipeline.encode_prompt).parameters
    own = int((tokenizer or pipeline.tokenizer).model_max_length)
    return min(own, int(parameters["max_sequence_length"].default)) if "max_sequence_length" in parameters else own
