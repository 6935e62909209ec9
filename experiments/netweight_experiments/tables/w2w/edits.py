"""Table 1 of weights2weights: edits by prompting, by Concept Sliders and along directions, remembered one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal, TypeAlias, final

from torch import Tensor

from netweight.core.digests import digest_tensor
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import Move, corrected_steps, edit, identity
from netweight.methods.space.inversion import generate_differentiably, generate_images
from netweight.methods.space.points import Direction
from netweight.methods.space.settings import CorrectionSettings
from netweight.methods.space.space import WeightSpace
from netweight.metrics.intervals import bootstrap
from netweight.report.finding import Figure, Finding
from netweight.report.plots import image_grid
from netweight_experiments.tables.grid import grid, interval_finding, run_each, typed
from netweight_experiments.tables.registry import Column, MeasuredTable
from netweight_experiments.tables.setups import setup_table
from netweight_experiments.tables.w2w.setup import Setup, Wanted

Way: TypeAlias = Literal[
    "prompting", "Concept Sliders", "w2w", "w2w, corrected by images", "w2w, the paper's directions"
]

# Tried in tuning: in multiples of the farthest training model (the paper's rule) or of the slider.
STRENGTHS = (0.5, 1.0, 2.0, 3.0)


@final
@dataclass(frozen=True)
class Edited:
    """What an edit did to people, each the mean over the same images."""

    strength: float | None
    """None for a prompt."""
    reached: bool
    """Whether tuning found a strength of the wanted effect; True where nothing was tuned."""
    identity: tuple[float, ...]
    """Scores of people, without the attribute that is edited."""
    distance: tuple[float, ...]
    """How far images moved."""
    match: tuple[float, ...]
    """How far images came towards the edit."""
    others: tuple[float, ...] = ()
    """How far other attributes moved, as shares of their ranges; empty where nothing reads them."""


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
class SlidSpace:
    """A space to whose points the changes of one more adapter are added, such as of a slider."""

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


def edited(setup: Setup, folder: Path, ways: Sequence[Way]) -> dict[tuple[str, Way], Edited]:
    """Measure edits in several ways; what the folder remembers is not measured again."""
    wanted = {one.title: one for one in setup.wanted}
    runs = [_Run(one.title, way, setup.digest) for one in setup.wanted for way in ways if _can(setup, one, way)]
    found = run_each(lambda run: _measure(setup, wanted[run.title], run.way), runs, folder=folder, name="edits")
    return {(run.title, run.way): typed(Edited, value) for run, value in zip(runs, found, strict=True)}


def _can(setup: Setup, wanted: Wanted, way: Way) -> bool:
    if way == "prompting":
        return wanted.prompt is not None
    if way == "w2w, corrected by images":
        return setup.read is not None
    return way != "Concept Sliders" or wanted.slider


def painted(setup: Setup, scores: Tensor, *, space: Any = None, prompts: Sequence[str] | None = None) -> Tensor:
    """Paint the setup's images of points, shape `(b, m, 3, height, width)`."""
    return generate_images(
        setup.model, space or setup.space, scores, prompts or setup.prompts, setup.seeds, guidance=setup.guidance,
        steps=setup.steps, rows=setup.rows,
    )  # fmt: skip


def measured(setup: Setup, wanted: Wanted, images: Tensor, originals: Tensor) -> dict[str, list[float]]:
    """Compare images of an edit with those before, one number per person."""
    pair = images.flatten(0, 1), originals.flatten(0, 1)
    found = {
        "identity": identity(setup.identity(wanted.column))[1](*pair),
        "distance": setup.distance[1](*pair),
        "match": setup.match(wanted, pair[0]) - setup.match(wanted, pair[1]),
    }
    if setup.read is not None:
        rest = [place for place, name in enumerate(setup.attributes) if name != wanted.column]
        found["others"] = (setup.read(pair[0]) - setup.read(pair[1]))[:, rest].abs().mean(1) / 2
    return {name: values.double().view(images.shape[:2]).mean(1).tolist() for name, values in found.items()}


