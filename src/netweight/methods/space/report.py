"""The audits of a space made step by step: of its fit, of points drawn or moved, and of adapters written.

Importing this module declares the treatments `space-fit`, `space-sample`, `space-edit` and `space-export` and registers
their audits, which look at weights. Each of the last three also names `images`, which no recipe runs: what points look
like is read from pictures by readers that users bring, see `methods.space.audit`, so reports show it as left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.methods.space.directions import Direction, Entanglement, entanglement_findings
from netweight.methods.space.edits import EditCurve, curve_findings
from netweight.methods.space.fit import Accuracy
from netweight.methods.space.points import neighbor_findings, spread_findings
from netweight.metrics.prediction import explained_variance
from netweight.nn.lora import Adapter, combined
from netweight.report.audit import register_audit, register_treatment
from netweight.report.finding import Finding

FIT, SAMPLE, EDIT, EXPORT = "space-fit", "space-sample", "space-edit", "space-export"
"""The treatments."""
LEAST_AUDITED = 5
"""Points that are needed to say how they lie among models."""
EXACT = 1e-4
"""Largest relative error of an adapter that was written at its own rank: that of fp32."""

register_treatment(FIT, audits=("fit",))
register_treatment(SAMPLE, audits=("neighbors", "images"))
register_treatment(EDIT, audits=("directions", "images"))
register_treatment(EXPORT, audits=("files", "images"))


@final
@dataclass(frozen=True, eq=False)
class WrittenSubject:
    """Adapters that were written, beside the points that they are of.

    Attributes:
        points: Name → the point as an adapter, exactly.
        written: Name → what its file holds.
        rank: That they were cut to; None for their own.
    """

    points: Mapping[str, Adapter]
    written: Mapping[str, Adapter]
    rank: int | None = None


@register_audit(FIT, "fit")
def fitted_space(subject: Accuracy, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how much of the adapters' variance the components hold, of seen adapters and of others.

    Args:
        subject: What the fit knows of itself.
        config: Not looked at.
        seed: Not used: nothing is drawn.
        progress: Not used.
    """
    found = [Finding("captured share of variance", subject.captured, better="higher", detail={"by": subject.solver})]
    if subject.halves is not None:
        halves = subject.halves
        found.append(
            Finding("the same of adapters that a fit to half of them had not seen", halves.held_out, better="higher",
                    baseline=halves.fitted, detail={"components": halves.components}),
        )  # fmt: skip
    return found


