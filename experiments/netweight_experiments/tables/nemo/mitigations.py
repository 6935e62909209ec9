"""NeMo's tables of mitigations: table 1, the ablation, and what edits cost by their number and by their factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from netweight.core.names import Units
from netweight.methods.forget.layers import value_layers
from netweight.methods.forget.localize import Localization
from netweight.methods.forget.settings import LocalizationConfig
from netweight.metrics.copies import copy_findings
from netweight.report.finding import Figure, Finding
from netweight.report.plots import lines
from netweight_experiments.tables.grid import Cell, grid
from netweight_experiments.tables.nemo.images import (
    KINDS,
    Line,
    Lines,
    Part,
    attack_findings,
    attacked,
    copies,
    generate_images,
    image_figure,
    images_of_lines,
    images_run,
    middle,
    percent,
    seeds_table,
    spared_cells,
)
from netweight_experiments.tables.nemo.setup import (
    ATTENTION,
    EMBEDDING,
    NONE,
    PRUNING,
    Setup,
    Way,
    neurons_of,
    off,
    random_off,
    searched,
    status_notes,
    threshold_of,
    tokens,
    union,
    whole,
)
from netweight_experiments.tables.registry import Column, Measured
from netweight_experiments.tables.setups import setup_table

_NEMO, _MATCHED, _BEFORE = "NeMo's neurons off", "random neurons off, layer-matched", "no mitigation"
_BROKEN, _KEPT = 0.3, 0.9
_DRAW = 0
_NOT_READ = "The numbers of the paper's table are not at hand, so nothing is laid beside these."


@setup_table("nemo-table1")
def table1(setup: Setup, folder: Path) -> Measured:
    """Generate memorized and ordinary prompts under every mitigation, and search the edited model."""
    found = neurons_of(setup, folder)
    lines, notes = _lines(setup, found)
    images = images_of_lines(setup, folder, lines, spared=True)
    edits = {prompt: off(each.neurons) for prompt, each in searched(found).items()}
    searches = attacked(setup, folder, edits)
    shown = [line for line in images.lines if line.title in (_BEFORE, _NEMO, _MATCHED)]
    return images.grid(
        differs=(*setup.differs, *_differs()),
        findings=(*_outcomes(images), *attack_findings(searches, setup), *_copied(images)),
        figures=(image_figure(images, shown, searches, found),),
        tables=(seeds_table(images),),
        notes=(_NOT_READ, *_reading(setup), *notes, *status_notes(found)),
    )


@setup_table("nemo-ablation")
def ablation(setup: Setup, folder: Path) -> Measured:
    """Generate with parts of the method left out or exchanged, and with whole layers switched off."""
    found = neurons_of(setup, folder)
    lines = [
        Line(_BEFORE, dict.fromkeys(setup.prompts, NONE)),
        _own_neurons(_NEMO, found),
        Line("initial selection off, not refined", _initial(found)),
        *(_own_neurons(title, again) for title, again in _variants(setup, folder).items()),
        Line("all neurons off", dict.fromkeys(setup.prompts, whole(setup))),
        *(
            Line(f"all neurons of layer {number} off", dict.fromkeys(setup.prompts, whole(setup, layer)))
            for number, layer in enumerate(value_layers(setup.model.denoiser))
        ),
    ]
    images = images_of_lines(setup, folder, lines, spared=True)
    return images.grid(
        differs=setup.differs,
        tables=(seeds_table(images),),
        notes=(
            _NOT_READ,
            *_reading(setup),
            "Layers are numbered from the entrance: those of the down blocks, then of the middle block. With fewer "
            "seeds, or at the second timestep, the threshold is calibrated anew.",
            *status_notes(found),
        ),
    )


def _lines(setup: Setup, found: Mapping[str, Localization]) -> tuple[list[Line], list[str]]:
    """The rows of table 1, and notes on prompts that a row could not be measured for."""
    every = setup.prompts
    lines = [
        Line(_BEFORE, dict.fromkeys(every, NONE)),
        Line("all neurons off", dict.fromkeys(every, whole(setup))),
        dataclasses.replace(_own_neurons(_NEMO, found), others=True),
    ]
    notes = []
    for title, matched in (("random neurons off, equal count", False), (_MATCHED, True)):
        drawn = {
            prompt: random_off(setup, each.neurons, layer_matched=matched, seed=_DRAW)
            for prompt, each in searched(found).items()
        }
        lines.append(Line(title, {prompt: way for prompt, way in drawn.items() if way is not None}, others=True))
        few = [prompt for prompt, way in drawn.items() if way is None]
        if few:
            notes.append(f"{title}: not for {'; '.join(few)}, as there are not so many other neurons.")
    lines += [
        Line("embedding adjustment", dict.fromkeys(every, EMBEDDING)),
        Line("attention scaling", dict.fromkeys(every, ATTENTION)),
        *(
            Line(f"{count} random token{'s' * (count > 1)}", dict.fromkeys(every, tokens(count)))
            for count in (1, 4, 10)
        ),
        Line("weight pruning", dict.fromkeys(every, PRUNING), others=True),
    ]
    return [line for line in lines if line.ways], notes


def _own_neurons(title: str, found: Mapping[str, Localization]) -> Line:
    """Each prompt with its own neurons off; one that was not taken for memorized keeps all of them."""
    return Line(title, {prompt: off(each.neurons) for prompt, each in found.items() if each.status != "failed"})


def _initial(found: Mapping[str, Localization]) -> dict[str, Way]:
    return {prompt: off(Units(each.initial)) for prompt, each in searched(found).items()}


def _variants(setup: Setup, folder: Path) -> dict[str, dict[str, Localization]]:
    """Neurons found otherwise, by what is different."""
    fewer = setup.detection.seeds[: max(2, len(setup.detection.seeds) // 2)]
    late = dataclasses.replace(setup, detection=setup.detection.replace(timing="code"))
    few = dataclasses.replace(setup, detection=setup.detection.replace(seeds=fewer))
    reference = LocalizationConfig(detection=setup.detection, fidelity="reference")
    return {
        "found as the released code does": neurons_of(setup, folder, reference, threshold=threshold_of(setup, folder)),
        "found at the second timestep": neurons_of(late, folder),
        f"found with {len(fewer)} seeds": neurons_of(few, folder),
    }


def _outcomes(images: Lines) -> list[Finding]:
    """How many verbatim images neurons break and random ones leave; targets hold for the whole miniature."""
    findings = []
    lines = {line.title: line for line in images.lines}
    wanted = images.setup.small and images.setup.whole
    for title, limit, words in ((_NEMO, _BROKEN, "broken"), (_MATCHED, _KEPT, "left as they are")):
        own = images.own(lines[title], "verbatim") if title in lines else {}
        each = {prompt: median(copies(found).to_image) for prompt, found in own.items()}
        if each:
            count = sum(value <= limit if title == _NEMO else value >= limit for value in each.values())
            findings.append(
                Finding(
                    f"{title}: verbatim images {words}, by a median similarity of {limit:g}",
                    count,
                    n=len(each),
                    better="higher",
                    target=len(each) - 1 if wanted else None,
                    seeds=tuple(range(images.setup.images)),
                    detail={"median similarity": each},
                )
            )
    return findings


def _copied(images: Lines) -> list[Finding]:
    """Medians and shares with intervals, without a mitigation and with NeMo's neurons off."""
    found = []
    for line in images.lines:
        if line.title in (_BEFORE, _NEMO):
            rows = [copies(each) for each in images.own(line).values()]
            found += copy_findings(rows, measure=f"{line.title}: {images.setup.measure}")
    return found


