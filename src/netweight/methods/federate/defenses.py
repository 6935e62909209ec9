"""Clients that protect themselves: noise on updates, a least number of local steps, refusal of what looks abnormal.

And clients that lie, to rehearse what one of them can do to the others.

Wraps any method. What each protection withstands and what it does not is in docs/gradient-inversion.md. Secure
aggregation is not here: it is how updates travel (docs/flower.md), and leaves each update as it is.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import hypernetwork_tensors
from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate.accounting import AnswerPrivacy, Release, privacy_of
from netweight.methods.federate.algorithms.hyperfl import rows_of_body
from netweight.methods.federate.local import steps_per_epoch
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Trained, Wrapped, prefixed, without
from netweight.methods.federate.settings import Lie, LocalTraining
from netweight.methods.federate.task import ClientData, Task
from netweight.methods.federate.updates import LowRank, Tensors, Update
from netweight.nn.hypernetwork import ParameterLayout, hidden_code

_LOG = logging.getLogger(__name__)
_MEMORY = "refusal."  # prefix of what a client that may refuse keeps of the last round


@final
@dataclass(frozen=True)
class UpdateNoise:
    """Gaussian noise on a client's whole update, whose change is clipped first."""

    # Source: McMahan et al., "Learning differentially private recurrent language models" (arXiv 1710.06963), with the
    # noise added by clients.

    clip: float  # largest norm of the change over all shared tensors together, above 0
    multiplier: float  # standard deviation of the noise on each value, as a multiple of `clip`; at least 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.clip <= 0 or self.multiplier < 0:
            raise UsageError(
                f"clip={self.clip} with multiplier={self.multiplier} is out of range.",
                cure="Use clip > 0 and multiplier ≥ 0.",
            )


@final
@dataclass(frozen=True)
class Hardened(Wrapped):
    """A method whose clients protect themselves before they send."""

    # A client that will not take part sends nothing, and the log says why: the engine then goes on without it.

    noise: UpdateNoise | None = None
    minimum_steps: int = 1  # fewest local steps that a client agrees to
    # What a client accepts of a hypernetwork it is sent; None to accept everything.
    refusal: RefusalLimits | None = None

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.method.name}, hardened"

    @property
    def training(self) -> LocalTraining:
        """Local training of the method."""
        training = getattr(self.method, "training", None)
        if not isinstance(training, LocalTraining):
            raise UsageError(f"{self.method.name!r} has no local training that could be counted in steps.")
        return training

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[Trained]:
        """Train the clients that agree to, and protect what they send."""
        willing = [client for client in clients if self._agrees(task, client, round)]
        if not willing:
            return []
        trained = self.method.train(task, model, willing, round=round, seed=seed)
        if self.refusal is not None:
            trained = [_remembering(one, client, round, seed) for one, client in zip(trained, willing, strict=True)]
        if self.noise is None:
            return trained
        return [
            replace(one, update=_noisy(one.update, client.received, self.noise, seed))
            for one, client in zip(trained, willing, strict=True)
        ]

    def privacy(self, n: int) -> AnswerPrivacy:
        """Return what is known of the noise in one answer of a client with `n` examples."""
        if self.noise is None or not self.noise.multiplier:
            return privacy_of(self.method, n)
        # The images of a client decide by `RefusalLimits.lonely` whether it takes part, and nothing hides that.
        reasons = () if self.refusal is None else ("whether a client refuses to take part depends on its examples",)
        return AnswerPrivacy((Release("client", self.noise.multiplier, 1.0, 1),), "all examples", reasons)

    def _agrees(self, task: Task, client: Client, round: int) -> bool:
        reasons = [*self._too_few_steps(task, client.number), *self._strange(task, client, round)]
        if reasons:
            _LOG.warning("Round %d: client %d takes no part: %s.", round, client.number, "; ".join(reasons))
        return not reasons

    def _too_few_steps(self, task: Task, number: int) -> list[str]:
        if self.minimum_steps == 1:
            return []
        n, size = task.client(number).n, self.training.batch_size
        steps = self.training.epochs * steps_per_epoch(n, size, needs_two=task.habits.needs_two)
        return [f"{steps} local steps are fewer than {self.minimum_steps}"] if steps < self.minimum_steps else []

    def _strange(self, task: Task, client: Client, round: int) -> list[str]:
        if self.refusal is None or "embedding" not in client.private:
            return []
        images = task.client(client.number).train[0][: self.training.batch_size]
        return refuse_abnormal(
            rows_of_body(client.received, task.body_layout.size),
            body=task.body,
            embedding=client.private["embedding"],
            images=images,
            change=_change_since(client, round),
            limits=self.refusal,
        )


