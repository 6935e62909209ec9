"""A task's two halves run with weights given as flat vectors. One per thread: a module is not shared between threads.

The methods' local training and the evaluation call it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.methods.federate.reused_memory import ReusedMemory
from netweight.methods.federate.task import FedTask

__all__ = ["LocalModel"]


@final
class LocalModel:
    """Runs the body and the head of a task with any weights.

    Args:
        task: The task; its modules are copied.
        device: Where to run.

    Attributes:
        memory: For tensors of a round that are too large for the allocator to keep.
    """

    def __init__(self, task: FedTask, device: torch.device | str = "cpu") -> None:
        self.task = task
        self.device = torch.device(device)
        self.body = copy.deepcopy(task.body).to(self.device)
        self.head = copy.deepcopy(task.head).to(self.device)
        self._body, self._head = task.body_layout, task.head_layout
        self.memory = ReusedMemory()
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
        """Return the body's outputs with the weights `body`, shape `(P,)`; statistics change in training mode.

        Args:
            body: Shape `(P,)`.
            inputs: Shape `(n, …)`, as the body takes them.
            statistics: Running statistics by name; None for those that the body was made with.
        """
        weights = {**self._body_constants, **self._body.split(body), **(statistics or {})}
        return _call(self.body, weights, inputs)

    def classify(self, head: Tensor, features: Tensor) -> Tensor:
        """Return the head's outputs with the weights `head`, shape `(Q,)`.

        Args:
            head: Shape `(Q,)`.
            features: Shape `(n, …)`, what the body put out.
        """
        return _call(self.head, {**self._head_constants, **self._head.split(head)}, features)

    def loss(
        self,
        body: Tensor,
        head: Tensor,
        inputs: Tensor,
        targets: Tensor,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the mean loss of a batch, differentiable in both vectors.

        Args:
            body: Shape `(P,)`.
            head: Shape `(Q,)`.
            inputs: Shape `(n, …)`.
            targets: Shape `(n,)` for classes, or whatever the task's loss takes.
            statistics: Running statistics by name; None for those that the body was made with.
        """
        return self.task.loss(self.classify(head, self.features(body, inputs, statistics)), targets)

    def train(self, trains: Literal["head", "body", "both"]) -> None:
        """Set training mode for what learns; a body that does not learn is in evaluation mode.

        Args:
            trains: Which half learns.
        """
        self.body.train(trains != "head")
        self.head.train(trains != "body")

    @torch.no_grad()
    def accuracy(
        self, body: Tensor, head: Tensor, data: tuple[Tensor, Tensor], statistics: Mapping[str, Tensor] | None = None
    ) -> float:
        """Return the share of examples whose largest output is the target's, in evaluation mode.

        Args:
            body: Shape `(P,)`.
            head: Shape `(Q,)`.
            data: Inputs of shape `(n, …)` and targets of shape `(n,)`.
            statistics: Running statistics by name; None for those that the body was made with.
        """
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
        """Return inputs on the device, images with channels last, in which convolutions of small batches are faster.

        Args:
            inputs: Shape `(n, …)`.
        """
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
