"""Spaces and points as files: what `netweight space` and recipes call.

A recipe's folder of points holds `points.json` and, after edits, the directions that were used; the points say where
their space lies, as seen from the folder, so that a recipe's output can be moved as a whole.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.core.engines import Engine
from netweight.core.files import whole_folder
from netweight.core.names import nearest_names
from netweight.core.progress import Progress
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import Move, edit
from netweight.methods.space.export import Exported, ExportRecord
from netweight.methods.space.fit import Accuracy
from netweight.methods.space.inversion import InversionTask, Target, invert_targets
from netweight.methods.space.labels import check_columns, read_labels
from netweight.methods.space.points import (
    Direction,
    Points,
    read_direction,
    read_points,
    scores_digest,
    write_direction,
    write_points,
)
from netweight.methods.space.report import WrittenSubject
from netweight.methods.space.sampling import ConditionalSampler, GaussianSampler, KernelSampler, MixtureSampler, Sampler
from netweight.methods.space.settings import (
    EditSettings,
    FolderExport,
    FolderFit,
    FolderInversion,
    FolderView,
    RenderSettings,
    SampleSettings,
)
from netweight.methods.space.space import RECORD, WeightSpace
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.files import read_adapter

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.methods.space.view.content import View

_POINTS, _DIRECTIONS = "points.json", "directions"
_POINT = "a model of the space, a file of points (FILE.json, or FILE.json:NAME), an adapter's file or folder, or mean"
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def fit_folder(
    bank: Path, space: Path, settings: FolderFit, progress: Progress, *, work: Path | None, engine: Engine | None = None
) -> None:
    """Fit a bank and write the space."""
    how = {name: value for name, value in settings if name != "standalone"}
    fitted = WeightSpace.fit(AdapterBank.open(bank), folder=work, engine=engine, progress=progress, **how)
    fitted.save(space, standalone=settings.standalone, bank=bank)


def points_of(space: WeightSpace, text: str) -> Points:
    """The points that a text names: a model of the space, a file of points, an adapter, or the mean."""
    identity = scores_digest(space.scores)
    if text in space.names:
        row = list(space.names).index(text)
        return Points((text,), space.scores[row : row + 1].float().cpu(), identity)
    if text == "mean":
        return Points((text,), space.scores.new_zeros(1, space.components).float().cpu(), identity)
    file, _, name = text.rpartition(".json:")
    path = Path(f"{file}.json") if file else Path(text)
    if path.suffix == ".json" and path.is_file():
        points = read_points(path)
        points.check(space.scores)
        return points.only(name) if file else points
    if path.exists():
        scores = space.project(read_adapter(path))
        return Points((path.stem,), scores[None].float().cpu(), identity, {"projected": str(path)})
    near = ", ".join(map(repr, nearest_names(text, space.names)))
    raise NameNotFound(f"{text!r} is no point: give {_POINT}.", cure=f"The nearest models are {near}.")


def draw(space: WeightSpace, how: SampleSettings) -> Points:
    """Draw points of a space."""
    names = tuple(f"sample-{how.seed}-{number}" for number in range(how.count))
    origin = {"sampler": how.sampler, "seed": how.seed, "given": dict(how.given)}
    sampler: Sampler
    if how.labels is not None:
        labels = read_labels(how.labels, space.names, key=how.name_column)
        fitted = ConditionalSampler.fit(space.scores, labels, bandwidth=how.bandwidth, emphasis=how.emphasis)
        scores = fitted.draw(how.count, seed=how.seed, given=dict(how.given))
    else:
        if how.sampler == "kernel":
            sampler = KernelSampler.fit(space.scores, bandwidth=how.bandwidth)
        elif how.sampler == "mixture":
            sampler = MixtureSampler.fit(space.scores, clusters=how.clusters, seed=how.seed)
        else:
            sampler = GaussianSampler.fit(space.scores, factor=how.factor)
        scores = sampler.draw(how.count, seed=how.seed)
    return Points(names, scores, scores_digest(space.scores), origin)


def moved(before: Points, steps: Sequence[Move], origin: Any) -> Points:
    """Points after moves, which their origin names."""
    moves = [{"direction": step.direction.name, "strength": step.strength, "unit": step.unit} for step in steps]
    return Points(before.names, edit(before.scores, steps), before.space, {"from": origin, "moves": moves})


def invert_files(
    images: Sequence[Path], how: FolderInversion, space: Callable[[], WeightSpace], *, ledger: Path, progress: Progress
) -> Points:
    """Find the points of images: a file each, or a folder with images of the same thing."""
    from netweight.hf.load_pipeline import load_text_to_image, trained_prediction

    targets = [_target(path, how.masks) for path in images]
    opened = space()
    model = load_text_to_image(how.pipeline, device=how.device)
    task = InversionTask(
        how.prompt, how.descent, trained_prediction(model), draws=how.draws, schedule=how.schedule,
        together=how.together, seed=how.seed,
    )  # fmt: skip
    return invert_targets(model, opened, targets, task, ledger=ledger, progress=progress)


def _target(path: Path, masks: Path | None) -> Target:
    """A target's images, in color, within 0 and 1."""
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix.lower() in _IMAGES)
    if not files:
        raise UsageError(f"{path} holds no picture.", cure=f"Give files that end in {', '.join(_IMAGES)}.")
    images = _images(files, 3)
    if masks is None:
        return Target(path.stem, images)
    by_stem = {each.stem: each for each in masks.iterdir()}
    missing = [file.name for file in files if file.stem not in by_stem]
    if missing:
        raise UsageError(f"{masks} holds no mask for {missing[0]}.", cure="Name masks as the images are named.")
    return Target(path.stem, images, _images([by_stem[file.stem] for file in files], 1)[:, 0])