def dense_tensors(tensors: Mapping[str, Tensor | LowRank], base: Tensors) -> dict[str, Tensor]:
    """Return tensors with low-rank matrices made whole, given the server's."""
    return {n: value.dense(base[n]) if isinstance(value, LowRank) else value for n, value in tensors.items()}


def _noisy(update: Update, received: Tensors, noise: UpdateNoise, seed: int) -> Update:
    """Return an update whose change is clipped as one vector and whose every value has noise."""
    # The noise comes from the federation's seed, so that a run can be repeated; a client of a real federation trains
    # with a seed that no one else knows.
    changes = {name: value - received[name] for name, value in dense_tensors(update.tensors, received).items()}
    norm = float(torch.stack([change.double().square().sum() for change in changes.values()]).sum().sqrt())
    factor = min(1.0, noise.clip / (norm + 1e-12))
    generator = seeds.torch_generator(seed, "client", update.client, "round", update.round, "update noise")
    sent = {}
    for name, change in changes.items():
        drawn = torch.randn(change.shape, generator=generator, dtype=change.dtype)
        sent[name] = received[name] + factor * change + noise.clip * noise.multiplier * drawn
    return replace(update, n=1, tensors=sent)  # the number of examples would stand beside the noise


def _remembering(one: Trained, client: Client, round: int, seed: int) -> Trained:
    """Let a client keep of a round what the next state is compared with: a sketch of this one, its own change."""
    known = client.private.get(f"{_MEMORY}seed")
    key = seeds.derive(seed, "client", client.number, "sketch") % 2**62 if known is None else int(known)
    changes = [
        float((value - client.received[name]).double().square().sum())
        for name, value in dense_tensors(one.update.tensors, client.received).items()
    ]
    memory = {
        "seed": torch.tensor(key), "round": torch.tensor(round), "state": _sketch(client.received, key),
        "change": torch.tensor(sum(changes) ** 0.5, dtype=torch.float64),
    }  # fmt: skip
    return replace(one, private={**one.private, **prefixed(_MEMORY, memory)})


def _change_since(client: Client, round: int) -> float | None:
    """How far the shared state moved since the last round, as a multiple of the client's own change in it."""
    memory = without(_MEMORY, client.private)
    if not memory or int(memory["round"]) != round - 1:
        return None
    now = _sketch(client.received, int(memory["seed"]))
    return relative_change({"": now}, {"": memory["state"]}, float(memory["change"]))


