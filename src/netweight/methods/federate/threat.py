"""Threat models, and what a server observes under each of them: one client's local round, short or as it really is.

The audit and the tables of attacks call it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.config import LocalTraining
from netweight.methods.federate.engine import Run
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Method, Trained
from netweight.methods.federate.task import ClientData, FedTask
from netweight.methods.federate.updates import LowRank, Tensors, Update, aggregate

__all__ = ["Observation", "ThreatModel", "dense_tensors", "observe", "shortened"]


@final
@dataclass(frozen=True)
class ThreatModel:
    """What the server is assumed to see.

    Attributes:
        batch_size: Examples per local step.
        local_steps: Local steps that train what is shared, all on the same examples if there are no others.
        examples: Examples that the client holds; None for as many as a batch.
        summed_over: Clients whose updates the server sees only as their average: 1 for none, more under secure
            aggregation.
        first_round: Attack the first round, from the method's initial state, rather than one more round of the
            trained federation.
    """

    batch_size: int = 1
    local_steps: int = 1
    examples: int | None = None
    summed_over: int = 1
    first_round: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if min(self.batch_size, self.local_steps, self.summed_over) < 1 or (self.examples or 1) < 1:
            raise UsageError(f"There is no such threat model: {self}.", cure="All numbers are at least 1.")

    @property
    def held(self) -> int:
        """Number of examples that the client trains on."""
        return self.examples or self.batch_size

    @property
    def label(self) -> str:
        """In words, for tables."""
        steps = f"{self.local_steps} step{'s' * (self.local_steps > 1)} of batch {self.batch_size}"
        steps += f", sum of {self.summed_over} clients" if self.summed_over > 1 else ""
        return steps + (", first round" if self.first_round else "")


@final
@dataclass(frozen=True)
class Observation:
    """What a server observes of one client, and the truth that it does not see.

    Attributes:
        sent: What the server sent.
        received: What it sees come back: the client's tensors, or an average of several clients'.
        images: The client's inputs, shape `(n, …)`; truth.
        labels: Their targets; truth.
        body: The body that the client began with, shape `(P,)`; truth unless it was sent.
        gradient: The gradient of its loss on its first batch by the body, shape `(P,)`; truth.
        movement: How its body moved in the whole round, shape `(P,)`; truth.
    """

    sent: Tensors
    received: Tensors
    images: Tensor
    labels: Tensor
    body: Tensor
    gradient: Tensor
    movement: Tensor


def observe(run: Run, threat: ThreatModel, *, client: int, draw: int, seed: int) -> Observation:
    """Let a client train as the threat model says and return what the server sees.

    The client's private head is not trained on these examples before: it is as the client has it from earlier rounds.

    Args:
        run: The federation; its method trains and its clients' data are trained on.
        threat: Batch size, steps, examples, secure aggregation.
        client: Whose update is attacked.
        draw: Number of the draw of its examples.
        seed: Decides which examples are drawn.
    """
    others = [number for number in run.task.clients if number != client]
    generator = seeds.torch_generator(seed, "others", client, draw)
    order = torch.randperm(len(others), generator=generator)[: threat.summed_over - 1].tolist()
    members = [client, *(others[index] for index in order)]
    if len(members) < threat.summed_over:
        raise UsageError(f"{len(members)} clients cannot be summed as {threat.summed_over}.")
    tasks = {number: _small_task(run.task, number, threat.held, draw, seed) for number in members}
    method = shortened(run.method, threat)
    fresh = threat.first_round
    state = method.start(run.task, seed=run.seed) if fresh else run.state
    trained = {n: _train(method, task, n, state, run, seed=seed, fresh=fresh) for n, task in tasks.items()}
    own = trained[client]
    received: Tensors = dense_tensors(own.update, state)
    if threat.summed_over > 1:
        received = aggregate(state, [one.update for one in trained.values()])
    return _observed(method, tasks[client], client, state, received, own, run, seed=seed, fresh=fresh)


def _train(method: Method, task: FedTask, number: int, state: Tensors, run: Run, *, seed: int, fresh: bool) -> Trained:
    client = Client(number, _private(method, run, number, fresh), method.message(state, number))
    return method.train(task, LocalModel(task), [client], round=1, seed=seed)[0]


def _private(method: Method, run: Run, number: int, fresh: bool) -> Tensors:
    return method.private_start(run.task, number, seed=run.seed) if fresh else run.private[number]


def _observed(
    method: Method,
    task: FedTask,
    client: int,
    state: Tensors,
    received: Tensors,
    own: Trained,
    run: Run,
    *,
    seed: int,
    fresh: bool,
) -> Observation:
    sent = method.message(state, client)
    weights = method.weights(run.task, sent, _private(method, run, client, fresh))
    inputs, targets = task.client(client).train
    model = LocalModel(task)
    model.train("body")
    body = weights.body.clone().requires_grad_()
    statistics = {name: value.clone() for name, value in weights.statistics.items()}
    loss = model.loss(body, weights.head, model.place(inputs), targets, statistics)
    (gradient,) = torch.autograd.grad(loss, body)
    movement = own.weights.body - weights.body
    return Observation(sent, received, inputs, targets, weights.body, gradient, movement)


def _small_task(task: FedTask, client: int, held: int, draw: int, seed: int) -> FedTask:
    data = task.client(client)
    if held > data.n:
        raise UsageError(f"Client {client} has {data.n} examples, not {held}.", cure="Ask for fewer.")
    generator = seeds.torch_generator(seed, "examples", client, draw)
    chosen = torch.randperm(data.n, generator=generator)[:held]
    small = ClientData((data.train[0][chosen], data.train[1][chosen]), data.test)
    return FedTask(task.body, task.head, {client: small}, task.loss)


def shortened(method: Method, threat: ThreatModel) -> Method:
    """Return the method with the threat model's batch size and steps, and without training of the head alone.

    Raises:
        Unsupported: The method has no local training to shorten.
        UsageError: The steps are no whole number of passes over the examples.
    """
    per_epoch = -(-threat.held // threat.batch_size)
    epochs, rest = divmod(threat.local_steps, per_epoch)
    if rest:
        raise UsageError(
            f"{threat.local_steps} steps of {threat.batch_size} are no whole passes over {threat.held} examples.",
            cure=f"Ask for a multiple of {per_epoch} steps.",
        )
    training = getattr(method, "training", None)
    if not isinstance(training, LocalTraining):
        raise Unsupported(f"The local rounds of {method.name!r} cannot be shortened.")
    changes: dict[str, Any] = {
        "training": dataclasses.replace(training, epochs=epochs, head_epochs=0, batch_size=threat.batch_size)
    }
    if hasattr(method, "steps"):
        changes["steps"] = threat.local_steps
    if hasattr(method, "phases"):
        kept = [phase for phase in method.phases if phase.trains != "head"]
        changes["phases"] = tuple(dataclasses.replace(phase, epochs=epochs) for phase in kept)
    return dataclasses.replace(method, **changes)  # type: ignore[type-var]


def dense_tensors(update: Update, state: Tensors) -> dict[str, Tensor]:
    """Return an update's tensors, low-rank matrices made whole."""
    tensors: Mapping[str, Tensor | LowRank] = update.tensors
    return {name: value.dense(state[name]) if isinstance(value, LowRank) else value for name, value in tensors.items()}
