"""Commands `federate run`, `audit`, `report` and `export`, and their output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from netweight.attacks.gradient_inversion.matching import MatchingConfig
from netweight.errors import UsageError
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.methods.federate.engine import TrainedFederation, train
from netweight.methods.federate.exposure import AuditConfig
from netweight.methods.federate.exposure import audit as attack_run
from netweight.methods.federate.exposure_report import exposure_table
from netweight.methods.federate.finished import (
    export_weights,
    history,
    is_flower,
    is_shared,
    open_run,
    with_private,
)
from netweight.methods.federate.history import Round
from netweight.methods.federate.plan import (
    FederationAudit,
    FederationExport,
    FederationPlan,
    FederationReport,
    FolderFederation,
)
from netweight.methods.federate.reconstruction import Search
from netweight.methods.federate.report import add_sections, guarantees, rounds_section
from netweight.methods.federate.threats import ThreatModel
from netweight.registry import Context, PrintedTable, Result, shell_line
from netweight.report.finding import Table
from netweight.report.report import Report
from netweight.report.text import format_number

# Rounds in the table of a run.
_MOST_ROUNDS = 12


def run(settings: FolderFederation, context: Context, source: str, destination: Path, audit: bool) -> Result:
    """Train a federation in a folder, and audit it if that is asked for."""
    plan = settings.plan(str(source))
    task = plan.task()
    method = plan.make_method(task)
    if not (destination / CHECKPOINT).exists():
        # A run that is stopped can then be audited, and settings that do not fit replace no earlier plan.
        plan.save(destination)
    done = train(
        task, method, plan, folder=destination, workers=settings.workers, device=settings.device,
        progress=context.progress,
    )  # fmt: skip
    plan.save(destination)
    config = (
        AuditConfig((ThreatModel(first_round=True),), updates=settings.updates, search=_search(settings))
        if audit
        else None
    )
    title = f"Federation: {plan.method} on {plan.data}"
    return _result(done, title, {"plan": plan.to_json()}, plan.delta, destination, config, context, _rounds(done))


def audit(settings: FederationAudit, context: Context, folder: Path) -> Result:
    """Attack what a federation's server could have seen."""
    if is_flower(folder):
        done, title = open_run(folder, settings.app), f"Federation over Flower: {folder.name}"
    else:
        plan, done = FederationPlan.load(folder), open_run(folder)
        title = f"Federation: {plan.method} on {plan.data}"
    config = AuditConfig(updates=settings.updates, further=True, search=_search(settings))
    if settings.threats:
        config = replace(config, threats=tuple(map(_threat, settings.threats)), further=False)
    about = {} if is_flower(folder) else {"plan": FederationPlan.load(folder).to_json()}
    delta = 1e-5 if is_flower(folder) else FederationPlan.load(folder).delta
    return _result(done, title, about, delta, folder, config, context, [], seed=settings.seed)


def report(settings: FederationReport, context: Context, folder: Path) -> Result:
    """Write the report of a finished federation; of a Flower run from the server's history alone."""
    if not is_flower(folder):
        plan = FederationPlan.load(folder)
        done = open_run(folder)
        title = f"Federation: {plan.method} on {plan.data}"
        return _result(done, title, {"plan": plan.to_json()}, plan.delta, folder, None, context, _rounds(done))
    name, config, rounds = history(folder)
    page = Report(f"Federation over Flower: {folder.name}", command=context.command)
    page.add(rounds_section(rounds, name, seed=int(config.get("seed", 0))))
    return Result(
        _rounds_of(rounds, name, None), page.sections, report=page.write(folder), written=(folder,),
        warnings=["No audit was run: it is not known what the server could have reconstructed."],
        next=(shell_line("netweight", "federate", "audit", folder, "--app", "app:both"),),
        payload={"config": config, "rounds": [round.to_json() for round in rounds], "audited": False},
    )  # fmt: skip


def export(settings: FederationExport, context: Context, folder: Path, target: Path) -> Result:
    """Write a client's model as state dicts of body and head."""
    run = open_run(folder, settings.app)
    if is_flower(folder):
        run = with_private(run, settings.client, settings.private)
    elif settings.private is not None:
        raise UsageError(
            f"{folder} is a federation of one process, which contains what its clients keep; --private is for the "
            "folder of a Flower server.",
            cure="Leave --private out.",
        )
    body, head = export_weights(run, settings.client, target)
    shared = len(run.task.clients) > 1 and is_shared(run, settings.client)
    model = "The shared model, which all clients have" if shared else f"The personal model of client {settings.client}"
    lines: list[str | PrintedTable] = [
        f"{model}: {body.name} and {head.name}.",
        f"Load them with body.load_state_dict(safetensors.torch.load_file({str(body)!r})), and the head likewise.",
    ]
    return Result(lines, [], written=(body, head), payload={"client": settings.client, "shared": shared})


