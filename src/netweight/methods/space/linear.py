"""Ridge and logistic regression on scores with an intercept, the penalty chosen by leaving out one model at a time.

Both are solved in the axes that the models span, so that more components than models cost nothing; both penalties are
blind to such a rotation. Everything is fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.errors import UsageError

__all__ = ["PENALTIES", "Design", "ReadOut", "logistic", "ridge"]

PENALTIES = tuple(10.0**power for power in range(3, -5, -1))
"""Strengths that are tried, the strongest first, as multiples of the mean energy of an axis of the scores."""

_NEWTON_STEPS = 60
_TOLERANCE = 1e-9


@final
@dataclass(frozen=True, eq=False)
class Design:
    """Scores, centered, in axes of the space that they span.

    Attributes:
        center: Shape `(k,)`: the mean of the scores.
        axes: Orthonormal columns, shape `(k, r)`, r the smaller of n and k.
        rows: Shape `(n, r)`: the centered scores in these axes.
    """

    center: Tensor
    axes: Tensor
    rows: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> Design:
        """Make it of scores, shape `(n, k)`, n at least 2.

        Args:
            scores: Any floating dtype.
        """
        scores = scores.detach().double().cpu()
        center = scores.mean(0)
        centered = scores - center
        count, components = scores.shape
        if components <= count:
            return cls(center, torch.eye(components, dtype=torch.float64), centered)
        axes, triangle = torch.linalg.qr(centered.T)
        return cls(center, axes, triangle.T.contiguous())

    def penalty(self, share: float) -> float:
        """Return the penalty that is a multiple of the mean energy of an axis.

        Args:
            share: At least 0.
        """
        energy = float(self.rows.square().sum()) / self.rows.shape[1]
        return share * (energy or 1.0)

    def read_out(self, weights: Tensor, intercept: float, penalty: float, loss: float) -> ReadOut:
        """Return weights of these axes as weights of components.

        Args:
            weights: Of the axes, shape `(r,)`.
            intercept: Of the read-out.
            penalty: What was chosen.
            loss: What it came to on left-out models.
        """
        full = self.axes @ weights
        return ReadOut(full, intercept - float(self.center @ full), penalty, loss)


@final
@dataclass(frozen=True, eq=False)
class ReadOut:
    """A linear read-out of scores.

    Attributes:
        weights: Shape `(k,)`, fp64.
        intercept: What is said of scores of 0.
        penalty: The penalty on the sum of squared weights, times ½ in a logistic regression.
        loss: Mean loss (squared error, or log-loss) of models left out one at a time; approximately so for a
            logistic regression.
    """

    weights: Tensor
    intercept: float
    penalty: float
    loss: float

    def __call__(self, scores: Tensor) -> Tensor:
        """Return what is said of scores `(n, k)`: the label, or the log-odds of the positive class, shape `(n,)`."""
        return scores.double() @ self.weights + self.intercept


def ridge(design: Design, labels: Tensor, weights: Tensor, *, penalty: float | None = None) -> ReadOut:
    """Regress labels on scores: Σ wᵢ (yᵢ − b₀ − b·sᵢ)² + penalty · |b|².

    Args:
        design: The scores of n models.
        labels: Shape `(n,)`, fp64.
        weights: Of each model, shape `(n,)`, at least 0; 0 leaves it out.
        penalty: None chooses among `PENALTIES` by leaving out one model at a time, which needs no refitting.

    Source: leave-one-out residuals are (y − ŷ) / (1 − leverage), exactly (Allen's PRESS).
    """
    total = weights.sum()
    center, mean = weights @ design.rows / total, float(weights @ labels / total)
    rows, wanted = design.rows - center, labels - mean
    energies, axes = torch.linalg.eigh((rows * weights[:, None]).T @ rows)
    turned = rows @ axes
    answers = turned.T @ (weights * wanted)
    floor = float(energies[-1]) * 1e-13 + 1e-300

    def solved(strength: float) -> tuple[Tensor, float]:
        shrunk = 1 / (energies.clamp_min(0) + max(strength, floor))
        coefficients = shrunk * answers
        leverage = weights * (1 / total + turned.square() @ shrunk)
        left_out = (wanted - turned @ coefficients) / (1 - leverage).clamp_min(1e-9)
        return coefficients, float((weights * left_out.square()).sum() / total)

    tried = [penalty] if penalty is not None else [design.penalty(share) for share in PENALTIES]
    found = [(strength, *solved(strength)) for strength in tried]
    strength, coefficients, loss = min(found, key=lambda each: each[2])
    own = axes @ coefficients
    return design.read_out(own, mean - float(center @ own), strength, loss)


def logistic(design: Design, positive: Tensor, weights: Tensor, *, penalty: float | None = None) -> ReadOut:
    """Fit a logistic regression: Σ wᵢ log(1 + exp(−tᵢ (b₀ + b·sᵢ))) + penalty / 2 · |b|², t = ±1.

    Args:
        design: The scores of n models.
        positive: Which are of the positive class, shape `(n,)`, bool; of both classes there must be some.
        weights: Of each model, shape `(n,)`, at least 0; 0 leaves it out.
        penalty: None chooses among `PENALTIES` by leaving out one model at a time, each by a single Newton step.

    Source: the approximate leave-one-out of Rad and Maleki 2018, arXiv 1801.10243, theorem 1.
    """
    rows = torch.cat([design.rows, torch.ones(len(design.rows), 1, dtype=torch.float64)], 1)
    state = torch.zeros(rows.shape[1], dtype=torch.float64)
    tried = [penalty] if penalty is not None else [design.penalty(share) for share in PENALTIES]
    best: tuple[float, float, Tensor] | None = None
    for strength in tried:  # the strongest first, each starting where the one before ended
        state, loss = _newton(rows, positive, weights, strength, state)
        if best is None or loss < best[0]:
            best = (loss, strength, state)
        elif loss > 1.2 * best[0]:
            break  # weaker penalties overfit more still
    assert best is not None
    loss, strength, state = best
    return design.read_out(state[:-1], float(state[-1]), strength, loss)


def _newton(rows: Tensor, positive: Tensor, weights: Tensor, penalty: float, state: Tensor) -> tuple[Tensor, float]:
    """The minimum, and the mean log-loss of each model under the fit to all others."""
    truth = positive.double()
    held = torch.full_like(state, penalty)
    held[-1] = 0.0  # the intercept is free
    ridge_part = torch.diag(held.clamp_min(penalty * 1e-12 + 1e-12))

    def value(at: Tensor) -> float:
        said = rows @ at
        return float((weights * (F.softplus(said) - truth * said)).sum() + 0.5 * (held * at.square()).sum())

    now = value(state)
    for _ in range(_NEWTON_STEPS):
        chance = torch.sigmoid(rows @ state)
        gradient = rows.T @ (weights * (chance - truth)) + held * state
        curvature = (rows * (weights * chance * (1 - chance))[:, None]).T @ rows + ridge_part
        step = torch.cholesky_solve(gradient[:, None], torch.linalg.cholesky(curvature))[:, 0]
        decrease = float(gradient @ step)
        if decrease <= _TOLERANCE * (1 + abs(now)):
            break
        length = 1.0
        while (then := value(state - length * step)) > now - 1e-4 * length * decrease and length > 1e-8:
            length /= 2
        state, now = state - length * step, then
    else:
        raise UsageError("The logistic regression does not settle.", cure="Check the labels, or use kind='encoder'.")
    return state, _left_out(rows, truth, weights, ridge_part, state)


def _left_out(rows: Tensor, truth: Tensor, weights: Tensor, ridge_part: Tensor, state: Tensor) -> float:
    said = rows @ state
    chance = torch.sigmoid(said)
    bend = weights * chance * (1 - chance)
    root = torch.linalg.cholesky((rows * bend[:, None]).T @ rows + ridge_part)
    spread = torch.linalg.solve_triangular(root, rows.T, upper=False).square().sum(0)
    without = said + weights * (chance - truth) * spread / (1 - bend * spread).clamp_min(1e-9)
    return float((weights * (F.softplus(without) - truth * without)).sum() / weights.sum())
