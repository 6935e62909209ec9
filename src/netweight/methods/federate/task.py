"""Learning task of a federation: a network in two halves, and each client's examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.errors import NameNotFound, UsageError
from netweight.methods.federate.habits import Habits, copied, habits_of, refuse_shared_weights
from netweight.nn import ParameterLayout

# Takes the head's outputs, shape `(n, …)`, and targets, shape `(n, …)`; returns the mean over n, a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]


@final
@dataclass(frozen=True)
class ClientData:
    """One client's examples.

    Attributes:
        train: Inputs, shape `(n, …)`, and targets, shape `(n, …)`, to learn from; n ≥ 1.
        test: The same to measure accuracy on; targets are class numbers, shape `(n,)`.

    Raises:
        UsageError: A part is no tensor or is empty, or inputs and targets differ in number.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def __post_init__(self) -> None:
        """Check the numbers of examples."""
        for part, (inputs, targets) in (("training", self.train), ("test", self.test)):
            for what, values in (("inputs", inputs), ("targets", targets)):
                if not isinstance(values, Tensor):
                    raise UsageError(
                        f"The {part} {what} of a client are a {type(values).__name__}, not a tensor.",
                        cure="Convert them by torch.tensor; targets that are names have to become class numbers from "
                        "0.",
                    )
            if len(inputs) != len(targets) or not len(inputs):
                raise UsageError(
                    f"A client's {part} data has {len(inputs)} inputs and {len(targets)} targets.",
                    cure="Give at least one input, and one target for each.",
                )

    @property
    def n(self) -> int:
        """Number of training examples."""
        return len(self.train[0])


@final
@dataclass(frozen=True)
class Task:
    """A model in two halves and the data of every client.

    Attributes:
        body: The feature extractor. Its parameters that require gradients are what methods share or generate; frozen
            parameters and plain buffers are constants that every client has.
        head: The classifier on top of the body's outputs.
        data: Each client's data by client number, or a sequence (clients are then numbered from 0).
        loss: Mean loss of outputs against targets.
        augment: Changes a batch of training inputs, given a generator; None for no augmentation. Both of shape `(n,
            …)`.
        remarks: What was decided in reading the data, in sentences that reports repeat.

    Raises:
        UsageError: There is no client, or a half has nothing to train.
    """

    body: nn.Module
    head: nn.Module
    data: Sequence[ClientData] | Mapping[int, ClientData]
    loss: Loss = F.cross_entropy
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = field(default=None, compare=False)
    remarks: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Check that there is something to train and someone to train it."""
        if not self.data:
            raise UsageError("A federation needs at least one client.", cure="Give the data of one client or more.")
        for half, module in (("body", self.body), ("head", self.head)):
            if not any(parameter.requires_grad for parameter in module.parameters()):
                raise UsageError(
                    f"No parameter of the {half} requires gradients.",
                    cure=f"Call requires_grad_(True) on what the {half} should learn.",
                )
        refuse_shared_weights(self.body, self.head)

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """All client numbers in order."""
        return tuple(sorted(self._by_number))

    @cached_property
    def _by_number(self) -> Mapping[int, ClientData]:
        # A mapping stays as it is: it may load a client's data when they are asked for, or have none on a server.
        return self.data if isinstance(self.data, Mapping) else dict(enumerate(self.data))

    def client(self, number: int) -> ClientData:
        """Return one client's data.

        Args:
            number: From the task's clients.

        Raises:
            NameNotFound: There is no such client.
        """
        if number not in self._by_number:
            raise NameNotFound(
                f"There is no client {number}.", cure=f"Clients are {self.clients[0]} to {self.clients[-1]}."
            )
        return self._by_number[number]

    @cached_property
    def body_layout(self) -> ParameterLayout:
        """The layout of the body's trained parameters."""
        return ParameterLayout.of(_trained(self.body))

    @cached_property
    def head_layout(self) -> ParameterLayout:
        """The layout of the head's trained parameters."""
        return ParameterLayout.of(_trained(self.head))

    def initial_body(self) -> Tensor:
        """Return the body's own weights as a vector, shape `(body_layout.size,)`."""
        return self.body_layout.join(_trained(self.body))

    def initial_head(self) -> Tensor:
        """Return the head's own weights as a vector, shape `(head_layout.size,)`."""
        return self.head_layout.join(_trained(self.head))

    def initial_statistics(self) -> dict[str, Tensor]:
        """Return copies of the buffers that may change in training, as `body.NAME` and `head.NAME`.

        Those are the buffers of all layers that are in training mode after `train()`: running statistics, vectors of
        spectral normalization, moving averages. They belong to a client and never to the process that trains it.
        """
        return {
            f"{half}.{name}.{buffer}" if name else f"{half}.{buffer}": value.detach().clone()
            for half, whole in (("body", self.body), ("head", self.head))
            for name, module in copied(whole).train().named_modules()
            if module.training
            for buffer, value in module.named_buffers(recurse=False)
        }

    def constants(self) -> dict[str, Tensor]:
        """Return what clients have before training beside trained parameters: frozen ones, and all buffers."""
        return {
            f"{half}.{name}": value.detach()
            for half, module in (("body", self.body), ("head", self.head))
            for name, value in (*module.named_parameters(), *module.named_buffers())
            if not value.requires_grad
        }

    @cached_property
    def habits(self) -> Habits:
        """Side effects of the network's training, found by trying it on some examples of a client."""
        inputs, _ = self.client(self.clients[0]).train
        return habits_of(self.body, self.head, inputs[:4])


def _trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
