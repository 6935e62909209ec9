"""How many times as long one group takes as another, when some were stopped before the end.

A median that was never reached is a bound and not a number; every ratio here carries that through the bootstrap, so
that censoring widens an interval and never narrows it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from netweight.errors import UsageError
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP
from netweight.metrics.survival import HALF, Times

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "TimesRatio",
    "divide",
    "in_parts",
    "median_times",
    "ratio_of_times",
    "resampled_weights",
    "restricted_means",
    "summarize_ratio",
]

_AT_ONCE = 1 << 22
"""Numbers of resamples that are drawn together; what is made of them on the way takes some five times as much."""


def resampled_weights(times: Times, *, resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw bootstrap resamples: how often each repetition occurs, in the order of `times.arrays()`.

    Clusters are drawn first and then the repetitions within them, so that an interval is as wide as few defense seeds
    make it, however many attacks each of them met.

    Args:
        times: What is resampled.
        resamples: Number of resamples.
        rng: Where the draws come from.

    Returns:
        Shape `(resamples, n)`; every row adds up to at least 1.
    """
    import numpy as np

    names = times.clusters or (0,) * times.n
    values, observed = np.asarray(times.values, np.float64), np.asarray(times.observed, np.bool_)
    order = np.lexsort((~observed, values))
    groups = [np.flatnonzero([name == one for name in names]) for one in dict.fromkeys(names)]
    weights = np.zeros((resamples, times.n))
    drawn = rng.multinomial(len(groups), [1 / len(groups)] * len(groups), size=resamples)
    for number, rows in enumerate(groups):
        counts = drawn[:, number] * len(rows)
        weights[:, rows] = rng.multinomial(counts, [1 / len(rows)] * len(rows))
    return weights[:, order]


