"""HyperFL's tables 3 and 5, figures 5 to 7: IG, ROG and the tailored attack; the analytic one is not in the paper.

An attack is on one client's first update: the client holds one image and takes one step; the server knows model,
settings and initial state, and the label, as in the paper. Each image has a network of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from netweight.attacks.gradient_inversion.client import Reconstruction, gradient_of
from netweight.attacks.gradient_inversion.matching import MatchingConfig, ROGConfig, invert, rog
from netweight.attacks.gradient_inversion.tailored import PeelingConfig, TailoredConfig, invert_generated, tailored
from netweight.core import seeds
from netweight.core.progress import Progress
from netweight.data.images import Images
from netweight.methods.federate import ClientData, Task
from netweight.methods.federate.accounting import noise_multiplier
from netweight.methods.federate.algorithms.hyperfl import HYPERNETWORK
from netweight.methods.federate.catalog import METHODS, named_method
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.method import without
from netweight.methods.federate.observation import Observation, observe, read_update
from netweight.methods.federate.partition import client_sizes
from netweight.methods.federate.small_cnn import small_cnn
from netweight.methods.federate.threats import ThreatModel
from netweight.metrics.images import psnr, ssim
from netweight.metrics.intervals import mean_interval
from netweight.report.finding import Figure, Finding
from netweight.report.plots import image_grid
from netweight_experiments.tables.grid import Cell, as_text, chosen, finished, finished_of, grid, picture, run_each
from netweight_experiments.tables.hyperfl.federations import images_of
from netweight_experiments.tables.registry import Column, MeasuredTable, Scale, table

# Clients of the attacked federation, each with one image; so many images can be attacked.
CLIENTS = 20
SEED = 0
_EPSILON, _DELTA, _EPOCHS, _BATCH = 4.0, 1e-5, 1000, 50


@dataclass(frozen=True)
class AttackRun:
    """One attack on one image."""

    data: str
    """A data set of `data.images.load`; test images are attacked."""
    method: str
    """A method of `methods.federate.named_method`."""
    attack: str
    """"ig", "rog", "tailored" or "analytic"; the latter two are for HyperFL."""
    image: int
    """Number of the image; also the seed of the network and of the attack."""
    steps: int | None = None
    """Steps of the attack; None for as many as it takes by default."""

    @property
    def name(self) -> str:
        """A name for messages and patterns."""
        return f"{self.data}-{self.method}-{self.attack}-{self.image}"


def attack_one(run: AttackRun, *, tell: Any) -> dict[str, Any]:
    """Attack one image; return quality and pictures as JSON values."""
    images = images_of(run.data)
    victim = _victim(run, images)
    seen = observe(victim, ThreatModel(first_round=True), [run.image], seed=SEED)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.image)
        found, cosine = _analytic(run, victim, seen, images) if run.attack == "analytic" else (
            _search(run, victim, seen, images), None
        )  # fmt: skip
    # What an attack did not find counts as gray.
    made, truth = images.pixels(found.images).nan_to_num(0.5).clamp(0, 1), images.pixels(seen.images).clamp(0, 1)
    tell(1)
    return {
        "psnr": float(psnr(made, truth)),
        "ssim": float(ssim(made, truth)),
        "cosine": cosine,
        "objective": found.objective,
        "attack": found.attack,
        "steps": found.steps,
        "made": as_text(made),
        "truth": as_text(truth),
    }


def _victim(run: AttackRun, images: Images) -> TrainedFederation:
    """Return a federation before its first round, each client with one test image."""
    generator = seeds.torch_generator(SEED, "attacked images")
    numbers = torch.randperm(len(images.test[1]), generator=generator)[:CLIENTS]
    inputs, targets = images.normalized(images.test[0][numbers]), images.test[1][numbers]
    singles = [(inputs[k : k + 1], targets[k : k + 1]) for k in range(CLIENTS)]
    channels, size, _ = images.shape
    body, head = small_cnn(channels, size, len(images.classes), seed=run.image)
    task = Task(body, head, [ClientData(one, one) for one in singles])
    noise = _noise(run.data) if METHODS[run.method].private else None
    return TrainedFederation(task, named_method(run.method, noise_multiplier=noise), {}, {}, (), run.image)


@cache
def _noise(data: str) -> float:
    """Return the noise that table 1's schedule asks for at the paper's budget."""
    size = client_sizes(images_of(data), CLIENTS)[0]
    return noise_multiplier(_EPSILON, _DELTA, n=size, batch_size=_BATCH, epochs=_EPOCHS)


def _bounds(images: Images) -> tuple[Tensor, Tensor]:
    """Return black and white as the model sees them."""
    mean, std = torch.tensor(images.mean), torch.tensor(images.std)
    return -mean / std, (1 - mean) / std


def _analytic(
    run: AttackRun, victim: TrainedFederation, seen: Observation, images: Images
) -> tuple[Reconstruction, float]:
    """Read the gradient and undo the body; return the image and the cosine of the gradient with the true one."""
    recovered = read_update(victim, seen.message, seen.answer())
    config = PeelingConfig() if run.steps is None else PeelingConfig(softening=run.steps, rounds=max(1, run.steps // 2))
    shape = (1, *images.shape)
    found = invert_generated(
        recovered, victim.task.body, shape=shape, bounds=_bounds(images), config=config, seed=run.image
    )
    return found, float(torch.cosine_similarity(recovered.first, seen.gradient.double(), dim=0))


def _search(run: AttackRun, victim: TrainedFederation, seen: Observation, images: Images) -> Reconstruction:
    """Search the image by IG, ROG or the tailored attack."""
    received = seen.answer()
    training = victim.method.training  # type: ignore[attr-defined]  # all of them have one
    shape, bounds, classes = (1, *images.shape), _bounds(images), len(images.classes)
    if run.attack == "tailored":
        return tailored(
            seen.message, received, victim.task.body, shape=shape, classes=classes,
            features=victim.task.head_layout.shapes[0][1], lr=training.lr, weight_decay=training.weight_decay,
            labels=seen.labels, bounds=bounds, config=TailoredConfig(steps=run.steps or TailoredConfig.steps),
            seed=run.image,
        )  # fmt: skip
    model = nn.Sequential(victim.task.body, victim.task.head)
    model.train()
    slopes = {name: (value - received[name]) / training.lr - training.weight_decay * value
              for name, value in seen.message.items()}  # fmt: skip
    params, observed = _guessed(run, victim, seen, slopes) if run.method == "hyperfl" else _known(victim, seen, slopes)
    client = gradient_of(model)
    if run.attack == "rog":
        config = ROGConfig(steps=run.steps or ROGConfig.steps)
        return rog(client, params, observed, shape=shape, labels=seen.labels, config=config, seed=run.image)
    settings = MatchingConfig(steps=run.steps or MatchingConfig.steps)
    return invert(
        client, params, observed, shape=shape, labels=seen.labels, bounds=bounds, config=settings, seed=run.image
    )


def _named(body: dict[str, Tensor], head: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as body and head in a row do."""
    return {f"0.{name}": value for name, value in body.items()} | {f"1.{name}": value for name, value in head.items()}


