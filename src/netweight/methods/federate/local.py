"""Local SGD: which examples go into which step, each client's gradients, and the steps, plain or private."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from netweight.core import seeds
from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.clipped_gradients import Batch, PrivateStep, clipped_sum
from netweight.methods.federate.local_model import LayerState, LocalModel
from netweight.methods.federate.method import Client, ClientWeights, Method
from netweight.methods.federate.settings import LocalTraining, Phase, Privacy, Sampling, Trains
from netweight.methods.federate.task import Task

# Takes "body" or "head" and that half's vector; returns what is added to its gradient.
Extra = Callable[[str, Tensor], Tensor]
# Each client's weights and mean loss.
_Trained = tuple[list[ClientWeights], list[float]]


@final
@dataclass(frozen=True)
class Learner:
    """A client before a stretch of local training."""

    number: int
    """Number of the client in the task."""
    weights: ClientWeights
    """Model before the training."""
    seed: int
    """Seed of the client's random draws."""
    extra: Extra | None = None
    """Added to the gradients of plain steps of body and head."""


def learners_of(method: Method, task: Task, clients: Sequence[Client], *, round: int, seed: int) -> list[Learner]:
    """Return the clients of a round with the models that they begin with."""
    return [
        Learner(
            client.number, method.weights(task, client.message, client.private),
            seeds.derive(seed, "client", client.number, "round", round),
        )
        for client in clients
    ]  # fmt: skip


def train_phase(model: LocalModel, clients: Sequence[Learner], phase: Phase, training: LocalTraining) -> _Trained:
    """Train clients by one phase; return their weights and mean losses, in the order given."""
    if phase.privacy is None and phase.trains != "head":
        streams = [_batches(model, client, phase.epochs, training.batch_size) for client in clients]
        return _train_streams(model, clients, streams, phase.trains, phase.lr, training)
    train = _train_head if phase.privacy is None else _train_privately
    trained = [train(model, client, phase, training) for client in clients]
    return [weights for weights, _ in trained], [loss for _, loss in trained]


