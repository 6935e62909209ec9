"""The augmentation of small natural images: a random crop of the padded image and a random mirror image, by batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.errors import UsageError

__all__ = ["crop_and_flip"]


def crop_and_flip(
    images: Tensor, generator: torch.Generator, *, padding: int = 4, fill: Tensor | float = 0.0
) -> Tensor:
    """Shift every image at random by up to `padding` pixels each way and mirror every other one, left to right.

    Args:
        images: Shape `(n, channels, height, width)`, any dtype; not changed.
        generator: Decides on shifts and mirrors; its device need not be the images'.
        padding: Most pixels of a shift, at least 0.
        fill: What comes in at the edges: a number, or a tensor of shape `(channels, 1, 1)`. Pixels of uint8 are black
            at 0; normalized ones at `Images.black`.

    Returns:
        New images, same shape and dtype.

    Raises:
        UsageError: The shape or the padding is another.

    Source: HyperFL (arXiv 2412.07187) for CIFAR-10 and CINIC-10; the usual augmentation since ResNet.
    """
    if images.ndim != 4 or padding < 0:
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be cropped with padding {padding}.",
            cure="Give shape (n, channels, height, width) and a padding of at least 0.",
        )
    count, channels, height, width = images.shape
    value = torch.as_tensor(fill, dtype=images.dtype, device=images.device)
    padded = F.pad(images, [padding] * 4)
    if bool((value != 0).any()):
        inside = F.pad(torch.ones(1, 1, height, width, dtype=torch.bool, device=images.device), [padding] * 4)
        padded = torch.where(inside, padded, value.expand(channels, 1, 1))
    draw = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device=generator.device)
    flip = torch.rand(count, generator=generator, device=generator.device) < 0.5
    draw, flip = draw.to(images.device), flip.to(images.device)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    crops = windows[torch.arange(count, device=images.device), :, draw[0], draw[1]]
    return torch.where(flip.view(-1, 1, 1, 1), crops.flip(-1), crops)
