"""Fair times: contenders side by side in one process, one after another in every round, so that their ratios hold.

A machine's mood changes from second to second and from process to process; a ratio of two times taken in the same round
does not. Both clocks are kept: wall time, and the CPU time of all threads of the process, which other programs on the
machine disturb least.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive

K = TypeVar("K", bound=Hashable)
Work: TypeAlias = Mapping[K, Callable[[], object]]

# mallopt's parameters in glibc, and the limits at which its own dynamic rule arrives (malloc.h, mallopt(3)).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_LARGEST_THRESHOLD = 32 << 20


@dataclass(frozen=True)
class Case(Generic[K]):
    """Something to be timed."""

    key: K
    """Its name among the cases."""
    run: Callable[[Any], object]
    """The timed part; takes what `prepare` returns. What it returns is freed after the clock has stopped."""
    prepare: Callable[[], Any] = lambda: None
    """Makes an input, untimed, before every run."""


@dataclass(frozen=True)
class Samples:
    """Seconds of one case, one entry per round."""

    wall: tuple[float, ...]
    """Time that passed."""
    cpu: tuple[float, ...]
    """CPU time of all threads of the process."""


def interleave(
    cases: Sequence[Case[K]],
    *,
    repeats: int,
    seed: int,
    warmup: int = 1,
    again_below: float = 1.0,
    steady: float = 0.02,
    progress: Progress = QUIET,
    description: str = "measure",
) -> dict[K, Samples]:
    """Time cases round by round, each once per round, in an order drawn anew for every round."""
    # A case that ever took less than `again_below` seconds is run untimed just before, every time: it finds caches,
    # branch predictors and the clock of the processor as its own last run left them, not as the case before.
    # A case is run until it has taken about `steady` seconds, at most 200 times, and the median of its runs is the
    # sample of the round: processors need some milliseconds to settle after a change of work.
    # Entry i of all cases is from the same round.
    least = dict.fromkeys((case.key for case in cases), float("inf"))
    times: dict[K, list[tuple[float, float]]] = {case.key: [] for case in cases}
    order = random.Random(derive(seed, "order of cases"))
    with progress.task(description, (warmup + repeats) * len(cases), unit="runs") as task:
        for number in range(warmup + repeats):
            for case in order.sample(cases, len(cases)):
                if least[case.key] < again_below:
                    _time(case)
                runs = [_time(case) for _ in range(min(200, 1 + int(steady / least[case.key])))]
                taken = median(wall for wall, _ in runs), median(cpu for _, cpu in runs)
                least[case.key] = min(least[case.key], *taken)
                if number >= warmup:
                    times[case.key].append(taken)
                task.update()
    return {key: Samples(tuple(w for w, _ in taken), tuple(c for _, c in taken)) for key, taken in times.items()}


def in_turns(
    work: Work[K], rounds: int, *, clock: Literal["cpu", "wall"] = "cpu", seed: int = 0, steady: float = 0.0
) -> dict[K, tuple[float, ...]]:
    """Return seconds of each piece of work by round; all take turns, with one run of each, or some for short ones."""
    cases = [Case(key, lambda _, one=one: one()) for key, one in work.items()]  # type: ignore[misc]
    samples = interleave(cases, repeats=rounds, seed=seed, again_below=0, steady=steady)
    return {key: getattr(samples[key], clock) for key in work}


def ratios(times: Mapping[K, Sequence[float]], slow: K, fast: K) -> list[float]:
    """Return how many times as fast one was as the other, round by round."""
    return [one / other for one, other in zip(times[slow], times[fast], strict=True)]


def median_ratio(times: Mapping[K, Sequence[float]], slow: K, fast: K) -> float:
    """Return the median of how many times as fast one was as the other in the same rounds."""
    return round(median(ratios(times, slow, fast)), 3)


def _time(case: Case[Any]) -> tuple[float, float]:
    """Run a case once; return its wall and CPU seconds. Garbage is collected before, never within."""
    given = case.prepare()
    enabled = gc.isenabled()
    gc.disable()
    try:
        cpu, wall = time.process_time(), time.perf_counter()
        result = case.run(given)
        taken = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        if enabled:
            gc.enable()
    del given, result
    return taken


@contextlib.contextmanager
def kept_heap() -> Iterator[bool]:
    """Let the C library keep freed memory, so that programs which allocate their outputs find warm pages too."""
    # Otherwise every large allocation is fetched from the system page by page, which takes longer than most
    # decoders. At the end the limits are set to those at which the C library's own dynamic rule arrives.
    mallopt = None
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield False
        return
    done = [mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1)]
    try:
        yield all(done)
    finally:
        mallopt(_MMAP_MAX, 65536)
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
