"""`federate` in recipes: a folder of images, or a data set by name, becomes a trained and attacked federation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.core.progress import Progress
from netweight.data.images import NAMES
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.federate.folder import FederationPlan, FolderFederation, entry_of
from netweight.methods.federate.report import accuracy, gradient_inversion
from netweight.registry import Method
from netweight.report.report import Report

if TYPE_CHECKING:
    from netweight.methods.federate.engine import Run


def _federate(source: Path, destination: Path, settings: FolderFederation, progress: Progress) -> None:
    """Train beside the destination, resumably, and move the whole there when it is done."""
    from netweight.methods.federate.engine import CHECKPOINT, train

    plan = _plan(source, settings)
    task = plan.task()
    with Job.beside(destination, overwrite=None) as job:
        train(
            task, plan.make_method(task), plan, folder=job, workers=settings.workers, device=settings.device,
            progress=progress,
        )  # fmt: skip
        plan.save(job.tree)
        shutil.copyfile(job.folder / CHECKPOINT, job.file(CHECKPOINT))
        job.publish(destination, overwrite=None)


def _plan(source: Path, settings: FolderFederation) -> FederationPlan:
    return settings.plan(str(source.resolve() if source.exists() else source))  # a folder before a data set's name


def _subject(
    audit: str, destination: Path, source: Path, settings: FolderFederation, progress: Progress
) -> tuple[Any, Any]:
    from netweight.methods.federate.report import AuditConfig, ThreatModel

    return _trained(destination), AuditConfig(threats=(ThreatModel(first_round=True),), images=settings.images)


def _trained(folder: Path) -> Run:
    """Open a finished federation; nothing of it is written."""
    from netweight.methods.federate.engine import finished

    plan = FederationPlan.load(folder)
    task = plan.task()
    return finished(task, plan.make_method(task), plan, folder=folder)


def _illustrate(destination: Path, number: int, report: Report) -> None:
    from netweight.methods.federate.report import client_table, training_figure

    run = _trained(destination)
    report.section(
        f"{number}. Accuracy by round", [], figures=[training_figure(run.rounds, run.method.name)],
        tables=[client_table(run)], intro="Before and after local training; each client counts once.",
    )  # fmt: skip


def _check(source: Path | None, settings: FolderFederation) -> None:
    entry_of(settings.method)
    if source is None or not source.exists():
        return
    if not (source.is_dir() and any(child.is_dir() for child in source.iterdir())):
        raise UsageError(
            f"{source} holds no folder of images per class.", cure=f"Name such a folder, or one of {', '.join(NAMES)}."
        )


FEDERATE = Method(
    "federate",
    FolderFederation,
    audits={"accuracy": accuracy, "gradient-inversion": gradient_inversion},
    apply=_federate,
    examine=_subject,
    illustrate=_illustrate,
    check=_check,
    takes=("images",),
    makes="federation",
    named=NAMES,
)
