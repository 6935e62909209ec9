"""One attack on one client's first update: what a server makes of it, and how near that is to the client's image.

A client holds one image and takes one step; the server knows model, settings and initial state, and the label, as in
the paper. Each image has a network of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.attacks.gradient_inversion.client import Reconstruction, gradient_of
from netweight.attacks.gradient_inversion.matching import MatchingConfig, ROGConfig, invert, rog
from netweight.attacks.gradient_inversion.tailored import PeelingConfig, TailoredConfig, invert_generated, tailored
from netweight.core import seeds
from netweight.core.progress import Progress
from netweight.data.images import Images
from netweight.methods.federate import ClientData, Task
from netweight.methods.federate.algorithms.hyperfl import HYPERNETWORK
from netweight.methods.federate.dp import noise_multiplier
from netweight.methods.federate.engine import Run
from netweight.methods.federate.folder import METHODS, named_method
from netweight.methods.federate.method import without
from netweight.methods.federate.partition import client_sizes
from netweight.methods.federate.report import Observation, ThreatModel, observe, read_update
from netweight.methods.federate.task import small_cnn
from netweight.metrics.images import psnr, ssim
from netweight_experiments.tables.grid import as_text, finished, run_each
from netweight_experiments.tables.hyperfl.federations import images_of

# Clients of the attacked federation, each with one image; so many images can be attacked.
CLIENTS = 20
SEED = 0
_EPSILON, _DELTA, _EPOCHS, _BATCH = 4.0, 1e-5, 1000, 50


@final
@dataclass(frozen=True)
class AttackRun:
    """One attack on one image."""

    data: str  # a data set of `data.images.load`; test images are attacked
    method: str  # a method of `methods.federate.named_method`
    attack: str  # "ig", "rog", "tailored" or "analytic"; the latter two are for HyperFL
    image: int  # number of the image; also the seed of the network and of the attack
    steps: int | None = None  # steps of the attack; None for as many as it takes by default

    @property
    def name(self) -> str:
        """A name for messages and patterns."""
        return f"{self.data}-{self.method}-{self.attack}-{self.image}"


def attack_all(runs: Sequence[AttackRun], folder: Path) -> None:
    """Attack one image after another, unless the folder remembers it."""
    left = set(runs) - set(finished(folder, AttackRun))
    with Progress("auto").task("attacks", total=len(left), unit="images") as work:
        run_each(partial(attack_one, tell=work.update), runs, folder=folder)


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


def _victim(run: AttackRun, images: Images) -> Run:
    """Return a federation before its first round, each client with one test image."""
    generator = seeds.torch_generator(SEED, "attacked images")
    numbers = torch.randperm(len(images.test[1]), generator=generator)[:CLIENTS]
    inputs, targets = images.normalized(images.test[0][numbers]), images.test[1][numbers]
    singles = [(inputs[k : k + 1], targets[k : k + 1]) for k in range(CLIENTS)]
    channels, size, _ = images.shape
    body, head = small_cnn(channels, size, len(images.classes), seed=run.image)
    task = Task(body, head, [ClientData(one, one) for one in singles])
    noise = _noise(run.data) if METHODS[run.method].private else None
    return Run(task, named_method(run.method, noise_multiplier=noise), {}, {}, (), run.image)


@cache
def _noise(data: str) -> float:
    """Return the noise that table 1's schedule asks for at the paper's budget."""
    size = client_sizes(images_of(data), CLIENTS)[0]
    return noise_multiplier(_EPSILON, _DELTA, n=size, batch_size=_BATCH, epochs=_EPOCHS)


def _bounds(images: Images) -> tuple[Tensor, Tensor]:
    """Return black and white as the model sees them."""
    mean, std = torch.tensor(images.mean), torch.tensor(images.std)
    return -mean / std, (1 - mean) / std


def _analytic(run: AttackRun, victim: Run, seen: Observation, images: Images) -> tuple[Reconstruction, float]:
    """Read the gradient and undo the body; return the image and the cosine of the gradient with the true one."""
    recovered = read_update(victim, seen.sent, seen.received())
    config = PeelingConfig() if run.steps is None else PeelingConfig(softening=run.steps, rounds=max(1, run.steps // 2))
    shape = (1, *images.shape)
    found = invert_generated(
        recovered, victim.task.body, shape=shape, bounds=_bounds(images), config=config, seed=run.image
    )
    return found, float(torch.cosine_similarity(recovered.first, seen.gradient.double(), dim=0))


def _search(run: AttackRun, victim: Run, seen: Observation, images: Images) -> Reconstruction:
    """Search the image by IG, ROG or the tailored attack."""
    received = seen.received()
    training = victim.method.training  # type: ignore[attr-defined]  # all of them have one
    shape, bounds, classes = (1, *images.shape), _bounds(images), len(images.classes)
    if run.attack == "tailored":
        return tailored(
            seen.sent, received, victim.task.body, shape=shape, classes=classes,
            features=victim.task.head_layout.shapes[0][1], lr=training.lr, weight_decay=training.weight_decay,
            labels=seen.labels, bounds=bounds, config=TailoredConfig(steps=run.steps or TailoredConfig.steps),
            seed=run.image,
        )  # fmt: skip
    model = nn.Sequential(victim.task.body, victim.task.head)
    model.train()
    slopes = {name: (value - received[name]) / training.lr - training.weight_decay * value
              for name, value in seen.sent.items()}  # fmt: skip
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


def _known(victim: Run, seen: Observation, slopes: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights that the client began with, and the gradients that it sent."""
    head = without("head.", seen.sent) or victim.task.head_layout.split(victim.task.initial_head())
    return _named(without("body.", seen.sent), head), _named(without("body.", slopes), without("head.", slopes))


def _guessed(
    run: AttackRun, victim: Run, seen: Observation, slopes: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights that a guessed embedding generates with a guessed head, and the gradients to match there."""
    # The update of the hypernetwork's heads is imitated by g [m, 1]ᵀ, with the guess's code m and a gradient g of the
    # body. Its product with what was observed, G and b, is ⟨g, G m + b⟩: so the cosine of the two has the direction of
    # g that fits G m + b best, and the squared distance is least there too, scaled by |m|² + 1. The trunk is left out.
    layout, head = victim.task.body_layout, victim.task.head
    sent = {name.removeprefix(HYPERNETWORK): value for name, value in seen.sent.items()}
    generator = seeds.torch_generator(SEED, "guess", run.image)
    embedding = torch.randn(sent["trunk.0.weight"].shape[1], generator=generator)
    code = torch.relu(sent["trunk.0.weight"] @ embedding + sent["trunk.0.bias"])
    body = sent["heads.weight"] @ code + sent["heads.bias"]
    product = slopes[f"{HYPERNETWORK}heads.weight"] @ code + slopes[f"{HYPERNETWORK}heads.bias"]
    fresh: nn.Module = small_cnn(classes=len(_weights(head)["bias"]), seed=seeds.derive(SEED, "guess", run.image))[1]
    return (_named(layout.split(body), _weights(fresh)), _named(layout.split(product / (code.square().sum() + 1)), {}))


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}
