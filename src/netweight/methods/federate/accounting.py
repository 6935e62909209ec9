"""The privacy account: what all noisy answers give away together, counted for the example or client they protect.

A client's answer is described by `AnswerPrivacy`, and `guarantee` composes the answers of one client; `task_privacy.py`
composes those of a whole federation. ε comes from opacus's accountant (Rényi differential privacy); nothing here
computes a divergence. What the account guarantees, and what lies outside of what a client can enforce, is in
docs/privacy-account.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, final

from netweight.core.lazy import library
from netweight.errors import UsageError

Unit = Literal["example", "client"]
# Noise multiplier, sampling rate and number of steps, as opacus's accountants take them.
History = tuple[tuple[float, float, int], ...]


@final
@dataclass(frozen=True)
class Release:
    """One noisy part of an answer."""

    unit: Unit
    """Unit that the noise protects: a single example, or everything that a client's update reveals."""
    noise: float
    """Standard deviation of the noise as a multiple of the clip; above 0."""
    rate: float
    """Probability with which an example takes part in a step, in (0, 1]; 1 for a client's whole update."""
    steps: int
    """Noisy steps of one answer."""


@final
@dataclass(frozen=True)
class AnswerPrivacy:
    """Noise in one answer of a client."""

    releases: tuple[Release, ...] = ()
    """The noisy parts; empty if the answer has no noise."""
    sampling: str = ""
    """Sampling of the examples of a step, in words."""
    caveats: tuple[str, ...] = ()
    """Reasons why no ε holds for such an answer, although there is noise."""

    @property
    def holds(self) -> bool:
        """True if some ε holds for such an answer."""
        return bool(self.releases) and not self.caveats


@final
@dataclass(frozen=True)
class Guarantee:
    """The ε of a number of answers, with the unit and the adjacency that it is stated for."""

    unit: Unit
    """Unit of protection: an example, or a client's whole update."""
    epsilon: float
    """ε; infinite where none holds. For an example under `adjacency` "add or remove", for a client "replace"."""
    delta: float
    """δ of the privacy budget."""
    noise: float
    """The least noise of any answer, as a multiple of the clip; 0 if an answer had none."""
    sampling: str
    """Sampling of the examples of a step, in words."""
    answers: int
    """The number of answers that were counted, repeated attempts included."""
    caveats: tuple[str, ...] = ()
    """Reasons why no ε holds; empty if `epsilon` is finite."""
    removed: float | None = None
    """For a client: the smaller ε that holds if its update is omitted, not replaced by another client's. None for
    examples.
    """
    holders: int = 1
    """The number of clients over which the example that spent most was counted."""

    @property
    def adjacency(self) -> str:
        """The two data sets that ε compares, in words."""
        return "added or removed" if self.unit == "example" else "all its data replaced"

    def to_json(self) -> dict[str, Any]:
        """Return plain values; an infinite ε is None, with the reasons in `caveats`."""
        finite = self.epsilon if math.isfinite(self.epsilon) else None
        return {
            "unit": self.unit, "adjacency": self.adjacency, "epsilon": finite, "delta": self.delta, "noise": self.noise,
            "sampling": self.sampling, "answers": self.answers, "caveats": list(self.caveats),
            "epsilon_if_left_out": self.removed, "holders": self.holders,
        }  # fmt: skip

    def __str__(self) -> str:
        """Return one line: ε, δ, unit, adjacency, answers, noise."""
        count = f"{self.answers} answer{'s' * (self.answers != 1)}"
        about = f"over {count}; σ {self.noise:g}{f', {self.sampling}' if self.sampling else ''}"
        if not math.isfinite(self.epsilon):
            return f"No ε holds (it is infinite) {about}: {'; '.join(self.caveats)}."
        text = f"ε {self.epsilon:.4g} at δ {self.delta:g} for one {self.unit} ({self.adjacency}"
        if self.removed is not None:
            text += f"; {self.removed:.4g} if its change is only left out"
        if self.holders > 1:
            text += f"; counted over the {self.holders} clients that have it"
        return f"{text}), {about}"


def privacy_of(method: Any, n: int) -> AnswerPrivacy:
    """Return what is known of the noise in one answer of a client with `n` examples.

    Args:
        method: A federated method; one without a method `privacy(n)` adds no noise.
        n: The client's number of examples.
    """
    own = getattr(method, "privacy", None)
    privacy: AnswerPrivacy = AnswerPrivacy() if own is None else own(n)
    return privacy


