"""Federations in recipes: one is trained, and attacked by what its server sees, with and without protections.

The honest server reads gradients and images from what one client sends after one step on one image, the worst case, and
gradients from a whole round. Each protection is attacked by somebody who knows it: noise by the update's strongest
direction, a secure sum by a server that lies, which sends thresholds in place of the hypernetwork's first layer.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from netweight.attacks.gradient_inversion.analytic import read_thresholds, singular_gradient, threshold_trunk
from netweight.attacks.gradient_inversion.tailored import PeelingConfig
from netweight.core.progress import Progress
from netweight.core.seeds import torch_generator
from netweight.data.images import NAMES
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.federate.algorithms.hyperfl import rows_of_body
from netweight.methods.federate.defenses import Hardened, RefusalLimits, UpdateNoise, refuse_abnormal
from netweight.methods.federate.engine import CHECKPOINT, Run, finished, train
from netweight.methods.federate.folder import FederationPlan, FolderFederation, entry_of
from netweight.methods.federate.report import (
    MARGIN_COSINE,
    AuditConfig,
    Exposure,
    Observation,
    ThreatModel,
    accuracy,
    exposure,
    exposure_findings,
    exposure_table,
    gradient_inversion,
    observe,
    own_threat,
    read_update,
)
from netweight.methods.federate.settings import LocalTraining
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, bootstrap
from netweight.registry import Attack, Method, Target
from netweight.report.conclusions import Conclusion, Criterion, Words, worst
from netweight.report.finding import Figure, Finding, Section, Table
from netweight.report.plots import image_grid
from netweight.settings import Settings

_EXACT = 0.99  # cosine from which on a gradient counts as taken
_LOOKED = 50  # images by which a client judges what it is sent


class ServerAttack(Settings):
    """What a federation's server sees of its clients, and what noise and secure sums leave of that."""

    beside: str | None = Field(None, description="A method to train on the same data and attack alike, such as fedavg.")
    images: int = Field(5, ge=1, description="Clients whose updates are attacked; intervals need 5.")
    noise: float = Field(0.01, ge=0, description="Noise that is tried, as a multiple of the norm; 0 leaves it out.")
    clip: float = Field(1.0, gt=0, description="Norm that updates are clipped to where there is noise.")
    summed_over: int = Field(10, ge=1, description="Clients of the secure sum that is tried; 1 leaves it out.")
    softening: int = Field(26, ge=1, description="Steps of the image search from soft to sharp guesses.")
    rounds: int = Field(16, ge=1, description="Rounds of the image search after that.")


def trained(folder: Path) -> Run:
    """Open a finished federation; nothing of it is written."""
    plan = FederationPlan.load(folder)
    task = plan.task()
    return finished(task, plan.make_method(task), plan, folder=folder)


def _beside(folder: Path, method: str, work: Path, progress: Progress) -> Run:
    """Another method, trained on the same data with the same settings; the next call continues it."""
    plan = FederationPlan.load(folder).replace(method=method)
    task = plan.task()
    with Job.open(work) as job:
        return train(task, plan.make_method(task), plan, folder=job, progress=progress)


