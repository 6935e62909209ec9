"""The EMNIST columns of HyperFL's table 1 as a miniature: seven methods, 20 and 100 clients, three seeds.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.emnist WORK

Data, networks, division among clients, and the search for a learning rate are those of `netweight reproduce
hyperfl-table1`; clients have fewer images and there are fewer rounds. The data are EMNIST letters (26 classes), which
stand in for the paper's 62 classes, so that accuracies cannot be compared with the paper's, only the order of the
methods. WORK keeps every run, and each goes on by the round.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from netweight_experiments.tables.grid import finished
from netweight_experiments.tables.hyperfl.federations import METHODS, SEARCHED, SEEDS, FederatedRun, table1

PUBLISHED = ("hyperfl", "fedavg", "local", "pfedhn", "ppsgd", "centaur", "dp-fedavg")
"""Methods of the paper's table."""
DATA = "emnist-letters"
_READINGS = ("before", "after")


def measured(work: Path, images: int, rounds: int) -> dict[str, Any]:
    """Return accuracies in the last round of every finished run, in percent, and those of the search for a rate."""
    cells: dict[str, Any] = {}
    searches: dict[str, dict[str, float]] = {}
    for run, curve in finished(work, FederatedRun).items():
        if run.data != DATA or run.images != images:
            continue
        last = {reading: round(100 * curve[reading][-1], 2) for reading in _READINGS}
        if run.seed == SEARCHED:
            searches.setdefault(run.method, {})[f"{run.factor:g}"] = last["after"]
        elif run.rounds == rounds:
            cells[f"{run.clients} clients, {run.method}, seed {run.seed}"] = {**last, "rate": run.factor}
    return {"cells": cells, "accuracy by multiple of the learning rate": searches}


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/federate-results.md: means over seeds with the lowest and the highest."""
    cells, options = result["cells"], result["options"]
    published = json.loads((Path(__file__).parents[2] / "published" / "hyperfl-table1.json").read_text())
    columns = [column["name"] for column in published["columns"]]
    paper = {row["name"]: dict(zip(columns, row["values"], strict=True)) for row in published["rows"]}
    lines = [
        "| method | clients | accuracy before local training, % | accuracy after local training, % "
        "| learning rate, times its own | paper (62 classes, more data), % |",
        "|---|---|---|---|---|---|",
    ]
    missing: list[str] = []
    for clients in options["clients"]:
        for method in options["methods"]:
            seeds = [name for seed in SEEDS if (name := f"{clients} clients, {method}, seed {seed}") in cells]
            if not seeds:
                missing.append(f"`{method}` with {clients} clients")
                continue
            texts = []
            for reading in _READINGS:
                values = [cells[name][reading] for name in seeds]
                few = "" if len(values) == len(SEEDS) else f"; {len(values)} seeds"
                spread = f" ({min(values):.1f} to {max(values):.1f}{few})" if len(values) > 1 else " (one seed)"
                texts.append(f"{mean(values):.1f}{spread}")
            number = paper[METHODS[method]][f"EMNIST ({clients} clients)"]
            lines.append(f"| `{method}` | {clients} | {' | '.join(texts)} | {cells[seeds[0]]['rate']:g} | {number} |")
    return "\n".join([*lines, *([f"\nNot measured yet: {', '.join(missing)}."] if missing else [])])


def main(
    work: Path,
    /,
    *,
    clients: tuple[int, ...] = (20, 100),
    methods: tuple[str, ...] = PUBLISHED,
    rounds: int = 20,
    images: int = 100,
) -> Iterator[dict[str, Any]]:
    """Search a learning rate for each method, train it with three seeds, and write what is finished after each."""
    work = Path(work)
    for count in clients:
        for method in methods:
            table1("paper", work, only=f"{DATA}-{count}-{method}-52*", rounds=rounds, images=images)
            yield measured(work, images, rounds)
