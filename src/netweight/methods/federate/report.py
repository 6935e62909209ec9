"""Sections of a federation's report: accuracy, clients left out or suspicious, differential privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from netweight.core.progress import QUIET, Progress
from netweight.methods.federate.accounting import Guarantee
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.exposure import AuditConfig, Exposure, mean_of
from netweight.methods.federate.exposure_report import exposure_section
from netweight.methods.federate.history import Round
from netweight.methods.federate.task_privacy import task_guarantee
from netweight.metrics.intervals import ends_if_enough
from netweight.report.audit import of_treatment
from netweight.report.finding import Column, Figure, Finding, Section, Table
from netweight.report.plots import lines
from netweight.report.report import Report


def accuracy(run: TrainedFederation, config: AuditConfig, *, seed: int, progress: Progress = QUIET) -> Section:
    """Report accuracy before and after local training in the last round."""
    return Section(
        "Accuracy", accuracy_findings(run, seed=seed), figures=[training_figure(run.rounds, run.method.name)],
        tables=[client_table(run), *odd_clients(run.rounds)], warnings=run.task.remarks,
        question="How accurate are the personal models?",
        intro="Before: the model that a client has from what it received and what it keeps. After: the same client's "
        "model when its local training ends. Each client counts once.",
    )  # fmt: skip


def rounds_section(rounds: Sequence[Round], method: str, *, seed: int) -> Section:
    """Report a federation from its history alone, as a Flower server keeps it.

    Args:
        rounds: The finished rounds.
        method: The method's name.
        seed: Seed of the intervals.
    """
    measured = [done for done in rounds if done.after]
    findings = [Finding("rounds", len(rounds), detail={"method": method})]
    figures = []
    if measured:
        findings = [*_accuracy_of_rounds(rounds, method, seed=seed), *findings]
        figures = [training_figure(rounds, method)]
    return Section(
        "Accuracy", findings, figures=figures, tables=odd_clients(rounds),
        question="How accurate are the personal models?",
        intro="This section comes from the history of the Flower server. Clients reported the accuracies.",
    )  # fmt: skip


def guarantees(run: TrainedFederation, delta: float) -> list[Guarantee]:
    """Return the ε of all answers of the run together, for the example or client that they say most about.

    Args:
        run: A trained federation.
        delta: δ, in (0, 1).

    Returns:
        One guarantee, or none if the method adds no noise.
    """
    guarantee = task_guarantee(run.task, run.method, run.answers, delta)
    return [] if guarantee is None else [guarantee]


def _privacy(run: TrainedFederation, delta: float) -> list[Section]:
    return [
        Section(
            "Differential privacy",
            [Finding(
                f"ε of one {one.unit}, {one.adjacency}", one.epsilon if math.isfinite(one.epsilon) else None,
                better="lower", detail=one.to_json(),
            )],
            question=f"How much can all answers together reveal about one {one.unit}?", intro=f"{one}\n\n{_COVERS}",
        )
        for one in guarantees(run, delta)
    ]  # fmt: skip


_COVERS = (
    "ε covers what clients send to the server. It does not cover the accuracies and losses of this report, which are "
    "computed without noise, and it holds against readers who do not know the run's seed, from which a simulation "
    "draws its noise."
)


def odd_clients(rounds: Sequence[Round]) -> list[Table]:
    """Return the clients that were left out of rounds or were suspicious, with the reasons."""
    said: dict[tuple[int, str], list[int]] = {}
    for done in rounds:
        for kind, whys in (("left out", done.refusals), ("suspicious", done.suspects)):
            for client, why in whys.items():
                said.setdefault((client, f"{kind}: {why.partition(' (')[0]}"), []).append(done.round)
    rows = [(str(client), why, len(rounds), str(rounds[0])) for (client, why), rounds in sorted(said.items())]
    return (
        [Table("Clients left out or suspicious", ("client", "reason", "rounds", "first round"), rows)] if rows else []
    )


def add_sections(
    report: Report, run: TrainedFederation, exposures: Sequence[Exposure], *, seed: int, delta: float = 1e-5
) -> list[Finding]:
    """Add what was trained, and what an audit found if there was one, to a report; return all findings."""
    ran = ("accuracy", "server attack") if exposures else ("accuracy",)
    sections = [of_treatment(accuracy(run, AuditConfig(), seed=seed), "federate", ran), *_privacy(run, delta)]
    if exposures:
        sections.append(exposure_section(exposures, seed=seed))
    for section in sections:
        report.add(section)
    return [finding for section in sections for finding in section.findings]


def accuracy_findings(run: TrainedFederation, *, seed: int) -> list[Finding]:
    """Return the last round's accuracy before and after local training, each the mean over its clients."""
    return _accuracy_of_rounds(run.rounds, run.method.name, seed=seed)


def _accuracy_of_rounds(rounds: Sequence[Round], method: str, *, seed: int) -> list[Finding]:
    # Intervals are over clients, not over seeds: they say how far another draw of clients might differ.
    last = next(round for round in reversed(rounds) if round.after)
    about: dict[str, Any] = {"method": method, "round": last.round}
    return [
        _mean_finding("accuracy of the received model, before local training", last.before, about, seed),
        _mean_finding("accuracy of the personal model, after local training", last.after, about, seed),
        Finding("clients left out of rounds", sum(len(round.refusals) for round in rounds), detail=about),
    ]


def _mean_finding(name: str, accuracies: Mapping[int, float], about: dict[str, Any], seed: int) -> Finding:
    values = [100 * value for value in accuracies.values()]
    return Finding(
        name, mean_of(values), ci95=ends_if_enough(values, seed=seed), n=len(values), unit="%", better="higher",
        seeds=(seed,), detail=about,
    )  # fmt: skip


def training_figure(rounds: Sequence[Round], method: str) -> Figure:
    """Draw accuracy by round, before and after local training."""
    measured = [round for round in rounds if round.after]
    x = [round.round for round in measured]
    series = {
        "after local training": (x, [100 * (round.mean_after or 0) for round in measured]),
        "before": (x, [100 * (round.mean_before or 0) for round in measured]),
    }
    alt = f"Mean accuracy of {method}'s clients by round, before and after local training."
    return lines(series, alt=alt, xlabel="round", ylabel="mean accuracy, %")


def client_table(run: TrainedFederation) -> Table:
    """Return one row per client of the last measured round."""
    last = next(round for round in reversed(run.rounds) if round.after)
    columns = ("client", Column("examples"), Column("before", "%", "higher"), Column("after", "%", "higher"))
    rows = [
        (str(client), run.task.client(client).n, 100 * last.before[client], 100 * last.after[client])
        for client in sorted(last.after)
    ]
    return Table(f"Accuracy of each client in round {last.round}", columns, rows)
