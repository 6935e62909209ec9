"""How like two images are: PSNR, SSIM and LPIPS, and which of a batch of reconstructions belongs to which image.

All images are tensors `(n, c, h, w)` within 0 and 1, after any normalization is undone; values outside are cut off, as
a picture would be. One convention each: PSNR for a range of 1; SSIM with an 11 × 11 Gaussian window of σ = 1.5 and
population covariance, averaged over windows that lie within the image.
"""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.errors import MissingExtra, UsageError
from netweight.metrics.intervals import bootstrap, t_interval
from netweight.report.finding import Better, Finding

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.metrics.images import Features

__all__ = ["checked_pair", "image_findings", "match_images", "psnr", "ssim"]

_WINDOW, _SIGMA = 11, 1.5


def psnr(images: Tensor, references: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image.

    Args:
        images: Shape `(n, c, h, w)`, within 0 and 1.
        references: The same shape.

    Returns:
        Decibels, float64 of shape `(n,)`; infinite where the images are equal.

    Raises:
        UsageError: Shapes differ or a value is not finite.
    """
    images, references = checked_pair(images, references)
    return -10 * (images - references).square().flatten(1).mean(1).log10()


def ssim(images: Tensor, references: Tensor) -> Tensor:
    """Return the structural similarity of each image.

    Args:
        images: Shape `(n, c, h, w)`, within 0 and 1; at least 11 pixels high and wide.
        references: The same shape.

    Returns:
        float64 of shape `(n,)`, -1 to 1; 1 where the images are equal. Colors are compared channel by channel and
        averaged.

    Raises:
        UsageError: Shapes differ, images are too small, or a value is not finite.

    Source: Wang et al. 2004, with the constants 0.01 and 0.03 of the paper.
    """
    import torch
    import torch.nn.functional as F

    a, b = checked_pair(images, references)
    if min(a.shape[2:]) < _WINDOW:
        raise UsageError(f"SSIM needs images of at least {_WINDOW} pixels; these have {tuple(a.shape[2:])}.")
    offsets = torch.arange(_WINDOW, dtype=a.dtype, device=a.device) - _WINDOW // 2
    bell = (-offsets.square() / (2 * _SIGMA**2)).exp()
    window = torch.outer(bell, bell) / bell.sum().square()

    def mean(values: Tensor) -> Tensor:
        """Weighted means over all windows, every channel by itself."""
        single = values.flatten(0, 1).unsqueeze(1)
        return F.conv2d(single, window[None, None]).reshape(*values.shape[:2], -1)

    mean_a, mean_b = mean(a), mean(b)
    variance_a, variance_b = mean(a * a) - mean_a.square(), mean(b * b) - mean_b.square()
    covariance = mean(a * b) - mean_a * mean_b
    small, smaller = 0.03**2, 0.01**2
    likeness = (2 * mean_a * mean_b + smaller) * (2 * covariance + small)
    most = (mean_a.square() + mean_b.square() + smaller) * (variance_a + variance_b + small)
    return (likeness / most).flatten(1).mean(1)


def match_images(reconstructed: Tensor, references: Tensor) -> Tensor:
    """Find which reconstruction belongs to which reference: the assignment with the greatest sum of PSNR.

    A batch has no order for an attacker, so its images are to be matched before they are compared.

    Args:
        reconstructed: Shape `(n, c, h, w)`, within 0 and 1.
        references: The same shape.

    Returns:
        int64 of shape `(n,)`: `reconstructed[permutation]` lies beside `references`.

    Raises:
        UsageError: Shapes differ or a value is not finite.
        MissingExtra: scipy is not installed.
    """
    import torch

    images, wanted = checked_pair(reconstructed, references)
    try:
        assign = importlib.import_module("scipy.optimize").linear_sum_assignment
    except ImportError as error:
        raise MissingExtra(
            "Matching images needs scipy, which is not installed.", cure='Run: pip install "netweight[evidence]"'
        ) from error
    errors = torch.stack([(images - reference).square().flatten(1).mean(1) for reference in wanted])
    # Equal images have infinite PSNR; a floor below any error of 8-bit pixels keeps the sum finite.
    decibels = -10 * errors.clamp_min(1e-12).log10()
    _, columns = assign(decibels.cpu().numpy(), maximize=True)
    return torch.as_tensor(columns, dtype=torch.int64, device=images.device)


def image_findings(
    images: Tensor,
    references: Tensor,
    *,
    backbone: str | os.PathLike[str] | Features | None = None,
    heads: Path | None = None,
    seed: int,
) -> list[Finding]:
    """Return mean PSNR, SSIM and LPIPS of a batch as findings, with intervals over its images.

    Args:
        images: Shape `(n, c, h, w)`, within 0 and 1, in the order of the references (`match_images`).
        references: The same shape.
        backbone: See `netweight.metrics.images`; without it LPIPS is reported as unavailable.
        heads: See `netweight.metrics.images`.
        seed: Seed of the bootstrap.

    Returns:
        Three findings. The values of the single images are in their details. The direction "better" is the
        attacker's. What cannot be measured has the value None and says why; an interval needs two images.

    Raises:
        UsageError: Shapes differ or a value is not finite.
        MissingExtra: scipy, which the intervals need, is not installed, or LPIPS lacks its heads.
    """
    from netweight.metrics.images import lpips

    def reported(name: str, values: Tensor, better: Better, unit: str = "") -> Finding:
        found: list[float] = values.tolist()
        return Finding(
            name,
            math.fsum(found) / len(found),
            ci95=_interval(found, seed),
            n=len(found),
            unit=unit,
            better=better,
            seeds=(seed,),
            detail={"each": found},
        )

    findings = [reported("PSNR", psnr(images, references), "higher", "dB")]
    if min(images.shape[2:]) < _WINDOW:
        findings.append(_unavailable("SSIM", f"its window is {_WINDOW} pixels wide, more than the images"))
    else:
        findings.append(reported("SSIM", ssim(images, references), "higher"))
    if backbone is None:
        findings.append(_unavailable("LPIPS", "no backbone was given"))
    else:
        findings.append(reported("LPIPS", lpips(images, references, backbone=backbone, heads=heads), "lower"))
    return findings


def _unavailable(name: str, reason: str) -> Finding:
    return Finding(name, None, detail={"reason": f"unavailable: {reason}"})


def _interval(values: list[float], seed: int) -> tuple[float, float] | None:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return (t_interval(values) if len(values) < 5 else bootstrap(values, seed=seed)).ci95


def checked_pair(images: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
    """Check two batches of images and return them in double precision, cut off at 0 and 1.

    Args:
        images: Shape `(n, c, h, w)`.
        references: The same shape; moved to the device of `images`.

    Returns:
        Images and references, float64, of the shape given.

    Raises:
        UsageError: Shapes differ, there is no pixel, or a value is not finite.
    """
    if images.ndim != 4 or images.shape != references.shape or math.prod(images.shape) == 0:
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be compared with those of {tuple(references.shape)}.",
            cure="Give two batches of the same shape (n, c, h, w).",
        )
    for batch in (images, references):
        if not batch.isfinite().all():
            raise UsageError("An image holds NaN or infinity, so it cannot be compared.")
    return images.detach().double().clamp(0, 1), references.detach().to(images.device).double().clamp(0, 1)
