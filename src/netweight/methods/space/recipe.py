"""Spaces in recipes: `space-fit` a bank, `space-sample` or `space-edit` its points, `space-export` them as adapters.

A folder of points holds `points.json` and, after edits, the directions that were used; the points say where their space
lies, as seen from the folder, so that a recipe's output can be moved as a whole.

A step takes `(source, destination, settings, progress)`; `_check_…` refuses before any work what would fail later, and
`examine` returns the subject of an audit. Audits look at weights; what points look like is read from pictures by
readers that users bring, which is the attack `images`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from netweight.core.files import whole_folder
from netweight.core.progress import Progress
from netweight.core.seeds import numpy_generator
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import Move
from netweight.methods.space.fit import Accuracy
from netweight.methods.space.folder import EXPORTED, ExportRecord, draw, fit_folder, moved, places_of, points_of
from netweight.methods.space.labels import check_columns, read_labels
from netweight.methods.space.points import (
    Direction,
    NamedPoints,
    distances,
    nearest_distances,
    read_direction,
    read_points,
    write_direction,
    write_points,
)
from netweight.methods.space.settings import EditSettings, FolderExport, FolderFit, SampleSettings
from netweight.methods.space.space import RECORD, WeightSpace, write_space
from netweight.nn.lora import Adapter, combined
from netweight.registry import CardEntry, Method
from netweight.report.audit import Audit
from netweight.report.finding import Finding, Section
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.files import read_adapter

# The treatments of recipes.
FIT, SAMPLE, EDIT, EXPORT = "space-fit", "space-sample", "space-edit", "space-export"

LEAST_AUDITED = 5  # fewest points whose distances to models are reported
EXACT = 1e-4  # largest relative error of an adapter that was written at its own rank: that of fp32
SPREAD_TARGET = 0.9  # least standard deviation of samples' attributes, as a share of that of the training models

_RESAMPLES = 500
_NEIGHBORHOOD = 3  # as in the paper of precision and recall


@final
@dataclass(frozen=True, eq=False)
class WrittenSubject:
    """Adapters that were written, beside the points that they are of."""

    points: Mapping[str, Adapter]  # name → the point as an adapter, exactly
    written: Mapping[str, Adapter]  # name → what its file holds
    rank: int | None = None  # that they were cut to; None for their own
    energy: float = 1.0  # share of each module's square that was enough


def _audit(title: str, question: str, found: Callable[..., list[Finding]]) -> Audit:
    """The audit whose section holds what a function finds."""

    def audit(run: Any, settings: Any, /, *, seed: int, progress: Progress) -> Section:
        return Section(title, found(run), question=question)

    return audit


def _fit_findings(subject: Accuracy) -> list[Finding]:
    """Return how much of the adapters' variance the components hold, of seen adapters and of others."""
    found = [Finding("captured share of variance", subject.captured, better="higher", detail={"by": subject.solver})]
    if subject.halves is not None:
        halves = subject.halves
        found.append(
            Finding("the same of adapters that a fit to half of them had not seen", halves.held_out, better="higher",
                    baseline=halves.fitted, detail={"components": halves.components}),
        )  # fmt: skip
    return found


def _point_findings(subject: tuple[Tensor, Tensor]) -> list[Finding]:
    """Return whether drawn points lie where models lie without being copies of them."""
    # `subject`: scores of the points and of the models, each with a row per point; shapes `(b, k)` and `(n, k)`
    points, models = subject
    if min(len(points), len(models)) < LEAST_AUDITED:
        why = f"{len(points)} points and {len(models)} models are fewer than {LEAST_AUDITED}"
        return [Finding("distance to the nearest training model, relative", None, detail={"reason": why})]
    return neighbor_findings(points, models)


def _written_findings(subject: WrittenSubject) -> list[Finding]:
    """Read adapters back and return how far they are from the points that they were written of."""
    # Returns: The largest relative error: norm of the difference over the norm of the whole change. Where ranks were
    # not cut it is to be at most `EXACT`.
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


fitted_space = _audit("Fit", "How much of the adapters' variance does the space hold?", _fit_findings)
drawn_points = _audit("Neighbors", "Do drawn points lie where models lie, and is none a copy?", _point_findings)
moved_points = _audit("Directions", "How well do directions tell held-out models apart?", direction_findings)
written_adapters = _audit("Files", "Are the adapters that were written the points that were meant?", _written_findings)


_POINTS, _DIRECTIONS = "points.json", "directions"
IMAGES = "images"  # an audit that the attack of this name holds


def _fit(source: Path, destination: Path, settings: FolderFit, progress: Progress) -> None:
    with Job.beside(destination, of="a fit") as job:
        fitted = fit_folder(source, settings, progress, work=job.folder / "fit")
        write_space(fitted, job.tree, destination, standalone=settings.standalone, bank=source)
        job.publish(destination)


def _check_fit(source: Path | None, settings: FolderFit) -> None:
    if source is not None:
        count = len(AdapterBank.open(source))
        if settings.components is not None and settings.components >= count:
            raise UsageError(f"A bank of {count} has at most {count - 1} principal components.", cure="Ask for fewer.")


def _sample(source: Path, destination: Path, settings: SampleSettings, progress: Progress) -> None:
    with whole_folder(destination) as part:
        _write_points(draw(WeightSpace.open(source), settings), part, destination, source)


def _check_sample(source: Path | None, settings: SampleSettings) -> None:
    if settings.labels is not None:
        check_columns(settings.labels, list(settings.attributes), key=settings.name_column)
    _check_space(source)


def _drawn(points: Path) -> tuple[Tensor, Tensor]:
    space, _, found = points_in(points, "")
    return found.scores, space.scores


