"""A finished federation from its folder, trained in one process or over Flower, and its weights as state dicts.

Over Flower the server's folder holds the shared tensors and the history of rounds; model and data come from the app.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from torch import Tensor, nn

from netweight.core.files import whole_file
from netweight.core.lazy import import_named
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.federate.checkpoint import CHECKPOINT, Checkpoint
from netweight.methods.federate.engine import Run, finished
from netweight.methods.federate.folder import PLAN_FILE, FederationPlan
from netweight.methods.federate.history import Round
from netweight.methods.federate.method import Method, Weights
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors

# The file within a Flower server's folder that says what is known of each round.
HISTORY = "history.json"


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


def open_run(folder: Path, app: str | None = None) -> Run:
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
    return Run(task, method, saved.state, private, tuple(saved.rounds), seed, saved.attempt_answers)


def state_dicts(task: Task, weights: Weights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a model's body and head as their modules' `load_state_dict` takes them, frozen weights included.

    Args:
        task: The network.
        weights: A client's model, such as `Run.weights(client)`.
    """
    made = []
    for half, module, layout, vector in (
        ("body", task.body, task.body_layout, weights.body),
        ("head", task.head, task.head_layout, weights.head),
    ):
        own: nn.Module = copy.deepcopy(module)
        state = own.state_dict()
        buffers = {n.removeprefix(f"{half}."): v for n, v in weights.statistics.items() if n.startswith(f"{half}.")}
        state.update({name: value for name, value in {**layout.split(vector), **buffers}.items() if name in state})
        made.append({name: value.detach().cpu().clone().contiguous() for name, value in state.items()})
    return made[0], made[1]


def export_weights(run: Run, client: int, target: Path) -> tuple[Path, Path]:
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
