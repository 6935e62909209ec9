"""Tables as grids: columns are functions of a row, rows are made of runs, and a folder remembers each run."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from netweight.core.engines import in_process
from netweight.errors import NetweightError, UsageError
from netweight.job import Job
from netweight.metrics.intervals import interval_finding as interval_finding
from netweight_experiments.tables.registry import Column, MeasuredTable, Row


class Named(Protocol):
    """A run's settings, with a name that tells it from others."""

    @property
    def name(self) -> str: ...


R = TypeVar("R")
N = TypeVar("N", bound=Named)
T = TypeVar("T")
# A column and what it shows of a row: a number, or None.
Cell = tuple[Column, Callable[[T], Any]]


def grid(rows: Mapping[str, T], cells: Sequence[Cell[T]], **more: Any) -> MeasuredTable:
    """Lay rows out by columns; `more` are the other fields of `MeasuredTable`."""
    return MeasuredTable(tuple(column for column, _ in cells), rows_of(rows, cells), **more)


def rows_of(rows: Mapping[str, T], cells: Sequence[Cell[T]]) -> tuple[Row, ...]:
    """Return the rows of a grid alone."""
    return tuple(Row(name, tuple(value(row) for _, value in cells)) for name, row in rows.items())


def run_each(run: Callable[[R], Any], settings: Sequence[R], *, folder: Path, name: str = "runs") -> list[Any]:
    """Run one after another in this process what `NAME.jsonl` does not remember; return JSON values, in order."""
    values = []
    with Job.open(folder, shared=True) as job:
        for result in job.map(run, settings, name=name, engine=in_process, ordered=True):
            if not result.ok:
                what = getattr(result.config, "name", result.config)
                raise NetweightError(f"{what} failed: {result.reason}", cure="Run it again to continue.")
            values.append(result.value)
    return values


def chosen(runs: Sequence[N], only: str | None) -> list[N]:
    """Return the runs whose name fits a pattern; None fits all, "none" none."""
    if only == "none":
        return []
    found = [run for run in runs if only is None or fnmatch(run.name, only)]
    if not found:
        cure = f"Names are like {runs[0].name!r}; * fits any part."
        raise UsageError(f"The pattern {only!r} fits no run.", cure=cure)
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def typed(kind: type[T], value: Any) -> T:
    """Return a dataclass of what a ledger gives back: lists are tuples again, mappings the dataclasses they were."""
    made: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]  # mypy takes T for unhashable
    return made


def finished(folder: Path, kind: type[R], name: str = "runs") -> dict[R, dict[str, Any]]:
    """Return every run that a folder remembers and that ended well, with what it returned."""
    # `kind`: the dataclass of the runs' settings
    with Job.open(folder, reading=True) as job:
        return {typed(kind, row["config"]): row["value"] for row in job.records(name) if row["error"] is None}


def finished_of(runs: Sequence[R], folder: Path, kind: type[R]) -> dict[R, dict[str, Any]]:
    """Return those of the runs that a folder remembers, of which there must be one."""
    known = finished(folder, kind)
    found = {run: known[run] for run in runs if run in known}
    if not found:
        raise UsageError("No run of the table is finished.", cure="Leave --only out, or give another pattern.")
    return found


def as_text(image: Tensor) -> str:
    """Return an image within 0 and 1, of any shape, in 256 shades as text, so that a ledger can hold it."""
    return base64.b64encode((image * 255).round().byte().numpy().tobytes()).decode()


def picture(text: str, like: Sequence[int]) -> Tensor:
    """Return a picture that `as_text` wrote of shape `like`, `(c, h, w)`; within 0 and 1, shape `(h, w, c)`."""
    pixels = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return pixels.view(tuple(like)).permute(1, 2, 0) / 255
