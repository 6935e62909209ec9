"""Methods that share weights as they are, or do not share them: local training, FedAvg, private heads, DP-SGD.

One class serves them all; they differ in which half leaves the client and in the phases of local training. Around it
are FedProx, Ditto, FedBN and SCAFFOLD; `join` lets a client come late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.accounting import AnswerPrivacy, Release
from netweight.methods.federate.algorithms.hyperfl import HyperFL
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.engine import Run
from netweight.methods.federate.local import Extra, Learner, Stream, learners_of, steps_per_epoch, train_phase
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import (
    STATISTICS,
    Client,
    LocalResult,
    Method,
    MethodWrapper,
    Weights,
    from_named,
    named_weights,
    prefixed,
    without,
)
from netweight.methods.federate.settings import LocalTraining, Phase, Privacy
from netweight.methods.federate.task import ClientData, Task
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

    def _trained(self, task: Task, number: int, weights: Weights, loss: float, round: int) -> LocalResult:
        named = named_weights(task, weights)
        # Beside noise the exact number of examples would be a release of its own: then all clients weigh the same.
        n = 1 if any(phase.privacy is not None for phase in self.phases) else task.client(number).n
        update = Update(number, n, self._only(named, shared=True), round, {"loss": loss})
        return LocalResult(update, self._only(named, shared=False), weights)

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


def dp_fedavg(noise_multiplier: float, *, training: LocalTraining = LocalTraining(), **privacy: Any) -> DirectMethod:
    """Return FedAvg whose clients train the whole model by DP-SGD; `privacy` are further fields of `Privacy`.

    Source: DP-FedAvg as HyperFL (arXiv 2412.07187) compares with it; Abadi et al. (arXiv 1607.00133).
    """
    how = Privacy(noise_multiplier=noise_multiplier, **privacy)
    return DirectMethod("dp-fedavg", ("body", "head"), (_phase("both", training, how),), training)


def centaur(noise_multiplier: float, *, training: LocalTraining = LocalTraining(), **privacy: Any) -> DirectMethod:
    """Return CENTAUR: first the private head by plain SGD, then the body by DP-SGD; the body alone is shared.

    Source: Shen et al., CENTAUR (arXiv 2206.07902), with DP-SGD at the client as HyperFL compares with it.
    """
    how = Privacy(noise_multiplier=noise_multiplier, **privacy)
    return DirectMethod("centaur", ("body",), (_head_phase(training), _phase("body", training, how)), training)


def ppsgd(noise_multiplier: float, *, training: LocalTraining = LocalTraining(), **privacy: Any) -> DirectMethod:
    """Return PPSGD: on each batch a plain step of the private head, then a DP-SGD step of the shared body.

    Source: Bietti et al., PPSGD (arXiv 2202.05318), in the form that HyperFL compares with.
    """
    how = Privacy(noise_multiplier=noise_multiplier, **privacy)
    phase = _phase("body", training, how).replace(head_lr=training.head_lr)
    return DirectMethod("ppsgd", ("body",), (phase,), training)


def _phase(trains: Literal["body", "both"], training: LocalTraining, privacy: Privacy | None = None) -> Phase:
    return Phase(trains=trains, epochs=training.epochs, lr=training.lr, privacy=privacy)


def _head_phase(training: LocalTraining) -> Phase:
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


T = TypeVar("T")
_CONTROL, _PERSONAL, _CLIENTS = "control.", "personal.", "clients"


def _near(weights: Weights, strength: float) -> Extra:
    """Pull towards weights: the gradient of `strength / 2` times the squared distance."""
    return lambda half, vector: strength * (vector - getattr(weights, half).to(vector))


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
            task, model, clients, round=round, seed=seed, extra=lambda start: _near(start, self.strength)
        )


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
        return prefixed(_PERSONAL, named_weights(task, _initial(task))) | prefixed(
            STATISTICS, task.initial_statistics()
        )

    def weights(self, task: Task, received: Tensors, private: Tensors) -> Weights:
        """Return the personal model."""
        return from_named(task, without(_PERSONAL, private))

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train the shared model as FedAvg does, then each personal one near what was received."""
        learners = [replace(client, private=_statistics(client.private)) for client in clients]
        shared = self.method.train(task, model, learners, round=round, seed=seed)
        done = []
        own = learners_of(self, task, clients, round=round, seed=seeds.derive(seed, "personal"))
        for one, client, learner in zip(shared, clients, own, strict=True):
            near = _near(from_named(task, client.message), self.strength)
            (weights,), (loss,) = train_phase(
                model, [replace(learner, extra=near)], self.method.phases[0], self.method.training
            )
            private = {**prefixed(_PERSONAL, named_weights(task, weights)), **one.private}
            update = replace(one.update, metrics={**one.update.metrics, "loss": loss})
            done.append(replace(one, update=update, private=private, weights=weights))
        return done


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
            replace(c, message={**c.message, **_split(task, c.private)[1]}, private=_statistics(c.private))
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


