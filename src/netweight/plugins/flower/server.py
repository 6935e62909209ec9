"""The server: a ServerApp that runs rounds, tries failed ones again, and saves after each so that it can be resumed.

And both apps in one call, `apps`, of a model and data that a user has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from netweight.core.atomic_writes import whole_file
from netweight.core.digests import digest_config
from netweight.errors import NameNotFound, UsageError
from netweight.job import Job
from netweight.methods.federate.catalog import named_method
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.methods.federate.engine import run_key
from netweight.methods.federate.finished import HISTORY as HISTORY
from netweight.methods.federate.method import Method
from netweight.methods.federate.rounds import Rounds
from netweight.methods.federate.settings import Federation, LocalTraining
from netweight.methods.federate.task import ClientData, Task
from netweight.plugins.flower.client import client_app
from netweight.plugins.flower.secure_sum import masked_sum
from netweight.plugins.flower.simulation_workers import replace_dead_workers
from netweight.plugins.flower.strategy import OverGrid, chosen, wait_for_nodes

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
        raise NameNotFound(f"The server does not have the data of client {number}.")

    def __iter__(self) -> Iterator[int]:
        """Go through the client numbers."""
        return iter(self._clients)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._clients)

    def __contains__(self, number: object) -> bool:
        """Return whether there is such a client."""
        return number in self._clients


def server_app(
    task_of: Callable[[Context], Task],
    method: Method | Callable[[Context], Method],
    settings: Federation | Callable[[Context], Federation] = Federation(),
    *,
    folder: str | Path | Callable[[Context], str | Path],
    timeout: float | Callable[[Context], float] = 600.0,
    patience: float | Callable[[Context], float] = 120.0,
    secure_sum: int | Callable[[Context], int] = False,
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
        secure_sum: Whether the server is to see the sum of a round's updates alone; from 3 on, sums of so many groups,
            drawn anew in each round, of which it leaves odd ones out as it does updates in the clear.
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
        replace_dead_workers()
        federation: Federation = chosen(settings, context)
        place = Path(folder(context) if callable(folder) else folder)
        if not place.is_absolute():
            raise UsageError(
                f"The server's folder {str(place)!r} is not an absolute path.",
                cure="Give one, such as --run-config \"folder='/var/lib/federation'\".",
            )
        chosen_method, task = chosen(method, context), task_of(context)
        seconds, waits = chosen(timeout, context), chosen(patience, context)
        key = run_key(task, chosen_method, federation, list(task.clients), may_change=_MAY_CHANGE)
        with Job.open(place, key=key, of="a federation", state=CHECKPOINT) as job:
            rounds = Rounds(chosen_method, federation, task.clients, chosen_method.start(task, seed=federation.seed))
            rounds.resume(job)
            wait_for_nodes(grid, len(task.clients), waits)
            over = OverGrid(
                rounds, federation=digest_config(key), timeout=seconds, patience=waits, grid=grid,
                registered=nodes(context) if callable(nodes) else nodes,
                summed=masked_sum(context, groups) if (groups := int(chosen(secure_sum, context))) else None,
            )  # fmt: skip
            try:
                while not rounds.done:
                    rounds.run_round(over)
                    _save(rounds, job, context.run_config)
            finally:
                _save(rounds, job, context.run_config)
            rounds.refuse_failing_clients()

    return app


def _save(rounds: Rounds, job: Job, config: Config) -> None:
    """Save state and history."""
    rounds.save()
    about = {
        "method": rounds.method.name, "config": dict(config), "rounds": [done.to_json() for done in rounds.rounds]
    }  # fmt: skip
    with whole_file(job.folder / HISTORY, overwrite=True) as file:
        file.write(json.dumps(about, indent=1).encode())


# A run's configuration: the app's pyproject.toml, and what `flwr run --run-config` says.
Config = Mapping[str, str | int | float | bool]


def method_of(config: Config) -> Method:
    """Return the method that a run's configuration names."""
    return named_method(str(config["method"]), training=LocalTraining(epochs=int(config["epochs"])))


def settings_of(config: Config) -> Federation:
    """Return the rounds that a run's configuration asks for; of one masked sum there is nothing but its mean."""
    compared = not config.get("secure-sum") or int(config.get("sums", 1)) > 2
    aggregator = config.get("aggregator", Federation().aggregator) if compared else "mean"
    numbers = {name: int(config[name.replace("_", "-")]) for name in ("rounds", "seed", "min_clients")}
    return Federation.of({**numbers, "aggregator": aggregator})


def halves_of(model: Callable[[], tuple[nn.Module, nn.Module]], config: Config) -> tuple[nn.Module, nn.Module]:
    """Return a model's halves, the same wherever the configuration has the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(config["seed"]))
        return model()


@final
@dataclass(frozen=True)
class Apps:
    """Both apps of a federation, which `pyproject.toml` names, and what they are made of."""

    client: ClientApp
    """The app that runs on nodes."""
    server: ServerApp
    """The app that runs on the server."""
    model: Callable[[], tuple[nn.Module, nn.Module]]
    """Function that makes body and head."""
    data: Callable[[Config, int], ClientData]
    """Returns one client's data."""
    make_method: Callable[[Config], Method]
    """Function from the run's configuration to the method."""

    def task(self, config: Config) -> Task:
        """Return the network and all clients' data, for an audit on a machine that has them.

        Args:
            config: The run's configuration.
        """
        own = {client: self.data(config, client) for client in range(int(config["clients"]))}
        return Task(*halves_of(self.model, config), own)


def apps(
    model: Callable[[], tuple[nn.Module, nn.Module]],
    data: Callable[[Config, int], ClientData],
    method: Callable[[Config], Method] = method_of,
) -> Apps:
    """Return the apps of clients and server for a model and data, as a run's configuration asks.

    Args:
        model: Makes the half that is learned together and the half that stays with each client.
        data: Returns one client's data, given the run's configuration and the client's number.
        method: Function from the run's configuration to the method.
    """

    def task(context: Context) -> Task:
        config, number = context.run_config, context.node_config.get("partition-id")
        own = Elsewhere(int(config["clients"])) if number is None else {int(number): data(config, int(number))}
        return Task(*halves_of(model, config), own)

    def own(context: Context, name: str) -> str | int | float | bool:
        # What a node's own configuration says, the server cannot change.
        return context.node_config.get(name) or context.run_config[name]

    client = client_app(
        task, lambda context: method(context.run_config),
        folder=lambda context: str(own(context, "private-folder")) or None,
        seed=lambda context: None if (given := context.node_config.get("rehearsal-seed")) is None else int(given),
        secure_sum=lambda context: bool(own(context, "secure-sum")),
    )  # fmt: skip
    server = server_app(
        task, lambda context: method(context.run_config), lambda context: settings_of(context.run_config),
        folder=lambda context: str(context.run_config["folder"]),
        timeout=lambda context: float(context.run_config["timeout"]),
        patience=lambda context: float(context.run_config["patience"]),
        secure_sum=lambda context: int(context.run_config.get("sums", 1)) * bool(context.run_config["secure-sum"]),
    )  # fmt: skip
    return Apps(client, server, model, data, method)
