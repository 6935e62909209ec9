"""Work that can be stopped at any moment and continued: one lock, one state, its records, and one way to publish.

A job lives in a folder:

    state.safetensors   the newest state, compressed, replaced whole; it names the key that it belongs to
    NAME.jsonl          records and results of runs, one line each, synced
    job.json            the key that records belong to
    job.lock            held while somebody works here; the system releases it when a process is killed
    tree/               the folder to be published, while it grows
    publishing.json     there while `tree` is put in its place; the next run finishes or undoes that

A key holds settings and digests of inputs; work of another key is refused, and the differences are named.
What an exception or a kill leaves is continued by the next call. A job that has kept nothing yet leaves nothing.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from netweight.core.atomic_writes import naming_failures, publish, refuse_existing, sync, work_of
from netweight.core.digests import canonical_json, digest_config
from netweight.core.engines import Engine, Outcome, local_processes
from netweight.core.environment import netweight_version
from netweight.core.file_locks import lock, refuse_planted, take_lock
from netweight.core.records import read_record, write_record
from netweight.core.work_account import note_checkpoint, note_needed, note_stored, note_used
from netweight.errors import CorruptBlob, OutputExists, UnsafeInput, UsageError
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.store.reader import Store


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
        except OSError:
            # The disk is full. An incomplete line must not remain before the next one.
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
                cure="Delete this line, so that its configuration runs again, or name another ledger.",
            ) from None
    return records


C = TypeVar("C")


@final
@dataclass(frozen=True)
class RunResult(Generic[C]):
    """Result of one configuration's run."""

    config: C
    """The configuration as it was given."""
    digest: str
    """Digest of the configuration, which is the key in the ledger."""
    value: Any
    """Return value of the function after a round trip through JSON (tuples become lists); None if the run failed."""
    error: str | None
    """Traceback of a failed run; None if it succeeded."""
    seconds: float
    """Wall-clock time of the run in seconds."""
    from_ledger: bool
    """True if the ledger had the result, so that nothing was run."""

    @property
    def ok(self) -> bool:
        """True if the run succeeded."""
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
) -> Iterator[RunResult[C]]:
    """Run `fn` once for every configuration, remembering results, so that a second call continues the first."""
    # A run that failed is recorded with its traceback, yielded as a `RunResult` whose `ok` is False, and tried again by
    # the next call. Equal configurations run once.
    keys = [digest_config(item) for item in items]
    results = _map(fn, dict(zip(keys, items, strict=True)), Path(ledger), engine)
    return _in_order(keys, items, results) if ordered else _as_they_come(keys, items, results)


def _as_they_come(keys: list[str], items: Sequence[C], results: Iterator[RunResult[C]]) -> Iterator[RunResult[C]]:
    """Yield each result once for every item that asked for it."""
    waiting: dict[str, list[C]] = {}
    for key, item in zip(keys, items, strict=True):
        waiting.setdefault(key, []).append(item)
    for result in results:
        for item in waiting[result.digest]:
            yield RunResult(item, result.digest, result.value, result.error, result.seconds, result.from_ledger)


def _in_order(keys: list[str], items: Sequence[C], results: Iterator[RunResult[C]]) -> Iterator[RunResult[C]]:
    """Hold results back until those before them have been yielded."""
    remembered: dict[str, RunResult[C]] = {}
    for key, item in zip(keys, items, strict=True):
        while key not in remembered:
            result = next(results)
            remembered[result.digest] = result
        held = remembered[key]
        yield RunResult(item, key, held.value, held.error, held.seconds, held.from_ledger)


def _map(fn: Callable[[C], Any], items: Mapping[str, C], path: Path, engine: Engine) -> Iterator[RunResult[C]]:
    """Yield remembered results, then run what is left and record each as it ends."""
    name = _function_name(fn)
    with Ledger(path) as ledger:
        _check_owner(ledger, name)
        note_needed(path.stem, len(items))
        left = []
        for key, item in items.items():
            record = ledger.records.get(key)
            if record is None or record["error"] is not None:
                left.append(key)
            else:
                note_used(path.stem, path, key)
                yield RunResult(item, key, record["value"], None, record["seconds"], from_ledger=True)
        for index, outcome in engine(fn, [items[key] for key in left]) if left else ():
            key = left[index]
            record = _record(key, name, items[key], outcome)
            ledger.append(record)
            if outcome.error is None:
                note_stored(path, key)
            yield RunResult(items[key], key, record["value"], record["error"], outcome.seconds, from_ledger=False)


