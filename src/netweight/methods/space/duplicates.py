"""Adapters of a folder that change what another one does: copies, in another naming, layout, rank or strength."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from netweight.core.progress import Progress
from netweight.errors import NetweightError
from netweight.methods.space.basis import Sketch
from netweight.nn.lora import Adapter
from netweight.store.bank.bank import find_adapters
from netweight.store.bank.shards import stacked
from netweight.store.lora_formats.parts import AdapterPlan
from netweight.store.lora_formats.reading import load_plan, plan_adapter


@final
@dataclass(frozen=True)
class Duplicate:
    """An adapter that another one of a folder makes needless."""

    name: str
    """Name of the adapter."""
    of: str
    """The one that came first."""
    cosine: float
    """Cosine of the two changes; 1 for the same."""
    ranks: tuple[int, int]
    """The highest rank of each."""


# Cosines of sketches may be this much below the exact ones: about four standard deviations for sixty modules.
_MARGIN = 0.25
# Side length of the sketches.
_SIDE = 16


def find_duplicates(folder: Path, least: float, progress: Progress) -> tuple[list[Duplicate], dict[str, str]]:
    """Adapters below a folder that change nearly what another does, in any layout and rank; and why some are left out.

    Pairs are sought among sketches of the changes, and decided by the changes' own cosine. Nothing is removed.

    Args:
        folder: Where the adapters are.
        least: The least cosine of a duplicate, at most 1.
        progress: Where to show it.

    Raises:
        UsageError: There is no such folder.
    """
    paths, errors = find_adapters(folder)
    bad = {name: str(error) for name, error in errors.items()}
    plans: dict[str, AdapterPlan] = {}
    for name, path in progress.track(paths.items(), "Checking adapters", len(paths), unit="adapters"):
        try:
            plans[name] = plan_adapter(path)
        except NetweightError as error:
            bad[name] = str(error)
    shapes = {_of_shape(key, shape): shape for plan in plans.values() for key, shape in plan.shapes.items()}
    sketch, rows, names = Sketch(shapes, _SIDE, 0), [], []
    for name, plan in progress.track(plans.items(), "Reading adapters", len(plans), unit="adapters"):
        try:
            factors = {_of_shape(key, change.shape): change for key, change in load_plan(plan).factors.items()}
        except NetweightError as error:
            bad[name] = str(error)
            continue
        row = sketch.rows(stacked(Adapter(factors), shapes))[0]
        rows.append(row / row.norm().clamp_min(1e-30))
        names.append(name)
    duplicates: dict[str, Duplicate] = {}
    matrix = torch.stack(rows) if rows else torch.empty(0, 1)
    for later in range(1, len(rows)):
        near = matrix[:later] @ matrix[later]
        for earlier in near.argsort(descending=True).tolist():
            if near[earlier] < least - _MARGIN:
                break
            cosine = _cosine(*(load_plan(plans[names[number]]) for number in (later, earlier)))
            if cosine >= least and names[earlier] not in duplicates:
                ranks = tuple(max(part.rank for part in plans[names[n]].parts.values()) for n in (later, earlier))
                duplicates[names[later]] = Duplicate(names[later], names[earlier], cosine, (ranks[0], ranks[1]))
                break
    return list(duplicates.values()), bad


def _of_shape(name: str, shape: tuple[int, int]) -> str:
    """A module's name that models of other widths do not share."""
    return f"{name} {shape[0]}x{shape[1]}"


def _cosine(one: Adapter, other: Adapter) -> float:
    """The cosine of two changes, vectors included; what only one has counts as unchanged by the other."""
    shared = [(change, other.factors[name]) for name, change in one.factors.items() if name in other.factors]
    product = sum(left.inner(right) for left, right in shared if left.shape == right.shape)
    for name, change in one.vectors.items():
        if name in other.vectors and other.vectors[name].numel() == change.numel():
            product += float(change.double().flatten() @ other.vectors[name].double().flatten())
    return product / max(_norm(one) * _norm(other), 1e-300)


def _norm(adapter: Adapter) -> float:
    vectors = sum(float(change.double().square().sum()) for change in adapter.vectors.values())
    return math.sqrt(adapter.norm() ** 2 + vectors)
