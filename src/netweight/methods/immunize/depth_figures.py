"""Figures of the depth of a defense: weights, lens losses, probes, and representations in a plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from netweight.methods.immunize.layers import KINDS, LayerAnalysis, WeightChange
from netweight.methods.immunize.plane import PrincipalPlane
from netweight.report.finding import Figure
from netweight.report.plots import canvas, series_color, to_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


_DASHES = ("-", "--", "-.", ":")


_MARKS = {"harmful": "o", "harmless": "D"}


_DEPTH = "depth: 0 is the embedding, then after each block"


def distance_figure(changes: Mapping[str, Sequence[WeightChange]]) -> Figure:
    """Draw how far the blocks' weights moved: the distance of each, and relative to the size of its weights."""
    blocks = {name: [change for change in layers if change.block is not None] for name, layers in changes.items()}
    most = {name: max(layers, key=lambda change: change.relative) for name, layers in blocks.items() if layers}
    sentences = {name: f"most in block {change.block}, by {change.relative:.1%}" for name, change in most.items()}
    words = "; ".join(sentences[name] if len(sentences) == 1 else f"{name} {sentences[name]}" for name in sentences)
    with canvas(2) as (drawing, axes):
        for place, (name, layers) in enumerate(blocks.items()):
            x = [change.block or 0 for change in layers]
            for panel, values in zip(
                axes, ([c.distance for c in layers], [100 * c.relative for c in layers]), strict=True
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
            for place, (name, analysis) in enumerate((("before", before), ("after", after))):
                batches = torch.tensor(analysis.lens[kind], dtype=torch.float64)
                _line(panel, range(batches.shape[1]), batches.mean(0).tolist(), name, place)
            _dress(panel, "depth", "nats per token")
            panel.set_title(f"{kind} answers")
        _legend(axes[0], drawing)
        ends = [torch.tensor(analysis.lens["harmful"], dtype=torch.float64).mean(0) for analysis in (before, after)]
        words = f"mean over depths on harmful answers: {ends[0].mean():.1f} before, {ends[1].mean():.1f} after"
        return to_figure(
            drawing,
            alt=f"Loss on answers through the final norm and the unembedding at each depth; {words}.",
            caption=f"Loss on answers if the model ended at a depth ({_DEPTH}); {words}. A guess has "
            f"{torch.tensor(float(before.vocabulary)).log():.1f}.",
        )


def probe_figure(before: LayerAnalysis, after: LayerAnalysis) -> Figure:
    """Draw how well a linear probe separates harmful from harmless answers, by depth, with the spread over splits."""
    with canvas(1) as (drawing, (axes,)):
        words = []
        for place, (name, analysis) in enumerate((("before", before), ("after", after))):
            table = torch.tensor(analysis.probes, dtype=torch.float64)
            _line(axes, range(len(table)), table.mean(1).tolist(), name, place)
            low, high = table.min(1).values.tolist(), table.max(1).values.tolist()
            axes.fill_between(range(len(table)), low, high, color=series_color(place), alpha=0.18, linewidth=0)
            words.append(f"{name} {table.mean():.2f}")
        _dress(axes, _DEPTH, "accuracy")
        worst = min(min(splits) for analysis in (before, after) for splits in analysis.probes)
        axes.set_ylim(min(0.45, worst - 0.05), 1.02)
        _legend(axes, drawing)
        summary = f"mean over depths: {', '.join(words)}"
        return to_figure(
            drawing,
            alt=f"Accuracy of linear probes that separate harmful from harmless answers; {summary}.",
            caption=f"Linear probes on mean representations of answers; bands reach from the worst to the best split; "
            f"0.5 is chance; {summary}.",
        )


def plane_figure(before: LayerAnalysis, after: LayerAnalysis, depths: Sequence[int]) -> Figure:
    """Draw representations of answers before and after, in the plane in which they differed most before."""
    with canvas(2 * len(depths), height=2.5 * len(depths), across=2) as (drawing, axes):
        for row, depth in enumerate(depths):
            plane = PrincipalPlane.fit(_both(before, depth))
            for panel, (name, analysis) in zip(axes[2 * row :], (("before", before), ("after", after)), strict=False):
                for place, kind in enumerate(KINDS):
                    x, y = plane.place(analysis.states[kind][depth]).T.tolist()
                    panel.scatter(x, y, s=9, marker=_MARKS[kind], color=series_color(place), alpha=0.6, label=kind)
                share = _share(plane, _both(analysis, depth))
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
            "defense. The plane does not show the rest of the variance. Scales differ between pictures.",
        )


def _both(analysis: LayerAnalysis, depth: int) -> Tensor:
    return torch.cat([analysis.states[kind][depth] for kind in KINDS])


def _share(plane: PrincipalPlane, points: Tensor) -> float:
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
