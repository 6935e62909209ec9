"""The measurement: every contender made ready and checked bit for bit, then all of them timed in the same rounds."""

from __future__ import annotations

import datetime
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from netweight import codec
from netweight.core.environment import describe, installed_version, usable_cores
from netweight.core.progress import QUIET, Progress
from netweight.errors import MissingExtra, NetweightError
from netweight.methods.compress.benchmark import ours
from netweight.methods.compress.benchmark.data import DataSet
from netweight.methods.compress.benchmark.peers import PEERS, Peer, Ready, missing
from netweight.methods.compress.benchmark.result import OURS, Direction, Mode, Result, Row
from netweight.metrics.timing import Case, Samples, interleave, kept_heap

__all__ = ["run_benchmark"]

INSTALL = 'pip install "netweight[bench]"'
_PACKAGES = ("zipnn", "zstandard", "lz4", "blosc2", "scipy")
Who: TypeAlias = tuple[str, str | None, str | None]  # contender, path, level


def run_benchmark(
    sets: Sequence[DataSet],
    *,
    repeats: int,
    seed: int,
    command: str,
    quick: bool = False,
    progress: Progress = QUIET,
) -> Result:
    """Measure the codec and its peers.

    First, with the C library's memory management as it is, decoding into new outputs. Then, with freed memory kept,
    both directions with warm pages, with one thread and with two.

    Args:
        sets: What to compress.
        repeats: Timed rounds; at least 5 for intervals.
        seed: Seed of the order of runs and of the intervals.
        command: The command line, for the record.
        quick: Whether this is a trial run; noted in the result.
        progress: Where progress is shown.

    Raises:
        MissingExtra: scipy, which computes the intervals, is not installed.
        NetweightError: A contender did not restore the bytes it was given.
    """
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
    fastest = ours.settings(threads=1)[0]
    who: Who = (OURS, fastest.path, fastest.level)
    contenders: dict[tuple[Who, Mode], Ready] = {
        (who, "fresh"): ours.fresh(data, fastest, 1, pooled=False),
        (who, "pooled"): ours.fresh(data, fastest, 1, pooled=True),
    }
    for peer in peers:
        if peer.name == "zipnn" and _takes(peer, data):
            other: Who = (peer.name, None, None)
            contenders[other, "fresh"] = peer.ready(data.raw, data.dtype, 1)
    for (who, _), ready in contenders.items():
        _check(who[0], data, ready)
    cases = [Case(key, _decoding(ready), _before(ready, key)) for key, ready in contenders.items()]
    samples = interleave(
        cases, repeats=repeats, seed=seed, progress=progress, description=f"{data.name} {data.dtype}, new outputs"
    )
    codec.trim_pool()
    for (who, mode), ready in contenders.items():
        yield _row(data, who, "decode", mode, 1, ready, samples[who, mode])


def _before(ready: Ready, key: tuple[Who, Mode]) -> Any:
    """What is done before decoding: netweight's pool is emptied where it must not help; peers need nothing."""
    return ready.prepare if key[0][0] == OURS else lambda: None


def _warm(data: DataSet, peers: list[Peer], threads: int, repeats: int, seed: int, progress: Progress) -> Iterator[Row]:
    """Encode and decode with warm pages."""
    contenders: dict[Who, Ready] = {}
    for setting in ours.settings(threads=threads):
        contenders[OURS, setting.path, setting.level] = ours.ready(data, setting, threads)
    for peer in peers:
        if _takes(peer, data):
            contenders[peer.name, None, None] = peer.ready(data.raw, data.dtype, threads)
    for (name, _, _), ready in contenders.items():
        _check(name, data, ready)
    cases: list[Case[tuple[Who, Direction]]] = []
    for who, ready in contenders.items():
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
