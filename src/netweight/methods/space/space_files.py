"""From files to points and back: what `netweight space` and recipes call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import torch

from netweight.core.engines import Engine
from netweight.core.names import nearest_names
from netweight.core.progress import Progress
from netweight.core.records import read_record, write_record
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.directions import bootstrap_cosine, direction_of, fit_direction
from netweight.methods.space.edits import Move, edit
from netweight.methods.space.gram import inner_products, norms_of, read_blocks
from netweight.methods.space.image_reader import import_reader
from netweight.methods.space.inversion import InversionTarget, InversionTask, invert_targets
from netweight.methods.space.labels import Labels, read_labels
from netweight.methods.space.points import (
    ConditionalSampler,
    Direction,
    GaussianSampler,
    KernelSampler,
    NamedPoints,
    PairSampler,
    read_direction,
    read_points,
    scores_digest,
)
from netweight.methods.space.predict import AttributePredictions, predict
from netweight.methods.space.settings import (
    DirectionSettings,
    FolderFit,
    FolderInversion,
    FolderView,
    PredictSettings,
    RenderSettings,
    SampleSettings,
)
from netweight.methods.space.space import WeightSpace
from netweight.nn.lora import Adapter, AdapterStack
from netweight.registry import Result
from netweight.report.finding import Finding
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.reading import read_adapter
from netweight.store.lora_formats.writing import ExportResult

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.data.images.pictures import Fit
    from netweight.methods.space.view.page import View

_POINT = "a model of the space, a file of points (FILE.json, or FILE.json:NAME), an adapter's file or folder, or mean"
# The file beside an exported adapter that names its space and its point.
EXPORTED = "netweight-space.json"
_VERSION = 1


def find_direction(
    space: WeightSpace, how: DirectionSettings, progress: Progress
) -> tuple[Direction, list[Finding], int]:
    """The direction of an attribute, how well it separates held-out models, and of how many it is known."""
    columns = None if how.corrected else [how.column, *how.confounders]
    labels = read_labels(how.labels, space.names, columns=columns, key=how.name_column)
    given: Any = {"kind": how.kind, "confounders": how.confounders, "seed": how.seed}
    direction = fit_direction(space.scores, labels, how.column, fidelity=how.fidelity, folds=how.folds, **given)
    findings = list(direction.findings)
    if how.resamples:
        findings.append(bootstrap_cosine(space.scores, labels, how.column, resamples=how.resamples, **given))
    labeled = int(labels[how.column].known.sum())
    return (_corrected(space, labels, how, progress) if how.corrected else direction), findings, labeled


def _corrected(space: WeightSpace, labels: Labels, how: DirectionSettings, progress: Progress) -> Direction:
    """A direction that images correct for a point, by all attributes that are both read and labeled."""
    from netweight.hf.load_pipeline import load_text_to_image
    from netweight.methods.space.edits import corrected_steps
    from netweight.methods.space.inversion import generate_differentiably

    points, read = points_of(space, how.at).scores, import_reader(str(how.reader))
    model = load_text_to_image(str(how.pipeline), dtype=torch.float32, device=how.device)
    generate = partial(
        generate_differentiably, model, space, prompts=how.prompts, guidance=how.guidance, steps=how.steps
    )
    names = [name for name in read(generate(points[:1], [0]).flatten(0, 1)) if name in labels.columns]
    levels = [labels[name].levels for name in names]
    fitted = [
        fit_direction(space.scores, labels, name, confounders=[one for one in names if one != name], folds=0)
        for name in names
    ]
    steps = corrected_steps(
        generate, lambda images: torch.stack([read(images)[name] for name in names], 1), points, fitted, how.column,
        how, ranges=[max(each) - min(each) for each in levels], deviations=space.deviations, seed=how.seed,
        progress=progress,
    )  # fmt: skip
    return direction_of(space.scores, steps.mean(0), name=how.column, kind="corrected")


def predict_files(
    bank: Path, adapters: Sequence[Path], how: PredictSettings, progress: Progress
) -> AttributePredictions:
    """Read attributes off the weights of a bank's adapters and of others; see `predict`."""
    opened = AdapterBank.open(bank)
    labels = read_labels(how.labels, opened.names, columns=how.columns, key=how.name_column)
    others = {path.stem: read_adapter(path) for path in adapters}
    return predict(opened, labels, how.columns, others, folds=how.folds, seed=how.seed, progress=progress)


