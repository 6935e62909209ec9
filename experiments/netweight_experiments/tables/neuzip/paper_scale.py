"""Everything that is measured at the paper's size, in one go and within a limit of time: `netweight benchmark gpu`.

Each run is kept as soon as it has ended. What no longer fits into the limit is left out, said so, and done by the next
call with the same folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from netweight.core.environment import describe
from netweight.core.progress import QUIET, Progress
from netweight.report.finding import Table, encode_json
from netweight.report.report import Report
from netweight_experiments.tables.compare import Comparison, compare
from netweight_experiments.tables.grid import R, finished, run_each
from netweight_experiments.tables.neuzip.paper_scale_inference import WAYS, infer, measured_inference
from netweight_experiments.tables.neuzip.paper_scale_models import (
    PAPER,
    TRIAL,
    Extent,
    chosen_device,
    further_runs,
    runs_of,
)
from netweight_experiments.tables.neuzip.paper_scale_training import measured_training, train
from netweight_experiments.tables.neuzip.throughput import joined, measured_throughput, throughput
from netweight_experiments.tables.neuzip.training import COMPRESSED, FIXED, LOMO, VANILLA
from netweight_experiments.tables.registry import MeasuredTable, published


@dataclass(frozen=True)
class AtSize:
    """What was measured."""

    device: str
    """Name of the device."""
    tables: Mapping[str, MeasuredTable]
    """Table or figure → what was measured of it."""
    left_out: tuple[str, ...]
    """Runs for which there was no time, in words."""
    report: Path
    """The page."""

    def comparisons(self, table_id: str) -> tuple[Comparison, ...]:
        """Lay a table beside the published one; rows and columns that only one of them has stay alone."""
        return compare(published(table_id), self.tables[table_id])

    def to_json(self) -> dict[str, Any]:
        """Return everything, for the result file."""
        return {
            "benchmark": "gpu",
            "device": self.device,
            "environment": describe({"driver": _driver()}),
            "left_out": list(self.left_out),
            "tables": {
                table_id: {
                    "numbers": [encode_json(asdict(one)) for one in self.comparisons(table_id)],
                    "findings": [finding.to_json() for finding in measured.findings],
                    "tables": [encode_json(asdict(own)) for own in measured.tables],
                    "differs": list(measured.differs),
                    "notes": list(measured.notes),
                }
                for table_id, measured in self.tables.items()
            },
        }


def measure_at_size(
    out: Path,
    *,
    device: str | None = None,
    trial: bool = False,
    minutes: float = 10.0,
    command: str,
    progress: Progress = QUIET,
) -> AtSize:
    """Measure figure 4 and tables 1 and 3(a) of NeuZip on models of the paper's shapes with random weights."""
    place = chosen_device(device or ("cpu" if trial else None))
    until = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    left_out: list[str] = []

    def all_of(what: str, function: Callable[[R], Any], runs: Sequence[R]) -> dict[R, Any]:
        found, late = _in_time(function, runs, out, until, progress, what)
        left_out.extend(late)
        return found

    # What has targets first: two ways to run the first shape, and three to train it.
    inference = runs_of(WAYS, place.type, trial=trial)
    training = runs_of((COMPRESSED, FIXED, LOMO, VANILLA), place.type, trial=trial)
    extent: Extent = TRIAL if trial else PAPER
    sides = [_Throughput(place.type, trial, side) for side in extent.sides]
    inferred = all_of("inference", infer, inference[:2])
    further = further_runs((COMPRESSED, FIXED, LOMO, VANILLA), place.type, trial=trial)
    trained = all_of("training", train, [*training[:3], *further])
    rates = all_of("throughput", _throughput, sides)
    inferred |= all_of("inference", infer, inference[2:])
    trained |= all_of("training", train, training[3:])
    tables: dict[str, MeasuredTable] = {}
    if rates:
        tables["neuzip-fig4"] = measured_throughput(joined(list(rates.values())), place)
    if trained:
        tables["neuzip-table1"] = measured_training(trained)
    if inferred:
        tables["neuzip-table3-decoder"] = measured_inference(inferred)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    done = AtSize(name, tables, tuple(left_out), out / "report.html")
    _write(done, out, command, trial)
    return done


@dataclass(frozen=True)
class _Throughput:
    device: str
    trial: bool
    side: int


def _throughput(run: _Throughput) -> dict[str, Any]:
    extent: Extent = TRIAL if run.trial else PAPER
    return throughput(chosen_device(run.device), run.side, rounds=extent.rounds)


def _driver() -> str | None:
    """NVIDIA's driver, as the kernel names it."""
    place = Path("/proc/driver/nvidia/version")
    return place.read_text().splitlines()[0] if place.is_file() else None


def _in_time(
    function: Callable[[R], Any], runs: Sequence[R], out: Path, until: float, progress: Progress, what: str
) -> tuple[dict[R, Any], list[str]]:
    """Run what there is time for; what an earlier call has finished takes none."""
    found: dict[R, Any] = {}
    late: list[str] = []
    kept = finished(out, type(runs[0]), what) if runs else {}
    for run in progress.track(runs, what, len(runs), unit="runs"):
        if time.monotonic() > until and run not in kept:
            late.append(" ".join(str(value) for value in asdict(run).values() if value != ""))  # type: ignore[call-overload]
            continue
        (found[run],) = run_each(function, [run], folder=out, name=what)
    return found, late


def _write(done: AtSize, out: Path, command: str, trial: bool) -> None:
    means = " A trial with tiny models: the numbers mean nothing." if trial else ""
    report = Report(
        f"NeuZip at the paper's size, on {done.device}",
        summary="Memory and speed on models of the paper's shapes with random weights, which compress like trained "
        f"ones (figure 5 of the paper).{means}",
        command=command,
    )
    for table_id, measured in done.tables.items():
        numbers = [one for one in done.comparisons(table_id) if one.measured is not None]
        rows = [(one.row, one.column, one.unit, one.published, one.measured) for one in numbers]
        headers = ("row", "column", "unit", "published", "measured")
        beside = Table("Published beside measured", headers, rows, measured.notes)
        report.section(table_id, measured.findings, figures=measured.figures, tables=(beside, *measured.tables))
    report.write(out)
