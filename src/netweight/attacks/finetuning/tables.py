"""Tables of attacks, and of what a search tried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from netweight.attacks.finetuning.resistance import (
    AttackTimes,
    best_attack_ratio,
    by_attack,
)
from netweight.attacks.finetuning.search import SearchResult, within
from netweight.attacks.finetuning.sweep import Sweep
from netweight.report.finding import Column, Table

# Attacks of each search in the table.
_SHOWN = 5


def attack_table(sweep: Sweep, subjects: Sequence[str], domain: str) -> Table:
    """Return one row for each attack on each subject."""
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
    # Rows of the same attack on all subjects are neighbors.
    rows.sort(key=lambda row: order.get(str(row[0]), len(order)))
    notes = (
        "median: steps by which half of the runs had recovered, with its 95 % interval; > means not reached by the end "
        "of the longest run; collapsed and diverged runs are left out",
    )
    return Table(f"Attacks with {domain} data", columns, rows, notes)


def search_tables(searched: Mapping[str, SearchResult]) -> list[Table]:
    """Return what searches for attacks found and cost; nothing where there was no search."""
    if not searched:
        return []
    columns = ("model", "attack", Column("steps", "steps", "higher"), Column("score"))
    rows = []
    for name, search in searched.items():
        last = {within(run.result.settings, None): run.result for run in search.runs}
        for attack in search.best[:_SHOWN]:
            result = last[attack]
            steps = f"> {result.last_step}" if result.steps is None else result.steps
            rows.append((name, attack.label, steps, result.curve[-1].score))
    cost = "; ".join(
        f"{name}: {len(search.runs):,} runs, {search.steps:,} steps, each ended after at most {search.most}"
        for name, search in searched.items()
    )
    note = f"one run each, from one seed; cost of the search: {cost}"
    return [Table("The search's best attacks", columns, rows, (note,))]


def _row(attack: AttackTimes, name: str, base: AttackTimes | None) -> tuple[object, ...]:
    curve, counts = attack.curve(), attack.outcomes
    ratio = None if base is None else best_attack_ratio([attack], [base], seed=0)
    finite = ratio is not None and math.isfinite(ratio.estimate)
    ends: list[object] = [None, None, None]
    if curve is not None:
        drawn = (curve.median, curve.median_low, curve.median_high)
        ends = [value if math.isfinite(value) else f"> {curve.last:.0f}" for value in drawn]
    return (
        attack.settings.label,
        name,
        len(attack.runs),
        counts["recovered"],
        counts["collapsed"],
        counts["diverged"],
        *ends,
        f"{ratio.bound} {ratio.estimate:.3g}".strip() if ratio is not None and finite else None,
    )