def _split(task: Task, named: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Return tensors apart from those of normalization layers, and these."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    own = tuple(
        f"{half}.{name}." if name else f"{half}."
        for half, module in (("body", task.body), ("head", task.head))
        for name, layer in module.named_modules()
        if isinstance(layer, kinds)
    )
    normalization = {name: value for name, value in named.items() if name.startswith(own)} if own else {}
    return {name: value for name, value in named.items() if name not in normalization}, normalization


def _statistics(private: Tensors) -> dict[str, Tensor]:
    return {name: value for name, value in private.items() if name.startswith(STATISTICS)}


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
        zero = {name: torch.zeros_like(value) for name, value in named_weights(task, _initial(task)).items()}
        return prefixed(_CONTROL, zero) | prefixed(STATISTICS, task.initial_statistics())

    def weights(self, task: Task, received: Tensors, private: Tensors) -> Weights:
        """Return the received model."""
        return from_named(task, {**_statistics(private), **received})

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train each client with its corrections, and renew its control variate."""
        return [self._trained(task, model, client, round, seed) for client in clients]

    def _trained(self, task: Task, model: LocalModel, client: Client, round: int, seed: int) -> LocalResult:
        everyone, own = (from_named(task, without(_CONTROL, part)) for part in (client.message, client.private))
        sent = {name: value for name, value in client.message.items() if name.startswith(("body.", "head."))}
        plain = replace(client, message=sent, private=_statistics(client.private))

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
        mean, clients = aggregate(state, updates), sum(len(update.parts) or 1 for update in updates)
        share = clients / int(state[_CLIENTS])
        return {n: torch.lerp(state[n], v, share) if n.startswith(_CONTROL) else v for n, v in mean.items()}


def around(kind: Callable[[DirectMethod], Method], training: LocalTraining = LocalTraining()) -> Method:
    """Return one of the methods around FedAvg, trained locally as given."""
    return kind(fedavg(training))


fedprox, ditto, fedbn, scaffold = (partial(around, kind) for kind in (FedProx, Ditto, FedBN, Scaffold))


def _initial(task: Task) -> Weights:
    return Weights(task.initial_body(), task.initial_head())


def join(run: Run, data: ClientData, *, epochs: int = 5, lr: float = 0.1, seed: int) -> Weights:
    """Return the personal model of a client that comes after training: it learns an embedding and a head alone.

    Args:
        run: A federation trained by HyperFL, whose hypernetwork stays as it is.
        data: The new client's.
        epochs: Passes over its training examples.
        lr: Learning rate of embedding and head.
        seed: Random seed of its start and batches.

    Raises:
        UsageError: The federation has no hypernetwork that clients share.
    """
    method = run.method
    if not isinstance(method, HyperFL):
        raise UsageError(f"{method.name!r} shares no hypernetwork.", cure="Train the federation by hyperfl.")
    task = Task(run.task.body, run.task.head, {0: data}, run.task.loss, run.task.augment)
    private = method.private_start(task, 0, seed=seed)
    model, training = LocalModel(task), method.training
    start = method.weights(task, run.state, private)
    network = {name: value.detach() for name, value in run.state.items()}
    embedding, head = (one.clone().requires_grad_() for one in (private["embedding"], start.head))
    optimizer = torch.optim.SGD([embedding, head], lr, training.momentum, weight_decay=training.weight_decay)
    model.train("both")
    state, size = model.layer_state(start.statistics, seed), task.body_layout.size
    for inputs, targets in Stream(model, Learner(0, start, seed), epochs, training.batch_size):
        made = method.generated(network, embedding)
        optimizer.zero_grad()
        loss = model.loss(made[:size], head if method.private_head else made[size:], inputs, targets, state)
        loss.backward()  # type: ignore[no-untyped-call]
        for one in (embedding, head):
            nn.utils.clip_grad_norm_(one, 1.0)
        optimizer.step()
    with torch.no_grad():
        made = method.generated(network, embedding)
    return Weights(made[:size], head.detach() if method.private_head else made[size:], state.buffers)
