"""What can be measured again: functions registered by the id of their table or figure; the papers' numbers.

A module that defines tables imports nothing at its top that an extra brings; it is listed in `MODULES` and imported
when the registry is first asked. Published numbers are one JSON file per table in `netweight_experiments/published/`,
whose README says what each field means.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from netweight.core.names import not_found
from netweight.errors import Unsupported, UsageError
from netweight.report.finding import Column as Column
from netweight.report.finding import Figure, Finding, Number, Table

# Modules that register tables.
MODULES = (
    "neuzip.bits",
    "neuzip.pretraining",
    "neuzip.finetuning",
    "neuzip.inference",
    "neuzip.throughput",
    "hyperfl.federations",
    "hyperfl.adapters",
    "hyperfl.attacks",
    "repnoise.attacks",
    "nemo.mitigations",
    "w2w.edits",
)

Scale: TypeAlias = Literal["small", "paper"]
_REGISTER: dict[str, TableEntry] = {}

# What a table may need: an extra of this package (with a module that tells whether it is installed), or a thing.
_EXTRAS = {
    "llm": "transformers",
    "diffusion": "diffusers",
    "federated": "flwr",
    "dp": "opacus",
    "evidence": "matplotlib",
    "bench": "zipnn",
}


@dataclass(frozen=True)
class Row:
    """A row of a published or measured table."""

    name: str
    """A measured row is laid beside the published one of the same name."""
    values: tuple[Number | None, ...]
    """One per column; None where there is no number."""


@dataclass(frozen=True)
class MeasuredTable:
    """What a table function measured."""

    columns: tuple[Column, ...]
    """Columns of the measured table."""
    rows: tuple[Row, ...]
    differs: tuple[str, ...] = ()
    """What differs from the paper's set-up, one sentence each; empty only for the very same set-up."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """MeasuredTable row or column name → name of the published one it is to be laid beside, where they differ."""
    findings: tuple[Finding, ...] = ()
    """What the numbers say, with intervals and targets where there are any."""
    figures: tuple[Figure, ...] = ()
    """Pictures."""
    tables: tuple[Table, ...] = ()
    """Further tables of the report, for what reads better side by side."""
    notes: tuple[str, ...] = ()
    """Lines for below the table."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Name of each input → its digest."""

    def __post_init__(self) -> None:
        """Check that rows fit columns and that labels name something."""
        for row in self.rows:
            if len(row.values) != len(self.columns):
                sizes = f"{len(row.values)} values for {len(self.columns)} columns"
                raise UsageError(f"Measured row {row.name!r} has {sizes}.", cure="Give one per column, or None.")
        names = {row.name for row in self.rows} | {column.name for column in self.columns}
        for name in self.labels:
            if name not in names:
                raise UsageError(
                    f"The label {name!r} names no measured row or column.", cure=f"There are: {sorted(names)}."
                )


@dataclass(frozen=True)
class TableEntry:
    """A registered table."""

    id: str
    """For example "neuzip-fig1"."""
    run: Callable[..., MeasuredTable]
    """The function that measures it: `(scale, out, **options) -> MeasuredTable`."""
    needs: tuple[str, ...]
    """What it needs at any scale: names of extras, "gpu", or "data:FOLDER" below `NETWEIGHT_DATA`."""
    paper_needs: tuple[str, ...]
    """What it needs besides, in words, at the paper's scale."""
    stand_in: bool
    """Whether its small scale measures a stand-in for what the paper used."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that `run` takes beside scale and out."""
        kinds = inspect.signature(self.run).parameters.values()
        return tuple(p.name for p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY)