def _reading(setup: Setup) -> Sequence[str]:
    return (
        f"Medians over prompts of medians over {setup.images} seeds, with the median absolute deviation over prompts; "
        "between seeds lower is more diverse. A copy is an image with a similarity of 0.7 or more; an image may copy "
        "another memorized picture than its own.",
    )


def _differs() -> Sequence[str]:
    return (
        "Embedding adjustment takes all of its 10 iterations, as a target norm would have to be calibrated; attention "
        "scaling and pruning have their published settings, and none was searched for. One draw of random neurons and "
        "of tokens for each prompt.",
    )


_POINTS = 8
_OWN = "NeMo's neurons"
_BESIDE: tuple[Literal["ordinary"], Literal["others"]] = ("ordinary", "others")
_FACTORS = (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0)


@setup_table("nemo-fig6")
def figure6(setup: Setup, folder: Path) -> Measured:
    """Add up the edits of more and more prompts, and as many random neurons, and generate ordinary prompts."""
    found = neurons_of(setup, folder)
    looked = list(searched(found).values())
    counts = sorted({round(point * len(looked) / _POINTS) for point in range(_POINTS + 1)})
    unions = {count: union(looked[:count]) for count in counts}
    edits = {count: off(units) if count else NONE for count, units in unions.items()}
    drawn = {
        count: random_off(setup, units, layer_matched=False, seed=_DRAW) if count else NONE
        for count, units in unions.items()
    }
    ways = [way for way in (*edits.values(), *drawn.values()) if way is not None]
    runs = generate_images(setup, folder, [images_run(setup, way, on) for on in _BESIDE for way in ways])

    def part(way: Way) -> Part:
        ordinary, others = (runs[images_run(setup, way, on)] for on in _BESIDE)
        return Part((way,), (), (ordinary,), (others,))

    def distance(name: str) -> Cell[Part]:
        return Column(name, "", "lower"), lambda part: part.ordinary[0]["distances"].get(name)

    distances = sorted({name for run, value in runs.items() if run.on == "ordinary" for name in value["distances"]})
    cells = [*spared_cells(setup, "memorized prompts"), *(distance(name) for name in distances)]
    sets: dict[str, Mapping[int, Way | None]] = {_OWN: edits, "random neurons": drawn}
    found_parts = {
        title: {count: part(way) for count, way in each.items() if way is not None} for title, each in sets.items()
    }
    rows = {
        f"{title}{', equal count' * (title != _OWN)}, {count} prompts edited": (len(unions[count]), each)
        for title, parts in found_parts.items()
        for count, each in parts.items()
    }
    left = [str(count) for count, way in drawn.items() if way is None]
    few = [f"No random neurons for {', '.join(left)} edited prompts: there are not so many others."] if left else []
    return grid(
        rows,
        [
            (Column("neurons off", "neurons"), lambda row: row[0]),
            *((column, lambda row, value=value: value(row[1])) for column, value in cells),
        ],
        differs=setup.differs,
        figures=_drawn_quality(cells, {count: len(units) for count, units in unions.items()}, found_parts),
        notes=(
            "Edits add up in the prompts' order. The numbers of the paper's figure are not at hand.",
            "Memorized prompts are up to 12 of them, edited or not, two images each.",
            *few,
            *status_notes(found),
        ),
    )


