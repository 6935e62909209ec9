"""Points and directions of a space as values, in files; the models nearest to points; and samplers of new ones.

A draw of a seed begins with the same points whatever the count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor

from netweight.core.digests import digest_config, digest_tensor
from netweight.core.names import nearest_names
from netweight.core.records import read_record, write_record
from netweight.core.seeds import torch_generator
from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.methods.space.labels import Labels
from netweight.methods.space.settings import Unit
from netweight.report.finding import Finding

DirectionKind: TypeAlias = Literal["encoder", "decoder", "difference", "corrected", "reference"]
Measure: TypeAlias = Literal["cosine", "distance"]

# Version of the files of points.
POINTS_VERSION = 1
# Points whose distances are computed at a time.
_AT_ONCE = 1024


def scores_digest(scores: Tensor) -> str:
    """Return the digest of a space's first scores, which ties points to it and stays when models are added."""
    return digest_config([scores.shape[-1], digest_tensor(scores[:8].detach().float())])


@final
@dataclass(frozen=True, eq=False)
class NamedPoints:
    """Named points of a space."""

    names: tuple[str, ...]
    """Names of the points, one for each."""
    scores: Tensor
    """Scores of the points, shape `(b, k)`, fp32."""
    space: str | None = None
    """Digest of the space, as `scores_digest` gives it; None if unknown."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Record of how the points were made; JSON values."""

    def __post_init__(self) -> None:
        """Refuse what are not points."""
        if self.scores.ndim != 2 or len(self.names) != len(self.scores) or not self.scores.isfinite().all():
            raise UsageError(
                f"{len(self.names)} names came with scores of shape {tuple(self.scores.shape)}, or some contain NaN.",
                cure="Give one row of finite scores per name.",
            )

    def check(self, scores: Tensor) -> None:
        """Refuse points of another space, given this one's training scores `(n, k)`."""
        if self.scores.shape[1] != scores.shape[1] or self.space not in (None, scores_digest(scores)):
            raise UsageError(
                f"The points are of another space, of {self.scores.shape[1]} components.",
                cure="Export them with their own space, and project the adapters into this one.",
            )

    def only(self, name: str) -> NamedPoints:
        """One of the points."""
        row = row_of(name, self.names)
        return NamedPoints((name,), self.scores[row : row + 1], self.space, self.origin)


