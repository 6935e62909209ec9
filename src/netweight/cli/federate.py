"""`netweight federate`: train across clients, and ask what the server could have seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli import Output, command_line, output_option
from netweight.core.progress import Progress
from netweight.methods.federate.folder import FederationPlan, FolderFederation
from netweight.settings import options

if TYPE_CHECKING:
    from netweight.methods.federate.engine import Run
    from netweight.methods.federate.report import AuditConfig, ThreatModel
    from netweight.report.finding import Table

_MOST_ROUNDS = 12  # rounds in the table of a run


@click.group()
def federate() -> None:
    """Train a personalized model across clients, and audit what a server could see of their data."""


@federate.command("run")
@click.option("--data", default="digits", show_default=True, help="A data set by name, or a folder of images.")
@options(FolderFederation)
@click.option("--audit/--no-audit", default=True, show_default=True, help="Attack what was trained at the end.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("federation"), show_default=True,
    help="Folder for the checkpoint and the report; a run that was stopped continues from there.",
)  # fmt: skip
@output_option
@click.pass_context
def run_command(
    context: click.Context, /, data: str, settings: FolderFederation, audit: bool, out: Path, output: Output
) -> None:
    """Train a federation in this process and audit it.

    The audit at the end attacks the run's own schedule and a single step; `netweight federate audit` attacks more.
    Nothing is downloaded for the default data, scikit-learn's handwritten digits. The same command resumes a run that
    was stopped. For clients on other machines see docs/flower.md: the same methods run under Flower.
    """
    from netweight.methods.federate.engine import CHECKPOINT, train
    from netweight.methods.federate.report import AuditConfig, ThreatModel

    plan = settings.plan(data)
    task = plan.task()
    method = plan.make_method(task)
    if not (out / CHECKPOINT).exists():
        plan.save(out)  # so that a run that is stopped can be audited; settings that do not fit replace none
    done = train(task, method, plan, folder=out, workers=settings.workers, device=settings.device, progress=Progress())
    plan.save(out)
    _show_rounds(output, done)
    config = AuditConfig(threats=(ThreatModel(first_round=True),), images=settings.images) if audit else None
    _finish(context, output, done, plan, out, config)


@federate.command("audit")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path("federation"))
@click.option("--images", default=16, show_default=True, help="Attacked updates per threat model.")
@click.option(
    "--threat",
    "threats",
    multiple=True,
    metavar="BATCHxSTEPS[xCLIENTS][+WORD]",
    help="A threat model: local batch size, local steps, clients in a sum; then what the server knows and does: +first "
    "round, +known embeddings, +asked=K times, +malicious, +thresholds, +fishing. May be given several times.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the choice of images and of the attacks.")
@output_option
@click.pass_context
def audit_command(
    context: click.Context, folder: Path, images: int, threats: tuple[str, ...], seed: int, output: Output
) -> None:
    """Ask what the server of the federation in FOLDER could have seen.

    Attacks the run's own schedule and some shorter ones: how much of a client's gradient the update gives away, and
    which images come out of it. Ends with exit code 1 if the run's own schedule gives away more than its published
    aggregate does.
    """
    from netweight.methods.federate.engine import train
    from netweight.methods.federate.report import AuditConfig

    plan = FederationPlan.load(folder)
    task = plan.task()
    done = train(task, plan.make_method(task), plan, folder=folder, progress=Progress())
    config = AuditConfig(images=images, further=True)
    if threats:
        config = AuditConfig(threats=tuple(_threat(text) for text in threats), images=images)
    _finish(context, output, done, plan, folder, config, seed=seed)


def _threat(text: str) -> ThreatModel:
    from netweight.errors import UsageError
    from netweight.methods.federate.report import ThreatModel

    schedule, *words = text.split("+")
    parts = schedule.split("x")
    changes: dict[str, Any] = {}
    for word in words:
        name, _, count = word.partition("=")
        if word in ("malicious", "thresholds", "fishing"):
            changes["server"] = word
        elif word in ("known", "first"):
            changes[{"known": "known", "first": "first_round"}[word]] = True
        elif name == "asked" and count.isdecimal():
            changes["asked"] = int(count)
        else:
            parts = []
    if not 2 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
        raise UsageError(
            f"{text!r} is no threat model.",
            cure="Give BATCHxSTEPS[xCLIENTS], such as 1x1, then +first, +known, +asked=K, +malicious, +thresholds, "
            "+fishing.",
        )
    batch, steps, *clients = (int(part) for part in parts)
    return ThreatModel(batch, steps, summed_over=clients[0] if clients else 1, **changes)


def _show_rounds(output: Output, run: Run) -> None:
    measured = [round for round in run.rounds if round.after]
    shown = measured if len(measured) <= _MOST_ROUNDS else measured[:: -(-len(measured) // _MOST_ROUNDS)]
    if shown[-1] is not measured[-1]:
        shown.append(measured[-1])
    rows = [
        (r.round, f"{100 * (r.mean_before or 0):.2f}", f"{100 * (r.mean_after or 0):.2f}", f"{r.mean_loss:.3f}")
        for r in shown
    ]
    output.line(f"{run.method.name}, {len(run.task.clients)} clients: mean accuracy in %", bold=True)
    output.table(("round", "before local training", "after", "loss"), rows)
    for round in run.rounds:
        for client, why in round.refused.items():
            output.line(f"Round {round.round}: client {client} left out: {why}.")
        for client, why in round.suspects.items():
            output.line(f"Round {round.round}: client {client} is suspicious: {why}.")


def _finish(
    context: click.Context, output: Output, run: Run, plan: FederationPlan, folder: Path, config: AuditConfig | None,
    *, seed: int = 0,
) -> None:  # fmt: skip
    """Audit if asked, write the report, say how it ended."""
    from netweight.cli import FINDING_FAILED
    from netweight.methods.federate.report import add_sections, audit, exposure_table, promises
    from netweight.report.report import Report

    exposures = audit(run, config, seed=seed, progress=Progress()) if config else []
    command = command_line()
    report = Report(f"Federation: {plan.method} on {plan.data}", command=command, seeds=(plan.seed,))
    findings = add_sections(report, run, exposures, seed=seed, delta=plan.delta)
    for promise in promises(run, plan.delta):
        output.line(str(promise))
    page = report.write(folder)
    if config is None:
        output.line("Not audited: nothing is known of what the server could have seen.", fg="red")
    else:
        _show_exposures(output, exposure_table(exposures))
    output.line(f"Report: {page}")
    output.result({
        "plan": plan.to_json(),
        "rounds": [round.to_json() for round in run.rounds],
        "audited": config is not None,
        "privacy": [promise.to_json() for promise in promises(run, plan.delta)],
        "findings": [finding.to_json() for finding in findings],
        "report": str(page),
    })  # fmt: skip
    if any(finding.passed is False for finding in findings):
        context.exit(FINDING_FAILED)


def _show_exposures(output: Output, table: Table) -> None:
    from netweight.report.text import format_number

    output.line(table.title, bold=True)
    headers = [
        column if isinstance(column, str) else f"{column.name} {column.unit}".strip() for column in table.columns
    ]
    verdicts = [(row[0], row[-1]) for row in table.rows]
    output.table(headers[:-1], [(*row[:2], *(format_number(cell) for cell in row[2:-1])) for row in table.rows])
    for threat, verdict in verdicts:
        output.line(f"{threat}: {verdict}")
