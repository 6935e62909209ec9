"""Figure 8 of weights2weights and its comparisons of components: how much of a space its uses need, and its looks."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any, Literal, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.methods.space.directions import fit_direction, middle
from netweight.methods.space.edits import Move, edit
from netweight.methods.space.labels import LabelColumn, Labels
from netweight.metrics.intervals import bootstrap
from netweight.report.finding import Figure, Finding
from netweight.report.plots import histogram, image_grid, lines
from netweight_experiments.tables.grid import Cell, grid, interval_finding, run_each
from netweight_experiments.tables.registry import Column, Measured, Row
from netweight_experiments.tables.setups import setup_table
from netweight_experiments.tables.w2w.edits import direction_of, measured, painted
from netweight_experiments.tables.w2w.people import SPACE, Fit, met
from netweight_experiments.tables.w2w.setup import Setup, Wanted

_SIZES = (20, 50, 100, 200, 500, 1_000, 10_000, 64_974)
_TRIES = 20  # draws for one subsample that has both classes of every attribute
_KINDS = {"differences of means": "corrected", "the paper's directions": "reference"}
_SEED = 0
_NO_NUMBERS = "The paper shows curves; their numbers are not at hand, so nothing is laid beside these."


@final
@dataclass(frozen=True)
class _Run:
    """An edit along a direction that was found from fewer models or in fewer components."""

    title: str
    models: int | None
    components: int | None
    ground: str

    @property
    def name(self) -> str:
        return f"{self.title}, {self.models or 'all'} models, {self.components or 'all'} components"


@setup_table("w2w-fig8")
def figure8(setup: Setup, folder: Path) -> Measured:
    """Find directions from fewer models: how entangled they are, and what edits along them leave of people."""
    sizes = [size for size in _SIZES if size < len(setup.learned)] + [len(setup.learned)]
    scores, labels = setup.part()
    columns = list(labels.columns) if setup.small else [wanted.column for wanted in setup.wanted]
    found = {
        name: entanglement(scores, labels, columns, sizes, repeats=10, fidelity=fidelity, seed=_SEED)  # type: ignore[arg-type]
        for name, fidelity in _KINDS.items()
    }
    edits = _edits(setup, folder, models=[None if size == len(setup.learned) else size for size in sizes])
    points = {
        f"{size} models": _Point([found[name][place].mean for name in _KINDS], edits[place])
        for place, size in enumerate(sizes)
    }
    return grid(
        points,
        [
            *(
                (Column(f"mean |cos|, {name}", "", "lower"), lambda point, place=place: point.values[place])
                for place, name in enumerate(_KINDS)
            ),
            *_edit_cells(setup),
        ],
        differs=(*setup.differs, "At most as many models as the bank has; the paper's curve goes on to 64,974."),
        findings=(*_tangled(found, len(columns)), *_kept(points)),
        figures=_curves(found, points, sizes),
        notes=(
            _NO_NUMBERS,
            f"|cos| is over all pairs of {len(columns)} attributes and 10 subsamples. Edits have the paper's strength, "
            f"the farthest training model, of {', '.join(wanted.title for wanted in setup.wanted)}; axes stay those "
            "of all models.",
        ),
    )


@setup_table("w2w-components")
def components(setup: Setup, folder: Path) -> Measured:
    """Edit and invert with the first components alone."""
    every = setup.space.components
    counts = [*(count for count in (8, 32, 100, 1_000, 10_000) if count < every), None]
    names = [f"{every if count is None else count} components" for count in counts]
    fits = met(setup, folder, [Fit(SPACE, count) for count in counts])
    variance = setup.space.deviations.double().square()
    points = {}
    for name, count, edits in zip(names, counts, _edits(setup, folder, components=counts), strict=True):
        captured = float(variance[:count].sum() / variance.sum()) * setup.space.accuracy.captured
        points[name] = _Point([captured], edits, fits[Fit(SPACE, count)])
    inverted = [
        interval_finding(f"ID score of inversion, {name}", bootstrap(one.identity, seed=_SEED), better="higher",
                         seeds=(_SEED,))
        for name, one in zip(names, fits.values(), strict=True)
    ]  # fmt: skip
    return grid(
        points,
        [
            (Column("variance", "share"), lambda point: point.values[0]),
            *_edit_cells(setup),
            (Column("inversion: ID score", "score", "higher"), lambda point: mean(point.met.identity)),
            (Column("inversion: R² of attributes", "", "higher"), lambda point: point.met.explained),
        ],
        differs=(*setup.differs, "The paper compares 100, 1,000, 10,000 and 20,000 components."),
        findings=(*_kept(points), *inverted),
        notes=(
            "The paper takes 1,000 for edits and 10,000 for inversion, and says that 20,000 overfit; numbers of it are "
            "not at hand.",
            "Edits move a person's whole adapter along a direction of so many components; inversion moves so many.",
        ),
    )


@final
@dataclass(frozen=True)
class _Point:
    """A number of models or of components, and what was measured with it."""

    values: Sequence[float]
    edits: Sequence[Mapping[str, list[float]]]  # one for each title
    met: Any = None  # a `Met`, for components

    def all(self, key: str) -> list[float]:
        """Return a number of all people of all edits."""
        return [value for each in self.edits for value in each[key]]


def _edits(
    setup: Setup, folder: Path, *, models: Sequence[int | None] = (None,), components: Sequence[int | None] = (None,)
) -> list[list[Mapping[str, list[float]]]]:
    """Edits of all titles, for each number of models or components."""
    wanted = {one.title: one for one in setup.wanted}
    settings = [(size, count) for size in models for count in components]
    runs = [_Run(title, size, count, setup.digest) for size, count in settings for title in wanted]
    values = run_each(lambda run: _edit(setup, wanted[run.title], run), runs, folder=folder, name="counts")
    return [values[start : start + len(wanted)] for start in range(0, len(values), len(wanted))]


def _edit(setup: Setup, wanted: Wanted, run: _Run) -> dict[str, Any]:
    rows = None
    if run.models is not None:
        order = torch.randperm(len(setup.learned), generator=torch_generator(_SEED, "models"))
        rows = [setup.learned[place] for place in order[: run.models].tolist()]
    direction = direction_of(setup, wanted, rows=rows, components=run.components)
    points = setup.space.scores[setup.without(wanted)[0]]
    after = edit(points, [Move(direction, 1.0, "reach")])
    return measured(setup, wanted, painted(setup, after), painted(setup, points))


def _edit_cells(setup: Setup) -> list[Cell[_Point]]:
    cells: list[Cell[_Point]] = [
        (Column("edits: ID score", "score", "higher"), lambda point: mean(point.all("identity"))),
        (Column(f"edits: {setup.match_name}", "score", "higher"), lambda point: mean(point.all("match"))),
    ]
    if setup.read:
        others = Column("edits: other attributes, mean change", "share of range", "lower")
        cells.append((others, lambda point: mean(point.all("others"))))
    return cells


def _kept(points: Mapping[str, _Point]) -> list[Finding]:
    return [
        interval_finding(f"ID score of edits, {name}", bootstrap(point.all("identity"), seed=_SEED), better="higher",
                         seeds=(_SEED,))
        for name, point in points.items()
    ]  # fmt: skip


def _tangled(found: Mapping[str, Sequence[Entanglement]], attributes: int) -> list[Finding]:
    return [
        replace(finding, name=f"{finding.name}: {name}")
        for name, each in found.items()
        for finding in entanglement_findings(each, attributes=attributes, seed=_SEED)
    ]


def _curves(
    found: Mapping[str, Sequence[Entanglement]], points: Mapping[str, _Point], sizes: Sequence[int]
) -> tuple[Figure, ...]:
    kept = [mean(point.all("identity")) for point in points.values()]
    return (
        lines(
            {name: (sizes, [each.mean for each in group]) for name, group in found.items()},
            bands={name: tuple(zip(*(each.middle for each in group), strict=True)) for name, group in found.items()},  # type: ignore[misc]
            alt="Entanglement of directions against the number of models that they are found from.",
            caption="Mean |cosine| between directions of different attributes; the band holds 95 % of subsamples.",
            xlabel="models", ylabel="mean |cos|", log="x",
        ),
        lines(
            {"edits along directions": (sizes, kept)},
            alt="Identity kept by edits against the number of models that directions are found from.",
            caption="Identity kept by edits at the paper's strength.",
            xlabel="models", ylabel="ID score", log="x",
        ),
    )  # fmt: skip


_COUNTED, _DRAWN, _ALONG = 10, 4, 3
_MOST_TESTED = 5_000  # scipy's test is made for no more
_STEPS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
_END = 2.0  # at which readings are compared
_LEVEL = 0.05


@setup_table("w2w-histograms")
def histograms(setup: Setup, folder: Path) -> Measured:
    """Draw how the first coefficients are spread, and measure how near they are to normal ones."""
    stats = _scipy_stats()
    scores = (setup.space.scores / setup.space.deviations.clamp_min(1e-12)).double().numpy()[:, :_COUNTED]
    shares = _shares(setup)
    rows = {}
    for place, column in enumerate(scores.T):
        tested = stats.shapiro(column[:: -(-len(column) // _MOST_TESTED)])
        numbers = (shares[place], stats.skew(column), stats.kurtosis(column), tested.statistic, tested.pvalue)
        rows[f"component {place + 1}"] = tuple(map(float, numbers))
    values = [row[-1] for row in rows.values()]
    columns = (
        Column("variance", "share"), Column("skewness"), Column("excess kurtosis"),
        Column("Shapiro–Wilk's W", "", "higher"), Column("p"),
    )  # fmt: skip
    level = _LEVEL / len(values)
    name = "components that are not normal, by Shapiro and Wilk's test"
    detail = {"p": values, "level": level}
    return grid(
        rows,
        [(column, itemgetter(place)) for place, column in enumerate(columns)],
        differs=setup.differs,
        findings=(Finding(name, sum(value < level for value in values), n=len(values), detail=detail),),
        figures=(_histogram(setup, scores[:, :_DRAWN]),),
        notes=(
            "The paper shows histograms; numbers of them are not at hand.",
            f"Of {len(scores)} adapters. The level is {_LEVEL:g} shared among {len(values)} tests; with many adapters "
            "the least departure is found, so look at W: a normal sample's is 1.",
        ),
    )


@setup_table("w2w-traversal")
def traversal(setup: Setup, folder: Path) -> Measured:
    """Paint the mean model moved along the first components, and read what changes."""
    count = min(_ALONG, setup.space.components)
    points = torch.zeros(count, len(_STEPS), setup.space.components)
    for place in range(count):
        points[place, :, place] = torch.tensor(_STEPS) * setup.space.deviations[place]
    images = painted(setup, points.flatten(0, 1))
    images = images.reshape(count, len(_STEPS), *images.shape[1:])
    shares = _shares(setup)
    readings = _readings(setup, images)
    rows = [Row(f"component {place + 1}", (shares[place], *readings[place])) for place in range(count)]
    names = setup.attributes if setup.read is not None else ()
    return Measured(
        columns=(Column("variance", "share"), *(Column(name, "share of range") for name in names)),
        rows=tuple(rows),
        differs=setup.differs,
        findings=tuple(_most(names, readings)),
        figures=(_pictures(images),),
        notes=(
            "The paper shows images; numbers of them are not at hand.",
            f"What an attribute changes from {-_END:g} to {_END:g} standard deviations of the adapters along the "
            f"component, mean over {len(setup.seeds)} images. The sign of a component means nothing.",
        ),
    )


def _scipy_stats() -> Any:
    return importlib.import_module("scipy.stats")


def _shares(setup: Setup) -> list[float]:
    variance = setup.space.deviations.double().square()
    shares: list[float] = (variance / variance.sum() * setup.space.accuracy.captured).tolist()
    return shares


def _histogram(setup: Setup, scores: Any) -> Figure:
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


def _readings(setup: Setup, images: Tensor) -> list[tuple[float, ...]]:
    """How far each attribute moves from one end to the other, per component."""
    if setup.read is None:
        return [()] * len(images)
    low, high = _STEPS.index(-_END), _STEPS.index(_END)
    moved = [setup.read(each[high]).double().mean(0) - setup.read(each[low]).double().mean(0) for each in images]
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
    return image_grid(
        [[each[0].permute(1, 2, 0) for each in row] for row in images],
        rows=[f"component {place + 1}" for place in range(len(images))],
        columns=[f"{step:+g} sd" if step else "mean" for step in _STEPS],
        alt="Images along the first three components.",
        caption="The mean model moved along components, in standard deviations of the adapters; the same noise.",
        pixels=64,
    )


@final
@dataclass(frozen=True)
class Entanglement:
    """Directions found from subsamples of one size."""

    models: int  # size of a subsample
    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over subsamples."""
        return sum(self.each) / len(self.each)

    @property
    def middle(self) -> tuple[float, float]:
        """The middle 95 % of the subsamples."""
        return middle(self.each)


