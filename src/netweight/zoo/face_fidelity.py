"""Whom an adapted faces pipeline draws: pictures of many adapters at once, and how near they are to those meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from netweight.generate.adapter import Adapter
from netweight.generate.lowrank import applied
from netweight.generate.stack import AdapterStack
from netweight.zoo.drawn_faces import FACES
from netweight.zoo.drawn_world import DrawnWorld
from netweight.zoo.face_reading import r_squared, read

if TYPE_CHECKING:
    from netweight.integrations.diffusion_pipeline import PipelineModel

__all__ = ["faces_drawn", "identity_fidelity"]


@torch.no_grad()
def faces_drawn(
    model: PipelineModel,
    changes: AdapterStack | Adapter | Mapping[str, Tensor],
    *,
    samples: int = 8,
    steps: int = 15,
    world: DrawnWorld = FACES,
) -> Tensor:
    """Draw pictures with each of several adapters, all at once: every ground in turn, the same noise for all.

    Args:
        model: The faces pipeline.
        changes: As `applied` takes them.
        samples: Pictures for each.
        steps: Of the scheduler.
        world: What the pipeline draws.

    Returns:
        Shape `(n, samples, 3, 16, 16)`, within 0 and 1, on the CPU; n is 1 for a single adapter or change.
    """
    count = _count(changes)
    words = list(world.grounds)
    captions = [world.caption(words[number % len(words)]) for number in range(samples)]
    groups = torch.arange(count, device=model.device).repeat_interleave(samples)
    single = isinstance(changes, Adapter) or (isinstance(changes, Mapping) and _dims(changes) == 2)
    with applied(model.denoiser, changes, None if single else groups, component=model.component):
        text = model.embed(captions).rows(list(range(samples)) * count)
        pictures = model.generate(text, list(range(samples)) * count, guidance=1.0, steps=steps)
    return pictures.view(count, samples, *pictures.shape[1:])


def identity_fidelity(
    model: PipelineModel,
    stack: AdapterStack,
    people: Tensor,
    *,
    samples: int = 8,
    steps: int = 15,
    world: DrawnWorld = FACES,
) -> dict[str, Any]:
    """Measure how far adapters draw the people whom they were trained on.

    Args:
        model: The faces pipeline.
        stack: n adapters.
        people: The attributes meant, shape `(n, attributes)`.
        samples: Pictures for each.
        steps: Of the scheduler.
        world: What the pipeline draws.

    Returns:
        Under "r_squared" that of the mean read attributes against the people's; "strong" and "mean" of these; "within"
        and "nuisances", standard deviations between pictures of one adapter; "ground", the share that prompts name.
    """
    pictures = faces_drawn(model, stack, samples=samples, steps=steps, world=world)
    found = read(pictures.flatten(0, 1), world=world)
    attributes = found.attributes.view(*pictures.shape[:2], -1)
    explained = dict(zip(world.attributes, r_squared(people, attributes.mean(1)).tolist(), strict=True))
    moved = found.nuisances.view(*pictures.shape[:2], -1).std(1).mean(0).tolist()
    grounds = found.ground.view(*pictures.shape[:2]) == torch.arange(samples) % len(world.grounds)
    return {
        "n": len(people),
        "samples": samples,
        "r_squared": {name: round(value, 4) for name, value in explained.items()},
        "strong": round(sum(explained[name] for name in world.strong) / len(world.strong), 4),
        "mean": round(sum(explained.values()) / len(explained), 4),
        "within": round(float(attributes.std(1).mean()), 4),
        "nuisances": {name: round(value, 4) for name, value in zip(world.nuisances, moved, strict=True)},
        "ground": float(grounds.double().mean()),
    }


def _dims(changes: Mapping[str, Tensor]) -> int:
    return next(iter(changes.values())).ndim


def _count(changes: AdapterStack | Adapter | Mapping[str, Tensor]) -> int:
    if isinstance(changes, AdapterStack):
        return len(changes)
    return 1 if isinstance(changes, Adapter) or _dims(changes) == 2 else len(next(iter(changes.values())))
