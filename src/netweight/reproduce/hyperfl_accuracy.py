"""HyperFL's table 1: accuracy of every method before and after local training; and figure 4, their losses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from netweight.errors import UsageError
from netweight.report.finding import Column, Finding
from netweight.reproduce.federated_run import FederatedRun, run_all
from netweight.reproduce.registry import Measured, Row, Scale, table
from netweight.reproduce.resumed import chosen, finished

__all__ = ["COLUMNS", "METHODS", "runs_of_table1", "table1"]

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
    "hyperfl-body": "HyperFL from the body",
    "hyperfl-whole": "HyperFL, the head generated too",
}
"""Methods by their names on the command line, and the rows that they make."""
COLUMNS = {
    ("emnist-letters", 20): "EMNIST (20 clients)",
    ("emnist-letters", 100): "EMNIST (100 clients)",
    ("fashion-mnist", 20): "Fashion-MNIST (20 clients)",
    ("fashion-mnist", 100): "Fashion-MNIST (100 clients)",
    ("cifar10", 20): "CIFAR-10 (20 clients)",
    ("cifar10", 100): "CIFAR-10 (100 clients)",
}
"""Data set and number of clients, and the published column beside which they are laid."""
_READ_BEFORE = ("fedavg", "dp-fedavg", "pfedhn")
"""Methods whose published row is the accuracy of the received model: their clients have no model of their own."""
_VARIANTS = ("hyperfl-body", "hyperfl-whole")
SEEDS = (520, 521, 522)
MINIATURE = "digits"
_STAND_INS = {
    "emnist-letters": "EMNIST letters (26 classes, both cases in one) stand in for EMNIST byclass (62 classes).",
    "cifar10": "CIFAR-10 comes as JPEG pictures, a stand-in for the lossless ones.",
}
_TARGETS = {20: 88.3, 100: 90.4}


def runs_of_table1(scale: Scale) -> list[FederatedRun]:
    """Return every run of the table, the most telling first: these to the last round, the others to a plateau.

    Args:
        scale: "small" is a miniature on scikit-learn's digits; "paper" the columns whose data is at hand.
    """
    if scale == "small":
        return [FederatedRun(MINIATURE, method, rounds=10) for method in METHODS]
    data = "fashion-mnist"
    first = [FederatedRun(data, method) for method in ("hyperfl", "fedavg", "hyperfl-whole")]
    large = [FederatedRun(data, method, clients=100) for method in ("hyperfl", "fedavg")]
    seeds = [FederatedRun(data, "hyperfl", seed=seed) for seed in SEEDS[1:]]
    known = {run.name for run in (*first, *large)}
    all_cells = [(data, 20), *COLUMNS]
    rest = [FederatedRun(cell[0], method, cell[1], until_plateau=True) for cell in all_cells for method in METHODS]
    return list(dict.fromkeys([*first, *large, *seeds, *(run for run in rest if run.name not in known)]))


@table("hyperfl-table1", needs=("evidence", "dp"), paper_needs=("Fashion-MNIST and days on a CPU",), stand_in=True)
def table1(scale: Scale, out: Path, *, only: str | None = None, rounds: int | None = None) -> Measured:
    """Train every method on every data set; report accuracy before and after local training.

    Args:
        scale: "small" trains 10 rounds on scikit-learn's digits; "paper" 200 rounds on what data is at hand.
        out: Finished runs are kept here, and unfinished ones go on from their last round.
        only: Train only the runs whose name, `DATA-CLIENTS-METHOD-SEED`, fits this pattern ("fashion-mnist-20-*"), or
            none with "none"; the table shows all that are finished.
        rounds: Another number of rounds.

    Raises:
        UsageError: The pattern fits no run.
        NetweightError: A run failed.
    """
    runs = runs_of_table1(scale)
    if rounds is not None:
        runs = [dataclasses.replace(run, rounds=rounds) for run in runs]
    run_all(chosen(runs, only), out)
    found = {run: curve for run, curve in finished(out, FederatedRun).items() if run in set(runs)}
    if not found:
        raise UsageError("No run of the table is finished.", cure="Leave --only out, or give another pattern.")
    return _measured(found, scale)


def _measured(found: Mapping[FederatedRun, Mapping[str, Any]], scale: Scale) -> Measured:
    cells = [(MINIATURE, 20)] if scale == "small" else list(COLUMNS)
    names = {cell: COLUMNS.get(cell, "digits (20 clients)") for cell in cells}
    rows, labels = [], {}
    for method, title in METHODS.items():
        for reading in ("before", "after"):
            values = [_cell(found, cell, method, reading) for cell in cells]
            if any(value is not None for value in values):
                row = Row(f"{title}, {reading} local training", tuple(values))
                rows.append(row)
                if (reading == "before") == (method in _READ_BEFORE):
                    labels[row.name] = title
    data = {run.data for run in found}
    rounds = sorted({run.rounds for run in found})
    differs = [_STAND_INS[name] for name in sorted(data & set(_STAND_INS))]
    if scale == "small":
        differs.append(f"A miniature: scikit-learn's digits, 20 clients of 71 images, {rounds[0]} rounds.")
    return Measured(
        columns=tuple(Column(name, "%", "higher") for name in names.values()),
        rows=tuple(rows),
        labels=labels,
        differs=(
            *differs,
            "Evaluation regenerates weights; the reference code evaluates HyperFL by the last round's.",
            "FedAvg, DP-FedAvg and pFedHN are laid beside the published rows by the accuracy before local training, "
            "the others by the accuracy after it: the paper's table mixes the two readings.",
            "Private methods sample by Poisson, so that their budget holds; the reference shuffles.",
        ),
        findings=tuple(_findings(found, scale)),
        notes=(
            f"Mean over clients in the last of {', '.join(map(str, rounds))} rounds, and over seeds where several ran.",
            *_plateaus(found),
        ),
        inputs={f"{run.data}, {run.clients} clients": curve["data"] for run, curve in found.items()},
    )


def _plateaus(found: Mapping[FederatedRun, Mapping[str, Any]]) -> list[str]:
    """Say which runs ended at a plateau, and where."""
    early = {run.name: curve["rounds"][-1] for run, curve in found.items() if len(curve["loss"]) < run.rounds}
    if not early:
        return []
    where = ", ".join(f"{name} after {round}" for name, round in sorted(early.items()))
    return [
        "Ended at a plateau, where the mean accuracy of six measurements, before and after local training, rose by "
        f"less than 0.1 points over that of the six before: {where}. Private methods have the noise of 200 rounds."
    ]


def _cell(
    found: Mapping[FederatedRun, Mapping[str, Any]], cell: tuple[str, int], method: str, reading: str
) -> float | None:
    values = [
        100 * curve[reading][-1]
        for run, curve in found.items()
        if (run.data, run.clients) == cell and run.method == method
    ]
    return mean(values) if values else None


def _findings(found: Mapping[FederatedRun, Mapping[str, Any]], scale: Scale) -> list[Finding]:
    findings = []
    cells = {(run.data, run.clients) for run in found}
    for data, clients in sorted(cells):
        real = scale == "paper" and data == "fashion-mnist"
        best = _by_seed(found, data, clients, "fedavg")
        for method in ("hyperfl", *_VARIANTS):
            ours = _by_seed(found, data, clients, method)
            if not ours:
                continue
            target = _TARGETS[clients] if real and method == "hyperfl" else None
            findings.append(_finding(f"{METHODS[method]}, after, {data}, {clients} clients", ours, target))
            if best and method in _VARIANTS:
                name = f"{METHODS[method]} less FedAvg, both after, {data}, {clients} clients"
                gain = {seed: value - mean(best.values()) for seed, value in ours.items()}
                findings.append(
                    _finding(name, gain, 0.0 if real and method == "hyperfl-whole" else None, unit="points")
                )
    return findings


def _by_seed(found: Mapping[FederatedRun, Mapping[str, Any]], data: str, clients: int, method: str) -> dict[int, float]:
    return {
        run.seed: 100 * curve["after"][-1]
        for run, curve in found.items()
        if (run.data, run.clients, run.method) == (data, clients, method)
    }


def _finding(name: str, values: Mapping[int, float], target: float | None, unit: str = "%") -> Finding:
    from netweight.metrics.intervals import t_interval

    ci95 = t_interval(list(values.values())).ci95 if len(values) > 1 else None
    return Finding(
        name,
        mean(values.values()),
        ci95=ci95,
        n=len(values),
        unit=unit,
        better="higher",
        target=target,
        seeds=tuple(values),
    )


@table("hyperfl-fig4", needs=("evidence",), stand_in=True)
def figure4(scale: Scale, out: Path, *, rounds: int | None = None) -> Measured:
    """Draw each method's training loss by round, and how far one client's generated body moves between rounds.

    Args:
        scale: "small" trains 10 rounds on scikit-learn's digits; "paper" 50 on EMNIST letters.
        out: Finished runs are kept here.
        rounds: Another number of rounds, at least 2.
    """
    from netweight.report.plots import lines

    data, usual = (MINIATURE, 10) if scale == "small" else ("emnist-letters", 50)
    rounds = rounds or usual
    runs = [
        FederatedRun(data, method, rounds=rounds) for method in ("local", "fedavg", "fedavg-private-head", "hyperfl")
    ]
    curves = {run.method: result.value for run, result in zip(runs, run_all(runs, out), strict=True)}
    moved = _movements(runs[-1], out)
    losses = lines(
        {METHODS[method]: (range(1, rounds + 1), curve["loss"]) for method, curve in curves.items()},
        alt="Mean training loss of four methods by round.",
        caption="(a) Mean training loss over clients.",
        xlabel="round",
        ylabel="loss",
        log="y",
    )
    changes = lines(
        {"client 0": (range(2, rounds + 1), moved)},
        alt="Norm of the change of client 0's generated body between rounds.",
        caption="(b) Norm of the change of one client's generated body between adjacent rounds.",
        xlabel="round",
        ylabel="norm of the change",
        log="y",
    )
    falls = Finding(
        "change of the generated body, last tenth of rounds over first",
        mean(moved[-max(1, len(moved) // 10) :]) / mean(moved[: max(1, len(moved) // 10)]),
        better="lower",
        target=1.0,
        seeds=(runs[0].seed,),
    )
    return Measured(
        columns=(Column("first round", "nats", "lower"), Column("last round", "nats", "lower")),
        rows=tuple(Row(METHODS[m], (curve["loss"][0], curve["loss"][-1])) for m, curve in curves.items()),
        differs=(f"{data} with 20 clients and {rounds} rounds; the paper draws EMNIST byclass.",),
        findings=(falls,),
        figures=(losses, changes),
    )


def _movements(run: FederatedRun, out: Path) -> list[float]:
    """Return norms of the change of client 0's generated body between adjacent rounds, kept once computed."""
    import json

    from netweight.methods.federate import train
    from netweight.reproduce.federated_run import plan_of

    kept = out / "movements.json"
    if kept.exists():
        moved = [float(value) for value in json.loads(kept.read_text())]
        if len(moved) == run.rounds - 1:
            return moved
    plan = plan_of(run)
    task = plan.task()
    method = plan.make_method(task)
    bodies = []
    for round in range(1, run.rounds + 1):
        settings = dataclasses.replace(plan.settings(), rounds=round, evaluate_every=run.rounds)
        bodies.append(train(task, method, settings, folder=out / "movements").weights(0).body)
    moved = [float((after - before).norm()) for before, after in itertools.pairwise(bodies)]
    kept.write_text(json.dumps(moved))
    return moved
