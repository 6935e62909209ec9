"""How long a round takes: methods side by side, and the engine against the usual way. Command and table 4 call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, final

import torch

from netweight.core.progress import QUIET, Progress
from netweight.methods.federate.catalog import METHODS, named_method
from netweight.methods.federate.config import LocalTraining
from netweight.methods.federate.dense import dense_fedavg, dense_hyperfl
from netweight.methods.federate.engine import round_by_round
from netweight.methods.federate.task import FedTask
from netweight.metrics.intervals import paired_ratio
from netweight.metrics.timing import Case, Samples, interleave
from netweight.report.finding import Better, Finding

__all__ = ["TIMED", "Contender", "speed_findings", "time_rounds"]

TIMED = ("fedavg", "dp-fedavg", "ppsgd", "centaur", "hyperfl", "hyperfl-body")
"""Methods that are timed, by their names in the catalog."""
_NOISE = 1.0  # how much noise there is does not change the time


@final
@dataclass(frozen=True, order=True)
class Contender:
    """Who trains a round.

    Attributes:
        method: A method by its name in the catalog.
        engine: Whether this library's engine trains it, or dense modules one client after another.
        threads: The engine's workers, or torch's threads for dense modules.
    """

    method: str
    engine: bool = True
    threads: int = 1

    @property
    def label(self) -> str:
        """In words, for tables."""
        if self.engine:
            return f"{self.method}, {self.threads} worker{'s' * (self.threads > 1)}"
        return f"{self.method}, dense modules, {self.threads} thread{'s' * (self.threads > 1)}"


def time_rounds(
    task: FedTask,
    training: LocalTraining,
    *,
    workers: tuple[int, ...] = (1, 2),
    repeats: int,
    seed: int = 0,
    progress: Progress = QUIET,
) -> dict[Contender, Samples]:
    """Time rounds of every contender, one of each in turn, in one process.

    Args:
        task: Model and data.
        training: The same for all methods.
        workers: Numbers of threads to measure with.
        repeats: Rounds of each; an interval needs 5.
        seed: Of everything drawn, the order of the contenders among it.
        progress: Where progress is shown.

    Returns:
        Seconds of every round; entry i of all contenders was measured side by side.
    """
    before = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        cases = []
        for threads in workers:
            for method in TIMED:
                noise = _NOISE if METHODS[method].private else None
                made = named_method(method, training=training, noise_multiplier=noise)
                rounds = stack.enter_context(round_by_round(task, made, seed=seed, workers=threads))
                cases.append(_case(Contender(method, threads=threads), 1, rounds))
            dense = dense_fedavg(task, training, seed=seed)
            cases.append(_case(Contender("fedavg", engine=False, threads=threads), threads, dense))
        cases.append(_case(Contender("hyperfl", engine=False), 1, dense_hyperfl(task, training, seed=seed)))
        return interleave(
            cases, repeats=repeats, seed=seed, again_below=0, steady=0, progress=progress, description="rounds"
        )


def _case(contender: Contender, threads: int, run: Callable[[], object]) -> Case[Contender]:
    """Time a function with a number of torch's threads; the engine's workers each have one."""

    def timed(_: Any) -> None:
        run()

    return Case(contender, timed, lambda: torch.set_num_threads(threads))


def speed_findings(times: Mapping[Contender, Samples], *, seed: int, targets: bool) -> list[Finding]:
    """Return ratios of times taken side by side, with intervals.

    Args:
        times: From `time_rounds`.
        seed: Of the intervals.
        targets: Whether they are held against targets; a trial run is not.
    """
    findings = []
    for threads in sorted({contender.threads for contender in times}):
        base = Contender("fedavg", threads=threads)
        for method in TIMED[1:]:
            limit = {"hyperfl": 2.0, "dp-fedavg": 3.0}.get(method) if targets else None
            name = f"time of a round, {method} over fedavg, {_workers(threads)}"
            findings.append(_ratio(name, times, Contender(method, threads=threads), base, "lower", limit, seed))
        for method, least in (("fedavg", 1.0 if threads == 1 else 1.8), ("hyperfl", 6.0)):
            goal = least if targets and threads <= 2 else None
            for other in sorted({1, threads}):
                name = f"times as fast as dense modules on {other} thread{'s' * (other > 1)}, {method}"
                dense = Contender(method, engine=False, threads=other)
                if dense not in times:
                    continue
                wanted = goal if other == threads else None
                ours = Contender(method, threads=threads)
                findings.append(_ratio(f"{name}, {_workers(threads)}", times, dense, ours, "higher", wanted, seed))
    return findings


def _workers(threads: int) -> str:
    return f"{threads} worker{'s' * (threads > 1)}"


def _ratio(
    name: str,
    times: Mapping[Contender, Samples],
    top: Contender,
    bottom: Contender,
    better: Better,
    target: float | None,
    seed: int,
) -> Finding:
    above, below = times[top].wall, times[bottom].wall
    found = paired_ratio(above, below, seed=seed)
    return Finding(
        name,
        found.estimate,
        ci95=found.ci95,
        n=found.n,
        better=better,
        target=target,
        seeds=(seed,),
        detail={"median seconds": {top.label: median(above), bottom.label: median(below)}},
    )
