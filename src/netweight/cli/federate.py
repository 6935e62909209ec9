"""`netweight federate`: train across clients, and ask what the server could have seen."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click

from netweight.cli.output import Output, output_option
from netweight.core.progress import Progress

if TYPE_CHECKING:
    from netweight.methods.federate import Run
    from netweight.methods.federate.folder import FederationPlan
    from netweight.methods.federate.report import AuditConfig, ThreatModel
    from netweight.report.finding import Table


@click.group()
def federate() -> None:
    """Train a personalized model across clients, and audit what a server could see of their data."""


@federate.command("run")
@click.option("--data", default="digits", show_default=True, help="A data set by name, or a folder of images.")
@click.option("--method", default="hyperfl", show_default=True, help="How clients train: see docs/federate.md.")
@click.option("--clients", default=20, show_default=True, help="Number of clients.")
@click.option("--rounds", default=20, show_default=True, help="Number of rounds.")
@click.option("--until-plateau", is_flag=True, help="End earlier, once accuracy has stopped rising.")
@click.option("--fraction", default=1.0, show_default=True, help="Share of clients asked in each round.")
@click.option(
    "--partition",
    type=click.Choice(["dominant-groups", "dirichlet", "by-writer"]),
    default="dominant-groups",
    show_default=True,
    help="How data is split among clients.",
)
@click.option("--alpha", default=0.5, show_default=True, help="Concentration of the Dirichlet partition.")
@click.option("--epochs", default=5, show_default=True, help="Local epochs per round.")
@click.option("--batch-size", default=50, show_default=True, help="Examples per local step.")
@click.option("--lr", type=float, help="Learning rate of what is shared; by default the method's own.")
@click.option("--epsilon", default=4.0, show_default=True, help="Budget of differentially private methods, all rounds.")
@click.option("--delta", default=1e-5, show_default=True, help="Its delta.")
@click.option(
    "--drop-out", default=0.0, show_default=True, help="Share of clients lost from each round, to rehearse it."
)
@click.option("--min-clients", default=1, show_default=True, help="A round with fewer sound updates is tried again.")
@click.option("--evaluate-every", default=1, show_default=True, help="Rounds between measurements of accuracy.")
@click.option(
    "--noise", default=0.0, show_default=True, help="Noise of clients on their updates, as a multiple of --clip."
)
@click.option("--clip", default=1.0, show_default=True, help="Largest norm of an update's change where there is noise.")
@click.option("--minimum-steps", default=1, show_default=True, help="Clients refuse to train fewer local steps.")
@click.option("--refuse", is_flag=True, help="Clients refuse abnormal hypernetworks.")
@click.option("--model", help='Your own network, "module:factory": (channels, size, classes) to (body, head).')
@click.option("--seed", default=520, show_default=True, help="Seed of everything but the split of the data.")
@click.option("--workers", type=int, help="Threads; by default one per core.")
@click.option("--device", default="cpu", show_default=True, help="Where to train: cpu or cuda.")
@click.option("--audit/--no-audit", default=True, show_default=True, help="Attack what was trained at the end.")
@click.option("--images", default=5, show_default=True, help="Attacked updates per threat model of the audit.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("federation"),
    show_default=True,
    help="Folder for the checkpoint and the report; a run that was stopped goes on from there.",
)
@output_option
@click.pass_context
def run_command(
    context: click.Context,
    /,
    out: Path,
    workers: int | None,
    device: str,
    audit: bool,
    images: int,
    output: Output,
    **settings: Any,
) -> None:
    """Train a federation in this process and audit it.

    The audit at the end attacks the run's own schedule and a single step; `netweight federate audit` attacks more.
    Nothing is downloaded for the default data, scikit-learn's handwritten digits. The same command resumes a run that
    was stopped. For clients on other machines see docs/flower.md: the same methods run under Flower.
    """
    from netweight.methods.federate import train
    from netweight.methods.federate.engine import CHECKPOINT
    from netweight.methods.federate.folder import FederationPlan

    plan = FederationPlan(**settings)
    task = plan.task()
    method = plan.make_method(task)
    if not (out / CHECKPOINT).exists():
        plan.save(out)  # so that a run that is stopped can be audited; settings that do not fit replace none
    done = train(task, method, plan.settings(), folder=out, workers=workers, device=device, progress=Progress())
    plan.save(out)
    _show_rounds(output, done)
    _finish(context, output, done, plan, out, _AuditChoice(images, (), short=True) if audit else None)


@federate.command("audit")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path("federation"))
@click.option("--images", default=16, show_default=True, help="Attacked updates per threat model.")
@click.option(
    "--threat",
    "threats",
    multiple=True,
    metavar="BATCHxSTEPS[xCLIENTS]",
    help="A threat model: local batch size, local steps, clients in a sum. May be given several times.",
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
    from netweight.methods.federate import train
    from netweight.methods.federate.folder import FederationPlan

    plan = FederationPlan.load(folder)
    task = plan.task()
    method = plan.make_method(task)
    done = train(task, method, plan.settings(), folder=folder, progress=Progress())
    _finish(context, output, done, plan, folder, _AuditChoice(images, threats, seed))


@final
@dataclass(frozen=True)
class _AuditChoice:
    """What the command line asked of the audit."""

    images: int
    threats: tuple[str, ...]
    seed: int = 0
    short: bool = False

    def config(self) -> AuditConfig:
        """Return the audit's settings."""
        from netweight.methods.federate.report import AuditConfig, ThreatModel

        if self.short:
            return AuditConfig(threats=(ThreatModel(first_round=True),), images=self.images)
        if not self.threats:
            return AuditConfig(images=self.images)
        return AuditConfig(threats=tuple(_threat(text) for text in self.threats), images=self.images)


