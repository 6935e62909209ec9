"""Rows of a label about adapters: strength, effective rank, modules, programs that read them, near-duplicates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from netweight.core.progress import QUIET, Progress
from netweight.core.quantities import many, percent
from netweight.errors import NetweightError
from netweight.labels.identify_subject import LabelSubject
from netweight.labels.label import Row, RowGroup

if TYPE_CHECKING:
    from netweight.nn.lora import LowRank

# Cosine of two adapters' changes from which they count as near-duplicates.
NEAR_DUPLICATE = 0.99
# Adapters of a folder that are compared with each other; more would take time that grows with the square.
MOST_COMPARED = 300
# Layout of the file → the programs that read it.
_READERS = {
    "peft": "peft, transformers",
    "diffusers": "diffusers",
    "kohya": "kohya, ComfyUI, diffusers",
    "comfyui": "ComfyUI",
}


@final
@dataclass(frozen=True)
class AdapterFacts:
    """Facts about one adapter from its factors."""

    path: Path
    """File or folder of the adapter."""
    layout: str
    """Layout of its names: "peft", "diffusers", "kohya", …."""
    base: str | None
    """The base model that it states; None if it states none."""
    modules: int
    """Number of modules that it changes."""
    ranks: tuple[int, int]
    """Smallest and largest rank of its factors."""
    strength: float
    """Frobenius norm of the whole change, over all modules."""
    effective_ranks: tuple[float, float]
    """Mean over modules of the rank that holds 90 % and 99 % of the change's square."""
    parts: tuple[str, ...]
    """The parts of the model that it changes, such as "unet" and "text_encoder"."""


def measure_adapters(
    paths: Sequence[Path], *, progress: Progress = QUIET
) -> tuple[list[AdapterFacts], dict[Path, NetweightError], list[tuple[str, str, float]]]:
    """Read adapters and compare them.

    Args:
        paths: Files and folders of adapters.
        progress: Where progress is shown.

    Returns:
        The facts of those that could be read, the reasons for those that could not, and the pairs whose changes have a
        cosine of at least `NEAR_DUPLICATE`: both names and the cosine.
    """
    from netweight.store.lora_formats.reading import load_plan, plan_adapter

    facts: list[AdapterFacts] = []
    failed: dict[Path, NetweightError] = {}
    compared: list[tuple[str, Mapping[str, LowRank], float]] = []
    with progress.task("read adapters", len(paths)) as task:
        for path in paths:
            try:
                plan = plan_adapter(path)
                changes = load_plan(plan).factors
            except NetweightError as error:
                failed[path] = error
                task.update(1)
                continue
            facts.append(_facts_of(path, plan.layout, plan.base, changes))
            if len(compared) < MOST_COMPARED:
                compared.append((path.name, changes, facts[-1].strength))
            task.update(1)
    return facts, failed, near_duplicates(compared)


def near_duplicates(adapters: Sequence[tuple[str, Mapping[str, LowRank], float]]) -> list[tuple[str, str, float]]:
    """Return the pairs of adapters whose changes have a cosine of at least `NEAR_DUPLICATE`.

    Args:
        adapters: Name, change of every module, and the Frobenius norm of all changes together.

    Returns:
        Both names and the cosine, of adapters that change the same modules of the same shapes.
    """
    alike: dict[object, list[tuple[str, Mapping[str, LowRank], float]]] = {}
    for name, changes, norm in adapters:
        if norm:
            shapes = tuple(sorted((module, change.shape) for module, change in changes.items()))
            alike.setdefault(shapes, []).append((name, changes, norm))
    return [pair for group in alike.values() if len(group) > 1 for pair in _pairs_of(group)]


