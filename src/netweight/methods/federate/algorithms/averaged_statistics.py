"""Statistics of normalization layers that the server averages, in place of those that each client keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

from torch import Tensor

from netweight.methods.federate.accounting import AnswerPrivacy, privacy_of
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import STATISTICS, Client, ClientWeights, LocalResult, MethodWrapper, prefixed
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors, Update

T = TypeVar("T")


@final
@dataclass(frozen=True)
class AveragedStatistics(MethodWrapper):
    """A method whose clients share the buffers of their layers, which the server averages like weights.

    Without it every client keeps its own, as in FedBN (Li et al., arXiv 2102.07623). Averaging them is what sending a
    whole `state_dict` does in plain FedAvg.
    """

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client."""
        return (*self.method.shared, f"{STATISTICS}**")

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return the method's state before round 1, and the first buffers."""
        finite = {name: value for name, value in task.initial_statistics().items() if value.isfinite().all()}
        return self.method.start(task, seed=seed) | prefixed(STATISTICS, finite)

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return what a client keeps, without buffers that are shared."""
        shared = self.start(task, seed=seed)
        state = self.method.private_start(task, client, seed=seed)
        return {name: value for name, value in state.items() if name not in shared}

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return the method's message and the averaged buffers."""
        weights, buffers = _apart(state)
        sent = self.method.message(weights, client)
        return state if sent is weights else {**sent, **buffers}

    def weights(self, task: Task, received: Tensors, private: Tensors) -> ClientWeights:
        """Return a client's model with the received buffers."""
        weights, buffers = _apart(received)
        return self.method.weights(task, weights, {**private, **buffers})

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train from the received buffers, and send them as training leaves them."""
        parts = {client.number: _apart(client.message) for client in clients}
        own = [
            replace(one, message=parts[one.number][0], private={**one.private, **parts[one.number][1]})
            for one in clients
        ]
        sent = []
        for one in self.method.train(task, model, own, round=round, seed=seed):
            names = parts[one.update.client][1]
            buffers = {name: one.private[name] for name in names}
            private = {name: value for name, value in one.private.items() if name not in names}
            sent.append(replace(one, update=_with(one.update, {**one.update.tensors, **buffers}), private=private))
        return sent

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the method's next state and the mean of the buffers, weighted by examples; of counters, the median."""
        (weights, buffers), parts = _apart(state), [_apart(update.tensors) for update in updates]
        own = [_with(update, part[0]) for update, part in zip(updates, parts, strict=True)]
        theirs = [_with(update, part[1]) for update, part in zip(updates, parts, strict=True)]
        averaged = aggregate(buffers, theirs) if buffers else {}
        return {**self.method.aggregate(weights, own), **averaged}

    def privacy(self, n: int) -> AnswerPrivacy:
        """Return what is known of the noise in one answer of a client with `n` examples."""
        inner = privacy_of(self.method, n)
        if not inner.releases:
            return inner
        return replace(inner, caveats=(*inner.caveats, "epsilon not valid: buffers of layers leave without noise"))


def _with(update: Update, tensors: Mapping[str, Any]) -> Update:
    return replace(update, tensors=tensors)


def _apart(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Return the tensors without the shared buffers, and these."""
    buffers = {name: value for name, value in tensors.items() if name.startswith(STATISTICS)}
    return {name: value for name, value in tensors.items() if name not in buffers}, buffers
