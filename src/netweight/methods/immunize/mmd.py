"""How far representations are from noise: the maximum mean discrepancy (MMD), as published and corrected.

All distances come from a Gram matrix, so that n points in D dimensions need n² numbers and not n² D. Used by
`repnoise.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from netweight.errors import UsageError

__all__ = ["biased_mmd", "random_rows", "scaled_noise", "squared_distances", "unbiased_mmd"]

_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The kernels' bandwidths as multiples of a typical squared distance."""


def squared_distances(points: Tensor) -> Tensor:
    """Squared Euclidean distances between all pairs of points.

    Args:
        points: Shape `(n, D)`; narrower dtypes than float32 are computed in float32.

    Returns:
        Shape `(n, n)`, 0 or more, exactly 0 on the diagonal.
    """
    points = points if points.dtype == torch.float64 else points.float()
    points = points - points.detach().mean(0)  # nearer to the origin less is lost where large numbers cancel
    gram = points @ points.T
    norms = gram.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * gram).clamp(min=0)
    return distances.masked_fill(torch.eye(len(points), dtype=torch.bool, device=points.device), 0)


def _kernels(distances: Tensor, typical: Tensor) -> Tensor:
    typical = typical.detach().clamp(min=torch.finfo(distances.dtype).tiny)
    return torch.stack([torch.exp(-distances / (typical * width)) for width in _WIDTHS]).sum(0)


def _pairs(sample: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Distances of the joint sample, and those off its diagonal."""
    distances = squared_distances(torch.cat([sample, target]))
    apart = ~torch.eye(len(distances), dtype=torch.bool, device=distances.device)
    return distances, distances.detach()[apart]


def biased_mmd(sample: Tensor, target: Tensor) -> Tensor:
    """The published estimator: each example is one point, a biased V-statistic.

    Five Gaussian kernels are summed, their bandwidths 1/4 to 4 times the mean squared distance of the joint sample. The
    pairs of a point with itself count, so that the value does not vanish for equal distributions.

    Args:
        sample: Shape `(n, ...)`; each entry is flattened to one point.
        target: The same shape.

    Returns:
        A scalar.

    Source: RepNoise (arXiv 2405.14577), section 3, as its authors' code computes it.
    """
    count = len(sample)
    distances, apart = _pairs(sample.flatten(1), target.flatten(1))
    kernels = _kernels(distances, apart.mean())
    within = kernels[:count, :count].mean() + kernels[count:, count:].mean()
    return within - kernels[:count, count:].mean() - kernels[count:, :count].mean()


def unbiased_mmd(sample: Tensor, target: Tensor) -> Tensor:
    """The corrected estimator: a U-statistic that is 0 on average for equal distributions, and may be negative.

    Five Gaussian kernels are summed, their bandwidths 1/4 to 4 times the median squared distance of the joint sample.

    Args:
        sample: Points, shape `(n, D)`, at least two.
        target: Points, shape `(m, D)`, at least two.

    Returns:
        A scalar.

    Raises:
        UsageError: There are fewer than two points on a side.

    Source: Gretton et al., "A kernel two-sample test", 2012, lemma 6.
    """
    count, other = len(sample), len(target)
    if min(count, other) < 2:
        raise UsageError(f"An unbiased MMD needs two points on each side, not {count} and {other}.")
    distances, apart = _pairs(sample, target)
    kernels = _kernels(distances, apart.median())
    diagonal = len(_WIDTHS)  # each kernel is 1 between a point and itself
    first = (kernels[:count, :count].sum() - count * diagonal) / (count * (count - 1))
    second = (kernels[count:, count:].sum() - other * diagonal) / (other * (other - 1))
    return first + second - 2 * kernels[:count, count:].mean()


def _normal(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


def scaled_noise(points: Tensor, generator: torch.Generator | None, *, scaled: bool = True) -> Tensor:
    """Gaussian noise of the shape of `points`.

    Args:
        points: Any shape.
        generator: Where the numbers come from; None for torch's global one.
        scaled: Give it the root mean square of `points`, so that only direction is lost and not size; else unit
            variance.

    Returns:
        Noise without a gradient.
    """
    noise = _normal(points.shape, points, generator)
    return noise * points.detach().float().square().mean().sqrt().to(points.dtype) if scaled else noise


def random_rows(points: Tensor, most: int | None, generator: torch.Generator | None) -> Tensor:
    """At most so many rows of `points`, drawn without replacement; all of them if there are no more."""
    if most is None or len(points) <= most:
        return points
    device = points.device if generator is None else generator.device
    return points[torch.randperm(len(points), generator=generator, device=device)[:most].to(points.device)]
