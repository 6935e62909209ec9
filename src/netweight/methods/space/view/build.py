"""The view of a space: images of points along directions and components, of the adapters on a map, and of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, final

import numpy as np
import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress, Task
from netweight.errors import UsageError
from netweight.methods.space.inversion import generate_images
from netweight.methods.space.labels import Labels
from netweight.methods.space.points import Direction, scores_digest
from netweight.methods.space.sampling import PairSampler, Sampler
from netweight.methods.space.settings import RenderSettings
from netweight.methods.space.space import WeightSpace
from netweight.methods.space.view.content import AdapterMap, NearestAdapters, Samples, SliderSpace, Traversal, View
from netweight.methods.space.view.live import Reader, live_pipeline
from netweight.nn.text_to_image import TextToImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AXES = 4  # components that can be put on the map's axes


@final
@dataclass(frozen=True, eq=False)
class _Step:
    """What one standard deviation along a slider adds to scores, and what the slider is called."""

    name: str
    kind: Literal["direction", "component"]
    vector: Tensor
    note: str


def build_view(
    model: TextToImage,
    space: WeightSpace,
    *,
    title: str,
    directions: Sequence[Direction] = (),
    labels: Labels | None = None,
    start: tuple[str, Tensor] | None = None,
    sampler: Sampler | None = None,
    reader: Reader | None = None,
    settings: RenderSettings | None = None,
    summary: str = "",
    facts: Mapping[str, str] | None = None,
    command: str | None = None,
    progress: Progress = QUIET,
) -> View:
    """Generate the images of a page."""
    # `start`: name and scores, shape `(k,)`, of the point that sliders begin at; None for the mean of the adapters
    settings = settings or RenderSettings()
    steps = _steps(space, directions, min(settings.components, space.components))
    if not steps:
        raise UsageError("There is no slider to show.", cure="Give a direction, or ask for components.")
    if labels is not None and tuple(labels.names) != tuple(space.names):
        raise UsageError("The labels are of other adapters than the space.", cure="Read them with space.names.")
    name, center = start or ("the mean of the adapters", torch.zeros(space.components))
    if center.shape != (space.components,) or not center.isfinite().all():
        raise UsageError(f"{name} is no point of a space of {space.components} components.", cure="Choose another.")
    shown = _thinned(len(space.names), settings.adapters)
    sampler = sampler or PairSampler.fit(space.scores)
    drawn = sampler.draw(settings.samples, seed=settings.seed) if settings.samples else space.scores[:0]
    live = live_pipeline(model, space, settings, shown, reader)
    painted = isinstance(live, str)
    walks = [torch.stack([center + strength * step.vector for strength in settings.strengths]) for step in steps]
    total = sum(map(len, (*walks * painted, drawn))) * len(settings.seeds) + len(shown)
    with progress.task("Generating", total, unit="images") as task:
        images = partial(_images, model, space, settings, task)
        traversals = [
            Traversal(step.name, step.kind, settings.strengths, images(points) if painted else None, step.note)
            for step, points in zip(steps, walks, strict=True)
        ]
        samples = _samples_of(space, shown, drawn, images(drawn), settings.neighbors, sampler) if len(drawn) else None
        faces = images(space.scores[shown], seeds=1)[:, 0]
    return View(
        title=title,
        traversals=traversals,
        points=_map_of(space, shown, faces, labels, settings.neighbors),
        samples=samples,
        summary=summary,
        reader="" if reader is None or painted else reader.name,
        facts={**_facts(model, space, name, settings), **(facts or {})},
        command=command,
        sliders=SliderSpace(
            scores_digest(space.scores), center.tolist(), {step.name: step.vector.tolist() for step in steps}
        ),
        painted=live if isinstance(live, str) else "",
        live=None if isinstance(live, str) else live,
    )


def _steps(space: WeightSpace, directions: Sequence[Direction], components: int) -> list[_Step]:
    found = []
    for direction in directions:
        direction.check(space.scores)
        said = "; ".join(
            f"{finding.name.removesuffix(f' of {direction.name}')} {finding.value:.2f}"
            + (f", n = {finding.n}" if finding.n else "")
            for finding in direction.findings
            if isinstance(finding.value, float)
        )
        found.append(_Step(direction.name, "direction", direction.step(1.0).float(), said))
    variances = space.deviations.double().square()
    for number in range(components):
        vector = torch.zeros(space.components)
        vector[number] = space.deviations[number]
        share = 100 * float(variances[number] / variances.sum())
        found.append(
            _Step(f"component {number + 1}", "component", vector, f"{share:.1f} % of the variance in the space")
        )
    return found


def _images(
    model: TextToImage,
    space: WeightSpace,
    settings: RenderSettings,
    task: Task,
    points: Tensor,
    seeds: int | None = None,
) -> NDArray[np.uint8]:
    """Images of points, shape `(points, seeds, height, width, 3)`; `seeds` limits the number of noises."""
    chosen, found = settings.seeds[:seeds], []
    prompts = settings.prompts[:seeds] if len(settings.prompts) > 1 else settings.prompts
    device = next(model.denoiser.parameters()).device
    for part in torch.split(points, max(1, settings.rows // len(chosen))):
        images = generate_images(
            model, space, part.to(device), prompts, chosen, guidance=settings.guidance, steps=settings.steps,
            rows=settings.rows,
        )  # fmt: skip
        found.append((images * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy())
        task.update(len(part) * len(chosen))
    return np.concatenate(found)


def _facts(model: TextToImage, space: WeightSpace, start: str, settings: RenderSettings) -> dict[str, str]:
    return {
        "model": f"{model.name}, {model.digest()}",
        "adapters": f"{len(space.names)}, digest {space.bank_digest}",
        "space": f"{space.components} components",
        "sliders begin at": start,
        "prompts": "; ".join(repr(prompt) for prompt in settings.prompts),
        "seeds of the noises": ", ".join(map(str, settings.seeds)),
        "sampling": f"{settings.steps} steps, guidance {settings.guidance:g}",
    }


def _thinned(n: int, most: int) -> list[int]:
    """At most `most` of n models, evenly chosen."""
    # `most`: how many to show, at least 1
    if most < 1:
        raise UsageError("A map of no adapter cannot be drawn.", cure="Show at least one.")
    found: list[int] = torch.linspace(0, n - 1, min(n, most)).round().long().tolist()
    return found


def _map_of(
    space: WeightSpace, shown: Sequence[int], faces: NDArray[np.uint8], labels: Labels | None, neighbors: int
) -> AdapterMap:
    """Put models on a map of the first components."""
    # `faces`: a picture of each, shape `(shown, height, width, 3)`
    names = [space.names[number] for number in shown]
    known = {} if labels is None else {name: column.values[list(shown)] for name, column in labels.columns.items()}
    scores = space.scores[list(shown)]
    fewer = f"{len(shown)} of {len(space.names)} are shown. " if len(shown) < len(space.names) else ""
    return AdapterMap(
        names,
        _coordinates(space, scores),
        [f"component {number + 1} (σ)" for number in range(min(_AXES, space.components))],
        faces,
        {name: [None if value != value else value for value in values.tolist()] for name, values in known.items()},
        _nearest(space, scores, shown, neighbors, themselves=True),
        f"{fewer}Its picture is painted at its place in the space of {space.components} components.",
    )


def _samples_of(
    space: WeightSpace, shown: Sequence[int], drawn: Tensor, images: NDArray[np.uint8], neighbors: int, sampler: Sampler
) -> Samples:
    """Put drawn models beside the models on the map that are nearest to them."""
    # `drawn`: points, shape `(n, k)`
    # `images`: shape `(n, noises, height, width, 3)`
    note = f"A {type(sampler).__name__} drew them."
    return Samples(images, _nearest(space, drawn, shown, neighbors), _coordinates(space, drawn), note)


def _coordinates(space: WeightSpace, points: Tensor) -> NDArray[np.float64]:
    """First components in standard deviations; one in which no model differs is 0 everywhere."""
    axes = min(_AXES, space.components)
    scale = space.deviations[:axes].double().clamp_min(torch.finfo(torch.float32).tiny)
    found: NDArray[np.float64] = (points[:, :axes].double() / scale).numpy()
    return found


def _nearest(
    space: WeightSpace, points: Tensor, shown: Sequence[int], count: int, *, themselves: bool = False
) -> NearestAdapters | None:
    """Models on the map nearest to points, by the cosine of what both add to the mean of all models."""
    # Where the points are the models on the map themselves, none is its own neighbor.
    count = min(count, len(shown) - themselves)
    if count < 1:
        return None
    center = space.scores.double().mean(0)
    towards = torch.nn.functional.normalize(space.scores[list(shown)].double() - center)
    cosines = torch.nn.functional.normalize(points.double() - center) @ towards.T
    if themselves:
        cosines.fill_diagonal_(-torch.inf)
    found = cosines.topk(count)
    return NearestAdapters(found.indices.numpy(), found.values.numpy())
