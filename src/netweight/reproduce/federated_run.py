"""One federation of the HyperFL paper's tables: a data set, a method, a seed, and the curve of its accuracy.

The tables call it. A run is resumable by the round: its checkpoint lies in a folder of its own beside the ledger. Other
tables bring runs of their own, with a name and a function that makes the federation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

from netweight.core import digest
from netweight.core.progress import Progress
from netweight.core.runs import Result
from netweight.reproduce.resumed import LEDGER, Named, run_each

if TYPE_CHECKING:
    from netweight.data.images import Images
    from netweight.methods.federate.folder import FederationPlan
    from netweight.methods.federate.method import Method
    from netweight.methods.federate.settings import Federation
    from netweight.methods.federate.task import FedTask

__all__ = ["FederatedRun", "Parts", "images_of", "plan_of", "run_all"]

Parts: TypeAlias = "tuple[FedTask, Method, Federation]"
"""What `methods.federate.train` takes."""

R = TypeVar("R", bound=Named)


@cache
def images_of(data: str) -> Images:
    """Return a data set by its name, read once for all runs of a table."""
    from netweight.data.images import load

    return load(data)


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
        until_plateau: Whether to end before the last round once accuracy has stopped rising.
    """

    data: str
    method: str
    clients: int = 20
    rounds: int = 200
    seed: int = 520
    until_plateau: bool = False

    @property
    def name(self) -> str:
        """A name for files, which leaves out the number of rounds so that a longer run continues a shorter one."""
        return f"{self.data}-{self.clients}-{self.method}-{self.seed}"


def plan_of(run: FederatedRun) -> FederationPlan:
    """Return the paper's settings for a run: split, schedule, budget; of 100 clients 30 % are asked in each round."""
    from netweight.methods.federate.folder import FederationPlan

    return FederationPlan(
        data=run.data,
        method=run.method,
        clients=run.clients,
        rounds=run.rounds,
        fraction=0.3 if run.clients == 100 else 1.0,
        seed=run.seed,
        evaluate_every=max(1, run.rounds // _EVALUATIONS),
        until_plateau=run.until_plateau,
    )


def _parts_of(run: FederatedRun) -> Parts:
    plan = plan_of(run)
    task = plan.task()
    return task, plan.make_method(task), plan


def run_one(run: R, *, folder: Path, parts_of: Callable[[R], Parts]) -> dict[str, Any]:
    """Train one federation, to the last round or to a plateau; return its curve as plain values.

    Args:
        run: What to train.
        folder: Where checkpoints lie while it is under way.
        parts_of: Makes the federation.
    """
    from netweight.methods.federate.engine import train

    task, method, settings = parts_of(run)
    done = train(task, method, settings, folder=folder / run.name, save_every=5, progress=Progress("auto"))
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


def run_all(
    runs: Sequence[R],
    out: Path,
    *,
    parts_of: Callable[[R], Parts] = _parts_of,  # type: ignore[assignment]
) -> list[Result[R]]:
    """Train federations one after another, each on all cores; finished ones are taken from the ledger.

    Args:
        runs: What to train.
        out: Folder of the ledger and the checkpoints.
        parts_of: Makes the federation of a run; by default that of a `FederatedRun`.

    Raises:
        NetweightError: A run failed.
    """
    return run_each(partial(run_one, folder=out, parts_of=parts_of), runs, ledger=out / LEDGER)
