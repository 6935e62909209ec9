"""Rows through a network in batches that fit: a batch that memory has no room for is halved, and the work goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from netweight.errors import UsageError

__all__ = ["Batches"]


@final
class Batches:
    """Runs functions of rows in batches; what it learns of memory holds for later calls.

    Args:
        rows: Most rows at a time.

    Attributes:
        rows: As given, or less after memory ran out.
        done: Rows computed so far.

    Raises:
        UsageError: `rows` is below 1.
    """

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise UsageError(f"Batches of {rows} rows cannot be.", cure="Give at least 1.")
        self.rows = rows
        self.done = 0

    def run(self, function: Callable[[slice], Tensor], count: int) -> Tensor:
        """Compute rows 0 to `count` and join them.

        Args:
            function: Takes a slice of rows and returns their results, one row each.
            count: At least 1.

        Raises:
            torch.OutOfMemoryError: A single row does not fit.
        """
        results: list[Tensor] = []
        start = 0
        while start < count:
            part = slice(start, min(start + self.rows, count))
            try:
                results.append(function(part))
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error) or part.stop - part.start == 1:
                    raise
                self.rows = (part.stop - part.start) // 2
                results_lost = True
            else:
                results_lost = False
                start = part.stop
                self.done += part.stop - part.start
            if results_lost and torch.cuda.is_available():
                torch.cuda.empty_cache()  # after the except block, so that the failed batch is no longer held
        return torch.cat(results)


def _is_out_of_memory(error: Exception) -> bool:
    """The CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
