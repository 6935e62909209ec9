"""The audits of spaces: of a fit, of drawn points, of directions, of adapters that were written.

They look at weights. What points look like is measured from images by readers that users bring, which is the attack
`images`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from netweight.core.progress import Progress
from netweight.core.seeds import numpy_generator
from netweight.errors import UsageError
from netweight.methods.space.fit import Accuracy
from netweight.methods.space.points import Direction, distances, nearest_distances
from netweight.nn.lora import Adapter, combined
from netweight.report.audit import Audit
from netweight.report.finding import Finding, Section

# Fewest points whose distances to models are reported.
LEAST_AUDITED = 5
# The largest relative error of an adapter that was written at its own rank, which is that of fp32.
EXACT = 1e-4
# The smallest standard deviation of the samples' attributes, as a share of that of the training models.
SPREAD_TARGET = 0.9

_RESAMPLES = 500
# Number of neighbors, as in the paper on precision and recall.
_NEIGHBORHOOD = 3


@final
@dataclass(frozen=True, eq=False)
class WrittenSubject:
    """Adapters that were written, beside the points that they are of."""

    points: Mapping[str, Adapter]
    """Name → point as an adapter of full rank."""
    written: Mapping[str, Adapter]
    """Name → adapter as read back from its file."""
    rank: int | None = None
    """Rank that the points were truncated to; None for their own."""
    energy: float = 1.0
    """Share of each module's squared norm that truncation preserves; from 0 to 1."""


def _audit(title: str, question: str, measure: Callable[..., list[Finding]]) -> Audit:
    """The audit whose section holds what a function finds."""

    def audit(run: Any, settings: Any, /, *, seed: int, progress: Progress) -> Section:
        return Section(title, measure(run), question=question)

    return audit


def _fit_findings(subject: Accuracy) -> list[Finding]:
    """Return how much of the adapters' variance the components hold, of seen adapters and of others."""
    findings = [Finding("captured share of variance", subject.captured, better="higher", detail={"by": subject.solver})]
    if subject.halves is not None:
        halves = subject.halves
        findings.append(
            Finding("captured share of variance, adapters held out of the fit", halves.held_out, better="higher",
                    baseline=halves.fitted, detail={"components": halves.components}),
        )  # fmt: skip
    return findings


def _point_findings(subject: tuple[Tensor, Tensor]) -> list[Finding]:
    """Return whether drawn points lie where models lie without being copies of them.

    Args:
        subject: Scores of the points and of the models, each with a row per point; shapes `(b, k)` and `(n, k)`.
    """
    points, models = subject
    if min(len(points), len(models)) < LEAST_AUDITED:
        why = f"{len(points)} points and {len(models)} models are fewer than {LEAST_AUDITED}"
        return [Finding("distance to the nearest training model, relative", None, detail={"reason": why})]
    return neighbor_findings(points, models)


def _written_findings(subject: WrittenSubject) -> list[Finding]:
    """Read adapters back and return how far they are from the points that they were written of.

    Returns:
        The largest relative error: norm of the difference over the norm of the whole change. Where ranks were not cut
        it is to be at most `EXACT`.
    """
    errors = {name: _error(point, subject.written[name]) for name, point in subject.points.items()}
    worst = max(errors, key=lambda name: errors[name])
    return [
        Finding("largest relative error of a written adapter", errors[worst], n=len(errors), better="lower",
                target=EXACT if subject.rank is None and subject.energy == 1 else None,
                detail={"point": worst, "rank": subject.rank}),
    ]  # fmt: skip


def _error(point: Adapter, written: Adapter) -> float:
    """Norm of the difference of two adapters' changes over that of the first; in fp64, from the factors."""
    return combined([point, written], [1.0, -1.0]).norm() / (point.norm() or 1.0)


def direction_findings(subject: Sequence[Direction]) -> list[Finding]:
    """Return how well each direction separates held-out models, and the cosines between directions."""
    bare = [each.name for each in subject if not each.findings]
    if bare or not subject:
        raise UsageError(f"The directions {bare} have no held-out score.", cure="Fit them with folds.")
    pairs = {
        f"{one.name}, {other.name}": one.cosine(other)
        for place, one in enumerate(subject)
        for other in subject[place + 1 :]
    }
    findings = [finding for each in subject for finding in each.findings]
    if pairs:
        largest = max(pairs, key=lambda pair: abs(pairs[pair]))
        findings.append(Finding("largest |cos| between directions", abs(pairs[largest]), n=len(pairs), better="lower",
                             detail={"pair": largest, "cosines": pairs}))  # fmt: skip
    return findings


