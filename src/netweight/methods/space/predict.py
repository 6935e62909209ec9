"""Attributes of adapters from their weights alone: by a network that no basis of the factors changes, and linearly.

The network sees a module's change ΔW only as Lᵀ ΔW R and by its size, with L and R learned, so that B G⁻¹ · G A reads
as B A does, and adapters of any ranks are read by one network.
"""

# Source: networks on low-rank factors that are invariant under GL(r), arXiv 2410.04207, with one bilinear layer.
# Changes of more than `_SIDE` rows or columns are brought to these by random maps first.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive
from netweight.errors import UsageError
from netweight.methods.space.basis import Sketch
from netweight.methods.space.directions import Design, folds_of, held_out_score, logistic, ridge
from netweight.methods.space.gram import Bank, read_blocks
from netweight.methods.space.labels import Labels
from netweight.nn.lora import Adapter
from netweight.report.finding import Finding
from netweight.store.bank.shards import stacked

READERS = ("gauge-free network", "linear probe")
_SIDE, _WIDTH, _HIDDEN = 16, 4, 64
_STEPS, _BATCH, _RATE, _DECAY, _NOISE = 300, 128, 3e-3, 0.3, 0.3
# The prediction is the mean of so many networks.
_NETWORKS = 3


@final
class _WeightNetwork(nn.Module):
    """Reads changes `(n, modules, side, side)` as attributes, shape `(n, outputs)`."""

    def __init__(self, modules: int, outputs: int) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(modules, _SIDE, _WIDTH) / _SIDE**0.5) for _ in range(2))
        features = modules * (_WIDTH**2 + 1)
        self.head = nn.Sequential(
            nn.BatchNorm1d(features), nn.Dropout(_NOISE), nn.Linear(features, _HIDDEN), nn.GELU(),
            nn.Dropout(_NOISE), nn.Linear(_HIDDEN, outputs),
        )  # fmt: skip

    def forward(self, changes: Tensor) -> Tensor:
        """Read changes."""
        features = torch.einsum("mak,nmab,mbl->nmkl", self.left, changes, self.right)
        sizes = changes.flatten(2).norm(dim=2, keepdim=True).log1p()
        outputs: Tensor = self.head(torch.cat([features.flatten(2), sizes], 2).flatten(1))
        return outputs


@final
@dataclass(frozen=True)
class AttributePredictions:
    """Attributes as they are read off weights."""

    findings: tuple[Finding, ...]
    """Held-out scores of each attribute and reader."""
    values: Mapping[str, Mapping[str, float]]
    """Adapter → attribute → prediction of the attribute's better reader."""


def predict(
    bank: Bank,
    labels: Labels,
    columns: Sequence[str],
    adapters: Mapping[str, Adapter],
    *,
    folds: int = 5,
    seed: int = 0,
    progress: Progress = QUIET,
) -> AttributePredictions:
    """Read attributes off adapters' weights, and say how well: by a network and by linear probes of ΔW.

    Args:
        bank: Adapters that are labeled.
        labels: What is known of them.
        columns: The attributes.
        adapters: Others, to be read; those of the bank that lack a label are read too.
        folds: Number of folds of the held-out scores, 2 at least.
        seed: Decides on folds and networks.
        progress: Where to show it.

    Raises:
        NameNotFound: There is no such column.
        UsageError: Too few adapters are labeled, or an adapter is of another model.
    """
    for name in columns:
        labels[name].check(folds)
    binary = [labels[name].kind == "binary" for name in columns]
    targets = torch.stack([
        torch.where(one.known, one.positive.double(), torch.nan) if of_class else one.values
        for one, of_class in zip((labels[name] for name in columns), binary, strict=True)
    ], 1)  # fmt: skip
    sketch = Sketch(dict(bank.shapes), _SIDE, 0)
    stacks = read_blocks(bank, len(bank), description="Reading adapters", progress=progress)
    rows = torch.cat([sketch.rows(stack) for _, stack in stacks])
    others = [_row(adapter, sketch) for adapter in adapters.values()]
    among = folds_of("predict", targets[:, 0].nan_to_num(), binary[0], folds, seed)
    said = torch.zeros(2, *targets.shape, dtype=torch.float64)
    with progress.task("Reading weights", folds + 1, unit="fits") as task:
        for fold in range(folds):
            inside = among == fold
            said[:, inside] = _read(sketch, rows[~inside], targets[~inside], rows[inside], binary, seed)
            task.update()
        findings = [
            [_score(f"{name}, {reader}", targets[:, place], said[which, :, place], among, binary[place], seed)
             for which, reader in enumerate(READERS)]
            for place, name in enumerate(columns)
        ]  # fmt: skip
        unknown = targets.isnan().any(1)
        names = [*(one for one, lacks in zip(bank.names, unknown.tolist(), strict=True) if lacks), *adapters]
        values: dict[str, dict[str, float]] = {name: {} for name in names}
        if names:
            predictions = _read(sketch, rows, targets, torch.cat([rows[unknown], *others]), binary, seed)
            for place, column in enumerate(columns):
                better = max((0, 1), key=lambda which: float(findings[place][which].value or 0))
                read = predictions[better, :, place].sigmoid() if binary[place] else predictions[better, :, place]
                for name, value in zip(names, read.tolist(), strict=True):
                    values[name][column] = value
        task.update()
    return AttributePredictions(tuple(finding for each in findings for finding in each), values)


