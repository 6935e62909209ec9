"""Structural similarity at several scales (MS-SSIM) of noise differences and other arrays of any range and size.

`netweight.metrics.images.ssim` is the usual measure of images within 0 and 1, at one scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.lazy import extra
from netweight.errors import UsageError


@final
@dataclass(frozen=True)
class Windows:
    """Windows of structural similarity."""

    kernel: int
    """Side of the Gaussian window in pixels, odd; its deviation is 0.15 (kernel - 1), so 1.5 for 11."""
    weights: tuple[float, ...]
    """Exponent of each scale, the finest first; every further scale halves the image."""


def windows_for(height: int, width: int) -> Windows:
    """Choose windows that fit images of a size."""
    side = min(height, width)
    if side < 3:
        raise UsageError(f"Structural similarity needs at least 3 pixels; these latents are {height} x {width}.")
    if side >= 44:
        return Windows(11, (0.33, 0.33, 0.33))
    # The image must be large enough to have some contrast within the window.
    if side >= 24:
        return Windows(11, (0.5, 0.5))
    if side >= 14:
        return Windows(7, (0.5, 0.5))
    return Windows(min(7, side - 1 + side % 2), (1.0,))


def structural_similarity(
    first: Tensor, second: Tensor, windows: Windows | None = None, *, together: int = 0, bound: bool = False
) -> Tensor:
    """Return the (multi-scale) structural similarity of each pair of samples, within 0 and 1.

    `together`: so many consecutive pairs share a range of values, taken anew at every scale, as in the released code;
    with 0 the range is that of noise differences, 1. `bound`: what similarities are at least, whatever further pairs
    share the range: a larger range raises light and contrast towards 1, and where contrast is negative a light of 1
    makes their product least.

    Source: Wang et al. 2003; constants 0.01 and 0.03, averaged over channels. Coarser scales look within the image; the
    last reflects its edges, as torchmetrics does, which the paper's code uses.
    """
    windows = windows or windows_for(*first.shape[-2:])
    # MPS does not have float64. Where nothing varies, float32 would lose four digits.
    if first.device.type != "mps":
        first, second = first.double(), second.double()
    result = torch.ones(len(first), device=first.device, dtype=first.dtype)
    for scale, weight in enumerate(windows.weights):
        if scale:
            first, second = F.avg_pool2d(first, 2), F.avg_pool2d(second, 2)
        span = _spans(first, second, together) if together else torch.ones_like(result)
        whole, contrast = _structure(first, second, windows.kernel, span[:, None, None, None], bound=bound)
        last = scale == len(windows.weights) - 1
        result = result * (whole if last else contrast).clamp_min(0) ** weight
    return result.float()


def _spans(first: Tensor, second: Tensor, together: int) -> Tensor:
    """For each pair the larger range of values of either side, over the pairs that go together."""
    ranges = [
        torch.stack([part.max() - part.min() for part in torch.split(side, together)]) for side in (first, second)
    ]
    return torch.maximum(*ranges).repeat_interleave(together)[: len(first)]


def published_structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return the structural similarity of pairs by torchmetrics, in float32, as the released code computes it."""
    with extra("evidence", 'fidelity="reference" compares by torchmetrics'):
        from torchmetrics.functional.image import multiscale_structural_similarity_index_measure as measure
    windows = windows_for(*first.shape[-2:])
    similarity: Tensor = measure(
        first, second, kernel_size=windows.kernel, sigma=0.15 * (windows.kernel - 1), betas=windows.weights,
        reduction="none",
    )  # fmt: skip
    return similarity


def similarity_matrix(samples: Tensor, *, published: bool = False) -> Tensor:
    """Return the similarity of every two samples, shape `(n, n)`; the diagonal is 1."""
    count = len(samples)
    result = torch.ones(count, count, device=samples.device)
    rows, columns = torch.triu_indices(count, count, 1).tolist()
    if rows:
        measure = published_structural_similarity if published else structural_similarity
        similarities = measure(samples[rows], samples[columns])
        result[rows, columns] = similarities
        result[columns, rows] = similarities
    return result


def _structure(
    first: Tensor, second: Tensor, kernel: int, span: Tensor, *, bound: bool = False
) -> tuple[Tensor, Tensor]:
    """Means over windows and channels: of similarity, edges reflected, and of contrast, within the image."""
    edge = kernel // 2
    stacked = torch.stack([first, second, first * first, second * second, first * second])
    mean_a, mean_b, square_a, square_b, product = _smooth(stacked, kernel)
    variances = (square_a - mean_a.square()).clamp_min(0) + (square_b - mean_b.square()).clamp_min(0)
    small, dark = (0.03 * span).square(), (0.01 * span).square()
    contrast = (2 * (product - mean_a * mean_b) + small) / (variances + small)
    light = (2 * mean_a * mean_b + dark) / (mean_a.square() + mean_b.square() + dark)
    inside = contrast[..., edge:-edge, edge:-edge]
    whole = torch.minimum(contrast, light * contrast) if bound else light * contrast
    return whole.mean((1, 2, 3)), inside.mean((1, 2, 3))


def _smooth(images: Tensor, kernel: int) -> Tensor:
    """Means in Gaussian windows around pixels, edges reflected; as products, since convolutions of doubles are slow."""
    rows, columns = (_windows_along(side, kernel).to(images) for side in images.shape[-2:])
    return ((images @ columns.T).transpose(-1, -2) @ rows.T).transpose(-1, -2)


@functools.cache
def _windows_along(side: int, kernel: int) -> Tensor:
    """For every pixel of a side the weights of the window around it, shape `(side, side)`."""
    offsets = torch.arange(kernel) - kernel // 2
    bell = (-offsets.double().square() / (2 * (0.15 * (kernel - 1)) ** 2)).exp()
    # Positions before the first pixel are reflected.
    positions = (torch.arange(side)[:, None] + offsets).abs()
    # Positions beyond the last pixel are reflected as well.
    positions = side - 1 - (side - 1 - positions).abs()
    return torch.zeros(side, side, dtype=torch.float64).scatter_add_(1, positions, (bell / bell.sum()).expand(side, -1))
