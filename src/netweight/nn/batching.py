"""Rows through a network in batches that fit: a batch that memory has no room for is halved, and the work goes on.

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
    """Runs functions of rows in batches; what it learns of memory holds for later calls.

    Args:
        rows: Most rows at a time.

    Attributes:
        rows: As given, or less after memory ran out.
        done: Rows computed so far.
        calls: Calls that computed them; one that memory had no room for does not count.

    Raises:
        UsageError: `rows` is below 1.
    """

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise UsageError(f"Batches of {rows} rows cannot be.", cure="Give at least 1.")
        self.rows = rows
        self.done = 0
        self.calls = 0

    def run(self, function: Callable[[slice], Tensor], count: int) -> Tensor:
        """Compute rows 0 to `count` and join them.

        Args:
            function: Takes a slice of rows and returns their results, shape `(rows of the slice, …)`.
            count: At least 1.

        Returns:
            Shape `(count, …)`.

        Raises:
            torch.OutOfMemoryError: A single row does not fit.
        """
        results: list[Tensor] = []
        self.work(lambda rows: results.append(function(rows)), count)
        return torch.cat(results)

    def work(self, function: Callable[[slice], None], count: int) -> None:
        """Do something with rows 0 to `count`.

        Args:
            function: Takes a slice of rows. Where memory runs out it must have changed nothing.
            count: Number of rows.

        Raises:
            torch.OutOfMemoryError: A single row does not fit.
        """
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
    """What the steps of some work cost; the first begins where this is made. Other work may go on beside.

    Attributes:
        steps: By the step's name: "seconds", "processor seconds" of all threads, "rows" and "calls".
    """

    def __init__(self) -> None:
        self.steps: dict[str, dict[str, float]] = {}
        self._step, self._since = _nothing(), clock()

    def pause(self) -> None:
        """Count no time from here on."""
        self._add({name: value - self._since[name] for name, value in clock().items()})

    def resume(self, cost: Mapping[str, float]) -> None:
        """Go on, and count what this work's share of the pause did cost.

        Args:
            cost: Seconds or counts, by what they are of.
        """
        self._add(cost)
        self._since = clock()

    def end(self, step: str) -> None:
        """End a step; the next one begins.

        Args:
            step: The step's name.
        """
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
