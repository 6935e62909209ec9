"""How well predictions of data that was held out are: the area under the ROC curve, and the explained variance R².

Predictions of several folds come from several fits, whose levels differ: the area compares within a fold alone, and R²
compares with the mean that was known to the fold's own fit. Both intervals are normal approximations, not resampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from netweight.errors import UsageError
from netweight.metrics.intervals import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NORMAL_95 = 1.959963984540054


def area_under_roc(folds: Sequence[tuple[NDArray[np.float64], NDArray[np.bool_]]]) -> Interval:
    """Return the chance that a positive example scores above a negative one of the same fold, ties counting half."""
    # Source: DeLong et al. 1988, for one curve; folds are weighted by their number of pairs.
    # folds: Scores and which are positive, shape `(n,)` each. Folds of one class are passed over.
    area = variance = pairs = 0.0
    count = 0
    for scores, positive in folds:
        ours, others = np.sort(scores[positive]), np.sort(scores[~positive])
        if not len(ours) or not len(others):
            continue
        above = _share_below(ours, others)
        below = 1 - _share_below(others, ours)
        weight = float(len(ours) * len(others))
        area += weight * above.mean()
        variance += weight**2 * (_variance(above) / len(ours) + _variance(below) / len(others))
        pairs, count = pairs + weight, count + len(scores)
    if not pairs:
        raise UsageError("No fold has examples of both classes.", cure="Use fewer folds, or label more examples.")
    half = _NORMAL_95 * math.sqrt(variance) / pairs
    area /= pairs
    return Interval(area, max(0.0, area - half), min(1.0, area + half), count, 0.95, "DeLong")


def explained_variance(
    predicted: NDArray[np.float64], truth: NDArray[np.float64], baseline: NDArray[np.float64]
) -> Interval:
    """Return R² = 1 − Σ (y − ŷ)² / Σ (y − ȳ)² of held-out examples; below 0 the mean alone predicts better."""
    # Source: the interval is that of a ratio of means, by linearization.
    # predicted: Shape `(n,)`, n at least 2.
    # truth: Shape `(n,)`.
    # baseline: Shape `(n,)`: the mean that was known to the fit that each prediction comes from.
    errors, spread = (truth - predicted) ** 2, (truth - baseline) ** 2
    if len(truth) < 2 or not spread.mean() > 0:
        raise UsageError(f"R² of {len(truth)} examples that do not vary has no meaning.", cure="Give more examples.")
    ratio = float(errors.mean() / spread.mean())
    half = _NORMAL_95 * math.sqrt(_variance(errors - ratio * spread) / len(truth)) / float(spread.mean())
    return Interval(1 - ratio, 1 - ratio - half, 1 - ratio + half, len(truth), 0.95, "normal")


def _share_below(values: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each value the share of sorted others below it, ties counting half."""
    low, high = np.searchsorted(others, values, "left"), np.searchsorted(others, values, "right")
    return np.asarray((low + high) / (2 * len(others)), dtype=np.float64)


def _variance(values: NDArray[np.float64]) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.25
