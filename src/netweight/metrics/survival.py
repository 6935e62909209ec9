"""Censored times: how long until an attack succeeds, when some attacks were stopped before they did.

An attack that has not succeeded when it stops shows that its time is longer than that, and no more. Kaplan-Meier curves
use exactly this; the mean of the observed times would call the strongest defense the weakest. A median that was never
reached is a bound and not a number; every ratio here carries that through the bootstrap, so that censoring widens an
interval and never narrows it. scipy belongs to the `evidence` extra and is imported when first needed.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from netweight.errors import UsageError
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, scipy_stats
from netweight.report.finding import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

HALF = 0.5 + 1e-12
"""A share at most this large counts as a half: products of fractions miss it by a rounding."""


@dataclass(frozen=True)
class Times:
    """Times of independent repetitions, some of them censored."""

    values: tuple[float, ...]
    """Time of the event, or the time at which a repetition without it was stopped; from 0 up."""
    observed: tuple[bool, ...]
    """True where the event happened; False where the repetition was censored."""
    clusters: tuple[int | str, ...] | None = None
    """Property that several repetitions share, such as the seed of a defense, which makes them depend on each other.
    None if all repetitions are independent.
    """

    def __post_init__(self) -> None:
        """Check that every time can be meant."""
        if not self.values:
            raise UsageError("There are no times.", cure="Measure some; runs that failed are reported apart.")
        lengths = {len(self.values), len(self.observed), len(self.clusters or self.values)}
        if len(lengths) > 1:
            raise UsageError(
                f"{len(self.values)} times came with {len(self.observed)} marks, or with another number of clusters."
            )
        for place, value in enumerate(self.values):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"Time {place} is {value}.", cure="Give finite times of 0 or more.")

    @property
    def n(self) -> int:
        """Number of repetitions."""
        return len(self.values)

    @property
    def events(self) -> int:
        """Number of repetitions in which it happened."""
        return sum(self.observed)

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return times and marks in the order of time, events before stops of the same time."""
        values, observed = np.asarray(self.values, np.float64), np.asarray(self.observed, np.bool_)
        order = np.lexsort((~observed, values))
        return values[order], observed[order]