def _attack(target: Target, settings: ServerAttack, progress: Progress) -> Section:
    run, seed = trained(target.model), target.seed
    name = run.method.name
    runs = {name: run}
    if settings.beside is not None:
        runs[settings.beside] = _beside(target.model, settings.beside, target.output / "server-beside", progress)
    step = ThreatModel(first_round=True)
    looks = {each: (one, step, settings.images) for each, one in runs.items()}
    noisy = None
    if settings.noise:
        noisy = replace(run, method=Hardened(run.method, UpdateNoise(settings.clip, settings.noise)))
        looks[f"{name}, noise added"] = (noisy, step, settings.images)
    many = min(settings.summed_over, len(run.task.clients))
    if many > 1:
        looks[f"{name}, in a secure sum"] = (run, replace(step, summed_over=many), 1)
    peeling = PeelingConfig(softening=settings.softening, rounds=settings.rounds)
    with progress.task("attacked updates", sum(count for _, _, count in looks.values()), unit="updates") as work:
        seen = {
            each: exposure(
                one, threat, images=count, summed_over=len(run.task.clients), seed=seed, peeling=peeling, work=work
            )
            for each, (one, threat, count) in looks.items()
        }  # fmt: skip
    findings = [
        replace(finding, name=f"{each}: {finding.name}")
        for each, one in seen.items()
        for finding in exposure_findings([one], seed=seed)
    ]
    for each, one in runs.items():
        findings.append(_whole_round(each, one, settings.images, seed))
    told = {each: one.verdict for each, one in seen.items()}
    if noisy is not None:
        cosines = _strongest(noisy, step, settings.images, seed)
        held = f"{name}, noise added"
        findings.append(_cosines(f"{held}: gradient by the strongest direction", cosines, seen[held].aggregate, seed))
    warnings = []
    if many > 1 and any(part.endswith("heads.weight") for part in run.state):
        held = f"{name}, in a secure sum"
        findings += (lies := _lies(run, held, many, seen[held], seed))
        told["a server that lies"] = _LIES(lies, sites=str(lies[0].n))
        if told["a server that lies"][0] == "broken":
            warnings = ["A secure sum protects from an honest server only."]
    figure = _grid(seen)
    return Section(
        "What the server sees", findings, figures=[figure] if figure else [], tables=[_table(seen)], warnings=warnings,
        question="What can be reconstructed from what clients send, and which protections hold?", intro=_INTRO,
        conclusion=" ".join(f"{each}: {words}" for each, (_, words) in told.items()),
        outcome=worst(outcome for outcome, _ in told.values()),
    )  # fmt: skip


_INTRO = (
    "The server knows the network, the learning rate and what it sent, and no label. One step on one image is the "
    "worst case; a gradient that is known is as good as the image. Likenesses are PSNR and SSIM, where 1 is the same "
    "image; the baseline is the better of a random and an average image of other clients, for cosines what the "
    "published average of all clients gives away.\n\nNoise: every client clips its update and adds noise to it all. A "
    "secure sum: the server sees the average and nothing else. A server that lies takes it apart where clients drew "
    "embeddings of their own; clients that look at what they are sent refuse these plain thresholds, and an attacker "
    "who knows that passes."
)


def _whole_round(name: str, run: Run, count: int, seed: int) -> Finding:
    """The gradient read from one more round by the schedule of the federation."""
    seen = observe(run, own_threat(run), run.task.clients, seed=seed)
    average = replace(seen[0], updates=tuple(one.updates[0] for one in seen))
    anyway = read_update(run, average.sent, average.received()).first
    found = [_cosine(read_update(run, one.sent, one.received()).first, one) for one in seen[:count]]
    return _cosines(
        f"{name}: gradient recovered, whole round of this federation", found,
        [_cosine(anyway, one) for one in seen[:count]], seed,
    )  # fmt: skip


def _strongest(run: Run, threat: ThreatModel, count: int, seed: int) -> list[float]:
    """Cosine, signs aside, of each noisy update's first singular vector with the client's gradient."""
    seen = observe(run, threat, run.task.clients[:count], seed=seed)
    return [abs(_cosine(singular_gradient(one.sent, one.received(), **_rule(run)), one)) for one in seen]


def _lies(run: Run, name: str, many: int, summed: Exposure, seed: int) -> list[Finding]:
    """Send a trunk of thresholds to all clients, and read single clients out of the sum of their answers."""
    clients = run.task.clients[:many]
    honest = run.method.start(run.task, seed=run.seed)
    private: dict[int, Mapping[str, Tensor]] = {site: _own_embedding(run, site, seed) for site in clients}
    lie = threshold_trunk(honest, seed=seed)
    lied = replace(run, state=lie, private={**run.private, **private})
    seen = observe(lied, ThreatModel(summed_over=many), clients, seed=seed)
    rows = read_thresholds(seen[0].sent, seen[0].received(), **_rule(run))
    cosines = [max(abs(_cosine(row, one)) for row in rows) for one in seen]
    sent, limits = rows_of_body(lie, run.task.body_layout.size), RefusalLimits()
    refused = sum(
        bool(refuse_abnormal(
            sent, body=run.task.body, embedding=private[site]["embedding"],
            images=run.task.client(site).train[0][:_LOOKED], limits=limits,
        ))
        for site in clients
    )  # fmt: skip
    beyond = max(cosines) - sum(summed.aggregate) / len(summed.aggregate)
    return [
        _cosines(f"{name}, a server that lies: gradient", cosines, summed.aggregate, seed),
        Finding(f"{name}, a server that lies: single gradients taken", sum(cosine >= _EXACT for cosine in cosines),
                n=len(clients), seeds=(seed,), detail={"from a cosine of": _EXACT}),
        Finding(f"{name}, a server that lies: clients that refuse, if they look", refused, n=len(clients),
                seeds=(seed,)),
        Finding(_BEYOND, beyond, n=1, seeds=(seed,), unit="cosine", better="lower"),
    ]  # fmt: skip


