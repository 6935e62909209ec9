"""Pictures of how deep a defense goes: weights, lens and probes by layer, and planes of representations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.methods.immunize.layer_metrics import KINDS, DepthAnalysis, LayerAnalysis, LayerChange, Plane
from netweight.metrics.intervals import t_interval
from netweight.report.conclusions import Conclusion, Measured, Words
from netweight.report.finding import Column, Figure, Finding, Section, Table
from netweight.report.plots import canvas, series_color, to_figure
from netweight.report.report import read_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


Lines = Mapping[str, Sequence[float]]
_DASHES = ("-", "--", "-.", ":")
_MARKS = {"harmful": "o", "harmless": "D"}
_DEPTH = "depth: 0 is the embedding, then after each block"


def distance_figure(changes: Mapping[str, Sequence[LayerChange]]) -> Figure:
    """Draw how far the blocks' weights moved: the distance of each, and relative to the size of its weights."""
    blocks = {name: [change for change in found if change.block is not None] for name, found in changes.items()}
    most = {name: max(found, key=lambda change: change.relative) for name, found in blocks.items() if found}
    told = {name: f"most in block {change.block}, by {change.relative:.1%}" for name, change in most.items()}
    words = "; ".join(told[name] if len(told) == 1 else f"{name} {told[name]}" for name in told)
    with canvas(2) as (drawing, axes):
        for place, (name, found) in enumerate(blocks.items()):
            x = [change.block or 0 for change in found]
            for panel, values in zip(
                axes, ([c.distance for c in found], [100 * c.relative for c in found]), strict=True
            ):
                _line(panel, x, values, name, place)
        _dress(axes[0], "block", "L2 distance")
        _dress(axes[1], "block", "of the weights' norm, %")
        if len(blocks) > 1:
            _legend(axes[0], drawing)
        return to_figure(
            drawing,
            alt=f"How far the weights of each block moved: {words}.",
            caption=f"How far the weights of each block moved, and relative to their own norm: {words}.",
        )


def lens_figure(before: LayerAnalysis, after: LayerAnalysis) -> Figure:
    """Draw the loss on answers if the model ended at each depth."""
    with canvas(2) as (drawing, axes):
        for panel, kind in zip(axes, KINDS, strict=True):
            for place, (name, look) in enumerate((("before", before), ("after", after))):
                batches = torch.tensor(look.lens[kind], dtype=torch.float64)
                _line(panel, range(batches.shape[1]), batches.mean(0).tolist(), name, place)
            _dress(panel, "depth", "nats per token")
            panel.set_title(f"{kind} answers")
        _legend(axes[0], drawing)
        ends = [torch.tensor(look.lens["harmful"], dtype=torch.float64).mean(0) for look in (before, after)]
        words = f"mean over depths on harmful answers: {ends[0].mean():.1f} before, {ends[1].mean():.1f} after"
        return to_figure(
            drawing,
            alt=f"Loss on answers through the final norm and the unembedding at each depth; {words}.",
            caption=f"Loss on answers if the model ended at a depth ({_DEPTH}); {words}. A guess has "
            f"{torch.tensor(float(before.vocabulary)).log():.1f}.",
        )


def probe_figure(before: LayerAnalysis, after: LayerAnalysis) -> Figure:
    """Draw how well a linear probe tells harmful from harmless answers, by depth, with the spread over splits."""
    with canvas(1) as (drawing, (axes,)):
        words = []
        for place, (name, look) in enumerate((("before", before), ("after", after))):
            table = torch.tensor(look.probes, dtype=torch.float64)
            _line(axes, range(len(table)), table.mean(1).tolist(), name, place)
            low, high = table.min(1).values.tolist(), table.max(1).values.tolist()
            axes.fill_between(range(len(table)), low, high, color=series_color(place), alpha=0.18, linewidth=0)
            words.append(f"{name} {table.mean():.2f}")
        _dress(axes, _DEPTH, "accuracy")
        worst = min(min(splits) for look in (before, after) for splits in look.probes)
        axes.set_ylim(min(0.45, worst - 0.05), 1.02)
        _legend(axes, drawing)
        told = f"mean over depths: {', '.join(words)}"
        return to_figure(
            drawing,
            alt=f"Accuracy of linear probes that tell harmful from harmless answers; {told}.",
            caption=f"Linear probes on mean representations of answers; bands reach from the worst to the best split; "
            f"0.5 is chance; {told}.",
        )


