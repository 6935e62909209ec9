"""New points by any of the samplers, from plain settings. Commands and recipes draw with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, final

from pydantic import Field

from netweight.errors import UsageError
from netweight.methods.space.directions import scores_digest
from netweight.methods.space.labels import read_labels
from netweight.methods.space.method import WeightSpace
from netweight.methods.space.mixture import MixtureSampler
from netweight.methods.space.points import Points
from netweight.methods.space.sampling import ConditionalSampler, GaussianSampler, KernelSampler

__all__ = ["Drawing", "draw"]


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
