"""Clients that protect themselves: noise on updates, a least number of local steps, refusal of what looks abnormal.

Wraps any method. docs/gradient-inversion-results.md lists the attacks that each protection withstands. Secure
aggregation is not here: it is how updates travel (docs/secure-sums.md), and leaves each update as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.acceptance import AcceptanceLimits, reasons_to_decline, relative_change
from netweight.methods.federate.accounting import AnswerPrivacy, Release, privacy_of
from netweight.methods.federate.algorithms.hyperfl import rows_of_body
from netweight.methods.federate.local import steps_per_epoch
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, LocalResult, MethodWrapper, prefixed, without
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors, Update, dense_tensors

_LOG = logging.getLogger(__name__)
# The prefix of the tensors of the last round that a client with the option to decline keeps.
_MEMORY = "refusal."


@final
@dataclass(frozen=True)
class UpdateNoise:
    """Gaussian noise on a client's whole update, whose change is clipped first."""

    # Source: McMahan et al., "Learning differentially private recurrent language models" (arXiv 1710.06963), with the
    # noise added by clients.

    clip: float
    """Largest norm of the change over all shared tensors together, above 0."""
    multiplier: float
    """Standard deviation of the noise on each value, as a multiple of `clip`; at least 0."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.clip <= 0 or self.multiplier < 0:
            raise UsageError(
                f"clip={self.clip} with multiplier={self.multiplier} is out of range.",
                cure="Use clip > 0 and multiplier ≥ 0.",
            )


@final
@dataclass(frozen=True)
class HardenedMethod(MethodWrapper):
    """A method whose clients protect themselves before they send."""

    # A client that will not take part sends nothing, and the log says why: the engine then goes on without it.

    noise: UpdateNoise | None = None
    """Noise that clients add to their finished updates; None for none."""
    minimum_steps: int = 1
    """Fewest local steps that a client agrees to."""
    acceptance: AcceptanceLimits | None = None
    """Limits of a hypernetwork that a client accepts; None to accept everything."""

    @property
    def name(self) -> str:
        """Name in reports."""
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
    ) -> list[LocalResult]:
        """Train the clients that agree to, and protect what they send."""
        willing = [client for client in clients if self._agrees(task, client, round)]
        if not willing:
            return []
        trained = self.method.train(task, model, willing, round=round, seed=seed)
        if self.acceptance is not None:
            trained = [_remembering(one, client, round, seed) for one, client in zip(trained, willing, strict=True)]
        if self.noise is None:
            return trained
        return [
            replace(one, update=_noisy(one.update, client.message, self.noise, seed))
            for one, client in zip(trained, willing, strict=True)
        ]

    def privacy(self, n: int) -> AnswerPrivacy:
        """Return what is known of the noise in one answer of a client with `n` examples."""
        if self.noise is None or not self.noise.multiplier:
            return privacy_of(self.method, n)
        # The images of a client decide by `AcceptanceLimits.lonely` whether it takes part, and nothing hides that.
        reasons = () if self.acceptance is None else ("whether a client declines to take part depends on its examples",)
        return AnswerPrivacy((Release("client", self.noise.multiplier, 1.0, 1),), "all examples", reasons)

    def _agrees(self, task: Task, client: Client, round: int) -> bool:
        reasons = [*self._too_few_steps(task, client.number), *self._strange(task, client, round)]
        if reasons:
            _LOG.warning("Round %d: client %d does not take part: %s.", round, client.number, "; ".join(reasons))
        return not reasons

    def _too_few_steps(self, task: Task, number: int) -> list[str]:
        if self.minimum_steps == 1:
            return []
        n, size = task.client(number).n, self.training.batch_size
        steps = self.training.epochs * steps_per_epoch(n, size, needs_two=task.habits.needs_two)
        return [f"{steps} local steps are fewer than {self.minimum_steps}"] if steps < self.minimum_steps else []

    def _strange(self, task: Task, client: Client, round: int) -> list[str]:
        if self.acceptance is None or "embedding" not in client.private:
            return []
        images = task.client(client.number).train[0][: self.training.batch_size]
        return reasons_to_decline(
            rows_of_body(client.message, task.body_layout.size),
            body=task.body,
            embedding=client.private["embedding"],
            images=images,
            change=_change_since(client, round),
            limits=self.acceptance,
        )


def _noisy(update: Update, received: Tensors, noise: UpdateNoise, seed: int) -> Update:
    """Return an update whose change is clipped as one vector and whose every value has noise."""
    # The noise comes from the federation's seed, so that a run can be repeated; a client of a real federation trains
    # with a seed that no one else knows.
    tensors = dense_tensors(update.tensors, received)
    whole = {name: value for name, value in tensors.items() if not value.is_floating_point() and not value.is_complex()}
    if counted := next((name for name, value in whole.items() if not torch.equal(value, received[name])), None):
        raise Unsupported(
            f"The update contains the whole numbers {counted!r}, which training changed, and noise cannot be added to "
            "them.",
            cure="Let clients keep such buffers (--statistics client), or leave out --noise.",
        )
    changes = {name: value - received[name] for name, value in tensors.items() if name not in whole}
    norm = float(torch.stack([change.double().square().sum() for change in changes.values()]).sum().sqrt())
    factor = min(1.0, noise.clip / (norm + 1e-12))
    generator = seeds.torch_generator(seed, "client", update.client, "round", update.round, "update noise")
    sent: dict[str, Tensor] = dict(whole)
    for name, change in changes.items():
        drawn = torch.randn(change.shape, generator=generator, dtype=change.dtype)
        sent[name] = received[name] + factor * change + noise.clip * noise.multiplier * drawn
    # The number of examples would be sent without noise.
    return replace(update, n=1, tensors=sent)


def _remembering(one: LocalResult, client: Client, round: int, seed: int) -> LocalResult:
    """Let a client keep of a round what the next state is compared with: a sketch of this one, its own change."""
    stored = client.private.get(f"{_MEMORY}seed")
    key = seeds.derive(seed, "client", client.number, "sketch") % 2**62 if stored is None else int(stored)
    changes = [
        float((value - client.message[name]).double().square().sum())
        for name, value in dense_tensors(one.update.tensors, client.message).items()
    ]
    memory = {
        "seed": torch.tensor(key), "round": torch.tensor(round), "state": _sketch(client.message, key),
        "change": torch.tensor(sum(changes) ** 0.5, dtype=torch.float64),
    }  # fmt: skip
    return replace(one, private={**one.private, **prefixed(_MEMORY, memory)})


def _change_since(client: Client, round: int) -> float | None:
    """Return how far the shared state moved since the last round, as a multiple of the client's own change in it."""
    memory = without(_MEMORY, client.private)
    if not memory or int(memory["round"]) != round - 1:
        return None
    now = _sketch(client.message, int(memory["seed"]))
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
