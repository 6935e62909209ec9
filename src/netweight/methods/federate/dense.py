"""Rounds in the usual way, one client after another by modules and `torch.optim.SGD`: what the engine is timed against.

FedAvg and HyperFL as one would write them with care and without this library: contiguous images, no copies but those
needed, gradients of the hypernetwork by autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.core import seeds
from netweight.generate import Hypernetwork, ParameterLayout
from netweight.methods.federate.config import LocalTraining
from netweight.methods.federate.direct import without
from netweight.methods.federate.generated_training import HYPERNETWORK
from netweight.methods.federate.hyperfl import HyperFL
from netweight.methods.federate.task import FedTask

__all__ = ["dense_fedavg", "dense_hyperfl"]


def dense_fedavg(task: FedTask, training: LocalTraining, *, seed: int) -> Callable[[], dict[str, Tensor]]:
    """Return a function that trains one round of FedAvg and returns the average, body and head numbered 0 and 1.

    Args:
        task: Model and data.
        training: Epochs, batch size, rates.
        seed: Of the batches.
    """
    server = nn.Sequential(copy.deepcopy(task.body), copy.deepcopy(task.head))
    draws = _Draws(task, training, seed)

    def round() -> dict[str, Tensor]:
        average = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for client, share in draws.shares():
            model = copy.deepcopy(server)
            optimizer = _sgd(model.parameters(), training.lr, training)
            for inputs, targets in draws.batches(client, training.epochs):
                optimizer.zero_grad()
                task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            _add(average, model, share)
        server.load_state_dict(average)
        return average

    return round


def dense_hyperfl(task: FedTask, training: LocalTraining, *, seed: int) -> Callable[[], dict[str, Tensor]]:
    """Return a function that trains one round of HyperFL and returns the average of the hypernetworks.

    Args:
        task: Model and data.
        training: Epochs, batch size, rates, clip.
        seed: Of weights and batches.
    """
    layout, body = ParameterLayout.of(task.body), copy.deepcopy(task.body)
    method = HyperFL(training)
    with torch.random.fork_rng(devices=[]):
        server = method.hypernetwork(task)
    server.load_state_dict(without(HYPERNETWORK, method.start(task, seed=seed)))
    private = {client: method.private_start(task, client, seed=seed) for client in task.clients}
    embeddings = {client: nn.Parameter(own["embedding"]) for client, own in private.items()}
    heads = {client: copy.deepcopy(task.head) for client in task.clients}
    draws = _Draws(task, training, seed)

    def train_head(client: int) -> None:
        with torch.no_grad():
            weights = layout.split(server(embeddings[client]))
        optimizer = _sgd(heads[client].parameters(), training.head_lr, training)
        for inputs, targets in draws.batches(client, training.head_epochs):
            with torch.no_grad():
                features = functional_call(body, weights, (inputs,))
            optimizer.zero_grad()
            task.loss(heads[client](features), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def train_generator(client: int) -> Hypernetwork:
        network, embedding, head = copy.deepcopy(server), embeddings[client], heads[client].requires_grad_(False)
        optimizer = _sgd([*network.parameters(), embedding], training.lr, training)
        for inputs, targets in draws.batches(client, training.epochs):
            optimizer.zero_grad()
            features = functional_call(body, layout.split(network(embedding)), (inputs,))
            task.loss(head(features), targets).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), training.clip)
            nn.utils.clip_grad_norm_([embedding], training.clip)
            optimizer.step()
        head.requires_grad_(True)
        return network

    def round() -> dict[str, Tensor]:
        average = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for client, share in draws.shares():
            train_head(client)
            _add(average, train_generator(client), share)
        server.load_state_dict(average)
        return average

    return round


class _Draws:
    """Clients in turn, and their batches in an order drawn anew each time."""

    def __init__(self, task: FedTask, training: LocalTraining, seed: int) -> None:
        self._task, self._size = task, training.batch_size
        self._generator = seeds.torch_generator(seed, "batches")

    def shares(self) -> Iterator[tuple[int, float]]:
        """Yield every client with its share of all examples."""
        total = sum(self._task.client(client).n for client in self._task.clients)
        for client in self._task.clients:
            yield client, self._task.client(client).n / total

    def batches(self, client: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's batches."""
        inputs, targets = self._task.client(client).train
        for _ in range(epochs):
            for index in torch.split(torch.randperm(len(inputs), generator=self._generator), self._size):
                yield inputs[index], targets[index]


def _sgd(parameters: object, lr: float, training: LocalTraining) -> torch.optim.SGD:
    return torch.optim.SGD(
        parameters,  # type: ignore[arg-type]  # modules' iterators and lists alike
        lr=lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )


@torch.no_grad()
def _add(average: dict[str, Tensor], model: nn.Module, share: float) -> None:
    for name, value in model.state_dict().items():
        average[name].add_(value, alpha=share)
