"""Measure one table, lay it beside the published one, keep the result: what `netweight reproduce TABLE` does.

Every run has a folder of its own, `OUT/ID-SCALE/`, with result.json (the measurement), report.json and report.html. A
finished run is reused; an unfinished one starts again in the same folder, where the table function may have kept
what lets it resume. `items` is everything that the five papers show as a table or a figure, and how far it can be
measured here: what `netweight reproduce --list` prints. Titles are ours.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

from netweight.errors import MissingExtra, OutputExists, Unsupported, UsageError
from netweight.report.finding import Finding, Number, Table, decode_json, encode_json
from netweight.report.report import Report, make_folder, write_text
from netweight_experiments.tables.registry import (
    Column,
    MeasuredTable,
    PublishedTable,
    Scale,
    TableEntry,
    find,
    published,
    published_ids,
    registered,
    unmet,
)

State: TypeAlias = Literal["reproduced here", "small stand-in", "needs data, GPU or package", "not measured"]

# Beginning of an id → the paper.
PAPERS = {
    "neuzip": "NeuZip (arXiv 2410.20650)",
    "hyperfl": "HyperFL (arXiv 2412.07187)",
    "repnoise": "RepNoise (arXiv 2405.14577)",
    "nemo": "NeMo (arXiv 2406.02366)",
    "w2w": "weights2weights (arXiv 2406.09413)",
}


@dataclass(frozen=True)
class Item:
    """One table or figure of a paper."""

    id: str
    """Its name here."""
    paper: str
    """The paper it belongs to."""
    title: str
    """What it shows."""
    state: State
    """How far it is measured."""
    reason: str
    """What is missing, why it cannot be, or what the small scale lacks; may be empty."""
    numbers: bool
    """Whether published numbers are at hand."""
    command: str
    """What measures it at its largest scale here or elsewhere; empty where nothing does."""


def items() -> tuple[Item, ...]:
    """Return the tables and figures that can be measured or that have published numbers, with their state."""
    numbered = dict.fromkeys(published_ids())
    everything = [*numbered, *(table_id for table_id in registered() if table_id not in numbered)]
    return tuple(
        Item(table_id, paper, title_of(table_id), *_state(table_id), table_id in numbered, _command(table_id))
        for prefix, paper in PAPERS.items()
        for table_id in everything
        if table_id.startswith(f"{prefix}-")
    )


def title_of(table_id: str) -> str:
    """Return what a table or figure shows: the published title, or the first line of what measures it."""
    numbers = published(table_id)
    if numbers is not None:
        return numbers.title
    return (registered()[table_id].run.__doc__ or table_id).strip().splitlines()[0]


def _state(table_id: str) -> tuple[State, str]:
    entry = registered().get(table_id)
    if entry is None:
        return "not measured", "no function of this version measures it"
    missing = "; ".join(unmet(entry.needs))
    if missing:
        return "needs data, GPU or package", missing
    at_size = f"paper scale needs {' and '.join(entry.paper_needs)}" if entry.paper_needs else ""
    return ("small stand-in" if entry.stand_in else "reproduced here"), at_size


_PLACEHOLDERS = {"model": "--model FOLDER", "judge": "--judge MODULE:FUNCTION"}


def _command(table_id: str) -> str:
    """What to type where everything that it needs is there."""
    entry = registered().get(table_id)
    if entry is None:
        return ""
    data = "NETWEIGHT_DATA=FOLDER " if any(need.startswith("data:") for need in entry.needs) else ""
    if not entry.paper_needs:
        return f"{data}netweight reproduce {table_id}"
    options = "".join(f" {_PLACEHOLDERS[option]}" for option in entry.options if option in _PLACEHOLDERS)
    return f"{data}netweight reproduce {table_id} --scale paper{options}"


# Version of result.json.
FORMAT = 1
_MEASURED: TypeAdapter[MeasuredTable] = TypeAdapter(MeasuredTable)
_THIRD_PARTY = "third-party re-run"


@dataclass(frozen=True)
class Comparison:
    """One number of a table, published and measured."""

    row: str
    """Name of the row, as published where both exist."""
    column: str
    """Name of the column."""
    unit: str
    """Unit of the three numbers; of both sides where ours is another measure."""
    better: str | None
    """Which direction is better, or None."""
    published: Number | None
    """The paper's number, or None."""
    measured: Number | None
    """Ours, or None."""
    difference: float | None
    """Measured minus published; None when one is missing, or another measure."""


