"""From remembered runs to rows of NeMo's tables: medians over prompts of medians over seeds, kind by kind."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.report.finding import Column, Table
from netweight.reproduce.nemo_ground import Ground
from netweight.reproduce.nemo_painting import Painting, Results, kinds_of, paint, painting
from netweight.reproduce.nemo_ways import Way
from netweight.reproduce.registry import Row

if TYPE_CHECKING:
    from netweight.metrics.copies import PromptCopies

__all__ = [
    "KINDS",
    "Line",
    "Painted",
    "copies",
    "middle",
    "own_columns",
    "painted_lines",
    "percent",
    "seeds_table",
    "spared_columns",
    "spared_values",
]

KINDS = ("verbatim", "template")


@final
@dataclass(frozen=True)
class Line:
    """A mitigation of a table.

    Attributes:
        title: Its name.
        ways: What is done for each prompt; prompts without a way are left out, and notes must say why.
        others: Whether other memorized prompts are painted under it.
    """

    title: str
    ways: Mapping[str, Way]
    others: bool = False


@final
@dataclass(frozen=True)
class Painted:
    """Lines with what was painted under them.

    Attributes:
        ground: Where.
        lines: The lines.
        kinds: How each prompt is memorized.
        found: The runs.
        spared: Whether ordinary prompts were painted too.
    """

    ground: Ground
    lines: tuple[Line, ...]
    kinds: Mapping[str, str]
    found: Results
    spared: bool

    def own(self, line: Line, kind: str | None = None) -> dict[str, Mapping[str, Any]]:
        """Return what a line's prompts painted, by prompt: all, or those of a kind."""
        return self._of(line, "own", kind)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of `rows`."""
        spared = spared_columns(self.ground) if self.spared else ()
        return (Column("neurons off or scaled, median", "neurons"), *own_columns(self.ground), *spared)

    def rows(self) -> tuple[Row, ...]:
        """Return one row per line and kind."""
        rows = []
        for line in self.lines:
            for kind in KINDS:
                if own := self.own(line, kind):
                    count = statistics.median(_neurons(line.ways[prompt]) for prompt in own)
                    values = [count, *own_values(self.ground, list(own.values()))]
                    if self.spared:
                        ordinary = list(self._of(line, "ordinary", kind).values())
                        others = list(self._of(line, "others", kind).values()) if line.others else []
                        values += spared_values(ordinary, others)
                    rows.append(Row(f"{line.title}, {kind}", tuple(values)))
        return tuple(rows)

    def _of(self, line: Line, on: Any, kind: str | None) -> dict[str, Mapping[str, Any]]:
        return {
            prompt: self.found[painting(self.ground, way, on, prompt)]
            for prompt, way in line.ways.items()
            if kind in (None, self.kinds[prompt])
        }


def painted_lines(ground: Ground, folder: Path, lines: Sequence[Line], *, spared: bool) -> Painted:
    """Paint what lines need, unless the folder remembers it.

    Args:
        ground: Where.
        folder: Of `folder_of`.
        lines: The lines.
        spared: Whether ordinary prompts are painted too.

    Raises:
        NetweightError: A run failed.
    """
    wanted: list[Painting] = []
    for line in lines:
        for prompt, way in line.ways.items():
            wanted.append(painting(ground, way, "own", prompt))
            if spared:
                wanted.append(painting(ground, way, "ordinary", prompt))
                if line.others:
                    wanted.append(painting(ground, way, "others", prompt))
    kinds = kinds_of(ground, folder)
    return Painted(ground, tuple(lines), kinds, paint(ground, folder, wanted), spared)


def own_columns(ground: Ground) -> tuple[Column, ...]:
    """Return the columns of `own_values`."""
    measured = [
        (f"{ground.measure} to the training image", "lower"),
        (f"{ground.measure} to the unedited generation", "lower"),
        (f"{ground.measure} between seeds", "lower"),
    ]
    columns = [
        Column(f"{name}, {what}", "score", better if what == "median" else None)  # type: ignore[arg-type]
        for name, better in measured
        for what in ("median", "MAD")
    ]
    columns.insert(2, Column(f"{ground.measure} to the training image, median of the largest", "score", "lower"))
    if ground.alignment is not None:
        columns += [
            Column(f"{ground.alignment_name}, median", "score", "higher"),
            Column(f"{ground.alignment_name}, MAD", "score"),
        ]
    return (
        *columns,
        Column("images that copy their own", "%", "lower"),
        Column("images that copy any memorized", "%", "lower"),
        Column("prompts with a copy of their own", "%", "lower"),
    )


def own_values(ground: Ground, found: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Sum up prompts: over seeds first, then over prompts.

    Args:
        ground: Where.
        found: Own runs, at least one.
    """
    rows = [copies(each) for each in found]
    images = sum(len(row.to_image) for row in rows)
    values = [*middle([statistics.median(row.to_image) for row in rows])]
    values.append(statistics.median(max(row.to_image) for row in rows))
    values += middle([statistics.median(row.to_unedited) for row in rows if row.to_unedited is not None])
    values += middle([row.diversity for row in rows if row.diversity is not None])
    if ground.alignment is not None:
        values += middle([statistics.median(each["alignment"]) for each in found])
    values.append(percent(sum(row.copies() for row in rows), images))
    values.append(percent(sum(row.any_match() for row in rows), images))
    values.append(percent(sum(row.copies() > 0 for row in rows), len(rows)))
    return values