def in_parts(times: Times, *, resamples: int, rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    """Draw bootstrap resamples as `resampled_weights` does, in parts where all together would fill the memory.

    Args:
        times: What is resampled.
        resamples: Number of resamples, over all parts.
        rng: Where the draws come from.

    Yields:
        Weights, shape `(part, n)`.
    """
    most = max(1, _AT_ONCE // times.n)
    for start in range(0, resamples, most):
        yield resampled_weights(times, resamples=min(most, resamples - start), rng=rng)


def _shares(times: Times, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Kaplan-Meier shares after each repetition in order, one row per resample: shape `(resamples, n)`."""
    import numpy as np

    _, observed = times.arrays()
    at_risk = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    falls = np.divide(weights * observed, at_risk, out=np.zeros_like(weights), where=at_risk > 0)
    return np.cumprod(1 - falls, axis=1)


def median_times(times: Times, weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the medians of resamples, each as the least and the most that it can be.

    Args:
        times: What was resampled.
        weights: As `resampled_weights` returns them. Shape `(resamples, n)`.

    Returns:
        Least and most, shape `(resamples,)` each. They are equal where the median was reached; where it was not, it is
        at least the resample's longest time, and has no upper bound.
    """
    import numpy as np

    values, _ = times.arrays()
    below = _shares(times, weights) <= HALF
    reached = below.any(axis=1)
    medians = values[below.argmax(axis=1)]
    longest = np.where(weights > 0, values, 0.0).max(axis=1)
    return np.where(reached, medians, longest), np.where(reached, medians, np.inf)


def restricted_means(times: Times, weights: NDArray[np.float64], horizon: float) -> NDArray[np.float64]:
    """Return the mean times within a horizon, resample by resample: areas under their curves up to it.

    Args:
        times: What was resampled.
        weights: As `resampled_weights` returns them. Shape `(resamples, n)`.
        horizon: Times beyond it count as this long.

    Returns:
        Shape `(resamples,)`. A curve whose last repetition was stopped before the horizon goes on as it was.
    """
    import numpy as np

    values, _ = times.arrays()
    ends = np.minimum(np.append(values, horizon), horizon)
    widths = np.diff(ends, prepend=0.0)
    shares = np.concatenate([np.ones((len(weights), 1)), _shares(times, weights)], axis=1)
    total: NDArray[np.float64] = (shares * widths).sum(axis=1)
    return total


@dataclass(frozen=True)
class TimesRatio:
    """A ratio of two groups' typical times, with what censoring leaves open.

    Attributes:
        estimate: The ratio; where `bound` is not empty, only a bound on it; NaN if neither median was reached.
        low: Lower end of the interval.
        high: Upper end; infinite if the data do not bound it.
        bound: "at least" if the top group's median was never reached, "at most" if the bottom group's was not,
            "unknown" if neither was, else empty.
        n: Repetitions of both groups.
        level: Confidence level.
        method: How the interval was made, in words.
    """

    estimate: float
    low: float
    high: float
    bound: Literal["", "at least", "at most", "unknown"]
    n: tuple[int, int]
    level: float
    method: str


def ratio_of_times(
    top: Times,
    bottom: Times,
    *,
    seed: int,
    of: Literal["median", "restricted mean"] = "median",
    horizon: float | None = None,
    level: float = 0.95,
    resamples: int = 4999,
) -> TimesRatio:
    """Return how many times as long one group takes as another, with a bootstrap interval.

    In every resample a median that was not reached is known to lie between the longest time and infinity; the interval
    goes from the quantile of the least ratios to that of the greatest, so that censoring widens it and never narrows
    it. Groups are resampled each on its own, by clusters where there are any.

    Args:
        top: The group whose times are divided; at least 5 repetitions.
        bottom: The group divided by; likewise, with times that are not all 0.
        seed: Seed of the resampling.
        of: "median", or the "restricted mean": the mean of times cut off at the horizon, which is always known, and
            which understates a ratio if the top group is censored there.
        horizon: For the restricted mean; by default the shorter of the two groups' longest times.
        level: Confidence level, between 0 and 1.
        resamples: Number of resamples.

    Raises:
        UsageError: There are too few repetitions, or every time of the bottom group is 0.

    Source: Efron 1981, Censored Data and the Bootstrap.
    """
    import numpy as np

    for name, group in (("top", top), ("bottom", bottom)):
        if group.n < MINIMUM_FOR_BOOTSTRAP:
            raise UsageError(
                f"A ratio of times needs at least {MINIMUM_FOR_BOOTSTRAP} repetitions, and the {name} group has "
                f"{group.n}.",
                cure="Attack with more seeds.",
            )
    if max(bottom.values) == 0:
        raise UsageError("Every time of the bottom group is 0, so there is nothing to divide by.")
    rng = np.random.default_rng(seed)
    reach = min(max(top.values), max(bottom.values)) if horizon is None else horizon
    ends = []
    for group in (top, bottom):
        found = []
        for weights in itertools.chain([np.ones((1, group.n))], in_parts(group, resamples=resamples, rng=rng)):
            means = restricted_means(group, weights, reach) if of == "restricted mean" else None
            found.append(median_times(group, weights) if means is None else (means, means))
        ends.append([np.concatenate(side) for side in zip(*found, strict=True)])  # the sample itself first
    (top_low, top_high), (bottom_low, bottom_high) = ends
    return summarize_ratio(
        divide(top_low, bottom_high), divide(top_high, bottom_low), n=(top.n, bottom.n), level=level, of=of
    )


def divide(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide times, with x / ∞ = 0, and x / 0 = ∞ but 1 for 0 / 0: both groups were there before anything was done.

    Args:
        top: Times, any shape.
        bottom: Times, of the same shape.

    Returns:
        Ratios, of the same shape.
    """
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where((top == 0) & (bottom == 0), 1.0, top / bottom)
    return np.where(np.isinf(bottom), 0.0, ratio)


def summarize_ratio(
    lows: NDArray[np.float64], highs: NDArray[np.float64], *, n: tuple[int, int], level: float, of: str
) -> TimesRatio:
    """Make a ratio of its least and greatest value in the sample itself (first) and in resamples (the others).

    Args:
        lows: Least values, shape `(1 + resamples,)`.
        highs: Greatest values, the same shape.
        n: Repetitions of both groups.
        level: Confidence level.
        of: What the ratio is of, in words.
    """
    import numpy as np

    least, most = float(lows[0]), float(highs[0])
    bound: Literal["", "at least", "at most", "unknown"] = ""
    estimate = least
    if least != most:
        bound, estimate = ("at least", least) if math.isinf(most) else ("at most", most)
        if math.isinf(most) and least == 0:
            bound, estimate = "unknown", math.nan
    tail = (1 - level) / 2
    low = float(np.quantile(lows[1:], tail, method="inverted_cdf"))
    high = float(np.quantile(highs[1:], 1 - tail, method="inverted_cdf"))
    method = f"bootstrap of the {of} ({len(lows) - 1} resamples)"
    return TimesRatio(estimate, low, high, bound, n, level, method)