def fit_folder(
    bank: Path, settings: FolderFit, progress: Progress, *, work: Path | None, engine: Engine | None = None
) -> WeightSpace:
    """Fit a bank."""
    how = {name: value for name, value in settings if name not in ("standalone", "work", "processes")}
    return WeightSpace.fit(AdapterBank.open(bank), folder=work, engine=engine, progress=progress, **how)


def points_of(space: WeightSpace, text: str) -> NamedPoints:
    """The points that a text names: a model of the space, a file of points, an adapter, or the mean."""
    identity = scores_digest(space.scores)
    if text in space.names:
        row = list(space.names).index(text)
        made = space.basis.combinations
        if made is not None and row < len(made.bank):
            # Of some modules only the shard's own digest tells, so that a damaged one stops it here, by name.
            made.bank.stack(row, row + 1, sorted(space.shapes)[:1])
        return NamedPoints((text,), space.scores[row : row + 1].float().cpu(), identity)
    if text == "mean":
        return NamedPoints((text,), space.scores.new_zeros(1, space.components).float().cpu(), identity)
    file, _, name = text.rpartition(".json:")
    path = Path(f"{file}.json") if file else Path(text)
    if path.suffix == ".json" and path.is_file():
        points = read_points(path)
        points.check(space.scores)
        return points.only(name) if file else points
    if path.exists():
        scores = space.project(read_adapter(path))
        return NamedPoints((path.stem,), scores[None].float().cpu(), identity, {"projected": str(path)})
    if path.suffix == ".json":
        raise UsageError(f"There is no file {path}.", cure="Give a file of points: FILE.json, or FILE.json:NAME.")
    near = ", ".join(map(repr, nearest_names(text, space.names)))
    raise NameNotFound(f"{text!r} is not a point: give {_POINT}.", cure=f"The nearest models are {near}.")


def places_of(points: NamedPoints) -> list[str]:
    """Folders of adapters by points: their names, with numbers where these cannot be names of folders."""
    places = []
    for number, name in enumerate(points.names):
        if name != Path(name).name or name in (".", ".."):
            name = f"point-{number}"
            while name in points.names:  # another point's own
                name += "-"
        places.append(name)
    return places


@final
@dataclass(frozen=True)
class Similar:
    """Similarity of a bank's adapter to a given one."""

    name: str
    """Name of the adapter in the bank."""
    cosine: float
    """Cosine of the two changes, from -1 to 1."""
    shared_cosine: float
    """Cosine of the two changes in the modules that both adapters have."""
    shared: float
    """Share of the given adapter's squared norm in these modules, from 0 to 1."""


def find_similar(file: Path, bank: Path, count: int, progress: Progress) -> list[Similar]:
    """The adapters of a bank that are nearest to one in a file, by the cosine in the modules that both change.

    Args:
        file: A file or folder of an adapter.
        bank: The bank's folder.
        count: How many.
        progress: Where to show it.

    Raises:
        UsageError: No module is the same.
    """
    opened, adapter = AdapterBank.open(bank), read_adapter(file)
    shapes = opened.shapes
    shared = {name: change for name, change in adapter.factors.items() if shapes.get(name) == change.shape}
    if not shared:
        raise UsageError(
            f"{file} does not change any module in the same shape as the adapters of {bank}.", cure="Name another bank."
        )
    whole, similar = adapter.norm(), []
    for start, stack in read_blocks(opened, len(opened), description="Adapters", progress=progress):
        part = stack.only(shared)
        squares, alike = norms_of(stack), norms_of(part)
        # Of the file, the modules that each has: a lacking one has rank 0.
        products = {name: change.inner(change) for name, change in shared.items()}
        own = sum(products[name] * (stack.ranks[name] > 0) for name in shared)
        inner = inner_products(part, AdapterStack.of([Adapter(shared)]))[:, 0]
        rows = zip(inner.tolist(), squares.tolist(), alike.tolist(), torch.as_tensor(own).tolist(), strict=True)
        for number, (product, square, like, mine) in enumerate(rows):
            similar.append(
                Similar(
                    opened.names[start + number], product / max(math.sqrt(square) * whole, 1e-300),
                    product / max(math.sqrt(like * mine), 1e-300), mine / max(whole**2, 1e-300),
                )
            )  # fmt: skip
    return sorted(similar, key=lambda each: -each.shared_cosine)[:count]