def guarantee(answers: Sequence[AnswerPrivacy], delta: float) -> Guarantee:
    """Return what all `answers` of one client give away together.

    An answer without noise makes ε infinite, and so do answers that protect different units, since what protects an
    example says nothing of a client, and answers with caveats.

    Args:
        answers: Every answer that left the client, attempts that the server repeated included; at least one.
        delta: δ, in (0, 1).

    Raises:
        UsageError: There is no answer, or δ is out of range.
    """
    if not answers:
        raise UsageError("There is no answer whose privacy could be counted.", cure="Count at least one.")
    releases = [release for answer in answers for release in answer.releases]
    units = sorted({release.unit for release in releases})
    sampling = ", ".join(sorted({answer.sampling for answer in answers if answer.sampling}))
    unit: Unit = "client" if units == ["client"] else "example"
    least = min((r.noise for r in releases), default=0.0) if all(answer.releases for answer in answers) else 0.0
    caveats = _caveats(answers, units)
    if caveats:
        return Guarantee(unit, math.inf, delta, least, sampling, len(answers), caveats)
    spent, removed = _both_epsilons(unit, [(r.noise, r.rate, r.steps) for r in releases], delta)
    return Guarantee(unit, spent, delta, least, sampling, len(answers), removed=removed)


def _caveats(answers: Iterable[AnswerPrivacy], units: Sequence[str]) -> tuple[str, ...]:
    """Return why no ε holds for answers together, each reason once."""
    reasons: dict[str, None] = {}
    for answer in answers:
        if not answer.releases:
            reasons["an answer left without noise"] = None
        reasons.update(dict.fromkeys(answer.caveats))
    if len(units) > 1:
        reasons["some answers protect single examples and others a whole client, which do not add up"] = None
    return tuple(reasons)


def _both_epsilons(unit: Unit, parts: Sequence[tuple[float, float, int]], delta: float) -> tuple[float, float | None]:
    """Return ε for the unit's adjacency, and for clients that under which a change is only left out."""
    plain = epsilon_of(parts, delta)
    if unit == "example":
        return plain, None
    # A clipped update that is replaced by another one moves by up to twice the clip.
    return epsilon_of([(noise / 2, rate, steps) for noise, rate, steps in parts], delta), plain