def _images(files: list[Path], channels: int) -> Tensor:
    """Images as `(m, channels, height, width)`, within 0 and 1."""
    from netweight.data.images.sources import decode_splits

    [pixels] = decode_splits([[(file.name, file) for file in files]], of=str(files[0].parent))
    found = pixels.float() / 255
    return found.mean(1, keepdim=True) if channels == 1 else found.expand(-1, 3, -1, -1)


def view_folder(
    folder: Path, space: WeightSpace, settings: FolderView, *, command: str | None, progress: Progress
) -> View:
    """The page about a space, with images of its pipeline."""
    from netweight.hf.load_pipeline import load_text_to_image
    from netweight.methods.space.view.build import build_view

    if settings.pipeline is None or "prompts" not in settings.given or (settings.attributes and not settings.labels):
        options = {"--pipeline": settings.pipeline, "--prompt": settings.given.get("prompts")}
        needed = next((name for name, value in options.items() if not value), "--labels, for --attribute")
        raise UsageError(f"{needed} is missing.", cure="A page about a space is painted by its pipeline.")
    rendering, chosen = settings.rendering(RenderSettings()), settings.attributes
    labels = None
    if settings.labels is not None:
        labels = read_labels(settings.labels, space.names, key=settings.name_column)
    directions = [read_direction(each) for each in settings.directions]
    if labels is not None:
        directions += [
            fit_direction(space.scores, labels, each, confounders=[x for x in chosen if x != each], seed=settings.seed)
            for each in chosen
        ]
    start = points_of(space, settings.start)
    if len(start.names) != 1:
        raise UsageError(f"--start {settings.start} holds {len(start.names)} points.", cure="Name one of them.")
    return build_view(
        load_text_to_image(settings.pipeline, device=settings.device), space, settings=rendering,
        title=f"{folder.name}: {len(space.names)} models as one space", directions=directions, pairs=settings.pairs,
        labels=labels, command=command, progress=progress,
        start=("the mean of the adapters" if settings.start == "mean" else settings.start, start.scores[0]),
    )  # fmt: skip


def export_record(space: WeightSpace, point: str, exported: Exported, layout: str) -> ExportRecord:
    """The record of a point of a space that was exported."""
    return ExportRecord(
        point, scores_digest(space.scores), space.fitted, space.components, exported.ranks, exported.relative_error,
        layout,
    )  # fmt: skip


# What recipes call: each step takes (source, destination, settings, progress); `check_…` finds before any work what
# would fail later, and `examine_…` returns the subject of an audit.


def fit_step(source: Path, destination: Path, settings: FolderFit, progress: Progress) -> None:
    """Fit a bank of adapters."""
    work = destination.with_name(f".{destination.name}.netweight-work")
    fit_folder(source, destination, settings, progress, work=work)
    if work.exists():
        shutil.rmtree(work)


def check_fit(source: Path | None, settings: FolderFit) -> None:
    """Refuse more components than there are."""
    if source is not None:
        count = len(AdapterBank.open(source))
        if settings.components is not None and settings.components >= count:
            raise UsageError(f"A bank of {count} has at most {count - 1} principal components.", cure="Ask for fewer.")