def draw(space: WeightSpace, how: SampleSettings) -> NamedPoints:
    """Draw points of a space."""
    names = tuple(f"sample-{how.seed}-{number}" for number in range(how.count))
    origin = {"sampler": how.sampler, "seed": how.seed, "given": dict(how.attributes)}
    if how.labels is not None:
        labels = read_labels(how.labels, space.names, key=how.name_column)
        fitted = ConditionalSampler.fit(space.scores, labels, bandwidth=how.bandwidth, emphasis=how.emphasis)
        scores = fitted.draw(how.count, seed=how.seed, given=dict(how.attributes))
    else:
        kind: Any = {"pairs": PairSampler, "gaussian": GaussianSampler, "kernel": KernelSampler}[how.sampler]
        given = {"bandwidth": how.bandwidth} if kind is KernelSampler else {"factor": how.factor}
        given |= {"neighbors": how.neighbors} if kind is PairSampler else {}
        sampler = kind.fit(space.scores, **{name: value for name, value in given.items() if value is not None})
        scores = sampler.draw(how.count, seed=how.seed)
    return NamedPoints(names, scores, scores_digest(space.scores), origin)


def moved(before: NamedPoints, steps: Sequence[Move], origin: Any) -> NamedPoints:
    """Points after moves, which their origin names."""
    moves = [{"direction": step.direction.name, "strength": step.strength, "unit": step.unit} for step in steps]
    return NamedPoints(before.names, edit(before.scores, steps), before.space, {"from": origin, "moves": moves})


def invert_files(
    images: Sequence[Path], how: FolderInversion, space: Callable[[], WeightSpace], *, out: Path, progress: Progress
) -> NamedPoints:
    """Find the points of images, for `out`: a file each, or a folder with images of the same thing."""
    from netweight.hf.load_pipeline import load_text_to_image, trained_prediction

    files = [_target_files(path, how.masks) for path in images]
    opened = space()
    model = load_text_to_image(how.pipeline, device=how.device, size=how.pixels)
    remarks: list[str] = []
    targets = [
        _target(path, each, model.image_size, how.fit, remarks) for path, each in zip(images, files, strict=True)
    ]
    task = InversionTask(
        how.prompt, how.descent, trained_prediction(model), draws=how.draws, schedule=how.schedule,
        together=how.together, seed=how.seed,
    )  # fmt: skip
    points = invert_targets(model, opened, targets, task, folder=out.parent, name=out.stem, progress=progress)
    return replace(points, origin={**points.origin, "remarks": list(dict.fromkeys(remarks))})


def plan_inversion(images: Sequence[Path], how: FolderInversion) -> Result:
    """Plan an inversion: time and memory, measured on one of each kind of work, before anything is done."""
    from netweight.hf.load_pipeline import load_text_to_image
    from netweight.hf.pipeline_costs import PlannedDescent, Stage, measured_plan

    pictures = [len(_target_files(path, how.masks)[0]) for path in images]
    model = load_text_to_image(how.pipeline, device=how.device, size=how.pixels)
    rows = how.draws * sum(sorted(pictures)[-how.together :])
    stage = Stage("descent", gradients=how.descent.steps * how.draws * sum(pictures), encoded=2 * sum(pictures))
    # Changes of weights are at work on the way back as well, so that all of a pass is kept.
    return measured_plan(model, [stage], rows=rows, descent=PlannedDescent(rows, recomputed=False)).result()


