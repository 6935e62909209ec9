"""Table 1 of weights2weights: edits by prompting, by Concept Sliders and along directions of the space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from netweight.metrics.intervals import bootstrap
from netweight.report.finding import Column, Finding
from netweight.reproduce.registry import Measured, Row
from netweight.reproduce.space_edits import STRENGTHS, Edited, Way, direction_of, edited, painted
from netweight.reproduce.space_ground import Ground, space_table

if TYPE_CHECKING:
    from netweight.report.finding import Figure

__all__ = ["table1"]

_WAYS: tuple[Way, ...] = (
    "prompting", "Concept Sliders", "w2w", "w2w, corrected by images", "w2w, the paper's directions",
)  # fmt: skip
_SHOWN = 4
_SEED = 0  # of intervals


@space_table("w2w-table1")
def table1(ground: Ground, folder: Path) -> Measured:
    """Edit people in three ways, and measure what is left of them, what else moved, and whether the edit shows."""
    found = edited(ground, folder, _WAYS)
    names = {"identity": "ID score", "distance": "LPIPS", "match": "CLIP score"}
    own = {"identity": ground.identity_name, "distance": ground.distance[0], "match": ground.match_name}
    columns = [Column(own[key], "score", "lower" if key == "distance" else "higher") for key in names]
    return Measured(
        columns=(*columns, Column("other attributes, mean change", "share of range", "lower"), Column("strength")),
        rows=tuple(
            Row(f"{wanted.title}, {way}", _values(found.get((wanted.title, way))))
            for wanted in ground.wanted
            for way in _WAYS
            if way == "prompting" or (wanted.title, way) in found or way == "Concept Sliders"
        ),
        labels={own[key]: name for key, name in names.items()},
        differs=(*ground.differs, *_differs(ground)),
        findings=(*_findings(ground, found), *_ahead(ground, found)),
        figures=(_figure(ground, found),),
        notes=(*_not_expressed(ground), *_missed(found)),
    )


def _values(found: Edited | None) -> tuple[float | None, ...]:
    if found is None:
        return (None,) * 5
    others = mean(found.others) if found.others else None
    return mean(found.identity), mean(found.distance), mean(found.match), others, found.strength


def _findings(ground: Ground, found: Mapping[tuple[str, Way], Edited]) -> list[Finding]:
    """Each mean with its interval over people."""
    parts = []
    for (title, way), one in found.items():
        for what, values in (("ID score", one.identity), ("distance", one.distance), ("match", one.match)):
            interval = bootstrap(values, seed=_SEED)
            better = "lower" if what == "distance" else "higher"
            parts.append(
                Finding(f"{title}, {way}: {what}", interval.estimate, ci95=interval.ci95, n=len(values),
                        better=better, seeds=ground.seeds)  # type: ignore[arg-type]
            )  # fmt: skip
    return parts


def _ahead(ground: Ground, found: Mapping[tuple[str, Way], Edited]) -> list[Finding]:
    """By how much identity is better kept than by a slider, person by person."""
    parts = []
    for wanted in (one for one in ground.wanted if one.slider):
        ours, theirs = (found[wanted.title, way].identity for way in ("w2w", "Concept Sliders"))
        interval = bootstrap([one - other for one, other in zip(ours, theirs, strict=True)], seed=_SEED)
        parts.append(
            Finding(f"{wanted.title}: ID score of w2w less that of Concept Sliders", interval.estimate,
                    ci95=interval.ci95, n=len(ours), better="higher", seeds=ground.seeds)
        )  # fmt: skip
    return parts


def _differs(ground: Ground) -> tuple[str, ...]:
    how = (
        "Every edit is put upon a person's own adapter. Sliders are trained from pairs of images that differ in the "
        "attribute alone, by the same trainer and of the same layers and rank as people's adapters, and directions "
        "are found from other people's adapters, with all other attributes held."
        if ground.small
        else "Every edit is put upon a person's own adapter; sliders are those of the recipe."
    )
    if ground.effect is None:
        return how, "Directions have the paper's strength, the farthest training model; sliders 1."
    return (
        how,
        f"Sliders and w2w are made so strong that the match moves by {ground.effect:g} on other people, since ways "
        "can only be compared at the same effect; the paper's directions are those of its code, at its strength.",
        "Corrected by images: what the edit changed beside its attribute, on average over people who are not measured, "
        "is taken back along other directions.",
    )


def _not_expressed(ground: Ground) -> Sequence[str]:
    silent = [wanted.title for wanted in ground.wanted if wanted.prompt is None]
    if not silent:
        return ()
    return (
        f"Prompting, {', '.join(silent)}: cannot be measured here, as the model's vocabulary has no word for it (in "
        "the miniature prompts speak of the ground alone).",
    )


def _missed(found: Mapping[tuple[str, Way], Edited]) -> Sequence[str]:
    names = [f"{title}, {way}" for (title, way), one in found.items() if not one.reached]
    if not names:
        return ()
    return (f"Did not reach the wanted effect at {STRENGTHS[-1]:g}, which is what is shown: {'; '.join(names)}.",)


def _figure(ground: Ground, found: Mapping[tuple[str, Way], Edited]) -> Figure:
    """People before and after the edits along directions."""
    from netweight.methods.space.edits import Move, edit
    from netweight.report.plots import image_grid

    rows, names = [], []
    for wanted in ground.wanted:
        points = ground.space.scores[ground.without(wanted)[0][:_SHOWN]]
        move = Move(direction_of(ground, wanted), found[wanted.title, "w2w"].strength or 0.0, "reach")
        for what, images in (("before", painted(ground, points)), ("after", painted(ground, edit(points, [move])))):
            rows.append([each[0].permute(1, 2, 0) for each in images])
            names.append(f"{wanted.title}, {what}")
    return image_grid(
        rows, rows=names, columns=[f"person {number + 1}" for number in range(len(rows[0]))],
        alt="People before and after edits along directions of the space.",
        caption="People who are in the space and whom no direction was found from; the same noise before and after.",
        pixels=64,
    )  # fmt: skip
