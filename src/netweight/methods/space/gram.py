"""The Gram matrix of a bank's adapters, block row by block row; kept in a folder, it goes on after a kill and grows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from netweight.core.digest import of_config
from netweight.core.progress import QUIET, Progress
from netweight.generate.kept_sums import read_tensors, write_tensors
from netweight.generate.shard_sum import Alone, ShardSum
from netweight.generate.stack import AdapterStack
from netweight.methods.space.bank import Bank, stack_of, stacks_of
from netweight.methods.space.inner_product import fingerprints_of, inner_products, precision_of

__all__ = ["block_rows", "fingerprints", "gram_of", "make_block_row", "same_fingerprints"]

_BYTES = 1 << 28  # of adapters that are read at a time, twice
_ALONE = Alone()


def gram_of(
    bank: Bank, *, folder: Path | None = None, workers: ShardSum = _ALONE, progress: Progress = QUIET
) -> tuple[Tensor, float]:
    """Return the inner products of all pairs of adapters, and the relative rounding error of the products.

    Reads each block of adapters once for every block after it; memory holds the matrix and two blocks.

    Args:
        bank: n adapters.
        folder: Where to keep block rows. Those of a bank that has grown since are used again: its names must begin
            with the same ones, and adapters are compared by fingerprint.
        workers: Who shares the work: of w workers, each takes every w-th block row.
        progress: Where to show it.

    Returns:
        Shape `(n, n)`, fp64, symmetric.

    Raises:
        UsageError: An adapter holds NaN or infinity.
        CorruptBlob: A file in the folder is damaged.
    """
    count, block = len(bank), _block(bank)
    gram = torch.zeros(count, count, dtype=torch.float64)
    precision = torch.zeros((), dtype=torch.float64)
    known = None if folder is None else fingerprints(bank)
    with progress.task("Inner products", count * (count + 1) // 2, unit="pairs") as task:
        for number, start in enumerate(range(0, count, block)):
            if number % workers.count != workers.number:
                continue
            later = stack_of(bank, start, min(start + block, count))
            rows = _block_row(bank, later, start, folder, known)
            gram[start : start + len(later), : start + len(later)] = rows
            gram[:start, start : start + len(later)] = rows[:, :start].T
            precision += torch.finfo(precision_of(later)).eps * len(later) / count
            task.update(len(later) * start + len(later) * (len(later) + 1) // 2)
    workers.add([gram, precision])
    return gram, float(precision)


def block_rows(bank: Bank) -> list[int]:
    """The first adapter of every block row.

    Args:
        bank: Where adapters come from.
    """
    return list(range(0, len(bank), _block(bank)))


def make_block_row(bank: Bank, start: int, folder: Path) -> None:
    """Make one block row and keep it, unless it is there, in a worker; `gram_of` with the same folder takes it up.

    Args:
        bank: Where adapters come from.
        start: As `block_rows` says.
        folder: Where it is kept.
    """
    stop = min(start + _block(bank), len(bank))
    _block_row(bank, stack_of(bank, start, stop), start, folder, fingerprints(bank, stop))


def fingerprints(bank: Bank, count: int | None = None) -> Tensor:
    """Fingerprints of a bank's first adapters, of all by default.

    Args:
        bank: Where adapters come from.
        count: How many adapters; None for all.

    Returns:
        Shape `(count,)`, fp64.
    """
    stacks = stacks_of(bank, len(bank) if count is None else count, description="Fingerprints")
    return torch.cat([fingerprints_of(stack) for _, stack in stacks])


def same_fingerprints(found: Tensor, known: Tensor) -> bool:
    """Whether they are of the same adapters.

    Args:
        found: Shape `(n,)`, fp64.
        known: Shape `(n,)`, fp64.
    """
    return torch.allclose(found, known, rtol=0, atol=1e-7 * float(known.abs().max()))


def _block_row(bank: Bank, later: AdapterStack, start: int, folder: Path | None, fingerprints: Tensor | None) -> Tensor:
    """Inner products of a block with itself and everything before it, shape `(m, start + m)`; kept in the folder."""
    stop = start + len(later)
    if folder is None or fingerprints is None:
        return _products(bank, later, start)
    file, about = folder / f"gram-{start}-{stop}.safetensors", {"names": of_config(list(bank.names[:stop]))}
    if file.exists():
        kept, said = read_tensors(file)
        if said == about and same_fingerprints(fingerprints[:stop], kept["fingerprints"]):
            return kept["products"]
    products = _products(bank, later, start)
    write_tensors(file, {"products": products, "fingerprints": fingerprints[:stop]}, about)
    return products


def _products(bank: Bank, later: AdapterStack, start: int) -> Tensor:
    step = _block(bank)
    earlier = [inner_products(later, stack_of(bank, first, first + step)) for first in range(0, start, step)]
    return torch.cat([*earlier, inner_products(later, later)], dim=1)


def _block(bank: Bank) -> int:
    """Adapters that are read at a time: as many as memory should hold, since earlier ones are read again."""
    one = bank.stack(0, 1)
    size = sum(factor.nbytes for part in (one.down, one.up) for factor in part.values())
    return max(16, min(2048, _BYTES // size))
