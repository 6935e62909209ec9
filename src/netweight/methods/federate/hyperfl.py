"""HyperFL: each client's body comes from a shared hypernetwork and a private embedding; its head is private, too.

The method's settings and what an engine calls; the training itself is in `generated_training.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.generate import Hypernetwork
from netweight.methods.federate.config import LocalTraining, Phase
from netweight.methods.federate.direct import STATISTICS, prefixed, without
from netweight.methods.federate.generated_training import HYPERNETWORK, Generated, train_generated
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.local_training import train_clients
from netweight.methods.federate.method import Client, Trained, Weights
from netweight.methods.federate.task import FedTask
from netweight.methods.federate.updates import Tensors, Update, aggregate

__all__ = ["HyperFL"]


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
