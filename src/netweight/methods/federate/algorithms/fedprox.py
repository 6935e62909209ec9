"""FedProx: FedAvg whose clients are held near the model that they received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from netweight.methods.federate.algorithms.direct import DirectMethod, fedavg, near
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import (
    Client,
    LocalResult,
    MethodWrapper,
)
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.task import Task


@final
@dataclass(frozen=True)
class FedProx(MethodWrapper):
    """FedAvg whose clients are held near the model that they received. Source: Li et al. (arXiv 1812.06127)."""

    method: DirectMethod = field(default_factory=fedavg)
    strength: float = 0.1
    """μ, the strength of the penalty on the distance from the received model."""
    name: str = "fedprox"

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train each client near what it received."""
        return self.method.train(
            task, model, clients, round=round, seed=seed, extra=lambda start: near(start, self.strength)
        )


def fedprox(training: LocalTraining = LocalTraining()) -> FedProx:
    """Return FedProx, trained locally as `training` says."""
    return FedProx(fedavg(training))
