"""`federate` in recipes: a folder of images, or a data set by name, becomes a trained and attacked federation."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import Field

from netweight.core.names import nearest_names
from netweight.core.progress import Progress
from netweight.data.images import NAMES
from netweight.errors import NameNotFound, UsageError
from netweight.job import Job
from netweight.methods.federate.catalog import METHODS
from netweight.methods.federate.folder import FederationPlan
from netweight.methods.federate.partition import Partition
from netweight.registry import Method
from netweight.report.report import Report

if TYPE_CHECKING:
    from netweight.methods.federate import Run

_Count, _Share = Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0, le=1)]
_TYPES = get_type_hints(FederationPlan) | {
    "partition": Partition,
    **dict.fromkeys(("clients", "rounds", "epochs", "batch_size", "min_clients", "evaluate_every"), _Count),
    **dict.fromkeys(("fraction", "drop_out"), _Share),
}
_ONLY_HERE: list[tuple[str, Any, Any]] = [
    ("images", _Count, dataclasses.field(default=5)),
    ("workers", _Count | None, dataclasses.field(default=None)),
    ("device", str, dataclasses.field(default="cpu")),
]
# The settings of a federation, as `zoo.federation.FederationPlan` has them, but for the data.
FolderFederation = dataclasses.make_dataclass(
    "FolderFederation",
    [
        (field.name, _TYPES[field.name], dataclasses.field(default=field.default))
        for field in dataclasses.fields(FederationPlan)
        if field.name != "data"  # the recipe's subject
    ]
    + _ONLY_HERE,
    frozen=True,
    namespace={
        "__doc__": (FederationPlan.__doc__ or "").rstrip()
        + """
        images: Attacked updates per threat model of the audit.
        workers: Threads; None for one per core.
        device: Where to train: cpu or cuda.
    """
    },
)


def _federate(source: Path, destination: Path, settings: Any, progress: Progress) -> None:
    """Train beside the destination, resumably, and move the whole there when it is done."""
    from netweight.methods.federate import train
    from netweight.methods.federate.engine import CHECKPOINT

    plan = _plan(source, settings)
    task = plan.task()
    with Job.beside(destination, overwrite=None) as job:
        train(
            task, plan.make_method(task), plan.settings(), folder=job, workers=settings.workers,
            device=settings.device, progress=progress,
        )  # fmt: skip
        plan.save(job.tree)
        shutil.copyfile(job.folder / CHECKPOINT, job.file(CHECKPOINT))
        job.publish(destination, overwrite=None)


def _plan(source: Path, settings: Any) -> FederationPlan:
    names = [field.name for field in dataclasses.fields(FederationPlan) if field.name != "data"]
    data = str(source.resolve() if source.exists() else source)  # a folder comes before a data set of its name
    return FederationPlan(data=data, **{name: getattr(settings, name) for name in names})


def _examine(audit: str, destination: Path, source: Path, settings: Any, progress: Progress) -> tuple[Any, Any]:
    from netweight.methods.federate.report import AuditConfig, ThreatModel

    return _trained(destination), AuditConfig(threats=(ThreatModel(first_round=True),), images=settings.images)


def _trained(folder: Path) -> Run:
    """Open a finished federation; nothing of it is written."""
    from netweight.methods.federate.engine import finished

    plan = FederationPlan.load(folder)
    task = plan.task()
    return finished(task, plan.make_method(task), plan.settings(), folder=folder)


def _illustrate(destination: Path, number: int, report: Report) -> None:
    from netweight.methods.federate.report import client_table, training_figure

    run = _trained(destination)
    report.section(
        f"{number}. Accuracy by round", [], figures=[training_figure(run.rounds, run.method.name)],
        tables=[client_table(run)], intro="Before and after local training; each client counts once.",
    )  # fmt: skip


def _check(source: Path | None, settings: Any) -> None:
    if settings.method not in METHODS:
        near = ", ".join(nearest_names(settings.method, METHODS))
        raise NameNotFound(f"There is no method {settings.method!r}.", cure=f"Nearest names: {near}.")
    if source is None:
        return
    _plan(source, settings).settings()
    if source.exists() and not (source.is_dir() and any(child.is_dir() for child in source.iterdir())):
        raise UsageError(
            f"{source} holds no folder of images per class.", cure=f"Name such a folder, or one of {', '.join(NAMES)}."
        )


FEDERATE = Method(
    "federate", FolderFederation, home="netweight.methods.federate.report", apply=_federate, examine=_examine,
    illustrate=_illustrate, check=_check, takes=("images",), makes="federation", named=NAMES,
)  # fmt: skip
