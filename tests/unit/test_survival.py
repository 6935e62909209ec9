"""Survival: a table worked out by hand, scipy where it offers the same, laws, and what censoring leaves open."""

import importlib
import math
import warnings

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netweight.errors import MissingExtra, UsageError
from netweight.metrics import survival
from netweight.metrics.survival import (
    Times,
    kaplan_meier,
    log_rank,
    median_times,
    ratio_of_times,
    resampled_weights,
)

scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is in the evidence extra")

# Remission of leukemia in weeks under 6-MP and placebo: Freireich et al. 1963, as in Kalbfleisch and Prentice.
# 6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+
TREATED = Times(
    (6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35),
    tuple(mark == "1" for mark in "111010100110001100000"),
)
PLACEBO = Times((1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23), (True,) * 21)


def censored(times):
    values, observed = numpy.array(times.values), numpy.array(times.observed)
    return scipy_stats.CensoredData(uncensored=values[observed], right=values[~observed])


def times_of(draw):
    return Times(tuple(t for t, _ in draw), tuple(seen for _, seen in draw))


DRAWN = st.lists(st.tuples(st.integers(1, 8).map(float), st.booleans()), min_size=1, max_size=12).map(times_of)


def test_the_textbook_table():
    curve = kaplan_meier(TREATED)
    assert curve.times == (6, 7, 10, 13, 16, 22, 23)
    assert curve.at_risk == (21, 17, 15, 12, 11, 7, 6)
    assert curve.events == (3, 1, 1, 1, 1, 1, 1)
    assert curve.share == pytest.approx((0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448), abs=5e-4)
    logs = [[math.log(-math.log(end)) for end in (low, high)] for low, high in zip(curve.low, curve.high, strict=True)]
    spread = [(low - high) / 2 / 1.959964 for low, high in logs]
    error = [-wide * share * math.log(share) for wide, share in zip(spread, curve.share, strict=True)]  # delta method
    assert error[1:6] == pytest.approx([0.0869, 0.0963, 0.1068, 0.1141, 0.1282], abs=5e-5)
    assert (curve.median, curve.last, curve.n) == (23, 35, 21)
    placebo = kaplan_meier(PLACEBO)
    assert placebo.median == 8
    assert (placebo.median_low, placebo.median_high) == (4, 11)  # as R's survfit(conf.type="log-log") has it
    test = log_rank([(TREATED, PLACEBO)])
    assert test.statistic**2 == pytest.approx(16.79, abs=5e-3)  # the published chi-squared
    assert test.p < 1e-4


def by_hand(times, z=1.959963984540054):
    """Rows of time, at risk, events, share, low and high, by the formulas of Kaplan-Meier and Greenwood."""
    share, spread = 1.0, 0.0
    pairs = list(zip(times.values, times.observed, strict=True))
    for time in sorted({value for value, seen in pairs if seen}):
        at_risk = sum(value >= time for value, _ in pairs)
        events = sum(value == time and seen for value, seen in pairs)
        share *= 1 - events / at_risk
        if events == at_risk:
            yield time, at_risk, events, 0.0, 0.0, 1 - 0.025 ** (1 / times.events)
            continue
        spread += events / (at_risk * (at_risk - events))
        half = z * math.sqrt(spread)
        factor = math.exp(half / abs(math.log(share)))
        yield time, at_risk, events, share, share**factor, share ** (1 / factor)


@given(times=DRAWN)
def test_curves_and_intervals_are_those_of_the_formulas(times):
    curve = kaplan_meier(times)
    rows = list(zip(curve.times, curve.at_risk, curve.events, curve.share, curve.low, curve.high, strict=True))
    assert rows == [pytest.approx(row, abs=1e-9) for row in by_hand(times)]


