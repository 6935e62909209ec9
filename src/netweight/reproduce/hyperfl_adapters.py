"""HyperFL's table 2: a frozen backbone, with a classifier alone, with adapters, and with generated adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.errors import UsageError
from netweight.report.finding import Column, Finding
from netweight.reproduce.federated_run import Parts, images_of, run_all
from netweight.reproduce.registry import Measured, Row, Scale, table
from netweight.reproduce.resumed import chosen, finished

if TYPE_CHECKING:
    from netweight.methods.federate import LocalTraining, Method

__all__ = ["WAYS", "AdapterRun", "runs_of_table2", "table2"]

WAYS = {
    "local-fixed": "Local-only, extractor fixed",
    "local": "Local-only, adapters tuned",
    "fedavg-fixed": "FedAvg, extractor fixed",
    "fedavg": "FedAvg, adapters tuned",
    "hyperfl": "HyperFL-LPM",
    "hyperfl-body": "HyperFL-LPM from the body",
}
"""Ways to train on a frozen backbone, and the columns that they make; the last one is not in the paper."""
DATA = {"emnist-letters": "EMNIST", "cifar10": "CIFAR-10"}
_READ_BEFORE = ("fedavg-fixed", "fedavg")
"""Ways whose published column is the accuracy of the received model, as in table 1."""
_EVALUATIONS = 40
_CALIBRATION = 512
_BATCH, _RATE = 16, 0.01


@final
@dataclass(frozen=True)
class AdapterRun:
    """One federation on a frozen backbone.

    Attributes:
        data: A data set of `zoo.data.load`.
        way: One of `WAYS`.
        clients: Number of clients, all of which are asked in each round.
        per_client: Train and test images of each client; None for the paper's.
        rounds: Number of rounds.
        seed: Of the classifier, the hypernetwork and the batches.
    """

    data: str
    way: str
    clients: int = 20
    per_client: tuple[int, int] | None = None
    rounds: int = 200
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
    """Return every run of the table.

    Args:
        scale: "small" is a miniature of few clients, images and rounds; "paper" the paper's schedule.
    """
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
    """Train classifiers, adapters and generated adapters on a frozen ResNet-20; report accuracy before and after.

    Args:
        scale: "small" trains 3 rounds of 3 clients with 32 images; "paper" 200 rounds of 20 clients.
        out: Finished runs are kept here, and unfinished ones go on from their last round.
        only: Train only the runs whose name, `DATA-CLIENTS-WAY-SEED`, fits this pattern ("cifar10-*"), or none with
            "none"; the table shows all that are finished.

    Raises:
        UsageError: The pattern fits no run, or nothing is finished.
        NetweightError: A run failed.
    """
    runs = runs_of_table2(scale)
    run_all(chosen(runs, only), out, parts_of=_parts_of)
    found = {run: curve for run, curve in finished(out, AdapterRun).items() if run in set(runs)}
    if not found:
        raise UsageError("No run of the table is finished.", cure="Leave --only out, or give another pattern.")
    return _measured(found)


def _parts_of(run: AdapterRun) -> Parts:
    """Return task, method and settings of a run."""
    import torch

    from netweight.core import seeds
    from netweight.data.images import crop_and_flip
    from netweight.methods.federate import Federation, FedTask, LocalTraining
    from netweight.methods.federate.folder import REFERENCE_SPLIT
    from netweight.methods.federate.partition import federated_images
    from netweight.toys.networks import adapted_resnet20

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
    from netweight.methods.federate import DirectMethod, Phase
    from netweight.methods.federate.catalog import named_method

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