def _check_owner(ledger: Ledger, name: str) -> None:
    others = {record.get("function") for record in ledger.records.values()} - {name}
    if others:
        raise UsageError(
            f"The ledger {ledger.path} contains runs of {others.pop()!r}, not of {name!r}.", cure="Name another ledger."
        )


def _record(key: str, name: str, config: Any, outcome: Outcome) -> dict[str, Any]:
    """Make the ledger's record of a run; a value that JSON cannot hold turns the run into a failure."""
    value, error = None, outcome.error
    if error is None:
        try:
            value = json.loads(canonical_json(outcome.value, allow_nan=True))
        except UsageError as problem:
            error = f"The result of the run cannot be stored in a ledger. {problem}"
    return {
        "digest": key,
        "function": name,
        "config": json.loads(canonical_json(config)),
        "value": value,
        "error": error,
        "seconds": outcome.seconds,
        "netweight": netweight_version(),
    }


_KEY, _LOCK, _TREE, _PUBLISHING, _ASIDE = "job.json", "job.lock", "tree", "publishing.json", "aside"
_STATE, _JOB = "state.safetensors", "job"
_VERSION = 1
_NAMED = 5  # differences that a message names


# Files that make a folder a model, an adapter or a bank, which work must not be mixed with.
_MODELS = ("config.json", "model_index.json", "adapter_config.json", "netweight.json", "bank.json")


def _check_place(folder: Path, state: str, *, reading: bool) -> None:
    """Check that a folder can be one of work: no file, and no model on which no work was begun."""
    file = next((place for place in (folder, *folder.parents) if place.is_file()), None)
    if file is not None:
        place = "" if file == folder else f", so {folder} cannot be made"
        raise UsageError(
            f"{file} is a file, and a folder is needed{place}.", cure="Name another folder, such as --out."
        )
    begun = any((folder / name).exists() for name in (state, _KEY, _LOCK)) or any(folder.glob("*.jsonl"))
    if reading or begun:
        return
    if model := next((name for name in _MODELS if (folder / name).is_file()), None):
        raise OutputExists(
            f"{folder} contains a model ({model}), and results would be written among its files.",
            cure="Name another folder.",
        )


