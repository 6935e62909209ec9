"""The pace of attacks on one model: how long another attack will take, for searches with a time limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.sweep import AttackOutcome


@final
class Pace:
    """Estimates the duration of attacks from those that were run."""

    def __init__(self) -> None:
        # The values are the seconds of a step, and its rows.
        self._steps: dict[tuple[str, bool], tuple[float, int]] = {}
        self._operations, self._seconds = 0.0, 0.0

    def add(self, runs: Iterable[AttackOutcome], seconds: float = 0.0) -> None:
        """Learn from runs that took so many seconds of the clock together; remembered ones took none of it."""
        for run in runs:
            last, settings = run.result.curve[-1], run.result.settings
            spent = max(seconds, last.seconds)
            if last.step:
                self._steps[_key(settings)] = spent / last.step, settings.batch_size
                self._operations += last.flops
                self._seconds += spent

    def expected(self, settings: AttackSettings, operations: float = 0.0) -> float:
        """Estimate the seconds of an attack whose optimizer needs so many operations a step beyond the gradient's.

        Attacks of a kind that was not run yet are estimated from the slowest kind and the operations in a second of
        all runs so far; 0 before the first run.
        """
        like = self._steps.get(_key(settings))
        if like is None and not self._steps:
            return 0.0
        seconds, rows = like or max(self._steps.values())
        ratio = settings.batch_size / rows
        # With fewer rows, the optimizer's part of a step takes as long as before: half of the time is taken as its.
        step = seconds * (ratio if ratio > 1 else (1 + ratio) / 2)
        if like is None and self._operations:
            step += operations * self._seconds / self._operations
        return step * settings.steps


def _key(settings: AttackSettings) -> tuple[str, bool]:
    return settings.optimizer, settings.lora_rank is not None or settings.trains != "all"
