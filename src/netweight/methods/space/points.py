"""Whether sampled points spread as the training models do, without copying them: arrays in, findings out.

Works on scores and on what readers say of the images of points; `audit` puts both under one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from netweight.core.names import nearest_names
from netweight.core.seeds import numpy_generator
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.directions import Direction, scores_digest
from netweight.report.finding import Finding
from netweight.store.checkpoint import read_record, write_record

SPREAD_TARGET = 0.9
"""Least standard deviation of samples' attributes, as a share of that of the training models."""

_RESAMPLES = 500
_NEIGHBORHOOD = 3  # as in the paper of precision and recall


def spread_findings(
    samples: Tensor, training: Tensor, names: Sequence[str], *, seed: int = 0, what: str = "attribute"
) -> list[Finding]:
    """Return how far samples spread, as shares of how far the training models do.

    Args:
        samples: Attributes of samples, read from their images, shape `(b, a)`, b at least 5.
        training: Attributes of training models, read in the same way, shape `(n, a)`, n at least 5.
        names: Of the attributes.
        seed: Of the bootstrap, which draws samples and training models anew.
        what: What the columns are.

    Returns:
        The mean ratio of standard deviations over attributes, with the target, and one ratio per attribute.

    Raises:
        UsageError: There are too few, or an attribute of the training models does not vary.
    """
    ours, theirs = _checked(samples, training, names)
    ratios = _ratios(ours, theirs)
    generator = numpy_generator(seed, "spread")
    drawn = torch.stack(
        [
            _ratios(*(part[generator.integers(0, len(part), len(part))] for part in (ours, theirs)))
            for _ in range(_RESAMPLES)
        ]
    )
    limits = torch.tensor([0.025, 0.975], dtype=torch.float64)
    each, mean = drawn.nanquantile(limits, 0).T.tolist(), drawn.mean(1).nanquantile(limits).tolist()
    about = {"training models": len(theirs), "least": float(ratios.min()), "least of": names[int(ratios.argmin())]}
    return [
        Finding(
            f"{what} spread of samples against training, mean",
            float(ratios.mean()),
            ci95=(mean[0], mean[1]),
            n=len(ours),
            better="higher",
            target=SPREAD_TARGET,
            seeds=(seed,),
            detail=about,
        ),
        *(
            Finding(f"spread of {name}", float(ratio), ci95=(low, high), n=len(ours), seeds=(seed,))
            for name, ratio, (low, high) in zip(names, ratios, each, strict=True)
        ),
    ]


def neighbor_findings(samples: Tensor, training: Tensor) -> list[Finding]:
    """Return whether samples lie where training models lie, reach all of them, and are not copies of them.

    Args:
        samples: Scores (or other features) of samples, shape `(b, k)`, b at least 5.
        training: Those of the training models, shape `(n, k)`, n at least 5.

    Returns:
        Distance to the nearest training model over that between training models (medians); copies, nearer to a training
        model than half of what lies between training models in the median; precision, the share of samples within the
        neighborhood of a training model; recall, the share of training models within that of a sample.

    Raises:
        UsageError: Most training models have a twin.

    Source: precision and recall of Kynkäänniemi et al. 2019, with the third neighbor.
    """
    ours, theirs = _checked(samples, training, None)
    own = nearest_distances(theirs)
    middle = float(own.median())
    near = nearest_distances(ours, theirs)
    if not middle > 0:
        raise UsageError("Most training models have a twin: distances tell nothing.", cure="Take the copies out.")
    precision = _within(ours, theirs)
    recall = _within(theirs, ours)
    return [
        Finding("distance to the nearest training model, relative", float(near.median()) / middle, n=len(ours),
                baseline=1.0, detail={"between training models": middle}),
        Finding("samples that copy a training model", float((near < middle / 2).double().mean()), n=len(ours),
                better="lower", baseline=float((own < middle / 2).double().mean())),
        Finding("precision of samples", precision, n=len(ours), better="higher"),
        Finding("recall of samples", recall, n=len(theirs), better="higher"),
    ]  # fmt: skip


def _within(points: Tensor, others: Tensor) -> float:
    """Share of points that lie within the neighborhood of one of the others."""
    reach = nearest_distances(others, rank=min(_NEIGHBORHOOD, len(others) - 1))
    inside = [
        (torch.cdist(part, others, compute_mode="donot_use_mm_for_euclid_dist") <= reach).any(1)
        for part in torch.split(points, 1024)
    ]
    return float(torch.cat(inside).double().mean())


def _ratios(samples: Tensor, training: Tensor) -> Tensor:
    return samples.std(0) / training.std(0)


def _checked(samples: Tensor, training: Tensor, names: Sequence[str] | None) -> tuple[Tensor, Tensor]:
    ours, theirs = samples.detach().double().cpu(), training.detach().double().cpu()
    wrong = ours.ndim != 2 or theirs.ndim != 2 or ours.shape[1:] != theirs.shape[1:] or min(len(ours), len(theirs)) < 5
    if wrong or (names is not None and len(names) != ours.shape[1]):
        raise UsageError(
            f"Samples of shape {tuple(ours.shape)} cannot be held against training models of {tuple(theirs.shape)}.",
            cure="Give at least 5 of each, with the same columns, and a name for each.",
        )
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        raise UsageError("Samples or training models hold NaN or infinity.")
    if names is not None and not (theirs.std(0) > 0).all():
        still = names[int((theirs.std(0) > 0).int().argmin())]
        raise UsageError(f"The training models do not differ in {still!r}.", cure="Leave it out.")
    return ours, theirs


