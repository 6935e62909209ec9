"""One federation of the HyperFL paper's tables: a data set, a method, a seed, and the curve of its accuracy.

The tables call it. A run is resumable by the round: its checkpoint lies in a folder of its own beside the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.core import digest
from netweight.core.progress import Progress
from netweight.core.runs import Result, in_process, map_runs
from netweight.errors import NetweightError

if TYPE_CHECKING:
    from netweight.zoo.federation import FederationPlan

__all__ = ["FederatedRun", "finished", "plan_of", "run_all"]

_EVALUATIONS = 40
"""How often accuracy is measured in a run of 200 rounds."""


@final
@dataclass(frozen=True)
class FederatedRun:
    """One federation.

    Attributes:
        data: A data set of `zoo.data.load`.
        method: A method by its name on the command line.
        clients: Number of clients; of 100, as in the paper, 30 % are asked in each round, otherwise all.
        rounds: Number of rounds.
        seed: Of the model, the batches and the sampling.
    """

    data: str
    method: str
    clients: int = 20
    rounds: int = 200
    seed: int = 520

    @property
    def name(self) -> str:
        """A name for files, which leaves out the number of rounds so that a longer run continues a shorter one."""
        return f"{self.data}-{self.clients}-{self.method}-{self.seed}"


def plan_of(run: FederatedRun) -> FederationPlan:
    """Return the paper's settings for a run: split, schedule, budget; of 100 clients 30 % are asked in each round."""
    from netweight.zoo.federation import FederationPlan

    return FederationPlan(
        data=run.data,
        method=run.method,
        clients=run.clients,
        rounds=run.rounds,
        fraction=0.3 if run.clients == 100 else 1.0,
        seed=run.seed,
        evaluate_every=max(1, run.rounds // _EVALUATIONS),
    )


def run_one(run: FederatedRun, *, folder: Path) -> dict[str, Any]:
    """Train one federation; return its curve as plain values.

    Args:
        run: What to train.
        folder: Where checkpoints lie while it is under way.
    """
    from netweight.methods.federate import train

    plan = plan_of(run)
    task = plan.task()
    place = folder / run.name
    done = train(task, plan.make_method(task), plan.settings(), folder=place, save_every=5, progress=Progress("auto"))
    evaluated = [r for r in done.rounds if r.after]
    return {
        "rounds": [r.round for r in evaluated],
        "before": [r.mean_before for r in evaluated],
        "after": [r.mean_after for r in evaluated],
        "loss": [r.mean_loss for r in done.rounds],
        "seconds": [r.seconds for r in done.rounds],
        "refused": {r.round: dict(r.refused) for r in done.rounds if r.refused},
        "data": digest.of_config([digest.of_tensor(task.client(number).train[0]) for number in task.clients]),
    }


def run_all(runs: Sequence[FederatedRun], out: Path) -> list[Result[FederatedRun]]:
    """Train federations one after another, each on all cores; finished ones are taken from the ledger.

    Args:
        runs: What to train.
        out: Folder of the ledger and the checkpoints.

    Raises:
        NetweightError: A run failed.
    """
    results = []
    for result in map_runs(
        partial(run_one, folder=out), runs, ledger=out / "runs.jsonl", engine=in_process, ordered=True
    ):
        if not result.ok:
            last = (result.error or "").strip().splitlines()[-1]
            raise NetweightError(f"{result.config.name} failed: {last}", cure="Run it again to continue.")
        results.append(result)
    return results


def finished(out: Path) -> dict[FederatedRun, dict[str, Any]]:
    """Return every run in a folder's ledger that ended well, with its curve."""
    from netweight.core.ledger import Ledger

    path = out / "runs.jsonl"
    if not path.exists():
        return {}
    with Ledger(path) as ledger:
        return {
            FederatedRun(**record["config"]): record["value"]
            for record in ledger.records.values()
            if record["error"] is None
        }
