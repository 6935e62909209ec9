"""Writing banks of adapters: shard by shard, so that a killed run loses at most what it had not yet written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from netweight.core.files import digest_file, lock, naming_failures, part_of, publish
from netweight.errors import OutputExists, UsageError
from netweight.nn.lora import Adapter, AdapterStack
from netweight.store.bank.shard import (
    RECORD,
    BankRecord,
    Rows,
    ShardReader,
    ShardRecord,
    read_bank_record,
    rows_of,
    write_shard,
)

_SHARD_BYTES = 1 << 28
_LOCK = ".lock"


@final
@dataclass(frozen=True, eq=False)
class _Addition:
    """Adapters with their entries in the record."""

    names: Sequence[str]
    rows: Rows
    contents: Sequence[str]
    stamps: Sequence[str]


@final
class BankWriter:
    """Write a bank, or add to one; a context manager."""

    # A new bank is written beside its place and appears when the block ends; if the block raises or the process is
    # killed, the next writer for the same place continues with what was flushed (see `names`). A bank that exists
    # grows in place, by whole shards. Many small additions are joined to larger shards on the way.
    # `modules`: all that adapters change, with rows and columns; by default those of the first
    # `shard_bytes`: factors are held in memory until they take this many bytes

    def __init__(
        self,
        path: str | Path,
        *,
        compress: bool = False,
        kernels: Mapping[str, tuple[int, ...]] | None = None,
        base: str | None = None,
        modules: Mapping[str, tuple[int, int]] | None = None,
        shard_bytes: int = _SHARD_BYTES,
    ) -> None:
        self.path = Path(path)
        self._compress = compress
        self._shard_bytes = shard_bytes
        self._record = BankRecord(dict(sorted((modules or {}).items())), dict(kernels or {}), base)
        self._held: dict[str, str] = {}  # name → digest of the content
        self._stamps: dict[str, str] = {}
        self._skipped: dict[str, str] = {}
        self._provenance: dict[str, Mapping[str, str]] = {}
        self._pending: list[_Addition] = []
        self._pending_bytes = 0
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
    def _notes(self) -> dict[str, Any]:
        return {"skipped": dict(self._skipped), "provenance": dict(self._provenance)}

    def __contains__(self, name: object) -> bool:
        """Whether there is an adapter of this name."""
        return name in self._held

    def content(self, name: str) -> str:
        """Digest of an adapter's factors and scales."""
        return self._held[name]

    def stamp(self, name: str) -> str:
        """Size and time of the file that an adapter came from; empty if it came from none."""
        return self._stamps[name]

    def add(self, name: str, adapter: Adapter, *, stamp: str = "") -> None:
        """Add an adapter."""
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
        # `contents`: their digests, of adapters that were found to hold no NaN when they were read
        if self._folder is None:
            raise UsageError(f"{self.path} is not open.", cure="Use `with BankWriter(...) as writer:`.")
        self._check(names, rows, shapes, finite=contents is not None)
        if not self._record.modules:
            self._record = replace(self._record, modules=dict(sorted(shapes.items())))
        stamps = [""] * len(names) if stamps is None else stamps
        contents = rows.digests() if contents is None else contents
        self._pending.append(_Addition(list(names), rows, contents, stamps))
        self._held |= zip(names, contents, strict=True)
        self._stamps |= zip(names, stamps, strict=True)
        self._pending_bytes += rows.nbytes
        if self._pending_bytes >= self._shard_bytes:
            self.flush()

    @property
    def base(self) -> str | None:
        """Name of the model that the adapters were trained on."""
        return self._record.base

    @base.setter
    def base(self, base: str | None) -> None:
        self._record = replace(self._record, base=base)

    def tell(self, name: str, provenance: Mapping[str, str]) -> None:
        """Note what an adapter's file says of where it comes from; written as `skip` is."""
        if provenance:
            self._provenance[name] = provenance

    def skip(self, name: str, reason: str) -> None:
        """Note that an adapter was left out; written with the next shard or at the end."""
        self._skipped[name] = reason

    def flush(self) -> None:
        """Write what is held in memory; afterwards a kill cannot lose it."""
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
            digest_file(file),
            tuple(name for part in parts for name in part.names),
            tuple(content for part in parts for content in part.contents),
            tuple(stamp for part in parts for stamp in part.stamps),
        )
        self._record = replace(self._record, shards=(*kept, entry), **self._notes)
        self._record.write(self._folder)
        self._pending, self._pending_bytes = [], 0
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
                self._record = replace(self._record, **self._notes)
                self._record.write(folder)
                (folder / _LOCK).unlink()
                if folder != self.path:
                    publish(folder, self.path)

    def _continue(self, record: BankRecord) -> None:
        """Take over what a bank holds."""
        self._record, self._skipped, self._provenance = record, dict(record.skipped), dict(record.provenance)
        for shard in record.shards:
            self._held |= zip(shard.names, shard.contents, strict=True)
            self._stamps |= zip(shard.names, shard.stamps, strict=True)

    def _check(self, names: Sequence[str], rows: Rows, shapes: Mapping[str, tuple[int, int]], *, finite: bool) -> None:
        if len(names) != len(rows):
            raise UsageError(f"{len(names)} names cannot be given to {len(rows)} adapters.")
        for position, name in enumerate(names):
            if not name or name in self._held or name in names[:position]:
                raise UsageError(f"{self.path}: an adapter {name!r} was added before.", cure="Give it another name.")
        if self._record.modules and self._record.modules is not shapes and dict(self._record.modules) != dict(shapes):
            reason = _misfit(self._record.modules, shapes)
            raise UsageError(
                f"{names[0]!r} {reason}.", cure="A bank holds adapters of the same modules and shapes: make another."
            )
        if not (changed := (rows.rank > 0).any(1)).all():
            number = int((~changed).nonzero()[0])
            raise UsageError(f"{names[number]!r} has rank 0.", cure="Train it with rank 1 or more.")
        if not finite and (bad := rows.not_finite()) is not None:
            raise UsageError(f"{names[bad[0]]!r} holds NaN or infinity in {bad[1]}.", cure="Train it again.")

    def _absorbed(self) -> tuple[tuple[ShardRecord, ...], list[_Addition]]:
        """Last shards of no more adapters than are to be written are joined with these: few shards stay."""
        assert self._folder is not None
        kept, size = list(self._record.shards), self._pending_bytes
        count = sum(len(one.rows) for one in self._pending)
        absorbed: list[_Addition] = []
        while kept and len(kept[-1].names) <= count and kept[-1].nbytes + size <= self._shard_bytes:
            shard = kept.pop()
            rows = ShardReader(self._folder / shard.file, list(self._record.modules), shard).rows(
                0, len(shard.names), self._record.modules
            )
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


def _misfit(expected: Mapping[str, tuple[int, int]], found: Mapping[str, tuple[int, int]]) -> str:
    """Say in which modules an adapter differs from the others: "lacks …", "changes …, too", "has … of shape …"."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        words = [f"{verb} {few(names)}" for verb, names in (("lacks", missing), ("changes also", extra)) if names]
        return " and ".join(words)
    name = next(name for name in expected if expected[name] != found[name])
    return f"changes {name} in shape {found[name]}, the others in {tuple(expected[name])}"


def few(names: Sequence[str]) -> str:
    """Name the first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
