"""Opacus's accountants: the only door to them. An ε becomes a noise multiplier for private methods, and back.

Steps are counted as this library's local training takes them: an epoch has ⌈n / batch size⌉ steps, in each of which
every example takes part with probability batch size / n. An ε holds for the examples of a client that trains by
DP-SGD with Poisson sampling; `methods.federate.private_methods.epsilon_caveats` says where it does not.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from netweight.errors import MissingExtra, UsageError

__all__ = ["Accountant", "epsilon_spent", "noise_multiplier", "noise_multiplier_for_all"]

Accountant = Literal["rdp", "prv"]
"""Rényi differential privacy, as the HyperFL paper's code counts; or privacy random variables, tighter and slower."""


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
    """Return the least noise multiplier that keeps a client's examples (ε, δ)-differentially private.

    Args:
        epsilon: The budget, above 0; it is met to 0.01 from below.
        delta: Probability of failure, between 0 and 1; less than 1 / n.
        n: The client's number of training examples.
        batch_size: Expected examples per step.
        epochs: Epochs of private training over all rounds; or give `steps`.
        steps: Steps of private training over all rounds.
        accountant: How the loss of privacy is added up.

    Raises:
        MissingExtra: Opacus is not installed.
        UsageError: A value is out of its range, or no noise is enough.

    Source: Mironov et al. (arXiv 1908.10530) for "rdp", Gopi et al. (arXiv 2106.02848) for "prv".
    """
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
    """Return the least noise multiplier that keeps every client's examples (ε, δ)-differentially private.

    A method has one noise multiplier for all clients; those with few examples take part in more steps per example and
    need the most noise.

    Args:
        epsilon: The budget.
        delta: Probability of failure.
        sizes: Each client's number of training examples.
        batch_size: Expected examples per step.
        epochs: Epochs of private training over all rounds.
        accountant: How the loss of privacy is added up.

    Raises:
        MissingExtra: Opacus is not installed.
        UsageError: A value is out of its range, no noise is enough, or there is no client.
    """
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
    """Return the ε that private training has spent.

    Args:
        noise: The noise multiplier, above 0.
        delta: Probability of failure.
        n: The client's number of training examples.
        batch_size: Expected examples per step.
        epochs: Epochs of private training so far; or give `steps`.
        steps: Steps of private training so far.
        accountant: How the loss of privacy is added up.

    Raises:
        MissingExtra: Opacus is not installed.
        UsageError: A value is out of its range.
    """
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