@given(times=DRAWN)
def test_curves_and_intervals_are_scipys(times):
    ours = kaplan_meier(times)
    theirs = scipy_stats.ecdf(censored(times)).sf
    for time, share in zip(ours.times, ours.share, strict=True):
        assert theirs.evaluate(time) == pytest.approx(share)
    inside = [place for place, share in enumerate(ours.share) if 0 < share < 1]
    if inside:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where the share is 0 its interval is undefined
            ends = theirs.confidence_interval(0.95, method="log-log")
        for place in inside:
            low, high = (float(end.evaluate(ours.times[place])) for end in (ends.low, ends.high))
            assert ours.low[place] == pytest.approx(max(0, low))
            assert ours.high[place] == pytest.approx(min(1, high))


@given(first=DRAWN, second=DRAWN)
def test_the_log_rank_test_is_scipys(first, second):
    ours = log_rank([(first, second)])
    if ours.p == 1.0 and ours.statistic == 0:
        return
    theirs = scipy_stats.logrank(censored(first), censored(second))
    assert ours.p == pytest.approx(theirs.pvalue)
    assert ours.statistic == pytest.approx(-theirs.statistic)


@given(times=DRAWN)
def test_resampling_nothing_gives_the_curve_itself(times):
    curve, once = kaplan_meier(times), numpy.ones((1, times.n))
    low, high = median_times(times, once)
    assert high[0] == curve.median
    assert low[0] == (curve.median if math.isfinite(curve.median) else curve.last)


@given(times=DRAWN, seed=st.integers(0, 5))
def test_weights_are_repetitions(times, seed):
    weights = resampled_weights(times, resamples=3, rng=numpy.random.default_rng(seed))
    values, observed = times.arrays()
    for row in weights.astype(int):
        assert row.sum() == times.n
        again = Times(tuple(numpy.repeat(values, row).tolist()), tuple(numpy.repeat(observed, row).tolist()))
        assert median_times(times, row[None].astype(float))[1][0] == kaplan_meier(again).median


@given(times=DRAWN)
def test_staircases_and_intervals_hold_the_curve(times):
    curve = kaplan_meier(times)
    x, share, low, high = curve.steps()
    assert x == sorted(x)
    assert x[-1] == curve.last
    assert all(a <= b <= c for a, b, c in zip(low, share, high, strict=True))
    assert curve.median_low <= curve.median <= curve.median_high
    assert curve.at(0.5) == 1
    after = curve.at(9)
    assert after == 0 or math.isnan(after)


def test_when_all_recovered_at_once_few_repetitions_bound_nothing():
    few, enough = (kaplan_meier(Times((20.0,) * n, (True,) * n)) for n in (5, 6))
    assert few.median == few.median_low == 20
    assert few.median_high == math.inf  # five of five on one side happen once in 16 times
    assert enough.median_high == 20


def test_medians_have_the_coverage_they_claim():
    rng = numpy.random.default_rng(1)
    hits = 0
    for _ in range(400):
        real, stop = rng.exponential(10, 25), rng.uniform(5, 40, 25)
        curve = kaplan_meier(Times(tuple(numpy.minimum(real, stop)), tuple(real <= stop)))
        hits += curve.median_low <= 10 * math.log(2) <= curve.median_high
    assert 0.92 <= hits / 400 <= 0.99


def test_ratios_of_medians_have_the_coverage_they_claim():
    rng = numpy.random.default_rng(2)
    hits = 0
    for repetition in range(150):
        groups = []
        for scale in (30, 10):
            real = rng.exponential(scale, 25)
            groups.append(Times(tuple(numpy.minimum(real, 60)), tuple(real <= 60)))
        ratio = ratio_of_times(*groups, seed=repetition, resamples=300)
        hits += ratio.low <= 3 <= ratio.high
    assert 0.9 <= hits / 150


