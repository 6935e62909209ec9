"""Local training of hypernetworks: clients side by side, so that products with the shared W₀ serve them all.

HyperFL calls it. The heads' matrices are in `heads.py`; trunk, head biases and embeddings are small and dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.aggregate import LowRank, Tensors, Update, aggregate
from netweight.methods.federate.direct import STATISTICS, prefixed, without
from netweight.methods.federate.local import Descent, Stream, side_by_side, steps_per_epoch, train_clients
from netweight.methods.federate.method import Client, Heads, LocalModel, Trained, Weights, heads_for
from netweight.methods.federate.per_example import rule_for
from netweight.methods.federate.settings import LocalTraining, Phase
from netweight.methods.federate.task import FedTask
from netweight.nn import Hypernetwork, ParameterLayout

# Prefix of the shared names.
HYPERNETWORK = "hypernetwork."

_WEIGHT, _BIAS = f"{HYPERNETWORK}heads.weight", f"{HYPERNETWORK}heads.bias"


@final
@dataclass(frozen=True)
class Generated:
    """A client after local training of its hypernetwork."""

    # The shared tensors; the heads' weights as `LowRank` unless there were too many steps.
    hypernetwork: Mapping[str, Tensor | LowRank]
    embedding: Tensor  # shape `(E,)`
    weights: Weights  # the personal model that these generate
    loss: float  # mean loss of the steps


def train_generated(
    model: LocalModel,
    numbers: Sequence[int],
    weights: Sequence[Weights],
    embeddings: Sequence[Tensor],
    received: Tensors,
    training: LocalTraining,
    *,
    head: Literal["kept", "trained", "generated"],
    seeds_by_client: Sequence[int],
) -> list[Generated]:
    """Train hypernetwork and embedding of each client by SGD through the body that they generate."""
    # Source: HyperFL (arXiv 2412.07187), algorithm 1; gradients by the chain rule through θ as in its equation 5.
    group = _Group(model, numbers, weights, embeddings, received, training, generates_head=head == "generated")
    streams = [
        iter(Stream(model, number, training.epochs, training.batch_size, seed))
        for number, seed in zip(numbers, seeds_by_client, strict=True)
    ]
    gradients = rule_for(model.device)
    trains: Literal["body", "both"] = "body" if head == "kept" else "both"
    model.train(trains)
    total, count = torch.zeros(len(numbers)), torch.zeros(len(numbers))
    for rows, batches in side_by_side(streams):
        made, codes, inputs = group.generate(rows)
        bodies, heads = group.halves(made, rows)
        found = gradients(model, bodies, heads, batches, trains, [group.statistics[row] for row in rows])
        assert found.body is not None
        if head == "generated":
            assert found.head is not None
            group.step(torch.cat([found.body, found.head], dim=1), codes, inputs, rows)
        else:
            group.step(found.body, codes, inputs, rows)
        if head == "trained":
            assert found.head is not None
            group.classifiers.step(found.head, rows)
        total[rows] += found.losses.cpu()
        count[rows] += 1
    return group.results((total / count).tolist())


@final
class _Group:
    """Clients that train side by side from one hypernetwork."""

    def __init__(
        self,
        model: LocalModel,
        numbers: Sequence[int],
        weights: Sequence[Weights],
        embeddings: Sequence[Tensor],
        received: Tensors,
        training: LocalTraining,
        *,
        generates_head: bool,
    ) -> None:
        k, device = len(numbers), model.device
        steps = max(
            training.epochs * steps_per_epoch(model.task.client(number).n, training.batch_size) for number in numbers
        )
        self._clip, self._generates_head, self._body = training.clip, generates_head, model.task.body_layout.size
        trunk = {name: value.to(device) for name, value in received.items() if name not in (_WEIGHT, _BIAS)}
        self._layout = ParameterLayout.of(trunk)
        self._heads: Heads = heads_for(
            received[_WEIGHT].to(device), received[_BIAS].to(device), k, steps, training, model.memory
        )
        self._trunk = Descent(self._layout.join(trunk).repeat(k, 1), training.lr, training)
        self._embedding = Descent(torch.stack(list(embeddings)).to(device), training.lr, training)
        self.classifiers = Descent(torch.stack([w.head for w in weights]).to(device), training.lr, training)
        self.statistics = [{name: value.to(device, copy=True) for name, value in w.statistics.items()} for w in weights]

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

    def results(self, losses: Sequence[float]) -> list[Generated]:
        """Return every client as it stands."""
        rows = list(range(len(losses)))
        with torch.no_grad():
            bodies, heads = self.halves(self.generate(rows)[0], rows)
        return [self._result(row, bodies[row], heads[row], losses[row]) for row in rows]

    def _result(self, row: int, body: Tensor, head: Tensor, loss: float) -> Generated:
        weight, bias = self._heads.result(row)
        hypernetwork = {**self._layout.split(self._trunk.vectors[row]), _WEIGHT: weight, _BIAS: bias}
        weights = Weights(body, head, self.statistics[row])
        return Generated(hypernetwork, self._embedding.vectors[row], weights, loss)


def rows_of_body(state: Tensors, size: int) -> dict[str, Tensor]:
    """Return a hypernetwork that generates the body alone, given one that may generate the head after it."""
    return {name: value[:size] if name in (_WEIGHT, _BIAS) else value for name, value in state.items()}


def _with_one(codes: Tensor) -> Tensor:
    """Return codes with a 1 at their end, for the heads' bias."""
    return torch.cat([codes, codes.new_ones(len(codes), 1)], dim=1)


