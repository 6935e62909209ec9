"""Edits of people by prompting, by a slider and by a direction of the space, measured and remembered one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from netweight.reproduce.resumed import run_each
from netweight.reproduce.space_ground import Ground, Wanted

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.methods.space.points import Direction
    from netweight.methods.space.space import WeightSpace

__all__ = ["STRENGTHS", "Edited", "Way", "direction_of", "edited", "measured", "painted", "tuned"]

Way: TypeAlias = Literal[
    "prompting", "Concept Sliders", "w2w", "w2w, corrected by images", "w2w, the paper's directions"
]

STRENGTHS = (0.5, 1.0, 2.0, 3.0)
"""Tried in tuning: in multiples of the farthest training model (the paper's rule) or of the slider."""


@final
@dataclass(frozen=True)
class Edited:
    """What an edit did to people, each the mean over the same images.

    Attributes:
        strength: Of the edit; None for a prompt.
        reached: Whether tuning found a strength of the wanted effect; True where nothing was tuned.
        identity: Scores of people, without the attribute that is edited.
        distance: How far images moved.
        match: How far images came towards the edit.
        others: How far other attributes moved, as shares of their ranges; empty where nothing reads them.
    """

    strength: float | None
    reached: bool
    identity: tuple[float, ...]
    distance: tuple[float, ...]
    match: tuple[float, ...]
    others: tuple[float, ...] = ()


@final
@dataclass(frozen=True)
class _Run:
    """One way of one edit."""

    title: str
    way: Way
    ground: str

    @property
    def name(self) -> str:
        return f"{self.title}, {self.way}"


@final
@dataclass(frozen=True, eq=False)
class _Slid:
    """A space whose points all wear one more adapter."""

    space: WeightSpace
    worn: Mapping[str, Tensor]
    strength: float

    @property
    def deviations(self) -> Tensor:
        return self.space.deviations

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        own = self.space.changes(scores)
        for name, change in self.worn.items():
            added = self.strength * change.to(scores.device)
            own[name] = own[name] + added if name in own else added.expand(len(scores), *added.shape)
        return own


def edited(ground: Ground, folder: Path, ways: Sequence[Way]) -> dict[tuple[str, Way], Edited]:
    """Measure edits in several ways; what the folder remembers is not measured again.

    Returns:
        By title and way. A way that cannot express an edit is left out.
    """
    wanted = {one.title: one for one in ground.wanted}
    runs = [_Run(one.title, way, ground.digest) for one in ground.wanted for way in ways if _can(ground, one, way)]
    found = run_each(lambda run: _measure(ground, wanted[run.title], run.way), runs, ledger=folder / "edits.jsonl")
    return {(each.config.title, each.config.way): _read(each.value) for each in found}


def _can(ground: Ground, wanted: Wanted, way: Way) -> bool:
    if way == "prompting":
        return wanted.prompt is not None
    if way == "w2w, corrected by images":
        return ground.read is not None
    return way != "Concept Sliders" or wanted.slider


def painted(ground: Ground, scores: Tensor, *, space: Any = None, prompts: Sequence[str] | None = None) -> Tensor:
    """Paint the ground's images of points, shape `(b, m, 3, height, width)`.

    Args:
        ground: Where.
        scores: Points, shape `(b, k)`.
        space: Another space of the same model.
        prompts: Others than the ground's.
    """
    from netweight.methods.space.inversion import generate_images

    return generate_images(
        ground.model, space or ground.space, scores, prompts or ground.prompts, ground.seeds, guidance=ground.guidance,
        steps=ground.steps, rows=ground.rows,
    )  # fmt: skip


def measured(ground: Ground, wanted: Wanted, images: Tensor, originals: Tensor) -> dict[str, list[float]]:
    """Compare images of an edit with those before, one number per person.

    Args:
        ground: Where.
        wanted: The edit.
        images: Shape `(b, m, 3, height, width)`.
        originals: Of the same people from the same noise.
    """
    from netweight.methods.space.edits import identity

    pair = images.flatten(0, 1), originals.flatten(0, 1)
    found = {
        "identity": identity(ground.identity(wanted.column))[1](*pair),
        "distance": ground.distance[1](*pair),
        "match": ground.match(wanted, pair[0]) - ground.match(wanted, pair[1]),
    }
    if ground.read is not None:
        rest = [place for place, name in enumerate(ground.attributes) if name != wanted.column]
        found["others"] = (ground.read(pair[0]) - ground.read(pair[1]))[:, rest].abs().mean(1) / 2
    return {name: values.double().view(images.shape[:2]).mean(1).tolist() for name, values in found.items()}


def tuned(strengths: Sequence[float], effects: Sequence[float], wanted: float) -> tuple[float, bool]:
    """Return the strength at which an effect is reached, by straight lines from 0, and whether it is.

    Args:
        strengths: Rising.
        effects: At these.
        wanted: The effect.
    """
    below, before = 0.0, 0.0
    for strength, effect in zip(strengths, effects, strict=True):
        if effect >= wanted > before:
            return below + (strength - below) * (wanted - before) / (effect - before), True
        below, before = strength, effect
    return strengths[-1], False


def direction_of(
    ground: Ground, wanted: Wanted, *, rows: Sequence[int] | None = None, components: int | None = None,
    reference: bool = False,
) -> Direction:  # fmt: skip
    """Find a direction from people who are not edited.

    Args:
        ground: Where.
        wanted: The edit.
        rows: Of the people; all of `Ground.learned` by default.
        components: Only so many are looked at and moved; None for all.
        reference: Whether to find it as the authors' code does, without confounders.
    """
    from netweight.methods.space.directions import direction_of as of_vector
    from netweight.methods.space.directions import fit_direction

    scores, labels = ground.part(rows)
    found = fit_direction(
        scores[:, :components], labels, wanted.column, confounders=() if reference else wanted.confounders,
        fidelity="reference" if reference else "corrected", folds=0,
    )  # fmt: skip
    if components is None:
        return found
    whole = found.vector.new_zeros(ground.space.components)
    whole[: len(found.vector)] = found.vector
    return of_vector(ground.part()[0], whole, name=found.name, kind=found.kind)


def _measure(ground: Ground, wanted: Wanted, way: Way) -> dict[str, Any]:
    rows, others = ground.without(wanted)
    if way == "prompting":
        points = ground.space.scores[rows]
        images = painted(ground, points, prompts=(str(wanted.prompt),))
        return {"strength": None, "reached": True, **measured(ground, wanted, images, painted(ground, points))}
    strength, reached = 1.0, True
    make = _slide(ground, wanted) if way == "Concept Sliders" else _move(ground, wanted, way, others)
    if ground.effect is not None and way != "w2w, the paper's directions":
        points = ground.space.scores[others]
        before = _mean_match(ground, wanted, painted(ground, points))
        effects = [_mean_match(ground, wanted, make(points, each)) - before for each in STRENGTHS]
        strength, reached = tuned(STRENGTHS, effects, ground.effect)
    points = ground.space.scores[rows]
    found = measured(ground, wanted, make(points, strength), painted(ground, points))
    return {"strength": strength, "reached": reached, **found}


def _move(ground: Ground, wanted: Wanted, way: Way, others: Sequence[int]) -> Any:
    from netweight.methods.space.edits import Move, edit

    direction = direction_of(ground, wanted, reference=way == "w2w, the paper's directions")
    if way == "w2w, corrected by images":
        direction = _corrected(ground, wanted, direction, others)
    return lambda points, strength: painted(ground, edit(points, [Move(direction, strength, "reach")]))


def _corrected(ground: Ground, wanted: Wanted, direction: Direction, others: Sequence[int]) -> Direction:
    """Correct a direction by what it does to images of people who are not measured."""
    from netweight.methods.space.edits import calibrated

    assert ground.read is not None
    found = {wanted.column: direction}
    for name in ground.attributes:
        if name != wanted.column:
            held = tuple(other for other in ground.attributes if other != name)
            found[name] = direction_of(ground, replace(wanted, column=name, confounders=held))
    return calibrated(
        lambda points: painted(ground, points), ground.read, ground.space.scores[list(others)], ground.part()[0],
        [found[name] for name in ground.attributes], wanted.column, ranges=[2.0] * len(ground.attributes),
    )  # fmt: skip


def _slide(ground: Ground, wanted: Wanted) -> Any:
    slider = ground.sliders()[wanted.title]
    worn = {name: change.dense().float() for name, change in slider.factors.items()}
    return lambda points, strength: painted(ground, points, space=_Slid(ground.space, worn, strength))


def _mean_match(ground: Ground, wanted: Wanted, images: Tensor) -> float:
    return float(ground.match(wanted, images.flatten(0, 1)).double().mean())


def _read(value: Mapping[str, Any]) -> Edited:
    lists = {name: tuple(value.get(name, ())) for name in ("identity", "distance", "match", "others")}
    return Edited(value["strength"], value["reached"], **lists)
