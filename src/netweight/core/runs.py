"""A file that remembers finished work, one JSON object per line, safe against kills. Any layer may use it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from netweight.core import digest
from netweight.core.engines import Engine, Outcome, local_processes
from netweight.core.environment import netweight_version
from netweight.core.files import take_lock
from netweight.errors import CorruptBlob, UsageError


@final
class Ledger(AbstractContextManager["Ledger"]):
    """A file of finished runs, one JSON object per line, each with a `digest`; a context manager."""

    # Opening takes a lock, so that two processes cannot work on one ledger, and drops a last line that a kill left
    # unfinished.

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        try:
            self._lock()
            self.records = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        if not take_lock(self._file):
            raise UsageError(
                f"Another process is working on the ledger {self.path}.", cure="Wait for it, or name another ledger."
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        content = self.path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            os.ftruncate(self._file, complete)
            os.fsync(self._file)
        return _parsed(content[:complete], self.path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record and return when it is on the disk; a later record replaces an earlier one of its digest."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=True).encode() + b"\n"
        view, size = memoryview(line), os.fstat(self._file).st_size
        try:
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError:  # a full disk: half a line must not stand before the next one
            os.ftruncate(self._file, size)
            raise
        self.records[record["digest"]] = dict(record)

    def close(self) -> None:
        """Close the file and release the lock."""
        os.close(self._file)

    def __exit__(self, *raised: object) -> None:
        """Close at the end of the block."""
        self.close()


def read_ledger(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read the records of a ledger by their digests, without taking it; another process may be adding to it."""
    path = Path(path)
    content = path.read_bytes() if path.is_file() else b""
    return _parsed(content[: content.rfind(b"\n") + 1], path)


def _parsed(content: bytes, path: Path) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            record = json.loads(line)
            records[record["digest"]] = record
        except (ValueError, KeyError, TypeError):
            raise CorruptBlob(
                f"Line {number} of the ledger {path} is not a record of a run.",
                cure="Delete that line to run its configuration again, or name another ledger.",
            ) from None
    return records


C = TypeVar("C")


@final
@dataclass(frozen=True)
class Result(Generic[C]):
    """How one configuration's run ended."""

    config: C  # the configuration as it was given
    digest: str  # its digest, the key in the ledger
    value: Any  # what the function returned, as JSON gives it back (tuples become lists); None if the run failed
    error: str | None  # the traceback of a failed run, else None
    seconds: float  # wall-clock time of the run
    remembered: bool  # true if the ledger knew the result and nothing was run

    @property
    def ok(self) -> bool:
        """Whether the run succeeded."""
        return self.error is None

    @property
    def reason(self) -> str:
        """The last line of a failed run's traceback."""
        return (self.error or "").strip().rpartition("\n")[2]


def _function_name(fn: Callable[..., Any]) -> str:
    """Name the function that a ledger belongs to, looking through `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def map_runs(
    fn: Callable[[C], Any],
    items: Sequence[C],
    *,
    ledger: str | Path,
    engine: Engine = local_processes,
    ordered: bool = False,
) -> Iterator[Result[C]]:
    """Run `fn` once for every configuration, remembering results, so that a second call continues the first."""
    # A run that failed is recorded with its traceback, yielded as a `Result` whose `ok` is False, and tried again by
    # the next call. Equal configurations run once.
    keys = [digest.of_config(item) for item in items]
    results = _map(fn, dict(zip(keys, items, strict=True)), Path(ledger), engine)
    return _in_order(keys, items, results) if ordered else _as_they_come(keys, items, results)


def _as_they_come(keys: list[str], items: Sequence[C], results: Iterator[Result[C]]) -> Iterator[Result[C]]:
    """Yield each result once for every item that asked for it."""
    wanted: dict[str, list[C]] = {}
    for key, item in zip(keys, items, strict=True):
        wanted.setdefault(key, []).append(item)
    for result in results:
        for item in wanted[result.digest]:
            yield Result(item, result.digest, result.value, result.error, result.seconds, result.remembered)


def _in_order(keys: list[str], items: Sequence[C], results: Iterator[Result[C]]) -> Iterator[Result[C]]:
    """Hold results back until those before them have been yielded."""
    known: dict[str, Result[C]] = {}
    for key, item in zip(keys, items, strict=True):
        while key not in known:
            result = next(results)
            known[result.digest] = result
        held = known[key]
        yield Result(item, key, held.value, held.error, held.seconds, held.remembered)


def _map(fn: Callable[[C], Any], items: Mapping[str, C], path: Path, engine: Engine) -> Iterator[Result[C]]:
    """Yield remembered results, then run what is left and record each as it ends."""
    name = _function_name(fn)
    with Ledger(path) as ledger:
        _check_owner(ledger, name)
        left = []
        for key, item in items.items():
            record = ledger.records.get(key)
            if record is None or record["error"] is not None:
                left.append(key)
            else:
                yield Result(item, key, record["value"], None, record["seconds"], remembered=True)
        for index, outcome in engine(fn, [items[key] for key in left]) if left else ():
            key = left[index]
            record = _record(key, name, items[key], outcome)
            ledger.append(record)
            yield Result(items[key], key, record["value"], record["error"], outcome.seconds, remembered=False)


def _check_owner(ledger: Ledger, name: str) -> None:
    others = {record.get("function") for record in ledger.records.values()} - {name}
    if others:
        raise UsageError(
            f"The ledger {ledger.path} holds runs of {others.pop()!r}, not of {name!r}.", cure="Name another ledger."
        )


def _record(key: str, name: str, config: Any, outcome: Outcome) -> dict[str, Any]:
    """Make the ledger's record of a run; a value that JSON cannot hold turns the run into a failure."""
    value, error = None, outcome.error
    if error is None:
        try:
            value = json.loads(digest.canonical_json(outcome.value, allow_nan=True))
        except UsageError as problem:
            error = f"The run's value cannot be kept in a ledger. {problem}"
    return {
        "digest": key,
        "function": name,
        "config": json.loads(digest.canonical_json(config)),
        "value": value,
        "error": error,
        "seconds": outcome.seconds,
        "netweight": netweight_version(),
    }
