"""The server: a ServerApp that runs rounds, tries failed ones again, and saves after each so that it can be resumed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import final

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from netweight.core.files import whole_file
from netweight.errors import FederationStopped, NameNotFound, UsageError
from netweight.job import Job
from netweight.methods.federate.engine import CHECKPOINT, Checkpoint, identity, is_done
from netweight.methods.federate.method import Method
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.task import ClientData, Task
from netweight.plugins.flower.records import chosen, from_record, to_record
from netweight.plugins.flower.secure_sum import masked_attempt
from netweight.plugins.flower.strategy import MethodStrategy, exchange

# The file within a server's folder that says what is known of each round.
HISTORY = "history.json"

# Settings that may change to go on.
_MAY_CHANGE = ("rounds", "evaluate_every", "min_clients", "retries", "drop_out")
_LOG = logging.getLogger(__name__)


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
) -> ServerApp:
    """Return the app that the server runs: each round once, in order, until all are done."""
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
        secure, seconds = chosen(secure_sum, context), chosen(timeout, context)
        waits = chosen(patience, context)
        key, known = identity(task, chosen_method, asked, list(task.clients), may_change=_MAY_CHANGE)
        with Job.open(place, key=key, of="a federation", state=CHECKPOINT) as job:
            rounds = _Rounds(task, chosen_method, asked, job, known, timeout=seconds, patience=waits, secure=secure)
            _wait_for_nodes(grid, len(task.clients), waits)
            rounds.run(grid, context)

    return app


def _wait_for_nodes(grid: Grid, wanted: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while (here := len(list(grid.get_node_ids()))) < wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    if here < wanted:
        _LOG.warning("%d of %d nodes are connected after %.0f seconds; going on with these.", here, wanted, patience)


@final
class _Rounds:
    """A federation on a server."""

    def __init__(
        self, task: Task, method: Method, settings: Federation, job: Job, known: str, *, timeout: float,
        patience: float, secure: bool,
    ) -> None:  # fmt: skip
        self.settings, self.job, self.known, self.patience, self.secure = settings, job, known, patience, secure
        self.arrays, rounds = to_record(method.start(task, seed=settings.seed)), []
        saved = Checkpoint.load(job, known)
        if saved is not None:
            self.arrays, rounds = to_record(saved.state), list(saved.rounds)
            _LOG.info("Going on after round %d of %s.", len(rounds), job.folder / CHECKPOINT)
        self.strategy = MethodStrategy(method, settings, task.clients, federation=known, rounds=rounds, timeout=timeout)

    def run(self, grid: Grid, context: Context) -> None:
        """Run all rounds that are left."""
        self.strategy.summary()
        while not is_done(self.settings, self.strategy.rounds):
            self._run_round(len(self.strategy.rounds) + 1, grid, context)
            self.save()
        self.save()

    def save(self) -> None:
        """Save state and history."""
        rounds = self.strategy.rounds
        Checkpoint(from_record(self.arrays), {}, rounds).save(self.job, self.known)
        about = {"method": self.strategy.method.name, "rounds": [done.to_json() for done in rounds]}
        with whole_file(self.job.folder / HISTORY, overwrite=True) as file:
            file.write(json.dumps(about, indent=1).encode())

    def _run_round(self, number: int, grid: Grid, context: Context) -> None:
        for attempt in range(self.settings.retries + 1):
            if attempt:
                _wait_for_nodes(grid, self.settings.min_clients, self.patience)
            arrays = self._attempt(number, grid, context)
            if arrays is not None:
                self.arrays = arrays
                return
        self.save()
        raise FederationStopped(
            f"Round {number} had fewer than {self.settings.min_clients} sound updates in {self.settings.retries + 1} "
            f"attempts; the state after round {number - 1} is in {self.job.folder}.",
            cure="See the log for who was refused and why; run the same again to resume.",
        )

    def _attempt(self, number: int, grid: Grid, context: Context) -> ArrayRecord | None:
        if self.secure:
            return masked_attempt(self.strategy, number, self.arrays, grid, context)
        messages = list(self.strategy.configure_train(number, self.arrays, ConfigRecord(), grid))
        replies = exchange(grid, messages, timeout=self.strategy.timeout) if messages else []
        return self.strategy.aggregate_train(number, replies)[0]
