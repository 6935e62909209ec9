"""Spaces as steps of recipes: fit a bank, draw or move its points, write them as adapters.

A folder of points holds `points.json` and, after edits, the directions that were used; the points say where their space
lies, as seen from the folder, so that a recipe's output can be moved as a whole.

A step takes `(source, destination, settings, progress)`; `check_…` refuses before any work what would fail later, and
`examine_…` returns the subject of an audit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from netweight.core.atomic_writes import whole_folder
from netweight.core.engines import local_processes
from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.space.audits import WrittenSubject
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import Move
from netweight.methods.space.labels import check_columns, read_labels
from netweight.methods.space.points import (
    Direction,
    NamedPoints,
    read_direction,
    read_points,
    write_direction,
    write_points,
)
from netweight.methods.space.settings import EditSettings, FolderExport, FolderFit, SampleSettings
from netweight.methods.space.space import RECORD, WeightSpace, check_space, write_space
from netweight.methods.space.space_files import EXPORTED, ExportRecord, draw, fit_folder, moved, places_of, points_of
from netweight.registry import CardEntry
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.reading import read_adapter

_POINTS, _DIRECTIONS = "points.json", "directions"


def fit(source: Path, destination: Path, settings: FolderFit, progress: Progress) -> None:
    engine = None if settings.processes is None else partial(local_processes, workers=settings.processes)
    with Job.beside(destination, of="a fit") as job:
        work = settings.work or job.folder / "fit"
        fitted = fit_folder(source, settings, progress, work=work, engine=engine)
        write_space(fitted, job.tree, destination, standalone=settings.standalone, bank=source)
        job.publish(destination)


def check_fit(source: Path | None, settings: FolderFit) -> None:
    if source is not None:
        count = len(AdapterBank.open(source))
        if settings.components is not None and settings.components >= count:
            raise UsageError(f"A bank of {count} has at most {count - 1} principal components.", cure="Ask for fewer.")


def sample(source: Path, destination: Path, settings: SampleSettings, progress: Progress) -> None:
    with whole_folder(destination) as part:
        _write_points(draw(WeightSpace.open(source), settings), part, destination, source)


def check_sample(source: Path | None, settings: SampleSettings, bank: Path | None = None) -> None:
    if settings.labels is not None:
        check_columns(settings.labels, list(settings.attributes), key=settings.name_column)
    _check_space(source, bank=bank)


def _drawn(points: Path) -> tuple[Tensor, Tensor]:
    space, _, named = points_in(points, "")
    return named.scores, space.scores


def moves_of(space: WeightSpace, settings: EditSettings) -> list[Move]:
    """The moves of an edit, along directions from files and along directions that are fitted to labels."""
    columns = [*settings.fitted, *(name for name in settings.confounders if name not in settings.fitted)]
    labels = (
        None if settings.labels is None or not columns
        else read_labels(settings.labels, space.names, columns=columns, key=settings.name_column)
    )  # fmt: skip
    steps = []
    for name, strength in settings.moves.items():
        if name not in settings.fitted:
            line = read_direction(Path(name))
            line.check(space.scores)
        else:
            # The settings have checked this.
            assert labels is not None
            line = fit_direction(
                space.scores, labels, name, kind=settings.kind, folds=settings.folds, seed=settings.seed,
                confounders=[other for other in settings.confounders if other != name],
            )  # fmt: skip
        steps.append(Move(line, strength, settings.unit))
    return steps


def edit(source: Path, destination: Path, settings: EditSettings, progress: Progress) -> None:
    space, at, before = points_in(source, settings.point)
    steps = moves_of(space, settings)
    with whole_folder(destination) as part:
        _write_points(moved(before, steps, dict(before.origin)), part, destination, at)
        for number, step in enumerate(steps, start=1):
            write_direction(step.direction, part / _DIRECTIONS / f"{number:03d}.json")


def check_edit(source: Path | None, settings: EditSettings, bank: Path | None = None) -> None:
    if settings.labels is not None:
        check_columns(settings.labels, [*settings.fitted, *settings.confounders], key=settings.name_column)
    _check_space(source, settings.point, bank)


def export(source: Path, destination: Path, settings: FolderExport, progress: Progress) -> None:
    space, _, points = points_in(source, settings.point)
    how = {name: value for name, value in settings if name != "point"}
    with whole_folder(destination) as part:
        part.mkdir()
        for place, scores in zip(places_of(points), points.scores, strict=True):
            space.point(scores).export(part / place, **how)


def check_export(source: Path | None, settings: FolderExport, bank: Path | None = None) -> None:
    _check_space(source, settings.point, bank)


def examine_export(
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
    """Read an audit's subject from what a step wrote."""
    return lambda audit, destination, source, settings, progress: (read(destination), None)


examine_fit = _subject(lambda place: WeightSpace.open(place).accuracy)
examine_sample = _subject(lambda place: _drawn(place))
examine_edit = _subject(directions_in)


def _check_space(source: Path | None, point: str = "mean", bank: Path | None = None) -> None:
    """Refuse what is not a space, or folder of points, or a point that it lacks, or a space whose bank is missing."""
    if source is None:
        return
    if not any((source / name).is_file() for name in (RECORD, _POINTS)):
        raise UsageError(f"{source} is neither a space nor points of one.", cure="Fit one: netweight space fit.")
    if point == "mean" and not (source / _POINTS).is_file():
        # Every space contains its mean, so its numbers need not be read.
        check_space(source, bank)
    else:
        points_in(source, point)


def card(folder: Path) -> CardEntry | None:
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