@register_audit(SAMPLE, "neighbors")
def drawn_points(subject: tuple[Tensor, Tensor], config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return whether drawn points lie where models lie without being copies of them.

    Args:
        subject: Scores of the points and of the models, each with a row per point. Shapes `(b, k)` and `(n, k)`.
        config: Not looked at.
        seed: Not used.
        progress: Not used.
    """
    points, models = subject
    if min(len(points), len(models)) < LEAST_AUDITED:
        why = f"{len(points)} points and {len(models)} models are fewer than {LEAST_AUDITED}"
        return [Finding("distance to the nearest training model, relative", None, detail={"reason": why})]
    return neighbor_findings(points, models)


@register_audit(EDIT, "directions")
def moved_points(subject: Sequence[Direction], config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how well the directions of moves tell held-out models apart; see `methods.space.audit`.

    Args:
        subject: The directions.
        config: Not looked at.
        seed: Not used.
        progress: Where progress is shown.
    """
    return direction_findings(subject, config, seed=seed, progress=progress)


@register_audit(EXPORT, "files")
def written_adapters(subject: WrittenSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Read adapters back and return how far they are from the points that they were written of.

    Args:
        subject: Points and what was read from their files.
        config: Not looked at.
        seed: Not used.
        progress: Not used.

    Returns:
        The largest relative error: norm of the difference over the norm of the whole change. Where ranks were not cut
        it is to be at most `EXACT`.
    """
    errors = {name: _error(point, subject.written[name]) for name, point in subject.points.items()}
    worst = max(errors, key=lambda name: errors[name])
    return [
        Finding("largest relative error of a written adapter", errors[worst], n=len(errors), better="lower",
                target=EXACT if subject.rank is None else None, detail={"point": worst, "rank": subject.rank}),
    ]  # fmt: skip


def _error(point: Adapter, written: Adapter) -> float:
    """Norm of the difference of two adapters' changes over that of the first; in fp64, from the factors."""
    return combined([point, written], [1.0, -1.0]).norm() / (point.norm() or 1.0)


TREATMENT = "space"
DIRECTIONS, EDITS, SAMPLES, INVERSION, ENTANGLEMENT = "directions", "edits", "samples", "inversion", "entanglement"
"""Names of the audits."""

INVERSION_TARGET = 0.9
"""Least R² of inversion from one image, as a share of that of an adapter trained on many."""

register_treatment(TREATMENT, audits=(DIRECTIONS, EDITS, SAMPLES, INVERSION, ENTANGLEMENT))


@final
@dataclass(frozen=True, eq=False)
class SampleSubject:
    """Points that were drawn, beside the training models.

    Attributes:
        samples: Scores of the samples, shape `(b, k)`.
        training: Of the training models, shape `(n, k)`.
        sample_attributes: Read from the samples' images, shape `(b, a)`.
        training_attributes: Read from the training models' images, in the same way, shape `(n, a)`; n may be smaller
            than in `training`.
        names: Of the attributes.
    """

    samples: Tensor
    training: Tensor
    sample_attributes: Tensor
    training_attributes: Tensor
    names: Sequence[str]


@final
@dataclass(frozen=True, eq=False)
class InversionSubject:
    """Attributes of people, true ones and read from images that were made in several ways.

    Attributes:
        truth: Shape `(b, a)`.
        readings: Way → attributes read, mean over fresh images of each person, shape `(b, a)`.
        names: Of the attributes.
        ours: The way that is audited.
        against: The way it is held against, such as an adapter trained on many images.
    """

    truth: Tensor
    readings: Mapping[str, Tensor]
    names: Sequence[str]
    ours: str = "inversion"
    against: str = "adapter of many images"


@final
@dataclass(frozen=True)
class EntanglementSubject:
    """What `entanglement` returned, and of how many attributes.

    Attributes:
        found: One per number of models.
        attributes: How many attributes' directions were compared.
    """

    found: Sequence[Entanglement]
    attributes: int


@register_audit(TREATMENT, DIRECTIONS)
def direction_findings(subject: Sequence[Direction], config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how well each direction tells held-out models apart, and the cosines between directions.

    Args:
        subject: Directions that were fitted with folds.
        config: Not looked at.
        seed: Not used.
        progress: Not used.

    Raises:
        UsageError: There is no direction, or one was fitted without folds.
    """
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


@register_audit(TREATMENT, EDITS)
def edit_findings(subject: Sequence[EditCurve], config: str | None, *, seed: int, progress: Progress) -> list[Finding]:
    """Return effect against cost of each edit.

    Args:
        subject: Curves.
        config: Name of the comparison that says whether the prompt was kept.
        seed: Of the bootstrap.
        progress: Not used.
    """
    return [finding for curve in subject for finding in curve_findings(curve, seed=seed, kept=config)]


@register_audit(TREATMENT, SAMPLES)
def sample_findings(subject: SampleSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how far samples' attributes spread, and whether samples lie where training models lie without copying.

    Args:
        subject: Samples and training models.
        config: Not looked at.
        seed: Of the bootstrap.
        progress: Not used.
    """
    return [
        *spread_findings(subject.sample_attributes, subject.training_attributes, subject.names, seed=seed),
        *neighbor_findings(subject.samples, subject.training),
    ]


@register_audit(TREATMENT, INVERSION)
def inversion_findings(subject: InversionSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how much of people's attributes each way of making them gets right, and ours against another.

    R² of attributes does not punish copying the one image that was inverted: look at how pictures differ, too.

    Args:
        subject: Truth and readings.
        config: Not looked at.
        seed: Not used.
        progress: Not used.

    Raises:
        UsageError: A way is missing, or shapes differ.
    """
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


@register_audit(TREATMENT, ENTANGLEMENT)
def entangled(subject: EntanglementSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how far directions point the same way, by the number of models.

    Args:
        subject: What was found.
        config: Not looked at.
        seed: That it was found with.
        progress: Not used.
    """
    return entanglement_findings(subject.found, attributes=subject.attributes, seed=seed)


def _explained(said: Tensor, truth: Tensor) -> list[float]:
    pairs = zip(said.double().cpu().T, truth.double().cpu().T, strict=True)
    return [
        explained_variance(ours.numpy(), theirs.numpy(), theirs.mean().expand(len(theirs)).numpy()).estimate
        for ours, theirs in pairs
    ]
