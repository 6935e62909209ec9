"""Tables 2, 4 and 5 of weights2weights: identity kept when a person is put into the model from images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from netweight.metrics.intervals import Interval, bootstrap
from netweight.report.finding import Column, Finding
from netweight.reproduce.registry import Measured, Row
from netweight.reproduce.space_fits import MANY, ONE, SPACE, Fit, Met, met
from netweight.reproduce.space_ground import Ground, space_table

__all__ = ["table2_4", "table5"]

_TARGET = 0.9
"""Least R² of inversion from one image, as a share of that of an adapter trained on several."""
_SEED = 0
_ELSEWHERE = (
    "Celeb-Basis cannot be run here: its basis is made of the text embeddings of celebrities' names, which a model "
    "must have learned; the miniature knows no names, and the published basis fits Stable Diffusion alone.",
    "IP-Adapter FaceID cannot be run here: it needs its published weights for Stable Diffusion and the face "
    "recognition of insightface, whose models are for non-commercial use only.",
)


@space_table("w2w-table2-4")
def table2_4(ground: Ground, folder: Path) -> Measured:
    """Put strangers into the model by adapters of several images and of one, and by inversion into the space."""
    found = met(ground, folder, [Fit(way) for way in (MANY, ONE, SPACE)])
    rows = {fit.way: one for fit, one in found.items()}
    return Measured(
        columns=(
            *_columns(),
            Column("parameters optimised", "count", "lower"),
            Column("time", "s", "lower"),
            Column("R² of attributes", "", "higher"),
        ),
        rows=tuple(Row(way, (*_score(one), one.parameters, one.seconds, one.explained)) for way, one in rows.items()),
        labels=_LABELS,
        differs=(*ground.differs, *_differs(ground)),
        findings=(*_findings(ground, rows), *_shares(rows)),
        notes=("R² of attributes does not punish copying the one image.",),
    )


@space_table("w2w-table5")
def table5(ground: Ground, folder: Path) -> Measured:
    """Personalize from one image by inversion into the space; what it was compared with cannot be run here."""
    found = met(ground, folder, [Fit(ONE), Fit(SPACE)])
    rows = {"w2w": found[Fit(SPACE)], ONE: found[Fit(ONE)]}
    absent = ("Celeb-Basis", "IP-Adapter FaceID")
    return Measured(
        columns=_columns(),
        rows=(*(Row(name, (None, None)) for name in absent), *(Row(name, _score(one)) for name, one in rows.items())),
        labels=_LABELS,
        differs=(*ground.differs, *_differs(ground)),
        findings=tuple(_findings(ground, rows)),
        notes=_ELSEWHERE,
    )


_LABELS = {"ID score, half of the interval": "ID score, plus-minus"}


def _columns() -> tuple[Column, ...]:
    return Column("ID score", "score", "higher"), Column("ID score, half of the interval", "score")


def _interval(one: Met) -> Interval:
    return bootstrap(one.identity, seed=_SEED)


def _score(one: Met) -> tuple[float, float]:
    interval = _interval(one)
    return interval.estimate, (interval.high - interval.low) / 2


def _findings(ground: Ground, rows: Mapping[str, Met]) -> list[Finding]:
    found = []
    for way, one in rows.items():
        interval = _interval(one)
        found.append(
            Finding(f"{way}: ID score", interval.estimate, ci95=interval.ci95, n=len(one.identity), better="higher",
                    seeds=ground.seeds)
        )  # fmt: skip
    return found


def _shares(rows: Mapping[str, Met]) -> Sequence[Finding]:
    """Inversion from one image against adapters, by attributes and by identity."""
    ours, many = rows[SPACE], rows[MANY]
    gap = bootstrap([a - b for a, b in zip(ours.identity, many.identity, strict=True)], seed=_SEED)
    single = bootstrap([a - b for a, b in zip(ours.identity, rows[ONE].identity, strict=True)], seed=_SEED)
    found = [
        Finding(f"ID score of {SPACE} less that of {other}", interval.estimate, ci95=interval.ci95,
                n=len(ours.identity), better="higher")
        for other, interval in ((MANY, gap), (ONE, single))
    ]  # fmt: skip
    if ours.explained is not None and many.explained is not None and many.explained > 0:
        alone = rows[ONE].explained
        found.append(
            Finding(
                "R² of attributes: inversion from one image as a share of several images' adapters",
                ours.explained / many.explained,
                n=len(ours.identity),
                better="higher",
                target=_TARGET,
                baseline=None if alone is None else alone / many.explained,
                detail={"baseline": ONE},
            )
        )
    return found


def _differs(ground: Ground) -> tuple[str, ...]:
    where = "one core" if ground.model.device.type == "cpu" else str(ground.model.device)
    return (
        f"{len(ground.strangers)} people who are in no bank; the score is the mean cosine of a person's images with "
        f"other photographs, ± half of the 95 % interval over people (the paper does not say what its ± is: "
        f"{ground.identity_name}).",
        f"Time is processor time for a person on {where}, many people at once; the paper's is an A100's for one.",
    )
