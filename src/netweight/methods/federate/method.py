"""Base class of federated methods: what clients keep, receive and send, and how the server's state advances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import Tensor

from netweight.methods.federate.accounting import AnswerPrivacy, privacy_of
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors, Update

# Prefix of running statistics of normalization layers, which stay with their client in every method.
STATISTICS = "statistics."


def prefixed(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors under names that begin with a prefix."""
    return {prefix + name: value for name, value in tensors.items()}


def without(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@final
@dataclass(frozen=True)
class ClientWeights:
    """A client's model, ready to run."""

    body: Tensor
    """The body's trained parameters, shape `(task.body_layout.size,)`."""
    head: Tensor
    """The head's, shape `(task.head_layout.size,)`."""
    statistics: Tensors = field(default_factory=dict)
    """The layers' buffers, such as running statistics, by the names of `Task.initial_statistics`."""


def named_weights(task: Task, weights: ClientWeights) -> dict[str, Tensor]:
    """Return a model's tensors with the prefixes that `from_named` reads."""
    return (
        prefixed("body.", task.body_layout.split(weights.body))
        | prefixed("head.", task.head_layout.split(weights.head))
        | prefixed(STATISTICS, weights.statistics)
    )


def from_named(task: Task, tensors: Tensors) -> ClientWeights:
    """Return weights from tensors with the prefixes `body.`, `head.` and that of running statistics."""
    return ClientWeights(
        task.body_layout.join(without("body.", tensors)),
        task.head_layout.join(without("head.", tensors)),
        without(STATISTICS, tensors),
    )


@final
@dataclass(frozen=True)
class Client:
    """One client as a round begins."""

    number: int
    """Number of the client in the task."""
    private: Tensors
    """Tensors by name that the client keeps between rounds and never sends."""
    message: Tensors
    """Tensors by name that the server sent in this round."""


@final
@dataclass(frozen=True)
class LocalResult:
    """One client as a round ends: what leaves it, and what stays."""

    update: Update
    """Update that is sent; its metrics contain the mean training loss over the round's steps as "loss"."""
    private: Tensors
    """Tensors by name that the client keeps."""
    weights: ClientWeights
    """Personal model of the client after local training."""


class Method(Protocol):
    """A federated method."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        ...

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns (`netweight.Select`) of all names that may leave a client; anything else is private."""
        ...

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return the server's tensors before round 1 of `task`, by name; `seed` is the federation's."""
        ...

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return what `client` keeps to itself before its first round of `task`: tensors by name; `seed` as above."""
        ...

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return what the server with the tensors `state` sends to `client`, by name."""
        ...

    def weights(self, task: Task, received: Tensors, private: Tensors) -> ClientWeights:
        """Return a client's model before training on `task`: from what it `received` and keeps `private`, by name."""
        ...

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Return clients after local training, in the order given; they are trained in one thread, in any order.

        Args:
            task: The task.
            model: Runs the task's two halves; belongs to the calling thread.
            clients: A share of the round's clients.
            round: The round, from 1.
            seed: The federation's seed; draws are derived from it by client and round.
        """
        ...

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the server's tensors after `state`, given validated `updates` in the order of clients' numbers."""
        ...


@dataclass(frozen=True)
class MethodWrapper:
    """A method whose clients do something else around its training; all but that is the method's own."""

    method: Method

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.method.name

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client."""
        return self.method.shared

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return the method's state before round 1."""
        return self.method.start(task, seed=seed)

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return what a client keeps."""
        return self.method.private_start(task, client, seed=seed)

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return what the server sends."""
        return self.method.message(state, client)

    def weights(self, task: Task, received: Tensors, private: Tensors) -> ClientWeights:
        """Return a client's model."""
        return self.method.weights(task, received, private)

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the method's next state."""
        return self.method.aggregate(state, updates)

    def privacy(self, n: int) -> AnswerPrivacy:
        """Return what is known of the noise in one answer of a client with `n` examples."""
        return privacy_of(self.method, n)
