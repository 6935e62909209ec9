"""The Gram matrix of a bank's adapters, block row by block row; kept in a folder, it goes on after a kill and grows."""

from __future__ import annotations

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.methods.space.bank import Bank, stack_of
from netweight.methods.space.inner_product import inner_products, precision_of

__all__ = ["gram_of"]

_BYTES = 1 << 28  # of adapters that are read at a time, twice


def gram_of(bank: Bank, *, progress: Progress = QUIET) -> tuple[Tensor, float]:
    """Return the inner products of all pairs of adapters, and the relative rounding error of the products.

    Reads each block of adapters once for every block after it; memory holds the matrix and two blocks.

    Args:
        bank: n adapters.
        progress: Where to show it.

    Returns:
        Shape `(n, n)`, fp64, symmetric.

    Raises:
        UsageError: An adapter holds NaN or infinity.
    """
    count, dtype, block = len(bank), torch.float32, _block(bank)
    gram = torch.empty(count, count, dtype=torch.float64)
    with progress.task("Inner products", count * (count + 1) // 2, unit="pairs") as task:
        for start in range(0, count, block):
            later = stack_of(bank, start, min(start + block, count))
            dtype = torch.promote_types(dtype, precision_of(later))
            for first in range(0, start + 1, block):
                earlier = later if first == start else stack_of(bank, first, first + block)
                found = inner_products(later, earlier)
                gram[start : start + len(later), first : first + len(earlier)] = found
                gram[first : first + len(earlier), start : start + len(later)] = found.T
                task.update(found.numel() if first != start else len(later) * (len(later) + 1) // 2)
    return gram, torch.finfo(dtype).eps


def _block(bank: Bank) -> int:
    """Adapters that are read at a time: as many as memory should hold, since earlier ones are read again."""
    one = bank.stack(0, 1)
    size = sum(factor.nbytes for part in (one.down, one.up) for factor in part.values())
    return max(16, min(2048, _BYTES // size))
