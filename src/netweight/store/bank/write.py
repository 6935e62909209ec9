"""Writing banks of adapters: shard by shard, so that a killed run loses at most what it had not yet written."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, final

from netweight.core.digest import of_file
from netweight.core.files import lock, naming_failures, part_of, refuse_existing, sync
from netweight.core.progress import Progress
from netweight.errors import NetweightError, OutputExists, OutputFailed, UsageError
from netweight.nn.lora import Adapter
from netweight.nn.stacked_lora import AdapterStack
from netweight.store.bank.record import RECORD, BankRecord, ShardRecord, read_bank_record
from netweight.store.bank.shard import Rows, ShardReader, rows_of, write_shard
from netweight.store.lora_formats import diffusers, peft
from netweight.store.lora_formats.files import load_plan, plan_adapter
from netweight.store.lora_formats.names import COMPONENTS, ModelNames
from netweight.store.lora_formats.parts import PICKLES, Plan

_SHARD_BYTES = 1 << 28
_LOCK = ".lock"


@final
@dataclass(frozen=True, eq=False)
class _Addition:
    """Adapters with what the record says of them."""

    names: Sequence[str]
    rows: Rows
    contents: Sequence[str]
    stamps: Sequence[str]


@final
class BankWriter:
    """Write a bank, or add to one; a context manager.

    A new bank is written beside its place and appears when the block ends; if the block raises or the process is
    killed, the next writer for the same place goes on with what was flushed (see `names`). A bank that is there grows
    in place, by whole shards. Many small additions are joined to larger shards on the way.

    Args:
        path: The bank's folder.
        compress: Whether new shards are compressed, bit for bit.
        kernels: Names of convolutions → sides of their kernels, for a new bank.
        base: Name of the model the adapters were trained on, for a new bank.
        shard_bytes: Factors are held in memory until they take so many bytes.

    Raises:
        OutputExists: On entering: the folder exists and holds no bank.
        UsageError: On entering: another process is writing the bank. On leaving: nothing was added.
        OutputFailed: The disk is full or the place cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        compress: bool = False,
        kernels: Mapping[str, tuple[int, ...]] | None = None,
        base: str | None = None,
        shard_bytes: int = _SHARD_BYTES,
    ) -> None:
        self.path = Path(path)
        self._compress = compress
        self._shard_bytes = shard_bytes
        self._record = BankRecord({}, dict(kernels or {}), base)
        self._held: dict[str, str] = {}  # name → digest of the content
        self._stamps: dict[str, str] = {}
        self._pending: list[_Addition] = []
        self._folder: Path | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Open the bank, or the folder beside its place."""
        grows = (self.path / RECORD).is_file()
        if self.path.exists() and not grows:
            raise OutputExists(f"{self.path} exists already and is no bank.", cure="Choose another name.")
        if not self.path.parent.is_dir():
            raise UsageError(f"The folder {self.path.parent} does not exist.", cure="Create it first.")
        with ExitStack() as stack:
            stack.enter_context(naming_failures(self.path))
            folder = self.path if grows else part_of(self.path)
            folder.mkdir(exist_ok=True)
            stack.enter_context(lock(folder / _LOCK))
            if (folder / RECORD).is_file():
                self._continue(read_bank_record(folder))
            self._clear(folder)
            self._folder, self._stack = folder, stack.pop_all()
        return self

    @property
    def names(self) -> list[str]:
        """Names of all adapters that the bank holds or was given, in order."""
        return list(self._held)

    @property
    def record(self) -> BankRecord:
        """What is written already."""
        return self._record

    def __contains__(self, name: object) -> bool:
        """Whether there is an adapter of this name."""
        return name in self._held

    def content(self, name: str) -> str:
        """Digest of an adapter's factors and scales.

        Args:
            name: The adapter's name in the bank.

        Returns:
            The digest, hexadecimal.
        """
        return self._held[name]

    def stamp(self, name: str) -> str:
        """Size and time of the file that an adapter came from; empty if it came from none.

        Args:
            name: The adapter's name in the bank.

        Returns:
            Text that changes when the file does.
        """
        return self._stamps[name]

    def add(self, name: str, adapter: Adapter, *, stamp: str = "") -> None:
        """Add an adapter.

        Args:
            name: New to the bank.
            adapter: Of the bank's modules and shapes; the first one decides on them. It is copied.
            stamp: Size and time of its file, kept so that it need not be read again.

        Raises:
            UsageError: The name is taken, the modules or shapes are others, or it holds NaN or infinity.
        """
        self.add_stack([name], AdapterStack.of([adapter]), stamps=[stamp])

    def add_stack(self, names: Sequence[str], stack: AdapterStack, *, stamps: Sequence[str] | None = None) -> None:
        """Add all adapters of a stack, or none if one of them is bad; arguments and errors as for `add`."""
        self.add_rows(names, rows_of(stack), stack.shapes, stamps=stamps)

    def add_rows(
        self,
        names: Sequence[str],
        rows: Rows,
        shapes: Mapping[str, tuple[int, int]],
        *,
        stamps: Sequence[str] | None = None,
        contents: Sequence[str] | None = None,
    ) -> None:
        """Add adapters laid out as a shard holds them; they are not copied. Errors as for `add`."""
        if self._folder is None:
            raise UsageError(f"{self.path} is not open.", cure="Use `with BankWriter(...) as writer:`.")
        self._check(names, rows, shapes)
        if not self._record.modules:
            self._record = replace(self._record, modules=dict(sorted(shapes.items())))
        stamps = [""] * len(names) if stamps is None else stamps
        contents = rows.digests() if contents is None else contents
        self._pending.append(_Addition(list(names), rows, contents, stamps))
        self._held |= zip(names, contents, strict=True)
        self._stamps |= zip(names, stamps, strict=True)
        if sum(one.rows.nbytes for one in self._pending) >= self._shard_bytes:
            self.flush()

    def skip(self, name: str, reason: str) -> None:
        """Note that an adapter was left out; written with the next shard or at the end.

        Args:
            name: The adapter's name.
            reason: Why, for the record.
        """
        self._record = replace(self._record, skipped={**self._record.skipped, name: reason})

    def flush(self) -> None:
        """Write what is held in memory; afterwards a kill cannot lose it.

        Raises:
            OutputFailed: The disk is full or the place cannot be written; the bank is as it was.
        """
        if not self._pending or self._folder is None:
            return
        kept, absorbed = self._absorbed()
        parts = [*absorbed, *self._pending]
        number = max((int(shard.file[6:-12]) for shard in self._record.shards), default=-1) + 1
        file = self._folder / f"shard-{number:05d}.safetensors"
        write_shard(file, [part.rows for part in parts], compress=self._compress)
        entry = ShardRecord(
            file.name,
            file.stat().st_size,
            of_file(file),
            tuple(name for part in parts for name in part.names),
            tuple(content for part in parts for content in part.contents),
            tuple(stamp for part in parts for stamp in part.stamps),
        )
        self._record = replace(self._record, shards=(*kept, entry))
        self._record.write(self._folder)
        self._pending = []
        self._clear(self._folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the rest and let a new bank appear; after an exception keep what there is for the next writer."""
        folder, stack = self._folder, self._stack.pop_all()
        assert folder is not None
        with stack:
            self.flush()
            self._folder = None
            if not self._record.shards:
                if folder != self.path:
                    shutil.rmtree(folder)
                if error is None:
                    raise UsageError(f"{self.path}: no adapter was added.", cure="A bank needs at least one.")
            elif error is None:
                self._record.write(folder)
                (folder / _LOCK).unlink()
                if folder != self.path:
                    folder.rename(self.path)
                    sync(self.path.parent)

    def _continue(self, record: BankRecord) -> None:
        """Take over what a bank holds."""
        self._record = record
        for shard in record.shards:
            self._held |= zip(shard.names, shard.contents, strict=True)
            self._stamps |= zip(shard.names, shard.stamps, strict=True)

    def _check(self, names: Sequence[str], rows: Rows, shapes: Mapping[str, tuple[int, int]]) -> None:
        if len(names) != len(rows):
            raise UsageError(f"{len(names)} names cannot be given to {len(rows)} adapters.")
        for position, name in enumerate(names):
            if not name or name in self._held or name in names[:position]:
                raise UsageError(f"{self.path}: an adapter {name!r} was added before.", cure="Give it another name.")
        if self._record.modules and dict(self._record.modules) != dict(shapes):
            reason = difference(self._record.modules, shapes)
            raise UsageError(
                f"{names[0]!r} {reason}.", cure="A bank holds adapters of the same modules and shapes: make another."
            )
        if int(rows.rank.min()) < 1:
            number = int((rows.rank < 1).any(1).nonzero()[0])
            raise UsageError(f"{names[number]!r} has rank 0.", cure="Train it with rank 1 or more.")
        if (bad := rows.not_finite()) is not None:
            raise UsageError(f"{names[bad[0]]!r} holds NaN or infinity in {bad[1]}.", cure="Train it again.")

    def _absorbed(self) -> tuple[tuple[ShardRecord, ...], list[_Addition]]:
        """Last shards of no more adapters than are to be written are joined with these: few shards stay."""
        assert self._folder is not None
        kept, size = list(self._record.shards), sum(one.rows.nbytes for one in self._pending)
        count = sum(len(one.rows) for one in self._pending)
        absorbed: list[_Addition] = []
        while kept and len(kept[-1].names) <= count and kept[-1].nbytes + size <= self._shard_bytes:
            shard = kept.pop()
            rows = ShardReader(self._folder / shard.file, list(self._record.modules)).rows(0, len(shard.names))
            absorbed.insert(0, _Addition(shard.names, rows, shard.contents, shard.stamps))
            size, count = size + rows.nbytes, count + len(rows)
        return tuple(kept), absorbed

    def _clear(self, folder: Path) -> None:
        """Remove shards that the record does not list: of a killed run, or joined to another."""
        listed = {shard.file for shard in self._record.shards}
        for file in folder.glob("shard-*.safetensors"):
            if file.name not in listed:
                file.unlink()
        for file in folder.glob(".*.netweight-part"):
            file.unlink()


