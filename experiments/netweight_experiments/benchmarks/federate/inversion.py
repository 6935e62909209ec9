"""IG measured: letters of EMNIST from the gradient that a FedAvg client sends after one step on one image.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.inversion

Each image gets its own network, untrained, and its own starting point; the label is known, as in the paper. Images are
a random draw from the test letters, in the mean and deviation of MNIST. The file is written after every image, so that
a run that is stopped leaves what it measured. `--beside CHECKOUT`: github.com/JonasGeiping/breaching, whose
`invertinggradients` attacks the same letters in as many steps; its total variation is given one channel.
"""

import os
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal

import numpy as np
import torch
from torch import nn

from netweight.attacks.gradient_inversion.client import gradient_of, known_parameters
from netweight.attacks.gradient_inversion.matching import MatchingConfig, invert
from netweight.methods.federate.small_cnn import small_cnn
from netweight.metrics.images import psnr, ssim
from netweight.metrics.intervals import bootstrap

SEED, MEAN, STD, CLASSES = 0, 0.1307, 0.3081, 26


def letters(count):
    """Images within 0 and 1, shape `(count, 1, 28, 28)`, and labels from 0."""
    with np.load(Path(os.environ["NETWEIGHT_DATA"]) / "emnist_letters" / "test.npz") as stored:
        chosen = np.random.default_rng(SEED).permutation(len(stored["label"]))[:count]
        images, labels = stored["image"][chosen], stored["label"][chosen]
    return torch.tensor(images)[:, None].float() / 255, torch.tensor(labels).long() - 1


def attack(image, label, number, config):
    """Attack one image, shape `(1, 1, 28, 28)`; how near the attack came, without and with knowledge of the truth."""
    model = nn.Sequential(*small_cnn(1, 28, CLASSES, seed=number))
    client, params = gradient_of(model), known_parameters(model)
    observed = client(params, ((image - MEAN) / STD, label))
    started = time.process_time()
    found = invert(
        client, params, observed, shape=tuple(image.shape), labels=label, config=config, seed=number,
        bounds=(-MEAN / STD, (1 - MEAN) / STD),
    )  # fmt: skip
    seconds = time.process_time() - started
    images = found.images * STD + MEAN
    return {
        "psnr": round(float(psnr(images, image)), 3),
        "ssim": round(float(ssim(images, image)), 4),
        "objective": found.objective,
        "cpu_seconds": round(seconds, 1),
    }


def by_breaching(checkout, model, gradients, shape, labels, *, mean, std, steps, seed):
    """Attack gradients by breaching's `invertinggradients`, without its packages around the attack.

    Returns the images as the model takes them, shape `(n, *shape)`; `mean` and `std` are those of its pixels.
    """
    for name in ("", ".attacks", ".cases", ".cases.models"):
        package = sys.modules.setdefault(f"breaching{name}", ModuleType(f"breaching{name}"))
        package.__path__ = [str(checkout.joinpath("breaching", *name.split(".")[1:]))]
    sys.modules.setdefault("torchvision", ModuleType("torchvision"))

    class Settings(dict):
        __getattr__ = dict.get

    settings = Settings(
        type="invertinggradients", init="randn", augmentations=Settings(),
        restarts=Settings(num_trials=1, scoring="euclidean"), impl=Settings(dtype="float", mixed_precision=False),
        regularization=Settings(total_variation=Settings(scale=0.2, inner_exp=1, outer_exp=1)),
        objective=Settings(type="cosine-similarity", scale=1.0, task_regularization=0.0),
        optim=Settings(optimizer="adam", signed="hard", step_size=0.1, boxed=True, max_iterations=steps, warmup=0,
                       step_size_decay="step-lr", langevin_noise=0.0, callback=10**9),
    )  # fmt: skip
    about = SimpleNamespace(shape=tuple(shape), mean=[mean] * shape[0], std=[std] * shape[0], modality="vision")
    sent = [{"parameters": [*model.parameters()], "buffers": [], "metadata": about}]
    said = {"num_data_points": len(labels), "labels": labels, "local_hyperparams": None}
    torch.manual_seed(seed)
    attack = import_module("breaching.attacks.optimization_based_attack")
    attacker = attack.OptimizationBasedAttacker(model, nn.CrossEntropyLoss(), settings)
    attacker.regularizers[0].groups = shape[0]
    attacker.regularizers[0].weight = attacker.regularizers[0].weight[: 2 * shape[0]]
    found, _ = attacker.reconstruct(sent, [{"gradients": list(gradients), "buffers": None, "metadata": said}], {})
    return found["data"]


def letter_by_breaching(checkout, image, label, number, steps):
    """Attack one letter by breaching; PSNR."""
    model = nn.Sequential(*small_cnn(1, 28, CLASSES, seed=number))
    loss = nn.functional.cross_entropy(model((image - MEAN) / STD), label)
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    found = by_breaching(
        checkout, model, slopes, (1, 28, 28), label, mean=MEAN, std=STD, steps=steps, seed=number
    )  # fmt: skip
    return round(float(psnr(found * STD + MEAN, image)), 3)


def summary(rows):
    """Mean with its interval, and median, of each metric."""
    found = {}
    for metric in ("psnr", "ssim", "breaching", "ahead of breaching") if "breaching" in rows[0] else ("psnr", "ssim"):
        values = [row[metric] for row in rows]
        found[metric] = {"mean": round(float(np.mean(values)), 4), "median": round(float(np.median(values)), 4)}
        if len(values) >= 5:
            interval = bootstrap(values, seed=SEED)
            found[metric]["ci95"] = [round(interval.low, 4), round(interval.high, 4)]
    return found


def main(
    *,
    images: int = 16,
    first: int = 0,
    beside: Path | None = None,
    steps: int = MatchingConfig.steps,
    restarts: int = MatchingConfig.restarts,
    distance: Literal["cosine", "squared"] = MatchingConfig.distance,
):
    config = MatchingConfig(steps=steps, restarts=restarts, distance=distance)
    about = {
        "attack": "IG",
        "threat": "FedAvg, gradient of one step on one image, label known, untrained SmallCNN of 26 classes",
        "data": "EMNIST letters, test",
        "config": asdict(config),
        "seeds": f"images {SEED}; network and starting point: the image's number",
    }
    rows = []
    pictures, labels = letters(first + images)
    for number in range(first, len(pictures)):
        image, label = pictures[number][None], labels[number][None]
        rows.append(attack(image, label, number, config))
        if beside:
            rows[-1]["breaching"] = letter_by_breaching(beside, image, label, number, config.steps)
            rows[-1]["ahead of breaching"] = round(rows[-1]["psnr"] - rows[-1]["breaching"], 3)
        print(number, rows[-1], flush=True)
        yield about | {"n": len(rows), "summary": summary(rows), "images": rows}
