"""New points by any of the samplers, from plain settings. Commands and recipes draw with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, final

from pydantic import Field

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.directions import read_labels, scores_digest
from netweight.methods.space.export import Exported
from netweight.methods.space.points import Points, read_points
from netweight.methods.space.sampling import ConditionalSampler, GaussianSampler, KernelSampler, MixtureSampler
from netweight.methods.space.space import WeightSpace
from netweight.store.checkpoint import read_record, write_record
from netweight.store.lora_formats.files import read_adapter


@final
@dataclass(frozen=True)
class Drawing:
    """How points are drawn.

    Attributes:
        count: How many.
        sampler: "gaussian" per component, "kernel" around models, "mixture" of clusters, or "conditional" on labels.
        factor: Of the gaussian's standard deviations.
        bandwidth: Of the kernel, and of conditional's rest; None for the likeliest.
        clusters: Of the mixture; None for as many as held-out models ask for.
        labels: Attributes of models, for conditional; a file of `read_labels`.
        name_column: The column that names the model.
        emphasis: Of attributes, for conditional.
        given: Attributes that all points have, for conditional.
        seed: Of the draw.

    Raises:
        UsageError: Labels or given attributes do not go with the sampler.
    """

    count: Annotated[int, Field(ge=1)] = 1
    sampler: Literal["gaussian", "kernel", "mixture", "conditional"] = "gaussian"
    factor: Annotated[float, Field(gt=0)] = 1.0
    bandwidth: Annotated[float, Field(ge=0, le=1)] | None = None
    clusters: Annotated[int, Field(ge=1)] | None = None
    labels: Path | None = None
    name_column: str = "name"
    emphasis: Annotated[float, Field(gt=0)] = 1.0
    given: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        if self.sampler != "conditional" and (self.labels is not None or self.given):
            raise UsageError(
                f"Labels and given attributes belong to the conditional sampler, not to {self.sampler}.",
                cure="Name the sampler conditional and labels together.",
            )
        if self.sampler == "conditional" and self.labels is None:
            raise UsageError(
                "The conditional sampler needs labels.", cure="Name the sampler conditional and labels together."
            )


def draw(space: WeightSpace, how: Drawing) -> Points:
    """Draw points of a space.

    Args:
        space: The space.
        how: How.

    Returns:
        Points named `sample-SEED-NUMBER`, with the way that they were drawn.

    Raises:
        NameNotFound: A given attribute is no label, or labels name a model that the space lacks.
        UsageError: The labels cannot be used, or the models are too few for the sampler.
    """
    names = tuple(f"sample-{how.seed}-{number}" for number in range(how.count))
    origin = {"sampler": how.sampler, "seed": how.seed, "given": dict(how.given)}
    if how.labels is not None:
        labels = read_labels(how.labels, space.names, key=how.name_column)
        fitted = ConditionalSampler.fit(space.scores, labels, bandwidth=how.bandwidth, emphasis=how.emphasis)
        scores = fitted.draw(how.count, seed=how.seed, given=dict(how.given))
    elif how.sampler == "kernel":
        scores = KernelSampler.fit(space.scores, bandwidth=how.bandwidth).draw(how.count, seed=how.seed)
    elif how.sampler == "mixture":
        mixture = MixtureSampler.fit(space.scores, clusters=how.clusters, seed=how.seed)
        scores = mixture.draw(how.count, seed=how.seed)
    else:
        scores = GaussianSampler.fit(space.scores, factor=how.factor).draw(how.count, seed=how.seed)
    return Points(names, scores, scores_digest(space.scores), origin)


_POINT = "a model of the space, a file of points (FILE.json, or FILE.json:NAME), an adapter's file or folder, or mean"


def points_of(space: WeightSpace, text: str) -> Points:
    """Return the points that a text names: a model of the space, a file of points, an adapter, or the mean.

    Args:
        space: The space.
        text: The name of one of its models, "mean", FILE.json or FILE.json:NAME, or the path of an adapter, which is
            projected into the space.

    Raises:
        NameNotFound: It is none of these; the nearest models are named.
        UsageError: The points are of another space.
    """
    identity = scores_digest(space.scores)
    if text in space.names:
        row = list(space.names).index(text)
        return Points((text,), space.scores[row : row + 1].float().cpu(), identity)
    if text == "mean":
        return Points((text,), space.scores.new_zeros(1, space.scores.shape[1]).float().cpu(), identity)
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


EXPORTED = "netweight-space.json"
_VERSION = 1


@final
@dataclass(frozen=True)
class ExportRecord:
    """How an adapter was exported.

    Attributes:
        point: What the point is called.
        space: Digest of the space's scores.
        adapters: How many adapters the space was fitted to.
        components: Of the space.
        ranks: The least and the greatest rank of a module.
        relative_error: Of what the rank left out.
        layout: Whose files.
    """

    point: str
    space: str
    adapters: int
    components: int
    ranks: tuple[int, int]
    relative_error: float
    layout: str

    def write(self, folder: str | Path) -> None:
        """Write the record into the adapter's folder, over one that is there.

        Args:
            folder: The adapter's folder.

        Raises:
            OutputFailed: The place cannot be written.
        """
        write_record(Path(folder) / EXPORTED, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the record of an adapter's folder.

        Args:
            folder: The adapter's folder.

        Raises:
            CorruptBlob: The file holds none of this version.
            OSError: It cannot be read.
        """

        def made(values: dict[str, Any]) -> Self:
            low, high = values.pop("ranks")
            return cls(ranks=(low, high), **values)

        return read_record(Path(folder) / EXPORTED, made, version=_VERSION, of="an exported adapter")


def recorded(space: WeightSpace, point: str, exported: Exported, layout: str) -> ExportRecord:
    """Return the record of a point of a space that was exported.

    Args:
        space: The space.
        point: What the point is called.
        exported: What was written.
        layout: Whose files.
    """
    return ExportRecord(
        point,
        scores_digest(space.scores),
        space.fitted,
        space.components,
        exported.ranks,
        exported.relative_error,
        layout,
    )
