"""HyperFL's table 2: a frozen backbone, with a classifier alone, with adapters, and with generated adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from netweight.core import seeds
from netweight.data.images import crop_and_flip
from netweight.evidence.finding import Finding
from netweight.methods.federate import DirectMethod, Federation, FedTask, LocalTraining, Method, Phase
from netweight.methods.federate.catalog import named_method
from netweight.methods.federate.folder import REFERENCE_SPLIT
from netweight.methods.federate.partition import federated_images
from netweight.toys.networks import adapted_resnet20
from netweight_experiments.tables.grid import chosen, finished_of
from netweight_experiments.tables.hyperfl.federations import Parts, images_of, run_all
from netweight_experiments.tables.registry import Column, Measured, Row, Scale, table

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


@final
@dataclass(frozen=True)
class AdapterRun:
    """One federation on a frozen backbone."""

    data: str  # a data set of `data.images.load`
    way: str
    clients: int = 20  # number of clients, all of which are asked in each round
    per_client: tuple[int, int] | None = None  # train and test images of each client; None for the paper's
    rounds: int = 200  # number of rounds
    seed: int = 520

    def __post_init__(self) -> None:
        """Take sizes as a ledger gives them back."""
        if self.per_client is not None:
            object.__setattr__(self, "per_client", tuple(self.per_client))

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
def table2(scale: Scale, out: Path, *, only: str | None = None) -> Measured:
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
        FedTask(body, head, clients, augment=augment),
        _method(run.way, LocalTraining(batch_size=_BATCH, lr=_RATE)),
        settings,
    )


def _method(way: str, training: LocalTraining) -> Method:
    if not way.endswith("-fixed"):
        return named_method(way, training=training)
    head = Phase("head", training.epochs, training.lr)
    return DirectMethod(way, () if way.startswith("local") else ("head",), (head,), training)


def _measured(found: Mapping[AdapterRun, Mapping[str, Any]]) -> Measured:
    rows, labels = [], {}
    for data, title in DATA.items():
        curves = {run.way: curve for run, curve in found.items() if run.data == data}
        if curves:
            as_published = [_last(curves, way, "before" if way in _READ_BEFORE else "after") for way in WAYS]
            rows.append(Row(f"{title}, ResNet-20", tuple(as_published)))
            labels[rows[-1].name] = f"{title}, ResNet"
            for reading in ("before", "after"):
                rows.append(
                    Row(f"{title}, {reading} local training", tuple(_last(curves, way, reading) for way in WAYS))
                )
    run = next(iter(found))
    sizes = run.per_client or ()
    small = (f"A miniature: {run.clients} clients of {sizes[0]} images, {run.rounds} rounds.",) if sizes else ()
    return Measured(
        columns=tuple(Column(title, "%", "higher") for title in WAYS.values()),
        rows=tuple(rows),
        labels=labels,
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
        findings=tuple(_findings(found)),
        notes=(
            "The first row of a data set reads FedAvg before local training and the others after it, as table 1 does.",
            f"Mean over clients in the last of {run.rounds} rounds, seed {run.seed}.",
        ),
        inputs={run.name: curve["data"] for run, curve in found.items()},
    )


def _last(curves: Mapping[str, Mapping[str, Any]], way: str, reading: str) -> float | None:
    return 100 * curves[way][reading][-1] if way in curves else None


def _findings(found: Mapping[AdapterRun, Mapping[str, Any]]) -> list[Finding]:
    """Compare generated adapters with the better of the baselines, like for like."""
    findings = []
    for data, title in DATA.items():
        after = {run.way: 100 * curve["after"][-1] for run, curve in found.items() if run.data == data}
        ours = {way: value for way, value in after.items() if way.startswith("hyperfl")}
        others = {way: value for way, value in after.items() if way not in ours}
        for way, value in ours.items():
            if others:
                best = max(others, key=others.__getitem__)
                findings.append(
                    Finding(
                        f"{WAYS[way]} less the best baseline, both after local training, {title}",
                        value - others[best],
                        unit="points",
                        better="higher",
                        seeds=(next(iter(found)).seed,),
                        detail={"best baseline": WAYS[best], "its accuracy": others[best]},
                    )
                )
    return findings
