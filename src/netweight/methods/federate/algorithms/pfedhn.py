"""pFedHN: a hypernetwork that stays with the server generates every client's model.

The server's state holds all of it as plain tensors: the hypernetwork, every client's embedding, the momentum of both,
the clients' numbers, and where each generated tensor lies in the generated vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import NameNotFound, UsageError
from netweight.methods.federate.local import learners_of, train_steps
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import STATISTICS, Client, ClientWeights, LocalResult, from_named, prefixed
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors, Update
from netweight.nn import Hypernetwork, ParameterLayout
from netweight.nn.hypernetwork import hidden_code

EMBEDDINGS = "embeddings"
_CLIENTS, _LAYOUT, _VELOCITY = "clients", "layout.", "velocity."
_WEIGHT, _BIAS, _TRUNK = "heads.weight", "heads.bias", "trunk."


_TRAINING = LocalTraining(lr=5e-3, batch_size=64, momentum=0.9, weight_decay=5e-5)


@final
@dataclass(frozen=True)
class PFedHN:
    """pFedHN, and pFedHN-PC with `local_head`.

    The hypernetwork, the embeddings and their optimizer are the server's. In a round it generates the models of all
    clients asked, and afterwards takes one step with the sum of their gradients, so that each client pulls as hard as
    it would alone. The method's own code asks one client per round, for 5,000 rounds: with one client per round this is
    its algorithm. One step for each client in turn breaks down with 20 of them: with momentum, steps for what all
    clients have in common overshoot before any client trains again (tried: NaN in the third round).

    Source: Shamsian et al., pFedHN (arXiv 2103.04628), algorithm 1.
    """

    name: str = "pfedhn"
    local_head: bool = False
    """Keep the head with the client, which trains it together with the generated body."""
    steps: int = 50
    """Local steps in a round; passes over the examples follow each other until then."""
    training: LocalTraining = _TRAINING
    """Local learning rate, batch size, momentum and weight decay."""
    hidden: tuple[int, ...] = (100, 100, 100)
    """Widths of the hypernetwork's hidden layers, each followed by ReLU."""
    embedding: int | None = None
    """Length of an embedding; None takes 1 + N/4 for N clients."""
    lr: float = 1e-2
    """The server's learning rate."""
    momentum: float = 0.9
    """Momentum of the server's steps."""
    weight_decay: float = 1e-3
    """The server's; it takes hold of all embeddings in every step."""
    clip: float = 50.0
    """Largest norm of a step's whole gradient."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.steps < 1 or min(self.lr, self.clip) <= 0 or not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise UsageError(
                f"pFedHN cannot have {self.steps} local steps, learning rate {self.lr}, momentum {self.momentum}, "
                f"weight decay {self.weight_decay}, clip {self.clip}.",
                cure="Use at least 1 step, a rate and a clip above 0, a momentum in [0, 1), and a weight decay of at "
                "least 0.",
            )

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client: its trained model, as far as it is generated."""
        return ("body.**",) if self.local_head else ("body.**", "head.**")

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return a new hypernetwork, an embedding for every client, and an optimizer at rest."""
        layout = self._generated(task)
        length = self.embedding or 1 + len(task.clients) // 4
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "hypernetwork"))
            network = Hypernetwork(layout.size, embedding=length, hidden=self.hidden)
        embeddings = torch.randn(len(task.clients), length, generator=seeds.torch_generator(seed, "embeddings"))
        return first_state(network, embeddings, task.clients, layout)

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return running statistics, and the model's own head if it stays with the client."""
        head = prefixed("head.", task.head_layout.split(task.initial_head())) if self.local_head else {}
        return head | prefixed(STATISTICS, task.initial_statistics())

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return the client's own model, which the hypernetwork generates."""
        return ServerHypernetwork(state).generate(client)

    def weights(self, task: Task, received: Tensors, private: Tensors) -> ClientWeights:
        """Return the generated model, with the client's own head if it has one."""
        return from_named(task, {**private, **received})

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train each client's whole model by a number of steps."""
        learners = learners_of(self, task, clients, round=round, seed=seed)
        trained, losses = train_steps(model, learners, self.steps, self.training)
        return [
            self._trained(task, learner.number, weights, loss, round)
            for learner, weights, loss in zip(learners, trained, losses, strict=True)
        ]

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the state after one step with the gradients of all clients."""
        server, gradients = ServerHypernetwork(state), {}
        for update in sorted(updates, key=lambda update: update.client):
            gradients[update.client] = _difference(server.generate(update.client), update)
        server.step(gradients, self)
        return server.state

    def _generated(self, task: Task) -> ParameterLayout:
        """Return the layout of what the hypernetwork generates."""
        halves = [("body.", task.body_layout)] + ([] if self.local_head else [("head.", task.head_layout)])
        names = tuple(prefix + name for prefix, layout in halves for name in layout.names)
        return ParameterLayout(names, tuple(shape for _, layout in halves for shape in layout.shapes))

    def _trained(self, task: Task, number: int, weights: ClientWeights, loss: float, round: int) -> LocalResult:
        body = prefixed("body.", task.body_layout.split(weights.body))
        head = prefixed("head.", task.head_layout.split(weights.head))
        private = prefixed(STATISTICS, weights.statistics) | (head if self.local_head else {})
        sent = body if self.local_head else body | head
        update = Update(number, task.client(number).n, sent, round, {"loss": loss})
        return LocalResult(update, private, weights)


def _difference(sent: Tensors, update: Update) -> dict[str, Tensor]:
    """Return the weights that a client received minus those after training, which take the place of a gradient."""
    difference = {}
    for name, before in sent.items():
        after = update.tensors[name]
        if not isinstance(after, Tensor):
            raise UsageError(f"Client {update.client} sent {name!r} as a low-rank matrix; send it whole.")
        difference[name] = before - after.to(before)
    return difference


def pfedhn(training: LocalTraining = _TRAINING) -> PFedHN:
    """Return pFedHN: the whole model is generated, and the whole trained model goes to the server."""
    return PFedHN(training=training)


def pfedhn_pc(training: LocalTraining = _TRAINING) -> PFedHN:
    """Return pFedHN-PC: the body is generated, the head stays with the client."""
    return PFedHN("pfedhn-pc", local_head=True, training=training, lr=5e-2)


def first_state(
    network: Hypernetwork, embeddings: Tensor, clients: tuple[int, ...], layout: ParameterLayout
) -> dict[str, Tensor]:
    """Return the server's state before the first round."""
    learned = {name: value.detach().clone() for name, value in network.named_parameters()} | {EMBEDDINGS: embeddings}
    starts = [sum(layout.sizes[:position]) for position in range(len(layout.names))]
    places = {
        _LAYOUT + name: torch.tensor([start, *shape])
        for name, start, shape in zip(layout.names, starts, layout.shapes, strict=True)
    }
    velocity = {_VELOCITY + name: torch.zeros_like(value) for name, value in learned.items()}
    return learned | velocity | places | {_CLIENTS: torch.tensor(clients)}


