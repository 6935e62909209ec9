"""Alphas and scales: exact ways from one to the other, and into an up factor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def alpha_of(scale: float, rank: int) -> float:
    """Return the alpha for which alpha / rank is a scale, or nearest to it where no fp64 number is: a bit beside it.

    `rank`: at least 1.
    """
    near = scale * rank
    candidates = (float(round(near)), near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf))
    return min(candidates, key=lambda alpha: abs(alpha / rank - scale))


def scaled_up(up: Tensor, factor: float) -> Tensor:
    """Multiply an up factor: in its own dtype where that holds the product exactly, else rounded to fp32 or fp64.

    `up`: shape `(rows, rank)`, floating point.

    Returns:
        A new tensor, shape `(rows, rank)`.
    """
    import torch

    whole = up.double() * factor
    for dtype in (up.dtype, torch.float32):
        if torch.equal(whole.to(dtype).double(), whole):
            return whole.to(dtype)
    rounded = whole.float()
    return whole if up.dtype == torch.float64 or not rounded.isfinite().all() else rounded
