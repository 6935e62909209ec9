"""Neurons that several prompts share: how many there are, in which sets, and what switching them off does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.report.finding import Column, Finding, Table
from netweight.reproduce.nemo_counts import NOT_THE_PAPER, beside, by_kind
from netweight.reproduce.nemo_ground import Ground, nemo_table
from netweight.reproduce.nemo_neurons import neurons_of, searched, status_notes, union
from netweight.reproduce.nemo_rows import Line, painted_lines, seeds_table
from netweight.reproduce.nemo_showing import image_figure
from netweight.reproduce.nemo_ways import NONE, off
from netweight.reproduce.published import published
from netweight.reproduce.registry import Measured, Row

if TYPE_CHECKING:
    from netweight.core.units import Units
    from netweight.methods.forget.localize import Localization

__all__ = ["clusters", "rerun_shared_sets", "shared_neurons"]

_ALIKE = 0.5
"""Share of common neurons from which two prompts are of one cluster."""


@nemo_table("nemo-shared-neurons")
def shared_neurons(ground: Ground, folder: Path) -> Measured:
    """Switch off the neurons that several prompts share, those of single prompts, and all of them together."""
    from netweight.methods.forget.report import overlap_figure

    found = neurons_of(ground, folder)
    looked = list(searched(found).values())
    common, everything = _common(looked), union(looked)
    sets = {"no mitigation": None, "shared neurons off": common, "neurons of one prompt alone off": everything - common,
            "all neurons found off": everything}  # fmt: skip
    lines = [
        Line(title, dict.fromkeys(ground.prompts, NONE if units is None else off(units)))
        for title, units in sets.items()
    ]
    painted = painted_lines(ground, folder, lines, spared=True)
    drawn = overlap_figure(looked)
    numbers = published("nemo-rerun-shared-sets")
    assert numbers is not None
    return Measured(
        columns=painted.columns,
        rows=painted.rows(),
        differs=ground.differs,
        findings=_findings(looked),
        figures=(*(() if drawn is None else (drawn,)), image_figure(painted, painted.lines, {}, found)),
        tables=(_counted(by_kind(ground, folder, found)), beside(numbers), seeds_table(painted)),
        notes=(
            f"Shared neurons are those of two prompts or more. Clusters join prompts of whose neurons {_ALIKE:.0%} or "
            "more are common. Edits add up here: every row is one model for all prompts.",
            *status_notes(found),
        ),
    )


@nemo_table("nemo-rerun-shared-sets")
def rerun_shared_sets(ground: Ground, folder: Path) -> Measured:
    """Count verbatim prompts that have exactly the same neurons, as it was done for the third-party re-run."""
    found = neurons_of(ground, folder)
    numbers = published("nemo-rerun-shared-sets")
    assert numbers is not None
    group = [each for each in by_kind(ground, folder, found).get("verbatim", ()) if each.neurons]
    counted = Counter(each.neurons for each in group)
    rows = [Row(_words(units, ground), (count,)) for units, count in counted.most_common() if count > 1]
    commonest = max(counted.values(), default=0)
    return Measured(
        columns=numbers.columns,
        rows=(Row("the commonest set, whichever it is", (commonest,)), *rows),
        differs=ground.differs,
        notes=(NOT_THE_PAPER, f"Out of {len(group)} verbatim prompts with neurons.", *status_notes(found)),
    )


def clusters(found: Sequence[Localization], alike: float = _ALIKE) -> list[list[Localization]]:
    """Join prompts whose neurons are mostly common, and those joined to them, the largest cluster first.

    Args:
        found: Localizations; those without neurons are left out.
        alike: Share of common neurons among those of two prompts, from which they are joined.
    """
    from netweight.methods.forget.report import overlap

    left = [each for each in found if each.neurons]
    joined: list[list[Localization]] = []
    while left:
        cluster = [left.pop(0)]
        for member in cluster:  # which grows meanwhile
            near = [other for other in left if overlap(member, other) >= alike]
            cluster += near
            left = [other for other in left if not any(other is each for each in near)]
        joined.append(cluster)
    return sorted(joined, key=len, reverse=True)


def _common(found: Sequence[Localization]) -> Units:
    from netweight.core.units import Units

    counted = _by_unit(found)
    units: dict[str, list[int]] = {}
    for (name, index), count in counted.items():
        if count > 1:
            units.setdefault(name, []).append(index)
    return Units(units)


def _by_unit(found: Sequence[Localization]) -> Counter[tuple[str, int]]:
    return Counter(unit for each in found for unit in each.neurons)


def _counted(groups: Mapping[str, Sequence[Localization]]) -> Table:
    """Numbers of neurons, counted once and by prompt, kind by kind and together."""
    every = {**groups, "all": [each for group in groups.values() for each in group]}
    rows = []
    for name, group in every.items():
        counted = _by_unit(group)
        rows.append((
            name, len(group), sum(counted.values()), len(counted), sum(count > 1 for count in counted.values()),
            max(counted.values(), default=0), len({each.neurons for each in group if each.neurons}),
            len(clusters(group)),
        ))  # fmt: skip
    columns = ("prompts", "number", "neurons, summed", "different neurons", "of several prompts",
               "prompts of the commonest neuron", "different sets", "clusters of prompts")  # fmt: skip
    return Table("Neurons counted once", tuple(Column(name) for name in columns), rows)


def _findings(found: Sequence[Localization]) -> tuple[Finding, ...]:
    counted = _by_unit(found)
    n = len(found) or None
    largest = clusters(found)
    return (
        Finding("different neurons of all prompts", len(counted), n=n),
        Finding("neurons of two prompts or more", sum(count > 1 for count in counted.values()), n=n),
        Finding(
            "clusters of prompts by their neurons", len(largest), n=n,
            detail={"largest": [each.prompt for each in largest[0]] if largest else []},
        ),
    )  # fmt: skip


def _words(units: Units, ground: Ground) -> str:
    """Name a set as the published rows do: "layer 0: neuron 25"."""
    from netweight.methods.forget.layers import value_layers

    places = list(value_layers(ground.model.denoiser))
    parts = []
    for name, indices in units.items():
        many = "s" if len(indices) > 1 else ""
        parts.append(f"layer {places.index(name)}: neuron{many} {', '.join(map(str, indices.tolist()))}")
    return "; ".join(parts)