def plane_figure(before: LayerAnalysis, after: LayerAnalysis, depths: Sequence[int]) -> Figure:
    """Draw representations of answers before and after, in the plane in which they differed most before."""
    with canvas(2 * len(depths), height=2.5 * len(depths), across=2) as (drawing, axes):
        for row, depth in enumerate(depths):
            plane = Plane.fit(_both(before, depth))
            for panel, (name, look) in zip(axes[2 * row :], (("before", before), ("after", after)), strict=False):
                for place, kind in enumerate(KINDS):
                    x, y = plane.place(look.states[kind][depth]).T.tolist()
                    panel.scatter(x, y, s=9, marker=_MARKS[kind], color=series_color(place), alpha=0.6, label=kind)
                share = _share(plane, _both(look, depth))
                panel.set_title(f"depth {depth}, {name}: {share:.0%} of the variance")
                panel.tick_params(length=3)
                panel.locator_params(nbins=5)
                panel.margins(0.08)
        _legend(axes[0], drawing)
        return to_figure(
            drawing,
            alt="Mean representations of harmful and harmless answers, before and after the defense, in the plane of "
            "the first two principal components before.",
            caption="Mean representations of answers in the plane of the first two principal components before the "
            "defense. What of the variance a plane does not hold is not seen in it. Scales differ between pictures.",
        )


def _both(look: LayerAnalysis, depth: int) -> Tensor:
    return torch.cat([look.states[kind][depth] for kind in KINDS])


def _share(plane: Plane, points: Tensor) -> float:
    """Share of the variance of points that a plane holds; 0 if they do not vary."""
    whole = float(points.double().var(0, correction=0).sum())
    return float(plane.place(points).var(0, correction=0).sum()) / whole if whole else 0.0


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, place: int) -> None:
    axes.plot(
        x, y, _DASHES[place % 4], color=series_color(place), label=name, linewidth=1.8,
        marker="o" if len(x) <= 12 else None, markersize=3.5,
    )  # fmt: skip


def _dress(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.grid(axis="y")
    axes.tick_params(length=3)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))


def _legend(axes: Axes, drawing: Canvas) -> None:
    """Name the lines above the whole picture, where no panel is covered."""
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=8.5)


# Heading of the section.
TITLE = "Depth of the defense"

_INTRO = (
    "How deep a defense goes decides how much an attacker has to undo. Weights: how far each block moved. Lens: the "
    "loss on answers if the model ended at a depth, through its own final norm and unembedding. Probes: whether a "
    "logistic regression still tells representations of harmful from those of harmless answers; it is trained and "
    "tested on different pairs. None of this says how long the model resists; attacks do."
)


def depth_section(analysis: DepthAnalysis, *, seen: bool, title: str = TITLE) -> Section:
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
        title,
        findings,
        figures=[
            distance_figure({"after the defense": analysis.changes}),
            lens_figure(before, after),
            probe_figure(before, after),
            plane_figure(before, after, sorted({middle, depths - 1})),
        ],
        tables=[_layers(analysis), _depths(before, after)],
        intro=f"{_INTRO}\n\nLooked at: {before.pairs} pairs "
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
            "note": "1 is uniform; near 0, the defense sits in the last blocks alone",
            **({} if halves[1] else {"reason": "the second half did not move" if half else "there is one block"}),
        },
    )


def _lens(before: LayerAnalysis, after: LayerAnalysis, kind: str) -> Finding:
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


def _probes(before: LayerAnalysis, after: LayerAnalysis) -> Finding:
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


def _words(moved: bool, *, halves: str, lens: str, probes: str) -> Words:
    where = f"The first half of the blocks moved {halves} times as far as the second. " if moved else ""
    return "told", (
        f"{where}The lens loss on harmful answers went {lens} nats per token, mean over depths; probes {probes}."
    )


_HALVES = "change of the weights, first half of the blocks by second"
_CONCLUSION = Conclusion("immunize: depth", [Measured(_HALVES)], _words)


def _layers(analysis: DepthAnalysis) -> Table:
    rows = [(change.layer, change.distance, 100 * change.relative) for change in analysis.changes]
    return Table("Change of weights by layer", ("layer", Column("L2 distance"), Column("relative", "%")), rows)


def _depths(before: LayerAnalysis, after: LayerAnalysis) -> Table:
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


TREATMENT = "immunize"
# Names of the audits.
DEPTH, ATTACKED = "depth", "fine-tuning attack"
# The folder in a defended model's folder that holds the report of its making.
REPORT = "immunize-report"


def depth_audit(run: tuple[Path, Path], settings: object, *, seed: int, progress: Progress) -> Section:
    """Return what was found inside of a defended model, as its folder keeps it."""
    for section in read_report(run[0] / REPORT).sections:
        if section.title == TITLE:
            return section
    return Section(TITLE, [Finding(DEPTH, None, detail={"reason": "the layers were not analyzed when it was made"})])
