"""The noise term of RepNoise: how far states are from Gaussian noise, by the maximum mean discrepancy (MMD).

All distances come from a Gram matrix, so that n points in D dimensions need n² numbers and not n² D, of which none
waits for the backward pass.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from netweight.errors import UsageError
from netweight.methods.immunize.distributed import (
    ProcessGroup,
)
from netweight.methods.immunize.losses import with_gradients


def published_noise(
    outputs: list[Tensor], mask: Tensor, generator: torch.Generator | None, group: ProcessGroup
) -> Tensor:
    """The noise term as the released code has it: biased MMD between masked states and unscaled noise, over layers."""
    counts = group.counts(len(mask)) if group.size > 1 else [len(mask)]
    # All rows must have the same width. The added tokens are masked.
    if group.size > 1:
        added = max(group.counts(mask.shape[1])) - mask.shape[1]
        outputs = [functional.pad(output, (0, 0, 0, added)) for output in outputs]
        mask = functional.pad(mask, (0, added))
    everywhere = group.rows(mask, counts)[..., None]
    distances = []
    for output in outputs:
        sample = group.rows(output * mask[..., None], counts)
        distances.append(biased_mmd(sample, scaled_noise(sample, generator, scaled=False) * everywhere))
    return torch.stack(distances).mean()


def corrected_noise(
    outputs: list[Tensor],
    answers: Tensor,
    noise_tokens: int | None,
    generator: torch.Generator | None,
    group: ProcessGroup,
) -> Tensor:
    """The noise term: unbiased MMD between states of harmful answers and noise of their scale, mean over layers."""
    distances = []
    counts = group.counts(int(answers.sum())) if group.size > 1 else []
    for output in outputs:
        points = output[answers]
        if group.size > 1:
            points = _drawn_everywhere(points, counts, noise_tokens, generator, group)
        else:
            points = random_rows(points, noise_tokens, generator)
        # One token does not describe a distribution.
        if len(points) < 2:
            distances.append(points.float().sum() * 0)
        else:
            distances.append(unbiased_mmd(points, scaled_noise(points, generator)))
    return torch.stack(distances).mean()


def _drawn_everywhere(
    own: Tensor, counts: list[int], most_rows: int | None, generator: torch.Generator | None, group: ProcessGroup
) -> Tensor:
    """At most so many of all processes' points; only those that were drawn are sent."""
    total, start = sum(counts), sum(counts[: group.rank])
    drawn = random_rows(torch.arange(total, device=own.device), most_rows, generator)
    bounds = [sum(counts[:rank]) for rank in range(group.size + 1)]
    sent = [int(((drawn >= low) & (drawn < high)).sum()) for low, high in pairwise(bounds)]
    mine = drawn[(drawn >= start) & (drawn < start + len(own))] - start
    return group.rows(own[mine], sent) if sum(sent) else own[mine]


# The kernels' bandwidths as multiples of a typical squared distance: each half of the one before.
_WIDTHS = (4.0, 2.0, 1.0, 0.5, 0.25)


def _centered(points: Tensor) -> Tensor:
    """The points around their mean: nearer to the origin less is lost where large numbers cancel."""
    points = points if points.dtype == torch.float64 else points.float()
    return points - points.mean(0)


@torch.no_grad()
def squared_distances(points: Tensor) -> Tensor:
    """Squared Euclidean distances between all pairs of points, without a gradient."""
    centered = _centered(points)
    gram = centered @ centered.T
    norms = gram.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0)
    return distances.fill_diagonal_(0)


def _apart(distances: Tensor) -> Tensor:
    """The distances between different points, each pair once."""
    return distances[torch.ones_like(distances, dtype=torch.bool).triu_(1)]


def _statistic(sample: Tensor, target: Tensor, distances: Tensor, typical: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the kernels of all pairs."""
    # With W the weights times the kernels' derivative by the squared distance, and P = W + Wᵀ, the gradient of the sum
    # by point i is 2 Σ_j P_ij (x_i - x_j).
    with torch.no_grad():
        typical = typical.clamp(min=torch.finfo(distances.dtype).tiny ** 0.5)  # equal points
        kernel = torch.exp(distances / (-typical * _WIDTHS[0]))
        kernels, slopes = kernel.clone(), kernel / (-typical * _WIDTHS[0])
        for width in _WIDTHS[1:]:
            kernel.square_()  # half the bandwidth
            kernels += kernel
            slopes.addcdiv_(kernel, -typical * width)
        value = kernels.mul_(weights).sum()
        pulls = slopes.mul_(weights)
        pulls = pulls + pulls.T
        points = _centered(torch.cat([sample, target]))
        gradient = 2 * (pulls.sum(1, keepdim=True) * points - pulls @ points)
    count = len(sample)
    return with_gradients(value, [sample, target], [gradient[:count], gradient[count:]])


def biased_mmd(sample: Tensor, target: Tensor) -> Tensor:
    """The published estimator: each example is one point, a biased V-statistic.

    Five Gaussian kernels are summed, their bandwidths 1/4 to 4 times the mean squared distance of the joint sample. The
    pairs of a point with itself count, so that the value does not vanish for equal distributions.

    Source: RepNoise (arXiv 2405.14577), section 3, as its authors' code computes it.
    """
    count = len(sample)
    sample, target = sample.flatten(1), target.flatten(1)
    distances = squared_distances(torch.cat([sample, target]))
    signs = distances.new_ones(2 * count)
    signs[count:] = -1
    typical = _apart(distances).mean()
    return _statistic(sample, target, distances, typical, signs[:, None] * signs[None, :] / count**2)


def unbiased_mmd(sample: Tensor, target: Tensor) -> Tensor:
    """The corrected estimator: a U-statistic that is 0 on average for equal distributions, and may be negative.

    Five Gaussian kernels are summed, their bandwidths 1/4 to 4 times the median squared distance of the joint sample.

    Source: Gretton et al., "A kernel two-sample test", 2012, lemma 6.
    """
    count, other = len(sample), len(target)
    if min(count, other) < 2:
        raise UsageError(f"An unbiased MMD needs two points on each side, not {count} and {other}.")
    distances = squared_distances(torch.cat([sample, target]))
    weights = torch.full_like(distances, -1 / (count * other))
    weights[:count, :count] = 1 / (count * (count - 1))
    weights[count:, count:] = 1 / (other * (other - 1))
    weights.fill_diagonal_(0)
    return _statistic(sample, target, distances, _apart(distances).median(), weights)


def _normal(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


def scaled_noise(points: Tensor, generator: torch.Generator | None, *, scaled: bool = True) -> Tensor:
    """Gaussian noise of the shape of `points`."""
    noise = _normal(points.shape, points, generator)
    return noise * points.detach().float().square().mean().sqrt().to(points.dtype) if scaled else noise


def random_rows(points: Tensor, most_rows: int | None, generator: torch.Generator | None) -> Tensor:
    """At most so many rows of `points`, drawn without replacement; all of them if there are no more."""
    if most_rows is None or len(points) <= most_rows:
        return points
    device = points.device if generator is None else generator.device
    return points[torch.randperm(len(points), generator=generator, device=device)[:most_rows].to(points.device)]
