"""Federations in recipes: one is trained, and attacked by what its server sees, with and without protections.

The honest server reads gradients and images from what one client sends after one step on one image, the worst case, and
gradients from a whole round. Each protection is attacked by somebody who knows it: noise by the update's strongest
direction, a secure sum by a server that lies, which sends thresholds in place of the hypernetwork's first layer.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from netweight.attacks.gradient_inversion.matching import MatchingConfig
from netweight.attacks.gradient_inversion.tailored import PeelingConfig
from netweight.core.progress import Progress
from netweight.data.images import NAMES
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.federate.acceptance import AcceptanceLimits
from netweight.methods.federate.catalog import entry_of
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.methods.federate.engine import TrainedFederation, train
from netweight.methods.federate.exposure import AuditConfig, Exposure, cosine, exposure
from netweight.methods.federate.exposure_report import exposure_findings, exposure_table, mean_finding
from netweight.methods.federate.finished import open_run
from netweight.methods.federate.observation import observe, read_update
from netweight.methods.federate.plan import FederationPlan, FolderFederation
from netweight.methods.federate.protections import HardenedMethod, UpdateNoise
from netweight.methods.federate.reconstruction import Search
from netweight.methods.federate.threats import ThreatModel, own_threat
from netweight.registry import Target
from netweight.report.finding import Figure, Finding, Section, Table
from netweight.report.plots import image_grid
from netweight.report.text import worst
from netweight.settings import Settings


class ServerAttack(Settings):
    """Attack on what a federation's server sees of its clients, also with noise and secure sums."""

    beside: str | None = Field(
        None,
        description="A further method that is trained on the same data and attacked in the same way, such as fedavg.",
    )
    updates: int = Field(5, ge=1, description="Number of updates to attack. A 95 % interval needs at least 5.")
    noise: float = Field(
        0.01,
        ge=0,
        description="Noise that is added to updates in a further attack, as a multiple "
        "of `clip`; 0 leaves this attack out.",
    )
    clip: float = Field(1.0, gt=0, description="Norm to which updates are clipped before noise is added.")
    summed_over: int = Field(
        10, ge=1, description="Number of clients in a secure sum that is attacked; 1 leaves this attack out."
    )
    softening: int = Field(26, ge=1, description="Steps of the image search from soft to sharp guesses.")
    rounds: int = Field(16, ge=1, description="Rounds of the image search after that.")
    search_steps: int = Field(1200, ge=1, description="Steps of the search for a whole batch.")


def _beside(folder: Path, method: str, work: Path, progress: Progress) -> TrainedFederation:
    """Another method, trained on the same data with the same settings; the next call continues it."""
    plan = FederationPlan.load(folder).replace(method=method)
    task = plan.task()
    with Job.open(work) as job:
        return train(task, plan.make_method(task), plan, folder=job, progress=progress)


def attack(target: Target, settings: ServerAttack, progress: Progress) -> Section:
    run, seed = open_run(target.model), target.seed
    name = run.method.name
    runs = {name: run}
    if settings.beside is not None:
        runs[settings.beside] = _beside(target.model, settings.beside, target.output / "server-beside", progress)
    step = ThreatModel(first_round=True)
    looks = {each: (one, step, settings.updates) for each, one in runs.items()}
    if settings.noise:
        noisy = replace(run, method=HardenedMethod(run.method, UpdateNoise(settings.clip, settings.noise)))
        looks[f"{name}, noise added"] = (noisy, step, settings.updates)
    many = min(settings.summed_over, len(run.task.clients))
    lied = f"{name}, in a secure sum, malicious server"
    if many > 1:
        summed = replace(step, summed_over=many)
        looks[f"{name}, in a secure sum"] = (run, summed, 1)
        if any(part.endswith("heads.weight") for part in run.state):
            careful = replace(run, method=HardenedMethod(run.method, acceptance=AcceptanceLimits()))
            lies = replace(summed, server="thresholds")
            looks |= {lied: (run, lies, 1), f"{lied}, clients inspect it": (careful, lies, 1)}
    peeling = PeelingConfig(softening=settings.softening, rounds=settings.rounds)
    search = Search(peeling, MatchingConfig(steps=settings.search_steps))
    with progress.task("attacked updates", sum(count for _, _, count in looks.values()), unit="updates") as work:
        exposures = {
            each: exposure(
                one, threat, updates=count, gradients=threat.summed_over, summed_over=len(run.task.clients), seed=seed,
                search=search, work=work,
            )
            for each, (one, threat, count) in looks.items()
        }  # fmt: skip
    findings = [
        replace(finding, name=f"{each}: {finding.name}")
        for each, one in exposures.items()
        for finding in exposure_findings([one], seed=seed)
    ]
    findings += [_whole_round(each, one, settings.updates, seed) for each, one in runs.items()]
    conclusions = {each: one.verdict for each, one in exposures.items()}
    broken = conclusions.get(lied, ("told", ""))[0] == "broken"
    figure = _grid(exposures)
    return Section(
        "Exposure to the server", findings, figures=[figure] if figure else [], tables=[_table(exposures)],
        warnings=["A secure sum protects from an honest server only."] if broken else [],
        question="What can be reconstructed from what clients send, and which protections withstand the "
        "attack?", intro=_INTRO,
        conclusion=" ".join(f"{each}: {words}" for each, (_, words) in conclusions.items()),
        outcome=worst(outcome for outcome, _ in conclusions.values()),
    )  # fmt: skip


