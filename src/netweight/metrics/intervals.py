"""Intervals for measured numbers: bootstrap, small samples, proportions, paired ratios, predictions of held-out data.

The formulas are scipy's; what is decided here is which of them fits, how few samples are too few, and that every
random draw has a seed. scipy belongs to the `evidence` extra and is imported when first needed.

Predictions of several folds come from several fits, whose levels differ: the area under the ROC curve compares within a
fold alone, and the explained variance R² compares with the mean that was known to the fold's own fit. Both intervals
are normal approximations, not resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from netweight.core.lazy import library
from netweight.errors import UsageError
from netweight.report.finding import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray


MINIMUM_FOR_BOOTSTRAP = 5
"""Below this many samples a resample repeats the same few values and its interval is far too narrow."""

Statistic: TypeAlias = Literal["mean", "median"] | Callable[..., Any]
Method: TypeAlias = Literal["auto", "BCa", "percentile", "basic"]


@dataclass(frozen=True)
class Interval:
    """An estimate with the 95 % interval around it."""

    estimate: float
    """The statistic of the samples."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    n: int
    """Number of samples (pairs, for ratios; trials, for proportions)."""
    method: str
    """Description of how the interval was made."""

    @property
    def ci95(self) -> tuple[float, float]:
        """The two ends, as `Finding(ci95=...)` takes them."""
        return self.low, self.high


def bootstrap(
    samples: Sequence[float] | NDArray[np.floating[Any]],
    statistic: Statistic = "mean",
    *,
    seed: int,
    resamples: int = 9999,
    method: Method = "auto",
) -> Interval:
    """Return a statistic of independent samples with its bootstrap interval.

    `samples`: one value per independent repetition, shape `(n,)`, n ≥ 5, all finite.

    Returns:
        The interval; of width 0 when all samples are equal.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 13 and 14. "auto" takes BCa for means
    and percentile otherwise: the jackknife inside BCa has no variance for a median of tied values.
    """
    values = _finite_samples(samples, "bootstrap", MINIMUM_FOR_BOOTSTRAP)
    statistics: dict[Any, Callable[..., Any]] = {"mean": np.mean, "median": np.median}
    function = statistic if callable(statistic) else statistics.get(statistic)
    if function is None:
        raise UsageError(f"Unknown statistic {statistic!r}.", cure='Use "mean", "median" or a function.')
    chosen = method if method != "auto" else "BCa" if statistic == "mean" else "percentile"
    estimate = float(function(values, axis=-1))
    if (values == values[0]).all():
        return Interval(estimate, estimate, estimate, len(values), "all samples equal")
    result = scipy_stats().bootstrap(
        (values,),
        function,
        n_resamples=resamples,
        method=chosen,
        rng=np.random.default_rng(seed),
    )
    low, high = (float(end) for end in result.confidence_interval)
    return Interval(estimate, low, high, len(values), f"bootstrap ({chosen}, {resamples} resamples)")


def t_interval(samples: Sequence[float] | NDArray[np.floating[Any]]) -> Interval:
    """Return the mean of a few samples with Student's interval: the right choice for 2 to 4 seeds.

    Args:
        samples: One value per independent repetition, shape `(n,)`, n ≥ 2, all finite, roughly normal.

    Returns:
        The interval; wide when n is small, as it should be.
    """
    values = _finite_samples(samples, "t_interval", 2)
    mean = float(values.mean())
    half = float(scipy_stats().t.ppf(0.975, len(values) - 1)) * float(values.std(ddof=1))
    half /= math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values), "Student's t")


def mean_interval(samples: Sequence[float], *, seed: int) -> Interval:
    """Return a mean with the interval that suits how many there are: Student's for 2 to 4, from 5 on the bootstrap."""
    return t_interval(samples) if len(samples) < MINIMUM_FOR_BOOTSTRAP else bootstrap(samples, seed=seed)


def interval_finding(name: str, interval: Interval, **more: Any) -> Finding:
    """Return an estimate with its interval as a finding, in percent where that is its unit."""
    times = 100 if more.get("unit") == "%" else 1
    ends = tuple(times * end for end in interval.ci95)
    return Finding(name, times * interval.estimate, **{"ci95": ends, "n": interval.n, **more})


def ends_if_enough(samples: Sequence[float], statistic: Statistic = "mean", *, seed: int) -> tuple[float, float] | None:
    """Return the ends of a statistic's bootstrap interval, None for fewer samples than it takes."""
    return bootstrap(samples, statistic, seed=seed).ci95 if len(samples) >= MINIMUM_FOR_BOOTSTRAP else None


