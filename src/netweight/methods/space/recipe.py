"""Spaces in recipes: `space-fit` a bank, `space-sample` or `space-edit` points of it, `space-export` them as adapters.

A folder of points holds `points.json` and, after edits, the directions that were used; the points say where their space
lies, as seen from the folder, so that a recipe's output can be moved as a whole.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import Field, FilePath

from netweight.core.files import whole_folder
from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.methods.space.directions import check_columns, fit_direction, read_labels
from netweight.methods.space.edits import Move, edit
from netweight.methods.space.folder import EXPORTED, Drawing, ExportRecord, draw, points_of
from netweight.methods.space.points import Points, read_direction, read_points, write_direction, write_points
from netweight.methods.space.report import EDIT, EXPORT, FIT, SAMPLE, WrittenSubject
from netweight.methods.space.settings import Representation
from netweight.methods.space.space import RECORD as SPACE_RECORD
from netweight.methods.space.space import WeightSpace
from netweight.registry import CardEntry, Method
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.files import read_adapter

_HOME = "netweight.methods.space.report"
_POINTS, _DIRECTIONS = "points.json", "directions"
Count = Annotated[int, Field(ge=1)]


@final
@dataclass(frozen=True)
class SpaceFit:
    """How a space is fitted to a bank of adapters.

    Attributes:
        components: How many; None for as many as there are, at most 1,000.
        representation: "delta" for changes, "shared-down" or "factors"; see docs/weight-space.md.
        solver: "dual" exactly, "streaming" by passes over the bank, "auto" by the number of adapters.
        standardize: Of factors: whether they are divided by their standard deviations first.
        halves: Whether two halves are fitted too, to see what comes back.
        seed: Of everything random.
        standalone: Whether the adapters are copied into the space, so that it opens without its bank.
    """

    components: Count | None = None
    representation: Representation = "delta"
    solver: Literal["auto", "dual", "streaming"] = "auto"
    standardize: bool = True
    halves: bool = True
    seed: int = 0
    standalone: bool = False


@final
@dataclass(frozen=True)
class SpaceEdit:
    """How points are moved along directions found from labels.

    Attributes:
        labels: Attributes of the space's models, a file with one row per model.
        moves: Attribute → how far to go, negative for back.
        unit: What that counts: models' "deviations", their farthest ("reach"), or the vector ("raw").
        point: Where to start in a space: a model of it, or "mean"; points that an earlier step made are all moved.
        kind: How directions are found: "encoder", "decoder" or "difference" of means.
        confounders: Attributes that are to stay as they are.
        name_column: The column that names the model.
        folds: Of the cross-validation that says how well directions tell held-out models apart.
        seed: Of the folds.

    Raises:
        UsageError: There is no move.
    """

    labels: FilePath
    moves: Mapping[str, float]
    unit: Literal["deviations", "reach", "raw"] = "deviations"
    point: str = "mean"
    kind: Literal["encoder", "decoder", "difference"] = "encoder"
    confounders: tuple[str, ...] = ()
    name_column: str = "name"
    folds: Annotated[int, Field(ge=2)] = 5
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what changes nothing."""
        if not self.moves:
            raise UsageError("There is no move.", cure="Write moves: {ATTRIBUTE: STRENGTH}.")


@final
@dataclass(frozen=True)
class SpaceExport:
    """How points are written as adapters.

    Attributes:
        layout: Whose files: "diffusers", "peft" or "kohya".
        rank: Of each module; None for as high as is needed.
        point: What to write of a space: a model of it, or "mean"; of points that an earlier step made each is written.
        base: Name of the base model, to be said in the files.
    """

    layout: Literal["diffusers", "peft", "kohya"] = "diffusers"
    rank: Count | None = None
    point: str = "mean"
    base: str | None = None


def _fit(source: Path, destination: Path, settings: SpaceFit, progress: Progress) -> None:
    how = {name: value for name, value in vars(settings).items() if name != "standalone"}
    work = destination.with_name(f".{destination.name}.netweight-work")
    fitted = WeightSpace.fit(AdapterBank.open(source), folder=work, progress=progress, **how)
    fitted.save(destination, standalone=settings.standalone, bank=source)
    if work.exists():
        shutil.rmtree(work)


