"""Work on threads whose results come in the order of the tasks, few at a time, so that memory stays small."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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
