"""The files of a bank: `bank.json`, which lists shards with their adapters; shards; and what writes them.

A shard holds the factors of some adapters, one under the other, in one safetensors file, compressed or not:

    {module}.down   (sum of ranks, columns)   the rows of every adapter's down factor
    {module}.up     (sum of ranks, rows)      the columns of every adapter's up factor, as rows
    scale           (adapters, modules)       fp64
    rank            (adapters, modules)       int64; modules in the order of their sorted names

So nothing is filled up, whatever the ranks, and the rows of adapters that follow each other lie together. Banks are
written shard by shard: a killed run loses at most what it had not yet written.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy
import torch
import xxhash
from torch import Tensor

from netweight.core.atomic_writes import naming_failures, need_parent, part_of, publish, whole_file
from netweight.core.digests import ALGORITHM, digest_file
from netweight.core.file_locks import lock
from netweight.core.records import read_record, write_record
from netweight.core.work_account import note_used
from netweight.errors import CorruptBlob, OutputExists, UsageError
from netweight.nn.lora import Adapter, AdapterStack
from netweight.store.reader import Store, open_store
from netweight.store.safetensors import build_header
from netweight.store.writer import StoreWriter

RECORD = "bank.json"
# The files that weights2weights published: all_weights.pt of people, dog_weights.pt of dogs.
MATRIX = "*_weights.pt"
_VERSION = 1
_SHARD_BYTES = 1 << 28
_LOCK = ".lock"
_NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


@final
@dataclass(frozen=True)
class ShardRecord:
    """One shard."""

    file: str
    """Name of the shard's file."""
    nbytes: int
    """Size of the file in bytes."""
    digest: str
    """Digest of the file's content."""
    names: tuple[str, ...]
    """Names of the adapters, in the order of the rows."""
    contents: tuple[str, ...]
    """Digest of the factors and scales of each adapter."""
    stamps: tuple[str, ...]
    """Size and time of the file that each adapter was read from, by which it is recognized; empty if it was not read
    from a file.
    """


@final
@dataclass(frozen=True)
class BankRecord:
    """Record of a bank's content."""

    modules: Mapping[str, tuple[int, int]]
    """Module name → rows and columns, sorted by name."""
    kernels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Names of convolutions → sides of their kernels."""
    base: str | None = None
    """Name of the base model; None if it is unknown."""
    shards: tuple[ShardRecord, ...] = ()
    """Records of the shards, in the order of their adapters."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Name of an omitted adapter → reason."""
    provenance: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Adapter → what its file records about its origin: training, trigger words, license."""

    @property
    def names(self) -> list[str]:
        """Names of all adapters, in order."""
        return [name for shard in self.shards for name in shard.names]

    def write(self, folder: Path) -> None:
        """Write the record over the one before it."""
        values = {**vars(self), "shards": [vars(shard) for shard in self.shards]}
        write_record(folder / RECORD, values, version=_VERSION)


def read_bank_record(folder: Path) -> BankRecord:
    """Read a bank's record."""
    if not (folder / RECORD).is_file():
        raise UsageError(
            f"{folder} is not a bank of adapters: it contains no {RECORD}.",
            cure="Make one of a folder of adapters: netweight space ingest ADAPTERS BANK.",
        )
    return read_record(folder / RECORD, _record, version=_VERSION, of="a bank of adapters")


def _record(values: dict[str, Any]) -> BankRecord:
    shards = tuple(
        ShardRecord(
            str(shard["file"]), int(shard["nbytes"]), str(shard["digest"]),
            tuple(shard["names"]), tuple(shard["contents"]), tuple(shard["stamps"]),
        )
        for shard in values["shards"]
    )  # fmt: skip
    for shard in shards:
        if not len(shard.names) == len(shard.contents) == len(shard.stamps) or "/" in shard.file:
            raise ValueError(f"the entry of {shard.file} contradicts itself")
    names = [name for shard in shards for name in shard.names]
    if len(set(names)) < len(names):
        raise ValueError("a name is given twice")
    modules = {name: (int(rows), int(columns)) for name, (rows, columns) in sorted(values["modules"].items())}
    kernels = {name: tuple(sides) for name, sides in values["kernels"].items()}
    return BankRecord(modules, kernels, values["base"], shards, values["skipped"], values.get("provenance", {}))


