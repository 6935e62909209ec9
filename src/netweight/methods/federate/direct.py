"""Methods that share weights as they are, or do not share them: local training, FedAvg, FedAvg with private heads.

One class serves them all; they differ in which half leaves the client and in the phases of local training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from netweight.core import seeds
from netweight.methods.federate.aggregate import Tensors, Update, aggregate
from netweight.methods.federate.dp import train_privately
from netweight.methods.federate.local import train_clients
from netweight.methods.federate.method import Client, LocalModel, Trained, Weights
from netweight.methods.federate.settings import LocalTraining, Phase, Privacy
from netweight.methods.federate.task import FedTask

# Prefix of running statistics of normalization layers, which stay with their client in every method.
STATISTICS = "statistics."


def prefixed(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors under names that begin with a prefix."""
    return {prefix + name: value for name, value in tensors.items()}


def without(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def initial_statistics(task: FedTask) -> dict[str, Tensor]:
    """Return the running statistics that a client begins with, by private names."""
    return prefixed(STATISTICS, LocalModel(task).initial_statistics())


@final
@dataclass(frozen=True)
class DirectMethod:
    """Clients train the model's weights themselves; the server averages those halves that are shared.

    Attributes:
        name: As the command line calls it.
        halves: Which halves leave a client: both, the body alone, or none.
        phases: Local training of a round.
        training: Batch size, momentum and weight decay of all phases.
    """

    name: str  # as the command line calls it
    halves: tuple[Literal["body", "head"], ...]  # which halves leave a client: both, the body alone, or none
    phases: tuple[Phase, ...]  # local training of a round
    training: LocalTraining = LocalTraining()  # batch size, momentum and weight decay of all phases

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client."""
        return tuple(f"{half}.**" for half in self.halves)

    def start(self, task: FedTask, *, seed: int) -> dict[str, Tensor]:
        """Return the model's own weights, as far as they are shared."""
        return self._only(_named(task, Weights(task.initial_body(), task.initial_head())), shared=True)

    def private_start(self, task: FedTask, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return the model's own weights, as far as they are private, and running statistics."""
        weights = Weights(task.initial_body(), task.initial_head(), LocalModel(task).initial_statistics())
        return self._only(_named(task, weights), shared=False)

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return the state: all clients get the same."""
        return state

    def weights(self, task: FedTask, received: Tensors, private: Tensors) -> Weights:
        """Return the received half or halves with the client's own."""
        return from_named(task, {**private, **received})

    def train(
        self, task: FedTask, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[Trained]:
        """Train each client by the phases in turn."""
        numbers = [client.number for client in clients]
        weights = [self.weights(task, client.received, client.private) for client in clients]
        losses: list[float] = []
        for order, phase in enumerate(self.phases):
            draws = [seeds.derive(seed, "client", number, "round", round, "phase", order) for number in numbers]
            train = train_clients if phase.privacy is None else train_privately
            weights, losses = train(model, weights, numbers, phase, self.training, seeds_by_client=draws)
        return [self._trained(task, *found, round) for found in zip(numbers, weights, losses, strict=True)]

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the weighted average."""
        return aggregate(state, updates) if state else {}

    def _trained(self, task: FedTask, number: int, weights: Weights, loss: float, round: int) -> Trained:
        named = _named(task, weights)
        update = Update(number, task.client(number).n, self._only(named, shared=True), round)
        return Trained(update, self._only(named, shared=False), weights, loss)

    def _only(self, named: Tensors, *, shared: bool) -> dict[str, Tensor]:
        return {name: value for name, value in named.items() if (name.partition(".")[0] in self.halves) == shared}


def _named(task: FedTask, weights: Weights) -> dict[str, Tensor]:
    return (
        prefixed("body.", task.body_layout.split(weights.body))
        | prefixed("head.", task.head_layout.split(weights.head))
        | prefixed(STATISTICS, weights.statistics)
    )


def from_named(task: FedTask, tensors: Tensors) -> Weights:
    """Return weights from tensors with the prefixes `body.`, `head.` and that of running statistics."""
    return Weights(
        task.body_layout.join(without("body.", tensors)),
        task.head_layout.join(without("head.", tensors)),
        without(STATISTICS, tensors),
    )


def local_only(training: LocalTraining = LocalTraining()) -> DirectMethod:
    """Return the method that shares nothing: every client trains the whole model alone.

    Args:
        training: How every client trains.
    """
    return DirectMethod("local", (), (Phase("both", training.epochs, training.lr),), training)


def fedavg(training: LocalTraining = LocalTraining()) -> DirectMethod:
    """Return FedAvg: clients train the whole model and share all of it.

    Args:
        training: How every client trains.

    Source: McMahan et al. (arXiv 1602.05629).
    """
    return DirectMethod("fedavg", ("body", "head"), (Phase("both", training.epochs, training.lr),), training)


def fedavg_private_head(training: LocalTraining = LocalTraining()) -> DirectMethod:
    """Return FedAvg with private heads: the head is trained first, then the body, and the body alone is shared.

    The fair comparator of HyperFL, which trains in the same order and keeps the same half to itself.

    Args:
        training: How every client trains.

    Source: Collins et al., FedRep (arXiv 2102.07078).
    """
    # Source: Collins et al., FedRep (arXiv 2102.07078).
    phases = (
        Phase("head", training.head_epochs, training.head_lr),
        Phase("body", training.epochs, training.lr),
    )
    return DirectMethod("fedavg-private-head", ("body",), phases, training)


Sampling = Literal["poisson", "shuffled"]


def dp_fedavg(
    noise_multiplier: float,
    *,
    training: LocalTraining = LocalTraining(),
    clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:
    """Return FedAvg whose clients train the whole model by DP-SGD."""
    # Source: DP-FedAvg as HyperFL (arXiv 2412.07187) compares with it; Abadi et al. (arXiv 1607.00133).
    privacy = Privacy(noise_multiplier, clip, sampling)
    phases = (Phase("both", training.epochs, training.lr, privacy),)
    return DirectMethod("dp-fedavg", ("body", "head"), phases, training)


def centaur(
    noise_multiplier: float,
    *,
    training: LocalTraining = LocalTraining(),
    clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:
    """Return CENTAUR: first the private head by plain SGD, then the body by DP-SGD; the body alone is shared."""
    # Source: Shen et al., CENTAUR (arXiv 2206.07902), with DP-SGD at the client as HyperFL compares with it.
    privacy = Privacy(noise_multiplier, clip, sampling)
    phases = (
        Phase("head", training.head_epochs, training.head_lr),
        Phase("body", training.epochs, training.lr, privacy),
    )
    return DirectMethod("centaur", ("body",), phases, training)


def ppsgd(
    noise_multiplier: float,
    *,
    training: LocalTraining = LocalTraining(),
    clip: float = 0.04,
    sampling: Sampling = "poisson",
) -> DirectMethod:
    """Return PPSGD: on each batch a plain step of the private head, then a DP-SGD step of the shared body."""
    # Source: Bietti et al., PPSGD (arXiv 2202.05318), in the form that HyperFL compares with.
    phase = Phase("body", training.epochs, training.lr, Privacy(noise_multiplier, clip, sampling), training.head_lr)
    return DirectMethod("ppsgd", ("body",), (phase,), training)


def epsilon_caveats(method: DirectMethod) -> tuple[str, ...]:
    """Say why an accountant's ε would not hold for what a method's clients send."""
    # Nothing is said if it holds, and of a method without privacy. Findings and tables show these beside any ε.
    private = [phase for phase in method.phases if phase.privacy is not None]
    if not private:
        return ()
    caveats = []
    if any(phase.privacy is not None and phase.privacy.sampling == "shuffled" for phase in private):
        caveats.append("epsilon not valid: batches are shuffled, and accountants assume Poisson sampling")
    if len(private) < len(method.phases) or any(phase.head_lr is not None for phase in private):
        caveats.append("epsilon not valid: the head learns from the same examples without noise and steers the body")
    return tuple(caveats)
