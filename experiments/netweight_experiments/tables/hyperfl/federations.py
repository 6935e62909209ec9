"""HyperFL's tables 1 and 4 and figures 4 and 8: accuracy, losses, seconds and embeddings of federations.

A run is resumable by the round: its checkpoint lies in a folder of its own beside the ledger.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from netweight.core.digests import digest_config, digest_tensor
from netweight.core.progress import Progress
from netweight.core.threads import usable_cores
from netweight.data.images import Images, load
from netweight.errors import FederationStopped, UsageError
from netweight.methods.federate import Federation, LocalTraining, Method, Task, train
from netweight.methods.federate.accounting import noise_multiplier_for_all
from netweight.methods.federate.algorithms.pfedhn import PFedHN
from netweight.methods.federate.catalog import entry_of
from netweight.methods.federate.partition import federated_images
from netweight.methods.federate.plan import REFERENCE_SPLIT, FederationPlan
from netweight.metrics.intervals import t_interval
from netweight.report.finding import Finding
from netweight_experiments.federated_rounds import Contender, random_federation, speed_findings, time_rounds
from netweight_experiments.tables.grid import N, chosen, finished, grid, run_each
from netweight_experiments.tables.registry import Column, MeasuredTable, Scale, table

# What `methods.federate.train` takes.
Parts: TypeAlias = "tuple[Task, Method, Federation]"


@cache
def images_of(data: str) -> Images:
    """Return a data set by its name, read once for all runs of a table."""
    return load(data)


# How often accuracy is measured in a run of 200 rounds, and in a short one.
_EVALUATIONS, _FEW = 40, 4
# Privacy budget of the paper's private methods.
_EPSILON, _DELTA = 4.0, 1e-5
# Test images of each client where a miniature says how many it trains on.
_TESTED = 200


@dataclass(frozen=True)
class FederatedRun:
    """One federation."""

    data: str
    """A data set of `data.images.load`."""
    method: str
    """A method by its name on the command line."""
    clients: int = 20
    """Number of clients; of 100, as in the paper, 30 % are asked in each round, otherwise all."""
    rounds: int = 200
    """Number of rounds."""
    seed: int = 520
    until_plateau: bool = False
    """Of runs of earlier releases: whether they ended once accuracy stopped rising."""
    factor: float = 1.0
    """Learning rate, as a multiple of the method's own."""
    images: int | None = None
    """Training images of each client; None for the paper's."""

    @property
    def name(self) -> str:
        """A name for files, which leaves out the number of rounds so that a longer run continues a shorter one."""
        more = f"-x{self.factor:g}" * (self.factor != 1) + f"-of-{self.images}" * bool(self.images)
        return f"{self.data}-{self.clients}-{self.method}-{self.seed}{more}"


# Accuracy, losses and seconds of runs, by round.
Curves = Mapping[FederatedRun, Mapping[str, Any]]