@dataclass(frozen=True)
class Reproduction:
    """A measured table beside the published one."""

    id: str
    """The table."""
    scale: Scale
    """"small" or "paper"."""
    folder: Path
    """Where its files are."""
    reused: bool
    """Whether a finished run was found and taken."""
    published: PublishedTable | None
    """The paper's table, or None."""
    measured: MeasuredTable
    comparisons: tuple[Comparison, ...]
    """Both, number by number."""

    @property
    def published_name(self) -> str:
        """What the published numbers are called: a third party's are never called the paper's."""
        third = self.published is not None and self.published.source == _THIRD_PARTY
        return _THIRD_PARTY if third else "published"

    def to_json(self) -> dict[str, Any]:
        """Return what `netweight reproduce --json` prints."""
        return {
            "id": self.id,
            "scale": self.scale,
            "folder": str(self.folder),
            "reused": self.reused,
            "published": self.published is not None,
            "source": None if self.published is None else self.published.source,
            "rows": [encode_json(asdict(comparison)) for comparison in self.comparisons],
            "differs": list(self.measured.differs),
            "notes": list(self.measured.notes),
            "findings": [finding.to_json() for finding in self.measured.findings],
            "report": str(self.folder / "report.html"),
        }


def run_table(
    table_id: str,
    *,
    scale: Scale = "small",
    out: str | os.PathLike[str],
    overwrite: bool = False,
    options: Mapping[str, Any] | None = None,
    command: str | None = None,
) -> Reproduction:
    """Measure a table, or take the finished measurement of an earlier run, and write its report."""
    if scale not in ("small", "paper"):
        raise UsageError(f"There is no scale {scale!r}.", cure="Use small or paper.")
    entry = find(table_id)
    given = _checked_options(entry, options or {})
    numbers = published(table_id)
    folder = Path(out) / f"{table_id}-{scale}"
    file = folder / "result.json"
    measured = None if overwrite or not file.exists() else _load(file, given)
    reused = measured is not None
    if measured is None:
        measured = _measure(entry, scale, folder, given)
        write_text(file, _dump(measured, entry, scale, given))
    result = Reproduction(table_id, scale, folder, reused, numbers, measured, compare(numbers, measured))
    if not reused or not (folder / "report.html").exists():
        write_report(result, command=command)
    return result


def compare(numbers: PublishedTable | None, measured: MeasuredTable) -> tuple[Comparison, ...]:
    """Lay a measured table beside the published one."""
    known = {column.name: column for column in (numbers.columns if numbers else ())}
    ours: dict[tuple[str, str], tuple[Column, str, Number | None]] = {}
    for row in measured.rows:
        for own, value in zip(measured.columns, row.values, strict=True):
            column = known.get(measured.labels.get(own.name, own.name), own)
            ours[measured.labels.get(row.name, row.name), column.name] = (column, own.unit or column.unit, value)
    theirs = {
        (row.name, column.name): (column, column.unit, value)
        for row in (numbers.rows if numbers else ())
        for column, value in zip(known.values(), row.values, strict=True)
    }
    pairs = []
    for place in {**theirs, **ours}:
        column = (theirs.get(place) or ours[place])[0]
        nothing = (column, column.unit, None)
        (_, unit, paper), (_, own_unit, here) = theirs.get(place, nothing), ours.get(place, nothing)
        if paper is not None or here is not None:
            alike = paper is not None and here is not None and unit == own_unit
            both = unit if unit == own_unit else f"{unit}; here {own_unit}"
            difference = float(here) - float(paper) if alike else None  # type: ignore[arg-type]
            pairs.append(Comparison(*place, both, column.better, paper, here, difference))
    return tuple(pairs)


