"""The section on the depth of a defense, in the report of a defended folder."""

from __future__ import annotations

import statistics

from netweight.errors import UsageError
from netweight.methods.immunize.depth_figures import distance_figure, lens_figure, plane_figure, probe_figure
from netweight.methods.immunize.layers import KINDS, DepthAnalysis, LayerAnalysis
from netweight.metrics.intervals import t_interval
from netweight.report.finding import Column, Finding, Section, Table
from netweight.report.text import Conclusion, HasValue, Words

# Heading of the section.
TITLE = "Depth of the defense"


_INTRO = (
    "The depth of a defense decides how much an attacker has to undo. Weights: how far each block moved. Lens: the "
    "loss on answers if the model ended at a depth, through its own final norm and unembedding. Probes: whether a "
    "logistic regression still separates the representations of harmful answers from those of harmless ones; it "
    "is trained and "
    "tested on different pairs. None of this measures how long the model resists; attacks measure that."
)


def depth_section(analysis: DepthAnalysis, *, seen: bool) -> Section:
    """Return what a defense did inside of a model; `seen` says whether it was trained on the pairs."""
    before, after = analysis.before, analysis.after
    depths = len(before.states[KINDS[0]])
    if (depths, before.pairs) != (len(after.states[KINDS[0]]), after.pairs):
        raise UsageError("The two analyses are of different pairs or models.", cure="Analyze the same pairs twice.")
    findings = [_weights(analysis), *(_lens(before, after, kind) for kind in KINDS), _probes(before, after)]
    halves, harmful, _, probes = findings
    facts = {
        "halves": f"{halves.value or 0:.2f}",
        "lens": f"from {harmful.baseline:.3g} to {harmful.value:.3g}",
        "probes": f"from {probes.baseline:.2f} to {probes.value:.2f}",
    }
    middle = (depths - 1) // 2
    return Section(
        TITLE,
        findings,
        figures=[
            distance_figure({"after the defense": analysis.changes}),
            lens_figure(before, after),
            probe_figure(before, after),
            plane_figure(before, after, sorted({middle, depths - 1})),
        ],
        tables=[_layers(analysis), _depths(before, after)],
        intro=f"{_INTRO}\n\nMeasured on {before.pairs} pairs "
        f"{'that the defense was trained on' if seen else 'that were kept from this defense'}.",
        question="How deep does the defense go?",
        conclusion=_CONCLUSION(findings, **facts)[1],
    )


def _weights(analysis: DepthAnalysis) -> Finding:
    moved = [change.relative for change in analysis.changes if change.block is not None]
    half = len(moved) // 2
    halves = [statistics.fmean(part) if part else 0.0 for part in (moved[:half], moved[len(moved) - half :])]
    return Finding(
        _HALVES,
        halves[0] / halves[1] if halves[1] else None,
        unit="×",
        detail={
            "mean change relative to the weights' norm": dict(zip(("first half", "second half"), halves, strict=True)),
            "note": "1 is uniform; near 0, the defense changed only the last blocks",
            **({} if halves[1] else {"reason": "the second half did not move" if half else "there is one block"}),
        },
    )


def _lens(before: LayerAnalysis, after: LayerAnalysis, kind: str) -> Finding:
    means = [[statistics.fmean(batch) for batch in analysis.lens[kind]] for analysis in (before, after)]
    return Finding(
        f"lens loss on {kind} answers, mean over depths",
        statistics.fmean(means[1]),
        ci95=t_interval(means[1]).ci95 if len(means[1]) > 1 else None,
        n=len(means[1]),
        unit="nats/token",
        baseline=statistics.fmean(means[0]),
        detail={"note": "n counts batches of eight pairs; the baseline is the model before its defense"},
    )


def _probes(before: LayerAnalysis, after: LayerAnalysis) -> Finding:
    """Mean accuracy over depths, one value per split."""
    means = [[statistics.fmean(split) for split in zip(*analysis.probes, strict=True)] for analysis in (before, after)]
    gap = t_interval([a - b for b, a in zip(*means, strict=True)])
    return Finding(
        "linear probes, harmful from harmless answers, mean over depths",
        statistics.fmean(means[1]),
        ci95=t_interval(means[1]).ci95,
        n=len(means[1]),
        unit="accuracy",
        baseline=statistics.fmean(means[0]),
        detail={
            "difference after − before, same splits": [gap.estimate, gap.low, gap.high],
            "note": "n counts random splits of the same pairs, which overlap: the interval is of the split alone",
        },
    )


def _words(moved: bool, *, halves: str, lens: str, probes: str) -> Words:
    where = (
        f"The weights of the first half of the blocks changed {halves} times as much as those of the second half. "
        if moved
        else ""
    )
    return "told", (
        f"{where}The lens loss on harmful answers went {lens} nats per token, mean over depths; probes {probes}."
    )


_HALVES = "change of the weights, first half of the blocks by second"


_CONCLUSION = Conclusion("immunize: depth", [HasValue(_HALVES)], _words)


def _layers(analysis: DepthAnalysis) -> Table:
    rows = [(change.layer, change.distance, 100 * change.relative) for change in analysis.changes]
    return Table("Change of weights by layer", ("layer", Column("L2 distance"), Column("relative change", "%")), rows)


def _depths(before: LayerAnalysis, after: LayerAnalysis) -> Table:
    columns: list[Column | str] = ["depth"]
    columns += [Column(f"{kind}, {when}", "nats/token") for kind in KINDS for when in ("before", "after")]
    columns += [Column(f"probe, {when}", "accuracy") for when in ("before", "after")]
    lens = [
        [statistics.fmean(batch) for batch in zip(*analysis.lens[kind], strict=True)]
        for kind in KINDS
        for analysis in (before, after)
    ]
    accuracies = [[statistics.fmean(splits) for splits in analysis.probes] for analysis in (before, after)]
    rows = [(depth, *values) for depth, values in enumerate(zip(*lens, *accuracies, strict=True))]
    return Table("Lens and probes by depth", columns, rows, ("Depth 0 is the embedding, then after each block.",))