def entanglement(
    scores: Tensor,
    labels: Labels,
    columns: Sequence[str],
    sizes: Sequence[int],
    *,
    repeats: int = 20,
    fidelity: Literal["corrected", "reference"] = "corrected",
    seed: int = 0,
) -> list[Entanglement]:
    """Cosines between directions that are found from subsamples of the models, by their sizes."""
    # The axes stay those of all models: this shows how many models directions need, not axes.
    # Source: weights2weights, figure 8: mean absolute cosine between pairs of directions.
    if len(columns) < 2 or not sizes or max(sizes) > len(scores) or min(sizes) < 4 or repeats < 1:
        raise UsageError(
            f"{len(columns)} attributes in subsamples of {list(sizes)} of {len(scores)} models cannot be compared.",
            cure="Give two attributes or more, and sizes from 4 to the number of models.",
        )
    found = []
    for size in sizes:
        draws = [_drawn(labels, columns, size, seed, number) for number in range(repeats if size < len(scores) else 1)]
        found.append(Entanglement(size, tuple(_mean_cosine(scores, labels, columns, d, fidelity) for d in draws)))
    return found


def entanglement_findings(found: Sequence[Entanglement], *, attributes: int, seed: int = 0) -> list[Finding]:
    """One finding per number of models, the smallest number as their baseline."""
    return [
        Finding(f"mean |cos| between directions, {each.models} models", each.mean,
                ci95=each.middle if len(each.each) > 1 else None, n=len(each.each), better="lower",
                baseline=found[0].mean, seeds=(seed,),
                detail={"attributes": attributes, "subsamples": len(each.each)})
        for each in found
    ]  # fmt: skip