def _lied(held: bool, *, sites: str) -> Words:
    if held:
        return "told", f"It learns no more of one of {sites} clients than the average tells."
    return "broken", f"It takes single gradients out of the sum of {sites} clients: exactly what the sum should hide."


_BEYOND = "a server that lies: nearest gradient, beyond the average"
_LIES = Conclusion("federate: a server that lies", [Criterion(_BEYOND, "lower", than=MARGIN_COSINE)], _lied)


def _own_embedding(run: Run, site: int, seed: int) -> dict[str, Tensor]:
    """What a client keeps, with an embedding that it drew by itself: in the paper's code all begin with one."""
    private = dict(run.method.private_start(run.task, site, seed=run.seed))
    embedding = private["embedding"]
    private["embedding"] = torch.randn(embedding.shape, generator=torch_generator(seed, "own embedding", site))
    return private


def _rule(run: Run) -> dict[str, float]:
    training = getattr(run.method, "training", LocalTraining())
    return {"lr": training.lr, "weight_decay": training.weight_decay}


def _cosine(found: Tensor, seen: Observation) -> float:
    return float(torch.cosine_similarity(found.double(), seen.gradient.double(), dim=0))


def _cosines(name: str, values: Sequence[float], anyway: Sequence[float], seed: int) -> Finding:
    ci95 = bootstrap(values, seed=seed).ci95 if len(values) >= MINIMUM_FOR_BOOTSTRAP else None
    return Finding(
        name, sum(values) / len(values), ci95=ci95, n=len(values), unit="cosine", seeds=(seed,),
        baseline=sum(anyway) / len(anyway), detail={"values": list(values)},
    )  # fmt: skip


def _table(seen: Mapping[str, Exposure]) -> Table:
    table = exposure_table(list(seen.values()))
    rows = [(name, *row[1:]) for name, row in zip(seen, table.rows, strict=True)]
    return Table("One step on one image", ("method", *table.columns[1:]), rows, table.notes)


def _grid(seen: Mapping[str, Exposure]) -> Figure | None:
    """Originals above what the server makes of each client's update."""
    shown = {f"from {name}": one.reconstructions for name, one in seen.items() if one.reconstructions}
    if not shown:
        return None
    originals = max((one.originals for one in seen.values()), key=len)
    most = len(originals)
    return image_grid(
        [
            [*(image.permute(1, 2, 0).float() for image in images), *[None] * (most - len(images))]
            for images in (originals, *shown.values())
        ],
        rows=["a client's image", *shown], columns=[f"client {number}" for number in range(1, most + 1)],
        alt="Images that clients hold, and what the server reconstructs of each under each method and protection.",
        caption="One step on one image. Above what the clients hold, below what the server makes of what they send; a "
        "sum gives one image for all.",
        pixels=64,
    )  # fmt: skip


def _check(model: Path | None, settings: ServerAttack) -> None:
    if settings.beside is not None:
        entry_of(settings.beside)
    if model is not None:
        FederationPlan.load(model)


SERVER = Attack("server", ServerAttack, _attack, check=_check, takes=("federation",))


def _federate(source: Path, destination: Path, settings: FolderFederation, progress: Progress) -> None:
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
    return settings.plan(str(source.resolve() if source.exists() else source))  # a folder before a data set's name


def _subject(
    audit: str, destination: Path, source: Path, settings: FolderFederation, progress: Progress
) -> tuple[Any, Any]:
    return trained(destination), AuditConfig(threats=(ThreatModel(first_round=True),), images=settings.images)


def _check_source(source: Path | None, settings: FolderFederation) -> None:
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
    by_attack={"gradient-inversion": "server"},
    check=_check_source,
    takes=("images",),
    makes="federation",
    named=NAMES,
)