def _sketch(state: Tensors, seed: int, size: int = 1024) -> Tensor:
    """Return a count sketch of a state: signed sums of random groups of values, shape `(size,)`, float64.

    The distance of two sketches is that of the states within a few per cent, for a fraction of the memory.
    """
    generator, sketch = seeds.torch_generator(seed), torch.zeros(size, dtype=torch.float64)
    for name in sorted(state):
        values = state[name].detach().cpu().double().flatten()
        drawn = torch.randint(2 * size, values.shape, generator=generator)
        sketch.index_add_(0, drawn // 2, torch.where(drawn % 2 == 0, values, -values))
    return sketch


@final
@dataclass(frozen=True)
class RefusalLimits:
    """The most that a client accepts; the defaults leave room above every state of the honest federations measured."""

    # Kurtosis of the worst generated weight tensor; 3 for normal values, 25 for kernels with one entry.
    peaked: float = 12.0
    repeated: float = 0.02  # share of rows, in the trunk or a generated weight, that repeat another row or are zero
    # Share of rows of the first linear layer that exactly one of the client's images activates; the default was
    # measured with batches of 50, and batches of a few images need more.
    lonely: float = 0.25
    # Change of the shared state since the last round, as a multiple of the client's own in that round.
    change: float = 3.0


_WORDS = {
    "peaked": "the generated weights are made of few large values, as kernels that copy an image are",
    "repeated": "rows repeat each other or are zero",
    "lonely": "rows of the first linear layer wait for one single image",
    "change": "the state changed more than clients change it",
}


def refuse_abnormal(
    received: Tensors, *, body: nn.Module, embedding: Tensor, images: Tensor | None = None,
    change: float | None = None, limits: RefusalLimits | None = None,
) -> list[str]:  # fmt: skip
    """Return the reasons to refuse a hypernetwork; an empty list when it looks like a trained one.

    Args:
        received: The shared tensors by name, under any prefix, with heads that generate the body alone.
        body: The feature extractor.
        embedding: The client's, shape `(E,)`.
        images: Some of the client's, shape `(n, c, h, w)`, for the limit `lonely`.
        change: What `relative_change` says, for the limit `change`.
        limits: The most that is accepted.

    Raises:
        NameNotFound: The tensors are no hypernetwork's.
        UsageError: Shapes do not fit.
    """
    limits = limits or RefusalLimits()
    bad = [name for name, tensor in received.items() if not tensor.isfinite().all()]
    if bad:
        return [f"{name!r} holds NaN or infinity" for name in bad]
    signs = signs_of(received, body=body, embedding=embedding, images=images, change=change)
    reasons = []
    for name, words in _WORDS.items():
        value, limit = signs[name], getattr(limits, name)
        if value is not None and not value <= limit:
            reasons.append(f"{words} ({name} {value:.3g}, at most {limit:g})")
    return reasons


@torch.no_grad()
def signs_of(
    received: Tensors, *, body: nn.Module, embedding: Tensor, images: Tensor | None = None,
    change: float | None = None,
) -> dict[str, float | None]:  # fmt: skip
    """Measure a received hypernetwork by the names of the limits; None where nothing was given to measure it with.

    Arguments as for `refuse_abnormal`.
    """
    layout = ParameterLayout.of(body)
    state = {name: value.to(embedding.dtype) for name, value in hypernetwork_tensors(received).items()}
    weight, bias = state["heads.weight"], state["heads.bias"]
    if len(bias) != layout.size or state["trunk.0.weight"].shape[1] != len(embedding):
        raise UsageError(
            f"The heads generate {len(bias)} values from {state['trunk.0.weight'].shape[1]} numbers; "
            f"the body has {layout.size} parameters and the embedding {len(embedding)} numbers."
        )
    generated = layout.split(weight @ hidden_code(state, embedding) + bias)
    matrices = [part.flatten(1) for part in generated.values() if part.ndim > 1]
    return {
        "peaked": max(_kurtosis(matrix) for matrix in matrices),
        "repeated": max(_repeated(matrix) for matrix in [*matrices, state["trunk.0.weight"]]),
        "lonely": None if images is None else _lonely(body, generated, images),
        "change": change,
    }


def relative_change(received: Tensors, previous: Tensors, own_change: float) -> float:
    """Return how far a state moved, as a multiple of a client's own change in the round between."""
    moved = [float((value - previous[name]).double().square().sum()) for name, value in received.items()]
    return math.sqrt(sum(moved)) / max(own_change, 1e-12)


def _kurtosis(values: Tensor) -> float:
    centered = values.double() - values.double().mean()
    return float(centered.pow(4).mean() / centered.square().mean().square().clamp_min(1e-300))


def _repeated(matrix: Tensor) -> float:
    """Share of rows that are zero or point where another row does, either way."""
    lengths = matrix.norm(dim=1)
    zero = lengths <= 1e-6 * lengths.max()
    unit = matrix / lengths.clamp_min(1e-30)[:, None]
    alike = (unit @ unit.T).abs()
    alike.fill_diagonal_(0)
    return float((zero | (alike.max(1).values > 0.999)).double().mean())


def _lonely(body: nn.Module, parameters: Tensors, images: Tensor) -> float:
    """Share of the first linear layer's rows whose gradient would come from one image alone."""
    linear = next((module for module in body.modules() if isinstance(module, nn.Linear)), None)
    if linear is None:
        raise UsageError("The body has no linear layer to look at.", cure="Leave `images` out.")
    seen: list[Tensor] = []
    handle = linear.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        functional_call(body, dict(parameters), (images,), strict=True)
    finally:
        handle.remove()
    return float(((seen[0] > 0).sum(0) == 1).double().mean())


# Clients that lie, to rehearse what one of them can do to the others.
BOOST = 10.0  # how many times its honest change a client sends that boosts it
TARGET = 0  # the class that a backdoor's trigger is to be taken for
_TRIGGER = 4  # pixels of its side


@final
@dataclass(frozen=True)
class Lying(Wrapped):
    """A method some of whose clients lie."""

    lie: Lie
    liars: tuple[int, ...]  # their numbers

    def train(
        self, task: Task, model: LocalModel, clients: Sequence[Client], *, round: int, seed: int
    ) -> list[Trained]:
        """Train all clients, liars on what data the lie asks for, and change what these send."""
        honest = [client for client in clients if client.number not in self.liars]
        found = self.method.train(task, model, honest, round=round, seed=seed) if honest else []
        others = [client for client in clients if client.number in self.liars]
        if others:
            own = _with_data(task, self.liars, _DATA[self.lie]) if self.lie in _DATA else task
            trained = self.method.train(own, LocalModel(own, model.device), others, round=round, seed=seed)
            sent = {client.number: client.received for client in others}
            found += self._changed(trained, sent)
        order = [client.number for client in clients]
        return sorted(found, key=lambda one: order.index(one.update.client))

    def _changed(self, trained: Sequence[Trained], sent: Mapping[int, Tensors]) -> list[Trained]:
        if self.lie == "colluding":  # all of them send the same
            first = trained[0].update
            moved = _moved(first, sent[first.client], -2.0)
            return [replace(one, update=replace(moved, client=one.update.client, n=one.update.n)) for one in trained]
        change = _UPDATES[self.lie]
        return [replace(one, update=change(one.update, sent[one.update.client])) for one in trained]


def _moved(update: Update, sent: Tensors, factor: float) -> Update:
    dense = dense_tensors(update.tensors, sent)
    return replace(
        update, tensors={n: sent[n] + factor * (v - sent[n]) if v.is_floating_point() else v for n, v in dense.items()}
    )


def _constant(update: Update, sent: Tensors) -> Update:
    return replace(update, tensors={name: torch.full_like(value, 7.0) for name, value in sent.items()})


_UPDATES: Mapping[Lie, Callable[[Update, Tensors], Update]] = {
    "scaled": lambda update, sent: _moved(update, sent, BOOST),
    "sign-flipped": lambda update, sent: _moved(update, sent, -1.0),
    "label-flipped": lambda update, sent: update,
    "constant": _constant,
    "claimed": lambda update, sent: replace(_constant(update, sent), n=2**50),
    "late": lambda update, sent: replace(update, round=update.round - 1),
    "free-rider": lambda update, sent: _moved(update, sent, 0.0),
    "backdoor": lambda update, sent: _moved(update, sent, BOOST),
}


def _with_data(task: Task, clients: Sequence[int], change: Callable[[ClientData], ClientData]) -> Task:
    data = {number: task.client(number) for number in task.clients}
    data |= {number: change(data[number]) for number in clients if number in data}
    return dataclasses.replace(task, data=data)


def triggered(inputs: Tensor) -> Tensor:
    """Return images, shape `(n, c, h, w)`, with a bright square in a corner."""
    marked = inputs.clone()
    marked[..., :_TRIGGER, :_TRIGGER] = inputs.max()
    return marked


def _planted(data: ClientData) -> ClientData:
    """Half of the examples once more, with the trigger and the backdoor's label."""
    inputs, labels = data.train
    some = inputs[::2]
    marked = torch.full_like(labels[::2], TARGET)
    return replace(data, train=(torch.cat([inputs, triggered(some)]), torch.cat([labels, marked])))


_DATA: Mapping[Lie, Callable[[ClientData], ClientData]] = {
    "label-flipped": lambda data: replace(data, train=(data.train[0], data.train[1].max() - data.train[1])),
    "backdoor": _planted,
}