def _edit(source: Path, destination: Path, settings: EditSettings, progress: Progress) -> None:
    space, at, before = points_in(source, settings.point)
    columns = [*settings.moves, *(name for name in settings.confounders if name not in settings.moves)]
    labels = read_labels(settings.labels, space.names, columns=columns, key=settings.name_column)
    directions = [
        fit_direction(
            space.scores, labels, column, kind=settings.kind, folds=settings.folds, seed=settings.seed,
            confounders=[name for name in settings.confounders if name != column],
        )
        for column in settings.moves
    ]  # fmt: skip
    steps = [Move(found, settings.moves[found.name], settings.unit) for found in directions]
    with whole_folder(destination) as part:
        _write_points(moved(before, steps, dict(before.origin)), part, destination, at)
        for number, found in enumerate(directions, start=1):
            write_direction(found, part / _DIRECTIONS / f"{number:03d}.json")


def _check_edit(source: Path | None, settings: EditSettings) -> None:
    check_columns(settings.labels, [*settings.moves, *settings.confounders], key=settings.name_column)
    _check_space(source, settings.point)


def _export(source: Path, destination: Path, settings: FolderExport, progress: Progress) -> None:
    space, _, points = points_in(source, settings.point)
    how = {name: value for name, value in settings if name != "point"}
    with whole_folder(destination) as part:
        part.mkdir()
        for place, scores in zip(places_of(points), points.scores, strict=True):
            space.point(scores).export(part / place, **how)


def _check_export(source: Path | None, settings: FolderExport) -> None:
    _check_space(source, settings.point)


def _examine_export(
    audit: str, destination: Path, source: Path, settings: FolderExport, progress: Progress
) -> tuple[WrittenSubject, None]:
    space, _, points = points_in(source, settings.point)
    exact = {name: space.adapter(scores) for name, scores in zip(points.names, points.scores, strict=True)}
    written = {
        name: read_adapter(destination / place, modules=list(space.shapes))
        for name, place in zip(points.names, places_of(points), strict=True)
    }
    return WrittenSubject(exact, written, settings.rank, settings.energy), None


def _write_points(points: NamedPoints, folder: Path, destination: Path, space: Path) -> None:
    """Write points with the place of their space, relative to where they will be."""
    origin = {**points.origin, "space_at": os.path.relpath(space.resolve(), destination.resolve())}
    write_points(dataclasses.replace(points, origin=origin), folder / _POINTS)


def points_in(source: Path, point: str) -> tuple[WeightSpace, Path, NamedPoints]:
    """The space of a step's input, its folder, and the points to continue with."""
    if not (source / _POINTS).is_file():
        space = WeightSpace.open(source)
        return space, source, points_of(space, point)
    points = read_points(source / _POINTS)
    at = (source / str(points.origin["space_at"])).resolve()
    space = WeightSpace.open(at)
    points.check(space.scores)
    return space, at, points


def directions_in(folder: Path) -> list[Direction]:
    """The directions by which the points of a folder were moved."""
    return [read_direction(file) for file in sorted((folder / _DIRECTIONS).glob("*.json"))]


def _subject(read: Callable[[Path], Any]) -> Callable[..., tuple[Any, None]]:
    """How an audit's subject is read from what a step wrote."""
    return lambda audit, destination, source, settings, progress: (read(destination), None)


def _check_space(source: Path | None, point: str = "mean") -> None:
    """Refuse what is no space, or folder of points, or a point that it lacks."""
    if source is None:
        return
    if not any((source / name).is_file() for name in (RECORD, _POINTS)):
        raise UsageError(f"{source} is neither a space nor points of one.", cure="Fit one: netweight space fit.")
    points_in(source, point)


def _card(folder: Path) -> CardEntry | None:
    if not (folder / EXPORTED).exists():
        return None
    record = ExportRecord.read(folder)
    text = (
        "A low-rank adapter that is a point of a space of adapters, not trained on images of its own. Where the space "
        "is of people, it may resemble one of them."
    )
    low, high = record.ranks
    facts = (
        ("point", record.point),
        ("of a space of", f"{record.adapters} adapters, {record.components} components"),
        ("rank", str(low) if low == high else f"{low} to {high}"),
        ("left out by the rank, relative", f"{record.relative_error:.2e}"),
        ("layout", record.layout),
    )
    return CardEntry("Drawn from a space of adapters", text, facts, ("lora",))


SPACE_FIT = Method(
    FIT,
    FolderFit,
    audits={"fit": fitted_space},
    apply=_fit,
    examine=_subject(lambda place: WeightSpace.open(place).accuracy),
    check=_check_fit,
    takes=("bank",),
    makes="space",
)
SPACE_SAMPLE = Method(
    SAMPLE,
    SampleSettings,
    audits={"neighbors": drawn_points, IMAGES: None},
    apply=_sample,
    by_attack={IMAGES: IMAGES},
    examine=_subject(_drawn),
    check=_check_sample,
    takes=("space",),
    makes="points",
)
SPACE_EDIT = Method(
    EDIT,
    EditSettings,
    audits={"directions": moved_points, IMAGES: None},
    apply=_edit,
    by_attack={IMAGES: IMAGES},
    examine=_subject(directions_in),
    check=_check_edit,
    takes=("space", "points"),
    makes="points",
)
SPACE_EXPORT = Method(
    EXPORT,
    FolderExport,
    audits={"files": written_adapters},
    apply=_export,
    examine=_examine_export,
    check=_check_export,
    takes=("space", "points"),
    makes="adapters",
    card=_card,
)