def train_steps(model: LocalModel, clients: Sequence[Learner], steps: int, training: LocalTraining) -> _Trained:
    """Train both halves of clients by a number of steps, whatever their numbers of examples."""
    streams = []
    for client in clients:
        n = model.task.client(client.number).n
        epochs = -(-steps // steps_per_epoch(n, training.batch_size, needs_two=model.habits.needs_two))
        streams.append(itertools.islice(_batches(model, client, epochs, training.batch_size), steps))
    return _train_streams(model, clients, streams, "both", training.lr, training)


def _batches(model: LocalModel, client: Learner, epochs: int, batch_size: int) -> Iterator[Batch]:
    """Yield a client's batches; its examples are placed when the first is asked for."""
    yield from Stream(model, client, epochs, batch_size)


def _train_streams(
    model: LocalModel, clients: Sequence[Learner], streams: Sequence[Iterator[Batch]], trains: Literal["body", "both"],
    lr: float, training: LocalTraining,
) -> _Trained:  # fmt: skip
    """Train clients by one stream of batches each."""
    # The data of a single client stay in the processor's cache.
    if model.device.type == "cpu" and len(clients) > 1:
        singles = [
            _train_streams(model, [client], [stream], trains, lr, training)
            for client, stream in zip(clients, streams, strict=True)
        ]
        return [weights[0] for weights, _ in singles], [losses[0] for _, losses in singles]
    states = [model.layer_state(client.weights.statistics, client.seed) for client in clients]
    bodies = RowwiseSGD(torch.stack([client.weights.body for client in clients]).to(model.device), lr, training)
    heads = RowwiseSGD(torch.stack([client.weights.head for client in clients]).to(model.device), lr, training)
    model.train(trains)
    gradients = rule_for(model)
    total, count = torch.zeros(len(clients)), torch.zeros(len(clients))
    for rows, batches in side_by_side(streams):
        own = [states[row] for row in rows]
        batch_gradients = gradients(model, bodies.vectors[rows], heads.vectors[rows], batches, trains, own)
        for half, descent, slopes in (("body", bodies, batch_gradients.body), ("head", heads, batch_gradients.head)):
            if slopes is not None:
                descent.step(_with_extra(clients, half, descent, slopes, rows), rows)
        total[rows] += batch_gradients.losses.cpu()
        count[rows] += 1
    ends = zip(bodies.vectors, heads.vectors, states, strict=True)
    trained = [ClientWeights(body, head, state.buffers) for body, head, state in ends]
    return trained, (total / count).tolist()


def _with_extra(
    clients: Sequence[Learner], half: str, descent: RowwiseSGD, slopes: Tensor, rows: Sequence[int]
) -> Tensor:
    """Return gradients with what clients add to theirs."""
    added = [(place, row, extra) for place, row in enumerate(rows) if (extra := clients[row].extra) is not None]
    for place, row, extra in added:
        slopes[place] += extra(half, descent.vectors[row])
    return slopes


def side_by_side(streams: Sequence[Iterator[Batch]]) -> Iterator[tuple[list[int], list[Batch]]]:
    """Yield, step by step, the rows of the clients that still have a batch, and these batches."""
    rows = list(range(len(streams)))
    while step := [(row, batch) for row in rows if (batch := next(streams[row], None)) is not None]:
        rows = [row for row, _ in step]
        yield rows, [batch for _, batch in step]


def _train_head(
    model: LocalModel, client: Learner, phase: Phase, training: LocalTraining
) -> tuple[ClientWeights, float]:
    """Train one client's head on the features of its body as it stands, which is in evaluation mode."""
    # Features are computed once unless inputs are augmented.
    model.train("head")
    weights, (inputs, targets) = client.weights, model.task.client(client.number).train
    stream = Stream(model, client, phase.epochs, training.batch_size)
    head = RowwiseSGD(weights.head.to(model.device, copy=True)[None], phase.lr, training)
    losses = []
    state = model.layer_state(weights.statistics, client.seed)
    features_of_all = None if model.task.augment else _features(model, weights, inputs, state)
    targets = targets.to(model.device)
    for index in stream.indices:
        if features_of_all is None:
            inputs, labels = stream.batch(index)
            features = _features(model, weights, inputs, state)
        else:
            features, labels = features_of_all[index], targets[index]
        vector = head.vectors[0].detach().requires_grad_()
        loss = model.task.loss(model.classify(vector, features, state), labels)
        head.step(torch.autograd.grad(loss, vector)[0][None], [0])
        losses.append(float(loss.detach()))
    return ClientWeights(weights.body.to(model.device), head.vectors[0], state.buffers), sum(losses) / len(losses)


@torch.no_grad()
def _features(model: LocalModel, weights: ClientWeights, inputs: Tensor, state: LayerState) -> Tensor:
    body = weights.body.to(model.device)
    return torch.cat([model.features(body, part, state) for part in torch.split(model.place(inputs), 256)])


def _train_privately(
    model: LocalModel, client: Learner, phase: Phase, training: LocalTraining
) -> tuple[ClientWeights, float]:
    """Train one client by DP-SGD.

    Every step clips each example's gradient, adds Gaussian noise to their sum and divides by the expected batch size.
    The noise comes from the federation's seed, so that a run can be repeated; who knows the seed can take the noise off
    again. Where that matters, each client must draw a seed of its own and keep it.

    Source: Abadi et al. (arXiv 1607.00133), algorithm 1.
    """
    assert phase.privacy is not None
    stream = Stream(model, client, phase.epochs, training.batch_size, phase.privacy.sampling)
    model.train("both" if phase.head_lr is not None else phase.trains)
    private = _PrivateSteps(model, client, phase, phase.privacy, training)
    losses = []
    for step, index in enumerate(stream.indices):
        noise = seeds.torch_generator(client.seed, "noise", step, device=str(model.device))
        if not len(index):
            private.step_without_examples(noise)
            continue
        index, mask = padded(index)
        losses.append(private.step(*stream.batch(index), mask.to(model.device), noise))
    loss = float(torch.stack(losses).mean()) if losses else 0.0
    return ClientWeights(private.body.vectors[0], private.head.vectors[0], private.state.buffers), loss


class _PrivateSteps:
    """One client's two halves while it trains, each with its optimizer."""

    def __init__(
        self, model: LocalModel, client: Learner, phase: Phase, privacy: Privacy, training: LocalTraining
    ) -> None:
        self._model, self._phase, self._privacy = model, phase, privacy
        self._expected = min(training.batch_size, model.task.client(client.number).n)
        weights, self.state = client.weights, model.layer_state(client.weights.statistics, client.seed)
        self.body = RowwiseSGD(weights.body.clone().to(model.device)[None], phase.lr, training)
        self.head = RowwiseSGD(weights.head.clone().to(model.device)[None], phase.head_lr or phase.lr, training)

    def step(self, inputs: Tensor, targets: Tensor, mask: Tensor, noise: torch.Generator) -> Tensor:
        """Take one step with the examples of the mask; return their mean loss."""
        if self._phase.head_lr is not None:
            self._plain_head_step(inputs[mask], targets[mask])
        clipped = clipped_sum(PrivateStep(
            self._model, self.body.vectors[0], self.head.vectors[0], (inputs, targets), mask, self._phase.trains,
            self._privacy.clip, self.state,
        ))  # fmt: skip
        self._descend(clipped.body, clipped.head, noise)
        return clipped.loss

    def step_without_examples(self, noise: torch.Generator) -> None:
        """Take one step with noise alone, as every step must look the same from outside."""
        trains = self._phase.trains
        body = torch.zeros_like(self.body.vectors[0]) if trains != "head" else None
        head = torch.zeros_like(self.head.vectors[0]) if trains != "body" else None
        self._descend(body, head, noise)

    def _plain_head_step(self, inputs: Tensor, targets: Tensor) -> None:
        slopes = one_by_one(
            self._model, self.body.vectors, self.head.vectors, [(inputs, targets)], "head", [self.state]
        )
        assert slopes.head is not None
        self.head.step(slopes.head, [0])

    def _descend(self, body: Tensor | None, head: Tensor | None, noise: torch.Generator) -> None:
        """Step what is trained, given sums of clipped gradients."""
        for descent, total in ((self.body, body), (self.head, head)):
            if total is not None:
                descent.step((self._noisy(total, noise) / self._expected)[None], [0])

    def _noisy(self, total: Tensor, generator: torch.Generator) -> Tensor:
        deviation = self._privacy.noise_multiplier * self._privacy.clip
        drawn = torch.randn(total.shape, generator=generator, device=total.device, dtype=total.dtype)
        return total.add(drawn, alpha=deviation)


@final
class RowwiseSGD:
    """SGD with momentum and weight decay on rows of vectors, one row per client, in place."""

    def __init__(self, vectors: Tensor, lr: float, training: LocalTraining) -> None:
        # `vectors` has shape `(K, P)`.
        self.vectors, self._lr, self._training = vectors, lr, training
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
        self, model: LocalModel, client: Learner, epochs: int, batch_size: int, sampling: Sampling = "shuffled"
    ) -> None:
        inputs, self._targets = model.task.client(client.number).train
        self._inputs, self._targets = model.place(inputs), self._targets.to(model.device)
        self._augment = model.task.augment
        self._generator = seeds.torch_generator(client.seed, "augment")
        needs_two = model.habits.needs_two
        if needs_two and min(len(inputs), batch_size) == 1:
            raise UsageError(
                f"Client {client.number} would train on batches of a single example, and this network normalizes over "
                "the batch.",
                cure="Use a batch size of at least 2 (--batch-size) and clients with at least 2 examples, or a network "
                "with GroupNorm or LayerNorm.",
            )
        if sampling == "poisson":
            self.indices = poisson_batches(len(inputs), batch_size, epochs, client.seed)
        else:
            self.indices = shuffled_batches(len(inputs), batch_size, epochs, client.seed, needs_two=needs_two)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches."""
        for index in self.indices:
            yield self.batch(index)

    def batch(self, index: Tensor) -> Batch:
        """Return the batch of the examples `index`."""
        inputs = self._inputs[index]
        return (inputs if self._augment is None else self._augment(inputs, self._generator)), self._targets[index]


def steps_per_epoch(n: int, batch_size: int, *, needs_two: bool = False) -> int:
    """Return the number of steps that go once through n examples.

    Args:
        n: Number of examples.
        batch_size: Examples of a step.
        needs_two: Whether a last batch of one example joins the batch before it, as layers may need that normalize
            over the batch.
    """
    alone = needs_two and n > batch_size and n % batch_size == 1
    return -(-n // batch_size) - alone


def shuffled_batches(n: int, batch_size: int, epochs: int, seed: int, *, needs_two: bool = False) -> Iterator[Tensor]:
    """Yield indices, shape `(up to batch_size,)`, of each step: every epoch goes once through all, in a new order.

    Args:
        n: Number of examples.
        batch_size: Examples of a step; the last of an epoch may have fewer.
        epochs: How often all examples are gone through.
        seed: Seed of the order.
        needs_two: As for `steps_per_epoch`; a step then has up to one example more.
    """
    generator = seeds.torch_generator(seed, "shuffle")
    for _ in range(epochs):
        batches = list(torch.split(torch.randperm(n, generator=generator), batch_size))
        if needs_two and len(batches) > 1 and len(batches[-1]) == 1:
            last = batches.pop()
            batches[-1] = torch.cat([batches[-1], last])
        yield from batches


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
@dataclass(frozen=True)
class Gradients:
    """Gradients of K clients."""

    body: Tensor | None
    """Shape `(K, P)`, or None if not asked for."""
    head: Tensor | None
    """Shape `(K, Q)`, or None if not asked for."""
    losses: Tensor
    """Shape `(K,)`; 0 for an empty batch, whose gradients are 0 too."""


# Takes the model, bodies `(K, P)`, heads `(K, Q)`, a batch per client, what is asked for, and what layers keep.
GradientRule = Callable[[LocalModel, Tensor, Tensor, Sequence[Batch], Trains, Sequence[LayerState]], Gradients]


def rule_for(model: LocalModel) -> GradientRule:
    """Return the rule that is fast on a model's device; layers that keep buffers run one client after another."""
    has_buffers = bool(model.layer_state({}, 0).buffers)
    return one_by_one if model.device.type == "cpu" or has_buffers else together


