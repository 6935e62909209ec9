"""A sampler that is a mixture of Gaussians: clusters of training models, as many as held-out models ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError

__all__ = ["MixtureSampler"]

_ROUNDS = 60
_PRIOR = 1.0  # one model's worth of the whole variance in each cluster, against clusters that collapse
_TRIED = (1, 2, 3, 4, 6, 8)


@final
@dataclass(frozen=True, eq=False)
class MixtureSampler:
    """Clusters, each an independent Gaussian per component.

    Attributes:
        shares: Shape `(c,)`, of sum 1.
        means: Shape `(c, k)`.
        deviations: Shape `(c, k)`.
    """

    shares: Tensor
    means: Tensor
    deviations: Tensor

    @classmethod
    def fit(cls, scores: Tensor, *, clusters: int | None = None, seed: int = 0) -> MixtureSampler:
        """Fit by expectation and maximization.

        Args:
            scores: Shape `(n, k)`.
            clusters: How many; None adds clusters while held-out models become likelier, over five folds.
            seed: Of the start and the folds.

        Raises:
            UsageError: There are fewer than 10 models, or fewer than 5 per cluster.
        """
        scores = scores.detach().double().cpu()
        most = len(scores) // 5
        if len(scores) < 10 or (clusters is not None and not 1 <= clusters <= most) or not scores.isfinite().all():
            raise UsageError(
                f"{clusters or 'No'} clusters can be fitted to {len(scores)} models, or these hold NaN.",
                cure="Give at least 5 finite models per cluster, and 10 in all.",
            )
        return _fitted(scores, clusters or _likeliest(scores, most, seed), seed)

    def draw(self, count: int, *, seed: int) -> Tensor:
        """Return points, shape `(count, k)`, fp32."""
        if count < 1:
            raise UsageError(f"{count} samples cannot be drawn.", cure="Ask for 1 or more.")
        points = []
        for number in range(count):
            generator = torch_generator(seed, "sample", number)
            cluster = int(torch.multinomial(self.shares, 1, generator=generator))
            noise = torch.randn(self.means.shape[1], generator=generator, dtype=torch.float64)
            points.append(self.means[cluster] + self.deviations[cluster] * noise)
        return torch.stack(points).float()

    def log_likelihood(self, points: Tensor) -> Tensor:
        """Return the logarithm of the density at points `(b, k)`, shape `(b,)`, fp64; components of no spread aside.

        Args:
            points: Shape `(b, k)`.
        """
        return self._parts(points.detach().double().cpu()).logsumexp(1)

    def _parts(self, points: Tensor) -> Tensor:
        spread = (self.deviations > 0).all(0)
        points, means, inverse = (
            points[:, spread],
            self.means[:, spread],
            self.deviations[:, spread].square().reciprocal(),
        )
        apart = points.square() @ inverse.T - 2 * points @ (means * inverse).T + (means.square() * inverse).sum(1)
        volume = inverse.log().sum(1) - int(spread.sum()) * math.log(2 * math.pi)
        parts: Tensor = self.shares.log() + 0.5 * (volume - apart)
        return parts


def _likeliest(scores: Tensor, most: int, seed: int) -> int:
    """The number of clusters before which more made held-out models likelier."""
    best, likelihood = 1, -math.inf
    for clusters in (each for each in _TRIED if each <= most):
        now = _held_out(scores, clusters, seed)
        if now <= likelihood:
            break
        best, likelihood = clusters, now
    return best


def _held_out(scores: Tensor, clusters: int, seed: int) -> float:
    order = torch.randperm(len(scores), generator=torch_generator(seed, "folds"))
    total = 0.0
    for fold in range(5):
        inside = order[fold::5]
        outside = torch.ones(len(scores), dtype=torch.bool)
        outside[inside] = False
        total += float(_fitted(scores[outside], clusters, seed).log_likelihood(scores[inside]).sum())
    return total


def _fitted(scores: Tensor, clusters: int, seed: int) -> MixtureSampler:
    belonging = _start(scores, clusters, seed)
    last = -math.inf
    for _ in range(_ROUNDS):
        model = _maximized(scores, belonging)
        parts = model._parts(scores)
        whole = parts.logsumexp(1)
        belonging, now = (parts - whole[:, None]).exp(), float(whole.mean())
        if now - last < 1e-5 * (1 + abs(now)):
            break
        last = now
    return model


def _start(scores: Tensor, clusters: int, seed: int) -> Tensor:
    """Each model belongs to the nearest of some models that lie far apart (k-means++)."""
    generator = torch_generator(seed, "start", clusters)
    centers = scores[torch.randint(len(scores), (1,), generator=generator)]
    while len(centers) < clusters:
        apart = torch.cdist(scores, centers).min(1).values.square()
        chosen = torch.multinomial(apart + 1e-300, 1, generator=generator)
        centers = torch.cat([centers, scores[chosen]])
    return torch.nn.functional.one_hot(torch.cdist(scores, centers).argmin(1), clusters).double()


def _maximized(scores: Tensor, belonging: Tensor) -> MixtureSampler:
    counts = belonging.sum(0)
    means = belonging.T @ scores / counts[:, None].clamp_min(1e-12)
    squares = belonging.T @ scores.square() / counts[:, None].clamp_min(1e-12) - means.square()
    whole = scores.var(0, correction=0)
    variances = (counts[:, None] * squares.clamp_min(0) + _PRIOR * whole) / (counts[:, None] + _PRIOR)
    return MixtureSampler((counts + 1e-9) / (counts + 1e-9).sum(), means, variances.sqrt())
