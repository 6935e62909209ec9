"""What adapters say of whom they were trained on, by how they are compared: changes, factors, canonical factors.

    python -m netweight_experiments.benchmarks space.gauge BANK [BANK ...]

BANKs are folders of `python -m netweight_experiments.toys.face_bank`. The subjects' attributes are read off adapters by
ridge regression on linear kernels, penalty chosen by leaving one out within the training part, R² on adapters left out
in five folds. A miniature: drawn faces or vehicles.

changes    Inner products of ΔW; they do not depend on how ΔW is written as up @ down.
factors    The reference's: all entries of both factors, standardized.
canonical  The same of factors brought to singular vectors, √σ on each side, signs by the first adapter.
regauged   "factors" after the factors of each adapter and module were multiplied by a random number and its inverse.
"""

import json
from pathlib import Path
from typing import Annotated

import torch

from netweight.methods.space.directions import Design, ridge
from netweight.methods.space.gram import inner_products
from netweight.methods.space.labels import read_labels
from netweight.nn import Adapter, AdapterStack, LowRank
from netweight.store.bank.bank import AdapterBank
from netweight.toys.faces import WORLDS
from netweight_experiments.toys.drawn_worlds import r_squared

FOLDS = 5


def entries(stack):
    """All entries of both factors, shape (n, entries), fp64."""
    return torch.cat([part[name].double().flatten(1) for name in stack.modules for part in (stack.down, stack.up)], 1)


def standardized(rows):
    deviation = rows.std(0)
    return (rows - rows.mean(0)) / torch.where(deviation > 0, deviation, 1.0)


def canonical(stack):
    """Factors as singular vectors times the root of their values; each down points as the first adapter's."""
    adapters = []
    for number in range(len(stack)):
        found = {}
        for name, change in stack.adapter(number).factors.items():
            kept, _ = LowRank(change.down.double(), change.up.double(), change.scale).truncated(change.rank)
            first = adapters[0].factors[name].down if adapters else kept.down
            signs = torch.where((kept.down * first).sum(1) < 0, -1.0, 1.0).double()
            found[name] = LowRank(kept.down * signs[:, None], kept.up * signs)
        adapters.append(Adapter(found))
    return AdapterStack.of(adapters)


def regauged(stack):
    """The same changes, written with other factors."""
    noise, down, up = torch.Generator().manual_seed(0), {}, {}
    for name in stack.modules:
        factor = torch.randn(len(stack), 1, 1, generator=noise).mul(0.7).exp()
        factor = factor * torch.randn(factor.shape, generator=noise).sign()
        down[name], up[name] = stack.down[name] * factor, stack.up[name] / factor
    return AdapterStack(down, up, stack.scale, stack.ranks)


def kernels(stack):
    linear = {"factors": entries(stack), "canonical": entries(canonical(stack)), "regauged": entries(regauged(stack))}
    products = {name: (rows := standardized(values)) @ rows.T for name, values in linear.items()}
    return {"changes": inner_products(stack, stack)} | products


def probed(kernel, truth, attributes):
    """R² of each attribute on adapters left out."""
    values, vectors = torch.linalg.eigh(kernel)
    rows = vectors * values.clamp_min(0).sqrt()  # whose inner products the kernel is
    said, fold = torch.empty_like(truth), torch.arange(len(truth)) % FOLDS
    for part in range(FOLDS):
        train, test = fold != part, fold == part
        design, ones = Design.of(rows[train]), torch.ones(int(train.sum()), dtype=torch.float64)
        said[test] = torch.stack([ridge(design, column, ones)(rows[test]) for column in truth[train].T], 1)
    return dict(zip(attributes, r_squared(truth, said).tolist(), strict=True))


def main(
    banks: tuple[Path, ...],
    /,
    *,
    world: Annotated[str, WORLDS] = "face",
    numbers: tuple[int, ...] = (64, 128, 256, 512, 1000),
):
    rows, drawn = [], WORLDS[world]
    for folder in banks:
        bank = AdapterBank.open(folder / "bank")
        labels = read_labels(folder / "labels.csv", bank.names)
        truth = torch.stack([labels[name].values for name in drawn.attributes], 1)
        about = json.loads((folder / "training.json").read_text())
        every = kernels(bank.stack(0, len(bank)))
        for count in sorted({min(number, len(bank)) for number in numbers}):
            for name, kernel in every.items():
                found = probed(kernel[:count, :count], truth[:count], drawn.attributes)
                rows.append(
                    {"bank": folder.name, "start": about["about"]["bank"]["recipe"]["start"], "n": count,
                     "kernel": name, "r_squared": found, "mean": sum(found.values()) / len(found),
                     "strong": sum(found[one] for one in drawn.strong) / len(drawn.strong)}
                )  # fmt: skip
                print(rows[-1], flush=True)
    return {"folds": FOLDS, "rows": rows}