def write_report(result: Reproduction, *, command: str | None = None) -> Path:
    """Write report.json and report.html of a reproduction into its folder."""
    numbers, measured = result.published, result.measured
    report = Report(
        f"{result.id}, measured again",
        summary=_summary(result),
        command=command or f"netweight reproduce {result.id} --scale {result.scale}",
        inputs=measured.inputs,
    )
    report.section(
        title_of(result.id),
        measured.findings,
        tables=[*measured.tables, _comparison_table(result)],
        figures=measured.figures,
        intro="\n\n".join(numbers.notes) if numbers else "",
        question=f"Does what {numbers.table if numbers else 'the figure'} shows hold here?",
    )
    return report.write(result.folder)


def _summary(result: Reproduction) -> str:
    numbers = result.published
    if numbers is None:
        return "No published numbers are at hand, so there is nothing to lay beside what was measured."
    if numbers.source == _THIRD_PARTY:
        return (
            f"Statistics of a third-party re-run of “{numbers.paper}” (arXiv {numbers.arxiv}), beside measured ones "
            f"at scale {result.scale}. The published numbers are a third party's, not the paper's."
        )
    return f"{numbers.table} of “{numbers.paper}” (arXiv {numbers.arxiv}) at scale {result.scale}."


def _comparison_table(result: Reproduction) -> Table:
    """The comparison for a page: columns that would be empty are left out, a repeated row name is printed once."""
    cells: dict[str, list[Any]] = {
        "unit": [c.unit for c in result.comparisons],
        "better": [c.better for c in result.comparisons],
        result.published_name: [c.published for c in result.comparisons],
        "measured": [c.measured for c in result.comparisons],
        "difference": [c.difference for c in result.comparisons],
    }
    shown = {name: column for name, column in cells.items() if any(value not in (None, "") for value in column)}
    names = [c.row for c in result.comparisons]
    first = [name if number == 0 or name != names[number - 1] else "" for number, name in enumerate(names)]
    columns: list[list[Any]] = [first, [c.column for c in result.comparisons], *shown.values()]
    rows = list(zip(*columns, strict=True))
    notes = [*result.measured.notes, *(f"Differs from the paper: {sentence}" for sentence in result.measured.differs)]
    title = f"{result.published_name.capitalize()} beside measured" if result.published else "Measured"
    return Table(title, [Column(name) for name in ("row", "column", *shown)], rows, notes)


def _checked_options(entry: TableEntry, options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in entry.options:
            takes = ", ".join(entry.options) or "none"
            raise UsageError(f"Table {entry.id} takes no option {name!r}.", cure=f"It takes: {takes}.")
    return given


def _measure(entry: TableEntry, scale: Scale, folder: Path, options: Mapping[str, Any]) -> MeasuredTable:
    missing = unmet(entry.needs)
    if missing:
        raise MissingExtra(f"Table {entry.id} {'; '.join(missing)}.")
    make_folder(folder)
    started = time.monotonic()
    measured = entry.run(scale, folder, **options)
    seconds = time.monotonic() - started
    took = f"Measured in {seconds:.0f} s." if seconds >= 1 else "Measured in less than a second."
    return replace(measured, notes=(*measured.notes, took))


def _dump(measured: MeasuredTable, entry: TableEntry, scale: Scale, options: Mapping[str, Any]) -> str:
    content = {
        "netweight_result": FORMAT,
        "id": entry.id,
        "scale": scale,
        "options": {name: str(value) for name, value in sorted(options.items())},
        **asdict(measured),
        "findings": [finding.to_json() for finding in measured.findings],
    }
    return json.dumps(encode_json(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _load(file: Path, options: Mapping[str, Any]) -> MeasuredTable:
    cure = "Measure again with --overwrite, or choose another --out."
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["netweight_result"] != FORMAT:
            raise ValueError(f"format {data['netweight_result']}")
        if data["options"] != {name: str(value) for name, value in options.items()}:
            had = ", ".join(f"{name}={value}" for name, value in data["options"].items()) or "no options"
            raise OutputExists(f"{file} holds a run with {had}.", cure=cure)
        fields: Any = decode_json({name: data[name] for name in MeasuredTable.__dataclass_fields__ if name in data})
        return _MEASURED.validate_python({**fields, "findings": [Finding.from_json(one) for one in data["findings"]]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unsupported(f"{file} is not the result of a run of this version: {error!r}.", cure=cure) from error
