"""SCAFFOLD: clients correct their gradients by how theirs differ from everyone's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from netweight.methods.federate.algorithms.direct import DirectMethod, fedavg, initial_weights, kept_statistics
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.local import steps_per_epoch
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
from netweight.methods.federate.updates import Tensors, Update

_CONTROL, _CLIENTS = "control.", "clients"


@final
@dataclass(frozen=True)
class Scaffold(MethodWrapper):
    """SCAFFOLD: clients correct their gradients by how theirs differ from everyone's. Source: arXiv 1910.06378."""

    method: DirectMethod = field(default_factory=lambda: fedavg(LocalTraining(momentum=0.0)))
    """Option II of its algorithm; local steps are plain SGD, as control variates assume."""
    name: str = "scaffold"

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client: the model, and its control variate added to the server's."""
        return (*self.method.shared, f"{_CONTROL}**", _CLIENTS)

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return the model, and a control variate of zero."""
        model = self.method.start(task, seed=seed)
        zero = prefixed(_CONTROL, {name: torch.zeros_like(value) for name, value in model.items()})
        return model | zero | {_CLIENTS: torch.tensor(len(task.clients))}

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return the client's own control variate of zero, and running statistics."""
        zero = {name: torch.zeros_like(value) for name, value in named_weights(task, initial_weights(task)).items()}
        return prefixed(_CONTROL, zero) | prefixed(STATISTICS, task.initial_statistics())

    def weights(self, task: Task, received: Tensors, private: Tensors) -> ClientWeights:
        """Return the received model."""
        return from_named(task, {**kept_statistics(private), **received})

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train each client with its corrections, and renew its control variate."""
        return [self._trained(task, model, client, round, seed) for client in clients]

    def _trained(self, task: Task, model: LocalModel, client: Client, round: int, seed: int) -> LocalResult:
        everyone, own = (from_named(task, without(_CONTROL, part)) for part in (client.message, client.private))
        sent = {name: value for name, value in client.message.items() if name.startswith(("body.", "head."))}
        plain = replace(client, message=sent, private=kept_statistics(client.private))

        def corrected(half: str, vector: Tensor) -> Tensor:
            difference: Tensor = getattr(everyone, half) - getattr(own, half)
            return difference.to(vector)

        (one,) = self.method.train(task, model, [plain], round=round, seed=seed, extra=lambda start: corrected)
        training, n = self.method.training, task.client(client.number).n
        steps = steps_per_epoch(n, training.batch_size, needs_two=model.habits.needs_two)
        reach = training.epochs * steps * training.lr
        control, shown = {}, {}
        for name, before in sent.items():
            value = one.update.tensors[name]
            assert isinstance(value, Tensor)
            mine, all_of_them = client.private[_CONTROL + name], client.message[_CONTROL + name]
            control[_CONTROL + name] = mine - all_of_them + (before - value) / reach
            shown[_CONTROL + name] = all_of_them + control[_CONTROL + name] - mine
        update = replace(one.update, tensors={**one.update.tensors, **shown, _CLIENTS: client.message[_CLIENTS]})
        return replace(one, update=update, private={**one.private, **control})

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the averaged model, and the control variate moved by the share of clients that took part."""
        mean, clients = aggregate(state, updates), sum(len(update.members) or 1 for update in updates)
        share = clients / int(state[_CLIENTS])
        return {n: torch.lerp(state[n], v, share) if n.startswith(_CONTROL) else v for n, v in mean.items()}


def scaffold(training: LocalTraining = LocalTraining()) -> Scaffold:
    """Return SCAFFOLD, trained locally as `training` says."""
    return Scaffold(fedavg(training))