@final
@dataclass(frozen=True, eq=False)
class ShardRows:
    """Adapters in a row, as a shard holds them."""

    down: Mapping[str, Tensor]
    """Module name → shape `(sum of ranks, columns)`."""
    up: Mapping[str, Tensor]
    """Module name → shape `(sum of ranks, rows)`."""
    scale: Tensor
    """Scales of the adapters' modules, shape `(n, modules)`, fp64; modules in sorted order."""
    rank: Tensor
    """Ranks of the adapters' modules, shape `(n, modules)`, int64."""

    def __len__(self) -> int:
        """Number of adapters."""
        return len(self.rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return sum(tensor.nbytes for part in (self.down, self.up) for tensor in part.values())

    def not_finite(self) -> tuple[int, str] | None:
        """Find the first adapter with NaN or infinity: its number and the module; None if there is none.

        Returns:
            The adapter's number from 0, and the module's name.
        """
        for column, name in enumerate(sorted(self.down)):
            good = self.scale[:, column].isfinite()
            for part in (self.down[name], self.up[name]):
                if not part.isfinite().all():
                    owner = torch.repeat_interleave(torch.arange(len(self)), self.rank[:, column])
                    good[owner[~part.isfinite().all(1)]] = False
            if not good.all():
                return int((~good).nonzero()[0]), name
        return None

    def digests(self) -> list[str]:
        """Digest each adapter: its factors with their dtypes, and its scales, module by module."""
        states = [xxhash.xxh3_128() for _ in range(len(self))]
        for column, name in enumerate(sorted(self.down)):
            ranks = self.rank[:, column].tolist()
            if not any(ranks):
                continue
            for part in (self.down[name], self.up[name]):
                data, width = _bytes(part).reshape(-1).data, part[0].nbytes
                heads = {rank: f"{part.dtype} {rank}".encode() for rank in set(ranks)}
                start = 0
                for state, rank in zip(states, ranks, strict=True):
                    # The adapter does not change this module.
                    if not rank:
                        continue
                    state.update(heads[rank])
                    state.update(data[start : start + rank * width])
                    start += rank * width
        for state, row in zip(states, _bytes(self.scale), strict=True):
            state.update(row.data)
        return [f"{ALGORITHM}:{state.hexdigest()}" for state in states]


def rows_of_adapter(adapter: Adapter, modules: Mapping[str, tuple[int, int]]) -> ShardRows:
    """Lay one adapter out as a shard holds it; modules that it lacks have no row.

    `modules`: sorted names → shapes.
    """
    down, up, scale, rank = {}, {}, [], []
    any_dtype = next(iter(adapter.factors.values())).down.dtype
    for name in modules:
        change = adapter.factors.get(name)
        scale.append(change.scale if change else 0.0)
        rank.append(change.rank if change else 0)
        rows, columns = modules[name]
        down[name] = change.down.detach() if change else torch.empty(0, columns, dtype=any_dtype)
        up[name] = change.up.detach().T.contiguous() if change else torch.empty(0, rows, dtype=any_dtype)
    return ShardRows(down, up, torch.tensor([scale], dtype=torch.float64), torch.tensor([rank]))


def rows_of(stack: AdapterStack) -> ShardRows:
    """Lay a stack out as a shard holds it; always copies."""
    modules = stack.modules
    down, up = {}, {}
    for name in modules:
        ranks = stack.ranks[name]
        filled = torch.arange(stack.down[name].shape[1]) < ranks.cpu()[:, None]
        dtype = torch.promote_types(stack.down[name].dtype, stack.up[name].dtype)
        down[name] = stack.down[name].detach().cpu().to(dtype)[filled]
        up[name] = stack.up[name].detach().cpu().to(dtype).transpose(1, 2)[filled]
    scale = torch.stack([stack.scale[name].detach().cpu().double() for name in modules], dim=1)
    rank = torch.stack([stack.ranks[name].detach().cpu().long() for name in modules], dim=1)
    return ShardRows(down, up, scale, rank)


def joined(modules: Sequence[str], pieces: Sequence[ShardRows]) -> AdapterStack:
    """Stack rows of one or several shards, lower ranks filled up with zeros."""
    scale, rank = torch.cat([piece.scale for piece in pieces]), torch.cat([piece.rank for piece in pieces])
    down, up = {}, {}
    for column, name in enumerate(modules):
        ranks = rank[:, column]
        down[name] = _filled(_cat([piece.down[name] for piece in pieces]), ranks)
        up[name] = _filled(_cat([piece.up[name] for piece in pieces]), ranks).transpose(1, 2)
    names = list(enumerate(modules))
    return AdapterStack(
        down, up, {name: scale[:, column] for column, name in names}, {name: rank[:, column] for column, name in names}
    )


def stacked(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> AdapterStack:
    """One adapter as a stack over these modules; those that it lacks are unchanged."""
    modules = dict(sorted(shapes.items()))
    return joined(list(modules), [rows_of_adapter(adapter, modules)])


def write_shard(path: Path, pieces: Sequence[ShardRows], *, compress: bool) -> None:
    """Write a shard, whole or not at all, over one that a killed run may have left."""
    if compress:
        with StoreWriter(path, overwrite=True) as writer:
            for name, tensor in _tensors(pieces):
                writer.add(name, tensor)
        return
    described = [
        (name, _NAMES[dtype], shape, dtype.itemsize * shape[0] * shape[1]) for name, dtype, shape in _shapes(pieces)
    ]
    header = build_header(described, {"format": "pt"})
    with whole_file(path, overwrite=True) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in _tensors(pieces):
            file.write(_bytes(tensor).data)


@final
class ShardReader:
    """An open shard."""

    def __init__(self, path: Path, modules: Sequence[str], record: ShardRecord) -> None:
        self._path, self._record = path, record
        # True if the whole file was compared with its digest and is intact.
        self._intact = False
        self._modules = modules
        self._store: Store = open_store(path)
        held = set(self._store.names())
        if held != {f"{name}.{part}" for name in modules for part in ("down", "up")} | {"scale", "rank"}:
            raise CorruptBlob(f"{path} contains other tensors than its bank's modules.", cure="Copy it again.")
        # rank: shape `(n, modules)`, int64
        self._scale, self.rank = self._store.get("scale"), self._store.get("rank")
        ends = self.rank.cumsum(0)
        held_rows = [[self._store.info(f"{name}.{part}").shape[0] for name in modules] for part in ("down", "up")]
        if len(self.rank) != len(record.names) or ends[-1:].tolist() != held_rows[:1] or held_rows[0] != held_rows[1]:
            raise self._damaged(0, len(record.names))
        self._starts = torch.cat([torch.zeros_like(ends[:1]), ends])

    def rows(self, start: int, stop: int, modules: Collection[str]) -> ShardRows:
        """Read adapters `start` to `stop` of this shard, and compare what was read with their digests."""
        down, up = {}, {}
        columns = [column for column, name in enumerate(self._modules) if name in modules]
        for column in columns:
            name = self._modules[column]
            piece = slice(int(self._starts[start, column]), int(self._starts[stop, column]))
            down[name] = self._store.get_slice(f"{name}.down", piece)
            up[name] = self._store.get_slice(f"{name}.up", piece)
        rows = ShardRows(down, up, self._scale[start:stop, columns], self.rank[start:stop, columns])
        piecewise = len(columns) == len(self._modules) and stop - start < len(self._record.names)
        if not self._intact and not (piecewise and tuple(rows.digests()) == self._record.contents[start:stop]):
            # Digests are of all factors of an adapter in their own dtype. For some modules, or a wider dtype, the
            # file's tells; for all adapters it is the faster one.
            if digest_file(self._path) != self._record.digest:
                raise self._damaged(start, stop)
            self._intact = True
        return rows

    def _damaged(self, start: int, stop: int) -> CorruptBlob:
        names = self._record.names[start:stop]
        return CorruptBlob(
            f"{self._path} is damaged, or has changed while it was read (adapters {names[0]} to {names[-1]}).",
            cure="Copy this file again, or rebuild the bank.",
        )


def _shapes(pieces: Sequence[ShardRows]) -> Iterator[tuple[str, torch.dtype, tuple[int, int]]]:
    """Name, dtype and shape of a shard's tensors, in order."""
    modules = sorted(pieces[0].down)
    for name in modules:
        for part in ("down", "up"):
            tensors: list[Tensor] = [getattr(piece, part)[name] for piece in pieces]
            yield f"{name}.{part}", _widest(tensors), (sum(len(t) for t in tensors), tensors[0].shape[1])
    count = sum(len(piece) for piece in pieces)
    yield "scale", torch.float64, (count, len(modules))
    yield "rank", torch.int64, (count, len(modules))


def _tensors(pieces: Sequence[ShardRows]) -> Iterator[tuple[str, Tensor]]:
    """A shard's tensors, in order, joined one at a time."""
    for name in sorted(pieces[0].down):
        yield f"{name}.down", _cat([piece.down[name] for piece in pieces])
        yield f"{name}.up", _cat([piece.up[name] for piece in pieces])
    yield "scale", torch.cat([piece.scale for piece in pieces])
    yield "rank", torch.cat([piece.rank for piece in pieces])


def _bytes(tensor: Tensor) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]:
    """The bytes of a matrix, row by row."""
    return tensor.contiguous().view(torch.uint8).numpy()


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Join rows in the widest of their dtypes."""
    dtype = _widest(tensors)
    return torch.cat([tensor.to(dtype) for tensor in tensors]) if len(tensors) > 1 else tensors[0]


def _filled(rows: Tensor, ranks: Tensor) -> Tensor:
    """From `(sum of ranks, width)` to `(n, highest rank, width)`; no copy where all ranks are the same."""
    # If none of them changes the module, one row of zeros is stored.
    most = max(1, int(ranks.max()))
    if len(rows) == most * len(ranks):
        return rows.view(len(ranks), most, -1)
    filled = rows.new_zeros(len(ranks), most, rows.shape[1])
    filled[torch.arange(most) < ranks[:, None]] = rows
    return filled


def find_published(source: Path) -> Path | None:
    """Return the matrix of adapters if a path is one, or a folder with one; else None."""
    if source.is_file():
        return source if source.match(MATRIX) else None
    matrices = sorted(source.glob(MATRIX))
    return matrices[0] if len(matrices) == 1 else None


@final
@dataclass(frozen=True, eq=False)
class _Addition:
    """Adapters with their entries in the record."""

    names: Sequence[str]
    rows: ShardRows
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
        # Name → digest of the content.
        self._held: dict[str, str] = {}
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
            raise OutputExists(f"{self.path} exists already and is not a bank.", cure="Choose another name.")
        need_parent(self.path)
        with ExitStack() as stack:
            stack.enter_context(naming_failures(self.path))
            folder = self.path if grows else part_of(self.path)
            folder.mkdir(exist_ok=True)
            stack.enter_context(lock(folder / _LOCK))
            if (folder / RECORD).is_file():
                self._continue(read_bank_record(folder))
                for name in self._held if not grows else ():
                    note_used("adapters", folder / RECORD, name)
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
        """Return whether there is an adapter of this name."""
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
        rows: ShardRows,
        shapes: Mapping[str, tuple[int, int]],
        *,
        stamps: Sequence[str] | None = None,
        contents: Sequence[str] | None = None,
    ) -> None:
        """Add adapters laid out as a shard holds them; they are not copied. Errors as for `add`.

        `contents`: their digests, of adapters that were found to contain no NaN when they were read.
        """
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
        remaining, absorbed = self._absorbed()
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
        self._record = replace(self._record, shards=(*remaining, entry), **self._notes)
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

    def _check(
        self, names: Sequence[str], rows: ShardRows, shapes: Mapping[str, tuple[int, int]], *, finite: bool
    ) -> None:
        if len(names) != len(rows):
            raise UsageError(f"{len(names)} names cannot be given to {len(rows)} adapters.")
        for position, name in enumerate(names):
            if not name or name in self._held or name in names[:position]:
                raise UsageError(f"{self.path}: an adapter {name!r} was added before.", cure="Give it another name.")
        if self._record.modules and self._record.modules is not shapes and dict(self._record.modules) != dict(shapes):
            reason = _misfit(self._record.modules, shapes)
            raise UsageError(
                f"{names[0]!r} {reason}.",
                cure="All adapters of a bank have the same modules and shapes: create another bank.",
            )
        if not (changed := (rows.rank > 0).any(1)).all():
            number = int((~changed).nonzero()[0])
            raise UsageError(f"{names[number]!r} has rank 0.", cure="Train it with rank 1 or more.")
        if not finite and (bad := rows.not_finite()) is not None:
            raise UsageError(f"{names[bad[0]]!r} contains NaN or infinity in {bad[1]}.", cure="Train it again.")

    def _absorbed(self) -> tuple[tuple[ShardRecord, ...], list[_Addition]]:
        """Last shards of no more adapters than are to be written are joined with these: few shards stay."""
        assert self._folder is not None
        remaining, size = list(self._record.shards), self._pending_bytes
        count = sum(len(one.rows) for one in self._pending)
        absorbed: list[_Addition] = []
        while remaining and len(remaining[-1].names) <= count and remaining[-1].nbytes + size <= self._shard_bytes:
            shard = remaining.pop()
            rows = ShardReader(self._folder / shard.file, list(self._record.modules), shard).rows(
                0, len(shard.names), self._record.modules
            )
            absorbed.insert(0, _Addition(shard.names, rows, shard.contents, shard.stamps))
            size, count = size + rows.nbytes, count + len(rows)
        return tuple(remaining), absorbed

    def _clear(self, folder: Path) -> None:
        """Remove shards that the record does not list: of a killed run, or joined to another."""
        listed = {shard.file for shard in self._record.shards}
        for file in folder.glob("shard-*.safetensors"):
            if file.name not in listed:
                file.unlink()
        for file in folder.glob(".*.netweight-part"):
            file.unlink()


def _misfit(expected: Mapping[str, tuple[int, int]], shapes: Mapping[str, tuple[int, int]]) -> str:
    """Say in which modules an adapter differs from the others: "lacks …", "changes …, too", "has … of shape …"."""
    missing, extra = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
    if missing or extra:
        words = [f"{verb} {few(names)}" for verb, names in (("lacks", missing), ("changes also", extra)) if names]
        return " and ".join(words)
    name = next(name for name in expected if expected[name] != shapes[name])
    return f"changes {name} in shape {shapes[name]}, the others in {tuple(expected[name])}"


def few(names: Sequence[str]) -> str:
    """Name the first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