def _search(settings: FolderFederation | FederationAudit) -> Search:
    return Search(matching=MatchingConfig(steps=settings.search_steps))


# Words of `--threat` that set a field of the threat model.
_THREAT_FLAGS = {"embeddings": "knows_embeddings", "first": "first_round"}


def _threat(text: str) -> ThreatModel:
    schedule, *words = text.split("+")
    parts = schedule.split("x")
    changes: dict[str, Any] = {}
    for word in words:
        name, _, count = word.partition("=")
        if word in ("imprint", "thresholds", "fishing"):
            changes["server"] = word
        elif word in _THREAT_FLAGS:
            changes[_THREAT_FLAGS[word]] = True
        elif name == "queries" and count.isdecimal():
            changes["queries"] = int(count)
        else:
            parts = []
    if not 2 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
        raise UsageError(
            f"--threat {text!r} is not a threat model.",
            cure="Give BATCHxSTEPS[xCLIENTS], such as 1x1, then +first, +embeddings, +queries=K, +imprint, "
            "+thresholds, +fishing.",
        )
    batch, steps, *clients = (int(part) for part in parts)
    return ThreatModel(batch, steps, summed_over=clients[0] if clients else 1, **changes)


def _rounds(run: TrainedFederation) -> list[str | PrintedTable]:
    return _rounds_of(run.rounds, run.method.name, len(run.task.clients))


def _rounds_of(rounds: Sequence[Round], name: str, clients: int | None) -> list[str | PrintedTable]:
    measured = [round for round in rounds if round.after]
    if not measured:
        return [f"{name}: no round measured accuracy."]
    shown = measured if len(measured) <= _MOST_ROUNDS else measured[:: -(-len(measured) // _MOST_ROUNDS)]
    if shown[-1] is not measured[-1]:
        shown.append(measured[-1])
    rows = [
        (r.round, f"{100 * (r.mean_before or 0):.2f}", f"{100 * (r.mean_after or 0):.2f}", f"{r.mean_loss or 0:.3f}")
        for r in shown
    ]
    whom = "" if clients is None else f", {clients} clients"
    lines: list[str | PrintedTable] = [f"{name}{whom}: mean accuracy in %"]
    lines.append(PrintedTable(("round", "before local training", "after", "loss"), rows))
    for round in rounds:
        lines += [f"Round {round.round}: client {client} left out: {why}." for client, why in round.refusals.items()]
        lines += [
            f"Round {round.round}: client {client} is suspicious: {why}." for client, why in round.suspects.items()
        ]
    return lines


def _result(
    run: TrainedFederation, title: str, about: dict[str, Any], delta: float, folder: Path, config: AuditConfig | None,
    context: Context, lines: list[str | PrintedTable], *, seed: int = 0,
) -> Result:  # fmt: skip
    """Audit if asked, write the report, and say how it ended."""
    exposures = attack_run(run, config, seed=seed, progress=context.progress) if config else []
    report = Report(title, command=context.command, seeds=(run.seed,))
    add_sections(report, run, exposures, seed=seed, delta=delta)
    privacy = guarantees(run, delta)
    lines += [str(guarantee) for guarantee in privacy]
    if config is not None:
        lines += _exposures(exposure_table(exposures))
    warnings = [] if config else ["No audit was run: it is not known what the server could have reconstructed."]
    return Result(
        lines, report.sections, report=report.write(folder), written=(folder,), warnings=warnings,
        next=() if config else (shell_line("netweight", "federate", "audit", folder),),
        payload={
            **about,
            "rounds": [round.to_json() for round in run.rounds],
            "audited": config is not None,
            "privacy": [guarantee.to_json() for guarantee in privacy],
        },
    )  # fmt: skip


def _exposures(table: Table) -> list[str | PrintedTable]:
    headers = [
        column if isinstance(column, str) else f"{column.name} {column.unit}".strip() for column in table.columns
    ]
    rows = [(*row[:2], *(format_number(cell) for cell in row[2:-1])) for row in table.rows]
    return [table.title, PrintedTable(headers[:-1], rows), *(f"{row[0]}: {row[-1]}" for row in table.rows)]
