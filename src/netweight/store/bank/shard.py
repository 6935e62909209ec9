"""The files of a bank: `bank.json`, which lists shards with their adapters; and shards.

A shard holds the factors of some adapters, one under the other, in one safetensors file, compressed or not:

    {module}.down   (sum of ranks, columns)   the rows of every adapter's down factor
    {module}.up     (sum of ranks, rows)      the columns of every adapter's up factor, as rows
    scale           (adapters, modules)       fp64
    rank            (adapters, modules)       int64; modules in the order of their sorted names

So nothing is filled up, whatever the ranks, and the rows of adapters that follow each other lie together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy
import torch
import xxhash
from torch import Tensor

from netweight.core.files import ALGORITHM, digest_file, read_record, whole_file, write_record
from netweight.errors import CorruptBlob, UsageError
from netweight.nn.lora import Adapter, AdapterStack
from netweight.store.reader import Store, open_store
from netweight.store.safetensors import build_header
from netweight.store.writer import StoreWriter

RECORD = "bank.json"
_VERSION = 1
_NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


@final
@dataclass(frozen=True)
class ShardRecord:
    """One shard."""

    file: str  # its name
    nbytes: int  # its size
    digest: str
    names: tuple[str, ...]
    contents: tuple[str, ...]  # digest of each adapter's factors and scales
    # Size and time of the file that each came from, to know it again; empty if it came from none.
    stamps: tuple[str, ...]


@final
@dataclass(frozen=True)
class BankRecord:
    """What a bank holds."""

    modules: Mapping[str, tuple[int, int]]  # module name → rows and columns, sorted by name
    # Names of convolutions → sides of their kernels.
    kernels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    base: str | None = None  # the model's name, if it is known
    shards: tuple[ShardRecord, ...] = ()  # in the order of their adapters
    skipped: Mapping[str, str] = field(default_factory=dict)  # adapters left out → the reason
    # Adapter → what its file says of where it comes from: training, trigger words, licence.
    provenance: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

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
        raise UsageError(f"{folder} is no bank of adapters: it holds no {RECORD}.", cure="Make one: space ingest.")
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
class Rows:
    """Adapters in a row, as a shard holds them."""

    down: Mapping[str, Tensor]  # module name → shape `(sum of ranks, columns)`
    up: Mapping[str, Tensor]  # module name → shape `(sum of ranks, rows)`
    scale: Tensor  # shape `(n, modules)`, fp64; modules in sorted order
    rank: Tensor  # shape `(n, modules)`, int64

    def __len__(self) -> int:
        """Number of adapters."""
        return len(self.rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return sum(tensor.nbytes for part in (self.down, self.up) for tensor in part.values())

    def not_finite(self) -> tuple[int, str] | None:
        """Find the first adapter with NaN or infinity: its number and the module; None if there is none."""
        # Returns: The adapter's number from 0, and the module's name.
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
                data = _bytes(part)
                start = 0
                for state, rank in zip(states, ranks, strict=True):
                    if not rank:  # a module that the adapter does not change
                        continue
                    state.update(f"{part.dtype} {rank}".encode())
                    state.update(data[start : start + rank].data)
                    start += rank
        for state, row in zip(states, _bytes(self.scale), strict=True):
            state.update(row.data)
        return [f"{ALGORITHM}:{state.hexdigest()}" for state in states]


def rows_of_adapter(adapter: Adapter, modules: Mapping[str, tuple[int, int]]) -> Rows:
    """Lay one adapter out as a shard holds it; modules that it lacks have no row."""
    # `modules`: sorted names → shapes
    down, up, scale, rank = {}, {}, [], []
    any_dtype = next(iter(adapter.factors.values())).down.dtype
    for name in modules:
        change = adapter.factors.get(name)
        scale.append(change.scale if change else 0.0)
        rank.append(change.rank if change else 0)
        rows, columns = modules[name]
        down[name] = change.down.detach() if change else torch.empty(0, columns, dtype=any_dtype)
        up[name] = change.up.detach().T.contiguous() if change else torch.empty(0, rows, dtype=any_dtype)
    return Rows(down, up, torch.tensor([scale], dtype=torch.float64), torch.tensor([rank]))


def rows_of(stack: AdapterStack) -> Rows:
    """Lay a stack out as a shard holds it; always copies."""
    modules = stack.modules
    down, up = {}, {}
    for name in modules:
        ranks = stack.ranks[name]
        kept = torch.arange(stack.down[name].shape[1]) < ranks.cpu()[:, None]
        dtype = torch.promote_types(stack.down[name].dtype, stack.up[name].dtype)
        down[name] = stack.down[name].detach().cpu().to(dtype)[kept]
        up[name] = stack.up[name].detach().cpu().to(dtype).transpose(1, 2)[kept]
    scale = torch.stack([stack.scale[name].detach().cpu().double() for name in modules], dim=1)
    rank = torch.stack([stack.ranks[name].detach().cpu().long() for name in modules], dim=1)
    return Rows(down, up, scale, rank)


def joined(modules: Sequence[str], pieces: Sequence[Rows]) -> AdapterStack:
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


def write_shard(path: Path, pieces: Sequence[Rows], *, compress: bool) -> None:
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
        self._intact = False  # whether the whole file was found to be what was written
        self._modules = modules
        self._store: Store = open_store(path)
        held = set(self._store.names())
        if held != {f"{name}.{part}" for name in modules for part in ("down", "up")} | {"scale", "rank"}:
            raise CorruptBlob(f"{path} holds other tensors than its bank's modules.", cure="Copy it again.")
        # rank: shape `(n, modules)`, int64
        self._scale, self.rank = self._store.get("scale"), self._store.get("rank")
        ends = self.rank.cumsum(0)
        held_rows = [[self._store.info(f"{name}.{part}").shape[0] for name in modules] for part in ("down", "up")]
        if len(self.rank) != len(record.names) or ends[-1:].tolist() != held_rows[:1] or held_rows[0] != held_rows[1]:
            raise self._damaged(0, len(record.names))
        self._starts = torch.cat([torch.zeros_like(ends[:1]), ends])

    def rows(self, start: int, stop: int, modules: Collection[str]) -> Rows:
        """Read adapters `start` to `stop` of this shard, and compare what was read with their digests."""
        down, up = {}, {}
        columns = [column for column, name in enumerate(self._modules) if name in modules]
        for column in columns:
            name = self._modules[column]
            piece = slice(int(self._starts[start, column]), int(self._starts[stop, column]))
            down[name] = self._store.get_slice(f"{name}.down", piece)
            up[name] = self._store.get_slice(f"{name}.up", piece)
        rows = Rows(down, up, self._scale[start:stop, columns], self.rank[start:stop, columns])
        whole = len(columns) == len(self._modules)
        if not self._intact and not (whole and tuple(rows.digests()) == self._record.contents[start:stop]):
            # Digests are of all factors in their own dtype. For some modules, or a wider dtype, the file's tells.
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


def _shapes(pieces: Sequence[Rows]) -> Iterator[tuple[str, torch.dtype, tuple[int, int]]]:
    """Name, dtype and shape of a shard's tensors, in order."""
    modules = sorted(pieces[0].down)
    for name in modules:
        for part in ("down", "up"):
            tensors: list[Tensor] = [getattr(piece, part)[name] for piece in pieces]
            yield f"{name}.{part}", _widest(tensors), (sum(len(t) for t in tensors), tensors[0].shape[1])
    count = sum(len(piece) for piece in pieces)
    yield "scale", torch.float64, (count, len(modules))
    yield "rank", torch.int64, (count, len(modules))


def _tensors(pieces: Sequence[Rows]) -> Iterator[tuple[str, Tensor]]:
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
    most = max(1, int(ranks.max()))  # where none of them changes the module, one row of zeros
    if len(rows) == most * len(ranks):
        return rows.view(len(ranks), most, -1)
    filled = rows.new_zeros(len(ranks), most, rows.shape[1])
    filled[torch.arange(most) < ranks[:, None]] = rows
    return filled
