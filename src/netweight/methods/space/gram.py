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
from netweight.methods.space.bank import Bank, stack_of
from netweight.methods.space.inner_product import inner_products, norms_of, precision_of

__all__ = ["gram_of"]

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
            with the same ones, and norms are compared.
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
    with progress.task("Inner products", count * (count + 1) // 2, unit="pairs") as task:
        for number, start in enumerate(range(0, count, block)):
            if number % workers.count != workers.number:
                continue
            later = stack_of(bank, start, min(start + block, count))
            rows = _block_row(bank, later, start, folder)
            gram[start : start + len(later), : start + len(later)] = rows
            gram[:start, start : start + len(later)] = rows[:, :start].T
            precision += torch.finfo(precision_of(later)).eps * len(later) / count
            task.update(len(later) * start + len(later) * (len(later) + 1) // 2)
    workers.add([gram, precision])
    return gram, float(precision)


def _block_row(bank: Bank, later: AdapterStack, start: int, folder: Path | None) -> Tensor:
    """Inner products of a block with itself and everything before it, shape `(m, start + m)`."""
    stop, norms = start + len(later), norms_of(later)
    names = of_config(list(bank.names[:stop]))
    file = None if folder is None else folder / f"gram-{start}-{stop}.safetensors"
    if file is not None and file.exists():
        kept, about = read_tensors(file)
        if about == {"names": names} and torch.allclose(kept["norms"], norms, rtol=1e-9, atol=0):
            return kept["products"]
    step, parts = _block(bank), []
    for first in range(0, start, step):
        parts.append(inner_products(later, stack_of(bank, first, first + step)))
    products = torch.cat([*parts, inner_products(later, later)], dim=1)
    if file is not None:
        write_tensors(file, {"products": products, "norms": norms}, {"names": names})
    return products


def _block(bank: Bank) -> int:
    """Adapters that are read at a time: as many as memory should hold, since earlier ones are read again."""
    one = bank.stack(0, 1)
    size = sum(factor.nbytes for part in (one.down, one.up) for factor in part.values())
    return max(16, min(2048, _BYTES // size))