def _known(
    victim: TrainedFederation, seen: Observation, slopes: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights that the client began with, and the gradients that it sent."""
    head = without("head.", seen.message) or victim.task.head_layout.split(victim.task.initial_head())
    return _named(without("body.", seen.message), head), _named(without("body.", slopes), without("head.", slopes))


def _guessed(
    run: AttackRun, victim: TrainedFederation, seen: Observation, slopes: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights that a guessed embedding generates with a guessed head, and the gradients to match there."""
    # The update of the hypernetwork's heads is imitated by g [m, 1]ᵀ, with the guess's code m and a gradient g of the
    # body. Its product with what was observed, G and b, is ⟨g, G m + b⟩: so the cosine of the two has the direction of
    # g that fits G m + b best, and the squared distance is least there too, scaled by |m|² + 1. The trunk is left out.
    layout, head = victim.task.body_layout, victim.task.head
    sent = {name.removeprefix(HYPERNETWORK): value for name, value in seen.message.items()}
    generator = seeds.torch_generator(SEED, "guess", run.image)
    embedding = torch.randn(sent["trunk.0.weight"].shape[1], generator=generator)
    code = torch.relu(sent["trunk.0.weight"] @ embedding + sent["trunk.0.bias"])
    body = sent["heads.weight"] @ code + sent["heads.bias"]
    product = slopes[f"{HYPERNETWORK}heads.weight"] @ code + slopes[f"{HYPERNETWORK}heads.bias"]
    fresh: nn.Module = small_cnn(classes=len(_weights(head)["bias"]), seed=seeds.derive(SEED, "guess", run.image))[1]
    return (_named(layout.split(body), _weights(fresh)), _named(layout.split(product / (code.square().sum() + 1)), {}))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


DATA = {"emnist-letters": "EMNIST", "cifar10": "CIFAR-10", "digits": "digits"}
_SMALL_STEPS = {"ig": 150, "rog": 100, "tailored": 20, "analytic": 3}
_IMAGES = {"small": 2, "paper": 16}


@dataclass(frozen=True)
class Line:
    """A row of a table, or of a figure."""

    title: str
    """Its name."""
    method: str
    """The attacked method."""
    attack: str


_ANALYTIC = Line("HyperFL, analytic attack", "hyperfl", "analytic")
# Rows of table 3 and figure 5.
IG = (
    Line("FedAvg", "fedavg", "ig"),
    Line("pFedHN", "pfedhn", "ig"),
    Line("pFedHN-PC", "pfedhn-pc", "ig"),
    Line("DP-FedAvg", "dp-fedavg", "ig"),
    Line("CENTAUR", "centaur", "ig"),
    Line("PPSGD", "ppsgd", "ig"),
    Line("HyperFL", "hyperfl", "ig"),
    _ANALYTIC,
)
# Rows of table 5 and figure 6.
ROG = (Line("FedAvg", "fedavg", "rog"), Line("HyperFL", "hyperfl", "rog"))
# Rows of figure 7.
TAILORED = (Line("HyperFL, tailored attack", "hyperfl", "tailored"), _ANALYTIC)
_TARGETS = {
    ("FedAvg", "psnr"): 30.0,
    ("FedAvg", "ssim"): 0.88,
    (_ANALYTIC.title, "psnr"): 20.0,
    (_ANALYTIC.title, "ssim"): 0.8,
}
_COSINE = 0.999
# What findings tell of, the attacker's view.
_FOUND = (("cosine", "cosine of the recovered gradient", ""), ("psnr", "PSNR", "dB"), ("ssim", "SSIM", ""))


def runs_of(lines: Sequence[Line], scale: Scale) -> list[AttackRun]:
    """Return the attacks of a table or figure, image by image."""
    data = ["emnist-letters", "cifar10"] if scale == "paper" else [_at_hand()]
    return [
        AttackRun(name, line.method, line.attack, image, _SMALL_STEPS[line.attack] if scale == "small" else None)
        for name in data
        for image in range(_IMAGES[scale])
        for line in lines
    ]


def _at_hand() -> str:
    root = os.environ.get("NETWEIGHT_DATA")
    return "emnist-letters" if root and (Path(root) / "emnist_letters").is_dir() else "digits"


def attacked(
    lines: Sequence[Line], scale: Scale, out: Path, only: str | None = None
) -> dict[AttackRun, dict[str, Any]]:
    """Run what is not yet run and return all that is finished, image by image."""
    runs, folder = runs_of(lines, scale), out.parent / f"hyperfl-attacks-{scale}"
    wanted = chosen(runs, only)
    left = set(wanted) - set(finished(folder, AttackRun))
    with Progress("auto").task("attacks", total=len(left), unit="images") as work:
        run_each(partial(attack_one, tell=work.update), wanted, folder=folder)
    return finished_of(runs, folder, AttackRun)


@table("hyperfl-table3", needs=("evidence", "dp"), paper_needs=("EMNIST letters, CIFAR-10, hours",), stand_in=True)
def table3(scale: Scale, out: Path, *, only: str | None = None) -> MeasuredTable:
    """Attack one client's first update under seven methods by IG, and HyperFL's analytically."""
    return measured(attacked(IG, scale, out, only), IG, scale)


@table("hyperfl-table5", needs=("evidence",), paper_needs=("EMNIST letters and CIFAR-10",), stand_in=True)
def table5(scale: Scale, out: Path, *, only: str | None = None) -> MeasuredTable:
    """Attack one client's first update under FedAvg and HyperFL by ROG's first stage."""
    return measured(attacked(ROG, scale, out, only), ROG, scale)


def measured(found: Mapping[AttackRun, Mapping[str, Any]], lines: Sequence[Line], scale: Scale) -> MeasuredTable:
    """Return means over images as rows, intervals and targets as findings."""
    names = [name for name in DATA if any(run.data == name for run in found)]

    def of(line: Line, data: str, metric: str) -> list[float]:
        runs = (v for r, v in found.items() if (r.data, r.method, r.attack) == (data, line.method, line.attack))
        return [value[metric] for value in runs if value.get(metric) is not None]

    def cell(data: str, metric: str, unit: str, better: Any) -> Cell[Line]:
        column = Column(f"{DATA[data]} {metric.upper()}", unit, better)
        return column, lambda line: mean(values) if (values := of(line, data, metric)) else None

    metrics = (("psnr", "dB", "lower"), ("ssim", "score", "lower"), ("lpips", "score", "higher"))
    findings = []
    for line in lines:
        for name in names:
            wanted = line.attack in ("ig", "analytic") and name == "emnist-letters" and scale == "paper"
            for metric, label, unit in _FOUND:
                target = _COSINE if metric == "cosine" else _TARGETS.get((line.title, metric)) if wanted else None
                if each := of(line, name, metric):
                    detail = {"each": each, "attack": of(line, name, "attack")[0]}
                    findings.append(
                        Finding(
                            f"{label}, {line.title}, {DATA[name]}", mean(each), n=len(each),
                            ci95=mean_interval(each, seed=0).ci95 if len(each) > 1 else None,
                            unit=unit, better="higher", target=target, seeds=tuple(range(len(each))), detail=detail,
                        )
                    )  # fmt: skip
    return grid(
        {line.title: line for line in lines},
        [cell(name, *metric) for name in names for metric in metrics],
        differs=_differs(lines, names, scale),
        findings=tuple(findings),
        notes=_notes(lines, found),
    )


def _differs(lines: Sequence[Line], names: Sequence[str], scale: Scale) -> tuple[str, ...]:
    sentences = [
        "One image, one step from the initial state, label known to the server: the paper states none of these."
    ]
    if scale == "small":
        sentences.append("A miniature: 2 images, and few steps of each attack.")
    if "emnist-letters" in names:
        sentences.append("EMNIST letters stand in for EMNIST byclass.")
    if "cifar10" in names:
        sentences.append("CIFAR-10 comes as JPEG pictures, a stand-in for the lossless ones.")
    if "digits" in names:
        sentences.append("scikit-learn's digits stand in for EMNIST, as NETWEIGHT_DATA contains no EMNIST letters.")
    if any(line.attack == "rog" for line in lines):
        sentences.append("ROG without post-processing: its second stage is a trained network that is not at hand.")
    if any(line.attack == "tailored" for line in lines):
        sentences.append("The tailored attack is a reconstruction of the idea; the paper does not say how it works.")
    return tuple(sentences)


def _notes(lines: Sequence[Line], found: Mapping[AttackRun, Mapping[str, Any]]) -> tuple[str, ...]:
    notes = [
        f"Means over {len({run.image for run in found})} images of each data set, each with an untrained network of its"
        " own. LPIPS is not measured: its backbone is not part of this library."
    ]
    attacks = {line.attack for line in lines}
    if attacks & {"ig", "rog"}:
        notes.append(
            "HyperFL: embedding and classifier are guessed, and the update of the hypernetwork's heads is matched,"
            " which is what the paper must have done."
        )
    if "analytic" in attacks:
        notes.append(
            "HyperFL, analytic attack: the same update, whose biases give the gradient away; no label, embedding or"
            " classifier is used. Not in the paper, and it refutes its claim for one step."
        )
    if any(line.method in ("dp-fedavg", "centaur", "ppsgd") for line in lines):
        notes.append(
            "Private methods have the noise of ε = 4, δ = 1e-5 over 200 rounds of 5 epochs with batches of 50."
        )
    if any(line.method in ("pfedhn-pc", "centaur", "ppsgd") for line in lines):
        notes.append(
            "A head that stays with the client is taken to be the initial one, as every client begins with it;"
            " CENTAUR's own phase of the head is left out, which favors the attacker."
        )
    return tuple(notes)


_SHOWN = 8
_SHAPES = {"emnist-letters": (1, 28, 28), "cifar10": (3, 32, 32), "digits": (1, 28, 28)}


@table("hyperfl-fig5", needs=("evidence", "dp"), paper_needs=("EMNIST letters, CIFAR-10, hours",), stand_in=True)
def figure5(scale: Scale, out: Path) -> MeasuredTable:
    """Draw what IG makes of one client's update under seven methods, and the analytic attack of HyperFL's."""
    return _drawn(IG, scale, out, "IG")


@table("hyperfl-fig6", needs=("evidence",), paper_needs=("EMNIST letters and CIFAR-10",), stand_in=True)
def figure6(scale: Scale, out: Path) -> MeasuredTable:
    """Draw what ROG's first stage makes of one client's update under FedAvg and HyperFL."""
    return _drawn(ROG, scale, out, "ROG without post-processing")


@table("hyperfl-fig7", needs=("evidence",), paper_needs=("EMNIST letters, CIFAR-10, hours",), stand_in=True)
def figure7(scale: Scale, out: Path) -> MeasuredTable:
    """Draw what the tailored attack makes of one client's update under HyperFL, and what the analytic one does."""
    return _drawn(TAILORED, scale, out, "the tailored attack")


def _drawn(lines: Sequence[Line], scale: Scale, out: Path, attack: str) -> MeasuredTable:
    found = attacked(lines, scale, out)
    names = [name for name in DATA if any(run.data == name for run in found)]
    return dataclasses.replace(
        measured(found, lines, scale), figures=tuple(_drawn_images(found, lines, name, attack) for name in names)
    )


def _drawn_images(
    found: Mapping[AttackRun, Mapping[str, Any]], lines: Sequence[Line], data: str, attack: str
) -> Figure:
    here = {(run.image, run.method, run.attack): value for run, value in found.items() if run.data == data}
    shown = sorted({image for image, _, _ in here})[:_SHOWN]
    shape = _SHAPES[data]
    truth = [picture(here[image, lines[0].method, lines[0].attack]["truth"], shape) for image in shown]
    made = [[picture(here[image, line.method, line.attack]["made"], shape) for image in shown] for line in lines]
    return image_grid(
        [truth, *made],
        rows=["original", *(line.title.replace(", ", ",\n") for line in lines)],
        columns=[str(image + 1) for image in shown],
        alt=f"Test images of {DATA[data]} above what {attack} reconstructs from one client's update, method by method.",
        caption=f"{DATA[data]}: images and their reconstructions by {attack}.",
    )