_INTRO = (
    "The server knows the network, the learning rate and what it sent, and no label. One step on one image is the "
    "worst case: whoever knows its gradient can compute the image. Similarities are PSNR and SSIM, where 1 is the same "
    "image. Their baseline is the better of a random and an average image of other clients; that of cosines is what "
    "the published average of all clients reveals.\n\nNoise: every client clips its update and adds noise to all of "
    "it. A secure sum: the server sees only the average. A malicious server can separate the clients of a sum if they "
    "drew embeddings of their own. Clients that inspect what they receive refuse such plain thresholds; an attacker "
    "who knows this can hide them."
)


def _whole_round(name: str, run: TrainedFederation, count: int, seed: int) -> Finding:
    """The gradient read from one more round by the schedule of the federation."""
    observations = observe(run, own_threat(run), run.task.clients, seed=seed)
    average = replace(observations[0], updates=tuple(one.updates[0] for one in observations))
    anyway = read_update(run, average.message, average.answer()).first
    cosines = [cosine(read_update(run, one.message, one.answer()).first, one.gradient) for one in observations[:count]]
    given = [cosine(anyway, one.gradient) for one in observations[:count]]
    return mean_finding(
        f"{name}: gradient recovered, whole round of this federation", cosines, "cosine", seed,
        baseline=sum(given) / len(given),
    )  # fmt: skip


def _table(exposures: Mapping[str, Exposure]) -> Table:
    table = exposure_table(list(exposures.values()))
    rows = [(name, *row[1:]) for name, row in zip(exposures, table.rows, strict=True)]
    return Table("One step on one image", ("method", *table.columns[1:]), rows, table.notes)


def _grid(exposures: Mapping[str, Exposure]) -> Figure | None:
    """Originals above what the server makes of each client's update."""
    shown = {f"from {name}": one.reconstructions for name, one in exposures.items() if one.reconstructions}
    if not shown:
        return None
    originals = max((one.originals for one in exposures.values()), key=len)
    most = len(originals)
    return image_grid(
        [
            [*(image.permute(1, 2, 0).float() for image in images), *[None] * (most - len(images))]
            for images in (originals, *shown.values())
        ],
        rows=["a client's image", *shown], columns=[f"client {number}" for number in range(1, most + 1)],
        alt="Images of clients, and what the server reconstructs of each under each method and protection.",
        caption="One step on one image. Above: the clients' images. Below: what the server reconstructs from "
        "their updates; a "
        "sum gives one image for all.",
        pixels=64,
    )  # fmt: skip


def check_server(model: Path | None, settings: ServerAttack) -> None:
    if settings.beside is not None:
        entry_of(settings.beside)
    if model is not None:
        FederationPlan.load(model)


def apply(source: Path, destination: Path, settings: FolderFederation, progress: Progress) -> None:
    """Train beside the destination, resumably, and move the whole there when it is done."""
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
    # A folder takes precedence over a data set of the same name.
    return settings.plan(str(source.resolve() if source.exists() else source))


def examine(
    audit: str, destination: Path, source: Path, settings: FolderFederation, progress: Progress
) -> tuple[Any, Any]:
    search = Search(matching=MatchingConfig(steps=settings.search_steps))
    return open_run(destination), AuditConfig((ThreatModel(first_round=True),), updates=settings.updates, search=search)


def tested(audit: str, settings: FolderFederation) -> list[tuple[str, str]]:
    """Return what the audit of the server's view attacks; the accuracy is measured on all clients."""
    if audit != "server attack":
        return []
    return [
        ("attacked updates", f"{settings.updates} of this run's schedule, and as many of one step on one image"),
        ("steps of the image search", f"{settings.search_steps:,}"),
    ]


def tested_by_server(settings: ServerAttack) -> list[tuple[str, str]]:
    """Return the updates that are attacked, and the protections under which they are."""
    rows = [
        ("attacked updates", f"{settings.updates} of one step on one image, and as many of a whole round"),
        ("rounds of the image search", f"{settings.rounds}, after {settings.softening} from soft to sharp guesses"),
        ("steps of the search for a batch", f"{settings.search_steps:,}"),
    ]
    rows += [("noise", f"{settings.noise:g} times the norm {settings.clip:g}")] * bool(settings.noise)
    return rows + [("clients of a secure sum", str(settings.summed_over))] * (settings.summed_over > 1)


def check(source: Path | None, settings: FolderFederation) -> None:
    entry_of(settings.method)
    if source is None or str(source) in NAMES or not source.exists():
        return
    if not (source.is_dir() and any(child.is_dir() for child in source.iterdir())):
        raise UsageError(
            f"{source} contains no folder of images per class.",
            cure=f"Name such a folder, or one of {', '.join(NAMES)}.",
        )