def epsilon_of(parts: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Return ε of noisy steps together, one unit added or removed.

    Args:
        parts: Noise multiplier, sampling rate and number of steps of each stretch.
        delta: δ, in (0, 1).

    Source: Mironov et al. (arXiv 1908.10530), as opacus's `RDPAccountant` computes it.
    """
    if not 0 < delta < 1:
        raise UsageError(f"A δ of {delta} is out of range.", cure="Give a δ between 0 and 1.")
    counted: dict[tuple[float, float], int] = {}
    for noise, rate, steps in parts:
        if noise <= 0:
            return math.inf
        counted[noise, rate] = counted.get((noise, rate), 0) + steps
    return _epsilon(tuple((*each, steps) for each, steps in sorted(counted.items())), delta)


@cache
def _epsilon(history: History, delta: float) -> float:
    if not history:
        return 0.0
    with _accountants() as accountants:
        spent = sum(_divergences_of_a_step(noise, rate) * steps for noise, rate, steps in history)
        orders = accountants.RDPAccountant.DEFAULT_ALPHAS
        epsilon, _ = accountants.analysis.rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)
        return float(epsilon)


@cache
def _divergences_of_a_step(noise: float, rate: float) -> Any:
    """Return the Rényi divergence of one noisy step at each of the accountant's orders, a numpy array."""
    # Takes a third of a second; steps add up, so that every further round with the same noise is free.
    with _accountants() as accountants:
        orders = accountants.RDPAccountant.DEFAULT_ALPHAS
        return accountants.analysis.rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


# ---- one client's DP-SGD ---------------------------------------------------------------------------------------------


@cache
def noise_multiplier(epsilon: float, delta: float, *, n: int, batch_size: int, epochs: int) -> float:
    """Return the least noise multiplier that keeps a client's examples (ε, δ)-differentially private.

    Args:
        epsilon: ε for one example added or removed.
        delta: δ, below `1 / n`.
        n: The client's number of examples.
        batch_size: Expected number of examples in a step.
        epochs: Passes over the examples, all rounds together.

    Raises:
        UsageError: The budget is out of range, or no noise keeps it.
    """
    rate, steps = schedule_of(n, batch_size, epochs)
    _check_budget(epsilon, delta, n)
    try:
        with _accountants() as accountants:
            noise: float = accountants.utils.get_noise_multiplier(
                target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps, accountant="rdp"
            )
    except ValueError as error:
        raise UsageError(
            f"No noise keeps {steps} steps at rate {rate:.4g} within epsilon {epsilon}, delta {delta}: {error}",
            cure="Allow a larger epsilon or delta, or train for fewer epochs (in a command: --epsilon, --delta, "
            "--epochs, --rounds).",
        ) from error
    return noise


def noise_multiplier_for_all(
    epsilon: float, delta: float, *, sizes: Iterable[int], batch_size: int, epochs: int
) -> float:
    """Return the least noise multiplier that keeps every client's examples private, each held by one client alone.

    Args:
        epsilon: ε for one example added or removed.
        delta: δ, below 1 over the largest of `sizes`.
        sizes: Each client's number of examples.
        batch_size: Expected number of examples in a step.
        epochs: Passes over a client's examples, all rounds together.

    Raises:
        UsageError: There is no client, the budget is out of range, or no noise keeps it.
    """
    distinct = sorted(set(sizes))
    if not distinct:
        raise UsageError("There is no client to protect.", cure="Give each client's number of examples.")
    noise = noise_multiplier(epsilon, delta, n=distinct[0], batch_size=batch_size, epochs=epochs)
    # A smaller client may need less noise, since an epoch has whole steps. So all sizes are tried.
    for n in distinct[1:]:
        if epsilon_spent(noise, delta, n=n, batch_size=batch_size, epochs=epochs) > epsilon:
            noise = max(noise, noise_multiplier(epsilon, delta, n=n, batch_size=batch_size, epochs=epochs))
    return noise


def epsilon_spent(noise: float, delta: float, *, n: int, batch_size: int, epochs: int) -> float:
    """Return the ε, for one example added or removed, that private training of one client has spent."""
    rate, steps = schedule_of(n, batch_size, epochs)
    if noise <= 0:
        raise UsageError(f"A noise multiplier of {noise} gives no privacy.", cure="Give a number above 0.")
    _check_budget(1.0, delta, n)
    return epsilon_of([(noise, rate, steps)], delta)


def schedule_of(n: int, batch_size: int, epochs: int) -> tuple[float, int]:
    """Return the probability with which an example takes part in a step, and the number of steps.

    Args:
        n: The client's number of examples.
        batch_size: Expected number of examples in a step.
        epochs: Passes over the examples.
    """
    if min(n, batch_size, epochs) < 1:
        raise UsageError(
            f"n={n}, batch_size={batch_size} and epochs={epochs} do not describe a training.",
            cure="Each must be at least 1.",
        )
    return min(1.0, batch_size / n), epochs * -(-n // batch_size)


def check_delta(delta: float, n: int) -> None:
    """Refuse a δ that guarantees nothing for the examples of a client.

    Args:
        delta: δ, in (0, 1).
        n: Number of the client's examples.

    Raises:
        UsageError: δ is not below 1 / n: publishing one example at random would keep it.
    """
    if delta >= 1 / n:
        raise UsageError(
            f"With {n} examples, a delta of {delta} would allow one of them to be published outright.",
            cure=f"Give a delta well below {1 / n:.2g} (in a command: --delta).",
        )


def _check_budget(epsilon: float, delta: float, n: int) -> None:
    if epsilon <= 0 or not 0 < delta < 1:
        raise UsageError(
            f"epsilon={epsilon} with delta={delta} is not a privacy budget.", cure="Use epsilon > 0, 0 < delta < 1."
        )
    check_delta(delta, n)


@contextmanager
def _accountants() -> Iterator[Any]:
    """Lend opacus's accountants, without the warning that a wider range of orders might give a smaller ε: it holds."""
    accountants = library("opacus.accountants", "Accounting for privacy", "dp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha")
        yield accountants