def one_by_one(
    model: LocalModel, bodies: Tensor, heads: Tensor, batches: Sequence[Batch], trains: Trains,
    states: Sequence[LayerState],
) -> Gradients:  # fmt: skip
    """Return the gradients, computed one client after another; what layers keep changes in place."""
    body_rows: list[Tensor] = []
    head_rows: list[Tensor] = []
    losses = torch.zeros(len(batches), device=bodies.device)
    for row, (inputs, targets) in enumerate(batches):
        body, head = bodies[row].detach(), heads[row].detach()
        if not len(inputs):
            body_rows.append(torch.zeros_like(body))
            head_rows.append(torch.zeros_like(head))
            continue
        trained = [vector.requires_grad_() for vector in _wanted(body, head, trains)]
        loss = model.loss(body, head, inputs, targets, states[row])
        slopes = torch.autograd.grad(loss, trained)
        losses[row] = loss.detach()
        if trains != "head":
            body_rows.append(slopes[0])
        if trains != "body":
            head_rows.append(slopes[-1])
    return Gradients(_rows(body_rows, trains != "head"), _rows(head_rows, trains != "body"), losses)


def _wanted(body: Tensor, head: Tensor, trains: str) -> list[Tensor]:
    return {"body": [body], "head": [head], "both": [body, head]}[trains]


