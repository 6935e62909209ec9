"""Observations: what a server under a threat model receives from a client, and the truth to compare attacks with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from netweight.attacks.gradient_inversion.analytic import (
    HypernetworkChange,
    RecoveredGradient,
    hypernetwork_tensors,
    threshold_trunk,
)
from netweight.attacks.gradient_inversion.chains import Imprint, imprint
from netweight.core import seeds
from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.algorithms.hyperfl import rows_of_body
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Method, prefixed
from netweight.methods.federate.task import ClientData, Task
from netweight.methods.federate.threats import ThreatModel, shortened, training_of
from netweight.methods.federate.updates import Tensors, Update, dense_tensors
from netweight.nn.hypernetwork import hidden_code

# Logit by which a server that fishes makes its class unlikely, so that images of others find nothing to correct.
_UNLIKELY = 20.0


@final
@dataclass(frozen=True)
class Observation:
    """A server's observation of one client, and the truth that it does not see."""

    client: int
    """Number of the client."""
    message: Tensors
    """Tensors by name that the server sent."""
    trap: Imprint | None
    """Information with which a malicious server reads the answer; None for an honest one."""
    updates: tuple[Update, ...]
    """The updates whose average the server sees: the client's own, or those of a secure sum."""
    images: Tensor
    """The client's inputs, shape `(n, …)`; truth."""
    labels: Tensor
    """True targets of the images, shape `(n,)`."""
    gradient: Tensor
    """The gradient of its loss on its examples by the body that it began with, shape `(P,)`; truth."""
    movement: Tensor
    """True change of the client's body in the whole round, shape `(P,)`."""
    codes: Tensor | None
    """Hidden codes of the clients summed, shape `(k, H)`, its own first; None without hypernetwork."""

    def answer(self) -> dict[str, Tensor]:
        """Return what the server sees come back, low-rank matrices made whole."""
        if len(self.updates) > 1:
            return aggregate(self.message, self.updates)
        return dense_tensors(self.updates[0].tensors, self.message)


