"""A sweep in a report: survival curves, scores by step, every attack in a table, and a section that holds them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from types import MappingProxyType

from netweight.attacks.finetuning.findings import (
    ResistanceConfig,
    Stability,
    attack_findings,
    resistance_findings,
    verdict,
)
from netweight.attacks.finetuning.resistance import AttackTimes, best_attack, best_attack_ratio, by_attack
from netweight.attacks.finetuning.sweep import Sweep
from netweight.metrics.survival import Survival
from netweight.report.finding import Column, Figure, Finding, Table
from netweight.report.plots import TimeRow, lines, time_rows
from netweight.report.report import Report

__all__ = ["add_section", "attack_table", "score_figure", "steps_figure", "survival_figure"]

INTRO = (
    "Each model is fine-tuned on the harmful examples until it does again what was taken out of it, and the steps are "
    "counted. A run that ends before is censored: its time is longer than that, and no more is known. Runs that lost "
    "the abilities worth keeping, or their fluency, are counted as collapsed, never as resistance.\n\n"
    "Resistance compares best attack with best attack: an attacker chooses. Survival curves show the share of runs "
    "that have not recovered yet; bands are pointwise 95 % intervals, which take runs on one defense for independent. "
    "Resistance is delay: the figures say how much of it there is against the attacks tried here.\n\n"
    "Four criteria: resistance; stability, what the defense cost before any attack; generalization, resistance to data "
    "that it was not about; and trainability, the steps that a benign task takes at the same learning rates."
)


def survival_figure(sweep: Sweep, subjects: Sequence[str], domain: str) -> Figure | None:
    """Draw the share of runs not recovered by step, each subject under its own best attack.

    Args:
        sweep: The attacks.
        subjects: Names, in the order of the legend.
        domain: What they were attacked with.

    Returns:
        None if no subject has a run that counts.

    Raises:
        MissingExtra: scipy or matplotlib is not installed.
    """
    series, bands, words = {}, {}, []
    for name, (_, curve) in _best(sweep, subjects, domain).items():
        if curve.n == 1:  # the curve of one run says nothing of others
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
    """Draw the median recovery score by step, each subject under its own best attack.

    Args:
        sweep: The attacks.
        subjects: Names, in the order of the legend.
        domain: What they were attacked with.

    Returns:
        None if no subject has a run that counts.

    Raises:
        MissingExtra: scipy or matplotlib is not installed.
    """
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
    """Draw each run's steps to the threshold, one row for each subject under its own best attack.

    Args:
        sweep: The attacks.
        subjects: Names, in the order of the rows.
        domain: What they were attacked with.

    Returns:
        None if no subject has a run that counts.

    Raises:
        MissingExtra: scipy or matplotlib is not installed.
    """
    best = _best(sweep, subjects, domain)
    if not best:
        return None
    rows = [_row_of_times(name, attack, curve) for name, (attack, curve) in best.items()]
    censored = sum(len(row.stopped) for row in rows)
    words = "; ".join(f"{name}: {_median_words(curve)}" for name, (_, curve) in best.items())
    told = f"{censored} runs ended before" if censored else "no run ended before"
    return time_rows(
        rows,
        alt=f"Steps to the threshold of every run, under each model's best attack. {words}; {told}.",
        caption="Every run under the best attack on its model. A dot is a recovery, a triangle a run that ended before "
        "one, which is longer than that. The line is the median, the bar its 95 % interval; one that reaches the edge "
        f"has no upper end. {words}.",
        xlabel="steps to the threshold",
    )


def _row_of_times(name: str, attack: AttackTimes, curve: Survival) -> TimeRow:
    assert attack.times is not None
    marked = list(zip(attack.times.values, attack.times.observed, strict=True))
    return TimeRow(
        name,
        [value for value, seen in marked if seen],
        [value for value, seen in marked if not seen],
        curve.median,
        (curve.median_low, curve.median_high),
    )


def _best(sweep: Sweep, subjects: Sequence[str], domain: str) -> dict[str, tuple[AttackTimes, Survival]]:
    """The best attack on each subject with its curve, in their order; subjects without a run that counts left out."""
    found = {}
    for name in subjects:
        attack = best_attack(by_attack(sweep.of(name, domain=domain)))
        curve = None if attack is None else attack.curve()
        if attack is not None and curve is not None:
            found[name] = attack, curve
    return found


def _median_words(curve: Survival) -> str:
    if math.isfinite(curve.median):
        return f"half recovered by step {curve.median:.0f}"
    return f"fewer than half recovered by step {curve.last:.0f}"


def _median_scores(attack: AttackTimes) -> tuple[list[float], list[float]]:
    curves = [run.result.curve for run in attack.runs if run.result.outcome in ("recovered", "resisted")]
    steps = sorted({look.step for curve in curves for look in curve})
    scores = [
        statistics.median([[look.score for look in curve if look.step <= step][-1] for curve in curves])
        for step in steps
    ]
    return [float(step) for step in steps], scores


def attack_table(sweep: Sweep, subjects: Sequence[str], domain: str) -> Table:
    """Return one row for each attack on each subject.

    Args:
        sweep: The attacks.
        subjects: Names; the steps of the others are divided by those of the first.
        domain: What they were attacked with.

    Raises:
        MissingExtra: scipy is not installed.
    """
    columns = (
        "attack", "model", Column("runs"), Column("recovered"), Column("collapsed"), Column("diverged"),
        Column("median", "steps", "higher"), Column("from", "steps"), Column("to", "steps"),
        Column(f"of {subjects[0]}", "×", "higher"),
    )  # fmt: skip
    first = {attack.settings: attack for attack in by_attack(sweep.of(subjects[0], domain=domain))}
    rows = [
        _row(attack, name, None if name == subjects[0] else first.get(attack.settings))
        for name in subjects
        for attack in by_attack(sweep.of(name, domain=domain))
    ]
    order = {attack.settings.label: place for place, attack in enumerate(first.values())}
    rows.sort(key=lambda row: order.get(str(row[0]), len(order)))  # the same attack on all subjects side by side
    notes = (
        "median: steps by which half of the runs had recovered, with its 95 % interval; > means not reached by the end "
        "of the longest run; collapsed and diverged runs do not enter it",
    )
    return Table(f"Attacks with {domain} data", columns, rows, notes)


def _row(attack: AttackTimes, name: str, base: AttackTimes | None) -> tuple[object, ...]:
    curve, counts = attack.curve(), attack.outcomes
    ratio = None if base is None else best_attack_ratio([attack], [base], seed=0)
    known = ratio is not None and math.isfinite(ratio.estimate)
    ends: list[object] = [None, None, None]
    if curve is not None:
        ends = [_steps(value, curve.last) for value in (curve.median, curve.median_low, curve.median_high)]
    return (
        attack.settings.label,
        name,
        len(attack.runs),
        counts["recovered"],
        counts["collapsed"],
        counts["diverged"],
        *ends,
        f"{ratio.bound} {ratio.estimate:.3g}".strip() if ratio is not None and known else None,
    )


def _steps(value: float, last: float) -> float | str:
    return value if math.isfinite(value) else f"> {last:.0f}"


def add_section(
    report: Report,
    sweep: Sweep,
    config: ResistanceConfig,
    *,
    seed: int,
    stability: Stability = MappingProxyType({}),
    title: str = "Resistance to fine-tuning",
    treatment: str | None = None,
    audits: Sequence[str] = (),
) -> list[Finding]:
    """Add what a sweep found to a report.

    Args:
        report: The report.
        sweep: The attacks. Where nothing but the undefended subject was attacked, it is told and not compared.
        config: Which subject is which, and what is asked.
        seed: Seed of the intervals.
        stability: Defended subject → what `stability.py` found of it.
        title: Heading of the section.
        treatment: The treatment that was attacked, if it has a name; see `Report.section`.
        audits: Which of its audits this section holds.

    Returns:
        The findings.

    Raises:
        UsageError: The sweep has no runs on the undefended subject.
        MissingExtra: scipy or matplotlib is not installed.
    """
    defended = config.defended(sweep)
    present = {run.subject for run in sweep.runs if run.result.settings.domain == config.harmful}
    subjects = [config.undefended, *defended, *(name for name in config.controls if name in present)]
    base = by_attack(sweep.of(config.undefended, domain=config.harmful))
    if defended:
        findings = resistance_findings(sweep, config, seed=seed, stability=stability)
        words = []
        for name in defended:
            attacks = by_attack(sweep.of(name, domain=config.harmful))
            words.append(f"{name}: {verdict(attacks, best_attack_ratio(attacks, base, seed=seed))}")
    else:
        findings = attack_findings(sweep, config.undefended, config.harmful)
        words = [verdict(base)]
    figures = [draw(sweep, subjects, config.harmful) for draw in (survival_figure, steps_figure, score_figure)]
    tables = [
        attack_table(sweep, [name for name in subjects if sweep.of(name, domain=domain)], domain)
        for domain in (config.harmful, *config.withheld, *config.benign)
    ]
    report.section(
        title,
        findings,
        figures=[figure for figure in figures if figure is not None],
        tables=tables,
        intro=INTRO,
        question="How long does the model resist harmful fine-tuning?",
        conclusion=" ".join(words),
        treatment=treatment,
        audits=audits,
        warnings=[f"{subject}, {attack}, could not be run: {reason}" for subject, attack, reason in sweep.failures],
    )
    return findings
