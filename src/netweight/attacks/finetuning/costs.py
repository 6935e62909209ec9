"""Costs of the cheapest attacks: the front of steps, rows seen, operations and processor time, for each model.

Rows per step are free to an attacker, so steps alone say little: 384 rows are 48 steps of 8 or 3 of 128. The headline
is rows and operations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from netweight.attacks.finetuning.resistance import AttackTimes, by_attack
from netweight.attacks.finetuning.search import SearchResult
from netweight.attacks.finetuning.sweep import AttackOutcome, Sweep
from netweight.report.finding import Column, Finding, Table

# Attacks of each model's front in the table.
_SHOWN = 6


@final
@dataclass(frozen=True)
class Price:
    """Cost of one successful run."""

    steps: int
    """Steps to recovery."""
    rows: int
    """Rows seen until then, each as often as it was seen."""
    flops: float
    """Operations of training until then."""
    seconds: float
    """Processor seconds of training until then."""
    label: str
    """The attack, in a few words."""

    def beats(self, other: Price) -> bool:
        """Return whether this run cost no more in any of steps, rows and operations, and less in one."""
        own, others = (self.steps, self.rows, self.flops), (other.steps, other.rows, other.flops)
        return own != others and all(a <= b for a, b in zip(own, others, strict=True))


def prices(runs: Sequence[AttackOutcome]) -> list[Price]:
    """Return what every run cost that recovered."""
    recoveries = [(run, run.result.reached) for run in runs]
    return [
        Price(each.step, each.rows, each.flops, each.seconds, run.result.settings.label)
        for run, each in recoveries
        if each is not None
    ]


def front(runs: Sequence[AttackOutcome]) -> list[Price]:
    """Return the runs that no other beats in steps, rows and operations, those of fewest rows first."""
    every = prices(runs)
    unbeaten = [each for each in every if not any(other.beats(each) for other in every)]
    return sorted(dict.fromkeys(unbeaten), key=lambda each: (each.rows, each.steps))


def median_cost(attacks: Sequence[AttackTimes], field: str) -> tuple[float, AttackTimes] | None:
    """Return the least median cost of any attack over its seeds, and the attack; runs without recovery are infinite.

    Args:
        attacks: Attacks on one model.
        field: A field of `Evaluation`: rows, flops or seconds.

    Returns:
        None where no run counts.
    """
    costs_of_attacks = []
    for attack in attacks:
        if attack.times is None:
            continue
        counted = [run.result for run in attack.runs if run.result.outcome in ("recovered", "resisted")]
        costs = [math.inf if each.reached is None else float(getattr(each.reached, field)) for each in counted]
        costs_of_attacks.append((statistics.median_high(costs), attack))
    return min(costs_of_attacks, key=lambda each: each[0], default=None)


def cost_findings(
    sweep: Sweep, names: Sequence[str], undefended: str, *, domain: str, searched: Mapping[str, SearchResult]
) -> list[Finding]:
    """Return rows and operations of the cheapest attack on each model, beside those of the undefended one."""
    findings = []
    for title, field, unit in (
        ("rows to recover", "rows", "rows"),
        ("operations to recover", "flops", "FLOP"),
        ("processor time to recover", "seconds", "s"),
    ):
        base = median_cost(by_attack(sweep.of(undefended, domain=domain)), field)
        for name in names:
            runs = sweep.of(name, domain=domain)
            cheapest = median_cost(by_attack(runs), field)
            spent = sum(run.result.curve[-1].flops for run in searched[name].runs) if name in searched else None
            detail = (
                {} if cheapest is None else {"attack": cheapest[1].settings.label, "operations of the search": spent}
            )
            reason = {"reason": "every attack collapsed or diverged"} if cheapest is None else {}
            findings.append(
                Finding(
                    f"{title}, cheapest attack, {name}", None if cheapest is None else cheapest[0], unit=unit,
                    better="higher", n=len(cheapest[1].runs) if cheapest else None,
                    baseline=None if base is None or name == undefended else base[0],
                    seeds=tuple(sorted({run.result.settings.seed for run in runs})), detail={**detail, **reason},
                )
            )  # fmt: skip
    return findings


def front_table(sweep: Sweep, names: Sequence[str], *, domain: str, searched: Mapping[str, SearchResult]) -> Table:
    """Return the front of each model's successful runs, those of searches among them."""
    columns = (
        "model", "attack", Column("steps", "", "higher"), Column("rows", "", "higher"),
        Column("operations", "FLOP", "higher"), Column("processor time", "s", "higher"),
    )  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for name in names:
        runs = [*sweep.of(name, domain=domain), *(searched[name].runs if name in searched else ())]
        rows += [(name, p.label, p.steps, p.rows, p.flops, round(p.seconds, 2)) for p in front(runs)[:_SHOWN]]
    notes = (
        "Each row is a run that no other run on the same model beats in steps, rows and operations at once. An attack "
        "is described by its optimizer with the learning rate; the weights that it trains (all of them: full; or "
        "low-rank factors: LoRA with their rank); the harmful rows that it has (samples); the largest number of steps; "
        "the rows in a step (batches); and whatever else differs from the defaults. "
        "Operations: for each weight and token 2 in the forward pass, 2 for the gradient of activations, and 2 for the "
        "gradient of the weight if it is trained.",
    )
    return Table("The cheapest attacks", columns, rows, notes)