def _row(adapter: Adapter, sketch: Sketch) -> Tensor:
    """The row of another adapter; modules that it lacks are unchanged."""
    shapes = sketch.shapes
    other = sorted(name for name, one in adapter.factors.items() if shapes.get(name) != one.shape)
    if other:
        raise UsageError(f"The adapter changes {other[0]}, which the bank does not change in this shape.",
                         cure="Name a bank of the same base model.")  # fmt: skip
    return sketch.rows(stacked(adapter, shapes))


def _score(what: str, values: Tensor, said: Tensor, among: Tensor, binary: bool, seed: int) -> Finding:
    labeled = ~values.isnan()
    how: Any = {"binary": binary, "seed": seed, "detail": {"folds": int(among.max()) + 1}}
    return held_out_score(what, values[labeled], said[labeled].double(), among[labeled], **how)


def _read(sketch: Sketch, there: Tensor, targets: Tensor, here: Tensor, binary: Sequence[bool], seed: int) -> Tensor:
    """Return both readers' predictions for others, shape `(2, n, columns)`; log-odds of classes."""
    design, probes = Design.of(there), []
    for values, of_class in zip(targets.T, binary, strict=True):
        weights = (~values.isnan()).double()
        fit = logistic(design, values > 0, weights) if of_class else ridge(design, values.nan_to_num(), weights)
        probes.append(fit(here))
    classes = torch.tensor(binary)
    center = torch.where(classes, 0.0, targets.nanmean(0))
    spread = torch.where(classes, 1.0, (targets - center).square().nanmean(0).sqrt())
    size = (changes := _changes(sketch, there)).square().sum((0, 2, 3)).div(len(there)).sqrt().clamp_min(1e-30)
    scale, said = size[:, None, None], torch.zeros(len(here), len(binary))
    for number in range(_NETWORKS):
        network = _fitted(changes / scale, (targets - center) / spread, classes, derive(seed, "network", number))
        said += network(_changes(sketch, here) / scale) / _NETWORKS
    return torch.stack([said * spread + center, torch.stack(probes, 1)])


def _changes(sketch: Sketch, rows: Tensor) -> Tensor:
    """Rows as changes of modules, filled up with zeros, shape `(n, modules, side, side)`."""
    sides = [(min(rows, _SIDE), min(columns, _SIDE)) for _, (rows, columns) in sorted(sketch.shapes.items())]
    parts = zip(torch.split(rows, [height * width for height, width in sides], 1), sides, strict=True)
    return torch.stack([
        nn.functional.pad(part.view(-1, height, width), (0, _SIDE - width, 0, _SIDE - height))
        for part, (height, width) in parts
    ], 1)  # fmt: skip


@torch.enable_grad()
def _fitted(changes: Tensor, targets: Tensor, classes: Tensor, seed: int) -> _WeightNetwork:
    labeled, targets = ~targets.isnan(), targets.nan_to_num().float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _WeightNetwork(changes.shape[1], targets.shape[1])
        optimizer = torch.optim.AdamW(network.parameters(), _RATE, weight_decay=_DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        for _ in range(_STEPS):
            batch = torch.randperm(len(changes))[:_BATCH]
            said, truth = network(changes[batch]), targets[batch]
            errors = nn.functional.binary_cross_entropy_with_logits(said, truth.clamp(0, 1), reduction="none")
            loss = (torch.where(classes, errors, (said - truth).square()) * labeled[batch]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return network.requires_grad_(False).eval()