def examine_fit(
    audit: str, destination: Path, source: Path, settings: Any, progress: Progress
) -> tuple[Accuracy, None]:
    """How good the fit is."""
    return WeightSpace.open(destination).accuracy, None


def sample_step(source: Path, destination: Path, settings: SampleSettings, progress: Progress) -> None:
    """Draw points of a space."""
    with whole_folder(destination) as part:
        _write_points(draw(WeightSpace.open(source), settings), part, destination, source)


def check_sample(source: Path | None, settings: SampleSettings) -> None:
    """Refuse labels without the given columns."""
    if settings.labels is not None:
        check_columns(settings.labels, list(settings.given), key=settings.name_column)
    _check_space(source)


def examine_sample(
    audit: str, destination: Path, source: Path, settings: Any, progress: Progress
) -> tuple[tuple[Tensor, Tensor], None]:
    """Scores of the points and of the models."""
    space, _, points = _points_in(destination, "")
    return (points.scores, space.scores), None


def edit_step(source: Path, destination: Path, settings: EditSettings, progress: Progress) -> None:
    """Move points along directions found from labels."""
    space, at, before = _points_in(source, settings.point)
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


def check_edit(source: Path | None, settings: EditSettings) -> None:
    """Refuse labels without the columns of moves and confounders."""
    check_columns(settings.labels, [*settings.moves, *settings.confounders], key=settings.name_column)
    _check_space(source, settings.point)


def examine_edit(
    audit: str, destination: Path, source: Path, settings: Any, progress: Progress
) -> tuple[list[Direction], None]:
    """The directions that were used."""
    return [read_direction(file) for file in sorted((destination / _DIRECTIONS).iterdir())], None


def export_step(source: Path, destination: Path, settings: FolderExport, progress: Progress) -> None:
    """Write points as adapters, each into a folder of its name."""
    space, _, points = _points_in(source, settings.point)
    with whole_folder(destination) as part:
        part.mkdir()
        for place, scores in zip(_places(points), points.scores, strict=True):
            space.point(scores).export(part / place, rank=settings.rank, layout=settings.layout, base=settings.base)


def check_export(source: Path | None, settings: FolderExport) -> None:
    """Refuse a point that the space lacks."""
    _check_space(source, settings.point)


def examine_export(
    audit: str, destination: Path, source: Path, settings: FolderExport, progress: Progress
) -> tuple[WrittenSubject, None]:
    """The adapters that were written, beside the points that they are of."""
    space, _, points = _points_in(source, settings.point)
    exact = {name: space.adapter(scores) for name, scores in zip(points.names, points.scores, strict=True)}
    written = {
        name: read_adapter(destination / place, modules=list(space.shapes))
        for name, place in zip(points.names, _places(points), strict=True)
    }
    return WrittenSubject(exact, written, settings.rank), None


def _write_points(points: Points, folder: Path, destination: Path, space: Path) -> None:
    """Write points that say where their space lies, as seen from where they will be."""
    origin = {**points.origin, "space_at": os.path.relpath(space.resolve(), destination.resolve())}
    write_points(dataclasses.replace(points, origin=origin), folder / _POINTS)


def _points_in(source: Path, point: str) -> tuple[WeightSpace, Path, Points]:
    """The space of a step's input, where it lies, and the points to go on with."""
    if not (source / _POINTS).is_file():
        space = WeightSpace.open(source)
        return space, source, points_of(space, point)
    points = read_points(source / _POINTS)
    at = (source / str(points.origin["space_at"])).resolve()
    space = WeightSpace.open(at)
    points.check(space.scores)
    return space, at, points


def _places(points: Points) -> list[str]:
    """Folders of adapters by points: their names, with numbers where these cannot be names of folders."""
    return [
        name if name == Path(name).name and name not in (".", "..") else f"point-{number}"
        for number, name in enumerate(points.names)
    ]


def _check_space(source: Path | None, point: str = "mean") -> None:
    """Refuse what is no space, or folder of points, or a point that it lacks."""
    if source is None:
        return
    if not any((source / name).is_file() for name in (RECORD, _POINTS)):
        raise UsageError(f"{source} is neither a space nor points of one.", cure="Fit one: netweight space fit.")
    _points_in(source, point)
