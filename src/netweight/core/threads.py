"""The cores that this process may use, and work on several threads whose results come in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def usable_cores() -> int:
    """Count the cores that this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(work: Callable[[T], R], tasks: Iterable[T], threads: int) -> Iterator[R]:
    """Do each task on one of some threads; at most two for each thread are under way or wait to be taken."""
    if threads <= 1:
        yield from map(work, tasks)
        return
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[R]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Without waiting: a generator that was left in the middle is collected in whatever thread allocates next, and
        # one that is just starting holds the lock that joining another needs.
        pool.shutdown(wait=False, cancel_futures=True)