def _drawn_quality(
    cells: Sequence[Cell[Part]], counts: Mapping[int, int], parts: Mapping[str, Mapping[int, Part]]
) -> tuple[Figure, ...]:
    figures = []
    for column, value in cells:
        series = {}
        for title, each in parts.items():
            points = {counts[count]: found for count, part in each.items() if (found := value(part)) is not None}
            if points:
                series[title] = (list(points), list(points.values()))
        if series:
            figures.append(
                lines(
                    series,
                    alt=f"{column.name} against the number of neurons off, NeMo's and random ones.",
                    caption=f"{column.name}, by the number of neurons off as edits add up.",
                    xlabel="neurons off",
                    ylabel=column.name.rpartition(": ")[2] + (f", {column.unit}" if column.unit == "%" else ""),
                )
            )
    return tuple(figures)


@setup_table("nemo-fig7")
def figure7(setup: Setup, folder: Path) -> Measured:
    """Multiply each prompt's neurons by a factor instead of switching them off."""
    found = neurons_of(setup, folder)
    looked = searched(found)
    lines = [
        Line(
            f"factor {factor:g}",
            {prompt: NONE if factor == 1 else off(each.neurons, factor) for prompt, each in looked.items()},
        )
        for factor in _FACTORS
    ]
    images = images_of_lines(setup, folder, lines, spared=False)
    return images.grid(
        differs=setup.differs,
        figures=(_drawn_factors(images),),
        notes=(
            "A factor of 0 switches neurons off, 1 leaves them; below 0 their sign is turned. The numbers of the "
            "paper's figure are not at hand.",
            *status_notes(found),
        ),
    )


def _drawn_factors(images: Lines) -> Figure:
    series: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    bands: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    words = []
    for kind in KINDS:
        groups = [[copies(value) for value in images.own(line, kind).values()] for line in images.lines]
        if not groups[0]:
            continue
        found = [middle([median(row.to_image) for row in rows]) for rows in groups]
        middles = [(float(center or 0.0), float(spread or 0.0)) for center, spread in found]
        series[kind] = (_FACTORS, [center for center, _ in middles])
        bands[kind] = ([center - spread for center, spread in middles], [center + spread for center, spread in middles])
        shares = [percent(sum(r.copies() for r in rows), sum(len(r.to_image) for r in rows)) for rows in groups]
        words.append(f"{kind}: {' '.join(f'{share:.0f}' for share in shares)} % of images copy")
    name = f"{images.setup.measure} to the training image"
    return lines(
        series,
        alt=f"{name} against the factor that neurons are scaled by. {'; '.join(words)}.",
        caption=f"{name} by the factor, median and median absolute deviation over prompts. "
        f"By rising factor, {'; '.join(words)}.",
        xlabel="factor of the neurons",
        ylabel=name,
        bands=bands,
    )
