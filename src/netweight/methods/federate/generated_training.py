"""Local training of hypernetworks: clients side by side, so that products with the shared W₀ serve them all.

HyperFL calls it. The heads' matrices are in `heads.py`; trunk, head biases and embeddings are small and dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.generate import ParameterLayout
from netweight.methods.federate.batches import steps_per_epoch
from netweight.methods.federate.config import LocalTraining
from netweight.methods.federate.gradients import rule_for
from netweight.methods.federate.heads import Heads, heads_for
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.local_training import Descent, Stream, side_by_side
from netweight.methods.federate.method import Weights
from netweight.methods.federate.updates import LowRank, Tensors

__all__ = ["HYPERNETWORK", "Generated", "rows_of_body", "train_generated"]

HYPERNETWORK = "hypernetwork."
"""Prefix of the shared names."""

_WEIGHT, _BIAS = f"{HYPERNETWORK}heads.weight", f"{HYPERNETWORK}heads.bias"


@final
@dataclass(frozen=True)
class Generated:
    """A client after local training of its hypernetwork.

    Attributes:
        hypernetwork: The shared tensors; the heads' weights as `LowRank` unless there were too many steps.
        embedding: Shape `(E,)`.
        weights: The personal model that these generate.
        loss: Mean loss of the steps.
    """

    hypernetwork: Mapping[str, Tensor | LowRank]
    embedding: Tensor
    weights: Weights
    loss: float


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
    """Train hypernetwork and embedding of each client by SGD through the body that they generate.

    Args:
        model: The thread's model.
        numbers: The clients' numbers.
        weights: Each client's head and running statistics.
        embeddings: Each client's embedding. Shape `(E,)` each.
        received: The hypernetwork that all of them start from. Tensors by name.
        training: Epochs, learning rate, momentum, weight decay, clip.
        head: What becomes of the model's head: nothing, training beside the body, or generation like the body's.
        seeds_by_client: Of each client's batches.

    Returns:
        The clients, in their order.

    Source: HyperFL (arXiv 2412.07187), algorithm 1; gradients by the chain rule through θ as in its equation 5.
    """
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
    """Return a hypernetwork that generates the body alone, given one that may generate the head after it.

    Args:
        state: The hypernetwork. Tensors by name.
        size: Number of the body's parameters.
    """
    return {name: value[:size] if name in (_WEIGHT, _BIAS) else value for name, value in state.items()}


def _with_one(codes: Tensor) -> Tensor:
    """Return codes with a 1 at their end, for the heads' bias."""
    return torch.cat([codes, codes.new_ones(len(codes), 1)], dim=1)


def _clip_factors(norms: Tensor, clip: float) -> Tensor:
    """Return the factors that bring norms down to `clip`, as `torch.nn.utils.clip_grad_norm_` computes them."""
    return (clip / (norms + 1e-6)).clamp(max=1.0)