def _drawn(labels: Labels, columns: Sequence[str], size: int, seed: int, number: int) -> Tensor:
    """A subsample with at least two models of each class of every attribute."""
    generator = torch_generator(seed, "subsample", size, number)
    for _ in range(_TRIES):
        rows = torch.randperm(len(labels.names), generator=generator)[:size]
        parts = [LabelColumn(name, labels[name].values[rows]) for name in columns]
        if all(len(part.levels) > 1 and _counts(part) >= 2 for part in parts):
            return rows
    raise UsageError(f"Subsamples of {size} models lack a class of an attribute.", cure="Take larger ones.")


def _counts(column: LabelColumn) -> int:
    if column.kind == "continuous":
        return int(column.known.sum())
    return min(int((column.values == level).sum()) for level in column.levels)


def _mean_cosine(
    scores: Tensor,
    labels: Labels,
    columns: Sequence[str],
    rows: Tensor,
    fidelity: Literal["corrected", "reference"],
) -> float:
    part = Labels(
        tuple(labels.names[row] for row in rows.tolist()),
        {name: LabelColumn(name, labels[name].values[rows]) for name in columns},
    )
    directions = [
        fit_direction(scores[rows], part, name, kind="difference", fidelity=fidelity, folds=0) for name in columns
    ]
    cosines = [abs(one.cosine(other)) for one, other in itertools.combinations(directions, 2)]
    return sum(cosines) / len(cosines)
