"""What the benchmark measured, as JSON and back: one row per contender, data set, direction, mode and threads.

Raw samples are kept, so that anybody can compute other statistics than the medians shown here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from netweight.core.seeds import derive
from netweight.errors import Unsupported
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, paired_ratio
from netweight.metrics.timing import Samples
from netweight.report.report import write_text

__all__ = ["BASELINES", "FORMAT", "OURS", "Direction", "Mode", "Ratio", "Result", "Row", "read_result", "write_result"]

FORMAT = 1
OURS = "netweight"
BASELINES = ("zipnn", "memcpy")

Direction: TypeAlias = Literal["encode", "decode"]
Mode: TypeAlias = Literal["warm", "fresh", "pooled"]
"""warm: outputs in memory that is there already; fresh: every output is new memory; pooled: new tensors in memory that
the codec kept from earlier ones."""


@final
@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a baseline, by the median of the rounds.

    Attributes:
        estimate: The median.
        low: Lower end of its 95 % interval; None if there were too few rounds for one.
        high: Upper end.
    """

    estimate: float
    low: float | None = None
    high: float | None = None


@final
@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        data: Name of the data set.
        dtype: Its dtype.
        contender: "netweight" or the name of a peer.
        path: Code path, of netweight.
        level: Level, of netweight.
        direction: What was timed.
        mode: Where outputs went.
        threads: Number of threads.
        nbytes: Plain bytes.
        stored_nbytes: Compressed bytes.
        samples: Seconds of every round.
    """

    data: str
    dtype: str
    contender: str
    path: str | None
    level: str | None
    direction: Direction
    mode: Mode
    threads: int
    nbytes: int
    stored_nbytes: int
    samples: Samples

    @property
    def ratio(self) -> float:
        """Plain bytes per compressed byte."""
        return self.nbytes / self.stored_nbytes

    @property
    def clock(self) -> Literal["cpu", "wall"]:
        """The clock that counts: with one thread CPU time, which other programs disturb least; else wall time."""
        return "cpu" if self.threads == 1 else "wall"

    @property
    def seconds(self) -> tuple[float, ...]:
        """The samples on the clock that counts."""
        return self.samples.cpu if self.clock == "cpu" else self.samples.wall

    def gbps(self, clock: str | None = None) -> float:
        """10^9 plain bytes per second, by the median; on the clock that counts unless another is named.

        Args:
            clock: Name of the clock; None for the one that counts.

        Returns:
            GB/s.
        """
        samples: tuple[float, ...] = self.seconds if clock is None else getattr(self.samples, clock)
        return self.nbytes / statistics.median(samples) / 1e9


@final
@dataclass(frozen=True)
class Result:
    """A whole run.

    Attributes:
        created: When.
        command: The command line.
        quick: Whether it was a trial run on little data, whose times mean nothing.
        repeats: Timed rounds.
        seed: Seed of order, data and intervals.
        environment: Versions and machine.
        load: The machine's load averages before and after.
        warm_heap: Whether the C library could be told to keep freed memory, for peers that allocate their outputs.
        missing: Peers that are not installed, with the command that installs them.
        left_out: What was not measured, and why.
        data: What was compressed.
        rows: The measurements.
    """

    created: str
    command: str
    quick: bool
    repeats: int
    seed: int
    environment: Mapping[str, Any]
    load: Mapping[str, tuple[float, ...]]
    warm_heap: bool
    missing: Mapping[str, str]
    left_out: tuple[str, ...]
    data: tuple[Mapping[str, Any], ...]
    rows: tuple[Row, ...] = field(repr=False)

    def find(self, **wanted: Any) -> Row | None:
        """Return the first row whose fields have the values given, or None.

        Args:
            **wanted: Fields of a row and their values.
        """
        return next((row for row in self.rows if _fits(row, wanted)), None)

    def against(self, row: Row, contender: str) -> Ratio | None:
        """Say how many times as fast a row is as a contender was in the same rounds; None if that was not measured.

        Args:
            row: A row of this result.
            contender: Its name.
        """
        mode = "fresh" if row.mode == "pooled" else row.mode
        same = {"data": row.data, "dtype": row.dtype, "direction": row.direction, "threads": row.threads}
        base = self.find(contender=contender, mode=mode, **same)
        return None if base is None or base is row else self.speedup(row, base)

    def speedup(self, row: Row, base: Row) -> Ratio:
        """Say how many times as fast one row is as another, round by round, on the clock of the first.

        Args:
            row: A row of this result.
            base: Another one, measured in the same rounds.
        """
        mine, theirs = row.seconds, getattr(base.samples, row.clock)
        ratios = [theirs[i] * row.nbytes / (mine[i] * base.nbytes) for i in range(len(mine))]
        if len(ratios) < MINIMUM_FOR_BOOTSTRAP:
            return Ratio(statistics.median(ratios))
        seed = derive(self.seed, "interval", row.contender, base.contender)
        interval = paired_ratio(ratios, [1.0] * len(ratios), seed=seed, resamples=2000)
        return Ratio(interval.estimate, interval.low, interval.high)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON value, with medians and ratios beside the samples."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "rows"}
        return {"netweight_benchmark": FORMAT, "name": "codec", **plain, "rows": [self._row(row) for row in self.rows]}

    def _row(self, row: Row) -> dict[str, Any]:
        ratios = {name: self.against(row, name) for name in BASELINES}
        return {
            **asdict(row),
            "ratio": row.ratio,
            "clock": row.clock,
            "gbps": {clock: row.gbps(clock) for clock in ("cpu", "wall")},
            "times_as_fast_as": {name: asdict(ratio) for name, ratio in ratios.items() if ratio is not None},
        }


def write_result(result: Result, path: Path) -> None:
    """Write a result, a line per row; the file appears whole or not at all.

    Args:
        result: What was measured.
        path: The file.

    Raises:
        UsageError: The folder cannot be made.
        OutputFailed: The folder cannot be written.
    """
    content = result.to_json()
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in content.pop("rows"))
    head = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")
    write_text(path, f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')


def read_result(path: Path) -> Result:
    """Read a result that `write_result` wrote.

    Args:
        path: The file.

    Raises:
        Unsupported: The file is not one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["netweight_benchmark"] != FORMAT or data["name"] != "codec":
            raise ValueError("another format")
        rows = tuple(_read_row(row) for row in data["rows"])
        fields: dict[str, Any] = {name: data[name] for name in Result.__dataclass_fields__ if name != "rows"}
        return Result(**(fields | {"data": tuple(data["data"]), "left_out": tuple(data["left_out"])}), rows=rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unsupported(
            f"{path} is not a result of this benchmark: {error!r}.", cure="Run: netweight benchmark codec"
        ) from error


def _read_row(data: Mapping[str, Any]) -> Row:
    samples = Samples(tuple(data["samples"]["wall"]), tuple(data["samples"]["cpu"]))
    return Row(**{name: data[name] for name in Row.__dataclass_fields__ if name != "samples"}, samples=samples)


def _fits(row: Row, wanted: Mapping[str, Any]) -> bool:
    return all(getattr(row, name) == value for name, value in wanted.items())