@final
@dataclass(frozen=True, eq=False)
class Direction:
    """A direction of scores, and how far the training models spread along it.

    Attributes:
        name: The attribute.
        kind: How it was found.
        vector: Shape `(k,)`, fp64, of length 1; that of the reference has the length that its code gives it.
        deviation: Standard deviation of the training models along the direction, in scores.
        reach: How far from their mean the farthest training model lies along it, in scores: the paper's strength.
        space: Digest of the first training scores; None if unknown.
        findings: How well held-out models were told apart by it.
    """

    name: str
    kind: DirectionKind
    vector: Tensor
    deviation: float
    reach: float
    space: str | None = None
    findings: tuple[Finding, ...] = field(default=())

    @property
    def length(self) -> float:
        """Length of `vector`."""
        return float(self.vector.norm())

    def step(self, strength: float, unit: Unit = "deviations") -> Tensor:
        """Return the change of scores, shape `(k,)`, fp64.

        Args:
            strength: How far, negative to go back.
            unit: Standard deviations of the training models along the direction; multiples of `reach`; or of the
                vector as it is, as the reference counts.

        Raises:
            UsageError: There is no such unit.
        """
        lengths = {"deviations": self.deviation / self.length, "reach": self.reach / self.length, "raw": 1.0}
        if unit not in lengths:
            raise UsageError(f"Strengths have no unit {unit!r}.", cure=f"Use one of {', '.join(lengths)}.")
        return strength * lengths[unit] * self.vector

    def cosine(self, other: Direction) -> float:
        """Return the cosine of the angle between two directions of one space.

        Args:
            other: A direction of the same space.
        """
        return float(self.vector @ other.vector) / (self.length * other.length)

    def check(self, scores: Tensor) -> None:
        """Refuse a direction that was found in another space.

        Args:
            scores: The training scores of the space at hand, shape `(n, k)`.

        Raises:
            UsageError: It was.
        """
        if len(self.vector) != scores.shape[-1] or self.space not in (None, scores_digest(scores)):
            raise UsageError(
                f"The direction {self.name!r} was found in another space, of {len(self.vector)} components.",
                cure="Find it again in this one: netweight space direction.",
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value; numbers come back bit for bit."""
        findings = [finding.to_json() for finding in self.findings]
        return {**vars(self), "vector": self.vector.tolist(), "findings": findings}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Direction:
        """Return the direction that `to_json` wrote.

        Args:
            data: JSON values.

        Raises:
            CorruptBlob: It is none.
        """
        try:
            vector = torch.tensor(data["vector"], dtype=torch.float64)
            findings = tuple(Finding.from_json(each) for each in data["findings"])
            direction = cls(**{**data, "vector": vector, "findings": findings})
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise CorruptBlob(f"This is not a direction: {error}.", cure="Find it again.") from None
        if vector.ndim != 1 or not vector.isfinite().all() or not direction.length > 0:
            raise CorruptBlob("The vector of this direction is not a finite vector.", cure="Find it again.")
        return direction


def write_points(points: NamedPoints, path: str | Path, *, overwrite: bool = False) -> None:
    """Write points, whole or not at all."""
    scores = points.scores.float().tolist()
    values = {**vars(points), "names": list(points.names), "scores": scores, "origin": dict(points.origin)}
    write_record(path, {"points": values}, version=POINTS_VERSION, overwrite=overwrite)


def read_points(path: str | Path) -> NamedPoints:
    """Read points."""

    def made(values: dict[str, Any]) -> NamedPoints:
        record = values["points"]
        scores = torch.tensor(record["scores"], dtype=torch.float32)
        return NamedPoints(tuple(record["names"]), scores, record["space"], record["origin"])

    return read_record(path, made, version=POINTS_VERSION, of="points of a space")


def write_direction(direction: Direction, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a direction, whole or not at all; errors as for `write_points`."""
    write_record(path, {"direction": direction.to_json()}, version=POINTS_VERSION, overwrite=overwrite)


def read_direction(path: str | Path) -> Direction:
    """Read a direction; errors as for `read_points`."""
    return read_record(
        path, lambda values: Direction.from_json(values["direction"]), version=POINTS_VERSION, of="a direction"
    )  # fmt: skip


@final
@dataclass(frozen=True)
class Neighbor:
    """A training model near a point."""

    name: str
    """Name of the model."""
    number: int
    """Row of the model in the space."""
    cosine: float
    """Cosine of the two changes; NaN for the mean model, which has no direction."""
    distance: float
    """Norm of the difference of the two changes."""


def nearest(
    points: Tensor, scores: Tensor, names: Sequence[str], *, count: int = 5, measure: Measure = "cosine"
) -> list[list[Neighbor]]:
    """The training models, at scores `(n, k)`, nearest to points `(b, k)` or `(k,)`."""
    points = points.detach().double().cpu().reshape(-1, points.shape[-1])
    scores = scores.detach().double().cpu()
    if points.shape[1] != scores.shape[1] or len(names) != len(scores):
        raise UsageError(
            f"Points of {points.shape[1]} components came with {len(scores)} models of {scores.shape[1]} "
            f"and {len(names)} names.",
            cure="Give points, scores and names of one space.",
        )
    if not points.isfinite().all():
        raise UsageError(
            "A point contains NaN or infinity.", cure="An inversion may have diverged: inspect its losses."
        )
    if measure not in ("cosine", "distance"):
        raise UsageError(f"There is no measure {measure!r}.", cure="Use cosine or distance.")
    center = scores.mean(0)
    cosines = torch.nn.functional.normalize(points - center) @ torch.nn.functional.normalize(scores - center).T
    apart = distances(points, scores)
    order = (-cosines if measure == "cosine" else apart).argsort(dim=1, stable=True)[:, :count]
    undirected = (points - center).norm(dim=1) <= 1e-6 * (scores - center).norm(dim=1).mean()
    return [
        [
            Neighbor(names[at], at, float("nan") if undirected[row] else float(cosines[row, at]), float(apart[row, at]))
            for at in chosen
        ]
        for row, chosen in enumerate(order.tolist())
    ]


def nearest_distances(points: Tensor, others: Tensor | None = None, *, rank: int = 1) -> Tensor:
    """Distance of each point, `(b, k)`, from its nearest other, `(n, k)`, or the `rank`-nearest; shape `(b,)`, fp64."""
    # Without others, from the points themselves, each but itself.
    points = points.detach().double().cpu()
    among = points if others is None else others.detach().double().cpu()
    if rank > len(among) - (others is None):
        raise UsageError(f"There is no neighbor number {rank} among {len(among)} models.", cure="Give more models.")
    smallest = []
    for number, part in enumerate(torch.split(points, _AT_ONCE)):
        apart = distances(part, among)
        if others is None:
            rows = torch.arange(len(part))
            apart[rows, number * _AT_ONCE + rows] = torch.inf
        smallest.append(apart.kthvalue(rank, dim=1).values)
    return torch.cat(smallest)


def row_of(name: str, names: Sequence[str]) -> int:
    """The number of a model."""
    if name not in names:
        near = ", ".join(map(repr, nearest_names(name, names)))
        raise NameNotFound(f"There is no model {name!r} in the space.", cure=f"The nearest names are {near}.")
    return list(names).index(name)


def distances(points: Tensor, others: Tensor) -> Tensor:
    """Distances of all pairs, without the matrix product that loses those of near points."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")


_BANDWIDTHS = tuple(0.05 * number for number in range(1, 20))
# The likelihood is computed on at most this many models, so that the choice takes seconds.
_MOST_COMPARED = 2048


class Sampler(Protocol):
    """Draws points."""

    def draw(self, count: int, *, seed: int) -> Tensor:
        """At least 1 point, shape `(count, k)`, fp32."""


@final
@dataclass(frozen=True, eq=False)
class GaussianSampler:
    """Independent Gaussians per component."""

    # Source: weights2weights, section 4.1.

    mean: Tensor
    """Mean of the scores, shape `(k,)`."""
    deviations: Tensor
    """Standard deviations of the scores, shape `(k,)`."""
    factor: float = 1.0
    """Factor of the deviations."""

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
    """Sums of a training model and one of those that are most similar to it, about the mean."""

    # A Gaussian spends nearly all of its length on what single components tell little of, and images answer to small
    # steps hardly: its samples look alike. Sums of two models keep what their components do together. Sums of models
    # that differ lie between them, and there the noise of an image decides which of the two it shows: with or without
    # a beard. Similar models agree on what is most visible, so that a sample is one subject in all noises. The number
    # of neighbors and the factor were chosen on one bank; docs/weight-space-use.md has what others say.

    scores: Tensor
    """Scores of the training models, shape `(n, k)`, fp64."""
    neighbors: int
    """Number of the most similar models, by the cosine about the mean, from which the second one is drawn."""
    factor: float
    """Factor of the sum of the two models; 1 preserves the norm that models have."""

    @classmethod
    def fit(cls, scores: Tensor, *, neighbors: int = 8, factor: float = 1.0) -> PairSampler:
        """Keep the scores of at least 3 models."""
        if neighbors < 1:
            raise UsageError(f"neighbors must be at least 1, not {neighbors}.", cure="Give 1 or more.")
        checked = _checked(scores)
        return cls(checked, min(neighbors, len(checked) - 1), _enlarging(factor))

    def draw(self, count: int, *, seed: int) -> Tensor:
        """See `Sampler`."""
        mean = self.scores.mean(0)
        centered = self.scores - mean
        first = _rows(seed, _positive(count), len(centered))
        unit = torch.nn.functional.normalize(centered)
        cosines = unit[first] @ unit.T
        cosines[torch.arange(count), first] = -torch.inf
        near = cosines.argsort(dim=1, descending=True, stable=True)[:, : self.neighbors]
        second = near[torch.arange(count), _rows(seed, count, self.neighbors, "other model")]
        # Of two models of one length, the sum has that length, however alike they are.
        shared = 1 + cosines.gather(1, second[:, None])
        summed: Tensor = (centered[first] + centered[second]) / (2 * shared.clamp_min(1e-6)).sqrt()
        return (mean + self.factor * summed).float()


@final
@dataclass(frozen=True, eq=False)
class KernelSampler:
    """A training model, drawn closer to the mean, plus Gaussian noise: every component keeps mean and variance."""

    # A bandwidth of 0 returns training models, 1 the Gaussian of the paper.
    # Source: the smoothed bootstrap with corrected variance, Silverman 1986, section 6.4.

    scores: Tensor
    """Scores of the models, shape `(n, k)`, fp64."""
    bandwidth: float
    """Standard deviation of the noise, as a share of each component's standard deviation."""

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
        shrinkage = (1 - self.bandwidth**2) ** 0.5
        points: Tensor = mean + shrinkage * (self.scores[chosen] - mean) + self.bandwidth * deviations * noise
        return points.float()


@final
@dataclass(frozen=True, eq=False)
class ConditionalSampler:
    """Scores predicted from a training model's attributes, plus the residual of another model."""

    # Attributes come in the combinations that occur; the rest, all that labels do not tell, is drawn independently of
    # them by a `KernelSampler`.

    columns: tuple[str, ...]
    """Names of the attributes."""
    values: Tensor
    """Attributes of the labeled models, shape `(m, a)`."""
    center: Tensor
    """Scores of a model whose attributes are all 0, shape `(k,)`."""
    effects: Tensor
    """Effect of one unit of each attribute on the scores, shape `(a, k)`."""
    rest: KernelSampler
    """Sampler of the variation that attributes do not explain."""
    emphasis: float = 1.0
    """Factor of the difference from the mean attributes."""

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
        labeled = torch.stack([column.known for column in chosen]).all(0)
        if len(scores) != len(labeled) or int(labeled.sum()) < len(names) + 3:
            raise UsageError(
                f"{int(labeled.sum())} of {len(scores)} models have all of the {len(names)} labels, which is too few.",
                cure="Label more models, or name fewer columns.",
            )
        ours, values = _checked(scores)[labeled], torch.stack([column.values[labeled] for column in chosen], 1)
        sides = torch.cat([values, torch.ones(len(values), 1, dtype=torch.float64)], 1)
        solved = torch.linalg.lstsq(sides, ours, driver="gelsd").solution
        rest = KernelSampler.fit(ours - sides @ solved, bandwidth=bandwidth)
        return cls(tuple(names), values, solved[-1], solved[:-1], rest, emphasis)

    def draw(self, count: int, *, seed: int, given: Mapping[str, float] | None = None) -> Tensor:
        """See `Sampler`.

        `given`: attributes that all points are to have; the others come from training models that are nearest in these,
        among the nearest tenth (at least 10), so that combinations stay those that occur.
        """
        given = dict(given or {})
        for name in given:
            if name not in self.columns:
                near = ", ".join(map(repr, nearest_names(name, self.columns)))
                raise NameNotFound(f"There is no attribute {name!r} in the sampler.", cure=f"The nearest are {near}.")
        places = [self.columns.index(name) for name in given]
        attributes = torch.tensor(list(given.values()), dtype=torch.float64)
        pool = self._alike(places, attributes)
        values = self.values[pool[_rows(seed, _positive(count), len(pool), "attributes")]].clone()
        values[:, places] = attributes
        mean = self.values.mean(0)
        shown = mean + self.emphasis * (values - mean)
        return (self.center + shown @ self.effects + self.rest.draw(count, seed=seed).double()).float()

    def _alike(self, places: Sequence[int], attributes: Tensor) -> Tensor:
        """The labeled models whose attributes may go with those that are given."""
        if not places:
            return torch.arange(len(self.values))
        apart = ((self.values[:, places] - attributes) / self.values[:, places].std(0)).square().sum(1)
        return apart.argsort(stable=True)[: max(10, len(self.values) // 10)]


def _checked(scores: Tensor) -> Tensor:
    scores = scores.detach().double().cpu()
    if scores.ndim != 2 or len(scores) < 3 or not scores.isfinite().all():
        raise UsageError(
            f"Nothing can be drawn from scores of shape {tuple(scores.shape)}, or they contain NaN.",
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
        shrinkage = (1 - bandwidth**2) ** 0.5
        apart = squares[:, None] + shrinkage**2 * squares - 2 * shrinkage * products
        log = -apart / (2 * bandwidth**2)
        log.fill_diagonal_(-torch.inf)
        return float(log.logsumexp(1).mean()) - some.shape[1] * math.log(bandwidth)

    return max((*_BANDWIDTHS, 1.0), key=likelihood)