def test_what_was_never_reached_is_a_bound():
    never, soon = Times((100.0,) * 6, (False,) * 6), Times((10.0,) * 6, (True,) * 6)
    ratio = ratio_of_times(never, soon, seed=0)
    assert (ratio.estimate, ratio.bound, ratio.low, ratio.high) == (10, "at least", 10, math.inf)
    ratio = ratio_of_times(soon, never, seed=0)
    assert (ratio.estimate, ratio.bound, ratio.low, ratio.high) == (0.1, "at most", 0, 0.1)
    ratio = ratio_of_times(never, never, seed=0)
    assert math.isnan(ratio.estimate)
    assert (ratio.bound, ratio.low, ratio.high) == ("unknown", 0, math.inf)


def test_few_clusters_widen_an_interval():
    values = tuple(float(10 * seed + place) for seed in (1, 5, 9) for place in range(10))
    alone = Times(values, (True,) * 30)
    together = Times(values, (True,) * 30, tuple(seed for seed in (42, 7, 17) for _ in range(10)))
    base = Times((10.0,) * 10, (True,) * 10)
    narrow, wide = (ratio_of_times(one, base, seed=0) for one in (alone, together))
    assert narrow.estimate == wide.estimate
    assert wide.high - wide.low > 1.3 * (narrow.high - narrow.low)
    first, again, other = (ratio_of_times(TREATED, PLACEBO, seed=s, resamples=99) for s in (0, 0, 3))
    assert first == again != other


def test_strata_compare_like_with_like():
    # Within each setting the first group is later; pooled, the settings hide it.
    fast = (Times((2, 2, 2, 3, 2, 3), (True,) * 6), Times((1, 1, 1, 1, 2, 1), (True,) * 6))
    slow = (Times((20, 21, 22), (True,) * 3), Times((18,) * 12, (True,) * 12))
    pooled = tuple(Times(a.values + b.values, a.observed + b.observed) for a, b in zip(fast, slow, strict=True))
    assert log_rank([fast, slow]).p < 0.001 < log_rank([pooled]).p
    assert log_rank([fast, slow]).statistic > 0


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="no times"):
        Times((), ())
    with pytest.raises(UsageError, match="2 times came with 1 marks"):
        Times((1.0, 2.0), (True,))
    with pytest.raises(UsageError, match="Time 1 is nan"):
        Times((1.0, math.nan), (True, True))
    five = Times((1.0,) * 5, (True,) * 5)
    with pytest.raises(UsageError, match="at least 5 repetitions, and the bottom group has 4"):
        ratio_of_times(five, Times((1.0,) * 4, (True,) * 4), seed=0)
    with pytest.raises(UsageError, match="Every time of the bottom group is 0"):
        ratio_of_times(five, Times((0.0,) * 5, (True,) * 5), seed=0)
    with pytest.raises(UsageError, match="at least one pair"):
        log_rank([])

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match="netweight\\[evidence\\]"):
        kaplan_meier(five)


def test_many_runs_are_resampled_in_parts_with_the_same_outcome(monkeypatch):
    rng = numpy.random.default_rng(0)
    groups = [
        Times(tuple((scale * rng.exponential(size=30)).tolist()), tuple((rng.random(30) < 0.8).tolist()))
        for scale in (3.0, 1.0)
    ]
    whole = ratio_of_times(*groups, seed=0, resamples=2000)
    sizes = []
    draw = survival.resampled_weights
    monkeypatch.setattr(survival, "_AT_ONCE", 30 * 300)
    monkeypatch.setattr(
        survival,
        "resampled_weights",
        lambda times, *, resamples, rng: (sizes.append(resamples), draw(times, resamples=resamples, rng=rng))[1],
    )
    parts = ratio_of_times(*groups, seed=0, resamples=2000)
    assert sizes == [*[300] * 6, 200] * 2
    assert (parts.estimate, parts.method, parts.n) == (whole.estimate, whole.method, whole.n)
    assert parts.low == pytest.approx(whole.low, rel=0.15)  # other draws of the same distribution
    assert parts.high == pytest.approx(whole.high, rel=0.15)
