"""IG measured: letters of EMNIST from the gradient that a FedAvg client sends after one step on one image.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks.federate.inversion

Each image gets its own network, untrained, and its own starting point; the label is known, as in the paper. Images are
a random draw from the test letters, in the mean and deviation of MNIST. The file is written after every image, so that
a run that is stopped leaves what it measured.
"""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from netweight.attacks.gradient_inversion.client import gradient_of, known_parameters
from netweight.attacks.gradient_inversion.matching import MatchingConfig, invert
from netweight.core.environment import describe
from netweight.methods.federate.folder import small_cnn
from netweight.metrics.images import psnr, ssim
from netweight.metrics.intervals import bootstrap
from netweight_experiments.benchmarks.script import script, today, write

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


def summary(rows):
    """Mean with its interval, and median, of each metric."""
    found = {}
    for metric in ("psnr", "ssim"):
        values = [row[metric] for row in rows]
        found[metric] = {"mean": round(float(np.mean(values)), 4), "median": round(float(np.median(values)), 4)}
        if len(values) >= 5:
            interval = bootstrap(values, seed=SEED)
            found[metric]["ci95"] = [round(interval.low, 4), round(interval.high, 4)]
    return found


def main():
    parser = script(__doc__, "gradient-inversion")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--steps", type=int, default=MatchingConfig.steps)
    parser.add_argument("--restarts", type=int, default=MatchingConfig.restarts)
    parser.add_argument("--distance", choices=["cosine", "squared"], default=MatchingConfig.distance)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = MatchingConfig(steps=arguments.steps, restarts=arguments.restarts, distance=arguments.distance)
    result = {
        "benchmark": "gradient-inversion",
        "date": today(),
        "attack": "IG",
        "threat": "FedAvg, gradient of one step on one image, label known, untrained SmallCNN of 26 classes",
        "data": "EMNIST letters, test",
        "config": {"steps": config.steps, "restarts": config.restarts, "lr": config.lr, "signed": config.signed}
        | {"distance": config.distance}
        | {"total_variation": config.total_variation, "annealed": config.annealed, "schedule": config.schedule},
        "seeds": f"images {SEED}; network and starting point: the image's number",
        "environment": describe(),
    }
    rows = []
    for number, (image, label) in enumerate(zip(*letters(arguments.images), strict=True)):
        rows.append(attack(image[None], label[None], number, config))
        print(number, rows[-1], flush=True)
        write(arguments.output, result | {"n": len(rows), "summary": summary(rows), "images": rows})


if __name__ == "__main__":
    main()
