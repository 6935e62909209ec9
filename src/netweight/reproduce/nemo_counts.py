"""How many neurons NeMo finds, by prompt and layer, beside the third-party re-run, which is not the paper."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.report.finding import Column, Table
from netweight.reproduce.nemo_ground import Ground, nemo_table
from netweight.reproduce.nemo_neurons import neurons_of, searched, status_notes
from netweight.reproduce.nemo_painting import kinds_of
from netweight.reproduce.nemo_rows import KINDS, middle, percent
from netweight.reproduce.published import Published, published
from netweight.reproduce.registry import Measured, Row

if TYPE_CHECKING:
    from netweight.methods.forget.localize import Localization
    from netweight.report.finding import Figure

__all__ = ["NOT_THE_PAPER", "beside", "by_kind", "figure5", "rerun_layers", "rerun_neurons"]

Groups = Mapping[str, Sequence["Localization"]]
NOT_THE_PAPER = (
    "What is published here is a third party's unfinished re-run with Stable Diffusion 1.4, not the paper's numbers, "
    "which are not at hand."
)


@nemo_table("nemo-fig5")
def figure5(ground: Ground, folder: Path) -> Measured:
    """Draw how many neurons memorized prompts need, and in which layers."""
    found, groups = _found(ground, folder)
    neurons, layers = published("nemo-rerun-neurons"), published("nemo-rerun-layers")
    assert neurons is not None
    assert layers is not None
    return Measured(
        columns=neurons.columns,
        rows=tuple(_counts(name, group) for name, group in groups.items()),
        differs=ground.differs,
        figures=_figures(ground, groups),
        tables=(beside(neurons), beside(layers), _by_prompt(found)),
        notes=(NOT_THE_PAPER, *status_notes(found)),
    )


@nemo_table("nemo-rerun-neurons")
def rerun_neurons(ground: Ground, folder: Path) -> Measured:
    """Count neurons by prompt as the statistics of the third-party re-run are."""
    found, groups = _found(ground, folder)
    numbers = published("nemo-rerun-neurons")
    assert numbers is not None
    return Measured(
        columns=numbers.columns,
        rows=tuple(_counts(name, group) for name, group in groups.items()),
        differs=ground.differs,
        notes=(NOT_THE_PAPER, *status_notes(found)),
    )


@nemo_table("nemo-rerun-layers")
def rerun_layers(ground: Ground, folder: Path) -> Measured:
    """Count neurons by layer as the statistics of the third-party re-run are, and those of templates beside."""
    from netweight.methods.forget.layers import value_layers

    found, groups = _found(ground, folder)
    numbers = published("nemo-rerun-layers")
    assert numbers is not None
    rows = []
    for place, (name, layer) in enumerate(value_layers(ground.model.denoiser).items()):
        means = [_mean_of_layer(groups.get(kind, ()), name) for kind in KINDS]
        rows.append(Row(f"layer {place}", (layer.width, *means)))
    return Measured(
        columns=(*numbers.columns, Column("refined neurons per template prompt, mean", "neurons")),
        rows=tuple(rows),
        differs=(*ground.differs, "Layers are numbered alike and are not the same: a model has as many as it has."),
        notes=(NOT_THE_PAPER, *status_notes(found)),
    )


def by_kind(ground: Ground, folder: Path, found: Mapping[str, Localization]) -> dict[str, list[Localization]]:
    """Return localizations by kind of memorization, without those that failed."""
    kinds = kinds_of(ground, folder)
    groups = {
        kind: [each for prompt, each in found.items() if kinds[prompt] == kind and each.status != "failed"]
        for kind in KINDS
    }
    return {kind: group for kind, group in groups.items() if group}


def beside(numbers: Published) -> Table:
    """Return published numbers of a third party as a table of their own, called what they are."""
    columns = ("row", *(f"{column.name} ({column.unit})" for column in numbers.columns))
    rows = [(row.name, *row.values) for row in numbers.rows]
    return Table(f"Third-party re-run, not the paper's: {numbers.title}", columns, rows, numbers.notes)


def _found(ground: Ground, folder: Path) -> tuple[dict[str, Localization], dict[str, list[Localization]]]:
    found = neurons_of(ground, folder)
    return found, by_kind(ground, folder, found)


def _counts(name: str, group: Sequence[Localization]) -> Row:
    """One row of the re-run's statistics; see the notes of its file."""
    looked = list(searched({each.prompt: each for each in group}).values())
    initial = [sum(len(set(part)) for part in each.initial.values()) for each in looked]
    refined = [len(each.neurons) for each in looked]
    floor = sum(
        each.initial_similarity is not None and each.broken is not None and each.initial_similarity > each.broken
        for each in looked
    )
    missed = len(group) - len(looked)
    return Row(name, (
        len(group),
        statistics.median([*initial, *[0] * missed]),
        statistics.median(initial) if initial else None,
        *middle(refined),
        statistics.mean(refined) if refined else None,
        max(refined, default=None),
        refined.count(1),
        missed,
        sum(each.status == "unresolved" for each in looked),
        percent(floor, len(group)),
    ))  # fmt: skip


def _mean_of_layer(group: Sequence[Localization], layer: str) -> float | None:
    looked = list(searched({each.prompt: each for each in group}).values())
    return statistics.mean(len(set(each.refined.get(layer, ()))) for each in looked) if looked else None


def _figures(ground: Ground, groups: Groups) -> tuple[Figure, ...]:
    from netweight.methods.forget.layers import value_layers
    from netweight.methods.forget.report import counts_figure, layers_figure

    drawn = (counts_figure(groups), layers_figure(groups, list(value_layers(ground.model.denoiser))))
    return tuple(figure for figure in drawn if figure is not None)


def _by_prompt(found: Mapping[str, Localization]) -> Table:
    from netweight.methods.forget.report import prompts_table

    return prompts_table(list(found.values()))
