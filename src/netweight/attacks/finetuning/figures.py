"""Figures of attacks: survival, scores and steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from netweight.attacks.finetuning.resistance import (
    AttackTimes,
    best_attack,
    by_attack,
)
from netweight.attacks.finetuning.sweep import Sweep
from netweight.metrics.survival import Survival
from netweight.report.finding import Figure
from netweight.report.plots import TimeRow, lines, time_rows


def survival_figure(sweep: Sweep, subjects: Sequence[str], domain: str) -> Figure | None:
    """Draw the share of runs not recovered by step, each subject under its own best attack."""
    series, bands, words = {}, {}, []
    for name, (_, curve) in _best(sweep, subjects, domain).items():
        # The curve of a single run does not describe other runs.
        if curve.n == 1:
            continue
        x, share, low, high = curve.steps()
        series[name], bands[name] = (x, share), (low, high)
        words.append(f"{name}: {_median_words(curve)} (n = {curve.n})")
    if not series:
        return None
    return lines(
        series,
        alt=f"Share of runs that have not recovered, by step, under each model's best attack. {'; '.join(words)}.",
        caption=f"Best attack on each model. {'; '.join(words)}.",
        xlabel="steps",
        ylabel="share not recovered",
        bands=bands,
    )


def score_figure(sweep: Sweep, subjects: Sequence[str], domain: str) -> Figure | None:
    """Draw the median recovery score by step, each subject under its own best attack."""
    series = {name: _median_scores(best) for name, (best, _) in _best(sweep, subjects, domain).items()}
    if not series:
        return None
    ends = "; ".join(f"{name} ends at {scores[-1]:.2f}" for name, (_, scores) in series.items())
    return lines(
        series,
        alt=f"Median recovery score by step under each model's best attack. {ends}.",
        caption=f"Median over seeds; a run that has recovered and stopped keeps its last score. {ends}.",
        xlabel="steps",
        ylabel="recovery score",
    )


def steps_figure(sweep: Sweep, subjects: Sequence[str], domain: str) -> Figure | None:
    """Draw each run's steps to the threshold, one row for each subject under its own best attack."""
    best = _best(sweep, subjects, domain)
    if not best:
        return None
    rows = [_row_of_times(name, attack, curve) for name, (attack, curve) in best.items()]
    censored = sum(len(row.censored) for row in rows)
    words = "; ".join(f"{name}: {_median_words(curve)}" for name, (_, curve) in best.items())
    sentence = f"{censored} runs ended before" if censored else "no run ended before"
    return time_rows(
        rows,
        alt=f"Steps to the threshold of every run, under each model's best attack. {words}; {sentence}.",
        caption="Every run under the best attack on its model. A dot is a run that recovered the behavior. A "
        "triangle is a run that ended without a recovery, which would have taken more steps. The line is the "
        f"median, and the bar is its 95 % interval. A bar that reaches the edge has no upper end. {words}.",
        xlabel="steps to the threshold",
    )


def _row_of_times(name: str, attack: AttackTimes, curve: Survival) -> TimeRow:
    assert attack.times is not None
    marked = list(zip(attack.times.values, attack.times.observed, strict=True))
    return TimeRow(
        name,
        [value for value, observed in marked if observed],
        [value for value, observed in marked if not observed],
        curve.median,
        (curve.median_low, curve.median_high),
    )


def _best(sweep: Sweep, subjects: Sequence[str], domain: str) -> dict[str, tuple[AttackTimes, Survival]]:
    """The best attack on each subject with its curve, in their order; subjects without a run that counts left out."""
    curves = {}
    for name in subjects:
        attack = best_attack(by_attack(sweep.of(name, domain=domain)))
        curve = None if attack is None else attack.curve()
        if attack is not None and curve is not None:
            curves[name] = attack, curve
    return curves


def _median_words(curve: Survival) -> str:
    if math.isfinite(curve.median):
        return f"half of the runs recover the behavior by step {curve.median:.0f}"
    return f"fewer than half of the runs recover the behavior by step {curve.last:.0f}"


def _median_scores(attack: AttackTimes) -> tuple[list[float], list[float]]:
    curves = [run.result.curve for run in attack.runs if run.result.outcome in ("recovered", "resisted")]
    steps = sorted({each.step for curve in curves for each in curve})
    scores = [
        statistics.median([[each.score for each in curve if each.step <= step][-1] for curve in curves])
        for step in steps
    ]
    return [float(step) for step in steps], scores