def _threat(text: str) -> ThreatModel:
    from netweight.errors import UsageError
    from netweight.methods.federate.report import ThreatModel

    parts = text.split("x")
    if not 2 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
        raise UsageError(f"{text!r} is no threat model.", cure="Give BATCHxSTEPS or BATCHxSTEPSxCLIENTS, such as 1x1.")
    batch, steps, *clients = (int(part) for part in parts)
    return ThreatModel(batch, steps, summed_over=clients[0] if clients else 1)


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


def _finish(
    context: click.Context, output: Output, run: Run, plan: FederationPlan, folder: Path, choice: _AuditChoice | None
) -> None:
    """Audit if asked, write the report, say how it ended."""
    from netweight.cli import FINDING_FAILED
    from netweight.methods.federate.report import (
        accuracy_findings,
        add_sections,
        audit_exposures,
        exposure_findings,
        exposure_table,
    )
    from netweight.report.report import Report

    exposures = audit_exposures(run, choice.config(), seed=choice.seed, progress=Progress()) if choice else []
    seed = choice.seed if choice else 0
    findings = [*accuracy_findings(run, seed=seed), *exposure_findings(exposures, seed=seed)]
    report = Report(
        f"Federation: {plan.method} on {plan.data}",
        command=shlex.join(["netweight", *sys.argv[1:]]),
        seeds=(plan.seed,),
    )
    add_sections(report, run, exposures, seed=seed)
    page = report.write(folder)
    if choice is None:
        output.line("Not audited: nothing is known of what the server could have seen.", fg="red")
    else:
        _show_exposures(output, exposure_table(exposures))
    output.line(f"Report: {page}")
    output.result(
        {
            "plan": asdict(plan),
            "rounds": [round.to_json() for round in run.rounds],
            "audited": choice is not None,
            "findings": [finding.to_json() for finding in findings],
            "report": str(page),
        }
    )
    if any(finding.passed is False for finding in findings):
        context.exit(FINDING_FAILED)


def _show_exposures(output: Output, table: Table) -> None:
    from netweight.report.text import format_number

    output.line(table.title, bold=True)
    headers = [
        column if isinstance(column, str) else f"{column.name} {column.unit}".strip() for column in table.columns
    ]
    verdicts = [(row[0], row[-1]) for row in table.rows]
    output.table(headers[:-1], [(row[0], *(format_number(cell) for cell in row[1:-1])) for row in table.rows])
    for threat, verdict in verdicts:
        output.line(f"{threat}: {verdict}.")


_MOST_ROUNDS = 12
