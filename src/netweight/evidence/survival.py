"""Times that were not all seen to their end: how long until something happens, if some were stopped before it did.

An attack that has not succeeded when it stops tells that its time is longer than that, and no more. Kaplan-Meier
curves use exactly this; means of the times that were seen would call the strongest defense the weakest. Ratios of
times are in `survival_ratio.py`.

scipy belongs to the `evidence` extra and is imported when first needed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from netweight.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HALF", "LogRank", "Survival", "Times", "kaplan_meier", "log_rank"]

HALF = 0.5 + 1e-12
"""A share at most this large counts as a half: products of fractions miss it by a rounding."""
Transform: TypeAlias = Literal["log-log", "linear"]


@dataclass(frozen=True)
class Times:
    """Times of independent repetitions, some of them censored.

    Attributes:
        values: Time of the event, or the time at which a repetition without it was stopped; from 0 up.
        observed: Whether the event happened.
        clusters: What several repetitions share, such as the seed of a defense; they are not independent of each
            other. None if every one stands alone.

    Raises:
        UsageError: Lengths differ, there is no time, or one is negative or not finite.
    """

    values: tuple[float, ...]
    observed: tuple[bool, ...]
    clusters: tuple[int | str, ...] | None = None

    def __post_init__(self) -> None:
        """Check that every time can be meant."""
        if not self.values:
            raise UsageError("There are no times.", cure="Measure some; runs that failed are reported apart.")
        lengths = {len(self.values), len(self.observed), len(self.clusters or self.values)}
        if len(lengths) > 1:
            raise UsageError(f"{len(self.values)} times came with {len(self.observed)} marks or as many clusters.")
        for place, value in enumerate(self.values):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"Time {place} is {value}.", cure="Times are finite and from 0 up.")

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
        import numpy as np

        values, observed = np.asarray(self.values, np.float64), np.asarray(self.observed, np.bool_)
        order = np.lexsort((~observed, values))
        return values[order], observed[order]


@dataclass(frozen=True)
class Survival:
    """A Kaplan-Meier curve: the share for which it has not happened yet, at every time at which it did happen.

    Attributes:
        times: Different times of events, ascending.
        at_risk: Repetitions still under way just before each.
        events: Events at each.
        share: Share without the event from each time on.
        low: Lower end of the pointwise interval.
        high: Upper end.
        median: The first time at which the share is at most a half; infinite if that was never seen.
        median_low: Lower end of the median's interval.
        median_high: Upper end; infinite if the data do not bound it.
        n: Number of repetitions.
        last: The longest time, event or not: beyond it nothing is known.
        level: Confidence level.
    """

    times: tuple[float, ...]
    at_risk: tuple[int, ...]
    events: tuple[int, ...]
    share: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    median: float
    median_low: float
    median_high: float
    n: int
    last: float
    level: float

    def at(self, time: float) -> float:
        """Return the share without the event at a time; NaN beyond the last time if it is not 0 by then.

        Args:
            time: In the unit of the times.
        """
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


def kaplan_meier(times: Times, *, level: float = 0.95, transform: Transform = "log-log") -> Survival:
    """Estimate the share without the event over time.

    Greenwood's variance, on the scale of log(-log) by default, where intervals stay within 0 and 1. Where the share is
    0 that has no value, and the upper end is the exact binomial one for none left of all whose event was seen.

    Args:
        times: Independent repetitions; the interval knows nothing of clusters.
        level: Confidence level, between 0 and 1.
        transform: "log-log", or "linear" for Greenwood's interval itself, cut off at 0 and 1.

    Raises:
        MissingExtra: scipy is not installed.

    Source: Kaplan and Meier 1958; Kalbfleisch and Prentice, The Statistical Analysis of Failure Time Data, section
    1.4; Brookmeyer and Crowley 1982 for the median.
    """
    values, observed = times.arrays()
    z = float(_scipy_stats().norm.ppf((1 + level) / 2))
    share, spread = 1.0, 0.0
    rows: list[tuple[float, int, int, float, float, float]] = []
    for time in sorted({float(value) for value in values[observed]}):
        at_risk, events = int((values >= time).sum()), int((observed & (values == time)).sum())
        share *= 1 - events / at_risk
        if events == at_risk:
            share = 0.0
            rows.append((time, at_risk, events, 0.0, 0.0, 1 - ((1 - level) / 2) ** (1 / times.events)))
            continue
        spread += events / (at_risk * (at_risk - events))
        rows.append((time, at_risk, events, share, *_ends(share, math.sqrt(spread), z, transform)))
    when, low, high = [row[0] for row in rows], [row[4] for row in rows], [row[5] for row in rows]
    shares = [row[3] for row in rows]
    return Survival(
        times=tuple(when),
        at_risk=tuple(row[1] for row in rows),
        events=tuple(row[2] for row in rows),
        share=tuple(shares),
        low=tuple(low),
        high=tuple(high),
        median=_first(when, shares),
        median_low=_first(when, low),
        median_high=_first(when, high),
        n=times.n,
        last=float(values[-1]),
        level=level,
    )


def _ends(share: float, spread: float, z: float, transform: Transform) -> tuple[float, float]:
    if transform == "linear":
        return max(0.0, share - z * share * spread), min(1.0, share + z * share * spread)
    factor = math.exp(z * spread / abs(math.log(share)))
    return share**factor, share ** (1 / factor)


def _first(times: Sequence[float], shares: Sequence[float]) -> float:
    """The first time at which a share is at most a half, or infinity."""
    return next((time for time, share in zip(times, shares, strict=True) if share <= HALF), math.inf)


@dataclass(frozen=True)
class LogRank:
    """Whether two groups' curves differ by more than chance.

    Attributes:
        statistic: Standardized difference of observed and expected events; above 0 if the first group's events come
            later than those of the second.
        p: Two-sided probability of one at least as large if the groups did not differ.
    """

    statistic: float
    p: float


def log_rank(strata: Sequence[tuple[Times, Times]]) -> LogRank:
    """Compare two groups within strata, such as each attack setting: only like is compared with like.

    Args:
        strata: Pairs of groups; one pair for a plain test.

    Raises:
        MissingExtra: scipy is not installed.
        UsageError: There is no stratum.

    Source: Mantel 1966; Peto and Peto 1972.
    """
    import numpy as np

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
    return LogRank(statistic, 2 * float(_scipy_stats().norm.sf(abs(statistic))))


def _scipy_stats() -> Any:
    try:
        return importlib.import_module("scipy.stats")
    except ImportError as error:
        raise MissingExtra(
            "Survival curves need scipy, which is not installed.", cure='Run: pip install "netweight[evidence]"'
        ) from error