def _pairs_of(group: Sequence[tuple[str, Mapping[str, LowRank], float]]) -> Iterator[tuple[str, str, float]]:
    """The near-duplicates among adapters of the same modules: inner products of one with all before it at a time.

    Source: ⟨BA, B'A'⟩ = ⟨BᵀB', AA'ᵀ⟩. Factors of lower rank are filled up with zeros.
    """
    import torch

    count = len(group)
    inner = torch.zeros(count, count, dtype=torch.float64)
    for module in group[0][1]:
        changes = [each[1][module] for each in group]
        rank = max(change.rank for change in changes)
        ups = torch.zeros(count, rank, changes[0].shape[0], dtype=torch.float64)
        downs = torch.zeros(count, rank, changes[0].shape[1], dtype=torch.float64)
        for number, change in enumerate(changes):
            ups[number, : change.rank] = change.up.double().T * change.scale
            downs[number, : change.rank] = change.down.double()
        for number in range(1, count):
            left, right = ups[:number] @ ups[number].T, downs[:number] @ downs[number].T
            inner[number, :number] += (left * right).sum((1, 2))
    norms = torch.tensor([each[2] for each in group], dtype=torch.float64)
    cosines = inner / torch.outer(norms, norms)
    for later, earlier in (cosines >= NEAR_DUPLICATE).nonzero().tolist():
        yield group[earlier][0], group[later][0], float(cosines[later, earlier])


def adapter_group(
    subject: LabelSubject,
    facts: Sequence[AdapterFacts],
    failed: Mapping[Path, NetweightError],
    pairs: Sequence[tuple[str, str, float]],
) -> RowGroup:
    """Return the rows about adapters.

    Args:
        subject: What the label is about.
        facts: What `measure_adapters` found.
        failed: The adapters that could not be read, and why.
        pairs: Near-duplicates.
    """
    total = len(facts) + len(failed)
    if total > 1:
        rows = list(_folder_rows(facts, failed, pairs))
    elif facts:
        rows = list(_single_rows(facts[0]))
    else:
        reason = str(next(iter(failed.values()), "no adapter was recognized"))
        rows = [Row(key="adapter", title="Adapter", value="could not be read", state="warning", basis=reason)]
    return RowGroup(title="Adapter" if total == 1 else "Adapters", anchor="adapters", rows=tuple(rows),
                 basis=f"{len(facts):,} of {many(total, 'adapter')} read")  # fmt: skip


def effective_rank(singular: Sequence[float], energy: float) -> int:
    """Return the smallest number of singular values that hold a share of the sum of their squares.

    Args:
        singular: Singular values, the largest first.
        energy: The share, between 0 and 1.
    """
    squares = [value * value for value in singular]
    total, sum_ = sum(squares), 0.0
    if not total:
        return 0
    for number, square in enumerate(squares, start=1):
        sum_ += square
        if sum_ >= energy * total * (1 - 1e-12):
            return number
    return len(squares)


def _facts_of(path: Path, layout: str, base: str | None, changes: Mapping[str, LowRank]) -> AdapterFacts:
    squares = 0.0
    low: list[int] = []
    high: list[int] = []
    for change in changes.values():
        values = _singular_values(change)
        squares += sum(value * value for value in values)
        low.append(effective_rank(values, 0.9))
        high.append(effective_rank(values, 0.99))
    ranks = [change.rank for change in changes.values()]
    components = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "diffusion_model")
    parts = Counter(name.split(".")[0] for name in changes if name.split(".")[0] in components)
    count = max(len(changes), 1)
    return AdapterFacts(
        path, layout, base, len(changes), (min(ranks, default=0), max(ranks, default=0)), math.sqrt(squares),
        (sum(low) / count, sum(high) / count), tuple(parts),
    )  # fmt: skip


def _singular_values(change: LowRank) -> list[float]:
    """Singular values of a change, the largest first, from the factors alone."""
    import torch

    left = torch.linalg.qr(change.up.double()).R
    right = torch.linalg.qr(change.down.double().T).R
    values: list[float] = torch.linalg.svdvals(change.scale * (left @ right.T)).tolist()
    return values


