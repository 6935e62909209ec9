"""Centered correlation of pixels, for small images that are copied as they are; no substitute for a copy detector."""

from __future__ import annotations

from torch import Tensor

__all__ = ["correlation"]


def correlation(images: Tensor, targets: Tensor) -> Tensor:
    """Return the correlation of the pixels of each pair of images.

    Args:
        images: Shape `(n, 3, height, width)`.
        targets: The same shape.

    Returns:
        Shape `(n,)`, -1 to 1; 0 where one of the two is of one color alone.
    """
    first, second = (batch.flatten(1).double() for batch in (images, targets.to(images.device)))
    first, second = first - first.mean(1, keepdim=True), second - second.mean(1, keepdim=True)
    lengths = first.norm(dim=1) * second.norm(dim=1)
    found: Tensor = (first * second).sum(1) / lengths.clamp_min(1e-12)
    return found.float()
