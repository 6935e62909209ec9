"""Small text-to-image pipelines of diffusers: made from a seed, and the one that comes with the package.

    pipeline = shapes_pipeline()
    pipeline("a large red circle on a gray ground", num_inference_steps=20, guidance_scale=3.0).images[0]

They are ordinary `StableDiffusionPipeline`s of under a million weights, which diffusers opens, saves and adapts by LoRA
without any code of this package. Text enters in the down and middle blocks of the U-Net, not in the up blocks, because
there the values of cross-attention decide what is drawn; latents are the pixels (`exact_autoencoder`); the text encoder
is random and frozen (`word_clip`). `small_diffusion_training` trains them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from netweight.core.seeds import derive
from netweight.errors import UsageError
from netweight.zoo.data.sources import module
from netweight.zoo.exact_autoencoder import pixel_autoencoder
from netweight.zoo.model_folder import ABOUT
from netweight.zoo.word_clip import random_text_encoder, word_clip_tokenizer

__all__ = [
    "SHAPES_FOLDER",
    "DiffusionShape",
    "assembled",
    "initialized",
    "opened",
    "shapes_pipeline",
    "training_record",
]

SHAPES_FOLDER = Path(__file__).parent / "checkpoints" / "shapes-diffusion"
"""The pipeline that comes with the package, with the record of its training."""


@final
@dataclass(frozen=True)
class DiffusionShape:
    """The size of a small pipeline.

    Attributes:
        side: Pixels of a picture's side, a multiple of 8.
        channels: Of the U-Net from the finest level, which sees no text, to the coarsest. Each level has half the side
            of the one before.
        text_width: Of the text encoder's states.
        tokens: Of a prompt, with its beginning and end.
        heads: Of each attention.
    """

    side: int = 16
    channels: tuple[int, ...] = (16, 32, 64)
    text_width: int = 64
    tokens: int = 24
    heads: int = 4


def initialized(words: Iterable[str], seed: int, shape: DiffusionShape = DiffusionShape()) -> Any:
    """Make a pipeline whose U-Net has learned nothing: it predicts velocity, on Stable Diffusion's noise schedule.

    Args:
        words: That are to be one token each, in lower case.
        seed: Decides on all weights; torch's own stream is left as it was.
        shape: Its size.

    Returns:
        A `StableDiffusionPipeline` without safety checker, fp32, in evaluation mode.

    Raises:
        MissingExtra: diffusers or transformers is not installed.
    """
    import torch

    diffusers: Any = module("diffusers", "Making small diffusion models", "diffusion")
    tokenizer = word_clip_tokenizer(words, length=shape.tokens)
    deeper = len(shape.channels) - 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "denoiser"))
        denoiser = diffusers.UNet2DConditionModel(
            sample_size=shape.side,
            in_channels=3,
            out_channels=3,
            block_out_channels=shape.channels,
            # The finest level only halves the picture on the way down: most of the time would go there.
            layers_per_block=(0, *[1] * deeper),
            down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * deeper),
            up_block_types=("UpBlock2D",) * (deeper + 1),
            cross_attention_dim=shape.text_width,
            attention_head_dim=shape.heads,  # which diffusers takes for the number of heads
            norm_num_groups=8,
        )
    return assembled(denoiser, tokenizer, seed, side=shape.side, text_width=shape.text_width)


def assembled(denoiser: Any, tokenizer: Any, seed: int, *, side: int, text_width: int, **schedule: Any) -> Any:
    """Put a pipeline around a denoiser that predicts velocity: latents are pixels, the text encoder is random.

    Args:
        denoiser: A `UNet2DConditionModel` of three channels.
        tokenizer: As `word_clip_tokenizer` makes it.
        seed: Decides on the text encoder.
        side: Pixels of a picture's side.
        text_width: Of the text encoder's states.
        schedule: Settings of the scheduler beside Stable Diffusion's.

    Returns:
        A `StableDiffusionPipeline` without safety checker, fp32, in evaluation mode, on Stable Diffusion's noise
        schedule.

    Raises:
        MissingExtra: diffusers is not installed.
    """
    diffusers: Any = module("diffusers", "Making small diffusion models", "diffusion")
    denoiser.train(False)
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        **schedule,
    )
    pipeline = diffusers.StableDiffusionPipeline(
        vae=pixel_autoencoder(side),
        text_encoder=random_text_encoder(tokenizer, width=text_width, seed=seed),
        tokenizer=tokenizer,
        unet=denoiser,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def opened(folder: str | Path) -> Any:
    """Open a pipeline's folder: in fp32, on the CPU, in evaluation mode, without progress bars.

    Args:
        folder: Of diffusers.

    Returns:
        A `StableDiffusionPipeline`, or whatever other pipeline the folder holds.

    Raises:
        MissingExtra: diffusers is not installed.
        UsageError: The folder holds no pipeline.
    """
    import torch

    from netweight.integrations.diffusion_pipeline import load_text_to_image

    return load_text_to_image(folder, dtype=torch.float32).pipeline


def shapes_pipeline(folder: str | Path | None = None) -> Any:
    """Open a fresh copy of the pipeline that was trained on `captioned_shapes`.

    Args:
        folder: Where `small_diffusion_training` left another one; by default the one that comes with the package.

    Raises:
        MissingExtra: diffusers is not installed.
        UsageError: The folder holds no pipeline.
    """
    return opened(SHAPES_FOLDER if folder is None else folder)


def training_record(folder: str | Path = SHAPES_FOLDER) -> dict[str, Any]:
    """Return how a pipeline was trained and what came of it; see `small_diffusion_training`.

    Raises:
        UsageError: The folder holds no record.
    """
    file = Path(folder) / ABOUT
    if not file.is_file():
        raise UsageError(f"{folder} holds no trained pipeline.", cure="Train it first.")
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record