def difference(expected: Mapping[str, tuple[int, int]], found: Mapping[str, tuple[int, int]]) -> str:
    """Say in which modules an adapter differs from the others: "lacks …", "changes …, too", "has … of shape …".

    Args:
        expected: Module name → rows and columns, of the others.
        found: The same of the adapter.

    Returns:
        One sentence's part; empty if they agree.
    """
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        words = [f"{verb} {_few(names)}" for verb, names in (("lacks", missing), ("changes also", extra)) if names]
        return " and ".join(words)
    name = next(name for name in expected if expected[name] != found[name])
    return f"changes {name} in shape {found[name]}, the others in {tuple(expected[name])}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_SHOWN = 20  # problems named in one message


@final
@dataclass(frozen=True)
class _Kind:
    """What adapters of one bank have in common."""

    shapes: tuple[tuple[str, tuple[int, int]], ...]
    kernels: tuple[tuple[str, tuple[int, ...]], ...]


@final
@dataclass(frozen=True)
class _Seen:
    """What is kept of a checked adapter until it is read: little, as there may be many."""

    path: Path
    kind: _Kind
    base: str | None


def ingest(
    source: Path,
    destination: Path,
    *,
    modules: Iterable[str] | None,
    compress: bool,
    skip_bad: bool,
    progress: Progress,
) -> None:
    """Collect adapters into a bank; see `AdapterBank.ingest`."""
    found, bad = _find(source)
    there = _there(destination, found)
    model = None if modules is None else ModelNames(modules)
    old = dict(zip(there.names, (stamp for shard in there.shards for stamp in shard.stamps), strict=True))
    stamps = {name: _stamp(path) for name, path in found.items()}
    new = {name: path for name, path in found.items() if old.get(name) != stamps[name]}
    seen = _checked(new, model, bad, progress)
    expected = there if there.modules else _usual(list(seen.values()))
    bad |= _misfits(seen, expected)
    good = sorted(seen.keys() - bad.keys())
    if bad and (not skip_bad or not (old or good)):
        raise _refusal(source, bad, len(found))
    if not old and not good:
        raise UsageError(f"{source} holds no adapter.", cure="Name a folder with files of peft, diffusers or kohya.")
    with BankWriter(destination, compress=compress, kernels=expected.kernels, base=expected.base) as writer:
        for name, reason in bad.items():
            writer.skip(name, str(reason))
        holders = {writer.content(name): name for name in writer.names}
        for name in progress.track(good, "Adding adapters", len(good), unit="adapters"):
            try:
                _add(writer, holders, name, plan_adapter(seen[name].path, model), stamps[name])
            except OutputFailed:
                raise
            except NetweightError as error:
                if not skip_bad:
                    raise _refusal(source, {name: error}, len(found)) from error
                writer.skip(name, str(error))
                progress.note(f"Skipped {name}: {error}")