def proportion(successes: int, n: int) -> Interval:
    """Return a share of trials with Wilson's interval, which is sound at 0 and at n too.

    Returns:
        The interval, within 0 and 1.
    """
    if not 0 <= successes <= n or n < 1:
        raise UsageError(
            f"{successes} successes in {n} trials is not a proportion.", cure="Give 0 ≤ successes ≤ n and n ≥ 1."
        )
    ends = scipy_stats().binomtest(successes, n).proportion_ci(method="wilson")
    return Interval(successes / n, float(ends.low), float(ends.high), n, "Wilson")


def paired_ratio(
    values: Sequence[float] | NDArray[np.floating[Any]],
    baseline: Sequence[float] | NDArray[np.floating[Any]],
    *,
    seed: int,
    resamples: int = 9999,
) -> Interval:
    """Return the median ratio of paired measurements with its bootstrap interval.

    Pairs are resampled, not.

    `values`: measurements taken side by side share the state of the machine, and their ratio does not depend on it.
    Both have shape `(n,)`, n ≥ 5, above 0; entry i of both is from the same round.
    """
    top = _finite_samples(values, "paired_ratio", MINIMUM_FOR_BOOTSTRAP)
    bottom = _finite_samples(baseline, "paired_ratio", MINIMUM_FOR_BOOTSTRAP)
    if len(top) != len(bottom):
        raise UsageError(f"paired_ratio got {len(top)} values and {len(bottom)} baselines.", cure="Measure in pairs.")
    if min(top.min(), bottom.min()) <= 0:
        raise UsageError(
            "paired_ratio needs values above 0.", cure="Give the times or speeds of finished runs, which are above 0."
        )
    return bootstrap(top / bottom, "median", seed=seed, resamples=resamples)


def ratio_of_sums(tops: Sequence[float], bottoms: Sequence[float], *, seed: int) -> Interval:
    """Return the ratio of two sums over the same independent pieces; the bootstrap resamples pieces."""
    top, bottom = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)

    def ratio(pieces: Any, axis: int = -1) -> Any:
        chosen = pieces.astype(np.int64)
        # A resample may contain only zeros as divisors.
        with np.errstate(divide="ignore", invalid="ignore"):
            return top[chosen].sum(axis=axis) / bottom[chosen].sum(axis=axis)

    return bootstrap(np.arange(len(top), dtype=np.float64), ratio, seed=seed, resamples=1999, method="percentile")


def _finite_samples(samples: Any, caller: str, minimum: int) -> NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1:
        raise UsageError(f"{caller} takes a list of numbers, not an array of shape {values.shape}.")
    if len(values) < minimum:
        few = " Use t_interval for 2 to 4 samples." if caller == "bootstrap" else ""
        raise UsageError(
            f"{caller} needs at least {minimum} samples and got {len(values)}.", cure=f"Measure more.{few}"
        )
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise UsageError(
            f"{caller}: sample {where} is {values[where]}.", cure="Report runs that failed apart from those that ran."
        )
    return values


def scipy_stats() -> Any:
    """Import scipy.stats, which belongs to the `evidence` extra."""
    return library("scipy.stats", "An interval", "evidence")


_NORMAL_95 = 1.959963984540054


def area_under_roc(folds: Sequence[tuple[NDArray[np.float64], NDArray[np.bool_]]]) -> Interval:
    """Return the chance that a positive example scores above a negative one of the same fold, ties counting half.

    Args:
        folds: Scores and which are positive, shape `(n,)` each. Folds of one class are passed over.

    Source: DeLong et al. 1988, for one curve; folds are weighted by their number of pairs.
    """
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
    return Interval(area, max(0.0, area - half), min(1.0, area + half), count, "DeLong")


def explained_variance(
    predicted: NDArray[np.float64], truth: NDArray[np.float64], baseline: NDArray[np.float64]
) -> Interval:
    """Return R² = 1 − Σ (y − ŷ)² / Σ (y − ȳ)² of held-out examples; below 0 the mean alone predicts better.

    Args:
        predicted: Shape `(n,)`, n at least 2.
        truth: Shape `(n,)`.
        baseline: Shape `(n,)`: the mean that was known to the fit that each prediction comes from.

    Source: The interval is that of a ratio of means, by linearization.
    """
    errors, spread = (truth - predicted) ** 2, (truth - baseline) ** 2
    if len(truth) < 2 or not spread.mean() > 0:
        raise UsageError(f"R² of {len(truth)} examples that do not vary has no meaning.", cure="Give more examples.")
    ratio = float(errors.mean() / spread.mean())
    half = _NORMAL_95 * math.sqrt(_variance(errors - ratio * spread) / len(truth)) / float(spread.mean())
    return Interval(1 - ratio, 1 - ratio - half, 1 - ratio + half, len(truth), "normal")


def _share_below(values: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each value the share of sorted others below it, ties counting half."""
    low, high = np.searchsorted(others, values, "left"), np.searchsorted(others, values, "right")
    return np.asarray((low + high) / (2 * len(others)), dtype=np.float64)


def _variance(values: NDArray[np.float64]) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.25
