"""Which examples go into which step, from a seed. Local training calls it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.method import LocalModel, Weights
from netweight.methods.federate.per_example import Batch, rule_for
from netweight.methods.federate.settings import LocalTraining, Phase


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Return the number of steps that go once through n examples."""
    return -(-n // batch_size)


def shuffled_batches(n: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield indices, shape `(up to batch_size,)`, of each step: every epoch goes once through all, in a new order."""
    generator = seeds.torch_generator(seed, "shuffle")
    for _ in range(epochs):
        yield from torch.split(torch.randperm(n, generator=generator), batch_size)


def poisson_batches(n: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield indices of each step, every example drawn on its own with probability `batch_size / n`."""
    generator = seeds.torch_generator(seed, "poisson")
    rate = min(1.0, batch_size / n)
    for _ in range(epochs * steps_per_epoch(n, batch_size)):
        yield torch.nonzero(torch.rand(n, generator=generator) < rate).flatten()


def padded(index: Tensor, multiple: int = 8) -> tuple[Tensor, Tensor]:
    """Return a batch's indices filled up to a multiple with its first one, and a mask of those that count."""
    # Kernels are chosen and cached by shape: so a few shapes recur. The examples added are of the batch itself.
    missing = -len(index) % multiple
    mask = torch.arange(len(index) + missing) < len(index)
    return torch.cat([index, index[:1].expand(missing)]), mask


@final
class Descent:
    """SGD with momentum and weight decay on rows of vectors, one row per client, in place."""

    def __init__(self, vectors: Tensor, lr: float, training: LocalTraining) -> None:
        self.vectors, self._lr, self._training = vectors, lr, training  # vectors: shape `(K, P)`
        self._velocity = torch.zeros_like(vectors)

    def step(self, gradients: Tensor, rows: Sequence[int]) -> None:
        """Move the rows given; the others, whose clients have finished, stay."""
        if len(rows) == len(self.vectors):
            self._move(self.vectors, self._velocity, gradients)
            return
        for position, row in enumerate(rows):
            self._move(self.vectors[row], self._velocity[row], gradients[position])

    def _move(self, vectors: Tensor, velocity: Tensor, gradients: Tensor) -> None:
        velocity.mul_(self._training.momentum).add_(gradients).add_(vectors, alpha=self._training.weight_decay)
        vectors.sub_(velocity, alpha=self._lr)


@final
class Stream:
    """One client's batches of one phase, in order, augmented where the task says so."""

    def __init__(
        self,
        model: LocalModel,
        client: int,
        epochs: int,
        batch_size: int,
        seed: int,
        sampling: Literal["shuffled", "poisson"] = "shuffled",
    ) -> None:
        inputs, self._targets = model.task.client(client).train
        self._inputs, self._targets = model.place(inputs), self._targets.to(model.device)
        self._augment = model.task.augment
        self._generator = seeds.torch_generator(seed, "augment")
        draw = poisson_batches if sampling == "poisson" else shuffled_batches
        self.indices = draw(len(inputs), batch_size, epochs, seed)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches."""
        for index in self.indices:
            yield self.batch(index)

    def batch(self, index: Tensor) -> Batch:
        """Return the batch of the examples `index`."""
        inputs = self._inputs[index]
        return (inputs if self._augment is None else self._augment(inputs, self._generator)), self._targets[index]


def train_clients(
    model: LocalModel,
    weights: Sequence[Weights],
    numbers: Sequence[int],
    phase: Phase,
    training: LocalTraining,
    *,
    seeds_by_client: Sequence[int],
) -> tuple[list[Weights], list[float]]:
    """Train clients by one phase without differential privacy; `private_training.py` is for the others."""
    if phase.privacy is not None:
        raise UsageError("A private phase was to be trained without privacy.", cure="Call `train_privately`.")
    if phase.trains == "head":
        found = [
            _train_head(model, w, number, phase, training, seed)
            for w, number, seed in zip(weights, numbers, seeds_by_client, strict=True)
        ]
        return [w for w, _ in found], [loss for _, loss in found]
    streams = [
        _batches(model, number, phase.epochs, training.batch_size, seed)
        for number, seed in zip(numbers, seeds_by_client, strict=True)
    ]
    return _train_streams(model, weights, streams, phase.trains, phase.lr, training)


def train_steps(
    model: LocalModel,
    weights: Sequence[Weights],
    numbers: Sequence[int],
    steps: int,
    training: LocalTraining,
    *,
    seeds_by_client: Sequence[int],
) -> tuple[list[Weights], list[float]]:
    """Train both halves of clients by a number of steps, whatever their numbers of examples."""
    streams = []
    for number, seed in zip(numbers, seeds_by_client, strict=True):
        epochs = -(-steps // steps_per_epoch(model.task.client(number).n, training.batch_size))
        streams.append(itertools.islice(_batches(model, number, epochs, training.batch_size, seed), steps))
    return _train_streams(model, weights, streams, "both", training.lr, training)


def _batches(model: LocalModel, number: int, epochs: int, batch_size: int, seed: int) -> Iterator[Batch]:
    """Yield a client's batches; its examples are placed when the first is asked for."""
    yield from Stream(model, number, epochs, batch_size, seed)


def _train_streams(
    model: LocalModel,
    weights: Sequence[Weights],
    streams: Sequence[Iterator[Batch]],
    trains: Literal["body", "both"],
    lr: float,
    training: LocalTraining,
) -> tuple[list[Weights], list[float]]:
    """Train clients by one stream of batches each."""
    if model.device.type != "cpu":
        return _train_group(model, weights, streams, trains, lr, training)
    pairs = [  # one client at a time stays in the processor's cache
        _train_group(model, [w], [stream], trains, lr, training) for w, stream in zip(weights, streams, strict=True)
    ]
    return [w for group, _ in pairs for w in group], [loss for _, losses in pairs for loss in losses]


def _train_group(
    model: LocalModel,
    weights: Sequence[Weights],
    streams: Sequence[Iterator[Batch]],
    trains: Literal["body", "both"],
    lr: float,
    training: LocalTraining,
) -> tuple[list[Weights], list[float]]:
    """Train clients step by step side by side."""
    statistics = [{name: value.to(model.device, copy=True) for name, value in w.statistics.items()} for w in weights]
    bodies = Descent(torch.stack([w.body for w in weights]).to(model.device), lr, training)
    heads = Descent(torch.stack([w.head for w in weights]).to(model.device), lr, training)
    model.train(trains)
    gradients = rule_for(model.device)
    total, count = torch.zeros(len(weights)), torch.zeros(len(weights))
    for rows, batches in side_by_side(streams):
        found = gradients(
            model, bodies.vectors[rows], heads.vectors[rows], batches, trains, [statistics[row] for row in rows]
        )
        if found.body is not None:
            bodies.step(found.body, rows)
        if found.head is not None:
            heads.step(found.head, rows)
        total[rows] += found.losses.cpu()
        count[rows] += 1
    trained = [Weights(b, h, s) for b, h, s in zip(bodies.vectors, heads.vectors, statistics, strict=True)]
    return trained, (total / count).tolist()


def side_by_side(streams: Sequence[Iterator[Batch]]) -> Iterator[tuple[list[int], list[Batch]]]:
    """Yield, step by step, the rows of the clients that still have a batch, and these batches."""
    rows = list(range(len(streams)))
    while True:
        step = [(row, batch) for row in rows if (batch := next(streams[row], None)) is not None]
        if not step:
            return
        rows = [row for row, _ in step]
        yield rows, [batch for _, batch in step]


def _train_head(
    model: LocalModel, weights: Weights, number: int, phase: Phase, training: LocalTraining, seed: int
) -> tuple[Weights, float]:
    """Train one client's head on the features of its body as it stands, which is in evaluation mode."""
    # Features are computed once unless inputs are augmented.
    model.train("head")
    stream = Stream(model, number, phase.epochs, training.batch_size, seed)
    head = Descent(weights.head.to(model.device, copy=True)[None], phase.lr, training)
    losses = []
    known = None if model.task.augment else _features(model, weights, model.task.client(number).train[0])
    targets = model.task.client(number).train[1].to(model.device)
    for index in stream.indices:
        if known is None:
            inputs, wanted = stream.batch(index)
            features = _features(model, weights, inputs)
        else:
            features, wanted = known[index], targets[index]
        vector = head.vectors[0].detach().requires_grad_()
        loss = model.task.loss(model.classify(vector, features), wanted)
        head.step(torch.autograd.grad(loss, vector)[0][None], [0])
        losses.append(float(loss.detach()))
    return Weights(weights.body.to(model.device), head.vectors[0], weights.statistics), sum(losses) / len(losses)


@torch.no_grad()
def _features(model: LocalModel, weights: Weights, inputs: Tensor) -> Tensor:
    parts = torch.split(model.place(inputs), 256)
    body = weights.body.to(model.device)
    statistics = {name: value.to(model.device) for name, value in weights.statistics.items()}
    return torch.cat([model.features(body, part, statistics) for part in parts])