def _checked(
    paths: Mapping[str, Path], model: ModelNames | None, bad: dict[str, NetweightError], progress: Progress
) -> dict[str, _Seen]:
    """Look at all headers and settings; what is wrong with an adapter by itself goes into `bad`."""
    seen: dict[str, _Seen] = {}
    kinds: dict[_Kind, _Kind] = {}
    for name, path in progress.track(paths.items(), "Checking adapters", len(paths), unit="adapters"):
        try:
            plan = plan_adapter(path, model)
        except NetweightError as error:
            bad[name] = error
            continue
        kind = _Kind(tuple(plan.shapes.items()), tuple(plan.kernels.items()))
        seen[name] = _Seen(path, kinds.setdefault(kind, kind), plan.base)
    return seen


def _add(writer: BankWriter, holders: dict[str, str], name: str, plan: Plan, stamp: str) -> None:
    """Read one adapter and add it, unless the bank has it already."""
    stack = AdapterStack.of([load_plan(plan)])
    rows = rows_of(stack)
    content = rows.digests()[0]
    if name in writer and writer.content(name) == content:
        return
    if name in writer:
        raise UsageError(
            f"{plan.path}: the bank has another adapter {name!r} already.", cure="Rename it, or make another bank."
        )
    if content in holders:
        raise UsageError(f"{plan.path} holds the same adapter as {holders[content]!r}.", cure="Remove one.")
    writer.add_rows([name], rows, stack.shapes, stamps=[stamp], contents=[content])
    holders[content] = name


