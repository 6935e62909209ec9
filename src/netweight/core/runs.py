"""Resumable fan-out: many runs of one function over many configurations, remembered in a ledger. Any layer may use it.

Each run is appended to the ledger and synced as soon as it ends. A kill at any moment loses at most the runs that were
under way; the next call starts where the last one stopped.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from netweight.core import digest
from netweight.core.engines import Engine, Outcome, in_process, local_processes
from netweight.core.environment import netweight_version
from netweight.core.ledger import Ledger
from netweight.errors import UsageError

__all__ = ["Engine", "Outcome", "Result", "in_process", "local_processes", "map_runs"]

C = TypeVar("C")


@final
@dataclass(frozen=True)
class Result(Generic[C]):
    """How one configuration's run ended.

    Attributes:
        config: The configuration as it was given.
        digest: Its digest, the key in the ledger.
        value: What the function returned, as JSON gives it back (tuples become lists); None if the run failed.
        error: The traceback of a failed run, else None.
        seconds: Wall-clock time of the run.
        remembered: True if the ledger knew the result and nothing was run.
    """

    config: C
    digest: str
    value: Any
    error: str | None
    seconds: float
    remembered: bool

    @property
    def ok(self) -> bool:
        """Whether the run succeeded."""
        return self.error is None


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
    """Run `fn` once for every configuration, remembering results, so that a second call continues the first.

    A run that failed is recorded with its traceback, yielded as a `Result` whose `ok` is False, and tried again by
    the next call. Equal configurations run once.

    Args:
        fn: Takes one configuration and returns JSON values (numbers, text, lists, mappings; a dataclass or pydantic
            model is stored as a mapping). Must depend on nothing but its configuration.
        items: Configurations: dataclasses, pydantic models or JSON values; see `digest.canonical_json`.
        ledger: The file to remember results in. It belongs to one function.
        engine: Where runs happen.
        ordered: Yield in the order of `items` instead of remembered results first and then as runs end.

    Returns:
        An iterator of one `Result` per item. Runs happen while it is consumed.

    Raises:
        UsageError: A configuration cannot be written as JSON, the ledger belongs to another function or is in use
            by another process.
        CorruptBlob: The ledger is damaged.
    """
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
