"""Audits of a space: of its fit, of directions, edits, samples and inversions, and of adapters written.

The treatments `space-fit`, `space-sample`, `space-edit` and `space-export` are what recipes run; their audits look at
weights. The last three also name `images`, which no recipe runs: what points look like is read from pictures by readers
that users bring, so reports show it as left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from netweight.core.progress import Progress
from netweight.core.seeds import numpy_generator, torch_generator
from netweight.errors import UsageError
from netweight.methods.space.directions import fit_direction, middle
from netweight.methods.space.edits import EditCurve, curve_findings
from netweight.methods.space.fitting.fit import Accuracy
from netweight.methods.space.labels import LabelColumn, Labels
from netweight.methods.space.points import Direction, distances, nearest_distances
from netweight.methods.space.settings import FittedKind
from netweight.metrics.prediction import explained_variance
from netweight.nn.lora import Adapter, combined
from netweight.report.audit import Audit, declare_audits
from netweight.report.finding import Finding, Section

# The treatments of recipes, and that of images.
FIT, SAMPLE, EDIT, EXPORT = "space-fit", "space-sample", "space-edit", "space-export"
TREATMENT = "space"
DIRECTIONS, EDITS, SAMPLES, INVERSION, ENTANGLEMENT = "directions", "edits", "samples", "inversion", "entanglement"

LEAST_AUDITED = 5  # fewest points whose distances to models are reported
EXACT = 1e-4  # largest relative error of an adapter that was written at its own rank: that of fp32
INVERSION_TARGET = 0.9  # least R² of inversion from one image, as a share of that of an adapter trained on many
SPREAD_TARGET = 0.9  # least standard deviation of samples' attributes, as a share of that of the training models

_RESAMPLES = 500
_NEIGHBORHOOD = 3  # as in the paper of precision and recall
_TRIES = 20  # draws for one subsample that has both classes of every attribute


@final
@dataclass(frozen=True, eq=False)
class WrittenSubject:
    """Adapters that were written, beside the points that they are of."""

    points: Mapping[str, Adapter]  # name → the point as an adapter, exactly
    written: Mapping[str, Adapter]  # name → what its file holds
    rank: int | None = None  # that they were cut to; None for their own


def _audit(title: str, question: str, found: Callable[..., list[Finding]]) -> Audit:
    """The audit whose section holds what a function finds."""

    def audit(run: Any, settings: Any, /, *, seed: int, progress: Progress) -> Section:
        return Section(title, found(run, settings, seed=seed, progress=progress), question=question)

    return audit


def _fit_findings(subject: Accuracy, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how much of the adapters' variance the components hold, of seen adapters and of others."""
    found = [Finding("captured share of variance", subject.captured, better="higher", detail={"by": subject.solver})]
    if subject.halves is not None:
        halves = subject.halves
        found.append(
            Finding("the same of adapters that a fit to half of them had not seen", halves.held_out, better="higher",
                    baseline=halves.fitted, detail={"components": halves.components}),
        )  # fmt: skip
    return found


