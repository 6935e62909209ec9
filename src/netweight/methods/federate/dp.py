"""Differentially private local SGD, one client after another. `DirectMethod` calls it for phases with privacy.

Every step clips each example's gradient, adds Gaussian noise to their sum and divides by the expected batch size.
The noise comes from the federation's seed, so that a run can be repeated; who knows the seed can take the noise off
again. Where that matters, each client must draw a seed of its own and keep it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.errors import MissingExtra, UsageError
from netweight.methods.federate.local import Descent, Stream, padded
from netweight.methods.federate.method import LocalModel, Weights
from netweight.methods.federate.per_example import clipped_sum, one_by_one
from netweight.methods.federate.settings import LocalTraining, Phase, Privacy


def train_privately(
    model: LocalModel,
    weights: Sequence[Weights],
    numbers: Sequence[int],
    phase: Phase,
    training: LocalTraining,
    *,
    seeds_by_client: Sequence[int],
) -> tuple[list[Weights], list[float]]:
    """Train clients by one phase with `phase.privacy` set."""
    # Source: Abadi et al. (arXiv 1607.00133), algorithm 1.
    trained = [
        _train_one(model, w, number, phase, training, seed)
        for w, number, seed in zip(weights, numbers, seeds_by_client, strict=True)
    ]
    return [w for w, _ in trained], [loss for _, loss in trained]


def _train_one(
    model: LocalModel, weights: Weights, number: int, phase: Phase, training: LocalTraining, seed: int
) -> tuple[Weights, float]:
    assert phase.privacy is not None
    stream = Stream(model, number, phase.epochs, training.batch_size, seed, phase.privacy.sampling)
    expected = min(training.batch_size, model.task.client(number).n)
    model.train("both" if phase.head_lr is not None else phase.trains)
    client = _Client(model, weights, phase, phase.privacy, training, expected)
    losses = []
    for step, index in enumerate(stream.indices):
        noise = seeds.torch_generator(seed, "noise", step, device=str(model.device))
        if not len(index):
            client.step_without_examples(noise)
            continue
        index, mask = padded(index)
        losses.append(client.step(*stream.batch(index), mask.to(model.device), noise))
    loss = float(torch.stack(losses).mean()) if losses else 0.0
    return Weights(client.body.vectors[0], client.head.vectors[0], weights.statistics), loss


@final
class _Client:
    """One client while it trains: its two halves, each with its optimizer."""

    def __init__(
        self,
        model: LocalModel,
        weights: Weights,
        phase: Phase,
        privacy: Privacy,
        training: LocalTraining,
        expected: int,
    ) -> None:
        self._model, self._phase, self._privacy, self._expected = model, phase, privacy, expected
        self._statistics = weights.statistics
        self.body = Descent(weights.body.clone().to(model.device)[None], phase.lr, training)
        self.head = Descent(weights.head.clone().to(model.device)[None], phase.head_lr or phase.lr, training)

    def step(self, inputs: Tensor, targets: Tensor, mask: Tensor, noise: torch.Generator) -> Tensor:
        """Take one step with the examples of the mask; return their mean loss."""
        if self._phase.head_lr is not None:
            self._plain_head_step(inputs[mask], targets[mask])
        found = clipped_sum(
            self._model,
            self.body.vectors[0],
            self.head.vectors[0],
            (inputs, targets),
            mask,
            self._phase.trains,
            self._privacy.clip,
            self._statistics,
        )
        self._descend(found.body, found.head, noise)
        return found.loss

    def step_without_examples(self, noise: torch.Generator) -> None:
        """Take one step with noise alone, as every step must look the same from outside."""
        trains = self._phase.trains
        body = torch.zeros_like(self.body.vectors[0]) if trains != "head" else None
        head = torch.zeros_like(self.head.vectors[0]) if trains != "body" else None
        self._descend(body, head, noise)

    def _plain_head_step(self, inputs: Tensor, targets: Tensor) -> None:
        found = one_by_one(
            self._model, self.body.vectors, self.head.vectors, [(inputs, targets)], "head", [self._statistics]
        )
        assert found.head is not None
        self.head.step(found.head, [0])

    def _descend(self, body: Tensor | None, head: Tensor | None, noise: torch.Generator) -> None:
        """Step what is trained, given sums of clipped gradients."""
        for descent, total in ((self.body, body), (self.head, head)):
            if total is not None:
                descent.step((self._noisy(total, noise) / self._expected)[None], [0])

    def _noisy(self, total: Tensor, generator: torch.Generator) -> Tensor:
        deviation = self._privacy.noise_multiplier * self._privacy.clip
        drawn = torch.randn(total.shape, generator=generator, device=total.device, dtype=total.dtype)
        return total.add(drawn, alpha=deviation)


# Rényi differential privacy, as the HyperFL paper's code counts; or privacy random variables, tighter and slower.
Accountant = Literal["rdp", "prv"]


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    n: int,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: Accountant = "rdp",
) -> float:
    """Return the least noise multiplier that keeps a client's examples (ε, δ)-differentially private."""
    # Source: Mironov et al. (arXiv 1908.10530) for "rdp", Gopi et al. (arXiv 2106.02848) for "prv".
    rate, taken = _schedule(n, batch_size, epochs, steps)
    _check_budget(epsilon, delta, n)
    try:
        with _accountants() as accountants:
            found: float = accountants.utils.get_noise_multiplier(
                target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=taken, accountant=accountant
            )
    except ValueError as error:
        raise UsageError(
            f"No noise keeps {taken} steps at rate {rate:.4g} within epsilon {epsilon}, delta {delta}: {error}",
            cure="Allow a larger epsilon, or train for fewer epochs.",
        ) from error
    return found


