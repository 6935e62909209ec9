"""The server: a ServerApp that runs rounds, tries failed ones again, and saves after each so that it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import final

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from netweight.core.files import whole_file
from netweight.errors import NameNotFound, UsageError
from netweight.job import Job
from netweight.methods.federate.engine import CHECKPOINT, Rounds, run_key
from netweight.methods.federate.method import Method
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.task import ClientData, Task
from netweight.plugins.flower.records import chosen
from netweight.plugins.flower.secure_sum import masked_sum
from netweight.plugins.flower.strategy import OverGrid, wait_for_nodes

# The file within a server's folder that says what is known of each round.
HISTORY = "history.json"

# Settings that may change to go on.
_MAY_CHANGE = ("rounds", "evaluate_every", "min_clients", "retries", "drop_out")


@final
class Elsewhere(Mapping[int, ClientData]):
    """The data of a server's task: which clients there are, and no data."""

    # `clients`: their number; they are numbered from 0

    def __init__(self, clients: int) -> None:
        self._clients = range(clients)

    def __getitem__(self, number: int) -> ClientData:
        """Refuse: a server has no data."""
        raise NameNotFound(f"The data of client {number} is with the client, not here.")

    def __iter__(self) -> Iterator[int]:
        """Go through the client numbers."""
        return iter(self._clients)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._clients)

    def __contains__(self, number: object) -> bool:
        """Whether there is such a client."""
        return number in self._clients


def server_app(
    task_of: Callable[[Context], Task],
    method: Method | Callable[[Context], Method],
    settings: Federation | Callable[[Context], Federation] = Federation(),
    *,
    folder: str | Path | Callable[[Context], str | Path],
    timeout: float | Callable[[Context], float] = 600.0,
    patience: float | Callable[[Context], float] = 120.0,
    secure_sum: bool | Callable[[Context], bool] = False,
    nodes: Mapping[int, int] | Callable[[Context], Mapping[int, int] | None] | None = None,
) -> ServerApp:
    """Return the app that the server runs: each round once, in order, until all are done.

    Args:
        task_of: Makes the task, whose data are elsewhere, of Flower's context.
        method: The method; like all that follows it may be a function of Flower's context.
        settings: Rounds, sampling, seed, and what is done about clients that lie.
        folder: Absolute path for state and history, from which a federation that was stopped goes on.
        timeout: Seconds to wait for a round's answers.
        patience: Seconds to wait for nodes to connect.
        secure_sum: Whether the server is to see the sum of a round's updates alone.
        nodes: Flower's node id → client number. A node's key, which the SuperLink knows, decides its id, so that no
            node can take another's number. Without it a number belongs to the first node that claims it.

    Raises:
        UsageError: The folder is not absolute, or holds another federation.
        FederationStopped: A round had too few sound updates and its retries were used up; the state is saved.
    """
    # A federation that was stopped or killed goes on from its last finished round when it is run again; that it is the
    # same one is checked by a digest. Methods that send each client a message of its own run, too: every node is asked
    # for its client number once.
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        asked: Federation = chosen(settings, context)
        place = Path(folder(context) if callable(folder) else folder)
        if not place.is_absolute():
            raise UsageError(f"The server's folder {place} is not absolute.", cure="Give an absolute path.")
        chosen_method, task = chosen(method, context), task_of(context)
        seconds, waits = chosen(timeout, context), chosen(patience, context)
        key, known = run_key(task, chosen_method, asked, list(task.clients), may_change=_MAY_CHANGE)
        with Job.open(place, key=key, of="a federation", state=CHECKPOINT) as job:
            rounds = Rounds(chosen_method, asked, task.clients, chosen_method.start(task, seed=asked.seed))
            rounds.resume((job, known))
            wait_for_nodes(grid, len(task.clients), waits)
            over = OverGrid(
                rounds, federation=known, timeout=seconds, patience=waits, grid=grid,
                registered=nodes(context) if callable(nodes) else nodes,
                summed=masked_sum(context) if chosen(secure_sum, context) else None,
            )  # fmt: skip
            try:
                while not rounds.done:
                    rounds.run_round(over)
                    _save(rounds, job)
            finally:
                _save(rounds, job)

    return app


def _save(rounds: Rounds, job: Job) -> None:
    """Save state and history."""
    rounds.save()
    about = {"method": rounds.method.name, "rounds": [done.to_json() for done in rounds.rounds]}
    with whole_file(job.folder / HISTORY, overwrite=True) as file:
        file.write(json.dumps(about, indent=1).encode())
