"""Samplers of new points: pairs of models, Gaussian, kernel, and conditional on attributes.

A draw of a seed begins with the same points whatever the count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from netweight.core.names import nearest_names
from netweight.core.seeds import torch_generator
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.labels import Labels

_BANDWIDTHS = tuple(0.05 * number for number in range(1, 20))
_MOST_COMPARED = 2048  # models whose likelihood is computed, so that the choice takes seconds


class Sampler(Protocol):
    """Draws points."""

    def draw(self, count: int, *, seed: int) -> Tensor:
        """At least 1 point, shape `(count, k)`, fp32."""


@final
@dataclass(frozen=True, eq=False)
class GaussianSampler:
    """Independent Gaussians per component."""

    # Source: weights2weights, section 4.1.

    mean: Tensor  # shape `(k,)`
    deviations: Tensor  # shape `(k,)`
    factor: float = 1.0  # the deviations are multiplied with it

    @classmethod
    def fit(cls, scores: Tensor, *, factor: float = 1.0) -> GaussianSampler:
        """Take mean and (unbiased) standard deviation of each component of scores `(n, k)`, n at least 3."""
        scores = _checked(scores)
        return cls(scores.mean(0), scores.std(0), _enlarging(factor))

    def draw(self, count: int, *, seed: int) -> Tensor:
        """See `Sampler`."""
        noise = torch.stack([_noise(seed, number, len(self.mean)) for number in range(_positive(count))])
        return (self.mean + self.factor * self.deviations * noise).float()


@final
@dataclass(frozen=True, eq=False)
class PairSampler:
    """Two training models added up about the mean, and enlarged: nothing is drawn that no model has."""

    # A Gaussian spends nearly all of its length on what single components tell little of, and images answer to small
    # steps hardly: its samples look alike. Sums of two models keep what their components do together. The factor, and
    # that of all samplers here, was chosen on one bank; docs/weight-space-use.md has what others say.

    scores: Tensor  # shape `(n, k)`, fp64
    factor: float  # 1 keeps every component's variance

    @classmethod
    def fit(cls, scores: Tensor, *, factor: float = 1.2) -> PairSampler:
        """Keep the scores of at least 3 models."""
        return cls(_checked(scores), _enlarging(factor))

    def draw(self, count: int, *, seed: int) -> Tensor:
        """See `Sampler`."""
        centered = self.scores - self.scores.mean(0)
        first = _rows(seed, _positive(count), len(centered))
        second = (first + 1 + _rows(seed, count, len(centered) - 1, "other model")) % len(centered)
        summed: Tensor = (centered[first] + centered[second]) / 2**0.5
        return (self.scores.mean(0) + self.factor * summed).float()


@final
@dataclass(frozen=True, eq=False)
class KernelSampler:
    """A training model, drawn closer to the mean, plus Gaussian noise: every component keeps mean and variance."""

    # A bandwidth of 0 returns training models, 1 the Gaussian of the paper.
    # Source: the smoothed bootstrap with corrected variance, Silverman 1986, section 6.4.

    scores: Tensor  # shape `(n, k)`, fp64
    bandwidth: float  # deviation of the noise, as a share of each component's

    @classmethod
    def fit(cls, scores: Tensor, *, bandwidth: float | None = None) -> KernelSampler:
        """Keep the scores of at least 3 models."""
        # None takes the bandwidth under which each model is likeliest given all others; in many dimensions nearly 1.
        scores = _checked(scores)
        if bandwidth is not None and not 0 <= bandwidth <= 1:
            raise UsageError(f"The bandwidth {bandwidth} is not within 0 and 1.", cure="Try 0.5.")
        return cls(scores, _likeliest_bandwidth(scores) if bandwidth is None else bandwidth)

    def draw(self, count: int, *, seed: int) -> Tensor:
        """See `Sampler`."""
        mean, deviations = self.scores.mean(0), self.scores.std(0, correction=0)
        chosen = _rows(seed, _positive(count), len(self.scores))
        noise = torch.stack([_noise(seed, number, self.scores.shape[1]) for number in range(count)])
        kept = (1 - self.bandwidth**2) ** 0.5
        points: Tensor = mean + kept * (self.scores[chosen] - mean) + self.bandwidth * deviations * noise
        return points.float()


@final
@dataclass(frozen=True, eq=False)
class ConditionalSampler:
    """Scores predicted from a training model's attributes, plus the residual of another model."""

    # Attributes come in the combinations that occur; the rest, all that labels do not tell, is drawn independently of
    # them by a `KernelSampler`.

    columns: tuple[str, ...]  # names of the attributes
    values: Tensor  # their values, shape `(m, a)`, of the models that are labeled
    center: Tensor  # scores of a model whose attributes are 0, shape `(k,)`
    effects: Tensor  # what each attribute adds, shape `(a, k)`
    rest: KernelSampler  # draws what is left
    emphasis: float = 1.0  # what differs from the mean attributes is multiplied with it

    @classmethod
    def fit(
        cls,
        scores: Tensor,
        labels: Labels,
        columns: Sequence[str] | None = None,
        *,
        bandwidth: float | None = None,
        emphasis: float = 1.0,
    ) -> ConditionalSampler:
        """Regress scores on labels."""
        names = list(labels.columns) if columns is None else list(columns)
        chosen = [labels[name] for name in names]
        for column in chosen:
            column.check()
        if not emphasis > 0:
            raise UsageError(f"Attributes cannot be multiplied with {emphasis}.", cure="Give an emphasis above 0.")
        known = torch.stack([column.known for column in chosen]).all(0)
        if len(scores) != len(known) or int(known.sum()) < len(names) + 3:
            raise UsageError(
                f"{int(known.sum())} of {len(scores)} models have all of the {len(names)} labels, which is too few.",
                cure="Label more models, or name fewer columns.",
            )
        ours, values = _checked(scores)[known], torch.stack([column.values[known] for column in chosen], 1)
        sides = torch.cat([values, torch.ones(len(values), 1, dtype=torch.float64)], 1)
        solved = torch.linalg.lstsq(sides, ours, driver="gelsd").solution
        rest = KernelSampler.fit(ours - sides @ solved, bandwidth=bandwidth)
        return cls(tuple(names), values, solved[-1], solved[:-1], rest, emphasis)

    def draw(self, count: int, *, seed: int, given: Mapping[str, float] | None = None) -> Tensor:
        """See `Sampler`."""
        # `given`: attributes that all points are to have; the others come from training models that are nearest in
        # these, among the nearest tenth (at least 10), so that combinations stay those that occur
        given = dict(given or {})
        for name in given:
            if name not in self.columns:
                near = ", ".join(map(repr, nearest_names(name, self.columns)))
                raise NameNotFound(f"There is no attribute {name!r} in the sampler.", cure=f"The nearest are {near}.")
        places = [self.columns.index(name) for name in given]
        wanted = torch.tensor(list(given.values()), dtype=torch.float64)
        pool = self._alike(places, wanted)
        values = self.values[pool[_rows(seed, _positive(count), len(pool), "attributes")]].clone()
        values[:, places] = wanted
        mean = self.values.mean(0)
        shown = mean + self.emphasis * (values - mean)
        return (self.center + shown @ self.effects + self.rest.draw(count, seed=seed).double()).float()

    def _alike(self, places: Sequence[int], wanted: Tensor) -> Tensor:
        """The labeled models whose attributes may go with those that are given."""
        if not places:
            return torch.arange(len(self.values))
        apart = ((self.values[:, places] - wanted) / self.values[:, places].std(0)).square().sum(1)
        return apart.argsort(stable=True)[: max(10, len(self.values) // 10)]


def _checked(scores: Tensor) -> Tensor:
    scores = scores.detach().double().cpu()
    if scores.ndim != 2 or len(scores) < 3 or not scores.isfinite().all():
        raise UsageError(
            f"Nothing can be drawn from scores of shape {tuple(scores.shape)}, or they hold NaN.",
            cure="Give finite scores of at least 3 models.",
        )
    return scores


def _enlarging(factor: float) -> float:
    if not factor > 0:
        raise UsageError(f"A spread cannot be multiplied with {factor}.", cure="Give a factor above 0.")
    return factor


def _positive(count: int) -> int:
    if count < 1:
        raise UsageError(f"{count} samples cannot be drawn.", cure="Ask for 1 or more.")
    return count


def _noise(seed: int, number: int, components: int) -> Tensor:
    return torch.randn(components, generator=torch_generator(seed, "sample", number), dtype=torch.float64)


def _rows(seed: int, count: int, among: int, what: str = "model") -> Tensor:
    drawn = [torch.randint(among, (1,), generator=torch_generator(seed, what, number)) for number in range(count)]
    return torch.cat(drawn)


def _likeliest_bandwidth(scores: Tensor) -> float:
    """The bandwidth under which the models are likeliest, each given all others."""
    deviations = scores.std(0, correction=0)
    varying = deviations > deviations.max() * 1e-9
    whitened = ((scores - scores.mean(0)) / deviations)[:, varying]
    some = whitened[:: -(-len(whitened) // _MOST_COMPARED)]
    products = some @ some.T
    squares = products.diagonal()

    def likelihood(bandwidth: float) -> float:
        kept = (1 - bandwidth**2) ** 0.5
        apart = squares[:, None] + kept**2 * squares - 2 * kept * products
        log = -apart / (2 * bandwidth**2)
        log.fill_diagonal_(-torch.inf)
        return float(log.logsumexp(1).mean()) - some.shape[1] * math.log(bandwidth)

    return max((*_BANDWIDTHS, 1.0), key=likelihood)
