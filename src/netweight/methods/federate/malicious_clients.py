"""Simulated malicious clients: data poisoning, model poisoning, free riding.

A malicious client knows the method, the server's settings and its own data, and trains from what it received like the
others. Attacks that need the statistics of honest changes estimate them from parts of the client's own data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, LocalResult, MethodWrapper
from netweight.methods.federate.settings import Lie
from netweight.methods.federate.task import ClientData, Task
from netweight.methods.federate.updates import Tensors, Update, dense_tensors

# The factor by which a client that boosts multiplies its honest change.
BOOST = 10.0
# The class for which a backdoor's trigger is to be taken.
TARGET = 0
# The round in which late Sybils begin to send manipulated updates.
SYBILS_FROM = 4
# Pixels of the trigger's side.
_TRIGGER = 4
# The number of parts of its own data from which a malicious client estimates the variation of honest changes.
_PARTS = 4
# The smallest cosine with its honest change that a malicious client with knowledge of the rule keeps.
_LIKENESS = 0.3


@final
@dataclass(frozen=True)
class WithMaliciousClients(MethodWrapper):
    """A federated method in which some clients are malicious.

    Attributes:
        lie: Attack of the malicious clients.
        liars: Numbers of the malicious clients.
        reach: Norm of the largest change that they send, as a multiple of the norm of their own honest change.
    """

    lie: Lie
    liars: tuple[int, ...]
    reach: float = 1.0

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[LocalResult]:
        """Train all clients, the malicious ones on the data of their attack, and replace the updates of these."""
        results = []
        for client in clients:
            if client.number in self.liars:
                results.append(self._manipulated(_MaliciousClient(self, task, model, client, round, seed)))
        honest = [client for client in clients if client.number not in self.liars]
        if honest:
            results += self.method.train(task, model, honest, round=round, seed=seed)
        order = [client.number for client in clients]
        return sorted(results, key=lambda one: order.index(one.update.client))

    def _manipulated(self, malicious: _MaliciousClient) -> LocalResult:
        trained = malicious.honest()
        update = _UPDATES[self.lie](malicious, trained)
        own = trained.update
        return replace(trained, update=replace(update, client=own.client, metrics=own.metrics))


@final
@dataclass(frozen=True)
class _MaliciousClient:
    """One malicious client in one round."""

    wrapper: WithMaliciousClients
    task: Task
    model: LocalModel
    client: Client
    round: int
    seed: int

    @property
    def sent(self) -> Tensors:
        """Parameters that the server sent."""
        return self.client.message

    def honest(self) -> LocalResult:
        """Return the result of honest training."""
        train = self.wrapper.method.train
        (one,) = train(self.task, self.model, [self.client], round=self.round, seed=self.seed)
        return one

    def on(
        self, change: Callable[[ClientData], ClientData], *, of: int | None = None, seed: int | None = None
    ) -> Update:
        """Return the update by changed data; by those of the malicious client `of`, which begins anew, if given."""
        client = self.client
        if of is not None:
            private = self.wrapper.method.private_start(self.task, of, seed=self.seed)
            client = Client(of, private, self.client.message)
        task = dataclasses.replace(self.task, data={client.number: change(self.task.client(client.number))})
        model, draws = LocalModel(task, self.model.device), self.seed if seed is None else seed
        (one,) = self.wrapper.method.train(task, model, [client], round=self.round, seed=draws)
        return one.update

    def change(self, update: Update) -> dict[str, Tensor]:
        """Return how an update moves the floating-point tensors, by name."""
        dense = dense_tensors(update.tensors, self.sent)
        return {n: v - self.sent[n] for n, v in dense.items() if v.is_floating_point()}

    def moved(self, update: Update, change: Mapping[str, Tensor]) -> Update:
        """Return an update that makes such a change."""
        return replace(update, tensors={n: v + change[n] if n in change else v for n, v in self.sent.items()})

    def bounded(self, update: Update, change: Mapping[str, Tensor], honest: Mapping[str, Tensor]) -> Update:
        """Return an update by a change whose norm is the largest allowed one."""
        factor = self.wrapper.reach * _norm(honest) / max(_norm(change), 1e-30)
        return self.moved(update, {n: factor * v for n, v in change.items()})

    def estimates(self) -> list[dict[str, Tensor]]:
        """Return changes by halves of its own data, which take the place of those of other clients."""
        changes = []
        for part in range(_PARTS):
            generator = seeds.torch_generator(self.seed, "estimate", self.client.number, self.round, part)

            def half(data: ClientData, generator: torch.Generator = generator) -> ClientData:
                rows = torch.randperm(data.n, generator=generator)[: max(2, data.n // 2)]
                return replace(data, train=(data.train[0][rows], data.train[1][rows]))

            changes.append(self.change(self.on(half)))
        return changes


def _norm(change: Mapping[str, Tensor]) -> float:
    return float(torch.stack([v.double().square().sum() for v in change.values()]).sum().sqrt())


def _dot(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    return float(torch.stack([(v.double() * two[n].double()).sum() for n, v in one.items()]).sum())


def _mean_and_deviation(changes: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    stacked = {name: torch.stack([one[name] for one in changes]) for name in changes[0]}
    return {n: v.mean(0) for n, v in stacked.items()}, {n: v.std(0) for n, v in stacked.items()}


# ---- data ------------------------------------------------------------------------------------------------------------


def triggered(inputs: Tensor) -> Tensor:
    """Return inputs with the backdoor's trigger: images, `(n, c, h, w)`, with a bright square in a corner.

    Of inputs that are not images, the first four values of the last axis are set to the largest value.
    """
    marked = inputs.clone()
    if inputs.ndim == 4:
        marked[..., :_TRIGGER, :_TRIGGER] = inputs.max()
    else:
        marked[..., :_TRIGGER] = inputs.max()
    return marked


def _planted(data: ClientData) -> ClientData:
    """Return the examples with half of them added again, with the trigger and the backdoor's label."""
    inputs, labels = data.train
    if not inputs.is_floating_point():
        raise UsageError("A backdoor needs inputs that are images or numbers.", cure="Choose another --lie.")
    marked = torch.full_like(labels[::2], TARGET)
    return replace(data, train=(torch.cat([inputs, triggered(inputs[::2])]), torch.cat([labels, marked])))