@final
class Job:
    """A folder of work that can be continued; made by `Job.open` or `Job.beside`.

    Attributes:
        folder: Where the job lives.
    """

    def __init__(self, folder: Path, *, owned: bool = False, reading: bool = False, shared: bool = False) -> None:
        self.folder = folder
        self._state = folder / _STATE
        self._key: Any = None
        self._noted = False
        self._owned, self._reading, self._shared = owned, reading, shared
        self._ledgers: dict[str, Ledger] = {}

    @classmethod
    @contextmanager
    def open(
        cls,
        folder: str | Path | Job,
        *,
        key: Any = None,
        of: str = "other work",
        state: str = _STATE,
        reading: bool = False,
        shared: bool = False,
    ) -> Iterator[Job]:
        """Open a job, to begin it or to continue it.

        Args:
            folder: Its folder, made if it is not there. Or a job that is open: then it takes the key, and stays open
                at the end of the block.
            key: All that decides the result, as `canonical_json` takes it: settings, digests of inputs. None takes
                over what is there.
            of: What the job is, for messages: "a federation".
            state: Name of the state's file.
            reading: Open without a lock; nothing can be written.
            shared: Leave the folder open to others: only `map` and `record` can be called, whose files are locked one
                by one. An open job stays as it is.

        Yields:
            The job.

        Raises:
            UsageError: The folder holds work of another key, or another process is working there; or it is a file.
            OutputExists: The folder is that of a model, and no work was begun there.
            CorruptBlob: The folder's key is damaged, or of another version.
            OutputFailed: The folder cannot be written.
        """
        if not isinstance(folder, Job):
            _check_place(Path(folder), state, reading=reading)
        if isinstance(folder, Job):
            if not shared:
                folder._claim(key, of, state)
            yield folder
        elif reading or shared:
            job = cls(Path(folder), reading=reading, shared=shared)
            job._claim(key, of, state)
            try:
                yield job
            finally:
                job._close_ledgers()
        else:
            with cls._locked(Path(folder), Path(folder), key, of, state) as job:
                yield job

    @classmethod
    @contextmanager
    def beside(
        cls,
        destination: str | Path,
        *,
        key: Any = None,
        of: str = "other work",
        state: str = _STATE,
        overwrite: bool | None = False,
        folder: Path | None = None,
    ) -> Iterator[Job]:
        """Open the job that makes a folder. Its own folder is `.NAME.netweight-work` beside it; it ends with `publish`.

        Args:
            destination: The folder to be made.
            key: As for `open`; so are the next two.
            of: What the job is.
            state: Name of the state's file.
            overwrite: Whether an existing destination may be replaced; None if nobody can allow that.
            folder: Where the job lives instead.

        Yields:
            The job.

        Raises:
            OutputExists: The destination exists.
            OutputFailed: The disk is full or the place cannot be written; finished work is kept.
            UsageError: As for `open`.
        """
        destination = Path(destination)
        check_destination(destination, overwrite=overwrite, folder=folder)
        with (
            naming_failures(destination),
            cls._locked(folder or work_of(destination), destination, key, of, state) as job,
        ):
            yield job

    @classmethod
    @contextmanager
    def _locked(cls, folder: Path, target: Path, key: Any, of: str, state: str) -> Iterator[Job]:
        job = cls(folder, owned=folder != target or not folder.exists())
        with ExitStack() as stack:
            stack.callback(job._leave)
            with naming_failures(target):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock(folder / _LOCK))
                stack.callback(job._close)
                job._settle()
                job._claim(key, of, state)
            yield job

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Read the state: its account and its tensors.

        Returns:
            The account and the tensors by name, or None before the first `save`.

        Raises:
            UsageError: It belongs to other work.
            CorruptBlob: The state is damaged; a digest of every tensor is checked.
        """
        if not self._state.exists():
            return None
        with self._opened() as (about, store, names):
            about.pop(_JOB, None)
            state = about, {name: store.get(name, check=True) for name in names}
        if not self._reading:
            note_checkpoint(self._state)
        return state

    @contextmanager
    def _opened(self) -> Iterator[tuple[dict[str, Any], Store, list[str]]]:
        try:
            with open_checkpoint(self._state, None, refusal="contains work with other settings or inputs") as opened:
                yield opened
        except (CorruptBlob, UnsafeInput, ValueError, KeyError) as error:
            reason = error.reason if isinstance(error, CorruptBlob | UnsafeInput) else f"{self._state}: {error!r}"
            raise CorruptBlob(reason, cure=f"Delete {self._state} to start again from the beginning.") from error

    def save(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Replace the state, all or nothing.

        Args:
            about: Its account: JSON values, by any name but "job".
            tensors: By any name but "about", of any device, dtype and shape; pairs are taken one at a time.

        Raises:
            OutputFailed: It could not be written; the older state is kept.
        """
        self._check_writable()
        if self._key is not None:
            about = {**about, _JOB: {"version": _VERSION, "key": self._key}}
        write_checkpoint(self._state, about, tensors.items() if isinstance(tensors, Mapping) else tensors)
        note_stored(self._state)

    def map(
        self,
        fn: Callable[[C], Any],
        items: Sequence[C],
        *,
        name: str = "runs",
        engine: Engine = local_processes,
        ordered: bool = False,
    ) -> Iterator[RunResult[C]]:
        """Run a function for every item that `NAME.jsonl` does not contain yet, see `map_runs`."""
        self._note_key()
        return map_runs(fn, items, ledger=self.folder / f"{name}.jsonl", engine=engine, ordered=ordered)

    def record(self, name: str, row: Mapping[str, Any], *, key: Any = None) -> None:
        """Append a row to `NAME.jsonl`, and return when it is on the disk.

        Args:
            name: File name of the records; `map` needs another one.
            row: JSON values.
            key: What the row is found by; a later row of the same key replaces it. None for a row that only adds.
        """
        self._note_key()
        if name not in self._ledgers:
            self._ledgers[name] = Ledger(self.folder / f"{name}.jsonl")
        ledger = self._ledgers[name]
        digest = digest_config({"row": len(ledger.records)} if key is None else key)
        ledger.append({**row, "digest": digest})
        note_stored(ledger.path, digest)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return all rows of `name`.jsonl; an incomplete last line, which a killed run leaves, is not a row."""
        return [_row(record) for record in self._read(name).values()]

    def recorded(self, name: str, key: Any) -> dict[str, Any] | None:
        """Return the row of a `key` in `name`.jsonl, or None."""
        digest = digest_config(key)
        record = self._read(name).get(digest)
        if record is None:
            return None
        if not self._reading:
            note_used(name, self.folder / f"{name}.jsonl", digest)
        return _row(record)

    @property
    def tree(self) -> Path:
        """The folder of the result, which `publish` moves to the destination."""
        tree = self.folder / _TREE
        tree.mkdir(exist_ok=True)
        return tree

    def file(self, name: str) -> Path:
        """Return the path `name` within `tree`; its folder is made. `whole_file` writes it whole or not at all."""
        file = self.tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def publish(self, destination: str | Path, *, overwrite: bool | None = False) -> None:
        """Put `tree` in the place of a folder, synced and in one step, and remove all else of the job.

        A kill before that step leaves all as it was; after it, the next job that opens here removes the rest.

        Args:
            destination: The folder to be, on the file system of the job.
            overwrite: Whether an existing one may be replaced; None if nobody can allow that.

        Raises:
            OutputExists: The destination exists.
            OutputFailed: The place cannot be written; the job is kept.
        """
        self._check_writable()
        destination = Path(destination)
        refuse_existing(destination, overwrite=overwrite)
        with naming_failures(destination):
            mark = {"tree": self.tree.stat().st_ino, "target": os.path.relpath(destination, self.folder)}
            write_record(self.folder / _PUBLISHING, mark, version=_VERSION)
            publish(self.tree, destination, aside=self.folder / _ASIDE)
            self._clear()

    def _claim(self, key: Any, of: str, state: str) -> None:
        """Refuse work of another key."""
        self._state = self.folder / state
        if key is None:
            return
        self._key = json.loads(_text(key))
        for held in self._held_keys():
            if changes := differences(held, self._key):
                raise UsageError(
                    f"{self.folder} contains {of} with other settings: {_named(changes)}.",
                    cure="Give the same settings to continue it, choose another folder, or delete the folder "
                    "to start again from the beginning.",
                )

    def _held_keys(self) -> Iterator[Any]:
        """Yield the keys of the state and of the records."""
        cure = f"Delete {self.folder} to start again from the beginning, or use the version of netweight that wrote it."
        if self._state.exists():
            with self._opened() as (about, _, _):
                held = about.get(_JOB)
            if held is not None:
                if held["version"] != _VERSION:
                    raise CorruptBlob(
                        f"{self._state} has the version {held['version']}, which this release cannot read.", cure=cure
                    )
                yield held["key"]
        if (self.folder / _KEY).is_file() and any(file.stat().st_size for file in self.folder.glob("*.jsonl")):
            try:
                yield read_record(self.folder / _KEY, lambda values: values["key"], version=_VERSION, of="a job")
            except CorruptBlob as error:
                raise CorruptBlob(error.reason, cure=cure) from error

    def _note_key(self) -> None:
        """Write whose the records are, before the first."""
        self._check_writable(rows=True)
        if self._key is not None and not self._noted:
            write_record(self.folder / _KEY, {"key": self._key}, version=_VERSION)
            self._noted = True

    def _empty(self) -> bool:
        """Return whether nothing is lost with the folder; a tree alone is unfinished."""
        names = {path.name for path in self.folder.iterdir() if not path.name.endswith(".netweight-part")}
        names -= {file.name for file in self.folder.glob("*.jsonl") if not file.stat().st_size}
        return names <= {_KEY, _LOCK, _TREE}

    def _settle(self) -> None:
        """Finish or undo a publication that a kill cut short."""
        mark, tree, aside = self.folder / _PUBLISHING, self.folder / _TREE, self.folder / _ASIDE
        if not mark.exists():
            return
        about = read_record(mark, dict, version=_VERSION, of="a publication")
        target = self.folder / about["target"]
        # The tree was already put in its place; what remains is old.
        if not tree.is_dir() or tree.stat().st_ino != about["tree"]:
            self._clear()
            return
        if aside.exists() and not target.exists():
            os.rename(aside, target)
            sync(target.parent)
        mark.unlink()

    def _clear(self) -> None:
        """Remove all of the job. The mark goes last: without it an older folder would be taken for the tree."""
        self._close_ledgers()
        for path in [path for path in self.folder.iterdir() if path.name not in (_LOCK, _PUBLISHING)]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (self.folder / _PUBLISHING).unlink(missing_ok=True)

    def _close(self) -> None:
        """Leave nothing where nothing was kept; runs while the lock is held."""
        self._close_ledgers()
        if self._empty():
            (self.folder / _KEY).unlink(missing_ok=True)
            if self._owned:
                self._clear()
        # Windows does not remove an open file.
        with suppress(PermissionError):
            (self.folder / _LOCK).unlink(missing_ok=True)

    def _leave(self) -> None:
        # The folder is not empty, or another run has created it.
        with suppress(OSError):
            if self._owned:
                self.folder.rmdir()

    def _close_ledgers(self) -> None:
        while self._ledgers:
            self._ledgers.popitem()[1].close()

    def _read(self, name: str) -> dict[str, dict[str, Any]]:
        ledger = self._ledgers.get(name)
        return read_ledger(self.folder / f"{name}.jsonl") if ledger is None else ledger.records

    def _check_writable(self, *, rows: bool = False) -> None:
        if self._reading or (self._shared and not rows):
            how = "reading" if self._reading else "shared"
            raise UsageError(
                f"The job in {self.folder} was opened with {how}=True, which does not allow writing.",
                cure=f"Open it without {how}=True.",
            )


def check_destination(destination: str | Path, *, overwrite: bool | None = False, folder: Path | None = None) -> None:
    """Refuse a destination that exists before any work begins; what a killed publication left is settled first.

    Args:
        destination: The folder to be made.
        overwrite: Whether an existing one may be replaced; None if nobody can allow that.
        folder: Where its job lives, if not at `.NAME.netweight-work`.

    Raises:
        OutputExists: The destination exists.
        UsageError: Another process is making it, or the folder that it should lie in does not exist.
    """
    destination = Path(destination)
    settle_publication(destination, folder or work_of(destination))
    refuse_existing(destination, overwrite=overwrite)


def settle_publication(destination: Path, work: Path) -> None:
    """Finish or undo a publication that a kill cut short, and remove what is left of its job.

    Args:
        destination: The folder that was made.
        work: Where its job lives; it need not exist.

    Raises:
        UsageError: Another process is making the folder.
    """
    refuse_planted(work)
    if work.is_dir():
        with naming_failures(destination), Job._locked(work, destination, None, "", _STATE):
            pass


def differences(held: Any, present: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return where two JSON values differ: dotted paths with both values; `...` where there is none."""
    if isinstance(held, Mapping) and isinstance(present, Mapping):
        parts = [(str(name), held.get(name, ...), present.get(name, ...)) for name in sorted({*held, *present})]
    elif isinstance(held, list) and isinstance(present, list) and len(held) == len(present):
        parts = [(str(number), *pair) for number, pair in enumerate(zip(held, present, strict=True))]
    else:
        return [] if ... not in (held, present) and _text(held) == _text(present) else [(path, held, present)]
    return [
        difference
        for name, old, new in parts
        for difference in differences(old, new, f"{path}.{name}" if path else name)
    ]


def _named(changes: Sequence[tuple[str, Any, Any]]) -> str:
    shown = [f"{path or 'the key'} was {_short(old)} and is {_short(new)} now" for path, old, new in changes[:_NAMED]]
    return "; ".join(shown) + (f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else "")


def _short(value: Any) -> str:
    text = "absent" if value is ... else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _text(value: Any) -> str:
    return canonical_json(value, allow_nan=True)


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "digest"}
