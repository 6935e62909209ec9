"""A worker's largest tensors in memory that is used again in the next round. Training of hypernetworks calls it.

The system's allocator gives blocks of this size back at once, and memory's first touch costs as much as the work on it.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.methods.federate.aggregate import LowRank, Tensors, Update
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.task import FedTask

# What `sys.getrefcount` says of an array that nobody else holds: the dictionary's reference and its argument.
_OWN_REFERENCES = 2


@final
class ReusedMemory:
    """Blocks of memory by name, each given out again once no tensor lies in it any more."""

    def __init__(self) -> None:
        self._blocks: dict[str, np.ndarray] = {}

    def empty(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor with any values, of the kind and on the device of `like`."""
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or not size:
            return like.new_empty(shape)
        if not self._is_free(name, size):
            self._blocks[name] = np.empty(size, dtype=np.uint8)
        return torch.from_numpy(self._blocks[name])[:size].view(like.dtype).view(shape)

    def _is_free(self, name: str, size: int) -> bool:
        """Whether a block is at hand: large enough, and without tensors, each of which holds a reference to it."""
        if name not in self._blocks:
            return False
        return len(self._blocks[name]) >= size and sys.getrefcount(self._blocks[name]) == _OWN_REFERENCES


class Heads(Protocol):
    """The heads of K clients while they train, each P × H with the bias as the last column, all begun at W₀."""

    # Codes are not negative and end with 1, for the bias.

    def generate(self, codes: Tensor, rows: Sequence[int]) -> Tensor:
        """Return W m of the clients `rows`, shape `(k, P)`, for codes of shape `(k, H)`."""
        ...

    def pull_back(self, gradients: Tensor, rows: Sequence[int]) -> Tensor:
        """Return Wᵀ g of the clients `rows`, shape `(k, H)`, for gradients of shape `(k, P)`."""
        # Only where the last codes were above 0: elsewhere ReLU lets nothing through and the value may be 0.
        ...

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Take one step of SGD with the gradients `clip · g mᵀ` of the clients `rows`; clips have shape `(k,)`."""
        ...

    def result(self, row: int) -> tuple[Tensor | LowRank, Tensor]:
        """Return a client's weights, as they are sent, and bias, shape `(P,)`."""
        ...


@final
class Coefficients:
    """The scalars of the low-rank form, the same for all clients that took as many steps; double precision."""

    def __init__(self, training: LocalTraining) -> None:
        self._training = training
        self.scale, self._drift = 1.0, 0.0  # scale: a_t, the factor of W₀ in W_t
        self.weights = torch.zeros(0, dtype=torch.float64)  # b_{t,i}, the factor of step i in W_t
        self._velocity = torch.zeros(0, dtype=torch.float64)

    def step(self) -> None:
        """Advance by one step."""
        decay, momentum = self._training.weight_decay, self._training.momentum
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        self._drift = momentum * self._drift + decay * self.scale
        self.scale -= self._training.lr * self._drift
        self._velocity = torch.cat([momentum * self._velocity - decay * self.weights, one])
        self.weights = torch.cat([self.weights, zero]) + self._training.lr * self._velocity


