"""What is learned across clients: a model in two halves, each client's data, the model run with any weights.

And what a method is: what clients keep, receive and send, and how the server's state moves on.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from netweight.errors import NameNotFound, UsageError
from netweight.methods.federate.accounting import AnswerPrivacy, privacy_of
from netweight.methods.federate.settings import Trains
from netweight.methods.federate.updates import Tensors, Update
from netweight.nn import ParameterLayout

# Running statistics of normalization layers, by name.
Statistics = Mapping[str, Tensor]
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
        UsageError: A part is empty, or inputs and targets differ in number.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def __post_init__(self) -> None:
        """Check the numbers of examples."""
        for part, (inputs, targets) in (("training", self.train), ("test", self.test)):
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

    Raises:
        UsageError: There is no client, or a half has nothing to train.
    """

    body: nn.Module
    head: nn.Module
    data: Sequence[ClientData] | Mapping[int, ClientData]
    loss: Loss = F.cross_entropy
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Check that there is something to train and someone to train it."""
        if not self.data:
            raise UsageError("A federation needs at least one client.", cure="Give the data of one client or more.")
        for half, module in (("body", self.body), ("head", self.head)):
            if not any(parameter.requires_grad for parameter in module.parameters()):
                raise UsageError(
                    f"No parameter of the {half} requires gradients.", cure=f"Unfreeze what the {half} is to learn."
                )

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
        """Return the running statistics of the body's normalization layers that keep some, by name."""
        return {
            f"{name}.{buffer}" if name else buffer: value.clone()
            for name, module in copy.deepcopy(self.body).train().named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.training
            for buffer, value in module.named_buffers(recurse=False)
        }


def _trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}


@final
class LocalModel:
    """Runs the body and the head of a task with any weights."""

    def __init__(self, task: Task, device: torch.device | str = "cpu") -> None:
        self.task = task
        self.device = torch.device(device)
        self.body = copy.deepcopy(task.body).to(self.device)
        self.head = copy.deepcopy(task.head).to(self.device)
        self._body, self._head = task.body_layout, task.head_layout
        self.memory = ReusedMemory()  # for tensors of a round that are too large for the allocator to keep
        self._body_constants, self._head_constants = _constants(self.body), _constants(self.head)

    def features(self, body: Tensor, inputs: Tensor, statistics: Statistics | None = None) -> Tensor:
        """Return the body's outputs with the weights `body`, shape `(P,)`; statistics change in training mode."""
        weights = {**self._body_constants, **self._body.split(body), **(statistics or {})}
        return _call(self.body, weights, inputs)

    def classify(self, head: Tensor, features: Tensor) -> Tensor:
        """Return the head's outputs with the weights `head`, shape `(Q,)`."""
        return _call(self.head, {**self._head_constants, **self._head.split(head)}, features)

    def loss(
        self, body: Tensor, head: Tensor, inputs: Tensor, targets: Tensor, statistics: Statistics | None = None
    ) -> Tensor:
        """Return the mean loss of a batch, differentiable in both vectors."""
        return self.task.loss(self.classify(head, self.features(body, inputs, statistics)), targets)

    def train(self, trains: Trains) -> None:
        """Set training mode for what learns; a body that does not learn is in evaluation mode."""
        self.body.train(trains != "head")
        self.head.train(trains != "body")

    @torch.no_grad()
    def accuracy(
        self, body: Tensor, head: Tensor, data: tuple[Tensor, Tensor], statistics: Statistics | None = None
    ) -> float:
        """Return the share of examples whose largest output is the target's, in evaluation mode."""
        self.body.eval()
        self.head.eval()
        body, head = body.to(self.device), head.to(self.device)
        statistics = {name: value.to(self.device) for name, value in (statistics or {}).items()}
        right = 0
        for inputs, targets in zip(*(torch.split(part, 256) for part in data), strict=True):
            outputs = self.classify(head, self.features(body, self.place(inputs), statistics))
            right += int((outputs.argmax(-1) == targets.to(self.device)).sum())
        return right / len(data[1])

    def place(self, inputs: Tensor) -> Tensor:
        """Return inputs on the device, images with channels last, in which convolutions of small batches are faster."""
        images = inputs.ndim == 4
        return inputs.to(self.device, memory_format=torch.channels_last if images else torch.preserve_format)


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module has beside trained parameters."""
    return {n: p for n, p in module.named_parameters() if not p.requires_grad} | dict(module.named_buffers())


def _call(module: nn.Module, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    outputs = functional_call(module, weights, (inputs,), strict=True)
    assert isinstance(outputs, Tensor)
    return outputs


@final
class ReusedMemory:
    """Blocks of memory by name, each given out again once no tensor lies in it any more."""

    # The system's allocator returns blocks of this size at once, and the first touch of memory costs as much as the
    # work on it. A tensor made of an array keeps that very array alive: while it lives, its block is taken.

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[np.ndarray, weakref.ref[np.ndarray]]] = {}  # memory, and the array last given out

    def empty(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor with any values, of the kind and on the device of `like`."""
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        known = self._blocks.get(name)
        free = known is not None and len(known[0]) >= size and known[1]() is None
        block = known[0] if known is not None and free else np.empty(size, dtype=np.uint8)
        given = block[:size]
        self._blocks[name] = block, weakref.ref(given)
        return torch.from_numpy(given).view(like.dtype).view(shape)


