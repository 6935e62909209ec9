"""NeMo's table 1: memorized and ordinary prompts under every mitigation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from netweight.methods.forget.localize import Localization
from netweight.metrics.copies import copy_findings
from netweight.report.finding import Finding
from netweight_experiments.tables.nemo.images import (
    Line,
    Lines,
    attack_findings,
    attacked,
    copies,
    image_figure,
    images_of_lines,
    seeds_table,
)
from netweight_experiments.tables.nemo.setup import (
    ATTENTION,
    EMBEDDING,
    NONE,
    PRUNING,
    Setup,
    neurons_of,
    off,
    random_off,
    searched,
    status_notes,
    tokens,
    whole,
)
from netweight_experiments.tables.registry import MeasuredTable
from netweight_experiments.tables.setups import setup_table

_NEMO, _MATCHED, _BEFORE = "NeMo's neurons off", "random neurons off, layer-matched", "no mitigation"
_BROKEN, _KEPT = 0.3, 0.9
_DRAW = 0
_NOT_READ = "The numbers of the paper's table are not at hand, so nothing is laid beside these."


@setup_table("nemo-table1")
def table1(setup: Setup, folder: Path) -> MeasuredTable:
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