@final
class FactoredHeads:
    """Heads as factors: rank one more with each step."""

    # Of W₀ only the columns of codes that are above 0 are read, which ReLU leaves about half of.
    # `weight`: W₀ without the bias, shape `(P, H − 1)`
    # `bias`: shape `(P,)`

    def __init__(
        self, weight: Tensor, bias: Tensor, clients: int, steps: int, training: LocalTraining, memory: ReusedMemory
    ) -> None:
        generated, hidden = weight.shape
        self._weight = weight
        self._left = memory.empty("left", (clients, steps, generated), weight)  # g of each step
        self._right = weight.new_empty(clients, steps, hidden + 1)  # c m of each step
        self._taken = [0] * clients
        self._running = Coefficients(training)
        self._history: list[tuple[float, Tensor]] = [(1.0, weight.new_empty(0))]
        self._units = [hidden]  # whose columns of W₀ were read, in the order of the rows of `_base`
        self._base = memory.empty("base", (hidden + 1, generated), weight)
        self._base[0] = bias

    def generate(self, codes: Tensor, rows: Sequence[int]) -> Tensor:
        """Return W m of the clients `rows`: one product with W₀ for all of them, and a thin one for each."""
        self._read_columns_of(codes)
        generated = codes[:, self._units] @ self._base[: len(self._units)]
        for position, row in enumerate(rows):
            scale, weights, left, right = self._factors(row)
            _add(generated[position], left.T, weights * (right @ codes[position]), scale)
        return generated

    def pull_back(self, gradients: Tensor, rows: Sequence[int]) -> Tensor:
        """Return Wᵀ g of the clients `rows`, 0 where no code of any client was above 0."""
        pulled = gradients.new_zeros(len(rows), len(self._base))
        pulled[:, self._units] = gradients @ self._base[: len(self._units)].T
        for position, row in enumerate(rows):
            scale, weights, left, right = self._factors(row)
            _add(pulled[position], right.T, weights * (left @ gradients[position]), scale)
        return pulled

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Append one column to the factors of the clients `rows`."""
        scaled = codes * clips[:, None]
        for position, row in enumerate(rows):
            self._left[row, self._taken[row]] = gradients[position]
            self._right[row, self._taken[row]] = scaled[position]
            self._taken[row] += 1

    def result(self, row: int) -> tuple[LowRank, Tensor]:
        """Return a client's weights as factors, and the bias."""
        scale, weights, left, right = self._factors(row)
        columns = (right * weights[:, None]).T
        return LowRank(scale, left.T, columns[:-1]), scale * self._base[0] - left.T @ columns[-1]

    def _read_columns_of(self, codes: Tensor) -> None:
        """Read the columns of W₀ that codes above 0 need, if they are not at hand."""
        needed = (codes > 0).any(0)
        needed[self._units] = False
        if not needed.any():
            return
        known, new = len(self._units), needed.nonzero().flatten().tolist()
        self._base[known : known + len(new)] = self._weight[:, new].T
        self._units += new

    def _factors(self, row: int) -> tuple[float, Tensor, Tensor, Tensor]:
        """Return a client's scalars and factors after the steps that it has taken."""
        taken = self._taken[row]
        while len(self._history) <= taken:
            self._running.step()
            self._history.append((self._running.scale, self._running.weights.to(self._weight)))
        return *self._history[taken], self._left[row, :taken], self._right[row, :taken]


def _add(result: Tensor, matrix: Tensor, vector: Tensor, scale: float) -> None:
    """Turn `result` into `scale · result − matrix · vector`, in place."""
    torch.addmv(result, matrix, vector, beta=scale, alpha=-1, out=result)


