"""Parts of a fit that other processes or machines carry out: block rows of the Gram matrix, and shards of a bank.

They open the bank themselves, so that it must be on disk, under the same path for all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from netweight.core.engines import Engine
from netweight.core.progress import Progress
from netweight.core.runs import map_runs
from netweight.errors import NetweightError, UsageError
from netweight.methods.space.bank import Bank
from netweight.methods.space.gram import block_rows, make_block_row
from netweight.methods.space.sketch import Sketch, SketchRows
from netweight.methods.space.vectors import AdapterRows, Layout
from netweight.store.adapter_bank import AdapterBank

__all__ = ["BankShard", "RowKind", "bank_shards", "make_block_rows"]

RowKind = Literal["sketch", "factors", "shared-down"]
"""What the rows of a shard are."""


@final
@dataclass(frozen=True)
class BankShard:
    """Some adapters of a bank on disk, as rows.

    Attributes:
        path: The bank's folder.
        digest: Of the bank.
        start: Number of the first adapter.
        stop: Number after the last.
        kind: "sketch", or a representation of `Layout`.
        side: Of the sketch.
        seed: Of the sketch.
    """

    path: str
    digest: str
    start: int
    stop: int
    kind: RowKind
    side: int
    seed: int

    def open(self) -> AdapterRows | SketchRows:
        """Open the rows.

        Raises:
            UsageError: The bank has changed since.
        """
        bank = AdapterBank.open(self.path)
        if bank.digest != self.digest:
            raise UsageError(f"The bank {self.path} has changed since the fit began.", cure="Begin in another folder.")
        if self.kind == "sketch":
            return SketchRows(bank, Sketch(dict(bank.shapes), self.side, self.seed), self.start, self.stop)
        return AdapterRows(bank, Layout.of(self.kind, bank), self.start, self.stop)


def bank_shards(bank: Bank, kind: RowKind, *, side: int, seed: int) -> list[BankShard]:
    """Divide a bank into shards, of 4,096 adapters at most and 8 at least.

    Args:
        bank: A bank on disk.
        kind: What rows are made of adapters.
        side: Width of a sketch's rows, where `kind` is one.
        seed: Where a sketch is drawn from.

    Returns:
        The shards, in the adapters' order.

    Raises:
        UsageError: It is not on disk.
    """
    opened, count = _on_disk(bank), len(bank)
    parts = min(count, max(8, -(-count // 4096)))
    edges = [count * number // parts for number in range(parts + 1)]
    return [
        BankShard(str(opened.path.resolve()), bank.digest, start, stop, kind, side, seed)
        for start, stop in itertools.pairwise(edges)
    ]


@final
@dataclass(frozen=True)
class _BlockRow:
    """A block row to make: of which bank, from which adapter, and where it is kept."""

    path: str
    digest: str
    start: int
    folder: str


def make_block_rows(bank: Bank, folder: Path, engine: Engine, progress: Progress) -> None:
    """Make the block rows of a Gram matrix, to be kept in a folder.

    Args:
        bank: A bank on disk.
        folder: Where they are kept.
        engine: Where the work is done.
        progress: Where it is shown.

    Raises:
        UsageError: The bank is not on disk.
        NetweightError: A task failed.
    """
    path = str(_on_disk(bank).path.resolve())
    folder.mkdir(parents=True, exist_ok=True)
    longest_first = reversed(block_rows(bank))
    tasks = [_BlockRow(path, bank.digest, start, str(folder.resolve())) for start in longest_first]
    runs = map_runs(_make, tasks, ledger=folder / "gram.jsonl", engine=engine)
    for run in progress.track(runs, "Block rows", len(tasks), unit="rows"):
        if run.error is not None:
            raise NetweightError(
                f"The inner products from adapter {run.config.start} on failed: {run.error.strip().splitlines()[-1]}",
                cure="Once the reason is gone, the same call goes on from there.",
            )


def _make(task: _BlockRow) -> int:
    make_block_row(AdapterBank.open(task.path), task.start, Path(task.folder))
    return task.start


def _on_disk(bank: Bank) -> AdapterBank:
    if not isinstance(bank, AdapterBank):
        raise UsageError("Only a bank on disk can be shared with other processes.", cure="Write it with BankWriter.")
    return bank