def _point_findings(subject: tuple[Tensor, Tensor], config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return whether drawn points lie where models lie without being copies of them."""
    # `subject`: scores of the points and of the models, each with a row per point; shapes `(b, k)` and `(n, k)`
    points, models = subject
    if min(len(points), len(models)) < LEAST_AUDITED:
        why = f"{len(points)} points and {len(models)} models are fewer than {LEAST_AUDITED}"
        return [Finding("distance to the nearest training model, relative", None, detail={"reason": why})]
    return neighbor_findings(points, models)


def _written_findings(subject: WrittenSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Read adapters back and return how far they are from the points that they were written of."""
    # Returns: The largest relative error: norm of the difference over the norm of the whole change. Where ranks were
    # not cut it is to be at most `EXACT`.
    errors = {name: _error(point, subject.written[name]) for name, point in subject.points.items()}
    worst = max(errors, key=lambda name: errors[name])
    return [
        Finding("largest relative error of a written adapter", errors[worst], n=len(errors), better="lower",
                target=EXACT if subject.rank is None else None, detail={"point": worst, "rank": subject.rank}),
    ]  # fmt: skip


def _error(point: Adapter, written: Adapter) -> float:
    """Norm of the difference of two adapters' changes over that of the first; in fp64, from the factors."""
    return combined([point, written], [1.0, -1.0]).norm() / (point.norm() or 1.0)


@final
@dataclass(frozen=True, eq=False)
class SampleSubject:
    """Points that were drawn, beside the training models."""

    samples: Tensor  # scores of the samples, shape `(b, k)`
    training: Tensor  # shape `(n, k)`
    sample_attributes: Tensor  # read from the samples' images, shape `(b, a)`
    # Read from the training models' images, in the same way, shape `(n, a)`; n may be smaller than in `training`.
    training_attributes: Tensor
    names: Sequence[str]


@final
@dataclass(frozen=True, eq=False)
class InversionSubject:
    """Attributes of people, true ones and read from images that were made in several ways."""

    truth: Tensor  # shape `(b, a)`
    readings: Mapping[str, Tensor]  # way → attributes read, mean over fresh images of each person, shape `(b, a)`
    names: Sequence[str]
    ours: str = "inversion"  # the way that is audited
    against: str = "adapter of many images"  # the way it is held against, such as an adapter trained on many images


@final
@dataclass(frozen=True)
class EntanglementSubject:
    """Result of `entanglement`, and the number of attributes."""

    found: Sequence[Entanglement]  # one per number of models
    attributes: int  # how many attributes' directions were compared


def direction_findings(subject: Sequence[Direction], config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how well each direction tells held-out models apart, and the cosines between directions."""
    bare = [each.name for each in subject if not each.findings]
    if bare or not subject:
        raise UsageError(f"The directions {bare} have no held-out score.", cure="Fit them with folds.")
    pairs = {
        f"{one.name}, {other.name}": one.cosine(other)
        for place, one in enumerate(subject)
        for other in subject[place + 1 :]
    }
    found = [finding for each in subject for finding in each.findings]
    if pairs:
        largest = max(pairs, key=lambda pair: abs(pairs[pair]))
        found.append(Finding("largest |cos| between directions", abs(pairs[largest]), n=len(pairs), better="lower",
                             detail={"pair": largest, "cosines": pairs}))  # fmt: skip
    return found


def edit_findings(subject: Sequence[EditCurve], config: str | None, *, seed: int, progress: Progress) -> list[Finding]:
    """Return effect against cost of each edit."""
    return [finding for curve in subject for finding in curve_findings(curve, seed=seed, kept=config)]


def sample_findings(subject: SampleSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how far samples' attributes spread, and whether samples lie where training models lie without copying."""
    return [
        *spread_findings(subject.sample_attributes, subject.training_attributes, subject.names, seed=seed),
        *neighbor_findings(subject.samples, subject.training),
    ]


def inversion_findings(subject: InversionSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how much of people's attributes each way of making them gets right, and ours against another."""
    # R² of attributes does not punish copying the one image that was inverted: compare how much images differ, too.
    missing = [name for name in (subject.ours, subject.against) if name not in subject.readings]
    if missing:
        raise UsageError(f"There are no readings of {missing[0]!r}.", cure=f"There are {sorted(subject.readings)}.")
    found, mean = [], {}
    for way, said in subject.readings.items():
        if said.shape != subject.truth.shape or said.shape[1] != len(subject.names):
            raise UsageError(
                f"The readings of {way!r} have shape {tuple(said.shape)}, not {tuple(subject.truth.shape)}."
            )
        each = _explained(said, subject.truth)
        mean[way] = sum(each) / len(each)
        found.append(Finding(f"R² of attributes, {way}", mean[way], n=len(said), better="higher",
                             detail=dict(zip(subject.names, each, strict=True))))  # fmt: skip
    other = mean[subject.against]
    share = mean[subject.ours] / other if other > 0 else None
    why = {} if share is not None else {"reason": f"the R² of {subject.against} is {other:.2f}"}
    found.append(Finding(f"R² of {subject.ours} as a share of that of {subject.against}", share, n=len(subject.truth),
                         better="higher", target=INVERSION_TARGET, detail=why))  # fmt: skip
    return found


def entangled(subject: EntanglementSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how far directions point the same way, by the number of models."""
    return entanglement_findings(subject.found, attributes=subject.attributes, seed=seed)


def _explained(said: Tensor, truth: Tensor) -> list[float]:
    pairs = zip(said.double().cpu().T, truth.double().cpu().T, strict=True)
    return [
        explained_variance(ours.numpy(), theirs.numpy(), theirs.mean().expand(len(theirs)).numpy()).estimate
        for ours, theirs in pairs
    ]


def spread_findings(
    samples: Tensor, training: Tensor, names: Sequence[str], *, seed: int = 0, what: str = "attribute"
) -> list[Finding]:
    """How far attributes `(b, a)` of samples spread, as shares of how far those of the training models `(n, a)` do."""
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
    """Whether samples `(b, k)` lie where training models `(n, k)` lie, reach all of them, and copy none."""
    # Distance to the nearest training model over that between training models (medians); copies, nearer to a training
    # model than half of what lies between training models in the median; precision, the share of samples within the
    # neighborhood of a training model; recall, the share of training models within that of a sample.
    # Source: precision and recall of Kynkäänniemi et al. 2019, with the third neighbor.
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
    inside = [(distances(part, others) <= reach).any(1) for part in torch.split(points, 1024)]
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


@final
@dataclass(frozen=True)
class Entanglement:
    """Directions found from subsamples of one size."""

    models: int  # size of a subsample
    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over subsamples."""
        return sum(self.each) / len(self.each)

    @property
    def middle(self) -> tuple[float, float]:
        """The middle 95 % of the subsamples."""
        return middle(self.each)


def entanglement(
    scores: Tensor,
    labels: Labels,
    columns: Sequence[str],
    sizes: Sequence[int],
    *,
    repeats: int = 20,
    kind: FittedKind = "difference",
    fidelity: Literal["corrected", "reference"] = "corrected",
    seed: int = 0,
) -> list[Entanglement]:
    """Cosines between directions that are found from subsamples of the models, by their sizes."""
    # The axes stay those of all models: this shows how many models directions need, not axes.
    # Source: weights2weights, figure 8: mean absolute cosine between pairs of directions.
    if len(columns) < 2 or not sizes or max(sizes) > len(scores) or min(sizes) < 4 or repeats < 1:
        raise UsageError(
            f"{len(columns)} attributes in subsamples of {list(sizes)} of {len(scores)} models cannot be compared.",
            cure="Give two attributes or more, and sizes from 4 to the number of models.",
        )
    found = []
    for size in sizes:
        draws = [_drawn(labels, columns, size, seed, number) for number in range(repeats if size < len(scores) else 1)]
        found.append(Entanglement(size, tuple(_mean_cosine(scores, labels, columns, d, kind, fidelity) for d in draws)))
    return found


def entanglement_findings(found: Sequence[Entanglement], *, attributes: int, seed: int = 0) -> list[Finding]:
    """One finding per number of models, the smallest number as their baseline."""
    return [
        Finding(f"mean |cos| between directions, {each.models} models", each.mean,
                ci95=each.middle if len(each.each) > 1 else None, n=len(each.each), better="lower",
                baseline=found[0].mean, seeds=(seed,),
                detail={"attributes": attributes, "subsamples": len(each.each)})
        for each in found
    ]  # fmt: skip


def _drawn(labels: Labels, columns: Sequence[str], size: int, seed: int, number: int) -> Tensor:
    """A subsample with at least two models of each class of every attribute."""
    generator = torch_generator(seed, "subsample", size, number)
    for _ in range(_TRIES):
        rows = torch.randperm(len(labels.names), generator=generator)[:size]
        parts = [LabelColumn(name, labels[name].values[rows]) for name in columns]
        if all(len(part.levels) > 1 and _counts(part) >= 2 for part in parts):
            return rows
    raise UsageError(f"Subsamples of {size} models lack a class of an attribute.", cure="Take larger ones.")


def _counts(column: LabelColumn) -> int:
    if column.kind == "continuous":
        return int(column.known.sum())
    return min(int((column.values == level).sum()) for level in column.levels)


def _mean_cosine(
    scores: Tensor,
    labels: Labels,
    columns: Sequence[str],
    rows: Tensor,
    kind: FittedKind,
    fidelity: Literal["corrected", "reference"],
) -> float:
    part = Labels(
        tuple(labels.names[row] for row in rows.tolist()),
        {name: LabelColumn(name, labels[name].values[rows]) for name in columns},
    )
    directions = [fit_direction(scores[rows], part, name, kind=kind, fidelity=fidelity, folds=0) for name in columns]
    cosines = [abs(one.cosine(other)) for one, other in itertools.combinations(directions, 2)]
    return sum(cosines) / len(cosines)


fitted_space = _audit("Fit", "How much of the adapters' variance does the space hold?", _fit_findings)
drawn_points = _audit("Neighbors", "Do drawn points lie where models lie, and is none a copy?", _point_findings)
moved_points = _audit("Directions", "How well do directions tell held-out models apart?", direction_findings)
written_adapters = _audit("Files", "Are the adapters that were written the points that were meant?", _written_findings)
declare_audits(
    TREATMENT,
    {
        DIRECTIONS: moved_points,
        EDITS: _audit("Edits", "What does an edit change, and what else?", edit_findings),
        SAMPLES: _audit("Samples", "Are samples new, and as different as training models?", sample_findings),
        INVERSION: _audit("Inversion", "How much of a person does one image give?", inversion_findings),
        ENTANGLEMENT: _audit("Entanglement", "How many models do directions need?", entangled),
    },
)