def spared_columns(ground: Ground, others: str = "other memorized prompts") -> tuple[Column, ...]:
    """Return the columns of `spared_values`.

    Args:
        ground: Where.
        others: What the prompts of runs on others are called.
    """
    tells = ground.faithful_name if ground.faithful is not None else f"ordinary captions: {ground.alignment_name}"
    return (
        Column(tells, "score", "higher"),
        Column(f"ordinary captions: {ground.measure} to the unedited generation, median", "score", "higher"),
        Column("ordinary captions: images that copy any memorized", "%", "lower"),
        Column(f"{others}: images that copy their own", "%"),
        Column(f"{others}: images that copy any memorized", "%"),
    )


def spared_values(ordinary: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Sum up what edits do beside: the median over edits, and shares of all images.

    Args:
        ordinary: Ordinary runs, at least one.
        others: Runs on other memorized prompts; none where there are none.
    """
    told = [statistics.mean(each["faithful"]) for each in ordinary if each["faithful"] is not None]
    of = sum(each["of"] for each in others)
    return [
        statistics.median(told) if told else None,
        statistics.median(statistics.median(each["same"]) for each in ordinary),
        percent(sum(each["copies"] for each in ordinary), sum(len(each["same"]) for each in ordinary)),
        percent(sum(each["own copies"] for each in others), of) if of else None,
        percent(sum(each["any copies"] for each in others), of) if of else None,
    ]


def copies(found: Mapping[str, Any]) -> PromptCopies:
    """Return an own run as `PromptCopies`."""
    from netweight.metrics.copies import PromptCopies

    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value := found[name], list) else value
        for name in PromptCopies.__dataclass_fields__
    }
    return PromptCopies(**fields)


def middle(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the median and the median absolute deviation from it; None where there is no value."""
    if not values:
        return None, None
    center = statistics.median(values)
    return center, statistics.median(abs(value - center) for value in values)


def _neurons(way: Way) -> int:
    from netweight.core.units import Units

    return len(Units.from_json(way.units)) if way.units else 0


def percent(part: float, whole: float) -> float:
    """Return a share in percent."""
    return 100 * part / whole


def seeds_table(painted: Painted) -> Table:
    """Return how many images copy, prompt by prompt: medians hide seeds."""
    prompts = list(painted.kinds)
    rows = []
    for prompt in prompts:
        cells: list[str | None] = []
        for line in painted.lines:
            if prompt not in line.ways:
                cells.append(None)
                continue
            found = copies(painted.own(line)[prompt])
            cells.append(f"{found.copies()} / {found.any_match()}")
        rows.append((prompt, painted.kinds[prompt], *cells))
    return Table(
        f"Images that copy, of {painted.ground.images} seeds each: their own / any memorized one",
        ("prompt", "kind", *(line.title for line in painted.lines)),
        rows,
        ["A copy has a similarity of 0.7 or more. An empty cell was not measured; a note says why."],
    )
