"""`bank.json`, which says what a bank holds: modules, shards, and the names and digests of their adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from netweight.errors import UsageError
from netweight.store.checkpoint import read_record, write_record

RECORD = "bank.json"
_VERSION = 1


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
