"""A finished federation from its folder, trained in one process or over Flower, and its weights as state dicts.

Over Flower the server's folder holds the shared tensors and the history of rounds; model and data come from the app.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from netweight.core.atomic_writes import whole_file
from netweight.core.lazy import import_named
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.federate.checkpoint import CHECKPOINT, Checkpoint
from netweight.methods.federate.engine import TrainedFederation, finished
from netweight.methods.federate.history import Round
from netweight.methods.federate.method import ClientWeights, Method
from netweight.methods.federate.plan import PLAN_FILE, FederationPlan
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors

# The file within a Flower server's folder that says what is known of each round.
HISTORY = "history.json"
# Entry in the metadata of a file of private tensors that says whose they are.
PRIVATE_KEY = "netweight.private"
_NAMED = 3  # tensors that a message names


class FlowerApps(Protocol):
    """Protocol of what `netweight.plugins.flower.apps` returns, as far as a finished federation needs it."""

    def task(self, config: Any) -> Task:
        """Return the network and all clients' data."""
        ...

    def make_method(self, config: Any) -> Method:
        """Return the method."""
        ...


def is_flower(folder: Path) -> bool:
    """Return whether a folder is that of a Flower server."""
    return (folder / HISTORY).is_file() and not (folder / PLAN_FILE).is_file()


def history(folder: Path) -> tuple[str, dict[str, Any], list[Round]]:
    """Return the method's name, the run's configuration and the rounds of a Flower server's folder."""
    about = json.loads((folder / HISTORY).read_text())
    return about["method"], about.get("config", {}), [Round.from_json(one) for one in about["rounds"]]


def open_run(folder: Path, app: str | None = None) -> TrainedFederation:
    """Open a finished federation; nothing is trained and nothing written.

    Args:
        folder: The folder of `netweight federate run`, or of a Flower server.
        app: For a Flower run, where the app's `apps(...)` is, as "module:name"; looked up in the current folder, too.

    Raises:
        UsageError: The folder contains no federation, or it is Flower's and no app is named.
    """
    if not is_flower(folder):
        plan = FederationPlan.load(folder)
        task = plan.task()
        return finished(task, plan.make_method(task), plan, folder=folder)
    if app is None:
        raise UsageError(
            f"{folder} is the folder of a Flower server, which contains neither the network nor data.",
            cure="Name the app that was run, such as --app app:both, in the app's folder.",
        )
    _, config, _ = history(folder)
    apps: FlowerApps = import_named(app, "--app")
    if not config:
        raise UsageError(f"{folder / HISTORY} does not contain the configuration with which the app was run.")
    task, method, seed = apps.task(config), apps.make_method(config), int(config["seed"])
    with Job.open(folder, state=CHECKPOINT, reading=True) as job:
        saved = Checkpoint.load(job)
    if saved is None:
        raise UsageError(f"{folder} has no finished round.", cure="Run the app again.")
    private: dict[int, Tensors] = {c: method.private_start(task, c, seed=seed) for c in task.clients}
    return TrainedFederation(task, method, saved.state, private, tuple(saved.rounds), seed, saved.attempt_answers)


def state_dicts(task: Task, weights: ClientWeights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a model's body and head as their modules' `load_state_dict` takes them, frozen weights included.

    Args:
        task: The network.
        weights: A client's model, such as `TrainedFederation.weights(client)`.
    """
    made = []
    for half, module, layout, vector in (
        ("body", task.body, task.body_layout, weights.body),
        ("head", task.head, task.head_layout, weights.head),
    ):
        # The module's own dictionary also contains a weight of two layers under the names of both.
        own: nn.Module = copy.deepcopy(module)
        with torch.no_grad():
            for name, value in layout.split(vector).items():
                own.get_parameter(name).copy_(value)
        for name, value in weights.statistics.items():
            if name.startswith(f"{half}."):
                path, _, buffer = name.removeprefix(f"{half}.").rpartition(".")
                own.get_submodule(path)._buffers[buffer] = value
        made.append({name: value.detach().cpu().clone().contiguous() for name, value in own.state_dict().items()})
    return made[0], made[1]


def with_private(run: TrainedFederation, client: int, file: Path | None) -> TrainedFederation:
    """Return a Flower run with what a client keeps, which its server does not have.

    Args:
        run: Of a Flower server, from `open_run`.
        client: The client, by number.
        file: The client's tensors as `netweight.plugins.flower.export_private` writes them; None where the client keeps
            none.

    Raises:
        UsageError: The client keeps tensors and no file is given, or the file does not contain these tensors.
    """
    run.task.client(client)
    start = run.private[client]
    if not start and file is None:
        return run
    if file is None:
        raise UsageError(
            f"The server does not have what client {client} keeps: {_few(start)}. Its model would be untrained in "
            "these tensors.",
            cure="Write them on the client's machine by netweight.plugins.flower.export_private, and give the file: "
            "--private FILE.",
        )
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            owner = json.loads((opened.metadata() or {}).get(PRIVATE_KEY, "{}")).get("client")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except safetensors.SafetensorError as error:
        raise UsageError(
            f"{file} is not a safetensors file: {error}.", cure="Give the file that export_private wrote for --client."
        ) from error
    if owner != client or {n: v.shape for n, v in tensors.items()} != {n: v.shape for n, v in start.items()}:
        whose = "not tensors that a client keeps" if owner is None else f"what client {owner} keeps"
        raise UsageError(
            f"{file} contains {whose}: {_few(tensors)}. The export needs what client {client} keeps: {_few(start)}.",
            cure="Give the file that export_private wrote for --client.",
        )
    return replace(run, private={**run.private, client: tensors})


def _few(tensors: Tensors) -> str:
    names = list(tensors)
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def is_shared(run: TrainedFederation, client: int) -> bool:
    """Return whether a client's model is the one that all clients have, buffers included.

    Args:
        run: A finished federation.
        client: The client, by number.
    """
    own = run.weights(client)
    return all(_equal(own, run.weights(other)) for other in run.task.clients)


def _equal(one: ClientWeights, other: ClientWeights) -> bool:
    vectors = ((one.body, other.body), (one.head, other.head))
    return one.statistics.keys() == other.statistics.keys() and all(
        torch.equal(first, second)
        for first, second in (*vectors, *((value, other.statistics[name]) for name, value in one.statistics.items()))
    )


def export_weights(run: TrainedFederation, client: int, target: Path) -> tuple[Path, Path]:
    """Write a client's model as `body.safetensors` and `head.safetensors`, to be loaded into one's own modules.

    Args:
        run: A finished federation.
        client: Whose personal model; under methods that share everything, any client's is the shared one.
        target: Folder, made if it is not there.

    Returns:
        The two files: `body.load_state_dict(safetensors.torch.load_file(...))`.
    """
    run.task.client(client)
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, state in zip(("body", "head"), state_dicts(run.task, run.weights(client)), strict=True):
        paths.append(target / f"{name}.safetensors")
        with whole_file(paths[-1]) as file:
            file.write(safetensors.torch.save(state))
    return paths[0], paths[1]
