"""Methods that share weights as they are, or do not share them: local training, FedAvg, private heads.

One class serves them all; they differ in which half leaves the client and in the phases of local training. FedProx,
Ditto, FedBN, SCAFFOLD and the methods with noise are built on it, each in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from netweight.core import seeds
from netweight.methods.federate.accounting import AnswerPrivacy, Release
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.local import Extra, Learner, steps_per_epoch, train_phase
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import (
    STATISTICS,
    Client,
    ClientWeights,
    LocalResult,
    from_named,
    named_weights,
)
from netweight.methods.federate.settings import LocalTraining, Phase, Privacy
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors, Update


@final
@dataclass(frozen=True)
class DirectMethod:
    """Clients train the model's weights themselves; the server averages those halves that are shared."""

    name: str
    """Name on the command line."""
    halves: tuple[Literal["body", "head"], ...]
    """Halves of the model that leave a client: both, the body alone, or none."""
    phases: tuple[Phase, ...]
    """Local training of a round."""
    training: LocalTraining = LocalTraining()
    """Batch size, momentum and weight decay of all phases."""

    @property
    def shared(self) -> tuple[str, ...]:
        """Patterns of what may leave a client."""
        return tuple(f"{half}.**" for half in self.halves)

    def start(self, task: Task, *, seed: int) -> dict[str, Tensor]:
        """Return the model's own weights, as far as they are shared."""
        return self._only(named_weights(task, ClientWeights(task.initial_body(), task.initial_head())), shared=True)

    def private_start(self, task: Task, client: int, *, seed: int) -> dict[str, Tensor]:
        """Return the model's own weights, as far as they are private, and running statistics."""
        weights = ClientWeights(task.initial_body(), task.initial_head(), task.initial_statistics())
        return self._only(named_weights(task, weights), shared=False)

    def message(self, state: Tensors, client: int) -> Tensors:
        """Return the state: all clients get the same."""
        return state

    def weights(self, task: Task, received: Tensors, private: Tensors) -> ClientWeights:
        """Return the received half or halves with the client's own."""
        return from_named(task, {**private, **received})

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int,
        extra: Callable[[ClientWeights], Extra] | None = None,
    ) -> list[LocalResult]:  # fmt: skip
        """Train each client by the phases in turn; `extra` makes what is added to gradients of how a client begins."""
        numbers = [client.number for client in clients]
        weights = [self.weights(task, client.message, client.private) for client in clients]
        added = [None if extra is None else extra(begun) for begun in weights]
        losses: list[float] = []
        for order, phase in enumerate(self.phases):
            draws = [seeds.derive(seed, "client", number, "round", round, "phase", order) for number in numbers]
            learners = [Learner(*one) for one in zip(numbers, weights, draws, added, strict=True)]
            weights, losses = train_phase(model, learners, phase, self.training)
        return [self._trained(task, *trained, round) for trained in zip(numbers, weights, losses, strict=True)]

    def aggregate(self, state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
        """Return the weighted average."""
        return aggregate(state, updates) if state else {}

    def privacy(self, n: int) -> AnswerPrivacy:
        """Return what is known of the noise in one answer of a client with `n` examples."""
        private = [phase for phase in self.phases if phase.privacy is not None and phase.privacy.noise_multiplier]
        size = self.training.batch_size
        releases = tuple(
            Release(
                "example", phase.privacy.noise_multiplier, min(1.0, size / n), phase.epochs * steps_per_epoch(n, size)
            )
            for phase in private
            if phase.privacy is not None
        )
        names = sorted({phase.privacy.sampling.capitalize() for phase in private if phase.privacy is not None})
        sampling = f"{', '.join(names)} sampling" if names else ""
        return AnswerPrivacy(releases, sampling, epsilon_caveats(self.phases) if releases else ())

    def _trained(self, task: Task, number: int, weights: ClientWeights, loss: float, round: int) -> LocalResult:
        named = named_weights(task, weights)
        # Beside noise the exact number of examples would be a release of its own: then all clients weigh the same.
        n = 1 if any(phase.privacy is not None for phase in self.phases) else task.client(number).n
        update = Update(number, n, self._only(named, shared=True), round, {"loss": loss})
        return LocalResult(update, self._only(named, shared=False), weights)

    def _only(self, named: Tensors, *, shared: bool) -> dict[str, Tensor]:
        return {name: value for name, value in named.items() if (name.partition(".")[0] in self.halves) == shared}


def local_only(training: LocalTraining = LocalTraining()) -> DirectMethod:
    """Return the method that shares nothing: every client trains the whole model alone."""
    return DirectMethod("local", (), (phase("both", training),), training)


def fedavg(training: LocalTraining = LocalTraining()) -> DirectMethod:
    """Return FedAvg: clients train the whole model with the settings `training`, and share all of it.

    Source: McMahan et al. (arXiv 1602.05629).
    """
    return DirectMethod("fedavg", ("body", "head"), (phase("both", training),), training)


def fedavg_private_head(training: LocalTraining = LocalTraining(), name: str = "fedavg-private-head") -> DirectMethod:
    """Return FedAvg with private heads, FedRep: the head is trained first, then the body; the body alone is shared.

    Source: Collins et al., FedRep (arXiv 2102.07078).
    """
    return DirectMethod(name, ("body",), (head_phase(training), phase("body", training)), training)


def phase(trains: Literal["body", "both"], training: LocalTraining, privacy: Privacy | None = None) -> Phase:
    """Return the phase that trains the body or both halves, at the rate of what is shared."""
    return Phase(trains=trains, epochs=training.epochs, lr=training.lr, privacy=privacy)


def head_phase(training: LocalTraining) -> Phase:
    """Return the phase that trains the head alone."""
    return Phase(trains="head", epochs=training.head_epochs, lr=training.head_lr)


def epsilon_caveats(phases: Sequence[Phase]) -> tuple[str, ...]:
    """Return the reasons why no ε holds for what clients send that train by these phases; none without noise.

    Args:
        phases: Local training of a round.
    """
    private = [phase for phase in phases if phase.privacy is not None]
    if not private:
        return ()
    caveats = []
    if any(phase.privacy is not None and phase.privacy.sampling == "shuffled" for phase in private):
        caveats.append("epsilon not valid: batches are shuffled, and accountants assume Poisson sampling")
    if any(phase.privacy is not None and not phase.privacy.noise_multiplier for phase in private):
        caveats.append("epsilon not valid: some gradients have no noise")
    if len(private) < len(phases) or any(phase.head_lr is not None for phase in private):
        caveats.append("epsilon not valid: the head learns from the same examples without noise and steers the body")
    return tuple(caveats)


def near(weights: ClientWeights, strength: float) -> Extra:
    """Return what pulls towards weights: the gradient of `strength / 2` times the squared distance."""
    return lambda half, vector: strength * (vector - getattr(weights, half).to(vector))


def kept_statistics(private: Tensors) -> dict[str, Tensor]:
    """Return the running statistics among a client's private tensors."""
    return {name: value for name, value in private.items() if name.startswith(STATISTICS)}


def initial_weights(task: Task) -> ClientWeights:
    """Return the weights that the task's model begins with."""
    return ClientWeights(task.initial_body(), task.initial_head())
