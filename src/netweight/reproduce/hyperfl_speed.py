"""HyperFL's table 4: seconds per round of five methods, side by side, and the engine against the usual way."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from netweight.report.finding import Column
from netweight.reproduce.registry import Measured, Row, Scale, table

if TYPE_CHECKING:
    from netweight_experiments.benchmarks.federate import Contender

__all__ = ["table4"]

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
def table4(scale: Scale, out: Path) -> Measured:
    """Time rounds of every method in turn, in one process; report ratios to FedAvg and to dense training.

    Args:
        scale: "small" times 2 clients with 50 images, to see that it runs; "paper" 20 clients with 600.
        out: Nothing is kept here: times of two processes do not compare.
    """
    from netweight_experiments.benchmarks.federate import speed_findings, time_rounds
    from netweight_experiments.toys.random_federation import random_federation

    from netweight.core.environment import usable_cores
    from netweight.core.progress import Progress
    from netweight.methods.federate import LocalTraining

    clients, images, training = (20, 600, LocalTraining()) if scale == "paper" else (2, 50, LocalTraining(epochs=1))
    workers = (1, 2) if usable_cores() > 1 and scale == "paper" else (1,)
    times = time_rounds(
        random_federation(clients, images), training, workers=workers, repeats=_REPEATS, progress=Progress("auto")
    )
    fastest = max(workers)
    published = {_name(one): _TITLES[one.method] for one in times if one.engine and one.threads == fastest}
    published = {own: title for own, title in published.items() if title != _TITLES["hyperfl-body"]}
    return Measured(
        columns=(Column("time per round", "s", "lower"), Column("CPU time per round", "s", "lower")),
        rows=tuple(Row(_name(one), (median(taken.wall), median(taken.cpu))) for one, taken in times.items()),
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
