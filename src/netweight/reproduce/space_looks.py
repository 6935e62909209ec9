"""What the first components of a space look like: histograms of their scores, and images along them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.report.finding import Column, Finding
from netweight.reproduce.registry import Measured, Row
from netweight.reproduce.space_edits import painted
from netweight.reproduce.space_ground import Ground, space_table

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.report.finding import Figure

__all__ = ["histograms", "traversal"]

_COUNTED, _DRAWN, _ALONG = 10, 4, 3
_MOST_TESTED = 5_000  # scipy's test is made for no more
_STEPS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
_END = 2.0  # at which readings are compared
_LEVEL = 0.05


@space_table("w2w-histograms")
def histograms(ground: Ground, folder: Path) -> Measured:
    """Draw how the first coefficients are spread, and measure how near they are to normal ones."""
    stats = _scipy_stats()
    scores = (ground.space.scores / ground.space.deviations.clamp_min(1e-12)).double().numpy()[:, :_COUNTED]
    shares = _shares(ground)
    rows, values = [], []
    for place, column in enumerate(scores.T):
        tested = stats.shapiro(column[:: -(-len(column) // _MOST_TESTED)])
        values.append(float(tested.pvalue))
        numbers = (shares[place], stats.skew(column), stats.kurtosis(column), tested.statistic, tested.pvalue)
        rows.append(Row(f"component {place + 1}", tuple(map(float, numbers))))
    rejected = sum(value < _LEVEL / len(values) for value in values)
    return Measured(
        columns=(
            Column("variance", "share"),
            Column("skewness"),
            Column("excess kurtosis"),
            Column("Shapiro–Wilk's W", "", "higher"),
            Column("p"),
        ),
        rows=tuple(rows),
        differs=ground.differs,
        findings=(
            Finding("components that are not normal, by Shapiro and Wilk's test", rejected, n=len(values),
                    detail={"p": values, "level": _LEVEL / len(values)}),
        ),
        figures=(_histogram(ground, scores[:, :_DRAWN]),),
        notes=(
            "The paper shows histograms; numbers of them are not at hand.",
            f"Of {len(scores)} adapters. The level is {_LEVEL:g} shared among {len(values)} tests; with many adapters "
            "the least departure is found, so look at W: a normal sample's is 1.",
        ),
    )  # fmt: skip


@space_table("w2w-traversal")
def traversal(ground: Ground, folder: Path) -> Measured:
    """Paint the mean model moved along the first components, and read what changes."""
    import torch

    count = min(_ALONG, ground.space.components)
    points = torch.zeros(count, len(_STEPS), ground.space.components)
    for place in range(count):
        points[place, :, place] = torch.tensor(_STEPS) * ground.space.deviations[place]
    images = painted(ground, points.flatten(0, 1))
    images = images.reshape(count, len(_STEPS), *images.shape[1:])
    shares = _shares(ground)
    readings = _readings(ground, images)
    rows = [Row(f"component {place + 1}", (shares[place], *readings[place])) for place in range(count)]
    names = ground.attributes if ground.read is not None else ()
    return Measured(
        columns=(Column("variance", "share"), *(Column(name, "share of range") for name in names)),
        rows=tuple(rows),
        differs=ground.differs,
        findings=tuple(_most(names, readings)),
        figures=(_pictures(images),),
        notes=(
            "The paper shows images; numbers of them are not at hand.",
            f"What an attribute changes from {-_END:g} to {_END:g} standard deviations of the adapters along the "
            f"component, mean over {len(ground.seeds)} images. The sign of a component means nothing.",
        ),
    )


def _scipy_stats() -> Any:
    return importlib.import_module("scipy.stats")


def _shares(ground: Ground) -> list[float]:
    variance = ground.space.deviations.double().square()
    shares: list[float] = (variance / variance.sum() * ground.space.accuracy.captured).tolist()
    return shares


def _histogram(ground: Ground, scores: Any) -> Figure:
    from netweight.report.plots import histogram

    columns = list(scores.T)
    count = len(columns[0])
    normal = _scipy_stats().norm.ppf([(place + 0.5) / count for place in range(count)])
    return histogram(
        {**{f"component {place + 1}": column for place, column in enumerate(columns)}, "normal": normal},
        alt="Histograms of the first coefficients beside that of a normal distribution.",
        caption=f"Coefficients of {count} adapters, in standard deviations; normal: as many quantiles of the normal "
        "distribution.",
        xlabel="standard deviations",
        ylabel="adapters",
    )


def _readings(ground: Ground, images: Tensor) -> list[tuple[float, ...]]:
    """How far each attribute moves from one end to the other, per component."""
    if ground.read is None:
        return [()] * len(images)
    low, high = _STEPS.index(-_END), _STEPS.index(_END)
    moved = [ground.read(each[high]).double().mean(0) - ground.read(each[low]).double().mean(0) for each in images]
    return [tuple((each / 2).tolist()) for each in moved]


def _most(names: Sequence[str], readings: Sequence[Sequence[float]]) -> list[Finding]:
    found = []
    for place, row in enumerate(readings):
        if row:
            top = max(range(len(row)), key=lambda at: abs(row[at]))
            found.append(
                Finding(f"component {place + 1}: greatest change of an attribute", abs(row[top]), unit="share of range",
                        detail={"attribute": names[top], "all": dict(zip(names, row, strict=True))})
            )  # fmt: skip
    return found


def _pictures(images: Tensor) -> Figure:
    from netweight.report.plots import image_grid

    return image_grid(
        [[each[0].permute(1, 2, 0) for each in row] for row in images],
        rows=[f"component {place + 1}" for place in range(len(images))],
        columns=[f"{step:+g} sd" if step else "mean" for step in _STEPS],
        alt="Images along the first three components.",
        caption="The mean model moved along components, in standard deviations of the adapters; the same noise.",
        pixels=64,
    )
