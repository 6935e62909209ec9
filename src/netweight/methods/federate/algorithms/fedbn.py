"""FedBN: FedAvg whose clients keep their normalization layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

from torch import Tensor, nn

from netweight.methods.federate.algorithms.direct import DirectMethod, fedavg, kept_statistics
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import (
    Client,
    LocalResult,
    MethodWrapper,
    named_weights,
)
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.task import Task

T = TypeVar("T")


@final
@dataclass(frozen=True)
class FedBN(MethodWrapper):
    """FedAvg whose clients keep their normalization layers. Source: Li et al. (arXiv 2102.07623)."""

    method: DirectMethod = field(default_factory=fedavg)
    name: str = "fedbn"

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return the model without its normalization layers."""
        return _split(task, self.method.start(task, seed=seed))[0]

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return the normalization layers, with their running statistics."""
        own = _split(task, self.method.start(task, seed=seed))[1]
        return own | self.method.private_start(task, client, seed=seed)

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train the whole model; send all but the normalization layers."""
        whole = [
            replace(c, message={**c.message, **_split(task, c.private)[1]}, private=kept_statistics(c.private))
            for c in clients
        ]
        done = []
        for one in self.method.train(task, model, whole, round=round, seed=seed):
            sent, _ = _split(task, one.update.tensors)
            normalization = _split(task, named_weights(task, one.weights))[1]
            done.append(
                replace(one, update=replace(one.update, tensors=sent), private={**one.private, **normalization})
            )
        return done


def fedbn(training: LocalTraining = LocalTraining()) -> FedBN:
    """Return FedBN, trained locally as `training` says."""
    return FedBN(fedavg(training))


def normalization_layers(task: Task) -> tuple[str, ...]:
    """Return the beginnings of the names of all tensors of normalization layers, such as "body.1."."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    return tuple(
        f"{half}.{name}." if name else f"{half}."
        for half, module in (("body", task.body), ("head", task.head))
        for name, layer in module.named_modules()
        if isinstance(layer, kinds)
    )


def _split(task: Task, named: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Return tensors apart from those of normalization layers, and these."""
    own = normalization_layers(task)
    normalization = {name: value for name, value in named.items() if name.startswith(own)} if own else {}
    return {name: value for name, value in named.items() if name not in normalization}, normalization