def _there(destination: Path, found: Mapping[str, Path]) -> BankRecord:
    """What the bank holds already, or what an interrupted call left beside its place."""
    if (destination / RECORD).is_file():
        return read_bank_record(destination)
    refuse_existing(destination, overwrite=None)
    part = part_of(destination)
    if not (part / RECORD).is_file():
        return BankRecord({})
    record = read_bank_record(part)
    if others := [name for name in record.names if name not in found]:
        raise UsageError(
            f"An interrupted call left {others[0]!r} in {part}, which this source does not hold.",
            cure=f"Repeat that call, or remove {part}.",
        )
    return record


def _find(source: Path) -> tuple[dict[str, Path], dict[str, NetweightError]]:
    """Find adapters below a folder, by name, sorted; and those whose name is taken."""
    if not source.exists():
        raise UsageError(f"There is no file or folder {source}.", cure="Check the path.")
    if source.is_file() or _is_adapter(source):
        return {source.stem if source.is_file() else source.resolve().name: source}, {}
    found: dict[str, Path] = {}
    bad: dict[str, NetweightError] = {}
    for path in sorted(_adapters_below(source)):
        name = path.relative_to(source).as_posix()
        name = name.removesuffix(".safetensors") if path.is_file() else name
        if name in found:
            bad[path.relative_to(source).as_posix()] = UsageError(
                f"{path} would have the same name as {found[name]}.", cure="Rename one."
            )
        else:
            found[name] = path
    return found, bad


def _adapters_below(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if _is_adapter(path):
                yield path
            else:
                yield from _adapters_below(path)
        elif path.suffix.lower() in (".safetensors", *PICKLES):
            yield path


def _is_adapter(folder: Path) -> bool:
    """Whether a folder is one adapter: peft's, a pipeline's of peft, or diffusers' with the file it names."""
    if any((folder / name).is_file() for name in (peft.CONFIG, peft.WEIGHTS, diffusers.WEIGHTS)):
        return True
    return any((folder / name / peft.CONFIG).is_file() for name in COMPONENTS)


def _stamp(path: Path) -> str:
    """Size and time of a file, or of all files of an adapter's folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return " ".join(f"{status.st_size}-{status.st_mtime_ns}" for status in (file.stat() for file in files))


def _usual(seen: list[_Seen]) -> BankRecord:
    """What most adapters have: modules, shapes, kernels and base."""
    if not seen:
        return BankRecord({})
    kind = Counter(one.kind for one in seen).most_common(1)[0][0]
    bases = Counter(one.base for one in seen if one.base).most_common(1)
    return BankRecord(dict(kind.shapes), dict(kind.kernels), bases[0][0] if bases else None)


def _misfits(seen: Mapping[str, _Seen], expected: BankRecord) -> dict[str, NetweightError]:
    """Adapters of other modules, shapes, kernels or bases than expected."""
    bad: dict[str, NetweightError] = {}
    for name, one in seen.items():
        if (shapes := dict(one.kind.shapes)) != dict(expected.modules):
            bad[name] = UsageError(
                f"{one.path} {difference(expected.modules, shapes)}.",
                cure="All adapters of a bank change the same modules: make another bank of it, or leave it out.",
            )
        elif dict(one.kind.kernels) != dict(expected.kernels):
            bad[name] = UsageError(f"{one.path} has other convolutions than the others.", cure="Leave it out.")
        elif one.base and expected.base and one.base != expected.base:
            bad[name] = UsageError(
                f"{one.path} was trained on {one.base}, the others on {expected.base}.",
                cure="Make another bank of it, or leave it out.",
            )
    return bad


def _refusal(source: Path, bad: Mapping[str, NetweightError], among: int) -> NetweightError:
    """One error for all problems; of their kind if they have one."""
    errors = list(bad.values())
    if len(errors) == 1:
        or_skip = " Or pass skip_bad (--skip-bad) to leave it out." if among > 1 else ""
        return type(errors[0])(errors[0].reason, cure=f"{errors[0].cure or ''}{or_skip}".strip())
    lines = "\n".join(f"  {error}" for error in errors[:_SHOWN])
    more = f"\n  and {len(errors) - _SHOWN} more." if len(errors) > _SHOWN else ""
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else UsageError
    return kind(
        f"{len(errors)} of {among} adapters in {source} cannot be used:\n{lines}{more}\n",
        cure="Mend or remove them, or pass skip_bad (--skip-bad) to leave them out.",
    )