def observe(
    run: TrainedFederation, threat: ThreatModel, clients: Sequence[int], *, draw: int = 0, seed: int
) -> list[Observation]:
    """Let clients train as the threat model says and return what the server sees of each."""
    # A client's private head is not trained on these examples before: it is as the client has it from earlier rounds.
    # Under secure aggregation the clients are summed in groups of the threat model's size, in the order given.
    if len(clients) < threat.summed_over:
        raise UsageError(f"A sum over {threat.summed_over} clients cannot be formed from {len(clients)} clients.")
    method = shortened(run.method, threat)
    state = method.start(run.task, seed=run.seed) if threat.first_round else run.state
    trap = _imprint(run, threat, state, seed) if threat.server == "imprint" else None
    if threat.server == "thresholds":
        state = threshold_trunk(state, seed=seed)
    # A head that is generated after the body does not change.
    if trap:
        state = {name: torch.cat([value, state[name][len(value) :]]) for name, value in trap.state.items()}
    states = _fishing(run, state) if threat.server == "fishing" else [state]
    observations = [
        _likeliest(run, [_observed(method, run, threat, number, one, trap, draw, seed) for one in states])
        for number in clients
    ]
    size = threat.summed_over
    groups = [observations[start : start + size] for start in range(0, len(observations), size)]
    if len(groups[-1]) < size:
        groups[-1] = [*groups[-2][len(groups[-1]) - size :], *groups[-1]]
    return [_in_sum(one, groups[index // size]) for index, one in enumerate(observations)]


def _in_sum(one: Observation, group: Sequence[Observation]) -> Observation:
    codes = [other.codes for other in (one, *(other for other in group if other is not one))]
    joined = torch.cat([code for code in codes if code is not None]) if one.codes is not None else None
    return replace(one, updates=tuple(other.updates[0] for other in group), codes=joined)


def _imprint(run: TrainedFederation, threat: ThreatModel, state: Tensors, seed: int) -> Imprint:
    """Make the hypernetwork of a malicious server, which knows images like the clients': here all their test images."""
    if not any(name.endswith("heads.weight") for name in state):
        raise Unsupported(f"The server of {run.method.name!r} does not send a hypernetwork.")
    public = torch.cat([run.task.client(number).test[0] for number in run.task.clients])
    bounds = (float(public.min()), float(public.max()))
    images, bodies = max(threat.client_examples, 2), rows_of_body(state, run.task.body_layout.size)
    return imprint(bodies, run.task.body, public=public, images=images, bounds=bounds, seed=seed)


def _fishing(run: TrainedFederation, state: Tensors) -> list[dict[str, Tensor]]:
    """Return a state for each class whose classifier lets no other class's images change the body.

    Source: Wen et al. (arXiv 2202.00580), class fishing.
    """
    head, body = run.task.head, run.task.body_layout.size
    if not isinstance(head, nn.Linear):
        raise Unsupported("The head is not a linear classifier, which a server that fishes for one class needs.")
    states = []
    for label in range(head.out_features):
        weight, bias = torch.zeros_like(head.weight), torch.zeros_like(head.bias)
        weight[label], bias[label] = head.weight.detach()[label], -_UNLIKELY
        chosen = {"weight": weight, "bias": bias}
        made = dict(state)
        if "head.weight" in state:
            made |= prefixed("head.", chosen)
        elif heads := [name for name in state if name.endswith("heads.bias") and len(state[name]) > body]:
            vector, name = run.task.head_layout.join(chosen), heads[0].removesuffix("bias")
            for part, rows in (("weight", 0 * state[f"{name}weight"][body:]), ("bias", vector)):
                made[name + part] = torch.cat([state[name + part][:body], rows])
        else:
            raise Unsupported(
                f"{run.method.name!r} leaves the classifier with the client: a server that fishes for one class "
                f"has nothing to change."
            )
        states.append(made)
    return states


def _likeliest(run: TrainedFederation, observations: Sequence[Observation]) -> Observation:
    """Return the answer whose first linear layer's gradient is most nearly one image's, of rank one."""

    def share(one: Observation) -> float:
        try:
            gradient = run.task.body_layout.split(read_update(run, one.message, one.answer()).first)
        except UsageError:
            # The client does not have an image of this class, so its update contains nothing.
            return 0.0
        values = torch.linalg.svdvals(gradient[f"{linear}.weight"]).square()
        return float(values[0] / values.sum().clamp_min(1e-30))

    linear = next((name for name, module in run.task.body.named_modules() if isinstance(module, nn.Linear)), "")
    return max(observations, key=share) if len(observations) > 1 else observations[0]


def _observed(
    method: Method, run: TrainedFederation, threat: ThreatModel, number: int, state: Tensors, trap: Imprint | None,
    draw: int, seed: int,
) -> Observation:  # fmt: skip
    if run.task.habits.needs_two and min(threat.client_examples, threat.batch_size) == 1:
        raise Unsupported("This network normalizes over the batch and is not trained on single examples.")
    task = _small_task(run.task, number, threat.client_examples, draw, seed)
    private = method.private_start(run.task, number, seed=run.seed) if threat.first_round else run.private[number]
    client = Client(number, private, method.message(state, number))
    model = LocalModel(task)
    results = method.train(task, model, [client], round=1, seed=seed)
    if not results:
        raise Unsupported(f"Client {number} does not take part under {threat.label}, because it protects itself.")
    trained = results[0]
    update = trained.update if threat.queries == 1 else _averaged(method, task, model, client, threat.queries, seed)
    weights = method.weights(run.task, client.message, private)
    inputs, targets = task.client(number).train
    model.train("body")
    body = weights.body.clone().requires_grad_()
    buffers = model.layer_state(weights.statistics, seed)
    loss = model.loss(body, weights.head, model.place(inputs), targets, buffers)
    (gradient,) = torch.autograd.grad(loss, body)
    movement = trained.weights.body - weights.body
    codes = None
    if "embedding" in private:
        codes = hidden_code(hypernetwork_tensors(client.message), private["embedding"])[None]
    return Observation(number, client.message, trap, (update,), inputs, targets, gradient, movement, codes)


def _averaged(method: Method, task: Task, model: LocalModel, client: Client, answers: int, seed: int) -> Update:
    """Return the mean of a client's answers to the same state."""
    total: dict[str, Tensor] = {}
    for turn in range(answers):
        own = seeds.derive(seed, "asked", turn)
        (one,) = method.train(task, model, [client], round=1, seed=own)
        for name, value in dense_tensors(one.update.tensors, client.message).items():
            total[name] = total.get(name, 0) + value / answers
    return replace(one.update, tensors=total)


def _small_task(task: Task, client: int, held: int, draw: int, seed: int) -> Task:
    data = task.client(client)
    if held > data.n:
        raise UsageError(
            f"Client {client} has {data.n} examples, not {held}.",
            cure=f"Attack batches of at most {data.n} examples (in a command: --threat {data.n}x1).",
        )
    generator = seeds.torch_generator(seed, "examples", client, draw)
    chosen = torch.randperm(data.n, generator=generator)[:held]
    small = ClientData((data.train[0][chosen], data.train[1][chosen]), data.test)
    return Task(task.body, task.head, {client: small}, task.loss)


def read_update(run: TrainedFederation, sent: Tensors, received: Tensors) -> RecoveredGradient:
    """Return what the server computes from what it sent and received."""
    if change := update_change(run, sent, received):
        return change.recovered()
    training = training_of(run)
    body = {name.removeprefix("body."): value for name, value in sent.items() if name.startswith("body.")}
    if not body:
        raise Unsupported(f"{run.method.name!r} shares nothing of the body, so there is nothing to attack.")
    layout = run.task.body_layout
    start = layout.join(body).double()
    end = layout.join({name: received[f"body.{name}"] for name in body}).double()
    gradient = (start - end) / training.lr - training.weight_decay * start
    nothing = torch.empty(0, dtype=torch.float64)
    return RecoveredGradient(gradient, gradient, nothing, nothing, start, end - start, torch.ones(1).double())


def update_change(run: TrainedFederation, sent: Tensors, received: Tensors) -> HypernetworkChange | None:
    """Return the change of the hypernetwork that generates the body, if the method has one."""
    if not any(name.endswith("heads.weight") for name in sent):
        return None
    training, size = training_of(run), run.task.body_layout.size
    before, after = (rows_of_body(state, size) for state in (sent, received))
    return HypernetworkChange(before, after, lr=training.lr, weight_decay=training.weight_decay)
