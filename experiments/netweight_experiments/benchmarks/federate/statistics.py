"""Running statistics that belong to a client, beside averaged ones: FedAvg of a CNN with batch normalization.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.statistics

Clients of Fashion-MNIST in the paper's split, each with a few main classes, so that their statistics differ. `fedbn`
keeps the whole normalization layers with the client, weights included. The file is written after every cell and keeps
the cells that it has.
"""

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from netweight.data.images import load
from netweight.methods.federate import Federation, LocalTraining, Task, train
from netweight.methods.federate.algorithms.averaged_statistics import AveragedStatistics
from netweight.methods.federate.catalog import named_method
from netweight.methods.federate.partition import federated_images
from netweight.methods.federate.plan import REFERENCE_SPLIT
from netweight_experiments.benchmarks.script import fill

Owner = Literal["client", "averaged", "fedbn"]
OWNERS: tuple[Owner, ...] = ("client", "averaged", "fedbn")


def network(seed: int) -> tuple[nn.Module, nn.Module]:
    """A small CNN for 28 × 28 images whose every layer is followed by batch normalization."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 64), nn.BatchNorm1d(64), nn.ReLU(),
        )  # fmt: skip
        return body, nn.Linear(64, 10)


def measured(owner: Owner, clients: int, rounds: int, seed: int) -> dict[str, float]:
    """Train one federation; mean accuracy of the clients before and after local training, in percent."""
    parts = federated_images(load("fashion-mnist"), clients=clients, seed=REFERENCE_SPLIT)
    task = Task(*network(seed), parts)
    training = LocalTraining(epochs=1)
    method = named_method("fedbn" if owner == "fedbn" else "fedavg", training=training)
    method = AveragedStatistics(method) if owner == "averaged" else method
    settings = Federation(rounds=rounds, seed=seed, evaluate_every=rounds)
    last = train(task, method, settings, workers=1).rounds[-1]
    return {"before": round(100 * last.mean_before, 2), "after": round(100 * last.mean_after, 2)}


def main(
    *,
    clients: int = 10,
    rounds: int = 15,
    seeds: tuple[int, ...] = (520, 521, 522),
    owners: tuple[Owner, ...] = OWNERS,
    output: Path,
):
    cells = {
        f"{owner}, {clients} clients, {rounds} rounds, seed {seed}": partial(measured, owner, clients, rounds, seed)
        for seed in seeds
        for owner in owners
    }
    yield from fill(output, "cells", cells.items())
