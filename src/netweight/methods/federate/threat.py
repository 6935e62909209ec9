"""Threat models, and what a server observes under each of them: one client's local round, short or as it really is.

The audit and the tables of attacks call it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.imprint import Imprinted, imprint
from netweight.core import seeds
from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.config import LocalTraining
from netweight.methods.federate.engine import Run
from netweight.methods.federate.generated_training import rows_of_body
from netweight.methods.federate.hardening import Hardened, dense_tensors
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Method
from netweight.methods.federate.task import ClientData, FedTask
from netweight.methods.federate.updates import Tensors, Update, aggregate

__all__ = ["Observation", "ThreatModel", "observe", "shortened"]


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
        server: "honest" sends what training gave; "malicious" sends a hypernetwork made to print images into updates.
        first_round: Attack the first round, from the method's initial state, rather than one more round of the
            trained federation.

    Raises:
        UsageError: A number is below 1.
    """

    batch_size: int = 1
    local_steps: int = 1
    examples: int | None = None
    summed_over: int = 1
    server: Literal["honest", "malicious"] = "honest"
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
        steps += ", malicious server" if self.server == "malicious" else ""
        return steps + (", first round" if self.first_round else "")


@final
@dataclass(frozen=True)
class Observation:
    """What a server observes of one client, and the truth that it does not see.

    Attributes:
        client: Its number.
        sent: What the server sent: tensors by name.
        trap: What a malicious server needs to read the answer; None for an honest one.
        updates: The updates whose average the server sees: the client's own, or those of a secure sum.
        images: The client's inputs, shape `(n, …)`; truth.
        labels: Their targets; truth. Shape `(n,)`.
        gradient: The gradient of its loss on its examples by the body that it began with, shape `(P,)`; truth.
        movement: How its body moved in the whole round, shape `(P,)`; truth.
    """

    client: int
    sent: Tensors
    trap: Imprinted | None
    updates: tuple[Update, ...]
    images: Tensor
    labels: Tensor
    gradient: Tensor
    movement: Tensor

    def received(self) -> dict[str, Tensor]:
        """Return what the server sees come back, low-rank matrices made whole."""
        if len(self.updates) > 1:
            return aggregate(self.sent, self.updates)
        return dense_tensors(self.updates[0].tensors, self.sent)


def observe(run: Run, threat: ThreatModel, clients: Sequence[int], *, draw: int = 0, seed: int) -> list[Observation]:
    """Let clients train as the threat model says and return what the server sees of each.

    A client's private head is not trained on these examples before: it is as the client has it from earlier rounds.
    Under secure aggregation the clients are summed in groups of the threat model's size, in the order given.

    Args:
        run: The federation; its method trains, on its clients' data.
        threat: Batch size, steps, examples, secure aggregation.
        clients: Who trains.
        draw: Number of the draw of their examples.
        seed: Decides which examples are drawn.

    Returns:
        One entry per client, in their order.

    Raises:
        UsageError: There are fewer clients than a sum needs, or a client has too few examples.
        Unsupported: The method's local rounds cannot be shortened.
    """
    if len(clients) < threat.summed_over:
        raise UsageError(f"{len(clients)} clients cannot be summed as {threat.summed_over}.")
    method = shortened(run.method, threat)
    state = method.start(run.task, seed=run.seed) if threat.first_round else run.state
    trap = _imprint(run, threat, state, seed) if threat.server == "malicious" else None
    if trap:  # a head that is generated after the body is left as it was
        state = {name: torch.cat([value, state[name][len(value) :]]) for name, value in trap.state.items()}
    seen = [_observed(method, run, threat, number, state, trap, draw, seed) for number in clients]
    size = threat.summed_over
    groups = [tuple(one.updates[0] for one in seen[start : start + size]) for start in range(0, len(seen), size)]
    if len(groups[-1]) < size:
        groups[-1] = (*groups[-2][len(groups[-1]) - size :], *groups[-1])
    return [dataclasses.replace(one, updates=groups[index // size]) for index, one in enumerate(seen)]


def _imprint(run: Run, threat: ThreatModel, state: Tensors, seed: int) -> Imprinted:
    """Make the hypernetwork of a malicious server, which knows images like the clients': here all their test images."""
    if not any(name.endswith("heads.weight") for name in state):
        raise Unsupported(f"The server of {run.method.name!r} sends no hypernetwork.")
    public = torch.cat([run.task.client(number).test[0] for number in run.task.clients])
    bounds = (float(public.min()), float(public.max()))
    images, bodies = max(threat.held, 2), rows_of_body(state, run.task.body_layout.size)
    return imprint(bodies, run.task.body, public=public, images=images, bounds=bounds, seed=seed)


def _observed(
    method: Method,
    run: Run,
    threat: ThreatModel,
    number: int,
    state: Tensors,
    trap: Imprinted | None,
    draw: int,
    seed: int,
) -> Observation:
    task = _small_task(run.task, number, threat.held, draw, seed)
    private = method.private_start(run.task, number, seed=run.seed) if threat.first_round else run.private[number]
    client = Client(number, private, method.message(state, number))
    model = LocalModel(task)
    found = method.train(task, model, [client], round=1, seed=seed)
    if not found:
        raise Unsupported(f"Client {number} takes no part under {threat.label}: it protects itself.")
    trained = found[0]
    weights = method.weights(run.task, client.received, private)
    inputs, targets = task.client(number).train
    model.train("body")
    body = weights.body.clone().requires_grad_()
    statistics = {name: value.clone() for name, value in weights.statistics.items()}
    loss = model.loss(body, weights.head, model.place(inputs), targets, statistics)
    (gradient,) = torch.autograd.grad(loss, body)
    movement = trained.weights.body - weights.body
    return Observation(number, client.received, trap, (trained.update,), inputs, targets, gradient, movement)


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

    Args:
        method: What the clients run.
        threat: Batch size and steps.

    Raises:
        Unsupported: The method has no local training to shorten.
        UsageError: The steps are no whole number of passes over the examples.
    """
    if isinstance(method, Hardened):  # the attacker may ask for fewer steps than the client agrees to
        return dataclasses.replace(method, method=shortened(method.method, threat))
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