def _target_files(path: Path, masks: Path | None) -> tuple[list[Path], list[Path]]:
    """The pictures of a target, a file or those of a folder, and their masks, if masks are given."""
    from netweight.data.images.pictures import picture_files

    files = [path] if path.is_file() else picture_files(path, below=False)[0]
    if not files:
        raise UsageError(f"{path} contains no picture.", cure="Give a picture, or a folder of pictures.")
    if masks is None:
        return files, []
    by_stem = {each.stem: each for each in picture_files(masks, below=False)[0]}
    missing = [file.name for file in files if file.stem not in by_stem]
    if missing:
        raise UsageError(f"{masks} contains no mask for {missing[0]}.", cure="Name masks as the images are named.")
    return files, [by_stem[file.stem] for file in files]


def _target(
    path: Path, files: tuple[list[Path], list[Path]], size: tuple[int, int], fit: Fit, remarks: list[str]
) -> InversionTarget:
    """A target's images, in color, within 0 and 1; what their reader decided is added to `remarks`."""
    pictures, masks = files
    images = _images(pictures, 3, size, fit, remarks)
    mask = _images(masks, 1, size, fit, remarks)[:, 0] if masks else None
    return InversionTarget(path.stem, images, mask)


def _images(files: list[Path], channels: int, size: tuple[int, int], fit: Fit, remarks: list[str]) -> Tensor:
    """Images as `(m, channels, height, width)`, within 0 and 1."""
    from netweight.data.images.pictures import decode_pictures

    decoded = decode_pictures([[(file.name, file) for file in files]], of=str(files[0].parent), size=size, fit=fit)
    remarks += decoded.remarks
    values = decoded.splits[0].float() / 255
    return values.mean(1, keepdim=True) if channels == 1 else values.expand(-1, 3, -1, -1)


def view_folder(
    folder: Path, space: WeightSpace, settings: FolderView, *, command: str | None, progress: Progress
) -> View:
    """The page about a space, with images of its pipeline."""
    from netweight.hf.load_pipeline import load_text_to_image
    from netweight.methods.space.view.build import build_view

    if settings.pipeline is None or "prompts" not in settings.given or (settings.attributes and not settings.labels):
        options = {"--pipeline": settings.pipeline, "--prompt": settings.given.get("prompts")}
        needed = next((name for name, value in options.items() if not value), "--labels, for --attribute")
        raise UsageError(f"{needed} is missing.", cure="The page of a space needs the pipeline of its base model.")
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
        raise UsageError(f"--start {settings.start} contains {len(start.names)} points.", cure="Name one of them.")
    return build_view(
        load_text_to_image(settings.pipeline, device=settings.device), space, settings=rendering,
        title=f"{folder.name}: {len(space.names)} models as one space", directions=directions,
        labels=labels, command=command, progress=progress,
        start=("the mean of the adapters" if settings.start == "mean" else settings.start, start.scores[0]),
    )  # fmt: skip


def export_record(space: WeightSpace, point: str, exported: ExportResult) -> ExportRecord:
    """The record of a point of a space that was exported."""
    return ExportRecord(
        point, scores_digest(space.scores), space.fitted, space.components, exported.ranks, exported.relative_error,
        exported.layout,
    )  # fmt: skip


@final
@dataclass(frozen=True)
class ExportRecord:
    """Record of an adapter's export."""

    point: str
    """Name of the point."""
    space: str
    """Digest of the space's scores."""
    adapters: int
    """Number of adapters that the space was fitted to."""
    components: int
    """Number of the space's components."""
    ranks: tuple[int, int]
    """The least and the greatest rank of a module."""
    relative_error: float
    """Relative error that the rank causes."""
    layout: str
    """Naming of the tensors in LoRA files."""

    def write(self, folder: str | Path) -> None:
        """Write the record into the adapter's folder, over one that is there."""
        write_record(Path(folder) / EXPORTED, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the record of an adapter's folder."""

        def made(values: dict[str, Any]) -> Self:
            low, high = values.pop("ranks")
            return cls(ranks=(low, high), **values)

        return read_record(Path(folder) / EXPORTED, made, version=_VERSION, of="an exported adapter")
