"""How far two sets of images are apart: the Fréchet and the kernel distance of their features, FID and KID.

Both are as good as the features, and those are a network that the user brings (`descriptors`, `integrations.clip`);
the findings carry its name, so that no number is called FID that was not taken on Inception's features. The Fréchet
distance is biased upwards when images are few; the kernel distance is not, and has an interval.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from netweight.errors import UsageError
from netweight.metrics.intervals import Interval
from netweight.report.finding import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from netweight.metrics.copies import Descriptor

__all__ = ["distance_findings", "frechet_distance", "kernel_distance"]

_NORMAL_95 = 1.959963984540054


def frechet_distance(features: Tensor, references: Tensor) -> float:
    """Return the squared Fréchet distance of two normal distributions fitted to features.

    Args:
        features: Shape `(n, width)`, n at least 2.
        references: Shape `(m, width)`, m at least 2.

    Raises:
        UsageError: Shapes do not fit, or a value is not finite.

    Source: Heusel et al. 2017, equation 6; covariances are unbiased, as in the published code.
    """
    a, b = _pair(features, references)
    shift = a.mean(0) - b.mean(0)
    one, other = np.atleast_2d(np.cov(a, rowvar=False)), np.atleast_2d(np.cov(b, rowvar=False))
    values, vectors = np.linalg.eigh(one)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    # The product of the covariances has the eigenvalues of this symmetric matrix, which are real and safe to take.
    middle = np.linalg.eigvalsh(root @ other @ root).clip(0)
    return float(shift @ shift + np.trace(one) + np.trace(other) - 2 * np.sqrt(middle).sum())


def kernel_distance(features: Tensor, references: Tensor) -> Interval:
    """Return the squared maximum mean discrepancy of features under the cubic kernel, without bias.

    Args:
        features: Shape `(n, width)`, n at least 3.
        references: Shape `(m, width)`, m at least 3.

    Returns:
        The estimate on all images, which may be below 0, with a normal interval by the jackknife over images of both
        sets. No subsets are drawn, so no seed is needed.

    Raises:
        UsageError: Shapes do not fit, or a value is not finite.

    Source: Binkowski et al. 2018, section 4 and appendix: KID is this on Inception's features.
    """
    a, b = _pair(features, references, least=3)
    n, m = len(a), len(b)
    within_a, within_b, between = _kernel(a, a), _kernel(b, b), _kernel(a, b)
    rows_a, rows_b = within_a.sum(1) - within_a.diagonal(), within_b.sum(1) - within_b.diagonal()
    sum_a, sum_b, sum_between = rows_a.sum(), rows_b.sum(), between.sum()
    estimate = sum_a / (n * (n - 1)) + sum_b / (m * (m - 1)) - 2 * sum_between / (n * m)
    without_a = (
        (sum_a - 2 * rows_a) / ((n - 1) * (n - 2))
        + sum_b / (m * (m - 1))
        - 2 * (sum_between - between.sum(1)) / ((n - 1) * m)
    )
    without_b = (
        sum_a / (n * (n - 1))
        + (sum_b - 2 * rows_b) / ((m - 1) * (m - 2))
        - 2 * (sum_between - between.sum(0)) / (n * (m - 1))
    )
    variance = (n - 1) * without_a.var() + (m - 1) * without_b.var()
    half = _NORMAL_95 * math.sqrt(float(variance))
    return Interval(float(estimate), float(estimate) - half, float(estimate) + half, n, 0.95, "jackknife, normal")


def distance_findings(
    descriptor: Descriptor, images: Tensor, references: Tensor, *, frechet: str = "", kernel: str = ""
) -> list[Finding]:
    """Return both distances between two sets of images as findings.

    Args:
        descriptor: A network's features. They are taken as they are, not scaled to length 1.
        images: Shape `(n, 3, height, width)`, within 0 and 1.
        references: Shape `(m, 3, height, width)`; sizes may differ if the descriptor resizes.
        frechet: What to call the Fréchet distance, such as "FID" where the features are Inception's or "CLIP-FID"
            where they are CLIP's; by default it is named after the descriptor.
        kernel: The same for the kernel distance, such as "KID".

    Raises:
        UsageError: There are fewer than three images in a set, or features do not fit.
    """
    a, b = _features(descriptor, images), _features(descriptor, references)
    few = min(len(a), len(b)) <= a.shape[1]
    detail = {"features": descriptor.name, "width": a.shape[1], "references": len(b)}
    if few:
        detail["caution"] = "fewer images than features: the Fréchet distance is biased upwards"
    kid = kernel_distance(a, b)
    return [
        Finding(
            frechet or f"Fréchet distance of {descriptor.name}",
            frechet_distance(a, b),
            n=len(a),
            better="lower",
            detail=detail,
        ),
        Finding(
            kernel or f"kernel distance of {descriptor.name}",
            kid.estimate,
            ci95=kid.ci95,
            n=len(a),
            better="lower",
            detail={"features": descriptor.name, "references": len(b), "interval": kid.method},
        ),
    ]


def _kernel(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    cubed: NDArray[np.float64] = (a @ b.T / a.shape[1] + 1) ** 3
    return cubed


def _features(descriptor: Descriptor, images: Tensor) -> Tensor:
    import torch

    return torch.cat([descriptor(part) for part in torch.split(images, 64)])


def _pair(features: Tensor, references: Tensor, least: int = 2) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a, b = (values.detach().cpu().double().numpy() for values in (features, references))
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < least:
        raise UsageError(
            f"Features of shape {a.shape} cannot be compared with those of {b.shape}.",
            cure=f"Give (n, width) and (m, width), {least} images or more of each.",
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UsageError("A feature is NaN or infinite.", cure="Find the image that it comes from.")
    return a, b