def tuned(strengths: Sequence[float], effects: Sequence[float], wanted: float) -> tuple[float, bool]:
    """Return the strength at which an effect is reached, by straight lines from 0, and whether it is."""
    below, before = 0.0, 0.0
    for strength, effect in zip(strengths, effects, strict=True):
        if effect >= wanted > before:
            return below + (strength - below) * (wanted - before) / (effect - before), True
        below, before = strength, effect
    return strengths[-1], False


def direction_of(
    setup: Setup, wanted: Wanted, *, rows: Sequence[int] | None = None, components: int | None = None,
    reference: bool = False,
) -> Direction:  # fmt: skip
    """Find a direction from people who are not edited."""
    from netweight.methods.space.directions import direction_of as of_vector

    scores, labels = setup.part(rows)
    found = fit_direction(
        scores[:, :components], labels, wanted.column, confounders=() if reference else wanted.confounders,
        fidelity="reference" if reference else "corrected", folds=0,
    )  # fmt: skip
    if components is None:
        return found
    whole = found.vector.new_zeros(setup.space.components)
    whole[: len(found.vector)] = found.vector
    return of_vector(setup.part()[0], whole, name=found.name, kind=found.kind)


def _measure(setup: Setup, wanted: Wanted, way: Way) -> dict[str, Any]:
    rows, others = setup.without(wanted)
    if way == "prompting":
        points = setup.space.scores[rows]
        images = painted(setup, points, prompts=(str(wanted.prompt),))
        return {"strength": None, "reached": True, **measured(setup, wanted, images, painted(setup, points))}
    strength, reached = 1.0, True
    make = _slide(setup, wanted) if way == "Concept Sliders" else _move(setup, wanted, way)
    if setup.effect is not None and way != "w2w, the paper's directions":
        points = setup.space.scores[others]
        before = _mean_match(setup, wanted, painted(setup, points))
        effects = [_mean_match(setup, wanted, make(points, each)) - before for each in STRENGTHS]
        strength, reached = tuned(STRENGTHS, effects, setup.effect)
    points = setup.space.scores[rows]
    found = measured(setup, wanted, make(points, strength), painted(setup, points))
    return {"strength": strength, "reached": reached, **found}


def _move(setup: Setup, wanted: Wanted, way: Way) -> Any:
    direction = direction_of(setup, wanted, reference=way == "w2w, the paper's directions")
    if way == "w2w, corrected by images":
        return _corrected(setup, wanted, direction)
    return lambda points, strength: painted(setup, edit(points, [Move(direction, strength, "reach")]))


def _corrected(setup: Setup, wanted: Wanted, direction: Direction) -> Any:
    """Edits that are corrected for each person by what they do to images."""
    assert setup.read is not None
    read, found = setup.read, {wanted.column: direction}
    steps: dict[str, Tensor] = {}
    for name in setup.attributes:
        if name != wanted.column:
            held = tuple(other for other in setup.attributes if other != name)
            found[name] = direction_of(setup, replace(wanted, column=name, confounders=held))
    how: Any = {"prompts": setup.prompts, "guidance": setup.guidance, "steps": min(setup.steps, 10)}
    generate = partial(generate_differentiably, setup.model, setup.space, **how)

    def make(points: Tensor, strength: float) -> Tensor:
        if (key := digest_tensor(points)) not in steps:
            steps[key] = corrected_steps(
                generate, read, points, [found[name] for name in setup.attributes], wanted.column,
                CorrectionSettings(), ranges=[2.0] * len(setup.attributes), deviations=setup.part()[0].std(0),
            ).float()  # fmt: skip
        return painted(setup, points + strength * steps[key])

    return make


def _slide(setup: Setup, wanted: Wanted) -> Any:
    slider = setup.sliders()[wanted.title]
    worn = {name: change.dense().float() for name, change in slider.factors.items()}
    return lambda points, strength: painted(setup, points, space=SlidSpace(setup.space, worn, strength))


def _mean_match(setup: Setup, wanted: Wanted, images: Tensor) -> float:
    return float(setup.match(wanted, images.flatten(0, 1)).double().mean())


_WAYS: tuple[Way, ...] = (
    "prompting", "Concept Sliders", "w2w", "w2w, corrected by images", "w2w, the paper's directions",
)  # fmt: skip
_SHOWN = 4
_SEED = 0  # of intervals


