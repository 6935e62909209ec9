"""Figure 8 of weights2weights and its comparison of components: how much of a space its uses need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, final

from netweight.metrics.intervals import bootstrap
from netweight.report.finding import Column, Finding
from netweight.reproduce.registry import Measured, Row
from netweight.reproduce.resumed import run_each
from netweight.reproduce.space_edits import direction_of, measured, painted
from netweight.reproduce.space_fits import SPACE, Fit, Met, met
from netweight.reproduce.space_ground import Ground, Wanted, space_table

if TYPE_CHECKING:
    from netweight.methods.space.report import Entanglement
    from netweight.report.finding import Figure

__all__ = ["components", "figure8"]

_SIZES = (20, 50, 100, 200, 500, 1_000, 10_000, 64_974)
_SMALLEST = 20
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


@space_table("w2w-fig8")
def figure8(ground: Ground, folder: Path) -> Measured:
    """Find directions from fewer models: how entangled they are, and what edits along them leave of people."""
    from netweight.methods.space.report import entanglement

    sizes = _sizes(len(ground.learned))
    scores, labels = ground.part()
    columns = list(labels.columns) if ground.small else [wanted.column for wanted in ground.wanted]
    found = {
        name: entanglement(scores, labels, columns, sizes, repeats=10, fidelity=fidelity, seed=_SEED)  # type: ignore[arg-type]
        for name, fidelity in _KINDS.items()
    }
    edits = _edits(ground, folder, models=[None if size == len(ground.learned) else size for size in sizes])
    rows = []
    for place, size in enumerate(sizes):
        tangled = [found[name][place].mean for name in _KINDS]
        rows.append(Row(f"{size} models", (*tangled, *_averages(edits[place]))))
    return Measured(
        columns=(*(Column(f"mean |cos|, {name}", "", "lower") for name in _KINDS), *_edit_columns(ground)),
        rows=tuple(rows),
        differs=(*ground.differs, "At most as many models as the bank has; the paper's curve goes on to 64,974."),
        findings=(*_tangled(found, len(columns)), *_kept(edits, [f"{size} models" for size in sizes])),
        figures=_curves(found, edits, sizes),
        notes=(
            _NO_NUMBERS,
            f"|cos| is over all pairs of {len(columns)} attributes and 10 subsamples. Edits have the paper's strength, "
            f"the farthest training model, of {', '.join(wanted.title for wanted in ground.wanted)}; axes stay those "
            "of all models.",
        ),
    )


@space_table("w2w-components")
def components(ground: Ground, folder: Path) -> Measured:
    """Edit and invert with the first components alone."""
    every = ground.space.components
    counts = [*(count for count in (8, 32, 100, 1_000, 10_000) if count < every), None]
    names = [f"{every if count is None else count} components" for count in counts]
    edits = _edits(ground, folder, components=counts)
    fits = met(ground, folder, [Fit(SPACE, count) for count in counts])
    variance = ground.space.deviations.double().square()
    rows = []
    for place, count in enumerate(counts):
        one = fits[Fit(SPACE, count)]
        captured = float(variance[:count].sum() / variance.sum()) * ground.space.accuracy.captured
        rows.append(Row(names[place], (captured, *_averages(edits[place]), mean(one.identity), one.explained)))
    return Measured(
        columns=(
            Column("variance", "share"),
            *_edit_columns(ground),
            Column("inversion: ID score", "score", "higher"),
            Column("inversion: R² of attributes", "", "higher"),
        ),
        rows=tuple(rows),
        differs=(*ground.differs, "The paper compares 100, 1,000, 10,000 and 20,000 components."),
        findings=(*_kept(edits, names), *_inverted(fits, names)),
        notes=(
            "The paper takes 1,000 for edits and 10,000 for inversion, and says that 20,000 overfit; numbers of it are "
            "not at hand.",
            "Edits move a person's whole adapter along a direction of so many components; inversion moves so many.",
        ),
    )


def _sizes(count: int) -> list[int]:
    return [size for size in _SIZES if _SMALLEST <= size < count] + [count]


def _edits(
    ground: Ground,
    folder: Path,
    *,
    models: Sequence[int | None] = (None,),
    components: Sequence[int | None] = (None,),
) -> list[list[Mapping[str, list[float]]]]:
    """Edits of all titles, for each number of models or components."""
    wanted = {one.title: one for one in ground.wanted}
    settings = [(size, count) for size in models for count in components]
    runs = [_Run(title, size, count, ground.digest) for size, count in settings for title in wanted]
    results = run_each(lambda run: _edit(ground, wanted[run.title], run), runs, ledger=folder / "counts.jsonl")
    values = [each.value for each in results]
    return [values[start : start + len(wanted)] for start in range(0, len(values), len(wanted))]


def _edit(ground: Ground, wanted: Wanted, run: _Run) -> dict[str, Any]:
    from netweight.core.seeds import torch_generator
    from netweight.methods.space.edits import Move, edit

    rows = None
    if run.models is not None:
        import torch

        order = torch.randperm(len(ground.learned), generator=torch_generator(_SEED, "models"))
        rows = [ground.learned[place] for place in order[: run.models].tolist()]
    direction = direction_of(ground, wanted, rows=rows, components=run.components)
    points = ground.space.scores[ground.without(wanted)[0]]
    after = edit(points, [Move(direction, 1.0, "reach")])
    return measured(ground, wanted, painted(ground, after), painted(ground, points))


def _edit_columns(ground: Ground) -> tuple[Column, ...]:
    others = (Column("edits: other attributes, mean change", "share of range", "lower"),) if ground.read else ()
    return (
        Column("edits: ID score", "score", "higher"),
        Column(f"edits: {ground.match_name}", "score", "higher"),
        *others,
    )


def _averages(edits: Sequence[Mapping[str, list[float]]]) -> list[float]:
    keys = [key for key in ("identity", "match", "others") if key in edits[0]]
    return [mean(value for each in edits for value in each[key]) for key in keys]


def _kept(edits: Sequence[Sequence[Mapping[str, list[float]]]], names: Sequence[str]) -> list[Finding]:
    found = []
    for name, group in zip(names, edits, strict=True):
        interval = bootstrap([value for each in group for value in each["identity"]], seed=_SEED)
        found.append(
            Finding(f"ID score of edits, {name}", interval.estimate, ci95=interval.ci95, n=interval.n, better="higher",
                    seeds=(_SEED,))
        )  # fmt: skip
    return found


def _inverted(fits: Mapping[Fit, Met], names: Sequence[str]) -> list[Finding]:
    found = []
    for name, one in zip(names, fits.values(), strict=True):
        interval = bootstrap(one.identity, seed=_SEED)
        found.append(
            Finding(f"ID score of inversion, {name}", interval.estimate, ci95=interval.ci95, n=interval.n,
                    better="higher", seeds=(_SEED,))
        )  # fmt: skip
    return found


def _tangled(found: Mapping[str, Sequence[Entanglement]], attributes: int) -> list[Finding]:
    from dataclasses import replace

    from netweight.methods.space.report import entanglement_findings

    return [
        replace(finding, name=f"{finding.name}: {name}")
        for name, each in found.items()
        for finding in entanglement_findings(each, attributes=attributes, seed=_SEED)
    ]


def _curves(
    found: Mapping[str, Sequence[Entanglement]],
    edits: Sequence[Sequence[Mapping[str, list[float]]]],
    sizes: Sequence[int],
) -> tuple[Figure, ...]:
    from netweight.report.plots import lines

    kept = [mean(value for each in group for value in each["identity"]) for group in edits]
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