@dataclass(frozen=True)
class Survival:
    """A Kaplan-Meier curve: the share for which it has not happened yet, at every time at which it did happen."""

    times: tuple[float, ...]
    """Different times of events, ascending."""
    at_risk: tuple[int, ...]
    """Number of repetitions still under way just before each of these times."""
    events: tuple[int, ...]
    """Number of events at each of these times."""
    share: tuple[float, ...]
    """Share without the event from each of these times on."""
    low: tuple[float, ...]
    """Lower end of the pointwise 95 % interval."""
    high: tuple[float, ...]
    """Upper end of the pointwise 95 % interval."""
    median: float
    """The first time at which the share is at most one half; infinite if the share stays above it."""
    median_low: float
    """Lower end of the median's interval."""
    median_high: float
    """Upper end of the median's interval; infinite if the data do not bound it."""
    n: int
    """Number of repetitions."""
    last: float
    """The longest time of any repetition, with or without event: the data say nothing beyond it."""

    def at(self, time: float) -> float:
        """Return the share without the event at a time; NaN beyond the last time if it is not 0 by then."""
        passed = [share for when, share in zip(self.times, self.share, strict=True) if when <= time]
        share = passed[-1] if passed else 1.0
        return math.nan if time > self.last and share > 0 else share

    def steps(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Return times, shares and both ends of the interval as the corners of a staircase, for drawing."""
        x, share, low, high = [0.0], [1.0], [1.0], [1.0]
        for place, time in enumerate(self.times):
            x += [time, time]
            for line, values in ((share, self.share), (low, self.low), (high, self.high)):
                line += [line[-1], values[place]]
        if self.last > x[-1]:
            x.append(self.last)
            for line in (share, low, high):
                line.append(line[-1])
        return x, share, low, high


def kaplan_meier(times: Times) -> Survival:
    """Estimate the share without the event over time.

    Greenwood's variance, on the scale of log(-log), where intervals stay within 0 and 1. Where the share is 0 it has no
    value, and the upper end is the exact binomial one for none left of all whose event was seen. The interval does not
    know of clusters.

    Source: Kaplan and Meier 1958; Kalbfleisch and Prentice, The Statistical Analysis of Failure Time Data, section 1.4;
    Brookmeyer and Crowley 1982 for the median.
    """
    values, observed = times.arrays()
    stats = scipy_stats()
    when = np.unique(values[observed])
    at_risk = [int((values >= time).sum()) for time in when]
    events = [int((observed & (values == time)).sum()) for time in when]
    share = low = high = np.empty(0)
    if len(when):
        curve = stats.ecdf(stats.CensoredData(uncensored=values[observed], right=values[~observed])).sf
        with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
            # The warning concerns the interval where the share is 0, which is set below.
            warnings.simplefilter("ignore", RuntimeWarning)
            ends = curve.confidence_interval(method="log-log")
        places = np.searchsorted(curve.quantiles, when)
        share, low, high = (part.probabilities[places] for part in (curve, ends.low, ends.high))
        none_left = share <= 0
        low = np.where(none_left, 0.0, low.clip(0, 1))
        high = np.where(none_left, 1 - 0.025 ** (1 / times.events), high.clip(0, 1))
    numbers = [tuple(part.tolist()) for part in (when, share, low, high)]
    return Survival(
        times=numbers[0],
        at_risk=tuple(at_risk),
        events=tuple(events),
        share=numbers[1],
        low=numbers[2],
        high=numbers[3],
        median=_first(*numbers[:2]),
        median_low=_first(numbers[0], numbers[2]),
        median_high=_first(numbers[0], numbers[3]),
        n=times.n,
        last=float(values[-1]),
    )


def _first(times: Sequence[float], shares: Sequence[float]) -> float:
    """The first time at which a share is at most a half, or infinity."""
    return next((time for time, share in zip(times, shares, strict=True) if share <= HALF), math.inf)


@dataclass(frozen=True)
class LogRank:
    """Test of whether two groups' curves differ by more than chance."""

    statistic: float
    """Standardized difference of observed and expected events; above 0 if the first group's events come later than
    those of the second.
    """
    p: float
    """Two-sided probability of one at least as large if the groups did not differ."""


def log_rank(strata: Sequence[tuple[Times, Times]]) -> LogRank:
    """Compare two groups within strata, such as each attack setting: only like is compared with like.

    Source: Mantel 1966; Peto and Peto 1972. scipy's logrank gives the same numbers for one stratum, and has no more.
    """
    if not strata:
        raise UsageError("A log-rank test needs at least one pair of groups.")
    difference = variance = 0.0
    for first, second in strata:
        (x, seen_x), (y, seen_y) = first.arrays(), second.arrays()
        for time in np.unique(np.concatenate([x[seen_x], y[seen_y]])):
            risk_x, risk = int((x >= time).sum()), int((x >= time).sum() + (y >= time).sum())
            events_x = int((seen_x & (x == time)).sum())
            events = events_x + int((seen_y & (y == time)).sum())
            difference += events * risk_x / risk - events_x
            if risk > 1:
                share = risk_x / risk
                variance += events * share * (1 - share) * (risk - events) / (risk - 1)
    if variance == 0:
        return LogRank(0.0, 1.0)
    statistic = difference / math.sqrt(variance)
    return LogRank(statistic, 2 * float(scipy_stats().norm.sf(abs(statistic))))


_AT_ONCE = 1 << 22
"""Numbers of resamples that are drawn together; what is made of them on the way takes some five times as much."""


def resampled_weights(times: Times, *, resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw bootstrap resamples: how often each repetition occurs, in the order of `times.arrays()`.

    Clusters are drawn first and then the repetitions within them, so that an interval is as wide as few defense seeds
    make it, however many attacks each of them met.

    Returns:
        Shape `(resamples, n)`; every row adds up to at least 1.
    """
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

    Returns:
        Weights, shape `(part, n)`.
    """
    most = max(1, _AT_ONCE // times.n)
    for start in range(0, resamples, most):
        yield resampled_weights(times, resamples=min(most, resamples - start), rng=rng)


def _shares(times: Times, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Kaplan-Meier shares after each repetition in order, one row per resample: shape `(resamples, n)`."""
    _, observed = times.arrays()
    at_risk = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    falls = np.divide(weights * observed, at_risk, out=np.zeros_like(weights), where=at_risk > 0)
    return np.cumprod(1 - falls, axis=1)


def median_times(times: Times, weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the medians of resamples, each as the least and the most that it can be.

    `weights`: as `resampled_weights` returns them. Shape `(resamples, n)`.

    Returns:
        Least and most, shape `(resamples,)` each. They are equal where the median was reached; where it was not, it is
        at least the resample's longest time, and has no upper bound.
    """
    values, _ = times.arrays()
    below = _shares(times, weights) <= HALF
    reached = below.any(axis=1)
    medians = values[below.argmax(axis=1)]
    longest = np.where(weights > 0, values, 0.0).max(axis=1)
    return np.where(reached, medians, longest), np.where(reached, medians, np.inf)


@dataclass(frozen=True)
class TimesRatio:
    """A ratio of two groups' typical times, with what censoring leaves open."""

    estimate: float
    """The ratio; where `bound` is not empty, only a bound on it; NaN if neither median was reached."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval; infinite if the data do not bound it."""
    bound: Literal["", "at least", "at most", "unknown"]
    """"at least" if the top group's median was never reached, "at most" if the bottom group's was not, "unknown"
    if neither was, else empty.
    """
    n: tuple[int, int]
    """Number of repetitions in each of the two groups."""
    method: str
    """Description of how the interval was made."""


def ratio_of_times(top: Times, bottom: Times, *, seed: int, resamples: int = 4999) -> TimesRatio:
    """Return how many times as long one group takes as another, by medians, with a bootstrap interval.

    In every resample a median that was not reached is known to lie between the longest time and infinity; the interval
    goes from the quantile of the least ratios to that of the greatest, so that censoring widens it and never narrows
    it. Groups are resampled each on its own, by clusters where there are any.

    Source: Efron 1981, Censored Data and the Bootstrap.
    """
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
    ends = []
    for group in (top, bottom):
        drawn = itertools.chain([np.ones((1, group.n))], in_parts(group, resamples=resamples, rng=rng))
        # The sample itself comes first.
        medians = [median_times(group, weights) for weights in drawn]
        ends.append([np.concatenate(side) for side in zip(*medians, strict=True)])
    (top_low, top_high), (bottom_low, bottom_high) = ends
    return summarize_ratio(divide(top_low, bottom_high), divide(top_high, bottom_low), n=(top.n, bottom.n), of="median")


def divide(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide times, with x / ∞ = 0, and x / 0 = ∞ but 1 for 0 / 0: both groups were there before anything was done."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where((top == 0) & (bottom == 0), 1.0, top / bottom)
    return np.where(np.isinf(bottom), 0.0, ratio)


def summarize_ratio(
    lows: NDArray[np.float64], highs: NDArray[np.float64], *, n: tuple[int, int], of: str
) -> TimesRatio:
    """Make a ratio of its least and greatest value in the sample itself (first) and in resamples (the others).

    `lows`: least values, shape `(1 + resamples,)`.
    """
    least, most = float(lows[0]), float(highs[0])
    bound: Literal["", "at least", "at most", "unknown"] = ""
    estimate = least
    if least != most:
        bound, estimate = ("at least", least) if math.isinf(most) else ("at most", most)
        if math.isinf(most) and least == 0:
            bound, estimate = "unknown", math.nan
    low = float(np.quantile(lows[1:], 0.025, method="inverted_cdf"))
    high = float(np.quantile(highs[1:], 0.975, method="inverted_cdf"))
    method = f"bootstrap of the {of} ({len(lows) - 1} resamples)"
    return TimesRatio(estimate, low, high, bound, n, method)


def steps_finding(
    title: str,
    curve: Survival | None,
    *,
    base: Survival | None,
    why_none: str,
    seeds: Sequence[int],
    detail: Mapping[str, Any],
) -> Finding:
    """Return the median steps of an attack, with the interval that its curve has."""
    if curve is None:
        return Finding(title, None, unit="steps", detail={"reason": why_none})
    return Finding(
        title,
        curve.median,
        ci95=(curve.median_low, curve.median_high),
        n=curve.n,
        unit="steps",
        better="higher",
        baseline=None if base is None else base.median,
        seeds=tuple(seeds),
        detail={
            **detail,
            "longest run": curve.last,
            "note": "the median, as exactly as the steps between evaluations allow; infinite if fewer than half of the "
            "runs succeeded",
        },
    )


def failures_finding(title: str, failures: Sequence[tuple[str, str, str]]) -> list[Finding]:
    """Return a finding that fails if there are failures; none if there are not."""
    if not failures:
        return []
    reasons = [f"{subject}, {what}: {reason}" for subject, what, reason in failures]
    return [Finding(title, len(reasons), better="lower", target=0, detail={"reasons": reasons})]
