"""Inversion of many targets through a text-to-image model: in batches, each remembered as soon as it is done."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from netweight.attacks.embedding_search.descent import weights_fixed
from netweight.attacks.embedding_search.settings import Said
from netweight.core import digest
from netweight.core.engines import Outcome
from netweight.core.progress import QUIET, Progress
from netweight.core.runs import map_runs
from netweight.errors import TrainingStopped, UsageError
from netweight.methods.space.denoising import DenoisingLoss
from netweight.methods.space.directions import scores_digest
from netweight.methods.space.inversion import InversionSettings, Space, invert
from netweight.methods.space.points import Points
from netweight.probe.diffusion import TextToImage

__all__ = ["InversionTask", "Target", "invert_targets"]


class _Space(Space, Protocol):
    @property
    def scores(self) -> Tensor: ...


@final
@dataclass(frozen=True, eq=False)
class Target:
    """What is to be inverted.

    Attributes:
        name: Of the target.
        images: Shape `(m, 3, height, width)`, within 0 and 1: one image, or several of the same thing.
        mask: What counts of each, shape `(m, height, width)`; None for everything.
    """

    name: str
    images: Tensor
    mask: Tensor | None = None


@final
@dataclass(frozen=True)
class InversionTask:
    """How targets are inverted.

    Attributes:
        prompt: That the images are denoised with.
        settings: Of the descent.
        said: The prediction that the error is counted in.
        draws: Timesteps and noises per image and step.
        schedule: Timesteps are drawn from a schedule of so many steps.
        together: Most targets in a batch; it changes what is drawn for each.
        seed: Of all draws.
    """

    prompt: str
    settings: InversionSettings
    said: Said = "noise"
    draws: int = 1
    schedule: int = 50
    together: int = 8
    seed: int = 0


def invert_targets(
    model: TextToImage,
    space: _Space,
    targets: Sequence[Target],
    task: InversionTask,
    *,
    ledger: str | Path,
    progress: Progress = QUIET,
) -> Points:
    """Find the points of targets.

    Args:
        model: The base model; its weights stay as they are.
        space: Fitted to adapters of this model.
        targets: Each name once. Those of the same number of images share a batch.
        task: How.
        ledger: The file to remember points in; a second call with the same arguments continues the first.
        progress: Told of every target.

    Returns:
        The points in the targets' order; `origin` holds each one's distance from the mean and its improvement.

    Raises:
        UsageError: There is no target, a name comes twice, or images do not fit the model.
        TrainingStopped: The loss of a target diverged.
    """
    names = [target.name for target in targets]
    if not targets or len(set(names)) < len(names):
        raise UsageError(f"{len(names)} targets of {len(set(names))} names.", cure="Give at least one, each once.")
    by_name = {target.name: target for target in targets}
    for target in targets:  # before any work begins
        _loss(model, [target], task)
    about = {"model": model.digest(), "space": scores_digest(space.scores), "task": asdict(task)}
    items: list[dict[str, Any]] = [{"name": each.name, "images": _digest(each), **about} for each in targets]

    def alone(item: Mapping[str, Any]) -> dict[str, Any]:
        return _inverted(model, space, [by_name[item["name"]]], task, progress)[0]

    def engine(_: Callable[..., Any], waiting: Sequence[Any], /) -> Iterator[tuple[int, Outcome]]:
        for places in _batches([by_name[item["name"]] for item in waiting], task.together):
            began = time.perf_counter()
            values: list[Any] = [None] * len(places)
            error = None
            try:
                values = _inverted(model, space, [by_name[waiting[place]["name"]] for place in places], task, progress)
            except Exception:
                error = traceback.format_exc()
            seconds = (time.perf_counter() - began) / len(places)
            for place, value in zip(places, values, strict=True):
                yield place, Outcome(value, error, seconds)

    found = []
    for result in map_runs(alone, items, ledger=ledger, engine=engine, ordered=True):
        if not result.ok:
            reason = (result.error or "").strip().splitlines()[-1]
            raise TrainingStopped(
                f"{result.config['name']!r} could not be inverted: {reason}",
                cure=f"Points found before are kept in {ledger}.",
            )
        found.append(result.value)
    origin = {
        "distances": {name: value["distance"] for name, value in zip(names, found, strict=True)},
        "improvements": {name: value["improvement"] for name, value in zip(names, found, strict=True)},
        "task": asdict(task),
    }
    scores = torch.tensor([value["scores"] for value in found], dtype=torch.float32)
    return Points(tuple(names), scores, scores_digest(space.scores), origin)


def _inverted(
    model: TextToImage, space: Space, targets: Sequence[Target], task: InversionTask, progress: Progress
) -> list[dict[str, Any]]:
    loss = _loss(model, targets, task)
    device = next(model.denoiser.parameters()).device
    with weights_fixed(model.denoiser):
        found = invert(space, loss, len(targets), task.settings, seed=task.seed, device=device, progress=progress)
    return [
        {"scores": scores, "distance": distance, "improvement": improvement}
        for scores, distance, improvement in zip(
            found.scores.tolist(), found.distances.tolist(), found.improvements.tolist(), strict=True
        )
    ]


def _loss(model: TextToImage, targets: Sequence[Target], task: InversionTask) -> DenoisingLoss:
    masks = None
    if any(target.mask is not None for target in targets):
        sides = targets[0].images.shape
        masks = torch.stack([torch.ones(sides[0], *sides[2:]) if t.mask is None else t.mask.float() for t in targets])
    try:
        images = torch.stack([target.images for target in targets])
        return DenoisingLoss(
            model, images, [task.prompt], masks=masks, draws=task.draws, steps=task.schedule, said=task.said
        )  # fmt: skip
    except UsageError as error:
        names = ", ".join(repr(target.name) for target in targets)
        raise UsageError(f"{names} cannot be inverted: {error.reason}", cure=error.cure) from error


def _batches(targets: Sequence[Target], most: int) -> Iterator[list[int]]:
    """Numbers of targets that have images alike in number and size, at most so many at a time."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, target in enumerate(targets):
        alike.setdefault(tuple(target.images.shape), []).append(place)
    for places in alike.values():
        for start in range(0, len(places), most):
            yield places[start : start + most]


def _digest(target: Target) -> Mapping[str, Any]:
    mask = None if target.mask is None else digest.of_tensor(target.mask)
    return {"shape": list(target.images.shape), "images": digest.of_tensor(target.images), "mask": mask}
