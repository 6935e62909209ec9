"""Clipped sums of single examples' gradients: ours from one backward pass against Opacus' ghost clipping and vmap.

    python -m netweight_experiments.benchmarks federate.ghost_clipping

The paper's networks for 28 × 28 and 32 × 32 images, batches of 50 and 600, one thread; medians of ratios of times that
were taken in turn, and how far the sums differ. Opacus gives the clipped sum after two backward passes.
"""

from statistics import median
from types import SimpleNamespace

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

from netweight.methods.federate import ClientData, Task
from netweight.methods.federate.dp import PrivateStep, by_layers, by_vmap
from netweight.methods.federate.task import LocalModel, small_cnn
from netweight_experiments.timing import in_turns

CLIP = 0.5


def ways(channels, size, batch):
    """Return each way as a function that gives the flat clipped sum of all parameters."""
    body, head = small_cnn(channels, size, 10, seed=0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(batch, channels, size, size, generator=generator), torch.arange(batch) % 10
    task = Task(body, head, [ClientData((x, y), (x, y))])
    model = LocalModel(task)
    model.train("both")
    mask = torch.ones(batch, dtype=torch.bool)
    step = PrivateStep(model, task.initial_body(), task.initial_head(), (model.place(x), y), mask, "both", CLIP)

    whole = GradSampleModuleFastGradientClipping(
        nn.Sequential(*small_cnn(channels, size, 10, seed=0)), batch_first=True, loss_reduction="sum",
        max_grad_norm=CLIP, use_ghost_clipping=True,
    )  # fmt: skip
    # What Opacus' loss needs of an optimizer: it empties the gradients between the two passes.
    optimizer = SimpleNamespace(loss_reduction="sum", zero_grad=whole.zero_grad)
    criterion = DPLossFastGradientClipping(whole, optimizer, nn.CrossEntropyLoss(reduction="sum"), "sum")

    def ghost():
        whole.zero_grad()
        criterion(whole(x), y).backward()
        return torch.cat([p.grad.flatten() for p in whole.parameters()])

    def own(rule):
        found = rule(step)
        return torch.cat([found.body, found.head])

    return {"ours": lambda: own(by_layers), "opacus, ghost clipping": ghost, "vmap": lambda: own(by_vmap)}


def measure(channels, size, batch, repeats):
    """Return ratios of times to ours, and relative differences of the sums."""
    made = ways(channels, size, batch)
    sums = {name: way() for name, way in made.items()}
    times = in_turns(made, repeats, clock="wall")
    ours = sums["ours"]
    return {
        name: {
            "time, ratio to ours": round(median(a / b for a, b in zip(times[name], times["ours"], strict=True)), 2),
            "milliseconds": round(1000 * median(times[name]), 2),
            "difference": float((sums[name] - ours).norm() / ours.norm()),
        }
        for name in made
    }


def main(*, repeats: int = 15):
    cells = {
        f"{size} × {size}, batch {batch}": measure(channels, size, batch, repeats)
        for channels, size in ((1, 28), (3, 32))
        for batch in (50, 600)
    }
    return {"cells": cells}
