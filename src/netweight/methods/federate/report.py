"""What a trained federation looks like in a report: accuracy round by round and client by client. Commands call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from netweight.methods.federate.engine import Run
from netweight.methods.federate.rounds import Round
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, bootstrap
from netweight.report.finding import Column, Figure, Finding, Table
from netweight.report.plots import lines
from netweight.report.report import Report

if TYPE_CHECKING:
    from netweight.methods.federate.audit import Exposure

__all__ = ["accuracy_findings", "add_sections", "client_table", "training_figure"]


def accuracy_findings(run: Run, *, seed: int) -> list[Finding]:
    """Return the last round's accuracy before and after local training, each the mean over its clients.

    Intervals are over clients, not over seeds: they say how far another draw of clients might differ.

    Args:
        run: A trained federation.
        seed: Of the intervals.
    """
    last = next(round for round in reversed(run.rounds) if round.after)
    about: dict[str, Any] = {"method": run.method.name, "round": last.round}
    return [
        _mean_finding("accuracy of the received model, before local training", last.before, about, seed),
        _mean_finding("accuracy of the personal model, after local training", last.after, about, seed),
        Finding("clients left out of rounds", sum(len(round.refused) for round in run.rounds), detail=about),
    ]


def _mean_finding(name: str, accuracies: Mapping[int, float], about: dict[str, Any], seed: int) -> Finding:
    values = [100 * value for value in accuracies.values()]
    mean = sum(values) / len(values)
    ci95 = bootstrap(values, seed=seed).ci95 if len(values) >= MINIMUM_FOR_BOOTSTRAP else None
    return Finding(name, mean, ci95=ci95, n=len(values), unit="%", better="higher", seeds=(seed,), detail=about)


def training_figure(rounds: Sequence[Round], method: str) -> Figure:
    """Draw accuracy by round, before and after local training.

    Args:
        rounds: In their order.
        method: Its name, for the legend.
    """
    measured = [round for round in rounds if round.after]
    x = [round.round for round in measured]
    series = {
        "after local training": (x, [100 * (round.mean_after or 0) for round in measured]),
        "before": (x, [100 * (round.mean_before or 0) for round in measured]),
    }
    return lines(
        series,
        alt=f"Mean accuracy of {method}'s clients by round, before and after local training.",
        xlabel="round",
        ylabel="mean accuracy, %",
    )


def client_table(run: Run) -> Table:
    """Return one row per client of the last measured round.

    Args:
        run: A trained federation.
    """
    last = next(round for round in reversed(run.rounds) if round.after)
    columns = ("client", Column("examples"), Column("before", "%", "higher"), Column("after", "%", "higher"))
    rows = [
        (str(client), run.task.client(client).n, 100 * last.before[client], 100 * last.after[client])
        for client in sorted(last.after)
    ]
    return Table(f"Accuracy of each client in round {last.round}", columns, rows)


def add_sections(report: Report, run: Run, exposures: Sequence[Exposure], *, seed: int) -> None:
    """Add what was trained, and what an audit found if there was one, to a report.

    Args:
        report: The report.
        run: The federation.
        exposures: From `audit.audit_exposures`; empty if nothing was audited, which the report says in red.
        seed: Of the intervals.
    """
    from netweight.methods.federate.audit import exposure_figure, exposure_findings, exposure_table

    report.section(
        "Accuracy",
        accuracy_findings(run, seed=seed),
        figures=[training_figure(run.rounds, run.method.name)],
        tables=[client_table(run)],
        intro=(
            "Before: the model that a client has from what it received and what it keeps. After: the same client's "
            "model when its local training ends. Each client counts once."
        ),
        question="How well does the personalized model do?",
        treatment="federate",
        audits=("accuracy", "gradient-inversion") if exposures else ("accuracy",),
    )
    if not exposures:
        return
    figure = exposure_figure(exposures)
    own = next(one for one in exposures if one.is_own)
    report.section(
        "What the server could have seen",
        exposure_findings(exposures, seed=seed),
        figures=[figure] if figure else [],
        tables=[exposure_table(exposures)],
        intro=(
            "One client's update is attacked as an honest but curious server would: it knows the model, the settings "
            "and what it sent, and no label. Findings about the schedule of this run have targets; shorter schedules "
            "are reported to show what protects and what does not."
        ),
        question="What could the server have seen?",
        conclusion=f"Under this run's schedule {own.verdict}.",
    )
