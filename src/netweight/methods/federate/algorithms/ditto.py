"""Ditto: FedAvg, and beside it a personal model of each client, held near the shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

from torch import Tensor

from netweight.core import seeds
from netweight.methods.federate.algorithms.direct import DirectMethod, fedavg, initial_weights, kept_statistics, near
from netweight.methods.federate.local import learners_of, train_phase
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import (
    STATISTICS,
    Client,
    ClientWeights,
    LocalResult,
    MethodWrapper,
    from_named,
    named_weights,
    prefixed,
    without,
)
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors

_PERSONAL = "personal."


@final
@dataclass(frozen=True)
class Ditto(MethodWrapper):
    """FedAvg, and beside it a personal model of each client, held near the shared one. Source: arXiv 2012.04221."""

    method: DirectMethod = field(default_factory=fedavg)
    strength: float = 0.1
    """λ, the strength of the penalty on the distance from the shared model."""
    name: str = "ditto"

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return the personal model: at first the shared one's start."""
        return prefixed(_PERSONAL, named_weights(task, initial_weights(task))) | prefixed(
            STATISTICS, task.initial_statistics()
        )

    def weights(self, task: Task, received: Tensors, private: Tensors) -> ClientWeights:
        """Return the personal model."""
        return from_named(task, without(_PERSONAL, private))

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train the shared model as FedAvg does, then each personal one near what was received."""
        learners = [replace(client, private=kept_statistics(client.private)) for client in clients]
        shared = self.method.train(task, model, learners, round=round, seed=seed)
        done = []
        own = learners_of(self, task, clients, round=round, seed=seeds.derive(seed, "personal"))
        for one, client, learner in zip(shared, clients, own, strict=True):
            pull = near(from_named(task, client.message), self.strength)
            (weights,), (loss,) = train_phase(
                model, [replace(learner, extra=pull)], self.method.phases[0], self.method.training
            )
            private = {**prefixed(_PERSONAL, named_weights(task, weights)), **one.private}
            update = replace(one.update, metrics={**one.update.metrics, "loss": loss})
            done.append(replace(one, update=update, private=private, weights=weights))
        return done


def ditto(training: LocalTraining = LocalTraining()) -> Ditto:
    """Return Ditto, trained locally as `training` says."""
    return Ditto(fedavg(training))
