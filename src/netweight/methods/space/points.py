"""Points and directions of a space as values, in files, and the models nearest to points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from netweight.core.files import digest_config, digest_tensor, read_record, write_record
from netweight.core.names import nearest_names
from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.methods.space.settings import Unit
from netweight.report.finding import Finding

DirectionKind: TypeAlias = Literal["encoder", "decoder", "difference", "corrected", "reference"]
Measure: TypeAlias = Literal["cosine", "distance"]

POINTS_VERSION = 1  # of the files
_AT_ONCE = 1024  # points whose distances are computed at a time


def scores_digest(scores: Tensor) -> str:
    """What ties points and directions to a space: a digest of its first scores, which stay when models are appended."""
    return digest_config([scores.shape[-1], digest_tensor(scores[:8].detach().float())])


@final
@dataclass(frozen=True, eq=False)
class NamedPoints:
    """Named points of a space."""

    names: tuple[str, ...]  # one per point
    scores: Tensor  # shape `(b, k)`, fp32
    space: str | None = None  # digest of the space, as `scores_digest` gives it; None if unknown
    origin: Mapping[str, Any] = field(default_factory=dict)  # how they were made, JSON values

    def __post_init__(self) -> None:
        """Refuse what are no points."""
        if self.scores.ndim != 2 or len(self.names) != len(self.scores) or not self.scores.isfinite().all():
            raise UsageError(
                f"{len(self.names)} names came with scores of shape {tuple(self.scores.shape)}, or some hold NaN.",
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
        """Return what is added to scores, shape `(k,)`, fp64.

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
            found = cls(**{**data, "vector": vector, "findings": findings})
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise CorruptBlob(f"This is no direction: {error}.", cure="Find it again.") from None
        if vector.ndim != 1 or not vector.isfinite().all() or not found.length > 0:
            raise CorruptBlob("The vector of this direction is no finite vector.", cure="Find it again.")
        return found


def write_points(points: NamedPoints, path: str | Path, *, overwrite: bool = False) -> None:
    """Write points, whole or not at all."""
    scores = points.scores.float().tolist()
    values = {**vars(points), "names": list(points.names), "scores": scores, "origin": dict(points.origin)}
    write_record(path, {"points": values}, version=POINTS_VERSION, overwrite=overwrite)


def read_points(path: str | Path) -> NamedPoints:
    """Read points."""

    def made(values: dict[str, Any]) -> NamedPoints:
        found = values["points"]
        scores = torch.tensor(found["scores"], dtype=torch.float32)
        return NamedPoints(tuple(found["names"]), scores, found["space"], found["origin"])

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

    name: str  # the model
    number: int  # its row in the space
    cosine: float  # NaN for the mean model, which has no direction
    distance: float  # norm of the difference of the two changes


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
        raise UsageError("A point holds NaN or infinity.", cure="Did an inversion diverge? Look at its losses.")
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
    found = []
    for number, part in enumerate(torch.split(points, _AT_ONCE)):
        apart = distances(part, among)
        if others is None:
            rows = torch.arange(len(part))
            apart[rows, number * _AT_ONCE + rows] = torch.inf
        found.append(apart.kthvalue(rank, dim=1).values)
    return torch.cat(found)


def row_of(name: str, names: Sequence[str]) -> int:
    """The number of a model."""
    if name not in names:
        near = ", ".join(map(repr, nearest_names(name, names)))
        raise NameNotFound(f"There is no model {name!r} in the space.", cure=f"The nearest names are {near}.")
    return list(names).index(name)


def distances(points: Tensor, others: Tensor) -> Tensor:
    """Distances of all pairs, without the matrix product that loses those of near points."""
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")
