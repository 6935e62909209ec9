"""Work on rows in batches that fit into memory: one that does not is halved, and the work goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

__all__ = ["Halving"]


@final
class Halving:
    """Batches of rows; what was learned of memory holds for later calls.

    Args:
        at_once: Most rows at a time; at least 1.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once

    def run(self, count: int, work: Callable[[range], None]) -> None:
        """Work on rows 0 to `count`.

        Args:
            count: Number of rows.
            work: Takes some of them. Where memory runs out it must have changed nothing.

        Raises:
            torch.OutOfMemoryError: A single row does not fit.
        """
        done = 0
        while done < count:
            part = range(done, min(done + self._at_once, count))
            try:
                work(part)
            except RuntimeError as error:
                # The CPU's allocator raises a plain RuntimeError.
                full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
                if not full or len(part) == 1:
                    raise
                self._at_once = -(-len(part) // 2)
            else:
                done = part.stop
