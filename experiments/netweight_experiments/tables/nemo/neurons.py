"""How many neurons NeMo finds, by prompt, layer and threshold, which prompts share them, what finding them takes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from netweight.core.names import Units
from netweight.methods.forget.detect import Threshold
from netweight.methods.forget.layers import value_layers
from netweight.methods.forget.localize import Localization
from netweight.methods.forget.report import counts_figure, layers_figure, overlap, overlap_figure, prompts_table
from netweight.methods.forget.settings import LocalizationConfig
from netweight.metrics.copies import PromptCopies
from netweight.report.finding import Figure, Finding, Number, Table
from netweight.report.plots import heat_maps
from netweight_experiments.tables.grid import grid
from netweight_experiments.tables.nemo.images import (
    KINDS,
    Line,
    copies,
    image_figure,
    images_of_lines,
    kinds_of,
    middle,
    percent,
    seeds_table,
)
from netweight_experiments.tables.nemo.setup import (
    NONE,
    Setup,
    neurons_of,
    off,
    searched,
    status_notes,
    threshold_of,
    union,
)
from netweight_experiments.tables.registry import Column, Measured, Published, Row, required
from netweight_experiments.tables.setups import setup_table

Groups = Mapping[str, Sequence["Localization"]]
NOT_THE_PAPER = (
    "What is published here is a third party's unfinished re-run with Stable Diffusion 1.4, not the paper's numbers, "
    "which are not at hand."
)


@setup_table("nemo-rerun-neurons")
def rerun_neurons(setup: Setup, folder: Path) -> Measured:
    """Count neurons by prompt as the statistics of the third-party re-run are."""
    return _counted_by_prompt(setup, *_found(setup, folder))


@setup_table("nemo-fig5")
def figure5(setup: Setup, folder: Path) -> Measured:
    """Draw how many neurons memorized prompts need, and in which layers."""
    found, groups = _found(setup, folder)
    drawn = (counts_figure(groups), layers_figure(groups, list(value_layers(setup.model.denoiser))))
    tables = (
        *(beside(required(f"nemo-rerun-{what}")) for what in ("neurons", "layers")),
        prompts_table([*found.values()]),
    )
    figures = tuple(figure for figure in drawn if figure is not None)
    return replace(_counted_by_prompt(setup, found, groups), figures=figures, tables=tables)


def _counted_by_prompt(setup: Setup, found: Mapping[str, Localization], groups: Groups) -> Measured:
    columns = required("nemo-rerun-neurons").columns  # their notes say what each is
    numbers = {name: _counts(group) for name, group in groups.items()}
    return grid(
        numbers,
        [(column, itemgetter(place)) for place, column in enumerate(columns)],
        differs=setup.differs,
        notes=(NOT_THE_PAPER, *status_notes(found)),
    )


def _counts(group: Sequence[Localization]) -> tuple[Number | None, ...]:
    looked = list(searched({each.prompt: each for each in group}).values())
    initial = [_initial(each) for each in looked]
    refined = [len(each.neurons) for each in looked]
    floor = sum(
        each.initial_similarity is not None and each.broken is not None and each.initial_similarity > each.broken
        for each in looked
    )
    missed = len(group) - len(looked)
    return (
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
    )


def _initial(found: Localization) -> int:
    """Neurons of the initial selection."""
    return sum(len(set(part)) for part in found.initial.values())


@setup_table("nemo-rerun-layers")
def rerun_layers(setup: Setup, folder: Path) -> Measured:
    """Count neurons by layer as the statistics of the third-party re-run are, and those of templates beside."""
    found, groups = _found(setup, folder)

    def mean_of(kind: str) -> Callable[[str], float | None]:
        looked = searched({each.prompt: each for each in groups.get(kind, ())}).values()
        return lambda layer: (
            statistics.mean(len(set(each.refined.get(layer, ()))) for each in looked) if looked else None
        )

    layers = value_layers(setup.model.denoiser)
    width, verbatim = required("nemo-rerun-layers").columns
    template = Column("refined neurons per template prompt, mean", "neurons")
    return grid(
        {f"layer {place}": name for place, name in enumerate(layers)},
        [
            (width, lambda name: layers[name].width),
            *((column, mean_of(kind)) for kind, column in zip(KINDS, (verbatim, template), strict=True)),
        ],
        differs=(*setup.differs, "Layers are numbered alike and are not the same: a model has as many as it has."),
        notes=(NOT_THE_PAPER, *status_notes(found)),
    )


def by_kind(setup: Setup, folder: Path, found: Mapping[str, Localization]) -> dict[str, list[Localization]]:
    """Return localizations by kind of memorization, without those that failed."""
    kinds = kinds_of(setup, folder)
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


def _found(setup: Setup, folder: Path) -> tuple[dict[str, Localization], dict[str, list[Localization]]]:
    found = neurons_of(setup, folder)
    return found, by_kind(setup, folder, found)


# Share of common neurons from which two prompts are of one cluster.
_ALIKE = 0.5


@setup_table("nemo-shared-neurons")
def shared_neurons(setup: Setup, folder: Path) -> Measured:
    """Switch off the neurons that several prompts share, those of single prompts, and all of them together."""
    found = neurons_of(setup, folder)
    looked = list(searched(found).values())
    common, everything = _common(looked), union(looked)
    sets = {"no mitigation": None, "shared neurons off": common, "neurons of one prompt alone off": everything - common,
            "all neurons found off": everything}  # fmt: skip
    lines = [
        Line(title, dict.fromkeys(setup.prompts, NONE if units is None else off(units)))
        for title, units in sets.items()
    ]
    images = images_of_lines(setup, folder, lines, spared=True)
    drawn = overlap_figure(looked)
    numbers = required("nemo-rerun-shared-sets")
    return images.grid(
        differs=setup.differs,
        findings=_findings(looked),
        figures=(*(() if drawn is None else (drawn,)), image_figure(images, images.lines, {}, found)),
        tables=(_counted(by_kind(setup, folder, found)), beside(numbers), seeds_table(images)),
        notes=(
            f"Shared neurons are those of two prompts or more. Clusters join prompts of whose neurons {_ALIKE:.0%} or "
            "more are common. Edits add up here: every row is one model for all prompts.",
            *status_notes(found),
        ),
    )


@setup_table("nemo-rerun-shared-sets")
def rerun_shared_sets(setup: Setup, folder: Path) -> Measured:
    """Count verbatim prompts that have exactly the same neurons, as it was done for the third-party re-run."""
    found = neurons_of(setup, folder)
    numbers = required("nemo-rerun-shared-sets")
    group = [each for each in by_kind(setup, folder, found).get("verbatim", ()) if each.neurons]
    counted = Counter(each.neurons for each in group)
    rows = [Row(_words(units, setup), (count,)) for units, count in counted.most_common() if count > 1]
    commonest = max(counted.values(), default=0)
    return Measured(
        columns=numbers.columns,
        rows=(Row("the commonest set, whichever it is", (commonest,)), *rows),
        differs=setup.differs,
        notes=(NOT_THE_PAPER, f"Out of {len(group)} verbatim prompts with neurons.", *status_notes(found)),
    )


def clusters(found: Sequence[Localization], alike: float = _ALIKE) -> list[list[Localization]]:
    """Join prompts whose neurons are mostly common, and those joined to them, the largest cluster first."""
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
    return Table("Neurons counted once", columns, rows)


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


def _words(units: Units, setup: Setup) -> str:
    """Name a set as the published rows do: "layer 0: neuron 25"."""
    places = list(value_layers(setup.model.denoiser))
    parts = []
    for name, indices in units.items():
        many = "s" if len(indices) > 1 else ""
        parts.append(f"layer {places.index(name)}: neuron{many} {', '.join(map(str, indices.tolist()))}")
    return "; ".join(parts)


# The highest threshold that is tried, as a multiple of the calibrated one.
_HIGHER = 1.2
_MOST = 0.99
_STEPS = ("detection", "initial selection", "refinement")


@dataclass(frozen=True)
class _Cell:
    """Neurons found with some thresholds."""

    pairwise: float  # above which a seed is looked at
    initial: float  # that stages are to reach
    refinement: float  # that refinement keeps to

    @property
    def title(self) -> str:
        return f"seeds {self.pairwise:.3f}, initial {self.initial:.3f}, refinement {self.refinement:.3f}"


@setup_table("nemo-thresholds")
def thresholds(setup: Setup, folder: Path) -> Measured:
    """Find neurons with other thresholds for seeds, initial selection and refinement, and generate without them."""
    usual, aim = _usual(setup, folder)
    levels = [aim, usual, min(_MOST, _HIGHER * usual)]
    cells = [_Cell(usual, initial, refinement) for initial in levels for refinement in levels]
    cells += [_Cell(level, aim, aim) for level in levels if level != usual]
    found = {cell: _found_with(setup, folder, cell) for cell in cells}
    lines = {cell: Line(cell.title, {prompt: off(each.neurons) for prompt, each in searched(part).items()})
             for cell, part in found.items()}  # fmt: skip
    images = images_of_lines(setup, folder, list(lines.values()), spared=False)
    rows = {
        (cell, kind): _Off(tuple(found[cell][prompt] for prompt in own), tuple(map(copies, own.values())))
        for cell in cells
        for kind in KINDS
        if (own := images.own(lines[cell], kind))
    }
    off_to_image = f"neurons off: {setup.measure} to the training image, median"
    return grid(
        {f"{cell.title}, {kind}": row for (cell, kind), row in rows.items()},
        [
            (Column("prompts with neurons", "count"), lambda row: len(row.found)),
            (Column("initial neurons, median", "neurons"), _Off.initial),
            (Column("refined neurons, median", "neurons"), _Off.refined),
            (Column("unresolved prompts", "count", "lower"), _Off.unresolved),
            (Column(off_to_image, "score", "lower"), _Off.to_image),
            (Column("neurons off: images that copy their own", "%", "lower"), _Off.copied),
        ],
        differs=(
            *setup.differs,
            f"Thresholds are the calibrated one, {usual:.3f}, the similarity of ordinary prompts, {aim:.3f}, and "
            f"{_HIGHER:g} times the calibrated one; the paper's were made for Stable Diffusion, whose own is 0.428.",
        ),
        figures=_heat(setup, usual, levels, rows),
        notes=(
            "Seeds: above it a seed is looked at, and a prompt counts as memorized; initial: what the stages of the "
            "first selection are to reach; refinement: what it keeps to. Prompts that no longer count as memorized "
            "have no neurons and are left out of a row.",
            *status_notes(found[_Cell(usual, aim, aim)]),
        ),
    )


@dataclass(frozen=True)
class _Off:
    """Prompts of a kind: their neurons, and their images without them."""

    found: tuple[Localization, ...]
    copies: tuple[PromptCopies, ...]

    def initial(self) -> float:
        return statistics.median(map(_initial, self.found))

    def refined(self) -> float:
        return statistics.median(len(one.neurons) for one in self.found)

    def unresolved(self) -> int:
        return sum(one.status == "unresolved" for one in self.found)

    def to_image(self) -> float:
        return statistics.median(statistics.median(one.to_image) for one in self.copies)

    def copied(self) -> float:
        return percent(sum(one.copies() for one in self.copies), sum(len(one.to_image) for one in self.copies))


@setup_table("nemo-runtime")
def runtime(setup: Setup, folder: Path) -> Measured:
    """Measure what detection, initial selection and refinement take for each memorized prompt."""
    found = neurons_of(setup, folder)
    costs = {
        f"{step}, {kind}": [_costs(each, step) for each in group if each.steps]
        for step in (*_STEPS, "all steps")
        for kind, group in by_kind(setup, folder, found).items()
    }

    def of(name: str, summed: Callable[[list[float]], float]) -> Callable[[list[dict[str, float]]], float]:
        return lambda row: summed([each[name] for each in row])

    return grid(
        {name: row for name, row in costs.items() if any(each["rows"] for each in row)},
        [
            (Column("prompts", "count"), len),
            (Column("time, median", "s", "lower"), of("seconds", statistics.median)),
            (Column("time, longest", "s", "lower"), of("seconds", max)),
            (Column("processor time, median", "s", "lower"), of("processor seconds", statistics.median)),
            (Column("images through the denoiser, median", "count", "lower"), of("rows", statistics.median)),
            (Column("images through the denoiser, most", "count", "lower"), of("rows", max)),
            (Column("calls of the denoiser, median", "count", "lower"), of("calls", statistics.median)),
        ],
        differs=setup.differs,
        notes=(
            "The numbers of the paper's table are not at hand; a summary says of it that most steps take less than 10 "
            "seconds and that template memorization takes longer.",
            "Time is the clock's, of whatever else the machine did too. Prompts are searched side by side: of what "
            "they share, a prompt's time and calls are the share of its images.",
            *status_notes(found),
        ),
    )


def _usual(setup: Setup, folder: Path) -> tuple[float, float]:
    """The calibrated threshold of seeds, and what initial selection and refinement fall to by default."""
    threshold = threshold_of(setup, folder)
    return threshold.value, threshold.value if threshold.broken is None else threshold.broken


def _found_with(setup: Setup, folder: Path, cell: _Cell) -> dict[str, Localization]:
    usual, aim = _usual(setup, folder)
    if cell == _Cell(usual, aim, aim):
        return neurons_of(setup, folder)
    config = LocalizationConfig(detection=setup.detection, initial=cell.initial, refinement=cell.refinement)
    return neurons_of(setup, folder, config, threshold=Threshold(cell.pairwise, "given"))


def _heat(
    setup: Setup, usual: float, levels: Sequence[float], rows: Mapping[tuple[_Cell, str], _Off]
) -> tuple[Figure, ...]:
    """One figure for what is counted in neurons, one for what is generated without them."""

    def matrix(kind: str, value: Callable[[_Off], float]) -> list[list[float | None]]:
        cells = [[rows.get((_Cell(usual, initial, refinement), kind)) for refinement in levels] for initial in levels]
        return [[None if cell is None else float(value(cell)) for cell in line] for line in cells]

    kinds = [kind for kind in KINDS if any(place[1] == kind for place in rows)]
    names = [f"{level:.3f}" for level in levels]
    shown: tuple[dict[str, Callable[[_Off], float]], ...] = (
        {"initial": _Off.initial, "refined": _Off.refined},
        {f"{setup.measure}, neurons off": _Off.to_image},
    )
    figures = []
    for group, digits in zip(shown, (1, 2), strict=True):
        panels = {f"{what}, {kind}": matrix(kind, value) for what, value in group.items() for kind in kinds}
        figures.append(
            heat_maps(
                panels,
                rows=names,
                columns=names,
                alt=f"Heat maps by initial and refinement threshold: {', '.join(panels)}.",
                caption=f"Median over prompts of {' and '.join(group)}{' neurons' * (len(group) > 1)}, by threshold of "
                "the initial selection and of refinement.",
                xlabel="refinement threshold",
                ylabel="initial threshold",
                digits=digits,
            )
        )
    return tuple(figures) if kinds else ()


def _costs(found: Localization, step: str) -> dict[str, float]:
    names = ("seconds", "processor seconds", "rows", "calls")
    steps = _STEPS if step == "all steps" else (step,)
    return {name: sum(found.steps.get(each, {}).get(name, 0) for each in steps) for name in names}
