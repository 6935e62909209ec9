"""The small text-to-image pipelines of drawn worlds that adapters customize: their shape, and those in the package.

    pipeline = faces_pipeline()
    pipeline("a face on a green ground", num_inference_steps=20, guidance_scale=1.0).images[0]

An ordinary `StableDiffusionPipeline` of half a million weights. Nearly all of its work is done by attention at the
coarsest level, 16 places, so that adapters of `to_q`, `to_k`, `to_v` and `to_out.0` reach most of what it draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from netweight.core.seeds import derive
from netweight.zoo.data.sources import module
from netweight.zoo.drawn_faces import FACES
from netweight.zoo.drawn_world import SIDE, DrawnWorld
from netweight.zoo.small_diffusion import assembled, opened
from netweight.zoo.word_clip import word_clip_tokenizer

__all__ = ["FACES_FOLDER", "FacesShape", "faces_pipeline", "initialized", "pipeline_folder"]


def pipeline_folder(world: DrawnWorld) -> Path:
    """Return where the package has a world's pipeline, with the record of its training."""
    return Path(__file__).parent / "checkpoints" / f"{world.name}s-diffusion"


FACES_FOLDER = pipeline_folder(FACES)
"""The pipeline that draws faces."""


@final
@dataclass(frozen=True)
class FacesShape:
    """The size of a pipeline whose denoiser works at the coarsest of three levels.

    Attributes:
        side: Pixels of a picture's side, a multiple of 8.
        fine: Channels of the two finer levels, which only halve the picture, and later double it.
        width: Channels of the coarsest level.
        blocks: Transformer blocks of each of its three attentions.
        heads: Of each attention.
        text_width: Of the text encoder's states.
        tokens: Of a prompt, with its beginning and end.
    """

    side: int = SIDE
    fine: int = 16
    width: int = 48
    blocks: int = 2
    heads: int = 4
    text_width: int = 32
    tokens: int = 8


def initialized(words: Iterable[str], seed: int, shape: FacesShape = FacesShape()) -> Any:
    """Make a pipeline whose U-Net has learned nothing; as `small_diffusion.initialized`.

    Args:
        words: That are to be one token each, in lower case.
        seed: Decides on all weights; torch's own stream is left as it was.
        shape: Its size.

    Returns:
        A `StableDiffusionPipeline` without safety checker, fp32, in evaluation mode.

    Raises:
        MissingExtra: diffusers or transformers is not installed.
    """
    diffusers: Any = module("diffusers", "Making small diffusion models", "diffusion")
    tokenizer = word_clip_tokenizer(words, length=shape.tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "denoiser"))
        denoiser = diffusers.UNet2DConditionModel(
            sample_size=shape.side,
            in_channels=3,
            out_channels=3,
            block_out_channels=(shape.fine, shape.fine, shape.width),
            layers_per_block=(0, 0, 1),
            down_block_types=("DownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"),
            mid_block_type=None,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=shape.blocks,
            cross_attention_dim=shape.text_width,
            attention_head_dim=shape.heads,  # which diffusers takes for the number of heads
            norm_num_groups=8,
        )
    # Meant for adapters to decide who is drawn, not what shines through the noise that a picture starts from. Whether
    # it helps was not measured clearly.
    complete = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return assembled(denoiser, tokenizer, seed, side=shape.side, text_width=shape.text_width, **complete)


def faces_pipeline(folder: str | Path | None = None, *, world: DrawnWorld = FACES) -> Any:
    """Open a fresh copy of the pipeline that was trained on drawn faces, or on another drawn world.

    Args:
        folder: Where `faces_diffusion_training` left another one; by default the one that comes with the package.
        world: What the one in the package was trained on.

    Raises:
        MissingExtra: diffusers is not installed.
        UsageError: The folder holds no pipeline.
    """
    return opened(pipeline_folder(world) if folder is None else folder)