@final
class DenseHeads:
    """Heads as dense matrices, one per client with its velocity: for more steps than the heads have inputs."""

    # `weight`: W₀ without the bias, shape `(P, H − 1)`
    # `bias`: shape `(P,)`

    def __init__(self, weight: Tensor, bias: Tensor, clients: int, training: LocalTraining) -> None:
        base = torch.cat([weight, bias[:, None]], dim=1)
        self._weights = [base.clone() for _ in range(clients)]
        self._velocity = [torch.zeros_like(base) for _ in range(clients)]
        self._training = training

    def generate(self, codes: Tensor, rows: Sequence[int]) -> Tensor:
        """Return W m of the clients `rows`."""
        return torch.stack([self._weights[row] @ code for row, code in zip(rows, codes, strict=True)])

    def pull_back(self, gradients: Tensor, rows: Sequence[int]) -> Tensor:
        """Return Wᵀ g of the clients `rows`."""
        return torch.stack([gradient @ self._weights[row] for row, gradient in zip(rows, gradients, strict=True)])

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Step each client's matrix."""
        for row, gradient, code in zip(rows, gradients, codes * clips[:, None], strict=True):
            velocity, weights = self._velocity[row], self._weights[row]
            velocity.mul_(self._training.momentum).addr_(gradient, code)
            velocity.add_(weights, alpha=self._training.weight_decay)
            weights.sub_(velocity, alpha=self._training.lr)

    def result(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a client's weights and bias."""
        return self._weights[row][:, :-1], self._weights[row][:, -1]


def heads_for(
    weight: Tensor, bias: Tensor, clients: int, steps: int, training: LocalTraining, memory: ReusedMemory
) -> Heads:
    """Return factored heads where the factors stay smaller than the matrix, dense ones otherwise."""
    if steps < weight.shape[1]:
        return FactoredHeads(weight, bias, clients, steps, training, memory)
    return DenseHeads(weight, bias, clients, training)


@final
class LocalModel:
    """Runs the body and the head of a task with any weights."""

    def __init__(self, task: FedTask, device: torch.device | str = "cpu") -> None:
        self.task = task
        self.device = torch.device(device)
        self.body = copy.deepcopy(task.body).to(self.device)
        self.head = copy.deepcopy(task.head).to(self.device)
        self._body, self._head = task.body_layout, task.head_layout
        self.memory = ReusedMemory()  # for tensors of a round that are too large for the allocator to keep
        self._body_constants, self._head_constants = _constants(self.body), _constants(self.head)

    def initial_statistics(self) -> dict[str, Tensor]:
        """Return the running statistics of the body's normalization layers that keep some, by name."""
        self.body.train()
        return {
            f"{name}.{buffer}" if name else buffer: value.clone()
            for name, module in self.body.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.training
            for buffer, value in module.named_buffers(recurse=False)
        }

    def features(self, body: Tensor, inputs: Tensor, statistics: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the body's outputs with the weights `body`, shape `(P,)`; statistics change in training mode."""
        weights = {**self._body_constants, **self._body.split(body), **(statistics or {})}
        return _call(self.body, weights, inputs)

    def classify(self, head: Tensor, features: Tensor) -> Tensor:
        """Return the head's outputs with the weights `head`, shape `(Q,)`."""
        return _call(self.head, {**self._head_constants, **self._head.split(head)}, features)

    def loss(
        self,
        body: Tensor,
        head: Tensor,
        inputs: Tensor,
        targets: Tensor,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the mean loss of a batch, differentiable in both vectors."""
        return self.task.loss(self.classify(head, self.features(body, inputs, statistics)), targets)

    def train(self, trains: Literal["head", "body", "both"]) -> None:
        """Set training mode for what learns; a body that does not learn is in evaluation mode."""
        self.body.train(trains != "head")
        self.head.train(trains != "body")

    @torch.no_grad()
    def accuracy(
        self, body: Tensor, head: Tensor, data: tuple[Tensor, Tensor], statistics: Mapping[str, Tensor] | None = None
    ) -> float:
        """Return the share of examples whose largest output is the target's, in evaluation mode."""
        self.body.eval()
        self.head.eval()
        body, head = body.to(self.device), head.to(self.device)
        statistics = {name: value.to(self.device) for name, value in (statistics or {}).items()}
        right = 0
        for inputs, targets in zip(*(torch.split(part, _EVALUATED_AT_ONCE) for part in data), strict=True):
            outputs = self.classify(head, self.features(body, self.place(inputs), statistics))
            right += int((outputs.argmax(-1) == targets.to(self.device)).sum())
        return right / len(data[1])

    def place(self, inputs: Tensor) -> Tensor:
        """Return inputs on the device, images with channels last, in which convolutions of small batches are faster."""
        if inputs.ndim == 4:
            return inputs.to(self.device, memory_format=torch.channels_last)
        return inputs.to(self.device)


_EVALUATED_AT_ONCE = 256


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module has beside trained parameters."""
    frozen = {name: value for name, value in module.named_parameters() if not value.requires_grad}
    return frozen | dict(module.named_buffers())


def _call(module: nn.Module, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    outputs = functional_call(module, weights, (inputs,), strict=True)
    assert isinstance(outputs, Tensor)
    return outputs


@final
@dataclass(frozen=True)
class Weights:
    """A client's model, ready to run.

    Attributes:
        body: The body's trained parameters, shape `(task.body_layout.size,)`.
        head: The head's, shape `(task.head_layout.size,)`.
        statistics: The body's running statistics by name, where it has normalization layers that keep some.
    """

    body: Tensor  # the body's trained parameters, shape `(task.body_layout.size,)`
    head: Tensor  # the head's, shape `(task.head_layout.size,)`
    # The body's running statistics by name, where it has normalization layers that keep some.
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

    number: int  # its number in the task
    private: Tensors  # what it keeps between rounds and never sends: tensors by name
    received: Tensors  # what the server sent it in this round: tensors by name


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

    update: Update  # what it sends
    private: Tensors  # what it keeps: tensors by name
    weights: Weights  # its personal model after local training
    loss: float  # mean training loss over the round's steps


class Method(Protocol):
    """A federated method.

    Attributes:
        name: As the command line calls it.
        shared: Patterns (`core.names.Select`) of all names that may leave a client; anything else is private.
    """

    @property
    def name(self) -> str: ...

    @property
    def shared(self) -> tuple[str, ...]: ...

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