def plan_of(run: FederatedRun) -> FederationPlan:
    """Return the paper's settings for a run: split, schedule, budget; of 100 clients 30 % are asked in each round."""
    own, private = entry_of(run.method).training, entry_of(run.method).private
    return FederationPlan(
        data=run.data,
        method=run.method,
        aggregator="mean",  # the paper's
        clients=run.clients,
        rounds=run.rounds,
        fraction=0.3 if run.clients == 100 else 1.0,
        seed=run.seed,
        evaluate_every=max(1, run.rounds // (_EVALUATIONS if run.rounds > _EVALUATIONS else _FEW)),
        lr=None if own is None or run.factor == 1 else own.lr * run.factor,
        noise_multiplier=1.0 if private else None,  # replaced where the clients' numbers of examples are known
    )


def _parts_of(run: FederatedRun) -> Parts:
    plan = plan_of(run)
    task = plan.task()
    if run.images is not None or run.seed == SEARCHED:
        split, sizes = REFERENCE_SPLIT + (run.seed == SEARCHED), None if run.images is None else (run.images, _TESTED)
        parts = federated_images(images_of(run.data), clients=run.clients, seed=split, per_client=sizes)
        task = dataclasses.replace(task, data=dict(enumerate(parts)))
    if entry_of(run.method).private:  # the noise that the paper computes, each client counted on its own
        counts = [task.client(client).n for client in task.clients]
        about = {"batch_size": plan.batch_size, "epochs": plan.epochs * plan.rounds}
        plan = plan.replace(noise_multiplier=noise_multiplier_for_all(_EPSILON, _DELTA, sizes=counts, **about))
    method = plan.make_method(task)
    if isinstance(method, PFedHN):
        method = dataclasses.replace(method, training=method.training.replace(lr=method.training.lr * run.factor))
    return task, method, plan


def run_one(run: N, *, folder: Path, parts_of: Callable[[N], Parts]) -> dict[str, Any]:
    """Train one federation, to the last round or to a plateau; return its curve as plain values."""
    task, method, settings = parts_of(run)
    try:
        done = train(task, method, settings, folder=folder / run.name, save_every=5, progress=Progress("auto"))
    except FederationStopped as stopped:
        if not isinstance(run, FederatedRun) or run.seed != SEARCHED:
            raise
        return {"before": [0.0], "after": [0.0], "stopped": str(stopped)}  # a learning rate that diverges is not chosen
    evaluated = [r for r in done.rounds if r.after]
    return {
        "rounds": [r.round for r in evaluated],
        "before": [r.mean_before for r in evaluated],
        "after": [r.mean_after for r in evaluated],
        "loss": [r.mean_loss for r in done.rounds],
        "seconds": [r.seconds for r in done.rounds],
        "refused": {r.round: dict(r.refusals) for r in done.rounds if r.refusals},
        "data": digest_config([digest_tensor(task.client(number).train[0]) for number in task.clients]),
    }


def run_all(
    runs: Sequence[N],
    out: Path,
    *,
    parts_of: Callable[[N], Parts] = _parts_of,  # type: ignore[assignment]
) -> list[Any]:
    """Train federations one after another, each on all cores; finished ones are remembered."""
    return run_each(partial(run_one, folder=out, parts_of=parts_of), runs, folder=out)


# Methods by their names on the command line, and the rows that they make.
METHODS = {
    "local": "Local-only",
    "fedavg": "FedAvg",
    "pfedhn": "pFedHN",
    "dp-fedavg": "DP-FedAvg",
    "centaur": "CENTAUR",
    "ppsgd": "PPSGD",
    "hyperfl": "HyperFL",
    "pfedhn-pc": "pFedHN-PC",
    "fedavg-private-head": "FedAvg, private head",
    "fedprox": "FedProx",
    "ditto": "Ditto",
    "fedbn": "FedBN",
    "scaffold": "SCAFFOLD",
    "hyperfl-body": "HyperFL from the body",
    "hyperfl-whole": "HyperFL, the head generated too",
}
# Data set and number of clients, and the published column beside which they are laid.
COLUMNS = {
    ("fashion-mnist", 20): "Fashion-MNIST (20 clients)",
    ("fashion-mnist", 100): "Fashion-MNIST (100 clients)",
    ("emnist-letters", 20): "EMNIST (20 clients)",
    ("emnist-letters", 100): "EMNIST (100 clients)",
    ("cifar10", 20): "CIFAR-10 (20 clients)",
    ("cifar10", 100): "CIFAR-10 (100 clients)",
}
MINIATURE = "digits"
# Methods whose published row is the accuracy of the received model: their clients have no model of their own.
_READ_BEFORE = ("fedavg", "dp-fedavg", "pfedhn")
_VARIANTS = ("hyperfl-body", "hyperfl-whole")
SEEDS = (520, 521, 522)
# Every method is searched alike: these multiples of its own learning rate, on another split and seed, for half the
# rounds, 20 clients, by accuracy after local training. Where the best lies at an end, the range grows by the step.
FACTORS, SEARCHED, STEP, WIDEST = (0.25, 1.0, 4.0), 519, 4.0, 1024.0
_STAND_INS = {
    "emnist-letters": "EMNIST letters (26 classes, both cases in one) stand in for EMNIST byclass (62 classes).",
    "cifar10": "CIFAR-10 comes as JPEG pictures, a stand-in for the lossless ones.",
}
_TARGETS = {20: 88.3, 100: 90.4}


@table("hyperfl-table1", needs=("evidence", "dp"), paper_needs=("Fashion-MNIST and days on a CPU",), stand_in=True)
def table1(
    scale: Scale, out: Path, *, only: str | None = None, rounds: int | None = None, images: int | None = None
) -> MeasuredTable:
    """Tune and train every method on every data set, three seeds; report accuracy before and after local training."""
    cells = [(MINIATURE, 20)] if scale == "small" else list(COLUMNS)
    rounds = rounds or (10 if scale == "small" else 200)
    runs = [
        FederatedRun(data, method, clients, rounds, seed, images=images)
        for (data, clients), seed, method in itertools.product(cells, SEEDS, METHODS)
    ]
    for run in chosen(runs, only):
        known: Curves = {}
        while missing := [one for one in _searches(run, known) if one not in known]:
            run_all(missing, out)  # those that are remembered are not run again
            before, known = known, finished(out, FederatedRun)
            if not known.keys() - before.keys():  # the others have failed
                break
        run_all([one for one in [_tuned(run, finished(out, FederatedRun))] if one], out)
    known = finished(out, FederatedRun)
    tuned = [one for run in runs if (one := _tuned(run, known)) is not None]
    found = {run: known[run] for run in tuned if run in known}
    if not found:
        raise UsageError("No run of the table is finished.", cure="Leave --only out, or give another pattern.")
    return _measured(found, cells)


def _searches(run: FederatedRun, known: Curves) -> list[FederatedRun]:
    """Return the runs by which the learning rate of a run's method is found, wider where the best lies at an end."""
    short = dataclasses.replace(run, clients=20, rounds=max(1, run.rounds // 2), seed=SEARCHED)
    factors = list(FACTORS)
    while True:
        tried = [dataclasses.replace(short, factor=factor) for factor in factors]
        if any(one not in known for one in tried):
            return tried
        best = _best(tried, known).factor
        if best == factors[-1] < WIDEST:
            factors.append(best * STEP)
        elif best == factors[0] > 1 / WIDEST:
            factors.insert(0, best / STEP)
        else:
            return tried


def _best(tried: Sequence[FederatedRun], known: Curves) -> FederatedRun:
    return max(tried, key=lambda one: known[one]["after"][-1])


def _tuned(run: FederatedRun, known: Curves) -> FederatedRun | None:
    """Return a run at the learning rate that was found for it; None while the search is not finished."""
    tried = _searches(run, known)
    if any(one not in known for one in tried):
        return None
    return dataclasses.replace(run, factor=_best(tried, known).factor)


def _measured(found: Curves, cells: Sequence[tuple[str, int]]) -> MeasuredTable:
    rows = {
        f"{title}, {reading} local training": (method, reading)
        for method, title in METHODS.items()
        for reading in ("before", "after")
        if any(_by_seed(found, cell, method, reading) for cell in cells)
    }

    def accuracy(cell: tuple[str, int]) -> Callable[[tuple[str, str]], float | None]:
        return lambda row: mean(each) if (each := _by_seed(found, cell, *row).values()) else None

    one = next(iter(found))
    rounds, real = one.rounds, one.rounds == 200 and one.images is None and one.data != MINIATURE
    differs = [_STAND_INS[name] for name in sorted({run.data for run in found} & set(_STAND_INS))]
    if not real:
        size = "71" if one.data == MINIATURE else one.images or "as many as the paper's"
        differs.append(f"A miniature: {one.data}, clients of {size} images, {rounds} rounds.")
    return grid(
        rows,
        [(Column(COLUMNS.get(cell, "digits (20 clients)"), "%", "higher"), accuracy(cell)) for cell in cells],
        labels={
            name: METHODS[method]
            for name, (method, reading) in rows.items()
            if (reading == "before") == (method in _READ_BEFORE)
        },
        differs=(
            *differs,
            "Evaluation regenerates weights; the reference code evaluates HyperFL by the last round's.",
            "FedAvg, DP-FedAvg and pFedHN are laid beside the published rows by the accuracy before local training, "
            "the others by the accuracy after it: the paper's table mixes the two readings.",
            "Private methods sample by Poisson, so that their budget holds; the reference shuffles.",
            "The network has no normalization layers, so that FedBN is FedAvg.",
        ),
        findings=tuple(_findings(found, real)),
        notes=(
            f"Mean over clients in the last of {rounds} rounds, and over seeds where several ran.",
            "Learning rates as multiples of each method's own, of "
            + ", ".join(f"{factor:g}" for factor in FACTORS)
            + " and further where the best lies at an end,"
            + f" by accuracy after local training in {max(1, rounds // 2)} rounds of 20 clients on another split, 0 of "
            + "those that diverge: "
            + ", ".join(sorted({f"{run.data} {run.method} {run.factor:g}" for run in found}))
            + ".",
        ),
        inputs={f"{run.data}, {run.clients} clients": curve["data"] for run, curve in found.items()},
    )


def _by_seed(found: Curves, cell: tuple[str, int], method: str, reading: str = "after") -> dict[int, float]:
    """Accuracy in the last round, in percent."""
    return {
        run.seed: 100 * curve[reading][-1]
        for run, curve in found.items()
        if (run.data, run.clients, run.method) == (*cell, method)
    }


def _findings(found: Curves, whole: bool) -> list[Finding]:
    findings = []
    for cell in sorted({(run.data, run.clients) for run in found}):
        real = whole and cell[0] == "fashion-mnist"
        where, best = f"{cell[0]}, {cell[1]} clients", _by_seed(found, cell, "fedavg")
        for method in ("hyperfl", *_VARIANTS):
            ours = _by_seed(found, cell, method)
            if not ours:
                continue
            target = _TARGETS[cell[1]] if real and method == "hyperfl" else None
            findings.append(_finding(f"{METHODS[method]}, after, {where}", ours, target))
            if best and method in _VARIANTS:
                gain = {seed: value - mean(best.values()) for seed, value in ours.items()}
                target = 0.0 if real and method == "hyperfl-whole" else None
                findings.append(_finding(f"{METHODS[method]} less FedAvg, both after, {where}", gain, target, "points"))
    return findings


def _finding(name: str, values: Mapping[int, float], target: float | None, unit: str = "%") -> Finding:
    ci95 = t_interval(list(values.values())).ci95 if len(values) > 1 else None
    more: dict[str, Any] = {"unit": unit, "better": "higher", "target": target}
    return Finding(name, mean(values.values()), ci95=ci95, n=len(values), seeds=tuple(values), **more)


_TITLES = {
    "fedavg": "FedAvg",
    "dp-fedavg": "DP-FedAvg",
    "ppsgd": "PPSGD",
    "centaur": "CENTAUR",
    "hyperfl": "HyperFL",
    "hyperfl-body": "HyperFL from the body",
}
_REPEATS = 5


@table("hyperfl-table4", needs=("evidence",), paper_needs=("a quiet machine for an hour",), stand_in=True)
def table4(scale: Scale, out: Path) -> MeasuredTable:
    """Time rounds of every method in turn, in one process; report ratios to FedAvg and to dense training."""
    clients, images, training = (20, 600, LocalTraining()) if scale == "paper" else (2, 50, LocalTraining(epochs=1))
    workers = (1, 2) if usable_cores() > 1 and scale == "paper" else (1,)
    times = time_rounds(
        random_federation(clients, images), training, workers=workers, repeats=_REPEATS, progress=Progress("auto")
    )
    fastest = max(workers)
    published = {
        _name(one): _TITLES[one.method]
        for one in times
        if one.engine and one.threads == fastest and one.method != "hyperfl-body"
    }
    return grid(
        {_name(one): taken for one, taken in times.items()},
        [
            (Column("time per round", "s", "lower"), lambda taken: median(taken.wall)),
            (Column("CPU time per round", "s", "lower"), lambda taken: median(taken.cpu)),
        ],
        labels=published,
        differs=(
            f"{clients} clients with {images} random images of Fashion-MNIST's size; the paper times EMNIST, on a"
            " machine that it does not name, so that ratios alone compare.",
            "Private methods compute each example's gradient by vmap and sample by Poisson; the reference runs one"
            " backward pass per example.",
        ),
        findings=tuple(speed_findings(times, seed=0, targets=scale == "paper")),
        notes=(
            f"Medians of {_REPEATS} rounds of each, one after another in an order drawn anew; aggregation is part of a"
            " round, evaluation is not.",
        ),
    )


def _name(one: Contender) -> str:
    return f"{_TITLES[one.method]}{one.label.removeprefix(one.method)}"
