"""Clients that protect themselves: noise on updates, a least number of local steps, refusal.

Wraps any method. What each protection withstands and what it does not is in docs/gradient-inversion.md. Secure
aggregation is not here: it is how updates travel (docs/flower.md), and leaves each update as it is.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.batches import steps_per_epoch
from netweight.methods.federate.config import LocalTraining
from netweight.methods.federate.generated_training import rows_of_body
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Method, Trained, Weights
from netweight.methods.federate.refusal import RefusalLimits, refuse_abnormal
from netweight.methods.federate.task import FedTask
from netweight.methods.federate.updates import LowRank, Tensors, Update

__all__ = ["Hardened", "UpdateNoise", "dense_tensors"]

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class UpdateNoise:
    """Gaussian noise on a client's whole update, whose change is clipped first.

    Attributes:
        clip: Largest norm of the change over all shared tensors together, above 0.
        multiplier: Standard deviation of the noise on each value, as a multiple of `clip`; at least 0. An accountant
            (`netweight.integrations.opacus.epsilon_spent`) says which ε that is for a whole client.

    Raises:
        UsageError: A number is out of its range.

    Source: McMahan et al., "Learning differentially private recurrent language models" (arXiv 1710.06963), with the
        noise added by clients.
    """

    clip: float
    multiplier: float

    def __post_init__(self) -> None:
        """Check the values."""
        if self.clip <= 0 or self.multiplier < 0:
            raise UsageError(f"Clip {self.clip} and noise multiplier {self.multiplier} cannot be.")


@final
@dataclass(frozen=True)
class Hardened:
    """A method whose clients protect themselves before they send.

    A client that will not take part sends nothing, and the log says why: the engine then goes on without it.

    Attributes:
        method: The method.
        noise: Noise on updates; None for none.
        minimum_steps: Fewest local steps that a client agrees to.
        refusal: What a client accepts of a hypernetwork it is sent; None to accept everything.
    """

    method: Method
    noise: UpdateNoise | None = None
    minimum_steps: int = 1
    refusal: RefusalLimits | None = None

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.method.name}, hardened"

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client."""
        return self.method.shared

    @property
    def training(self) -> LocalTraining:
        """Local training of the method.

        Raises:
            UsageError: The method has none of the usual kind.
        """
        training = getattr(self.method, "training", None)
        if not isinstance(training, LocalTraining):
            raise UsageError(f"{self.method.name!r} has no local training that could be counted in steps.")
        return training

    def start(self, task: FedTask, *, seed: int) -> dict[str, Tensor]:
        """Return the method's state before round 1."""
        return self.method.start(task, seed=seed)

    def private_start(self, task: FedTask, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return what a client keeps."""
        return self.method.private_start(task, client, seed=seed)

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return what the server sends."""
        return self.method.message(state, client)

    def weights(self, task: FedTask, received: Tensors, private: Tensors) -> Weights:
        """Return a client's model."""
        return self.method.weights(task, received, private)

    def train(
        self, task: FedTask, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[Trained]:
        """Train the clients that agree to, and protect what they send."""
        willing = [client for client in clients if self._agrees(task, client, round)]
        if not willing:
            return []
        trained = self.method.train(task, model, willing, round=round, seed=seed)
        if self.noise is None:
            return trained
        return [
            dataclasses.replace(one, update=_noisy(one.update, client.received, self.noise, seed))
            for one, client in zip(trained, willing, strict=True)
        ]

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the method's next state."""
        return self.method.aggregate(state, updates)

    def _agrees(self, task: FedTask, client: Client, round: int) -> bool:
        reasons = [*self._too_few_steps(task, client.number), *self._strange(task, client)]
        if reasons:
            _LOG.warning("Round %d: client %d takes no part: %s.", round, client.number, "; ".join(reasons))
        return not reasons

    def _too_few_steps(self, task: FedTask, number: int) -> list[str]:
        if self.minimum_steps == 1:
            return []
        steps = self.training.epochs * steps_per_epoch(task.client(number).n, self.training.batch_size)
        return [f"{steps} local steps are fewer than {self.minimum_steps}"] if steps < self.minimum_steps else []

    def _strange(self, task: FedTask, client: Client) -> list[str]:
        if self.refusal is None or "embedding" not in client.private:
            return []
        images = task.client(client.number).train[0][: self.training.batch_size]
        return refuse_abnormal(
            rows_of_body(client.received, task.body_layout.size),
            body=task.body,
            embedding=client.private["embedding"],
            images=images,
            limits=self.refusal,
        )


def dense_tensors(tensors: Mapping[str, Tensor | LowRank], base: Tensors) -> dict[str, Tensor]:
    """Return tensors with low-rank matrices made whole, given the server's.

    Args:
        tensors: By name, as a client sends them.
        base: The server's tensors by name, from which low-rank changes count.
    """
    return {n: value.dense(base[n]) if isinstance(value, LowRank) else value for n, value in tensors.items()}


def _noisy(update: Update, received: Tensors, noise: UpdateNoise, seed: int) -> Update:
    """Return an update whose change is clipped as one vector and whose every value has noise.

    The noise comes from the federation's seed, so that a run can be repeated; a client of a real federation trains with
    a seed that no one else knows.
    """
    changes = {name: value - received[name] for name, value in dense_tensors(update.tensors, received).items()}
    norm = float(torch.stack([change.double().square().sum() for change in changes.values()]).sum().sqrt())
    factor = min(1.0, noise.clip / (norm + 1e-12))
    generator = seeds.torch_generator(seed, "client", update.client, "round", update.round, "update noise")
    sent = {}
    for name, change in changes.items():
        drawn = torch.randn(change.shape, generator=generator, dtype=change.dtype)
        sent[name] = received[name] + factor * change + noise.clip * noise.multiplier * drawn
    return dataclasses.replace(update, tensors=sent)