def _single_rows(facts: AdapterFacts) -> Iterator[Row]:
    low, high = facts.ranks
    yield Row(key="modules", title="Modules changed", value=f"{facts.modules:,}", number=facts.modules)
    if facts.parts:
        yield Row(key="adapter_parts", title="Parts of the model", value=", ".join(facts.parts), indent=1)
    yield Row(
        key="strength", title="Strength (norm of the change)", value=f"{facts.strength:.4g}", number=facts.strength,
        basis="Frobenius norm over all modules, with alpha",
        state="measured" if facts.strength else "warning",
    )  # fmt: skip
    yield Row(key="rank", title="Rank", value=f"{low}" if low == high else f"{low} to {high}", number=high)
    for share, value in zip((90, 99), facts.effective_ranks, strict=True):
        yield Row(
            key=f"effective_rank_{share}", title=f"Rank for {share} % of the change", value=f"{value:.1f}",
            number=value, indent=1, basis="of the squared norm of the change; mean over modules",
        )  # fmt: skip
    yield Row(
        key="readers", title="Programs that read this layout", value=_READERS.get(facts.layout, facts.layout),
        basis=f"names in the layout of {facts.layout}",
    )  # fmt: skip
    yield Row(
        key="adapter_base", title="Made for", value=facts.base or "not stated",
        state="measured" if facts.base else "warning",
    )  # fmt: skip


def _folder_rows(
    facts: Sequence[AdapterFacts], failed: Mapping[Path, NetweightError], pairs: Sequence[tuple[str, str, float]]
) -> Iterator[Row]:
    total = len(facts) + len(failed)
    yield Row(key="adapters", title="Adapters", value=f"{total:,}", number=total, strong=True)
    layouts = Counter(each.layout for each in facts)
    readers = ", ".join(f"{number} {layout}" for layout, number in layouts.most_common())
    yield Row(key="layouts", title="Layouts of their names", value=readers or "none read", indent=1)
    if facts:
        bases = Counter(each.base or "not stated" for each in facts)
        yield Row(
            key="bases", title="Made for",
            value=", ".join(f"{base} ({number})" for base, number in bases.most_common(3)), indent=1,
            state="warning" if len(bases) > 1 else "measured", number=len(bases),
            basis=many(len(bases), "base model"),
        )  # fmt: skip
        strengths = sorted(each.strength for each in facts)
        ranks = [rank for each in facts for rank in each.ranks]
        yield Row(
            key="strength", title="Strength, median", value=f"{strengths[len(strengths) // 2]:.4g}",
            number=strengths[len(strengths) // 2], basis=f"from {strengths[0]:.4g} to {strengths[-1]:.4g}",
        )  # fmt: skip
        yield Row(key="rank", title="Ranks", value=f"{min(ranks)} to {max(ranks)}", number=max(ranks))
        mean = sum(each.effective_ranks[0] for each in facts) / len(facts)
        yield Row(
            key="effective_rank_90", title="Rank for 90 % of the change", value=f"{mean:.1f}", number=mean, indent=1,
            basis="mean over adapters and modules",
        )  # fmt: skip
    compared = min(len(facts), MOST_COMPARED)
    yield Row(
        key="near_duplicates", title="Near-duplicates", value=many(len(pairs), "pair") if pairs else "none",
        number=len(pairs), state="warning" if pairs else "measured",
        basis=f"cosine of the changes ≥ {NEAR_DUPLICATE}, {many(compared, 'adapter')} of the same modules compared",
        detail={"pairs": [list(pair) for pair in pairs]},
    )  # fmt: skip
    if failed:
        first = next(iter(failed))
        yield Row(
            key="unreadable", title="Could not be read", value=f"{len(failed)} of {total}", number=len(failed),
            state="warning", basis=f"{first.name}: {failed[first]}", strong=True,
            detail={path.name: str(error) for path, error in failed.items()},
        )  # fmt: skip
    if facts and total:
        yield Row(key="read", title="Share that was read", value=percent(len(facts) / total), indent=1)
