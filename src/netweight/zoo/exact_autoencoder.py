"""An `AutoencoderKL` whose latents are the pixels: weights set by hand, nothing trained, nothing lost.

Pictures of 16 or 32 pixels need no compression, but a Stable Diffusion pipeline needs an autoencoder. Two identities
make one exact within rounding. A sigmoid linear unit s has s(x) - s(-x) = x, so that a channel and its negative pass
it unchanged. And beside two channels of plus and minus 2048 the normalization divides by the same number whatever the
picture is, as far as the square of 1/2048 lets one see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from netweight.zoo.data.sources import module

__all__ = ["pixel_autoencoder"]

_BEACON = 2048.0
_PIXELS = 3
_CHANNELS = 2 * _PIXELS + 2
_SURE = -30.0
"""Logarithm of the latents' variance, the least that diffusers lets through: a sample is the mode."""


def pixel_autoencoder(side: int) -> Any:
    """Make an autoencoder whose latents are pictures, within -1 and 1, as they are.

    Args:
        side: Pixels of a picture's side.

    Returns:
        An `AutoencoderKL` in evaluation mode with scaling factor 1; latents have the shape of pictures.

    Raises:
        MissingExtra: diffusers is not installed.
    """
    diffusers: Any = module("diffusers", "Making small diffusion models", "diffusion")
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
            parameter.zero_()  # residual blocks add nothing then
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