def _clip_factors(norms: Tensor, clip: float) -> Tensor:
    """Return the factors that bring norms down to `clip`, as `torch.nn.utils.clip_grad_norm_` computes them."""
    return (clip / (norms + 1e-6)).clamp(max=1.0)


@final
@dataclass(frozen=True)
class HyperFL:
    """HyperFL: clients share a hypernetwork that generates their bodies, and keep embedding and head.

    Attributes:
        training: Local training: `head_epochs` of the head, then `epochs` of hypernetwork and embedding jointly.
        embedding: Length of an embedding.
        hidden: Widths of the hypernetwork's hidden layers.
        start_from: "hypernetwork" draws the heads as torch draws linear layers, as the paper does; "body" begins
            with the body's own weights as the heads' biases and heads' weights of zero, so that clients start from
            one well-scaled body and the hypernetwork learns how they differ.
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

    def hypernetwork(self, task: FedTask) -> Hypernetwork:
        """Return a hypernetwork for what is generated of the task's model, with weights that are to be replaced.

        Args:
            task: Body, head and data.
        """
        return Hypernetwork(len(self._initial(task)), embedding=self.embedding, hidden=self.hidden)

    def _initial(self, task: FedTask) -> Tensor:
        """Return the model's own weights, as far as they are generated: the body's before the head's."""
        return task.initial_body() if self.private_head else torch.cat([task.initial_body(), task.initial_head()])

    def start(self, task: FedTask, *, seed: int) -> dict[str, Tensor]:
        """Return a new hypernetwork."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "hypernetwork"))
            network = self.hypernetwork(task)
        if self.start_from == "body":
            with torch.no_grad():
                network.heads.weight.zero_()
                network.heads.bias.copy_(self._initial(task))
        return prefixed(HYPERNETWORK, {name: value.detach() for name, value in network.named_parameters()})

    def private_start(self, task: FedTask, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return the embedding and the head, the same for all clients as in the paper's code, and statistics."""
        generator = seeds.torch_generator(seed, "embedding")
        embedding = torch.randn(self.embedding, generator=generator)
        return self._private(task, embedding, task.initial_head(), LocalModel(task).initial_statistics())

    def _private(self, task: FedTask, embedding: Tensor, head: Tensor, statistics: Tensors) -> dict[str, Tensor]:
        kept = prefixed("head.", task.head_layout.split(head)) if self.private_head else {}
        return {"embedding": embedding} | kept | prefixed(STATISTICS, statistics)

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return the hypernetwork: all clients get the same."""
        return state

    @torch.no_grad()
    def weights(self, task: FedTask, received: Tensors, private: Tensors) -> Weights:
        """Return what the received hypernetwork generates now from the client's embedding, and the client's head."""
        code = private["embedding"]
        for layer in range(len(self.hidden)):
            name = f"{HYPERNETWORK}trunk.{layer}"
            code = torch.relu(torch.addmv(received[f"{name}.bias"], received[f"{name}.weight"], code))
        made = torch.addmv(received[f"{HYPERNETWORK}heads.bias"], received[f"{HYPERNETWORK}heads.weight"], code)
        body, head = made[: task.body_layout.size], made[task.body_layout.size :]
        if self.private_head:
            head = task.head_layout.join(without("head.", private))
        return Weights(body, head, without(STATISTICS, private))

    def train(
        self, task: FedTask, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[Trained]:
        """Train each client's head, then all clients' hypernetworks and embeddings side by side."""
        numbers = [client.number for client in clients]
        draws = [seeds.derive(seed, "client", number, "round", round) for number in numbers]
        weights = [self.weights(task, client.received, client.private) for client in clients]
        weights = self._train_heads(model, numbers, weights, draws)
        generated = train_generated(
            model,
            numbers,
            weights,
            [client.private["embedding"] for client in clients],
            clients[0].received,
            self.training,
            head="generated" if not self.private_head else "trained" if self.joint_head else "kept",
            seeds_by_client=draws,
        )
        return [self._trained(task, number, found, round) for number, found in zip(numbers, generated, strict=True)]

    def _train_heads(
        self, model: LocalModel, numbers: Sequence[int], weights: list[Weights], draws: Sequence[int]
    ) -> list[Weights]:
        if not self.private_head or not self.training.head_epochs:
            return weights
        phase = Phase("head", self.training.head_epochs, self.training.head_lr)
        own = [seeds.derive(draw, "head") for draw in draws]
        return train_clients(model, weights, numbers, phase, self.training, seeds_by_client=own)[0]

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the weighted average of the hypernetworks."""
        return aggregate(state, updates)

    def _trained(self, task: FedTask, number: int, found: Generated, round: int) -> Trained:
        private = self._private(task, found.embedding, found.weights.head, found.weights.statistics)
        update = Update(number, task.client(number).n, found.hypernetwork, round)
        return Trained(update, private, found.weights, found.loss)