@final
class SmallCNN(nn.Module):
    """The feature extractor: two convolutions for 28 × 28 images, three for 32 × 32, and a layer of 128 features."""

    # Source: HyperFL (arXiv 2412.07187), the networks for EMNIST and Fashion-MNIST, and for CIFAR-10 and CINIC-10.
    # `size`: height and width of an image, 28 or 32

    def __init__(self, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        if size not in (28, 32):
            raise UsageError(f"The small CNN takes images of 28 or 32 pixels, not {size}.", cure="Resize the images.")
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1) if size == 32 else None
        self.fc1 = nn.Linear(800 if size == 28 else 576, 128)

    def forward(self, images: Tensor) -> Tensor:
        """Return features, shape `(n, 128)`, of images, shape `(n, channels, size, size)`."""
        maps = images
        for convolution in (self.conv1, self.conv2, self.conv3):
            if convolution is not None:
                # Pooling first gives the same values, since leaky ReLU is monotone, for a quarter of the work.
                maps = F.leaky_relu(F.max_pool2d(convolution(maps), 2))
        return F.leaky_relu(self.fc1(maps.flatten(1)))


def small_cnn(channels: int = 1, size: int = 28, classes: int = 10, *, seed: int = 0) -> tuple[SmallCNN, nn.Linear]:
    """Return the feature extractor and its classifier with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallCNN(channels, size), nn.Linear(128, classes)


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
class Weights:
    """A client's model, ready to run."""

    body: Tensor  # the body's trained parameters, shape `(task.body_layout.size,)`
    head: Tensor  # the head's, shape `(task.head_layout.size,)`
    # The body's running statistics by name, where it has normalization layers that keep some.
    statistics: Statistics = field(default_factory=dict)

    def statistics_on(self, device: torch.device) -> dict[str, Tensor]:
        """Return a copy of the running statistics on a device, to train with."""
        return {name: value.to(device, copy=True) for name, value in self.statistics.items()}


def named_weights(task: Task, weights: Weights) -> dict[str, Tensor]:
    """Return a model's tensors with the prefixes that `from_named` reads."""
    return (
        prefixed("body.", task.body_layout.split(weights.body))
        | prefixed("head.", task.head_layout.split(weights.head))
        | prefixed(STATISTICS, weights.statistics)
    )


def from_named(task: Task, tensors: Tensors) -> Weights:
    """Return weights from tensors with the prefixes `body.`, `head.` and that of running statistics."""
    return Weights(
        task.body_layout.join(without("body.", tensors)),
        task.head_layout.join(without("head.", tensors)),
        without(STATISTICS, tensors),
    )


@final
@dataclass(frozen=True)
class Client:
    """One client as a round begins."""

    number: int  # its number in the task
    private: Tensors  # what it keeps between rounds and never sends: tensors by name
    received: Tensors  # what the server sent it in this round: tensors by name


@final
@dataclass(frozen=True)
class Trained:
    """One client as a round ends."""

    update: Update  # what it sends
    private: Tensors  # what it keeps: tensors by name
    weights: Weights  # its personal model after local training
    loss: float  # mean training loss over the round's steps


class Method(Protocol):
    """A federated method."""

    @property
    def name(self) -> str:
        """As the command line calls it."""
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

    def weights(self, task: Task, received: Tensors, private: Tensors) -> Weights:
        """Return a client's model before training on `task`: from what it `received` and keeps `private`, by name."""
        ...

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[Trained]:
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
class Wrapped:
    """A method whose clients do something else around its training; all but that is the method's own."""

    method: Method

    @property
    def name(self) -> str:
        """As the command line calls it."""
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

    def weights(self, task: Task, received: Tensors, private: Tensors) -> Weights:
        """Return a client's model."""
        return self.method.weights(task, received, private)

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the method's next state."""
        return self.method.aggregate(state, updates)

    def privacy(self, n: int) -> AnswerPrivacy:
        """Return what is known of the noise in one answer of a client with `n` examples."""
        return privacy_of(self.method, n)
