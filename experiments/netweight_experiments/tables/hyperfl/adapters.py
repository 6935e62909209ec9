"""HyperFL's table 2: a frozen backbone, with a classifier alone, with adapters, and with generated adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from netweight.core import seeds
from netweight.data.images import crop_and_flip
from netweight.hf.adapted_backbones import adapted_resnet20
from netweight.methods.federate import Federation, LocalTraining, Method, Task
from netweight.methods.federate.algorithms.direct import DirectMethod
from netweight.methods.federate.catalog import named_method
from netweight.methods.federate.partition import federated_images
from netweight.methods.federate.plan import REFERENCE_SPLIT
from netweight.methods.federate.settings import Phase
from netweight.report.finding import Finding
from netweight_experiments.tables.grid import chosen, finished_of, grid
from netweight_experiments.tables.hyperfl.federations import Parts, images_of, run_all
from netweight_experiments.tables.registry import Column, MeasuredTable, Scale, table

# Ways to train on a frozen backbone, and the columns that they make; the last one is not in the paper.
WAYS = {
    "local-fixed": "Local-only, extractor fixed",
    "local": "Local-only, adapters tuned",
    "fedavg-fixed": "FedAvg, extractor fixed",
    "fedavg": "FedAvg, adapters tuned",
    "hyperfl": "HyperFL-LPM",
    "hyperfl-body": "HyperFL-LPM from the body",
}
DATA = {"emnist-letters": "EMNIST", "cifar10": "CIFAR-10"}
# Ways whose published column is the accuracy of the received model, as in table 1.
_READ_BEFORE = ("fedavg-fixed", "fedavg")
_EVALUATIONS = 40
_CALIBRATION = 512
_BATCH, _RATE = 16, 0.01


@dataclass(frozen=True)
class AdapterRun:
    """One federation on a frozen backbone."""

    data: str
    """A data set of `data.images.load`."""
    way: str
    clients: int = 20
    """Number of clients, all of which are asked in each round."""
    per_client: tuple[int, int] | None = None
    """Train and test images of each client; None for the paper's."""
    rounds: int = 200
    """Number of rounds."""
    seed: int = 520

    @property
    def name(self) -> str:
        """A name for files, which leaves out the number of rounds so that a longer run continues a shorter one."""
        return f"{self.data}-{self.clients}-{self.way}-{self.seed}"


def runs_of_table2(scale: Scale) -> list[AdapterRun]:
    """Return every run of the table."""
    if scale == "small":
        return [AdapterRun(data, way, clients=3, per_client=(32, 60), rounds=3) for data in DATA for way in WAYS]
    return [AdapterRun(data, way) for data in reversed(DATA) for way in WAYS]


@table(
    "hyperfl-table2",
    needs=("evidence", "federated", "data:weights", "data:emnist_letters", "data:cifar10_jpeg"),
    paper_needs=("days on a CPU",),
    stand_in=True,
)
def table2(scale: Scale, out: Path, *, only: str | None = None) -> MeasuredTable:
    """Train classifiers, adapters and generated adapters on a frozen ResNet-20; report accuracy before and after."""
    runs = runs_of_table2(scale)
    run_all(chosen(runs, only), out, parts_of=_parts_of)
    return _measured(finished_of(runs, out, AdapterRun))


def _parts_of(run: AdapterRun) -> Parts:
    """Return task, method and settings of a run."""
    images = images_of(run.data)
    generator = seeds.torch_generator(REFERENCE_SPLIT, "calibration")
    public = torch.randperm(len(images.train[1]), generator=generator)[:_CALIBRATION]
    body, head = adapted_resnet20(
        len(images.classes),
        normalized_by=(images.mean, images.std),
        calibration=images.normalized(images.train[0][public]),
        seed=run.seed,
    )
    clients = federated_images(images, clients=run.clients, seed=REFERENCE_SPLIT, per_client=run.per_client)
    augment = partial(crop_and_flip, fill=images.black) if images.shape[0] == 3 else None
    settings = Federation(rounds=run.rounds, seed=run.seed, evaluate_every=max(1, run.rounds // _EVALUATIONS))
    return (
        Task(body, head, clients, augment=augment),
        _method(run.way, LocalTraining(batch_size=_BATCH, lr=_RATE)),
        settings,
    )


def _method(way: str, training: LocalTraining) -> Method:
    if not way.endswith("-fixed"):
        return named_method(way, training=training)
    head = Phase(trains="head", epochs=training.epochs, lr=training.lr)
    return DirectMethod(way, () if way.startswith("local") else ("head",), (head,), training)


def _measured(found: Mapping[AdapterRun, Mapping[str, Any]]) -> MeasuredTable:
    by = {
        (run.data, run.way, reading): 100 * curve[reading][-1]
        for run, curve in found.items()
        for reading in ("before", "after")
    }
    rows: dict[str, tuple[str, str | None]] = {}
    for data, title in DATA.items():
        if any(run.data == data for run in found):
            rows[f"{title}, ResNet-20"] = (data, None)
            rows |= {f"{title}, {reading} local training": (data, reading) for reading in ("before", "after")}

    def accuracy(way: str) -> Callable[[tuple[str, str | None]], float | None]:
        as_published = "before" if way in _READ_BEFORE else "after"
        return lambda row: by.get((row[0], way, row[1] or as_published))

    run = next(iter(found))
    sizes = run.per_client or ()
    small = (f"A miniature: {run.clients} clients of {sizes[0]} images, {run.rounds} rounds.",) if sizes else ()
    return grid(
        rows,
        [(Column(title, "%", "higher"), accuracy(way)) for way, title in WAYS.items()],
        labels={name: f"{DATA[data]}, ResNet" for name, (data, reading) in rows.items() if reading is None},
        differs=(
            *small,
            "The frozen backbone is a ResNet-20 trained on CIFAR-10, not a ResNet-18 trained on ImageNet: it is smaller"
            " and has seen CIFAR-10's classes before.",
            "EMNIST letters (26 classes, 28 pixels, gray copied to color) stand in for EMNIST byclass; CIFAR-10 comes"
            " as JPEG pictures.",
            "Generated adapters are loaded, and there is no untrained layer before the classifier; the reference code"
            " drops the adapters silently.",
            f"Adapters begin as the identity, calibrated on {_CALIBRATION} training images that are taken as public.",
        ),
        findings=tuple(_findings(by, run.seed)),
        notes=(
            "The first row of a data set reads FedAvg before local training and the others after it, as table 1 does.",
            f"Mean over clients in the last of {run.rounds} rounds, seed {run.seed}.",
        ),
        inputs={run.name: curve["data"] for run, curve in found.items()},
    )


def _findings(by: Mapping[tuple[str, str, str], float], seed: int) -> list[Finding]:
    """Compare generated adapters with the better of the baselines, like for like."""
    findings = []
    for data, title in DATA.items():
        after = {way: by[data, way, "after"] for way in WAYS if (data, way, "after") in by}
        others = {way: value for way, value in after.items() if not way.startswith("hyperfl")}
        for way in after if others else ():
            if way not in others:
                best = max(others, key=others.__getitem__)
                name = f"{WAYS[way]} less the best baseline, both after local training, {title}"
                detail = {"best baseline": WAYS[best], "its accuracy": others[best]}
                gain = after[way] - others[best]
                findings.append(Finding(name, gain, unit="points", better="higher", seeds=(seed,), detail=detail))
    return findings