def _sample(source: Path, destination: Path, settings: Drawing, progress: Progress) -> None:
    space = WeightSpace.open(source)
    with whole_folder(destination) as part:
        _keep(draw(space, settings), part, destination, source)


def _edit(source: Path, destination: Path, settings: SpaceEdit, progress: Progress) -> None:
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
    told = [{"direction": step.direction.name, "strength": step.strength, "unit": step.unit} for step in steps]
    origin = {"from": dict(before.origin), "moves": told}
    with whole_folder(destination) as part:
        _keep(Points(before.names, edit(before.scores, steps), before.space, origin), part, destination, at)
        for number, found in enumerate(directions, start=1):
            write_direction(found, part / _DIRECTIONS / f"{number:03d}.json")


def _export(source: Path, destination: Path, settings: SpaceExport, progress: Progress) -> None:
    space, _, points = _points_in(source, settings.point)
    with whole_folder(destination) as part:
        part.mkdir()
        for place, scores in zip(_places(points), points.scores, strict=True):
            space.point(scores).export(part / place, rank=settings.rank, layout=settings.layout, base=settings.base)


def _keep(points: Points, folder: Path, destination: Path, space: Path) -> None:
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


def _examine_space(
    audit: str, destination: Path, source: Path, settings: SpaceFit, progress: Progress
) -> tuple[Any, Any]:
    return WeightSpace.open(destination).accuracy, None


def _examine_sample(
    audit: str, destination: Path, source: Path, settings: Drawing, progress: Progress
) -> tuple[Any, Any]:
    space, _, points = _points_in(destination, "")
    return (points.scores, space.scores), None


def _examine_edit(
    audit: str, destination: Path, source: Path, settings: SpaceEdit, progress: Progress
) -> tuple[Any, Any]:
    return [read_direction(file) for file in sorted((destination / _DIRECTIONS).iterdir())], None


def _examine_export(
    audit: str, destination: Path, source: Path, settings: SpaceExport, progress: Progress
) -> tuple[Any, Any]:
    space, _, points = _points_in(source, settings.point)
    exact = {name: space.adapter(scores) for name, scores in zip(points.names, points.scores, strict=True)}
    written = {
        name: read_adapter(destination / place, modules=list(space.shapes))
        for name, place in zip(points.names, _places(points), strict=True)
    }
    return WrittenSubject(exact, written, settings.rank), None


def _check_fit(source: Path | None, settings: SpaceFit) -> None:
    if source is not None:
        bank = AdapterBank.open(source)
        if settings.components is not None and settings.components >= len(bank):
            raise UsageError(
                f"A bank of {len(bank)} has at most {len(bank) - 1} principal components.", cure="Ask for fewer."
            )


def _check_sample(source: Path | None, settings: Drawing) -> None:
    if settings.labels is not None:
        check_columns(settings.labels, list(settings.given), key=settings.name_column)
    _check_space(source)


def _check_edit(source: Path | None, settings: SpaceEdit) -> None:
    check_columns(settings.labels, [*settings.moves, *settings.confounders], key=settings.name_column)
    _check_space(source, settings.point)


def _check_export(source: Path | None, settings: SpaceExport) -> None:
    _check_space(source, settings.point)


def _check_space(source: Path | None, point: str = "mean") -> None:
    """Refuse what is no space, or folder of points, or a point that it lacks."""
    if source is None:
        return
    if not any((source / name).is_file() for name in (SPACE_RECORD, _POINTS)):
        raise UsageError(f"{source} is neither a space nor points of one.", cure="Fit one: netweight space fit.")
    _points_in(source, point)


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
    FIT, SpaceFit, home=_HOME, apply=_fit, examine=_examine_space, check=_check_fit, takes=("bank",), makes="space"
)
SPACE_SAMPLE = Method(
    SAMPLE, Drawing, home=_HOME, apply=_sample, examine=_examine_sample, check=_check_sample, takes=("space",),
    makes="points",
)  # fmt: skip
SPACE_EDIT = Method(
    EDIT, SpaceEdit, home=_HOME, apply=_edit, examine=_examine_edit, check=_check_edit, takes=("space", "points"),
    makes="points",
)  # fmt: skip
SPACE_EXPORT = Method(
    EXPORT, SpaceExport, home=_HOME, apply=_export, examine=_examine_export, check=_check_export,
    takes=("space", "points"), makes="adapters", card=_card,
)  # fmt: skip
