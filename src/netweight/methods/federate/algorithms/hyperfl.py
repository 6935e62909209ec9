"""HyperFL: clients share a hypernetwork that generates their bodies, and keep embedding and head.

Clients train side by side, so that products with the shared W₀ of the hypernetwork's heads serve them all; trunk, head
biases and embeddings are small and dense. Local SGD adds one rank to a head per step, so heads are kept as factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.local import (
    Learner,
    RowwiseSGD,
    Stream,
    learners_of,
    rule_for,
    side_by_side,
    steps_per_epoch,
    train_phase,
)
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import STATISTICS, Client, ClientWeights, LocalResult, prefixed, without
from netweight.methods.federate.reused_memory import ReusedMemory
from netweight.methods.federate.settings import LocalTraining, Phase, Trains
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import LowRankUpdate, Tensors, Update
from netweight.nn import Hypernetwork, ParameterLayout
from netweight.nn.hypernetwork import hidden_code

# Prefix of the shared names.
HYPERNETWORK = "hypernetwork."


_WEIGHT, _BIAS = f"{HYPERNETWORK}heads.weight", f"{HYPERNETWORK}heads.bias"


@final
@dataclass(frozen=True)
class HyperFL:
    """HyperFL: clients share a hypernetwork that generates their bodies, and keep embedding and head.

    Attributes:
        training: Local training: `head_epochs` of the head, then `epochs` of hypernetwork and embedding jointly.
        embedding: Length of an embedding.
        hidden: Widths of the hypernetwork's hidden layers.
        start_from: "hypernetwork" draws the heads as torch draws linear layers, as the paper does; "body" begins with
            the body's own weights as the heads' biases and heads' weights of zero, so that clients start from one
            well-scaled body and the hypernetwork learns how they differ.
        joint_head: Train the head together with the body, too, after its own epochs.
        private_head: Keep the head with the client; False generates it like the body, so that clients share what their
            few examples teach them of rare classes. The embedding is then all that is private.
        name: As the command line calls it.

    Raises:
        UsageError: There is no such start.

    Source: HyperFL (arXiv 2412.07187), section 4.2 and algorithm 1.
    """

    training: LocalTraining = LocalTraining()
    embedding: int = 64
    hidden: tuple[int, ...] = (128,)
    start_from: Literal["hypernetwork", "body"] = "hypernetwork"
    joint_head: bool = False
    private_head: bool = True
    name: str = "hyperfl"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.start_from not in ("hypernetwork", "body"):
            raise UsageError(f"HyperFL cannot start from {self.start_from!r}.", cure='Use "hypernetwork" or "body".')

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client: the hypernetwork alone."""
        return (f"{HYPERNETWORK}**",)

    def hypernetwork(self, task: Task) -> Hypernetwork:
        """Return a hypernetwork for what is generated of the model of `task`, with weights to be replaced."""
        return Hypernetwork(len(self._initial(task)), embedding=self.embedding, hidden=self.hidden)

    def _initial(self, task: Task) -> Tensor:
        """Return the model's own weights, as far as they are generated: the body's before the head's."""
        return task.initial_body() if self.private_head else torch.cat([task.initial_body(), task.initial_head()])

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return a new hypernetwork."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "hypernetwork"))
            network = self.hypernetwork(task)
        if self.start_from == "body":
            with torch.no_grad():
                network.heads.weight.zero_()
                network.heads.bias.copy_(self._initial(task))
        return prefixed(HYPERNETWORK, {name: value.detach() for name, value in network.named_parameters()})

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return the embedding, the head, and statistics."""
        generator = seeds.torch_generator(seed, "client", client, "embedding")
        embedding = torch.randn(self.embedding, generator=generator)
        return self._private(task, embedding, task.initial_head(), task.initial_statistics())

    def _private(self, task: Task, embedding: Tensor, head: Tensor, statistics: Tensors) -> dict[str, Tensor]:
        classifier = prefixed("head.", task.head_layout.split(head)) if self.private_head else {}
        return {"embedding": embedding} | classifier | prefixed(STATISTICS, statistics)

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return the hypernetwork: all clients get the same."""
        return state

    def generated(self, received: Tensors, embedding: Tensor) -> Tensor:
        """Return what the hypernetwork `received` generates from `embedding`, shape `(E,)`: body, then head."""
        code = hidden_code(without(HYPERNETWORK, received), embedding)
        return torch.addmv(received[_BIAS], received[_WEIGHT], code)

    @torch.no_grad()
    def weights(self, task: Task, received: Tensors, private: Tensors) -> ClientWeights:
        """Return what the received hypernetwork generates now from the client's embedding, and the client's head."""
        made = self.generated(received, private["embedding"])
        body, head = made[: task.body_layout.size], made[task.body_layout.size :]
        if self.private_head:
            head = task.head_layout.join(without("head.", private))
        return ClientWeights(body, head, without(STATISTICS, private))

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train each client's head, then all clients' hypernetworks and embeddings side by side."""
        learners = self._with_trained_heads(model, learners_of(self, task, clients, round=round, seed=seed))
        generated = train_generated(
            model, learners, [client.private["embedding"] for client in clients], clients[0].message, self.training,
            head="generated" if not self.private_head else "trained" if self.joint_head else "kept",
        )  # fmt: skip
        return [self._trained(task, c.number, result, round) for c, result in zip(clients, generated, strict=True)]

    def _with_trained_heads(self, model: LocalModel, learners: list[Learner]) -> list[Learner]:
        if not self.private_head or not self.training.head_epochs:
            return learners
        phase = Phase(trains="head", epochs=self.training.head_epochs, lr=self.training.head_lr)
        own = [replace(learner, seed=seeds.derive(learner.seed, "head")) for learner in learners]
        trained = train_phase(model, own, phase, self.training)[0]
        return [replace(learner, weights=weights) for learner, weights in zip(learners, trained, strict=True)]

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the weighted average of the hypernetworks."""
        return aggregate(state, updates)

    def _trained(self, task: Task, number: int, result: TrainedClient, round: int) -> LocalResult:
        private = self._private(task, result.embedding, result.weights.head, result.weights.statistics)
        update = Update(number, task.client(number).n, result.hypernetwork, round, {"loss": result.loss})
        return LocalResult(update, private, result.weights)


