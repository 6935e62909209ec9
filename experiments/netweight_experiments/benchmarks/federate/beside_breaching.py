"""IG beside breaching's `invertinggradients`: letters of EMNIST, one step on one image, one start, equal steps.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks.federate.beside_breaching CHECKOUT

CHECKOUT holds github.com/JonasGeiping/breaching, of which the attack alone is imported (without hydra and torchvision).
Victims are the sixteen letters after those of `inversion.py`. Settings are attack/invertinggradients.yaml's but for the
steps; its total variation, made for three channels, is given one. The file is written after every letter.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from torch import nn

from netweight.attacks.gradient_inversion.matching import MatchingConfig
from netweight.core.environment import describe
from netweight.methods.federate.task import small_cnn
from netweight.metrics.images import psnr, ssim
from netweight.metrics.intervals import bootstrap
from netweight_experiments.benchmarks.federate.inversion import CLASSES, MEAN, STD, attack, letters
from netweight_experiments.benchmarks.script import script, today, write


class Settings(dict):
    """A mapping whose values are attributes, too, as OmegaConf makes them."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


def settings(steps):
    """attack/invertinggradients.yaml over its defaults."""
    optim = Settings(optimizer="adam", signed="hard", step_size=0.1, boxed=True, max_iterations=steps, warmup=0,
                     step_size_decay="step-lr", langevin_noise=0.0, grad_clip=None, callback=10**9)  # fmt: skip
    return Settings(
        type="invertinggradients", attack_type="optimization", normalize_gradients=False, init="randn", optim=optim,
        objective=Settings(type="cosine-similarity", scale=1.0, task_regularization=0.0), augmentations=None,
        restarts=Settings(num_trials=1, scoring="cosine-similarity"), differentiable_augmentations=False,
        regularization=Settings(total_variation=Settings(scale=0.2, inner_exp=1, outer_exp=1)),
        impl=Settings(dtype="float", mixed_precision=False, JIT=None),
    )  # fmt: skip


def attacker_of(checkout):
    """The attack's class; the packages around it are not run."""
    for name in ("", ".attacks", ".cases", ".cases.models"):
        package = ModuleType(f"breaching{name}")
        package.__path__ = [str(checkout.joinpath("breaching", *name.split(".")[1:]))]
        sys.modules[f"breaching{name}"] = package
    sys.modules.setdefault("torchvision", ModuleType("torchvision"))
    from breaching.attacks.optimization_based_attack import OptimizationBasedAttacker

    return OptimizationBasedAttacker


def theirs(attacker, image, label, number, steps):
    """Attack one image by breaching."""
    model, loss = nn.Sequential(*small_cnn(1, 28, CLASSES, seed=number)), nn.CrossEntropyLoss()
    slopes = torch.autograd.grad(loss(model((image - MEAN) / STD), label), list(model.parameters()))
    about = SimpleNamespace(shape=(1, 28, 28), mean=[MEAN], std=[STD], modality="vision")
    sent = [{"parameters": [one.detach() for one in model.parameters()], "buffers": [], "metadata": about}]
    said = {"num_data_points": 1, "labels": label, "local_hyperparams": None}
    torch.manual_seed(number)
    one = attacker(model, loss, settings(steps))
    variation = one.regularizers[0]
    variation.groups, variation.weight = 1, variation.weight[:2]
    found, _ = one.reconstruct(sent, [{"gradients": list(slopes), "buffers": None, "metadata": said}], {})
    images = found["data"] * STD + MEAN
    return {"psnr": round(float(psnr(images, image)), 3), "ssim": round(float(ssim(images, image)), 4)}


def main():
    parser = script(__doc__, "federated/beside-breaching", whole=True)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--images", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)
    attacker, config = attacker_of(given.checkout), MatchingConfig(steps=given.steps, restarts=1)
    found = {"what": __doc__.splitlines()[0], "date": today(), "steps": given.steps, "environment": describe()}
    found["images"] = json.loads(given.output.read_text())["images"] if given.output.exists() else {}
    images, labels = letters(16 + given.images)
    for n in range(16, 16 + given.images):
        if str(n) not in found["images"]:
            image, label = images[n][None], labels[n][None]
            both = {
                "ours": attack(image, label, n, config),
                "breaching": theirs(attacker, image, label, n, given.steps),
            }
            found["images"][str(n)] = both
            gains = [one["ours"]["psnr"] - one["breaching"]["psnr"] for one in found["images"].values()]
            found["mean"] = {who: round(float(np.mean([one[who]["psnr"] for one in found["images"].values()])), 2)
                             for who in both} | {"difference": round(float(np.mean(gains)), 2)}  # fmt: skip
            if len(gains) >= 5:
                interval = bootstrap(gains, seed=0)
                found["mean"]["ci95"] = [round(interval.low, 2), round(interval.high, 2)]
            write(given.output, found)
            print(n, both, flush=True)


if __name__ == "__main__":
    main()