def table(
    table_id: str, *, needs: tuple[str, ...] = (), paper_needs: tuple[str, ...] = (), stand_in: bool = False
) -> Callable[[Callable[..., MeasuredTable]], Callable[..., MeasuredTable]]:
    """Register the decorated function as the one that measures a table or figure."""
    # The function takes `scale` ("small": minutes on a laptop; "paper": the paper's size) and `out`, a folder of its
    # own in which it may keep what lets it resume, and optional keyword-only arguments; it returns a `MeasuredTable`.
    for need in needs:
        if need not in _EXTRAS and need != "gpu" and not need.startswith("data:"):
            raise UsageError(f"Table {table_id!r} needs {need!r}, which is unknown.", cure=f"Known: {sorted(_EXTRAS)}.")

    def register(run: Callable[..., MeasuredTable]) -> Callable[..., MeasuredTable]:
        entry = TableEntry(table_id, run, needs, paper_needs, stand_in)
        if _REGISTER.setdefault(table_id, entry).run is not run:
            raise UsageError(f"Table {table_id!r} is registered twice.", cure="Keep one of the two functions.")
        return run

    return register


def registered() -> Mapping[str, TableEntry]:
    """Return all registered tables by id; imports the modules that define them."""
    for module in MODULES:
        importlib.import_module(f"netweight_experiments.tables.{module}")
    return dict(_REGISTER)


def find(table_id: str) -> TableEntry:
    """Return a registered table."""
    entries = registered()
    if table_id in entries:
        return entries[table_id]
    raise not_found(f"No table {table_id!r} can be measured.", table_id, entries, "All: netweight reproduce --list")


def unmet(needs: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is missing of a table's needs, each as a sentence with the cure."""
    return tuple(sentence for need in needs if (sentence := _missing(need)))


def _missing(need: str) -> str:
    if need in _EXTRAS:
        installed = importlib.util.find_spec(_EXTRAS[need]) is not None
        return "" if installed else f'needs the {need} extra: pip install "netweight[{need}]"'
    if need == "gpu":
        return "" if importlib.import_module("torch").cuda.is_available() else "needs a CUDA GPU"
    folder = need.removeprefix("data:")
    root = os.environ.get("NETWEIGHT_DATA")
    if root and (Path(root) / folder).is_dir():
        return ""
    return f"needs the data set {folder}: set NETWEIGHT_DATA to a folder that holds {folder}/"


@dataclass(frozen=True)
class PublishedTable:
    """One table as its paper prints it."""

    id: str
    """Name of the file without ".json", and of the table that measures it."""
    paper: str
    """Title of the paper."""
    arxiv: str
    """Its number on arXiv."""
    table: str
    """Where in the paper ("Table 3(a)")."""
    title: str
    """What the table shows, in our words."""
    setup: dict[str, Any]
    """How the numbers came about: stated, reference_code, inferred, rerun, unknown."""
    columns: tuple[Column, ...]
    """Columns with unit and direction."""
    rows: tuple[Row, ...]
    """One value per column; None where the paper has no number."""
    notes: tuple[str, ...]
    """What a reader must know before comparing."""
    source: str
    """Where the numbers were taken from."""


def published_folder() -> Path:
    """Return the folder that holds the files."""
    return Path(__file__).resolve().parents[1] / "published"


def published_ids() -> tuple[str, ...]:
    """Return the ids of all tables with published numbers, sorted by name and number."""
    return tuple(sorted((path.stem for path in published_folder().glob("*.json")), key=_natural))


def published(table_id: str) -> PublishedTable | None:
    """Return the published numbers of a table, or None where the paper gives none (most figures)."""
    path = published_folder() / f"{table_id}.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        fields = {name: data[name] for name in ("id", "paper", "arxiv", "table", "title", "setup", "source")}
        columns = tuple(Column(c["name"], unit=c["unit"], better=c["better"]) for c in data["columns"])
        rows = tuple(Row(row["name"], tuple(row["values"])) for row in data["rows"])
        return PublishedTable(**fields, columns=columns, rows=rows, notes=tuple(data["notes"]))
    except (ValueError, KeyError, TypeError) as error:
        what = f"{path} is not a table of published numbers: {error!r}."
        raise Unsupported(what, cure="Restore the file.") from error


def required(table_id: str) -> PublishedTable:
    """Return the published numbers of a table that has some."""
    numbers = published(table_id)
    assert numbers is not None
    return numbers


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which table2 comes before table11."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
