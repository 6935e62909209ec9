"""NeMo's table of mitigations and its ablation: what each way of generating repeats, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from netweight.report.finding import Finding
from netweight.reproduce.nemo_attack import attack_findings, attacked
from netweight.reproduce.nemo_ground import Ground, nemo_table
from netweight.reproduce.nemo_neurons import neurons_of, searched, status_notes, threshold_of
from netweight.reproduce.nemo_rows import Line, Painted, copies, painted_lines, seeds_table
from netweight.reproduce.nemo_showing import image_figure
from netweight.reproduce.nemo_ways import ATTENTION, EMBEDDING, NONE, PRUNING, Way, off, random_off, tokens, whole
from netweight.reproduce.registry import Measured

if TYPE_CHECKING:
    from netweight.methods.forget.localize import Localization

__all__ = ["ablation", "table1"]

_NEMO, _MATCHED, _BEFORE = "NeMo's neurons off", "random neurons off, layer-matched", "no mitigation"
_BROKEN, _KEPT = 0.3, 0.9
_DRAW = 0
_NOT_READ = "The numbers of the paper's table are not at hand, so nothing is laid beside these."


@nemo_table("nemo-table1")
def table1(ground: Ground, folder: Path) -> Measured:
    """Paint memorized and ordinary prompts under every mitigation, and search the edited model."""
    found = neurons_of(ground, folder)
    lines, notes = _lines(ground, found)
    painted = painted_lines(ground, folder, lines, spared=True)
    edits = {prompt: off(each.neurons) for prompt, each in searched(found).items()}
    searches = attacked(ground, folder, edits)
    shown = [line for line in painted.lines if line.title in (_BEFORE, _NEMO, _MATCHED)]
    return Measured(
        columns=painted.columns,
        rows=painted.rows(),
        differs=(*ground.differs, *_differs()),
        findings=(
            *_outcomes(painted),
            *attack_findings(searches, ground),
            *_copied(painted),
        ),
        figures=(image_figure(painted, shown, searches, found),),
        tables=(seeds_table(painted),),
        notes=(_NOT_READ, *_reading(ground), *notes, *status_notes(found)),
    )


@nemo_table("nemo-ablation")
def ablation(ground: Ground, folder: Path) -> Measured:
    """Paint with parts of the method left out or exchanged, and with whole layers switched off."""
    found = neurons_of(ground, folder)
    lines = [
        Line(_BEFORE, dict.fromkeys(ground.prompts, NONE)),
        _own_neurons(_NEMO, found),
        Line("initial selection off, not refined", _initial(found)),
        *(_own_neurons(title, again) for title, again in _variants(ground, folder).items()),
        Line("all neurons off", dict.fromkeys(ground.prompts, whole(ground))),
        *(
            Line(f"all neurons of layer {number} off", dict.fromkeys(ground.prompts, whole(ground, layer)))
            for number, layer in enumerate(_layers(ground))
        ),
    ]
    painted = painted_lines(ground, folder, lines, spared=True)
    return Measured(
        columns=painted.columns,
        rows=painted.rows(),
        differs=ground.differs,
        tables=(seeds_table(painted),),
        notes=(
            _NOT_READ,
            *_reading(ground),
            "Layers are numbered from the entrance: those of the down blocks, then of the middle block. With fewer "
            "seeds, or at the second timestep, the threshold is calibrated anew.",
            *status_notes(found),
        ),
    )


def _lines(ground: Ground, found: Mapping[str, Localization]) -> tuple[list[Line], list[str]]:
    """The rows of table 1, and notes on prompts that a row could not be measured for."""
    every = ground.prompts
    lines = [
        Line(_BEFORE, dict.fromkeys(every, NONE)),
        Line("all neurons off", dict.fromkeys(every, whole(ground))),
        dataclasses.replace(_own_neurons(_NEMO, found), others=True),
    ]
    notes = []
    for title, matched in (("random neurons off, equal count", False), (_MATCHED, True)):
        drawn = {
            prompt: random_off(ground, each.neurons, layer_matched=matched, seed=_DRAW)
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
    from netweight.core.units import Units

    return {prompt: off(Units(each.initial)) for prompt, each in searched(found).items()}


def _variants(ground: Ground, folder: Path) -> dict[str, dict[str, Localization]]:
    """Neurons found otherwise, by what is different."""
    from netweight.methods.forget.settings import LocalizationConfig

    fewer = ground.detection.seeds[: max(2, len(ground.detection.seeds) // 2)]
    late = dataclasses.replace(ground, detection=ground.detection.replace(timing="code"))
    few = dataclasses.replace(ground, detection=ground.detection.replace(seeds=fewer))
    reference = LocalizationConfig(detection=ground.detection, fidelity="reference")
    return {
        "found as the released code does": neurons_of(
            ground, folder, reference, threshold=threshold_of(ground, folder)
        ),
        "found at the second timestep": neurons_of(late, folder),
        f"found with {len(fewer)} seeds": neurons_of(few, folder),
    }


def _layers(ground: Ground) -> list[str]:
    from netweight.methods.forget.layers import value_layers

    return list(value_layers(ground.model.denoiser))


def _outcomes(painted: Painted) -> list[Finding]:
    """How many verbatim images neurons break and random ones leave; targets hold for the whole miniature."""
    findings = []
    lines = {line.title: line for line in painted.lines}
    wanted = painted.ground.small and painted.ground.whole
    for title, limit, words in ((_NEMO, _BROKEN, "broken"), (_MATCHED, _KEPT, "left as they are")):
        own = painted.own(lines[title], "verbatim") if title in lines else {}
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
                    seeds=tuple(range(painted.ground.images)),
                    detail={"median similarity": each},
                )
            )
    return findings


def _copied(painted: Painted) -> list[Finding]:
    """Medians and shares with intervals, without a mitigation and with NeMo's neurons off."""
    from netweight.metrics.copies import copy_findings

    found = []
    for line in painted.lines:
        if line.title in (_BEFORE, _NEMO):
            rows = [copies(each) for each in painted.own(line).values()]
            found += copy_findings(rows, measure=f"{line.title}: {painted.ground.measure}")
    return found


def _reading(ground: Ground) -> Sequence[str]:
    return (
        f"Medians over prompts of medians over {ground.images} seeds, with the median absolute deviation over prompts; "
        "between seeds lower is more diverse. A copy is an image with a similarity of 0.7 or more; an image may copy "
        "another memorized picture than its own.",
    )


def _differs() -> Sequence[str]:
    return (
        "Embedding adjustment takes all of its 10 iterations, as a target norm would have to be calibrated; attention "
        "scaling and pruning have their published settings, and none was searched for. One draw of random neurons and "
        "of tokens for each prompt.",
    )