def spread_findings(
    samples: Tensor, training: Tensor, names: Sequence[str], *, seed: int = 0, what: str = "attribute"
) -> list[Finding]:
    """Report the spread of the samples' attributes `(b, a)` as shares of that of the training models `(n, a)`."""
    ours, theirs = _checked(samples, training, names)
    ratios = _ratios(ours, theirs)
    generator = numpy_generator(seed, "spread")
    drawn = torch.stack([
        _ratios(*(part[generator.integers(0, len(part), len(part))] for part in (ours, theirs)))
        for _ in range(_RESAMPLES)
    ])  # fmt: skip
    limits = torch.tensor([0.025, 0.975], dtype=torch.float64)
    each, mean = drawn.nanquantile(limits, 0).T.tolist(), drawn.mean(1).nanquantile(limits).tolist()
    about = {"training models": len(theirs), "least": float(ratios.min()), "least of": names[int(ratios.argmin())]}
    return [
        Finding(f"{what} spread of samples against training, mean", float(ratios.mean()), ci95=(mean[0], mean[1]),
                n=len(ours), better="higher", target=SPREAD_TARGET, seeds=(seed,), detail=about),
        *(
            Finding(f"spread of {name}", float(ratio), ci95=(low, high), n=len(ours), seeds=(seed,))
            for name, ratio, (low, high) in zip(names, ratios, each, strict=True)
        ),
    ]  # fmt: skip


def neighbor_findings(samples: Tensor, training: Tensor) -> list[Finding]:
    """Report whether samples `(b, k)` lie where training models `(n, k)` lie, reach all of them, and copy none.

    Distance to the nearest training model over that between training models (medians); copies, nearer to a training
    model than half of what lies between training models in the median; precision, the share of samples within the
    neighborhood of a training model; recall, the share of training models within that of a sample.

    Source: Precision and recall of Kynkäänniemi et al. 2019, with the third neighbor.
    """
    ours, theirs = _checked(samples, training, None)
    own = nearest_distances(theirs)
    middle = float(own.median())
    near = nearest_distances(ours, theirs)
    if not middle > 0:
        raise UsageError(
            "Most training models have an identical copy, so distances carry no information.",
            cure="Remove the copies.",
        )
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
    inside = [(distances(part, others) <= reach).any(1) for part in torch.split(points, 1024)]
    return float(torch.cat(inside).double().mean())


def _ratios(samples: Tensor, training: Tensor) -> Tensor:
    return samples.std(0) / training.std(0)


def _checked(samples: Tensor, training: Tensor, names: Sequence[str] | None) -> tuple[Tensor, Tensor]:
    ours, theirs = samples.detach().double().cpu(), training.detach().double().cpu()
    wrong = ours.ndim != 2 or theirs.ndim != 2 or ours.shape[1:] != theirs.shape[1:] or min(len(ours), len(theirs)) < 5
    if wrong or (names is not None and len(names) != ours.shape[1]):
        raise UsageError(
            f"Samples of shape {tuple(ours.shape)} cannot be compared with training models of {tuple(theirs.shape)}.",
            cure="Give at least 5 of each, with the same columns, and a name for each.",
        )
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        raise UsageError("Samples or training models contain NaN or infinity.")
    if names is not None and not (theirs.std(0) > 0).all():
        still = names[int((theirs.std(0) > 0).int().argmin())]
        raise UsageError(f"The training models do not differ in {still!r}.", cure="Leave it out.")
    return ours, theirs


fitted_space = _audit("Fit", "How much of the adapters' variance does the space explain?", _fit_findings)
drawn_points = _audit(
    "Neighbors", "Are drawn points in the region of the models, without copying one?", _point_findings
)
moved_points = _audit("Directions", "How well do directions separate held-out models?", direction_findings)
written_adapters = _audit("Files", "Do the written adapters equal the points?", _written_findings)
