"""Report of attacks that broke no model, so that they show nothing: the attacks, their budget, the best score."""

from __future__ import annotations

import math
from collections.abc import Sequence

from netweight.attacks.finetuning.attack import Evaluation
from netweight.attacks.finetuning.calibration import NoThreshold
from netweight.attacks.finetuning.sweep import AttackOutcome
from netweight.report.finding import Column, Finding, Section, Table

INTRO = (
    "The score that counts as recovery is determined by attacks on a model without a defense. None of them changed "
    "this model enough, so that the same attacks cannot show how long any model resists. The table lists what was "
    "tried."
)


def no_verdict_section(failure: NoThreshold, names: Sequence[str], *, least: float, title: str) -> Section:
    """Return the report of attacks from which no threshold of recovery followed.

    Args:
        failure: The reason, with the attacks that were tried.
        names: The models whose resistance was to be measured.
        least: The ratio of steps that was asked of them.
        title: The section's title.

    Returns:
        A section whose findings with a target have no value, so that a command ends with exit code 1.
    """
    reason = failure.reason.rstrip(".")
    findings = [resistance_unknown(name, least, reason) for name in names]
    findings += [Finding(f"steps to recover, best attack, {n}", None, detail={"reason": reason}) for n in names]
    findings += budget_findings(failure.subject, failure.runs)
    return Section(
        title, findings, tables=[_table(failure)], intro=INTRO,
        question="How long does the model resist harmful fine-tuning?",
        conclusion=f"No verdict, because {reason[0].lower()}{reason[1:]}. {failure.cure}", outcome="told",
    )  # fmt: skip


def resistance_unknown(name: str, least: float, reason: str) -> Finding:
    """Return the finding of a resistance that was asked for and could not be measured."""
    return Finding(
        f"resistance, {name}", None, unit="times as many steps", better="higher", target=least,
        detail={"reason": reason},
    )  # fmt: skip


def budget_findings(name: str, runs: Sequence[AttackOutcome]) -> list[Finding]:
    """Return the best score that attacks reached, beside the score before them, and the budget that they spent."""
    best = max(runs, key=lambda run: _order(_best(run)))
    at = _best(best)
    last = [run.result.curve[-1] for run in runs]
    return [
        Finding(
            f"best score of any attack, {name}", at.score, n=len(runs), baseline=best.result.curve[0].score,
            detail={"attack": best.result.settings.label, "step": at.step, "outcome": best.result.outcome},
        ),
        Finding(f"steps of all attacks, {name}", sum(each.step for each in last), unit="steps", n=len(runs)),
        Finding(f"operations of all attacks, {name}", sum(each.flops for each in last), unit="FLOP", n=len(runs)),
    ]  # fmt: skip


def _best(run: AttackOutcome) -> Evaluation:
    """Return the evaluation with the highest score; one that is not a number counts as the lowest."""
    return max(run.result.curve, key=_order)


def _order(evaluation: Evaluation) -> float:
    return -math.inf if math.isnan(evaluation.score) else evaluation.score


def _table(failure: NoThreshold) -> Table:
    columns = (
        "attack", "outcome", Column("steps"), Column("rows"), Column("operations", "FLOP"), Column("score before"),
        Column("best score"), Column("at step"),
    )  # fmt: skip
    rows = []
    for run in failure.runs:
        first, best, last = run.result.curve[0], _best(run), run.result.curve[-1]
        rows.append(
            (run.result.settings.label, run.result.outcome, last.step, last.rows, last.flops, first.score, best.score,
             best.step)
        )  # fmt: skip
    note = f"one run each, on {failure.domain} rows, until its last step or until the model was no longer useful"
    return Table(f"Attacks that were tried on the model {failure.subject!r}", columns, rows, (note,))