@setup_table("w2w-table1")
def table1(setup: Setup, folder: Path) -> MeasuredTable:
    """Edit people in three ways, and measure what is left of them, what else moved, and whether the edit shows."""
    found = edited(setup, folder, _WAYS)
    names = {"identity": "ID score", "distance": "LPIPS", "match": "CLIP score"}
    own = {"identity": setup.identity_name, "distance": setup.distance[0], "match": setup.match_name}
    better: dict[str, Any] = {"identity": "higher", "distance": "lower", "match": "higher"}
    absent = Edited(None, True, (), (), ())

    def mean_of(key: str) -> Callable[[Edited], float | None]:
        return lambda edit: mean(values) if (values := getattr(edit, key)) else None

    means = [
        interval_finding(f"{title}, {way}: {what}", bootstrap(getattr(one, key), seed=_SEED), better=better[key],
                         seeds=setup.seeds)
        for (title, way), one in found.items()
        for what, key in (("ID score", "identity"), ("distance", "distance"), ("match", "match"))
    ]  # fmt: skip
    return grid(
        {
            f"{wanted.title}, {way}": found.get((wanted.title, way), absent)
            for wanted in setup.wanted
            for way in _WAYS
            if (wanted.title, way) in found or way in ("prompting", "Concept Sliders")
        },
        [
            *((Column(own[key], "score", better[key]), mean_of(key)) for key in names),
            (Column("other attributes, mean change", "share of range", "lower"), mean_of("others")),
            (Column("strength"), lambda edit: edit.strength),
        ],
        labels={own[key]: name for key, name in names.items()},
        differs=(*setup.differs, *_differs(setup)),
        findings=(*means, *_ahead(setup, found)),
        figures=(_figure(setup, found),),
        notes=(*_not_expressed(setup), *_missed(found)),
    )


def _ahead(setup: Setup, found: Mapping[tuple[str, Way], Edited]) -> list[Finding]:
    """By how much identity is better kept than by a slider, person by person."""
    parts = []
    for wanted in (one for one in setup.wanted if one.slider):
        ours, theirs = (found[wanted.title, way].identity for way in ("w2w", "Concept Sliders"))
        gap = bootstrap([one - other for one, other in zip(ours, theirs, strict=True)], seed=_SEED)
        name = f"{wanted.title}: ID score of w2w less that of Concept Sliders"
        parts.append(interval_finding(name, gap, better="higher", seeds=setup.seeds))
    return parts


def _differs(setup: Setup) -> tuple[str, ...]:
    how = (
        "Every edit is put upon a person's own adapter. Sliders are trained from pairs of images that differ in the "
        "attribute alone, by the same trainer and of the same layers and rank as people's adapters, and directions "
        "are found from other people's adapters, with all other attributes held."
        if setup.small
        else "Every edit is put upon a person's own adapter; sliders are those of the recipe."
    )
    if setup.effect is None:
        return how, "Directions have the paper's strength, the farthest training model; sliders 1."
    return (
        how,
        f"Sliders and w2w are made so strong that the match moves by {setup.effect:g} on other people, since ways "
        "can only be compared at the same effect; the paper's directions are those of its code, at its strength.",
        "Corrected by images: each person's edit takes back what it changes beside its attribute in images of that "
        "person, with noises that are not measured.",
    )


def _not_expressed(setup: Setup) -> Sequence[str]:
    silent = [wanted.title for wanted in setup.wanted if wanted.prompt is None]
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


def _figure(setup: Setup, found: Mapping[tuple[str, Way], Edited]) -> Figure:
    """People before and after the edits along directions."""
    rows, names = [], []
    for wanted in setup.wanted:
        points = setup.space.scores[setup.without(wanted)[0][:_SHOWN]]
        move = Move(direction_of(setup, wanted), found[wanted.title, "w2w"].strength or 0.0, "reach")
        for what, images in (("before", painted(setup, points)), ("after", painted(setup, edit(points, [move])))):
            rows.append([each[0].permute(1, 2, 0) for each in images])
            names.append(f"{wanted.title}, {what}")
    return image_grid(
        rows, rows=names, columns=[f"person {number + 1}" for number in range(len(rows[0]))],
        alt="People before and after edits along directions of the space.",
        caption="People who are in the space and whom no direction was found from; the same noise before and after.",
        pixels=64,
    )  # fmt: skip
