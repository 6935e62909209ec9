"""What every federated method is to an engine: five functions on plain tensors. The engines and the Flower app call it.

A method holds settings and no state. The server's state is a dictionary of tensors, a client's private tensors are
another; both go in and come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from torch import Tensor

from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.task import FedTask
from netweight.methods.federate.updates import Tensors, Update

__all__ = ["Client", "Method", "Trained", "Weights"]


@final
@dataclass(frozen=True)
class Weights:
    """A client's model, ready to run.

    Attributes:
        body: The body's trained parameters, shape `(task.body_layout.size,)`.
        head: The head's, shape `(task.head_layout.size,)`.
        statistics: The body's running statistics by name, where it has normalization layers that keep some.
    """

    body: Tensor
    head: Tensor
    statistics: Mapping[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Client:
    """One client as a round begins.

    Attributes:
        number: Its number in the task.
        private: What it keeps between rounds and never sends: tensors by name.
        received: What the server sent it in this round: tensors by name.
    """

    number: int
    private: Tensors
    received: Tensors


@final
@dataclass(frozen=True)
class Trained:
    """One client as a round ends.

    Attributes:
        update: What it sends.
        private: What it keeps: tensors by name.
        weights: Its personal model after local training.
        loss: Mean training loss over the round's steps.
    """

    update: Update
    private: Tensors
    weights: Weights
    loss: float


class Method(Protocol):
    """A federated method.

    Attributes:
        name: As the command line calls it.
        shared: Patterns (`core.names.Select`) of all names that may leave a client; anything else is private.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def shared(self) -> tuple[str, ...]: ...  # noqa: D102

    def start(self, task: FedTask, *, seed: int) -> dict[str, Tensor]:
        """Return the server's state before round 1.

        Args:
            task: Body, head and data.
            seed: The federation's seed.
        """
        ...

    def private_start(self, task: FedTask, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return what a client keeps to itself, before its first round.

        Args:
            task: Body, head and data.
            client: Its number.
            seed: The federation's seed.
        """
        ...

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return what the server sends to one client.

        Args:
            state: The server's tensors by name.
            client: Its number.
        """
        ...

    def weights(self, task: FedTask, received: Tensors, private: Tensors) -> Weights:
        """Return the model that a client has from what it received and what it keeps: the one "before" training.

        Args:
            task: Body, head and data.
            received: What the server sent: tensors by name.
            private: What the client keeps: tensors by name.
        """
        ...

    def train(
        self, task: FedTask, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[Trained]:
        """Train clients locally, in one thread, in any order; return them in the order given.

        Args:
            task: The task.
            model: Runs the task's two halves; belongs to the calling thread.
            clients: A share of the round's clients.
            round: The round, from 1.
            seed: The federation's seed; draws are derived from it by client and round.

        Returns:
            Updates, private tensors and personal models, in the order of `clients`.
        """
        ...

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the server's next state.

        Args:
            state: The server's tensors by name.
            updates: Sound ones, in the order of clients' numbers.
        """
        ...
