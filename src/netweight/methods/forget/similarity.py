"""How alike the first predictions of a model are from different noise: what memorization is told by.

A model that has memorized the image of a prompt removes noise towards that image whatever it starts from, so that
the differences between predicted and initial noise resemble each other over seeds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.errors import UsageError


@final
@dataclass(frozen=True)
class Windows:
    """How structural similarity looks at images."""

    kernel: int  # side of the Gaussian window in pixels, odd; its deviation is 0.15 (kernel - 1), so 1.5 for 11
    weights: tuple[float, ...]  # exponent of each scale, the finest first; every further scale halves the image


def windows_for(height: int, width: int) -> Windows:
    """Choose windows that fit images of a size."""
    side = min(height, width)
    if side < 3:
        raise UsageError(f"Structural similarity needs at least 3 pixels; these latents are {height} x {width}.")
    if side >= 44:
        return Windows(11, (0.33, 0.33, 0.33))
    if side >= 24:  # so that some contrast lies within the image
        return Windows(11, (0.5, 0.5))
    if side >= 14:
        return Windows(7, (0.5, 0.5))
    return Windows(min(7, side - 1 + side % 2), (1.0,))


def noise_difference(noise: Tensor, latents: Tensor) -> Tensor:
    """Return predicted minus initial noise, scaled to 0 to 1 in each channel of each sample."""
    # Source: arXiv 2406.02366, section 3.1.
    found = noise.float() - latents.float()
    low, high = found.amin((2, 3), keepdim=True), found.amax((2, 3), keepdim=True)
    return (found - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny)


def similarity(first: Tensor, second: Tensor, windows: Windows | None = None) -> Tensor:
    """Return the (multi-scale) structural similarity of each pair of samples, within 0 and 1."""
    # Source: Wang et al. 2003; constants 0.01 and 0.03, averaged over channels. Coarser scales look within the image;
    # the last reflects its edges, as torchmetrics does, which the paper's code uses.
    windows = windows or windows_for(*first.shape[-2:])
    if first.device.type != "mps":  # which has no doubles; where nothing varies, float32 would lose four digits
        first, second = first.double(), second.double()
    result = torch.ones(len(first), device=first.device, dtype=first.dtype)
    for scale, weight in enumerate(windows.weights):
        if scale:
            first, second = F.avg_pool2d(first, 2), F.avg_pool2d(second, 2)
        whole, contrast = _structure(first, second, windows.kernel)
        last = scale == len(windows.weights) - 1
        result = result * (whole if last else contrast).clamp_min(0) ** weight
    return result.float()


def pairwise(differences: Tensor) -> Tensor:
    """Return the similarity of every two samples, shape `(n, n)`; the diagonal is 1."""
    count = len(differences)
    result = torch.ones(count, count, device=differences.device)
    rows, columns = torch.triu_indices(count, count, 1).tolist()
    if rows:
        found = similarity(differences[rows], differences[columns])
        result[rows, columns] = found
        result[columns, rows] = found
    return result


def _structure(first: Tensor, second: Tensor, kernel: int) -> tuple[Tensor, Tensor]:
    """Means over windows and channels: of similarity, edges reflected, and of contrast, within the image."""
    edge = kernel // 2
    stacked = torch.stack([first, second, first * first, second * second, first * second])
    mean_a, mean_b, square_a, square_b, product = _smooth(stacked, kernel)
    variances = (square_a - mean_a.square()).clamp_min(0) + (square_b - mean_b.square()).clamp_min(0)
    contrast = (2 * (product - mean_a * mean_b) + 0.03**2) / (variances + 0.03**2)
    light = (2 * mean_a * mean_b + 0.01**2) / (mean_a.square() + mean_b.square() + 0.01**2)
    inside = contrast[..., edge:-edge, edge:-edge]
    return (light * contrast).mean((1, 2, 3)), inside.mean((1, 2, 3))


def _smooth(images: Tensor, kernel: int) -> Tensor:
    """Means in Gaussian windows around pixels, edges reflected; as products, since convolutions of doubles are slow."""
    rows, columns = (_windows_along(side, kernel).to(images) for side in images.shape[-2:])
    return ((images @ columns.T).transpose(-1, -2) @ rows.T).transpose(-1, -2)


@functools.cache
def _windows_along(side: int, kernel: int) -> Tensor:
    """For every pixel of a side the weights of the window around it, shape `(side, side)`."""
    offsets = torch.arange(kernel) - kernel // 2
    bell = (-offsets.double().square() / (2 * (0.15 * (kernel - 1)) ** 2)).exp()
    seen = (torch.arange(side)[:, None] + offsets).abs()  # reflected at the first pixel,
    seen = side - 1 - (side - 1 - seen).abs()  # and at the last
    return torch.zeros(side, side, dtype=torch.float64).scatter_add_(1, seen, (bell / bell.sum()).expand(side, -1))