def rows_of_body(state: Tensors, size: int) -> dict[str, Tensor]:
    """Return a hypernetwork that generates the body alone, given one that may generate the head after it."""
    return {name: value[:size] if name in (_WEIGHT, _BIAS) else value for name, value in state.items()}


@final
@dataclass(frozen=True)
class TrainedClient:
    """A client after local training of its hypernetwork."""

    hypernetwork: Mapping[str, Tensor | LowRankUpdate]
    """The shared tensors; the heads' weights as `LowRankUpdate` unless there were too many steps."""
    embedding: Tensor
    """Client embedding, shape `(E,)`."""
    weights: ClientWeights
    """The personal model that these generate."""
    loss: float
    """Mean loss of the steps."""


def train_generated(
    model: LocalModel, clients: Sequence[Learner], embeddings: Sequence[Tensor], received: Tensors,
    training: LocalTraining, *, head: Literal["kept", "trained", "generated"],
) -> list[TrainedClient]:  # fmt: skip
    """Train hypernetwork and embedding of each client by SGD through the body that they generate.

    Source: HyperFL (arXiv 2412.07187), algorithm 1; gradients by the chain rule through θ as in its equation 5.
    """
    group = _HypernetworkClients(model, clients, embeddings, received, training, generates_head=head == "generated")
    streams = [iter(Stream(model, client, training.epochs, training.batch_size)) for client in clients]
    gradients = rule_for(model)
    trains: Trains = "body" if head == "kept" else "both"
    model.train(trains)
    total, count = torch.zeros(len(clients)), torch.zeros(len(clients))
    for rows, batches in side_by_side(streams):
        made, codes, inputs = group.generate(rows)
        bodies, heads = group.halves(made, rows)
        slopes = gradients(model, bodies, heads, batches, trains, [group.states[row] for row in rows])
        assert slopes.body is not None
        if head == "generated":
            assert slopes.head is not None
            group.step(torch.cat([slopes.body, slopes.head], dim=1), codes, inputs, rows)
        else:
            group.step(slopes.body, codes, inputs, rows)
        if head == "trained":
            assert slopes.head is not None
            group.classifiers.step(slopes.head, rows)
        total[rows] += slopes.losses.cpu()
        count[rows] += 1
    return group.results((total / count).tolist())


