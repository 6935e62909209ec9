"""The depth of a defense in a report: findings with intervals, pictures, and tables of every number drawn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from netweight.errors import UsageError
from netweight.methods.immunize.depth_figures import distance_figure, lens_figure, plane_figure, probe_figure
from netweight.methods.immunize.insight import KINDS, Insight, Look
from netweight.metrics.intervals import t_interval
from netweight.report.finding import Column, Finding, Table
from netweight.report.report import Report

__all__ = ["TITLE", "add_depth_section"]

TITLE = "Depth of the defense"
"""Heading of the section."""

_INTRO = (
    "How deep a defense goes decides how much an attacker has to undo. Weights: how far each block moved. Lens: the "
    "loss on answers if the model ended at a depth, through its own final norm and unembedding. Probes: whether a "
    "logistic regression still tells representations of harmful from those of harmless answers; it is trained and "
    "tested on different pairs. None of this says how long the model resists; attacks do."
)


def add_depth_section(report: Report, insight: Insight, *, seen: bool, title: str = TITLE) -> list[Finding]:
    """Add what a defense did inside of a model.

    Args:
        report: The report.
        insight: The model before and after.
        seen: Whether the defense was trained on the pairs that were looked at.
        title: Heading of the section.

    Returns:
        The findings; none has a target.

    Raises:
        UsageError: The two looks are not at the same pairs and depths.
        MissingExtra: scipy or matplotlib is not installed.
    """
    before, after = insight.before, insight.after
    depths = len(before.states[KINDS[0]])
    if (depths, before.pairs) != (len(after.states[KINDS[0]]), after.pairs):
        raise UsageError("The two looks are at different pairs or models.", cure="Look at the same pairs twice.")
    findings = [_weights(insight), *(_lens(before, after, kind) for kind in KINDS), _probes(before, after)]
    middle = (depths - 1) // 2
    report.section(
        title,
        findings,
        figures=[
            distance_figure({"after the defense": insight.changes}),
            lens_figure(before, after),
            probe_figure(before, after),
            plane_figure(before, after, sorted({middle, depths - 1})),
        ],
        tables=[_layers(insight), _depths(before, after)],
        intro=f"{_INTRO}\n\nLooked at: {before.pairs} pairs "
        f"{'that the defense was trained on' if seen else 'that were kept from this defense'}.",
        question="How deep does the defense go?",
        conclusion=_conclusion(findings),
    )
    return findings


def _weights(insight: Insight) -> Finding:
    moved = [change.relative for change in insight.changes if change.block is not None]
    half = len(moved) // 2
    halves = [statistics.fmean(part) if part else 0.0 for part in (moved[:half], moved[len(moved) - half :])]
    return Finding(
        "change of the weights, first half of the blocks by second",
        halves[0] / halves[1] if halves[1] else None,
        unit="×",
        detail={
            "mean change relative to the weights' norm": dict(zip(("first half", "second half"), halves, strict=True)),
            "note": "1 is uniform; near 0, the defense sits in the last blocks alone",
            **({} if halves[1] else {"reason": "the second half did not move" if half else "there is one block"}),
        },
    )


def _lens(before: Look, after: Look, kind: str) -> Finding:
    means = [[statistics.fmean(batch) for batch in look.lens[kind]] for look in (before, after)]
    return Finding(
        f"lens loss on {kind} answers, mean over depths",
        statistics.fmean(means[1]),
        ci95=t_interval(means[1]).ci95 if len(means[1]) > 1 else None,
        n=len(means[1]),
        unit="nats/token",
        baseline=statistics.fmean(means[0]),
        detail={"note": "n counts batches of eight pairs; the baseline is the model before its defense"},
    )


def _probes(before: Look, after: Look) -> Finding:
    """Mean accuracy over depths, one value per split."""
    means = [[statistics.fmean(split) for split in zip(*look.probes, strict=True)] for look in (before, after)]
    gap = t_interval([a - b for b, a in zip(*means, strict=True)])
    return Finding(
        "linear probes, harmful from harmless answers, mean over depths",
        statistics.fmean(means[1]),
        ci95=t_interval(means[1]).ci95,
        n=len(means[1]),
        unit="accuracy",
        baseline=statistics.fmean(means[0]),
        detail={
            "after less before, same splits": [gap.estimate, gap.low, gap.high],
            "note": "n counts random splits of the same pairs, which overlap: the interval is of the split alone",
        },
    )


def _conclusion(findings: Sequence[Finding]) -> str:
    weights, harmful, _, probes = findings
    where = "" if weights.value is None else f"The first half of the blocks moved {weights.value:.2f} times as far as "
    where += "the second. " if where else ""
    return (
        f"{where}The lens loss on harmful answers went from {harmful.baseline:.3g} to {harmful.value:.3g} nats per "
        f"token, mean over depths; probes from {probes.baseline:.2f} to {probes.value:.2f}."
    )


def _layers(insight: Insight) -> Table:
    rows = [(change.layer, change.distance, 100 * change.relative) for change in insight.changes]
    return Table("Change of weights by layer", ("layer", Column("L2 distance"), Column("relative", "%")), rows)


def _depths(before: Look, after: Look) -> Table:
    columns: list[Column | str] = ["depth"]
    columns += [Column(f"{kind}, {when}", "nats/token") for kind in KINDS for when in ("before", "after")]
    columns += [Column(f"probe, {when}", "accuracy") for when in ("before", "after")]
    lens = [
        [statistics.fmean(batch) for batch in zip(*look.lens[kind], strict=True)]
        for kind in KINDS
        for look in (before, after)
    ]
    found = [[statistics.fmean(splits) for splits in look.probes] for look in (before, after)]
    rows = [(depth, *values) for depth, values in enumerate(zip(*lens, *found, strict=True))]
    return Table("Lens and probes by depth", columns, rows, ("Depth 0 is the embedding, then after each block.",))
