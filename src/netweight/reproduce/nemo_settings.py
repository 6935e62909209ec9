"""What NeMo's thresholds decide, as heat maps, and what each of its steps takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from netweight.report.finding import Column
from netweight.reproduce.nemo_counts import by_kind
from netweight.reproduce.nemo_ground import Ground, nemo_table
from netweight.reproduce.nemo_neurons import neurons_of, searched, status_notes, threshold_of
from netweight.reproduce.nemo_rows import KINDS, Line, Painted, copies, middle, painted_lines, percent
from netweight.reproduce.nemo_ways import off
from netweight.reproduce.registry import Measured, Row

if TYPE_CHECKING:
    from netweight.methods.forget.localize import Localization
    from netweight.report.finding import Figure, Number

__all__ = ["runtime", "thresholds"]

_HIGHER = 1.2
"""The highest threshold that is tried, as a multiple of the calibrated one."""
_MOST = 0.99
_STEPS = ("detection", "initial selection", "refinement")


@final
@dataclass(frozen=True)
class _Cell:
    """Neurons found with some thresholds.

    Attributes:
        pairwise: Above which a seed is looked at.
        initial: That stages are to reach.
        refinement: That refinement keeps to.
    """

    pairwise: float
    initial: float
    refinement: float

    @property
    def title(self) -> str:
        return f"seeds {self.pairwise:.3f}, initial {self.initial:.3f}, refinement {self.refinement:.3f}"


@nemo_table("nemo-thresholds")
def thresholds(ground: Ground, folder: Path) -> Measured:
    """Find neurons with other thresholds for seeds, initial selection and refinement, and paint without them."""
    usual, aim = _usual(ground, folder)
    levels = [aim, usual, min(_MOST, _HIGHER * usual)]
    cells = [_Cell(usual, initial, refinement) for initial in levels for refinement in levels]
    cells += [_Cell(level, aim, aim) for level in levels if level != usual]
    found = {cell: _found(ground, folder, cell) for cell in cells}
    lines = {cell: Line(cell.title, {prompt: off(each.neurons) for prompt, each in searched(part).items()})
             for cell, part in found.items()}  # fmt: skip
    painted = painted_lines(ground, folder, list(lines.values()), spared=False)
    rows = {(cell, kind): _row(painted, lines[cell], found[cell], kind) for cell in cells for kind in KINDS}
    kept = {place: row for place, row in rows.items() if row is not None}
    return Measured(
        columns=_columns(ground),
        rows=tuple(Row(f"{cell.title}, {kind}", row) for (cell, kind), row in kept.items()),
        differs=(
            *ground.differs,
            f"Thresholds are the calibrated one, {usual:.3f}, the similarity of ordinary prompts, {aim:.3f}, and "
            f"{_HIGHER:g} times the calibrated one; the paper's were made for Stable Diffusion, whose own is 0.428.",
        ),
        figures=_heat(ground, usual, levels, kept),
        notes=(
            "Seeds: above it a seed is looked at, and a prompt counts as memorized; initial: what the stages of the "
            "first selection are to reach; refinement: what it keeps to. Prompts that no longer count as memorized "
            "have no neurons and are left out of a row.",
            *status_notes(found[_Cell(usual, aim, aim)]),
        ),
    )


@nemo_table("nemo-runtime")
def runtime(ground: Ground, folder: Path) -> Measured:
    """Measure what detection, initial selection and refinement take for each memorized prompt."""
    found = neurons_of(ground, folder)
    rows = []
    for step in (*_STEPS, "all steps"):
        for kind, group in by_kind(ground, folder, found).items():
            costs = [_costs(each, step) for each in group if each.steps]
            if costs and any(each["rows"] for each in costs):
                rows.append(Row(f"{step}, {kind}", _summed(costs)))
    return Measured(
        columns=(
            Column("prompts", "count"),
            Column("time, median", "s", "lower"),
            Column("time, longest", "s", "lower"),
            Column("processor time, median", "s", "lower"),
            Column("images through the denoiser, median", "count", "lower"),
            Column("images through the denoiser, most", "count", "lower"),
            Column("calls of the denoiser, median", "count", "lower"),
        ),
        rows=tuple(rows),
        differs=ground.differs,
        notes=(
            "The numbers of the paper's table are not at hand; a summary says of it that most steps take less than 10 "
            "seconds and that template memorization takes longer.",
            "Time is the clock's, of whatever else the machine did too; of images through the denoiser, those that "
            "have a block in common compute it once. Prompts are searched side by side: of what they share, a prompt's "
            "time and calls are the share of its images.",
            *status_notes(found),
        ),
    )


def _usual(ground: Ground, folder: Path) -> tuple[float, float]:
    """The calibrated threshold of seeds, and what initial selection and refinement fall to by default."""
    threshold = threshold_of(ground, folder)
    return threshold.value, threshold.value if threshold.broken is None else threshold.broken


def _found(ground: Ground, folder: Path, cell: _Cell) -> dict[str, Localization]:
    from netweight.methods.forget.detect import Threshold
    from netweight.methods.forget.settings import LocalizationConfig

    usual, aim = _usual(ground, folder)
    if cell == _Cell(usual, aim, aim):
        return neurons_of(ground, folder)
    config = LocalizationConfig(detection=ground.detection, initial=cell.initial, refinement=cell.refinement)
    return neurons_of(ground, folder, config, threshold=Threshold(cell.pairwise, "given"))


def _columns(ground: Ground) -> tuple[Column, ...]:
    return (
        Column("prompts with neurons", "count"),
        Column("initial neurons, median", "neurons"),
        Column("refined neurons, median", "neurons"),
        Column("unresolved prompts", "count", "lower"),
        Column(f"neurons off: {ground.measure} to the training image, median", "score", "lower"),
        Column("neurons off: images that copy their own", "%", "lower"),
    )


def _row(
    painted: Painted, line: Line, found: Mapping[str, Localization], kind: str
) -> tuple[Number | None, ...] | None:
    own = painted.own(line, kind)
    if not own:
        return None
    each = [found[prompt] for prompt in own]
    made = [copies(value) for value in own.values()]
    return (
        len(each),
        statistics.median(sum(len(set(part)) for part in one.initial.values()) for one in each),
        statistics.median(len(one.neurons) for one in each),
        sum(one.status == "unresolved" for one in each),
        middle([statistics.median(one.to_image) for one in made])[0],
        percent(sum(one.copies() for one in made), sum(len(one.to_image) for one in made)),
    )


def _heat(
    ground: Ground,
    usual: float,
    levels: Sequence[float],
    rows: Mapping[tuple[_Cell, str], tuple[Number | None, ...]],
) -> tuple[Figure, ...]:
    """One figure for what is counted in neurons, one for what is painted without them."""
    from netweight.report.plots import heat_maps

    def matrix(kind: str, column: int) -> list[list[float | None]]:
        def value(initial: float, refinement: float) -> float | None:
            row = rows.get((_Cell(usual, initial, refinement), kind))
            number = None if row is None else row[column]
            return None if number is None else float(number)

        return [[value(initial, refinement) for refinement in levels] for initial in levels]

    kinds = [kind for kind in KINDS if any(place[1] == kind for place in rows)]
    names = [f"{level:.3f}" for level in levels]
    shown = ((("initial", 1), ("refined", 2)), ((f"{ground.measure}, neurons off", 4),))
    figures = []
    for group, digits in zip(shown, (1, 2), strict=True):
        panels = {f"{what}, {kind}": matrix(kind, column) for what, column in group for kind in kinds}
        figures.append(
            heat_maps(
                panels,
                rows=names,
                columns=names,
                alt=f"Heat maps by initial and refinement threshold: {', '.join(panels)}.",
                caption=f"Median over prompts of {' and '.join(what for what, _ in group)}"
                f"{' neurons' if len(group) > 1 else ''}, by threshold of the initial selection and of refinement.",
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


def _summed(costs: Sequence[Mapping[str, float]]) -> tuple[Number | None, ...]:
    seconds, rows = ([each[name] for each in costs] for name in ("seconds", "rows"))
    return (
        len(costs),
        statistics.median(seconds),
        max(seconds),
        statistics.median(each["processor seconds"] for each in costs),
        statistics.median(rows),
        max(rows),
        statistics.median(each["calls"] for each in costs),
    )