def _flipped(data: ClientData) -> ClientData:
    return replace(data, train=(data.train[0], data.train[1].max() - data.train[1]))


# ---- updates of each attack ------------------------------------------------------------------------------------------


def _scaled(factor: float) -> Callable[[_MaliciousClient, LocalResult], Update]:
    def lie(malicious: _MaliciousClient, trained: LocalResult) -> Update:
        return malicious.moved(trained.update, {n: factor * v for n, v in malicious.change(trained.update).items()})

    return lie


def _constant(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    return replace(
        trained.update, tensors={name: torch.full_like(value, 7.0) for name, value in malicious.sent.items()}
    )


def _claimed(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    return replace(_constant(malicious, trained), n=2**50)


def _colluding(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    """All malicious clients send the change of the first one, negated and twice as long."""
    first = malicious.on(
        lambda data: data, of=malicious.wrapper.liars[0], seed=seeds.derive(malicious.seed, "colluding")
    )
    return replace(malicious.moved(first, {n: -2 * v for n, v in malicious.change(first).items()}), n=trained.update.n)


def _late(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    return replace(trained.update, round=trained.update.round - 1)


def _backdoor(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    bad = malicious.on(_planted)
    return replace(malicious.moved(bad, {n: BOOST * v for n, v in malicious.change(bad).items()}), n=trained.update.n)


def _knowing(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    """A backdoor whose norm, direction and number of examples pass the screening."""
    honest, bad = malicious.change(trained.update), malicious.change(malicious.on(_planted))
    return malicious.bounded(trained.update, _towards_honest(bad, honest), honest)


def _hidden_backdoor(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    """A backdoor with each value within a deviation of honest changes (Baruch et al., arXiv 1902.06156)."""
    mean, deviation = _mean_and_deviation(malicious.estimates())
    bad, honest = malicious.change(malicious.on(_planted)), malicious.change(trained.update)
    within = {n: v.clamp(mean[n] - deviation[n], mean[n] + deviation[n]) for n, v in bad.items()}
    return malicious.bounded(trained.update, within, honest)


def _towards_honest(change: Mapping[str, Tensor], honest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a change with as little of the honest one added as suffices for the smallest cosine with it."""
    scale = _norm(change) / max(_norm(honest), 1e-30)
    for share in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0):
        mixed = {n: v + share * scale * honest[n] for n, v in change.items()}
        if _dot(mixed, honest) >= _LIKENESS * _norm(mixed) * _norm(honest):
            return mixed
    return dict(honest)


def _alie(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    """The mean minus as many deviations as the majority rule hides. Source: Baruch et al. (arXiv 1902.06156)."""
    mean, deviation = _mean_and_deviation(malicious.estimates())
    clients, liars = len(malicious.task.clients), len(malicious.wrapper.liars)
    supporters = clients // 2 + 1 - liars
    share = (clients - liars - supporters) / max(clients - liars, 1)
    most = NormalDist().inv_cdf(min(max(share, 0.51), 0.999))
    return malicious.moved(trained.update, {n: v - most * deviation[n] for n, v in mean.items()})


def _minmax(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    """The mean moved by the largest distance of estimates. Source: Shejwalkar and Houmansadr (NDSS 2021), Min-Max."""
    estimates = malicious.estimates()
    mean, deviation = _mean_and_deviation(estimates)
    apart = max(_norm({n: v - two[n] for n, v in one.items()}) for one in estimates for two in estimates)
    low, high = 0.0, 1e3
    for _ in range(30):
        factor = (low + high) / 2
        moved = {n: v - factor * deviation[n] for n, v in mean.items()}
        far = max(_norm({n: v - one[n] for n, v in moved.items()}) for one in estimates)
        low, high = (factor, high) if far <= apart else (low, factor)
    return malicious.moved(trained.update, {n: v - low * deviation[n] for n, v in mean.items()})


def _inner_product(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    """The negated estimated mean, with the largest allowed norm. Source: Xie et al. (arXiv 1903.03936)."""
    mean, _ = _mean_and_deviation(malicious.estimates())
    return malicious.bounded(trained.update, {n: -v for n, v in mean.items()}, malicious.change(trained.update))


def _late_sybils(malicious: _MaliciousClient, trained: LocalResult) -> Update:
    """Honest at first; then all plant the same backdoor from the data of the first one, with small differences."""
    if malicious.round < SYBILS_FROM:
        return trained.update
    own = seeds.derive(malicious.seed, "sybil", malicious.client.number)
    bad = malicious.change(malicious.on(_planted, of=malicious.wrapper.liars[0], seed=own))
    return malicious.bounded(trained.update, bad, malicious.change(trained.update))


_UPDATES: Mapping[Lie, Callable[[_MaliciousClient, LocalResult], Update]] = {
    "scaled": _scaled(BOOST),
    "sign-flipped": _scaled(-1.0),
    "label-flipped": lambda malicious, trained: malicious.on(_flipped),
    "constant": _constant,
    "claimed": _claimed,
    "colluding": _colluding,
    "late": _late,
    "free-rider": _scaled(0.0),
    "backdoor": _backdoor,
    "knowing": _knowing,
    "alie": _alie,
    "minmax": _minmax,
    "inner-product": _inner_product,
    "late-sybils": _late_sybils,
    "hidden-backdoor": _hidden_backdoor,
}