Measure: TypeAlias = Literal["cosine", "distance"]

_AT_ONCE = 1024


@final
@dataclass(frozen=True)
class Neighbor:
    """A training model near a point.

    Attributes:
        name: The model.
        number: Its row in the space.
        cosine: Of the angle between what the two add to the mean model; NaN for the mean model, which has no direction.
        distance: Norm of the difference of the two changes.
    """

    name: str
    number: int
    cosine: float
    distance: float


def nearest(
    points: Tensor, scores: Tensor, names: Sequence[str], *, count: int = 5, measure: Measure = "cosine"
) -> list[list[Neighbor]]:
    """Find the training models nearest to points.

    Args:
        points: Shape `(b, k)` or `(k,)`.
        scores: Of the training models, shape `(n, k)`.
        names: Of the training models.
        count: How many; all models if there are fewer.
        measure: Which are nearest: those of the highest cosine, or of the least distance.

    Returns:
        For each point its neighbors, the nearest first. A training model is its own nearest one.

    Raises:
        UsageError: The numbers of components or names do not fit, or a value is not finite.
    """
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
    apart = _apart(points, scores)
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
    """Return how far each point is from its nearest other.

    Args:
        points: Shape `(b, k)`.
        others: Shape `(n, k)`; None for the points themselves, each but itself.
        rank: 1 for the nearest, 2 for the second and so on.

    Returns:
        Shape `(b,)`, fp64.

    Raises:
        UsageError: There are not as many others.
    """
    points = points.detach().double().cpu()
    among = points if others is None else others.detach().double().cpu()
    if rank > len(among) - (others is None):
        raise UsageError(f"There is no neighbor number {rank} among {len(among)} models.", cure="Give more models.")
    found = []
    for rows in _blocks(len(points)):
        apart = _apart(points[rows], among)
        if others is None:
            apart[torch.arange(len(apart)), torch.arange(rows.start, rows.start + len(apart))] = torch.inf
        found.append(apart.kthvalue(rank, dim=1).values)
    return torch.cat(found)


def row_of(name: str, names: Sequence[str]) -> int:
    """Return the number of a model.

    Args:
        name: What is looked for.
        names: Of all models.

    Raises:
        NameNotFound: There is none of this name; the nearest are named.
    """
    if name not in names:
        near = ", ".join(map(repr, nearest_names(name, names)))
        raise NameNotFound(f"There is no model {name!r} in the space.", cure=f"The nearest names are {near}.")
    return list(names).index(name)


def _apart(points: Tensor, others: Tensor) -> Tensor:
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _AT_ONCE):
        yield slice(start, start + _AT_ONCE)


_VERSION = 1


@final
@dataclass(frozen=True, eq=False)
class Points:
    """Named points of a space.

    Attributes:
        names: One per point.
        scores: Shape `(b, k)`, fp32.
        space: Digest of the space, as `scores_digest` gives it; None if unknown.
        origin: How they were made, JSON values.

    Raises:
        UsageError: There are not as many names as points, or a score is not finite.
    """

    names: tuple[str, ...]
    scores: Tensor
    space: str | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what are no points."""
        if self.scores.ndim != 2 or len(self.names) != len(self.scores) or not self.scores.isfinite().all():
            raise UsageError(
                f"{len(self.names)} names came with scores of shape {tuple(self.scores.shape)}, or some hold NaN.",
                cure="Give one row of finite scores per name.",
            )

    def check(self, scores: Tensor) -> None:
        """Refuse points of another space.

        Args:
            scores: The training scores of the space at hand. Shape `(n, k)`.

        Raises:
            UsageError: They are of another.
        """
        if self.scores.shape[1] != scores.shape[1] or self.space not in (None, scores_digest(scores)):
            raise UsageError(
                f"The points are of another space, of {self.scores.shape[1]} components.",
                cure="Export them with their own space, and project the adapters into this one.",
            )

    def only(self, name: str) -> Points:
        """Return one of the points.

        Args:
            name: Of one of the points.

        Raises:
            NameNotFound: There is none of this name; the nearest are named.
        """
        row = row_of(name, self.names)
        return Points((name,), self.scores[row : row + 1], self.space, self.origin)


def write_points(points: Points, path: str | Path, *, overwrite: bool = False) -> None:
    """Write points, whole or not at all.

    Args:
        points: What to write.
        path: The file.
        overwrite: Whether an existing file may be replaced.

    Raises:
        OutputExists: The file exists already.
        OutputFailed: The place cannot be written.
    """
    values = {
        "names": list(points.names),
        "scores": points.scores.float().tolist(),
        "space": points.space,
        "origin": dict(points.origin),
    }
    write_record(path, {"points": values}, version=_VERSION, overwrite=overwrite)


def read_points(path: str | Path) -> Points:
    """Read points.

    Args:
        path: The file.

    Raises:
        CorruptBlob: The file holds none.
        UsageError: It cannot be read.
    """

    def made(values: dict[str, Any]) -> Points:
        found = values["points"]
        scores = torch.tensor(found["scores"], dtype=torch.float32)
        return Points(tuple(found["names"]), scores, found["space"], found["origin"])

    return read_record(path, made, version=_VERSION, of="points of a space")


def write_direction(direction: Direction, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a direction, whole or not at all; errors as for `write_points`."""
    write_record(path, {"direction": direction.to_json()}, version=_VERSION, overwrite=overwrite)


def read_direction(path: str | Path) -> Direction:
    """Read a direction; errors as for `read_points`."""
    return read_record(
        path, lambda values: Direction.from_json(values["direction"]), version=_VERSION, of="a direction"
    )  # fmt: skip