def noise_multiplier_for_all(
    epsilon: float, delta: float, *, sizes: Iterable[int], batch_size: int, epochs: int, accountant: Accountant = "rdp"
) -> float:
    """Return the least noise multiplier that keeps every client's examples (ε, δ)-differentially private."""
    distinct = sorted(set(sizes))
    if not distinct:
        raise UsageError("There is no client to protect.", cure="Give each client's number of examples.")

    def needed(n: int) -> float:
        return noise_multiplier(epsilon, delta, n=n, batch_size=batch_size, epochs=epochs, accountant=accountant)

    found = needed(distinct[0])
    for n in distinct[1:]:  # a smaller client may need less, as an epoch has whole steps; so all are looked at
        spent = epsilon_spent(found, delta, n=n, batch_size=batch_size, epochs=epochs, accountant=accountant)
        if spent > epsilon:
            found = max(found, needed(n))
    return found


def epsilon_spent(
    noise: float,
    delta: float,
    *,
    n: int,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: Accountant = "rdp",
) -> float:
    """Return the ε that private training has spent."""
    rate, taken = _schedule(n, batch_size, epochs, steps)
    if noise <= 0:
        raise UsageError(f"With a noise multiplier of {noise} nothing is private.", cure="Give a number above 0.")
    _check_budget(1.0, delta, n)
    with _accountants() as accountants:
        counting = accountants.create_accountant(mechanism=accountant)
        counting.history = [(noise, rate, taken)]
        return float(counting.get_epsilon(delta=delta))


def _schedule(n: int, batch_size: int, epochs: int | None, steps: int | None) -> tuple[float, int]:
    """Return the probability with which an example takes part in a step, and the number of steps."""
    if (epochs is None) == (steps is None):
        raise UsageError("Give either epochs or steps.")
    taken = steps if steps is not None else (epochs or 0) * -(-n // max(batch_size, 1))
    if min(n, batch_size, taken) < 1:
        raise UsageError(
            f"{n} examples, batches of {batch_size}, {epochs if steps is None else steps} "
            f"{'epochs' if steps is None else 'steps'} cannot be.",
            cure="All of them are at least 1.",
        )
    return min(1.0, batch_size / n), taken


def _check_budget(epsilon: float, delta: float, n: int) -> None:
    if epsilon <= 0 or not 0 < delta < 1:
        raise UsageError(f"Epsilon {epsilon} with delta {delta} cannot be.", cure="Epsilon > 0, 0 < delta < 1.")
    if delta >= 1 / n:
        raise UsageError(
            f"With {n} examples, a delta of {delta} would allow one of them to be published outright.",
            cure=f"Give a delta well below {1 / n:.2g}.",
        )


@contextmanager
def _accountants() -> Iterator[Any]:
    """Lend opacus's accountants, without the warning that a wider range of orders might give a smaller ε: it holds."""
    try:
        accountants = importlib.import_module("opacus.accountants")
    except ModuleNotFoundError as error:
        raise MissingExtra("Accounting for privacy needs opacus.", cure="pip install 'netweight[dp]'.") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha")
        yield accountants
