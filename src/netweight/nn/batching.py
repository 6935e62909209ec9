"""Rows through a network in batches that fit into memory: a batch that does not is halved.

`Costs` says what parts of such work took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor

from netweight.errors import UsageError


@final
class Batches:
    """Runs functions of rows in batches; what it learns of memory holds for later calls."""

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise UsageError(f"A batch needs at least 1 row, not {rows}.", cure="Raise `rows`.")
        self.rows = rows  # as given, or less after memory ran out
        self.done = 0  # rows computed so far
        self.calls = 0  # calls that computed them; one that memory had no room for does not count

    def run(self, function: Callable[[slice], Tensor], count: int) -> Tensor:
        """Compute rows 0 to `count` and join them."""
        # `function`: takes a slice of rows and returns their results, shape `(rows of the slice, …)`
        # `count`: at least 1
        # Returns: Shape `(count, …)`.
        results: list[Tensor] = []
        self.work(lambda rows: results.append(function(rows)), count)
        return torch.cat(results)

    def work(self, function: Callable[[slice], None], count: int) -> None:
        """Do something with rows 0 to `count`."""
        # `function`: takes a slice of rows; where memory runs out it must have changed nothing
        start = 0
        while start < count:
            part = slice(start, min(start + self.rows, count))
            size = part.stop - part.start
            if self._fits(function, part):
                start, self.done, self.calls = part.stop, self.done + size, self.calls + 1
            else:
                self.rows = size // 2
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # behind the except block, so that the failed batch is no longer held

    def _fits(self, function: Callable[[slice], None], part: slice) -> bool:
        try:
            function(part)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error) or part.stop - part.start == 1:
                raise
            return False
        return True


@final
class Costs:
    """Time and rows of the steps of some work; the first step begins when this is made."""

    def __init__(self) -> None:
        # By the step's name: "seconds", "processor seconds" of all threads, "rows" and "calls".
        self.steps: dict[str, dict[str, float]] = {}
        self._step, self._since = _nothing(), clock()

    def pause(self) -> None:
        """Count no time from here on."""
        self._add({name: value - self._since[name] for name, value in clock().items()})

    def resume(self, cost: Mapping[str, float]) -> None:
        """Go on, and count what this work's share of the pause did cost."""
        # `cost`: seconds or counts, by what they are of
        self._add(cost)
        self._since = clock()

    def end(self, step: str) -> None:
        """End a step; the next one begins."""
        self.pause()
        self.steps[step], self._step, self._since = self._step, _nothing(), clock()

    def _add(self, cost: Mapping[str, float]) -> None:
        for name, value in cost.items():
            self._step[name] += value


def clock() -> dict[str, float]:
    """Return seconds of this moment and processor seconds of this process so far, as `Costs` counts them."""
    return {"seconds": time.perf_counter(), "processor seconds": time.process_time()}


def _nothing() -> dict[str, float]:
    return {"seconds": 0.0, "processor seconds": 0.0, "rows": 0, "calls": 0}


def _is_out_of_memory(error: Exception) -> bool:
    """The CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
