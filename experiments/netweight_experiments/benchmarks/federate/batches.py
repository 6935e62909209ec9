"""The audit's image search beside its rivals: batches of an honest client of FedAvg, one local step, first round.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.batches --beside CHECKOUT

Every attack gets the same update, the same recovered labels and as many steps. The audit runs all attacks that fit and
keeps the image that is nearest to one of the client's. `matching` is the library's own optimization alone, from another
starting point and by its defaults; `matching, smoother` has a weight of the total variation that the audit lacks.
`--beside` names a checkout of github.com/JonasGeiping/breaching, whose `invertinggradients` runs, too.
Each client's batch is drawn anew from data that no attack was tuned on. The file is written after every batch and keeps
the batches that it has.
"""

import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn

from netweight.attacks.gradient_inversion.analytic import labels_of_update
from netweight.attacks.gradient_inversion.client import sgd_difference
from netweight.attacks.gradient_inversion.matching import MatchingConfig, invert
from netweight.methods.federate import Task
from netweight.methods.federate.algorithms.direct import fedavg
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.exposure import evidence_of
from netweight.methods.federate.observation import observe, read_update
from netweight.methods.federate.plan import FederationPlan
from netweight.methods.federate.reconstruction import BodyAndHead, Search, reconstruct
from netweight.methods.federate.threats import ThreatModel
from netweight.metrics.images import match_images, psnr
from netweight_experiments.benchmarks.federate.inversion import by_breaching
from netweight_experiments.benchmarks.script import fill

Name = Literal["fashion-mnist", "emnist-letters"]
DATA: tuple[Name, ...] = ("fashion-mnist", "emnist-letters")
CLIENTS = 20
SEED = 2_000  # of networks and batches; the attacks were tuned on others
SMOOTHER = 0.05


def federation(data: str, seed: int) -> TrainedFederation:
    """A federation before its first round."""
    plan = FederationPlan(data=data, method="fedavg", clients=CLIENTS, seed=seed)
    task: Task = plan.task()
    method = fedavg()
    return TrainedFederation(
        task, method, method.start(task, seed=seed), {client: {} for client in task.clients}, (), seed
    )


def measured(data: str, size: int, client: int, steps: int, beside: Path | None) -> dict[str, float]:
    """Attack one batch by everything; best and mean PSNR in dB, and processor seconds."""
    run = federation(data, SEED + client)
    threat = ThreatModel(batch_size=size, first_round=True)
    (seen,) = observe(run, threat, [client], seed=SEED + client)
    inputs = [run.task.client(each).train[0] for each in run.task.clients]
    low, high = min(float(one.min()) for one in inputs), max(float(one.max()) for one in inputs)
    unit = partial(_unit, low=low, high=high)
    truth, config = unit(seen.images), MatchingConfig(steps=steps)
    recovered = read_update(run, seen.message, seen.answer())
    evidence = evidence_of(run, recovered, seen, threat, (low, high))
    began = time.process_time()
    candidates, _ = reconstruct(evidence, Search(matching=config), seed=client)
    row = {"audit, seconds": time.process_time() - began}
    row |= _quality("audit", [part for one in candidates for part in unit(one.images).split(size)], truth)
    training = evidence.training
    model = BodyAndHead(run.task.body, run.task.head)
    update = sgd_difference(
        model, lr=training.lr, steps=1, batch_size=size, momentum=training.momentum,
        weight_decay=training.weight_decay,
    )  # fmt: skip
    start = {name: value.detach() for name, value in seen.message.items()}
    difference = {name: value - start[name] for name, value in seen.answer().items()}
    shape = (size, *seen.images.shape[1:])
    smoother = replace(config, total_variation=SMOOTHER)
    for number, (name, own) in enumerate({"matching": config, "matching, smoother": smoother}.items(), start=1):
        began = time.process_time()
        alone = invert(update, start, difference, shape=shape, bounds=(low, high), config=own, seed=client + number)
        row[f"{name}, seconds"] = time.process_time() - began
        row |= _quality(name, [unit(alone.images)], truth)
    if beside is not None:
        labels = labels_of_update(update, start, difference, shape=shape, seed=client)
        gradient = {n: -difference[n] / training.lr - training.weight_decay * start[n] for n in start}
        # It takes a plain network and its gradients in the order of the parameters; head and body keep their names.
        plain = nn.Sequential(OrderedDict(body=run.task.body, head=run.task.head))
        plain.load_state_dict(start)
        names = [name for name, _ in plain.named_parameters()]
        began = time.process_time()
        images = by_breaching(
            beside, plain, [gradient[name] for name in names], shape[1:], labels, mean=-low / (high - low),
            std=1 / (high - low), steps=steps, seed=client,
        )  # fmt: skip
        row["breaching, seconds"] = time.process_time() - began
        row |= _quality("breaching", [unit(images)], truth)
    rivals = [row[name] for name in ("matching, best", "matching, smoother, best", "breaching, best") if name in row]
    row["audit behind the best rival, dB"] = max(rivals) - row["audit, best"]
    return {name: round(value, 2) for name, value in row.items()}


def _unit(images, *, low, high):
    return ((images - low) / (high - low)).clamp(0, 1)


def _quality(name, every, truth):
    """The nearest image of all attacks, and the mean over the batch of the attack that is best by it."""
    best = max(float(psnr(image[None].expand_as(truth), truth).max()) for images in every for image in images)
    whole = [float(psnr(images[match_images(images, truth)], truth).mean()) for images in every if len(images) > 1]
    return {f"{name}, best": best, f"{name}, mean": max(whole, default=best)}


def main(
    *,
    sizes: tuple[int, ...] = (4, 8),
    clients: tuple[int, ...] = (3, 11, 17),
    data: tuple[Name, ...] = DATA,
    steps: int = MatchingConfig.steps,
    beside: Path | None = None,
    output: Path,
):
    rows = {
        f"{name}, batch of {size}, client {client}": partial(measured, name, size, client, steps, beside)
        for client in clients
        for size in sizes
        for name in data
    }
    yield from fill(output, "batches", rows.items())
