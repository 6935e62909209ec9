"""Small text-to-image pipelines of diffusers: made from a seed, and the one that comes with the package.

    pipeline = shapes_pipeline()
    pipeline("a large red circle on a gray ground", num_inference_steps=20, guidance_scale=3.0).images[0]

They are ordinary `StableDiffusionPipeline`s of under a million weights, which diffusers opens, saves and adapts by LoRA
without any code of this package. Text enters in the down and middle blocks of the U-Net, not in the up blocks, because
there the values of cross-attention decide what is drawn; latents are the pixels (`exact_autoencoder`); the text encoder
is random and frozen (`word_clip`). The experiments' `toys.small_diffusion` trains them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from netweight.core.lazy import library
from netweight.core.seeds import derive, torch_generator
from netweight.errors import MissingExtra, UsageError
from netweight.hf.load_language_model import ABOUT
from netweight.toys import checkpoint

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTokenizer


# The pipeline that comes with the package, with the record of its training.
SHAPES_FOLDER = checkpoint("shapes-diffusion")


@final
@dataclass(frozen=True)
class DiffusionShape:
    """The size of a small pipeline."""

    side: int = 16
    """Pixels of a picture's side, a multiple of 8."""
    channels: tuple[int, ...] = (16, 32, 64)
    """Each level has half the side of the one before."""
    text_width: int = 64
    """Width of the text embeddings."""
    tokens: int = 24
    """Tokens of a prompt."""
    heads: int = 4
    """Attention heads."""


def initialized(words: Iterable[str], seed: int, shape: DiffusionShape = DiffusionShape()) -> Any:
    """Make a pipeline whose U-Net has learned nothing: it predicts velocity, on Stable Diffusion's noise schedule."""
    diffusers: Any = library("diffusers", "Making small diffusion models", "diffusion")
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
            # Diffusers takes this value for the number of heads.
            attention_head_dim=shape.heads,
            norm_num_groups=8,
        )
    return assembled(denoiser, tokenizer, seed, side=shape.side, text_width=shape.text_width)


def assembled(denoiser: Any, tokenizer: Any, seed: int, *, side: int, text_width: int, **schedule: Any) -> Any:
    """Put a pipeline around a denoiser that predicts velocity: latents are pixels, the text encoder is random."""
    diffusers: Any = library("diffusers", "Making small diffusion models", "diffusion")
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
    """Open a pipeline's folder: in fp32, on the CPU, in evaluation mode, without progress bars."""
    from netweight.hf.load_pipeline import load_text_to_image

    return load_text_to_image(folder, dtype=torch.float32).pipeline


def shapes_pipeline(folder: str | Path | None = None) -> Any:
    """Open a fresh copy of the pipeline that was trained on `captioned_shapes`."""
    return opened(SHAPES_FOLDER if folder is None else folder)


def training_record(folder: str | Path = SHAPES_FOLDER) -> dict[str, Any]:
    """Return how a pipeline was trained and what came of it; see `small_diffusion_training`."""
    file = Path(folder) / ABOUT
    if not file.is_file():
        raise UsageError(f"{folder} contains no trained pipeline.", cure="Train it first.")
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


_BEACON = 2048.0
_PIXELS = 3
_CHANNELS = 2 * _PIXELS + 2
# Logarithm of the latents' variance, the least that diffusers lets through: a sample is the mode.
_SURE = -30.0


def pixel_autoencoder(side: int) -> Any:
    """Make an autoencoder whose latents are pictures, within -1 and 1, as they are."""
    diffusers: Any = library("diffusers", "Making small diffusion models", "diffusion")
    model = diffusers.AutoencoderKL(
        block_out_channels=(_CHANNELS,),
        layers_per_block=0,
        latent_channels=_PIXELS,
        norm_num_groups=1,
        sample_size=side,
        scaling_factor=1.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Residual blocks add nothing at the start.
            parameter.zero_()
        for half in (model.encoder, model.decoder):
            _pass_through(half.conv_in, half.conv_norm_out, half.conv_out)
        model.encoder.conv_out.bias[_PIXELS:] = _SURE
    model.train(False)
    return model


def _pass_through(first: nn.Conv2d, norm: nn.GroupNorm, last: nn.Conv2d) -> None:
    for channel in range(_PIXELS):
        first.weight[2 * channel, channel, 1, 1] = 1.0
        first.weight[2 * channel + 1, channel, 1, 1] = -1.0
        last.weight[channel, 2 * channel, 1, 1] = 1.0
        last.weight[channel, 2 * channel + 1, 1, 1] = -1.0
    if first.bias is not None:
        first.bias[-2:] = torch.tensor([_BEACON, -_BEACON])
    norm.weight[: 2 * _PIXELS] = _BEACON * (2 / _CHANNELS) ** 0.5


_START, _END = "<|startoftext|>", "<|endoftext|>"
_SUFFIX = "</w>"
_HEADS, _LAYERS = 4, 2


def word_clip_tokenizer(words: Iterable[str], *, length: int) -> CLIPTokenizer:
    """Make a tokenizer of CLIP's kind: byte pairs merged until every word is one token."""
    try:
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers import CLIPTokenizer
    except ImportError as error:
        raise _missing() from error
    letters = sorted(ByteLevel.alphabet())
    merges = _merges(sorted(set(words)))
    tokens = [*letters, *(letter + _SUFFIX for letter in letters), *(a + b for a, b in merges), _START, _END]
    # The annotations of CLIPTokenizer forbid the pairs that it requires.
    make: Any = CLIPTokenizer
    made: CLIPTokenizer = make(
        vocab={token: number for number, token in enumerate(dict.fromkeys(tokens))},
        merges=merges,
        model_max_length=length,
    )
    return made


def random_text_encoder(tokenizer: CLIPTokenizer, *, width: int, seed: int) -> CLIPTextModel:
    """Make a text encoder with random weights, whose states identify every token and its place."""
    try:
        from transformers import CLIPTextConfig, CLIPTextModel
    except ImportError as error:
        raise _missing() from error
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "text encoder"))
        model = CLIPTextModel(config)
    # CLIP begins with embeddings so small that untrained attention drowns them.
    generator = torch_generator(seed, "embeddings")
    for embedding, deviation in (("token_embedding", 1.0), ("position_embedding", 0.3)):
        weight = next(value for name, value in model.named_parameters() if name.endswith(f"{embedding}.weight"))
        with torch.no_grad():
            weight.normal_(0, deviation, generator=generator)
    model.train(False)
    model.requires_grad_(False)
    return model


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Merge the most frequent pair of neighbors, the first in the alphabet of equals, until all words are whole."""
    parts = [[*word[:-1], word[-1] + _SUFFIX] for word in words]
    merges: list[tuple[str, str]] = []
    while True:
        counts: dict[tuple[str, str], int] = {}
        for word in parts:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            return merges
        merges.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        parts = [_merged(word, merges[-1]) for word in parts]


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    parts: list[str] = []
    for part in word:
        if parts and (parts[-1], part) == pair:
            parts[-1] += part
        else:
            parts.append(part)
    return parts


def _missing() -> MissingExtra:
    return MissingExtra(
        "Text encoders are made by transformers, which is not installed.",
        cure='Run: pip install "netweight[diffusion]"',
    )
