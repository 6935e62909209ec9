"""Functions that worker processes import, and a study that a test kills. Not a test itself.

Usage: runs_under_test.py LEDGER TRACES [leave | ray ADDRESS]
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from netweight.core.engines import send_message
from netweight.job import map_runs


@dataclass(frozen=True)
class Config:
    """One run: what it does, and where it leaves a trace of having run."""

    number: int
    traces: str
    deed: str = "square"


def work(config: Config) -> dict[str, int]:
    """Leave a trace, do the deed."""
    with open(Path(config.traces) / str(config.number), "a") as trace:
        trace.write("x")
    if config.deed == "fail" and not (Path(config.traces) / "mended").exists():
        raise ValueError(f"number {config.number} is unwell")
    if config.deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.deed == "exit":
        sys.exit(5)
    if config.deed == "exit with zero":
        sys.exit(0)
    if config.deed == "leave with zero":
        os._exit(0)
    if config.deed == "parent":
        child = multiprocessing.get_context("spawn").Process(target=print)
        child.start()
        child.join()
    if config.deed == "slow":
        time.sleep(0.3)
    return {"square": config.number**2}


def unsendable(config: Config) -> object:
    """Return what does not pickle."""
    return lambda: config


def report_twice(number: int) -> int:
    """Send two messages before the end; a number below zero then dies."""
    for step in range(2):
        send_message(f"{number}, step {step}")
    if number < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


if __name__ == "__main__":
    ledger, traces, *how = sys.argv[1:]
    study = [Config(number, traces, "slow") for number in range(6)]
    if how == ["leave"]:  # in the middle, with the iterator alive
        unfinished = map_runs(work, study, ledger=ledger)
        next(unfinished)
        sys.exit(0)
    with contextlib.ExitStack() as stack:
        options = {}
        if how:
            from netweight.core.engines import ray_cluster

            options["engine"] = stack.enter_context(ray_cluster(how[1]))
        for result in map_runs(work, study, ledger=ledger, **options):
            print(result.config.number, result.from_ledger, flush=True)
