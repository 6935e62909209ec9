"""The network of a task, run with any weights and with the buffers and random numbers of one client."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.reused_memory import ReusedMemory
from netweight.methods.federate.settings import Trains
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors

# Torch's generator of random numbers is one for the whole process: whoever draws from it takes it for that time.
_GENERATOR = threading.RLock()


@final
@dataclass
class LayerState:
    """State that a client's layers keep between batches; changes in place."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers by the names of `Task.initial_statistics`."""
    random: Tensor | None = None
    """State of the generator that dropout and the like draw from; None to draw from the process's own."""

    def of(self, half: str) -> dict[str, Tensor]:
        """Return the buffers of a half, "body" or "head", by the half's own names."""
        return {name.removeprefix(f"{half}."): value for name, value in self.buffers.items() if name.startswith(half)}

    def snapshot(self) -> LayerState:
        """Return a copy whose changes and draws leave this one as it is."""
        return LayerState({name: value.clone() for name, value in self.buffers.items()}, self.random)

    def copied(self) -> LayerState:
        """Return a copy whose changes leave this one as it is, and which draws from the process's generator."""
        return LayerState({name: value.clone() for name, value in self.buffers.items()})


@final
class LocalModel:
    """Runs the body and the head of a task with any weights; belongs to one thread.

    Args:
        task: The network and the clients' examples.
        device: Where to run.
    """

    def __init__(self, task: Task, device: torch.device | str = "cpu") -> None:
        self.task = task
        self.habits = task.habits
        self.device = torch.device(device)
        self.body = copy.deepcopy(task.body).to(self.device)
        self.head = copy.deepcopy(task.head).to(self.device)
        self._body, self._head = task.body_layout, task.head_layout
        # This memory is for tensors of a round that are too large for the allocator to keep.
        self.memory = ReusedMemory()
        self._body_constants, self._head_constants = _constants(self.body), _constants(self.head)
        self._first = LayerState({name: value.to(self.device) for name, value in task.initial_statistics().items()})

    def layer_state(self, buffers: Tensors, seed: int) -> LayerState:
        """Return what a client's layers keep as it begins to train.

        Args:
            buffers: The client's buffers, by the names of `Task.initial_statistics`; copied.
            seed: Seed of what its layers draw.
        """
        own = {name: value.to(self.device, copy=True) for name, value in buffers.items()}
        drawn = seeds.torch_generator(seed, "layers").get_state() if self.habits.random else None
        return LayerState({**self._first.copied().buffers, **own}, drawn)

    def features(self, body: Tensor, inputs: Tensor, state: LayerState | None = None) -> Tensor:
        """Return the body's outputs.

        Args:
            body: The body's trained weights, shape `(P,)`.
            inputs: Shape `(n, …)`.
            state: What the client's layers keep, which changes in training mode; None for the first buffers.
        """
        return self._call("body", self.body, {**self._body_constants, **self._body.split(body)}, inputs, state)

    def classify(self, head: Tensor, features: Tensor, state: LayerState | None = None) -> Tensor:
        """Return the head's outputs with the weights `head`, shape `(Q,)`; the rest as for `features`."""
        return self._call("head", self.head, {**self._head_constants, **self._head.split(head)}, features, state)

    def loss(
        self, body: Tensor, head: Tensor, inputs: Tensor, targets: Tensor, state: LayerState | None = None
    ) -> Tensor:
        """Return the mean loss of a batch, differentiable in both vectors."""
        return self.task.loss(self.classify(head, self.features(body, inputs, state), state), targets)

    def _call(
        self, half: str, module: nn.Module, weights: dict[str, Tensor], inputs: Tensor, state: LayerState | None
    ) -> Tensor:
        state = state or self._first.copied()
        if not state.buffers and not self.habits.random:
            return _run(module, weights, inputs)
        buffers = state.of(half)
        tensors = {**weights, **buffers}
        with self.drawing(state):
            outputs = _run(module, tensors, inputs)
        # Buffers that a layer assigns anew, such as a moving average, are kept as well.
        for name, before in buffers.items():
            if tensors[name] is not before:
                state.buffers[f"{half}.{name}"] = tensors[name].detach()
        return outputs

    @contextmanager
    def drawing(self, state: LayerState) -> Iterator[None]:
        """Let layers draw the client's own random numbers in the block, whatever other threads draw."""
        if state.random is None:
            yield
            return
        with _GENERATOR:
            others = torch.get_rng_state()
            torch.set_rng_state(state.random)
            try:
                yield
            finally:
                state.random = torch.get_rng_state()
                torch.set_rng_state(others)

    def train(self, trains: Trains) -> None:
        """Set training mode for what learns; a body that does not learn is in evaluation mode."""
        self.body.train(trains != "head")
        self.head.train(trains != "body")

    @torch.no_grad()
    def accuracy(
        self, body: Tensor, head: Tensor, data: tuple[Tensor, Tensor], buffers: Tensors | None = None
    ) -> float:
        """Return the share of examples whose largest output is the target's, in evaluation mode.

        Args:
            body: The body's trained weights, shape `(P,)`.
            head: The head's, shape `(Q,)`.
            data: Inputs, shape `(n, …)`, and class numbers, shape `(n,)`.
            buffers: The client's buffers by name, which stay as they are; None for the first ones.
        """
        self.body.eval()
        self.head.eval()
        body, head = body.to(self.device), head.to(self.device)
        state = self.layer_state(buffers or {}, 0)
        right = 0
        for inputs, targets in zip(*(torch.split(part, 256) for part in data), strict=True):
            outputs = self.classify(head, self.features(body, self.place(inputs), state), state)
            right += int((outputs.argmax(-1) == targets.to(self.device)).sum())
        return right / len(data[1])

    def place(self, inputs: Tensor) -> Tensor:
        """Return inputs on the device, images with channels last, in which convolutions of small batches are faster."""
        images = inputs.ndim == 4
        return inputs.to(self.device, memory_format=torch.channels_last if images else torch.preserve_format)


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Return what a module has beside trained parameters."""
    return {n: p for n, p in module.named_parameters() if not p.requires_grad} | dict(module.named_buffers())


def _run(module: nn.Module, tensors: dict[str, Tensor], inputs: Tensor) -> Tensor:
    return one_tensor(module, functional_call(module, tensors, (inputs,)))


def one_tensor(module: nn.Module, outputs: object) -> Tensor:
    """Return what a half of a network returned.

    Raises:
        UsageError: It is something else than a tensor, such as a tuple or an output of transformers.
    """
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"{type(module).__name__} returns {type(outputs).__name__}, not a tensor.",
            cure="Wrap it in a module that returns the features or the outputs alone.",
        )
    return outputs