@final
class ServerHypernetwork:
    """The server's state at work."""

    def __init__(self, state: Tensors) -> None:
        self._state = dict(state)
        self._rows = {int(number): row for row, number in enumerate(state[_CLIENTS].tolist())}
        self._learned = [name.removeprefix(_VELOCITY) for name in state if name.startswith(_VELOCITY)]

    @property
    def state(self) -> dict[str, Tensor]:
        """The state as it is now."""
        return self._state

    @torch.no_grad()
    def generate(self, client: int) -> dict[str, Tensor]:
        """Return a client's tensors by name."""
        codes = hidden_code(self._state, self._embedding(client))
        return self._named(torch.addmv(self._state[_BIAS], self._state[_WEIGHT], codes))

    def step(self, gradients: Mapping[int, Mapping[str, Tensor]], descent: PFedHN) -> None:
        """Take one step of SGD on hypernetwork and embeddings with the sum of clients' gradients."""
        total = {name: torch.zeros_like(self._state[name]) for name in self._learned}
        for client, gradient in gradients.items():
            self._add_pulled_back(total, client, gradient)
        norm = torch.stack([part.square().sum() for part in total.values()]).sum().sqrt()
        factor = float((descent.clip / (norm + 1e-6)).clamp(max=1))
        for name, part in total.items():
            value = self._state[name]
            velocity = self._state[_VELOCITY + name] * descent.momentum
            velocity.add_(part, alpha=factor).add_(value, alpha=descent.weight_decay)
            self._state[_VELOCITY + name] = velocity
            self._state[name] = value - descent.lr * velocity

    def _add_pulled_back(self, total: dict[str, Tensor], client: int, gradient: Mapping[str, Tensor]) -> None:
        """Add what a gradient of one client's tensors is for everything that is learned."""
        along = torch.empty_like(self._state[_BIAS])
        for name, (start, shape) in self._places().items():
            along[start : start + math.prod(shape)] = gradient[name].to(along).reshape(-1)
        small, codes = self._pulled_back(client, along)
        total[_WEIGHT].addr_(along, codes)
        total[_BIAS].add_(along)
        for name, part in small.items():
            total[name].add_(part)

    def _pulled_back(self, client: int, along: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the gradients of trunk and embeddings by name, and the codes that the heads saw."""
        trunk = {name: value.detach().requires_grad_() for name, value in self._trunk().items()}
        embedding = self._embedding(client).detach().requires_grad_()
        with torch.enable_grad():
            codes = hidden_code(trunk, embedding)
        into_codes = self._state[_WEIGHT].T @ along
        slopes = torch.autograd.grad(codes, [embedding, *trunk.values()], into_codes)
        embeddings = torch.zeros_like(self._state[EMBEDDINGS])
        embeddings[self._rows[client]] = slopes[0]
        return {EMBEDDINGS: embeddings, **dict(zip(trunk, slopes[1:], strict=True))}, codes.detach()

    def _trunk(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._state.items() if name.startswith(_TRUNK)}

    def _embedding(self, client: int) -> Tensor:
        if client not in self._rows:
            raise NameNotFound(f"The server has no embedding of client {client}.", cure="Begin with all clients.")
        return self._state[EMBEDDINGS][self._rows[client]]

    def _places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return where each generated tensor starts and its shape."""
        records = {n.removeprefix(_LAYOUT): v.tolist() for n, v in self._state.items() if n.startswith(_LAYOUT)}
        return {name: (numbers[0], tuple(numbers[1:])) for name, numbers in records.items()}

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        return {
            name: vector[start : start + math.prod(shape)].view(shape)
            for name, (start, shape) in self._places().items()
        }