class _HypernetworkClients:
    """Clients that train side by side from one hypernetwork."""

    def __init__(
        self, model: LocalModel, clients: Sequence[Learner], embeddings: Sequence[Tensor], received: Tensors,
        training: LocalTraining, *, generates_head: bool,
    ) -> None:  # fmt: skip
        k, device = len(clients), model.device
        sizes = [model.task.client(client.number).n for client in clients]
        steps = max(training.epochs * steps_per_epoch(n, training.batch_size) for n in sizes)
        self._clip, self._generates_head, self._body = training.clip, generates_head, model.task.body_layout.size
        trunk = {name: value.to(device) for name, value in received.items() if name not in (_WEIGHT, _BIAS)}
        self._layout = ParameterLayout.of(trunk)
        self._heads = _heads(received[_WEIGHT].to(device), received[_BIAS].to(device), k, steps, training, model.memory)
        self._trunk = RowwiseSGD(self._layout.join(trunk).repeat(k, 1), training.lr, training)
        self._embedding = RowwiseSGD(torch.stack(list(embeddings)).to(device), training.lr, training)
        self.classifiers = RowwiseSGD(torch.stack([c.weights.head for c in clients]).to(device), training.lr, training)
        self.states = [model.layer_state(client.weights.statistics, client.seed) for client in clients]

    def generate(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return what is generated `(k, P)`, codes `(k, H)` with their graph, and what the graph begins with."""
        trunk = self._trunk.vectors[rows].requires_grad_()
        embedding = self._embedding.vectors[rows].requires_grad_()
        codes = self._codes(trunk, embedding)
        return self._heads.generate(_with_one(codes.detach()), rows), codes, (trunk, embedding)

    def halves(self, made: Tensor, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the clients' bodies and heads, given what was generated for them."""
        if self._generates_head:
            return made[:, : self._body], made[:, self._body :]
        return made, self.classifiers.vectors[rows]

    def _codes(self, trunk: Tensor, embedding: Tensor) -> Tensor:
        layers = list(self._layout.split(trunk).values())
        code = embedding[:, :, None]
        for weight, bias in zip(layers[::2], layers[1::2], strict=True):
            code = torch.relu(torch.baddbmm(bias[:, :, None], weight, code))
        return code[:, :, 0]

    def step(self, made: Tensor, codes: Tensor, inputs: tuple[Tensor, Tensor], rows: Sequence[int]) -> None:
        """Step hypernetworks and embeddings, given the gradients of what is generated, each clipped by its own norm."""
        pulled = self._heads.pull_back(made, rows)[:, :-1]
        trunk, embedding = torch.autograd.grad(codes, inputs, pulled)
        whole = _with_one(codes.detach())
        norms = torch.hypot(made.norm(dim=1) * whole.norm(dim=1), trunk.norm(dim=1))
        clips = _clip_factors(norms, self._clip)
        self._heads.step(made, whole, clips, rows)
        self._trunk.step(trunk * clips[:, None], rows)
        own = _clip_factors(embedding.norm(dim=1), self._clip)
        self._embedding.step(embedding * own[:, None], rows)

    def results(self, losses: Sequence[float]) -> list[TrainedClient]:
        """Return every client as it stands."""
        rows = list(range(len(losses)))
        with torch.no_grad():
            bodies, heads = self.halves(self.generate(rows)[0], rows)
        return [self._result(row, bodies[row], heads[row], losses[row]) for row in rows]

    def _result(self, row: int, body: Tensor, head: Tensor, loss: float) -> TrainedClient:
        weight, bias = self._heads.result(row)
        hypernetwork = {**self._layout.split(self._trunk.vectors[row]), _WEIGHT: weight, _BIAS: bias}
        weights = ClientWeights(body, head, self.states[row].buffers)
        return TrainedClient(hypernetwork, self._embedding.vectors[row], weights, loss)


def _with_one(codes: Tensor) -> Tensor:
    """Return codes with a 1 at their end, for the heads' bias."""
    return torch.cat([codes, codes.new_ones(len(codes), 1)], dim=1)


def _clip_factors(norms: Tensor, clip: float) -> Tensor:
    """Return the factors that bring norms down to `clip`, as `torch.nn.utils.clip_grad_norm_` computes them."""
    return (clip / (norms + 1e-6)).clamp(max=1.0)


def _heads(
    weight: Tensor, bias: Tensor, clients: int, steps: int, training: LocalTraining, memory: ReusedMemory
) -> FactoredHeads | DenseHeads:
    """Return factored heads where the factors stay smaller than the matrix, dense ones otherwise."""
    if steps < weight.shape[1]:
        return FactoredHeads(weight, bias, clients, steps, training, memory)
    return DenseHeads(weight, bias, clients, training)


@final
class FactoredHeads:
    """The heads of K clients while they train, each P × H with the bias as last column, as factors beside W₀."""

    # Codes are not negative and end with 1, for the bias. Each step adds one rank. Of W₀ only the columns of codes that
    # are above 0 are read, which ReLU leaves about half of.
    # `weight`: W₀ without the bias, shape `(P, H − 1)`
    # `bias`: shape `(P,)`

    def __init__(
        self, weight: Tensor, bias: Tensor, clients: int, steps: int, training: LocalTraining, memory: ReusedMemory
    ) -> None:
        generated, hidden = weight.shape
        self._weight = weight
        # g of each step.
        self._left = memory.empty("left", (clients, steps, generated), weight)
        # c m of each step.
        self._right = weight.new_empty(clients, steps, hidden + 1)
        self._taken = [0] * clients
        self._running = Coefficients(training)
        self._history: list[tuple[float, Tensor]] = [(1.0, weight.new_empty(0))]
        # The units whose columns of W₀ were read, in the order of the rows of `_base`.
        self._units = [hidden]
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
        """Return Wᵀ g of the clients `rows`, which is needed where ReLU let codes through, and 0 elsewhere."""
        pulled = gradients.new_zeros(len(rows), len(self._base))
        pulled[:, self._units] = gradients @ self._base[: len(self._units)].T
        for position, row in enumerate(rows):
            scale, weights, left, right = self._factors(row)
            _add(pulled[position], right.T, weights * (left @ gradients[position]), scale)
        return pulled

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Take one step of SGD with the gradients `clip · g mᵀ` of the clients `rows`: one more rank each."""
        scaled = codes * clips[:, None]
        for position, row in enumerate(rows):
            self._left[row, self._taken[row]] = gradients[position]
            self._right[row, self._taken[row]] = scaled[position]
            self._taken[row] += 1

    def result(self, row: int) -> tuple[LowRankUpdate, Tensor]:
        """Return a client's weights as factors, and the bias."""
        scale, weights, left, right = self._factors(row)
        columns = (right * weights[:, None]).T
        return LowRankUpdate(scale, left.T, columns[:-1]), scale * self._base[0] - left.T @ columns[-1]

    def _read_columns_of(self, codes: Tensor) -> None:
        """Read the columns of W₀ that codes above 0 need, if they are not at hand."""
        needed = (codes > 0).any(0)
        needed[self._units] = False
        if not needed.any():
            return
        count, new = len(self._units), needed.nonzero().flatten().tolist()
        self._base[count : count + len(new)] = self._weight[:, new].T
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
class Coefficients:
    """The scalars of the low-rank form, the same for all clients that took as many steps; double precision."""

    def __init__(self, training: LocalTraining) -> None:
        self._training = training
        # `scale` is a_t, the factor of W₀ in W_t.
        self.scale, self._drift = 1.0, 0.0
        # `weights` are b_{t,i}, the factor of step i in W_t.
        self.weights = torch.zeros(0, dtype=torch.float64)
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