def _rows(rows: list[Tensor], required: bool) -> Tensor | None:
    if not required:
        return None
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def together(
    model: LocalModel, bodies: Tensor, heads: Tensor, batches: Sequence[Batch], trains: Trains,
    states: Sequence[LayerState],
) -> Gradients:  # fmt: skip
    """Return the gradients of all clients at once; batches are padded to the largest and the padding weighs nothing."""
    if any(state.buffers for state in states):
        raise Unsupported(
            "Buffers of layers, such as running statistics, cannot change when clients run together.",
            cure="Train on the CPU (--device cpu), or use layers without running statistics, such as GroupNorm.",
        )
    inputs, targets, weights = _padded(batches)

    def loss(body: Tensor, head: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        outputs = model.classify(head, model.features(body, x))
        each = vmap(lambda output, target: model.task.loss(output[None], target[None]))(outputs, y)
        return (each * weight).sum()

    which = {"body": (0,), "head": (1,), "both": (0, 1)}[trains]
    slopes, losses = vmap(grad_and_value(loss, argnums=which), randomness="different")(
        bodies, heads, inputs, targets, weights
    )
    body = slopes[0] if trains != "head" else None
    return Gradients(body, slopes[-1] if trains != "body" else None, losses)


def _padded(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack batches, shape `(K, n, …)`, with weights `(K, n)` that sum to 1 over each client's examples."""
    sizes = [len(inputs) for inputs, _ in batches]
    inputs = torch.nn.utils.rnn.pad_sequence([x for x, _ in batches], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence([y for _, y in batches], batch_first=True)
    weights = torch.zeros(inputs.shape[:2], device=inputs.device)
    for row, size in enumerate(sizes):
        weights[row, :size] = 1 / max(size, 1)
    return inputs, targets, weights
