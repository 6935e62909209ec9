"""Methods that share weights as they are, or do not share them: local training, FedAvg, private heads, DP-SGD.

One class serves them all; they differ in which half leaves the client and in the phases of local training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from netweight.core import seeds
from netweight.methods.federate.local import Extra, Learner, train_phase
from netweight.methods.federate.method import Client, Trained, Weights, from_named, named_weights
from netweight.methods.federate.settings import LocalTraining, Phase, Privacy, Sampling
from netweight.methods.federate.task import LocalModel, Task
from netweight.methods.federate.updates import Tensors, Update, aggregate


@final
@dataclass(frozen=True)
class DirectMethod:
    """Clients train the model's weights themselves; the server averages those halves that are shared."""

    name: str  # as the command line calls it
    halves: tuple[Literal["body", "head"], ...]  # which halves leave a client: both, the body alone, or none
    phases: tuple[Phase, ...]  # local training of a round
    training: LocalTraining = LocalTraining()  # batch size, momentum and weight decay of all phases

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client."""
        return tuple(f"{half}.**" for half in self.halves)

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return the model's own weights, as far as they are shared."""
        return self._only(named_weights(task, Weights(task.initial_body(), task.initial_head())), shared=True)

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return the model's own weights, as far as they are private, and running statistics."""
        weights = Weights(task.initial_body(), task.initial_head(), task.initial_statistics())
        return self._only(named_weights(task, weights), shared=False)

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return the state: all clients get the same."""
        return state

    def weights(self, task: Task, received: Tensors, private: Tensors) -> Weights:
        """Return the received half or halves with the client's own."""
        return from_named(task, {**private, **received})

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int,
        extra: Callable[[Weights], Extra] | None = None,
    ) -> list[Trained]:  # fmt: skip
        """Train each client by the phases in turn; `extra` makes what is added to gradients of how a client begins."""
        numbers = [client.number for client in clients]
        weights = [self.weights(task, client.received, client.private) for client in clients]
        added = [None if extra is None else extra(begun) for begun in weights]
        losses: list[float] = []
        for order, phase in enumerate(self.phases):
            draws = [seeds.derive(seed, "client", number, "round", round, "phase", order) for number in numbers]
            learners = [Learner(*one) for one in zip(numbers, weights, draws, added, strict=True)]
            weights, losses = train_phase(model, learners, phase, self.training)
        return [self._trained(task, *found, round) for found in zip(numbers, weights, losses, strict=True)]

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the weighted average."""
        return aggregate(state, updates) if state else {}

    def _trained(self, task: Task, number: int, weights: Weights, loss: float, round: int) -> Trained:
        named = named_weights(task, weights)
        # Beside noise the exact number of examples would be a release of its own: then all clients weigh the same.
        n = 1 if any(phase.privacy is not None for phase in self.phases) else task.client(number).n
        update = Update(number, n, self._only(named, shared=True), round)
        return Trained(update, self._only(named, shared=False), weights, loss)

    def _only(self, named: Tensors, *, shared: bool) -> dict[str, Tensor]:
        return {name: value for name, value in named.items() if (name.partition(".")[0] in self.halves) == shared}


def local_only(training: LocalTraining = LocalTraining()) -> DirectMethod:
    """Return the method that shares nothing: every client trains the whole model alone."""
    return DirectMethod("local", (), (_phase("both", training),), training)


def fedavg(training: LocalTraining = LocalTraining()) -> DirectMethod:
    """Return FedAvg: clients train the whole model, as `training` says, and share all of it.

    Source: McMahan et al. (arXiv 1602.05629).
    """
    return DirectMethod("fedavg", ("body", "head"), (_phase("both", training),), training)


def fedavg_private_head(training: LocalTraining = LocalTraining(), name: str = "fedavg-private-head") -> DirectMethod:
    """Return FedAvg with private heads, FedRep: the head is trained first, then the body; the body alone is shared.

    Source: Collins et al., FedRep (arXiv 2102.07078).
    """
    return DirectMethod(name, ("body",), (_head_phase(training), _phase("body", training)), training)


def dp_fedavg(
    noise_multiplier: float, *, training: LocalTraining = LocalTraining(), clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:  # fmt: skip
    """Return FedAvg whose clients train the whole model by DP-SGD."""
    # Source: DP-FedAvg as HyperFL (arXiv 2412.07187) compares with it; Abadi et al. (arXiv 1607.00133).
    privacy = Privacy(noise_multiplier=noise_multiplier, clip=clip, sampling=sampling)
    return DirectMethod("dp-fedavg", ("body", "head"), (_phase("both", training, privacy),), training)


def centaur(
    noise_multiplier: float, *, training: LocalTraining = LocalTraining(), clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:  # fmt: skip
    """Return CENTAUR: first the private head by plain SGD, then the body by DP-SGD; the body alone is shared."""
    # Source: Shen et al., CENTAUR (arXiv 2206.07902), with DP-SGD at the client as HyperFL compares with it.
    privacy = Privacy(noise_multiplier=noise_multiplier, clip=clip, sampling=sampling)
    return DirectMethod("centaur", ("body",), (_head_phase(training), _phase("body", training, privacy)), training)


def ppsgd(
    noise_multiplier: float, *, training: LocalTraining = LocalTraining(), clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:  # fmt: skip
    """Return PPSGD: on each batch a plain step of the private head, then a DP-SGD step of the shared body."""
    # Source: Bietti et al., PPSGD (arXiv 2202.05318), in the form that HyperFL compares with.
    privacy = Privacy(noise_multiplier=noise_multiplier, clip=clip, sampling=sampling)
    phase = _phase("body", training, privacy).replace(head_lr=training.head_lr)
    return DirectMethod("ppsgd", ("body",), (phase,), training)


def _phase(trains: Literal["body", "both"], training: LocalTraining, privacy: Privacy | None = None) -> Phase:
    return Phase(trains=trains, epochs=training.epochs, lr=training.lr, privacy=privacy)


def _head_phase(training: LocalTraining) -> Phase:
    return Phase(trains="head", epochs=training.head_epochs, lr=training.head_lr)


def epsilon_caveats(phases: Sequence[Phase]) -> tuple[str, ...]:
    """Say why an accountant's ε would not hold for what clients send that train by these phases."""
    private = [phase for phase in phases if phase.privacy is not None]
    if not private:
        return ()
    caveats = []
    if any(phase.privacy is not None and phase.privacy.sampling == "shuffled" for phase in private):
        caveats.append("epsilon not valid: batches are shuffled, and accountants assume Poisson sampling")
    if len(private) < len(phases) or any(phase.head_lr is not None for phase in private):
        caveats.append("epsilon not valid: the head learns from the same examples without noise and steers the body")
    return tuple(caveats)
