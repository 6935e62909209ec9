"""NeMo's figures on what edits cost: image quality by the number of neurons off, and neurons scaled instead of off."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.report.finding import Column
from netweight.reproduce.nemo_ground import Ground, nemo_table
from netweight.reproduce.nemo_neurons import neurons_of, searched, status_notes, union
from netweight.reproduce.nemo_painting import Painting, Results, paint, painting
from netweight.reproduce.nemo_rows import (
    KINDS,
    Line,
    Painted,
    copies,
    middle,
    painted_lines,
    percent,
    spared_columns,
    spared_values,
)
from netweight.reproduce.nemo_ways import NONE, Way, off, random_off
from netweight.reproduce.registry import Measured, Row

if TYPE_CHECKING:
    from netweight.report.finding import Figure

__all__ = ["figure6", "figure7"]

_POINTS = 8
_FACTORS = (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0)
_DRAW = 0


@nemo_table("nemo-fig6")
def figure6(ground: Ground, folder: Path) -> Measured:
    """Add up the edits of more and more prompts, and as many random neurons, and paint ordinary prompts."""
    found = neurons_of(ground, folder)
    looked = list(searched(found).values())
    counts = sorted({round(point * len(looked) / _POINTS) for point in range(_POINTS + 1)})
    unions = {count: union(looked[:count]) for count in counts}
    edits = {count: off(units) if count else NONE for count, units in unions.items()}
    drawn = {
        count: random_off(ground, units, layer_matched=False, seed=_DRAW) if count else NONE
        for count, units in unions.items()
    }
    ways = [way for way in (*edits.values(), *drawn.values()) if way is not None]
    runs = paint(ground, folder, [_ordinary(ground, way) for way in ways] + [_others(ground, way) for way in ways])
    rows = []
    for title, each in (("NeMo's neurons", edits), ("random neurons, equal count", drawn)):
        for count, way in each.items():
            if way is not None:
                values = (len(unions[count]), *_values(ground, runs, way))
                rows.append(Row(f"{title}, {count} prompts edited", values))
    left = [str(count) for count, way in drawn.items() if way is None]
    few = [f"No random neurons for {', '.join(left)} edited prompts: there are not so many others."] if left else []
    return Measured(
        columns=(Column("neurons off", "neurons"), *_quality_columns(ground, runs)),
        rows=tuple(rows),
        differs=ground.differs,
        figures=_drawn_quality(ground, runs, unions, edits, drawn),
        notes=(
            "Edits add up in the prompts' order. The numbers of the paper's figure are not at hand.",
            "Memorized prompts are up to 12 of them, edited or not, two images each.",
            *few,
            *status_notes(found),
        ),
    )


@nemo_table("nemo-fig7")
def figure7(ground: Ground, folder: Path) -> Measured:
    """Multiply each prompt's neurons by a factor instead of switching them off."""
    found = neurons_of(ground, folder)
    looked = searched(found)
    lines = [
        Line(
            f"factor {factor:g}",
            {prompt: NONE if factor == 1 else off(each.neurons, factor) for prompt, each in looked.items()},
        )
        for factor in _FACTORS
    ]
    painted = painted_lines(ground, folder, lines, spared=False)
    return Measured(
        columns=painted.columns,
        rows=painted.rows(),
        differs=ground.differs,
        figures=(_drawn_factors(painted),),
        notes=(
            "A factor of 0 switches neurons off, 1 leaves them; below 0 their sign is turned. The numbers of the "
            "paper's figure are not at hand.",
            *status_notes(found),
        ),
    )


def _ordinary(ground: Ground, way: Way) -> Painting:
    return painting(ground, way, "ordinary", "")


def _others(ground: Ground, way: Way) -> Painting:
    return painting(ground, way, "others", "")


def _values(ground: Ground, runs: Results, way: Way) -> list[float | None]:
    ordinary = runs[_ordinary(ground, way)]
    return [
        *spared_values([ordinary], [runs[_others(ground, way)]]),
        *(ordinary["distances"].get(name) for name in _distances(runs)),
    ]


def _distances(runs: Results) -> list[str]:
    return sorted({name for run, value in runs.items() if run.on == "ordinary" for name in value["distances"]})


def _quality_columns(ground: Ground, runs: Results) -> tuple[Column, ...]:
    distances = (Column(name, "", "lower") for name in _distances(runs))
    return (*spared_columns(ground, "memorized prompts"), *distances)


def _drawn_quality(
    ground: Ground,
    runs: Results,
    unions: Mapping[int, Any],
    edits: Mapping[int, Way],
    drawn: Mapping[int, Way | None],
) -> tuple[Figure, ...]:
    from netweight.report.plots import lines

    figures = []
    for place, column in enumerate(_quality_columns(ground, runs)):
        series = {}
        for title, each in (("NeMo's neurons", edits), ("random neurons", drawn)):
            points = [
                (len(unions[count]), value)
                for count, way in each.items()
                if way is not None and (value := _values(ground, runs, way)[place]) is not None
            ]
            if points:
                series[title] = ([point[0] for point in points], [point[1] for point in points])
        if series:
            unit = f", {column.unit}" if column.unit == "%" else ""
            figures.append(
                lines(
                    series,
                    alt=f"{column.name} against the number of neurons off, NeMo's and random ones.",
                    caption=f"{column.name}, by the number of neurons off as edits add up.",
                    xlabel="neurons off",
                    ylabel=_short(column.name) + unit,
                )
            )
    return tuple(figures)


def _short(name: str) -> str:
    return name.rpartition(": ")[2]


def _drawn_factors(painted: Painted) -> Figure:
    from netweight.report.plots import lines

    series: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    bands: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    shares: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for kind in KINDS:
        groups = [[copies(value) for value in painted.own(line, kind).values()] for line in painted.lines]
        if not groups[0]:
            continue
        found = [middle([statistics.median(row.to_image) for row in rows]) for rows in groups]
        centers = [float(center or 0.0) for center, _ in found]
        spreads = [float(spread or 0.0) for _, spread in found]
        series[kind] = (_FACTORS, centers)
        bands[kind] = (
            [center - spread for center, spread in zip(centers, spreads, strict=True)],
            [center + spread for center, spread in zip(centers, spreads, strict=True)],
        )
        shares[kind] = (
            _FACTORS,
            [percent(sum(r.copies() for r in rows), sum(len(r.to_image) for r in rows)) for rows in groups],
        )
    words = "; ".join(
        f"{kind}: {' '.join(f'{share:.0f}' for share in values[1])} % of images copy" for kind, values in shares.items()
    )
    measure = painted.ground.measure
    return lines(
        series,
        alt=f"{measure} to the training image against the factor that neurons are scaled by. {words}.",
        caption=f"{measure} to the training image by the factor, median and median absolute deviation over prompts. "
        f"By rising factor, {words}.",
        xlabel="factor of the neurons",
        ylabel=f"{measure} to the training image",
        bands=bands,
    )
