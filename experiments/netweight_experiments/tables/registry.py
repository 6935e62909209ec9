"""What can be measured again: functions registered under the id of the table or figure they measure.

A module that defines tables imports nothing at its top that an extra brings; it is listed in `MODULES` and imported
when the registry is first asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError
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
    "repnoise.models",
    "nemo.mitigations",
    "nemo.neurons",
    "nemo.detection",
    "w2w.edits",
    "w2w.people",
    "w2w.components",
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

    name: str  # a measured row is laid beside the published one of the same name
    values: tuple[Number | None, ...]  # one per column; None where there is no number


@dataclass(frozen=True)
class Measured:
    """What a table function measured."""

    columns: tuple[Column, ...]  # columns of the measured table
    rows: tuple[Row, ...]
    # What differs from the paper's set-up, one sentence each; empty only for the very same set-up.
    differs: tuple[str, ...] = ()
    # Measured row or column name → name of the published one it is to be laid beside, where they differ.
    labels: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()  # what the numbers say, with intervals and targets where there are any
    figures: tuple[Figure, ...] = ()  # pictures
    tables: tuple[Table, ...] = ()  # further tables of the report, for what reads better side by side
    notes: tuple[str, ...] = ()  # lines for below the table
    inputs: Mapping[str, str] = field(default_factory=dict)  # name of each input → its digest

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

    id: str  # for example "neuzip-fig1"
    run: Callable[..., Measured]  # the function that measures it: `(scale, out, **options) -> Measured`
    # What it needs at any scale: names of extras, "gpu", or "data:FOLDER" below `NETWEIGHT_DATA`.
    needs: tuple[str, ...]
    paper_needs: tuple[str, ...]  # what it needs besides, in words, at the paper's scale
    stand_in: bool  # whether its small scale measures a stand-in for what the paper used

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that `run` takes beside scale and out."""
        kinds = inspect.signature(self.run).parameters.values()
        return tuple(p.name for p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY)


def table(
    table_id: str, *, needs: tuple[str, ...] = (), paper_needs: tuple[str, ...] = (), stand_in: bool = False
) -> Callable[[Callable[..., Measured]], Callable[..., Measured]]:
    """Register the decorated function as the one that measures a table or figure."""
    # The function takes `scale` ("small": minutes on a laptop; "paper": the paper's size) and `out`, a folder of its
    # own in which it may keep what lets it resume, and optional keyword-only arguments; it returns a `Measured`.
    for need in needs:
        if need not in _EXTRAS and need != "gpu" and not need.startswith("data:"):
            raise UsageError(f"Table {table_id!r} needs {need!r}, which is unknown.", cure=f"Known: {sorted(_EXTRAS)}.")

    def register(run: Callable[..., Measured]) -> Callable[..., Measured]:
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
    near = ", ".join(nearest_names(table_id, entries))
    raise NameNotFound(
        f"No table {table_id!r} can be measured.", cure=f"Nearest: {near}. All: netweight reproduce --list"
    )


def unmet(needs: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is missing of a table's needs, each as a sentence with the cure."""
    return tuple(sentence for need in needs if (sentence := _missing(need)))


def _missing(need: str) -> str:
    if need in _EXTRAS:
        installed = importlib.util.find_spec(_EXTRAS[need]) is not None
        return "" if installed else f'needs the {need} extra: pip install "netweight[{need}]"'
    if need == "gpu":
        return "" if _has_gpu() else "needs a CUDA GPU"
    folder = need.removeprefix("data:")
    root = os.environ.get("NETWEIGHT_DATA")
    if root and (Path(root) / folder).is_dir():
        return ""
    return f"needs the data set {folder}: set NETWEIGHT_DATA to a folder that holds {folder}/"


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
