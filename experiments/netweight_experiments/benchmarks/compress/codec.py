"""The measurement: every contender made ready and checked bit for bit, then all of them timed in the same rounds."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import TypeAdapter

from netweight import codec
from netweight.core.environment import describe, installed_version
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive
from netweight.core.threads import usable_cores
from netweight.errors import MissingExtra, NetweightError, Unsupported
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, paired_ratio
from netweight.report.finding import Finding
from netweight.report.report import write_text
from netweight_experiments.benchmarks.compress.codec_data import (
    GAUSSIAN,
    IN_CACHE,
    PEERS,
    DataSet,
    Peer,
    Ready,
    missing,
    raw_bytes,
    tensors_over,
)
from netweight_experiments.timing import Case, Samples, interleave, kept_heap

INSTALL = 'pip install "netweight[bench]"'
_PACKAGES = ("zipnn", "zstandard", "lz4", "blosc2", "openzl", "lmzip", "glyd", "pcodec", "scipy")
Who: TypeAlias = tuple[str, str | None, str | None]  # contender, path, level


def run_benchmark(
    sets: Sequence[DataSet], *, repeats: int, seed: int, command: str, quick: bool = False, progress: Progress = QUIET
) -> Result:
    """Measure the codec and its peers."""
    # First, with the C library's memory management as it is, decoding into new outputs. Then, with freed memory kept,
    # both directions with warm pages, with one thread and with two.
    if importlib.util.find_spec("scipy") is None:
        raise MissingExtra("The intervals need scipy, which is not installed.", cure=f"Run: {INSTALL}")
    load = {"before": os.getloadavg()}
    threads = (1, 2) if usable_cores() > 1 else (1,)
    absent = missing()
    peers = [peer for peer in PEERS if peer not in absent]
    left_out = [] if len(threads) > 1 else ["two threads: this process may use one core only"]
    left_out += [
        f"{peer.name} on {data.dtype}: it does not know the dtype"
        for data in sets
        for peer in peers
        if not _takes(peer, data)
    ]
    rows = [row for data in sets for row in _fresh(data, peers, repeats, seed, progress)]
    with kept_heap() as warm_heap:
        for data in sets:
            for number in threads:
                rows += _warm(data, peers, number, repeats, seed, progress)
    return Result(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        quick=quick,
        repeats=repeats,
        seed=seed,
        environment=_environment(),
        load={**load, "after": os.getloadavg()},
        warm_heap=warm_heap,
        missing={peer.name: INSTALL for peer in absent},
        left_out=tuple(dict.fromkeys(left_out)),
        data=tuple(data.describe() for data in sets),
        rows=tuple(rows),
    )


def _fresh(data: DataSet, peers: list[Peer], repeats: int, seed: int, progress: Progress) -> Iterator[Row]:
    """Decode into new memory, one thread: netweight, and zipnn, whose functions always return new memory."""
    fastest = settings(threads=1)[0]
    who: Who = (OURS, *fastest)
    contenders: dict[tuple[Who, Mode], Ready] = {
        (who, "fresh"): fresh(data, fastest, 1, pooled=False),
        (who, "pooled"): fresh(data, fastest, 1, pooled=True),
    }
    for peer in peers:
        if peer.name == "zipnn" and _takes(peer, data):
            contenders[(peer.name, None, None), "fresh"] = peer.ready(data.raw, data.dtype, 1)
    cases = []
    for (who, mode), ready in contenders.items():
        _check(who[0], data, ready)
        # netweight's pool is emptied where it must not help
        cases.append(Case((who, mode), _decoding(ready), ready.prepare if who[0] == OURS else lambda: None))
    what = f"{data.name} {data.dtype}, new outputs"
    samples = interleave(cases, repeats=repeats, seed=seed, progress=progress, description=what)
    codec.trim_pool()
    for (who, mode), ready in contenders.items():
        yield _row(data, who, "decode", mode, 1, ready, samples[who, mode])


def _warm(data: DataSet, peers: list[Peer], threads: int, repeats: int, seed: int, progress: Progress) -> Iterator[Row]:
    """Encode and decode with warm pages."""
    contenders: dict[Who, Ready] = {}
    for setting in settings(threads=threads):
        contenders[OURS, *setting] = ready_of(data, setting, threads)
    for peer in peers:
        if _takes(peer, data):
            contenders[peer.name, None, None] = peer.ready(data.raw, data.dtype, threads)
    cases: list[Case[tuple[Who, Direction]]] = []
    for who, ready in contenders.items():
        _check(who[0], data, ready)
        cases.append(Case((who, "decode"), _decoding(ready)))
        cases.append(Case((who, "encode"), ready.encode, ready.prepare))
    what = f"{data.name} {data.dtype}, {threads} thread{'s' if threads > 1 else ''}"
    samples = interleave(cases, repeats=repeats, seed=seed, progress=progress, description=what)
    directions: tuple[Direction, ...] = ("decode", "encode")
    for who, ready in contenders.items():
        for direction in directions:
            yield _row(data, who, direction, "warm", threads, ready, samples[who, direction])


def _decoding(ready: Ready) -> Callable[[Any], object]:
    return lambda _: ready.decode()


def _row(
    data: DataSet, who: Who, direction: Direction, mode: Mode, threads: int, ready: Ready, samples: Samples
) -> Row:
    name, path, level = who
    return Row(
        data.name, data.dtype, name, path, level, direction, mode, threads, data.nbytes, ready.stored_nbytes, samples
    )


def _takes(peer: Peer, data: DataSet) -> bool:
    return peer.dtypes is None or data.dtype in peer.dtypes


def _check(name: str, data: DataSet, ready: Ready) -> None:
    """Refuse to time what does not give back the bytes it was given."""
    if memoryview(ready.restored()).cast("B") != data.raw.data:
        raise NetweightError(
            f"{name} did not restore {data.name} as {data.dtype} bit for bit, so its times mean nothing.",
            cure="Leave this file out, and report it.",
        )


def _environment() -> dict[str, Any]:
    facts = describe({"codec_path": codec.active_path(), "codec_paths": list(codec.available_paths())})
    packages = {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}
    return {**facts, "packages": {**facts["packages"], **packages}}


Setting: TypeAlias = tuple[str, str]  # code path, and level of the encoder


def settings(*, threads: int) -> list[Setting]:
    """List the ways worth measuring: on the fastest path every level, on the others the default."""
    paths = codec.available_paths()
    compiled = [path for path in paths if path != "python"] or paths  # plain Python only where there is nothing else
    levels = [(compiled[0], level) for level in ("default", "fast", "high", "max")]
    return levels[:1] if threads > 1 else [levels[0], *((path, "default") for path in compiled[1:]), *levels[1:]]


def ready_of(data: DataSet, setting: Setting, threads: int) -> Ready:
    """Make the codec ready to decode into memory that is there and warm."""
    encode, (path, _) = _encoder(data, setting, threads), setting
    blobs = encode(None)
    memory = np.zeros_like(data.raw)
    targets = tensors_over(memory, data.tensors)

    def decode() -> None:
        for blob, target in zip(blobs, targets, strict=True):
            codec.decode_into(blob, target, threads=threads, path=path)

    def restored() -> Any:
        memory.fill(0xA5)
        decode()
        return memory

    return Ready(sum(map(len, blobs)), encode, decode, restored)


def fresh(data: DataSet, setting: Setting, threads: int, *, pooled: bool) -> Ready:
    """Make the codec ready to decode into new tensors, all of which are kept until the last is there."""
    encode, (path, _) = _encoder(data, setting, threads), setting
    blobs = encode(None)

    def decode() -> list[Any]:
        return [codec.decode(blob, threads=threads, path=path) for blob in blobs]

    def restored() -> Any:
        return np.concatenate([raw_bytes(tensor) for tensor in decode()])

    prepare: Callable[[], Any] = (lambda: None) if pooled else codec.trim_pool
    return Ready(sum(map(len, blobs)), encode, decode, restored, prepare)


def _encoder(data: DataSet, setting: Setting, threads: int) -> Callable[[Any], list[bytes]]:
    path, level = setting

    def encode(_: Any) -> list[bytes]:
        return [codec.encode(tensor, level=level, threads=threads, path=path) for tensor in data.tensors]

    return encode


# Name of the real model's data sets.
MINILM = "MiniLM"


@dataclass(frozen=True)
class Target:
    """One target."""

    name: str
    """What should be reached."""
    bound: float
    """The least value."""
    data: str
    """Name of the data set."""
    dtype: str
    quantity: str
    """"ratio", "gbps", or the contender whose speed is the unit."""
    direction: str = "decode"
    """What is timed."""
    mode: str = "warm"
    """Where outputs go."""
    path: str | None = None
    """Code path; None for avx512."""
    level: str = "default"
    threads: int = 1
    """Number of threads."""


class SpeedTable(NamedTuple):
    """Measurements for people: everything on one data set, with outputs in one place and one number of threads."""

    title: str
    headers: Sequence[str]
    lines: Sequence[tuple[str, ...]]
    """One per contender."""


_CACHE, _MEMORY = ("in cache", IN_CACHE), ("MiniLM from memory", MINILM)

# The targets, for a core with AVX-512 (VBMI2).
_AGAINST: tuple[tuple[str, float, str, dict[str, Any]], ...] = (
    ("decode bf16 against zipnn", 5.5, "zipnn", {}),
    ("decode bf16 against memcpy", 1.0, "memcpy", {}),
    ("encode bf16 against zipnn", 4.0, "zipnn", {"direction": "encode"}),
    ("AVX2 decode against zipnn", 2.0, "zipnn", {"path": "avx2"}),
    ("portable decode against zipnn", 1.0, "zipnn", {"path": "portable"}),
)
TARGETS = (
    *(
        Target(f"{name}, {where}", bound, data, "BF16", unit, **how)
        for name, bound, unit, how in _AGAINST
        for where, data in (_CACHE, _MEMORY)
    ),
    Target("Python API, fresh outputs, against zipnn's", 3.5, MINILM, "BF16", "zipnn", mode="fresh"),
    Target("ratio, MiniLM as bf16, default", 1.513, MINILM, "BF16", "ratio"),
    Target("ratio, N(0, 0.02) as bf16, default", 1.521, GAUSSIAN, "BF16", "ratio"),
    Target("ratio, MiniLM as bf16, max", 1.516, MINILM, "BF16", "ratio", level="max"),
    Target("ratio, N(0, 0.02) as bf16, max", 1.526, GAUSSIAN, "BF16", "ratio", level="max"),
    Target("decode bf16, max, in cache", 1.0, IN_CACHE, "BF16", "gbps", level="max"),
    Target("decode bf16, max, MiniLM from memory", 1.0, MINILM, "BF16", "gbps", level="max"),
    Target("ratio, MiniLM as fp32", 1.2205, MINILM, "F32", "ratio"),
    Target("decode fp32, in cache", 6.0, IN_CACHE, "F32", "gbps"),
    Target("decode fp32, MiniLM from memory", 6.0, MINILM, "F32", "gbps"),
    Target("ratio, MiniLM as fp16", 1.17, MINILM, "F16", "ratio"),
    *(
        Target(f"{way} 67 MB, two threads against one", 1.9, GAUSSIAN, "BF16", "one thread", way, threads=2)
        for way in ("decode", "encode")
    ),
)


def findings(*results: Result) -> list[Finding]:
    """Lay results beside the targets: of each the first that has it."""
    found = ([_finding(result, target) for result in results] for target in TARGETS)
    return [next((finding for finding in each if finding.value is not None), each[0]) for each in found]


def _finding(result: Result, target: Target) -> Finding:
    unit = {"ratio": "", "gbps": "GB/s"}.get(target.quantity, "×")
    row = _row_targets(result, target)
    if row is None:
        reason = f"{target.data} as {target.dtype} was not measured this way"
        return Finding(target.name, None, better="higher", target=target.bound, unit=unit, detail={"reason": reason})
    common: dict[str, Any] = {"better": "higher", "target": target.bound, "unit": unit}
    if target.quantity == "ratio":
        return Finding(target.name, row.ratio, **common)
    common |= {"n": len(row.seconds), "seeds": (result.seed,)}
    if target.quantity == "gbps":
        return Finding(target.name, row.gbps(), **common)
    if target.quantity == "one thread":
        base = _row_targets(result, target, threads=1)
        ratio = None if base is None else result.speedup(row, base)
    else:
        ratio = result.against(row, target.quantity)
    if ratio is None:
        return Finding(target.name, None, detail={"reason": f"{target.quantity} was not measured"}, **common)
    ci95 = None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
    return Finding(target.name, ratio.estimate, ci95=ci95, **common)


def _row_targets(result: Result, target: Target, *, threads: int | None = None) -> Row | None:
    """The row that a target is about: of the fastest path, which is measured first, where the path does not matter."""
    wanted = {name: getattr(target, name) for name in ("data", "dtype", "direction", "mode", "level", "threads")}
    if target.path is not None or target.quantity not in ("ratio", "one thread"):
        wanted["path"] = target.path or "avx512"
    return result.find(contender=OURS, **(wanted | ({} if threads is None else {"threads": threads})))


def target_table(*results: Result) -> list[tuple[str, str, str, str, str]]:
    """Return rows for people: what, target, measured, 95 % interval, verdict."""
    lines = []
    for finding in findings(*results):
        verdict = {True: "met", False: "missed", None: "not measured"}[finding.passed]
        interval = "" if finding.ci95 is None else f"{finding.ci95[0]:.2f} to {finding.ci95[1]:.2f}"
        unit = finding.unit if finding.unit == "×" else f" {finding.unit}".rstrip()
        measured = "–" if finding.value is None else _number(finding) + unit
        lines.append((finding.name, f"≥ {finding.target}{unit}", measured, interval, verdict))
    return lines


def _number(finding: Finding) -> str:
    """A ratio of sizes to four places, a speed to two; more where rounding would hide a target that was missed."""
    value, bound = finding.value, finding.target
    assert isinstance(value, int | float)
    assert isinstance(bound, int | float)
    for places in range(2 if finding.unit else 4, 9):
        text = f"{value:.{places}f}"
        if (float(text) >= bound) == (value >= bound):
            return text
    return repr(value)


def label(row: Row) -> str:
    """Name a contender: netweight with its path and level, peers by their names."""
    if row.contender != OURS:
        return row.contender
    pooled = ", pooled" if row.mode == "pooled" else ""
    return f"{OURS} {row.path}, {row.level}{pooled}"


def speed_tables(result: Result) -> list[SpeedTable]:
    """Sort the rows of a result into tables for people, in the order of the measurements."""
    groups: dict[str, dict[str, dict[str, Row]]] = {}
    for row in result.rows:
        where = "warm" if row.mode == "warm" else "new outputs"
        threads = "one thread" if row.threads == 1 else f"{row.threads} threads"
        contenders = groups.setdefault(f"{row.data} as {row.dtype}, {where}, {threads}", {})
        contenders.setdefault(label(row), {})[row.direction] = row
    return [_speed_table(result, title, contenders) for title, contenders in groups.items()]


def _speed_table(result: Result, title: str, contenders: dict[str, dict[str, Row]]) -> SpeedTable:
    directions = [d for d in ("decode", "encode") if any(d in rows for rows in contenders.values())]
    headers = ["", "ratio", *(text for d in directions for text in (f"{d} GB/s", "× zipnn", "× memcpy"))]
    lines = []
    for name, rows in contenders.items():
        cells = [f"{next(iter(rows.values())).ratio:.4f}"]
        for row in (rows.get(direction) for direction in directions):
            cells += (
                [_speed(row.gbps()), _times(result, row, "zipnn"), _times(result, row, "memcpy")] if row else [""] * 3
            )
        lines.append((name, *cells))
    return SpeedTable(title, headers, lines)


def _times(result: Result, row: Row, base: str) -> str:
    ratio = result.against(row, base)
    return "" if ratio is None else _speed(ratio.estimate)


def _speed(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


FORMAT = 1
OURS = "netweight"
BASELINES = ("zipnn", "memcpy")

Direction: TypeAlias = Literal["encode", "decode"]
# warm: outputs in memory that is there already; fresh: every output is new memory; pooled: new tensors in memory that
# the codec kept from earlier ones.
Mode: TypeAlias = Literal["warm", "fresh", "pooled"]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a baseline, by the median of the rounds."""

    estimate: float
    """The median."""
    low: float | None = None
    """Lower end of its 95 % interval; None if there were too few rounds for one."""
    high: float | None = None
    """Upper end."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    data: str
    """Name of the data set."""
    dtype: str
    contender: str
    """"netweight" or the name of a peer."""
    path: str | None
    """Code path, of netweight."""
    level: str | None
    """Level, of netweight."""
    direction: Direction
    """What was timed."""
    mode: Mode
    """Where outputs went."""
    threads: int
    """Number of threads."""
    nbytes: int
    """Plain bytes."""
    stored_nbytes: int
    """Compressed bytes."""
    samples: Samples
    """Seconds of every round."""

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
        """10^9 plain bytes per second, by the median; on the clock that counts unless another is named."""
        samples: tuple[float, ...] = self.seconds if clock is None else getattr(self.samples, clock)
        return self.nbytes / statistics.median(samples) / 1e9


@dataclass(frozen=True)
class Result:
    """A whole run."""

    created: str
    """When."""
    command: str
    """The command line."""
    quick: bool
    """Whether it was a trial run on little data, whose times mean nothing."""
    repeats: int
    """Timed rounds."""
    seed: int
    """Seed of order, data and intervals."""
    environment: Mapping[str, Any]
    """Versions and machine."""
    load: Mapping[str, tuple[float, ...]]
    """The machine's load averages before and after."""
    warm_heap: bool
    """Whether the C library could be told to keep freed memory, for peers that allocate their outputs."""
    missing: Mapping[str, str]
    """Peers that are not installed, with the command that installs them."""
    left_out: tuple[str, ...]
    """What was not measured, and why."""
    data: tuple[Mapping[str, Any], ...]
    """What was compressed."""
    rows: tuple[Row, ...] = field(repr=False)
    """The measurements."""

    def find(self, **wanted: Any) -> Row | None:
        """Return the first row whose fields have the values given, or None."""
        return next((row for row in self.rows if all(getattr(row, name) == wanted[name] for name in wanted)), None)

    def against(self, row: Row, contender: str) -> Ratio | None:
        """Say how many times as fast a row is as a contender was in the same rounds; None if that was not measured."""
        mode = "fresh" if row.mode == "pooled" else row.mode
        same = {"data": row.data, "dtype": row.dtype, "direction": row.direction, "threads": row.threads}
        base = self.find(contender=contender, mode=mode, **same)
        return None if base is None or base is row else self.speedup(row, base)

    def speedup(self, row: Row, base: Row) -> Ratio:
        """Say how many times as fast one row is as another, round by round, on the clock of the first."""
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


_RESULT = TypeAdapter(Result)


def write_result(result: Result, path: Path) -> None:
    """Write a result, a line per row; the file appears whole or not at all."""
    content = result.to_json()
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in content.pop("rows"))
    head = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")
    write_text(path, f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')


def read_result(path: Path) -> Result:
    """Read a result that `write_result` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["netweight_benchmark"] != FORMAT or data["name"] != "codec":
            raise ValueError("another format")
        return _RESULT.validate_python(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unsupported(
            f"{path} is not a result of this benchmark: {error!r}.", cure="Run: netweight benchmark codec"
        ) from error
