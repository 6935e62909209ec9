import importlib
import math

import numpy
import pytest

from netweight.errors import MissingExtra, UsageError
from netweight.metrics.intervals import bootstrap, paired_ratio, proportion, t_interval

scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is in the evidence extra")


def test_the_interval_is_scipys():
    samples = numpy.random.default_rng(1).lognormal(size=40)
    for statistic, function, method in (("mean", numpy.mean, "BCa"), ("median", numpy.median, "percentile")):
        ours = bootstrap(samples, statistic, seed=5, resamples=999)
        theirs = scipy_stats.bootstrap(
            (samples,), function, n_resamples=999, method=method, rng=numpy.random.default_rng(5)
        ).confidence_interval
        assert ours.ci95 == (theirs.low, theirs.high)
        assert ours.estimate == function(samples)
        assert ours.n == 40
        assert method in ours.method


def test_the_seed_decides():
    samples = numpy.random.default_rng(2).normal(size=20)
    first, again, other = (bootstrap(samples, seed=seed, resamples=500) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(("n", "least"), [(20, 0.9), (60, 0.92)])
def test_bootstrap_intervals_of_a_mean_cover_the_truth_about_95_times_in_100(n, least):
    rng = numpy.random.default_rng(3)
    hits = 0
    for repetition in range(300):
        interval = bootstrap(rng.exponential(2.0, size=n), seed=repetition, resamples=400)
        hits += interval.low <= 2.0 <= interval.high
    assert least - 0.03 <= hits / 300 <= 0.99


def test_students_intervals_of_three_samples_cover_the_truth():
    rng = numpy.random.default_rng(4)
    intervals = [t_interval(rng.normal(1.0, 0.3, size=3)) for _ in range(2000)]
    hits = sum(interval.low <= 1.0 <= interval.high for interval in intervals)
    assert 0.935 <= hits / 2000 <= 0.965


def test_students_interval_is_scipys():
    samples = [1.0, 2.5, 3.0, 7.0]
    theirs = scipy_stats.ttest_1samp(samples, 0).confidence_interval(0.95)
    assert t_interval(samples).ci95 == pytest.approx((theirs.low, theirs.high))


def test_wilsons_interval_by_hand():
    z, n, p = 1.959963984540054, 20, 0.9
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    assert proportion(18, 20).ci95 == pytest.approx((center - half, center + half))
    assert proportion(0, 20).low == 0.0
    assert proportion(20, 20).high == pytest.approx(1.0)


def test_paired_ratios_cancel_what_pairs_share():
    rng = numpy.random.default_rng(6)
    mood = rng.uniform(1, 10, size=15)  # the machine's load, common to both of a pair
    ratio = paired_ratio(3 * mood * rng.normal(1, 0.01, 15), mood, seed=0)
    assert ratio.estimate == pytest.approx(3, rel=0.01)
    assert ratio.high - ratio.low < 0.1
    inverse = paired_ratio(mood, 3 * mood, seed=0)
    assert inverse.estimate == pytest.approx(1 / 3)
    assert inverse.low == pytest.approx(inverse.high)


def test_equal_samples_have_an_interval_of_no_width():
    assert bootstrap([2.0] * 6, "median", seed=0).ci95 == (2.0, 2.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bootstrap([1, 2, 3, 4], seed=0), "at least 5 samples and got 4.*t_interval"),
        (lambda: bootstrap([1, 2, 3, 4, math.nan], seed=0), "sample 4 is nan"),
        (lambda: bootstrap(numpy.ones((2, 3)), seed=0), "shape"),
        (lambda: bootstrap([1, 2, 3, 4, 0], "geometric mean", seed=0), "Unknown statistic"),
        (lambda: bootstrap([1, 2, 3, 4, 5], "mode", seed=0), "mode"),
        (lambda: t_interval([1]), "at least 2"),
        (lambda: proportion(3, 2), "not a proportion"),
        (lambda: proportion(0, 0), "not a proportion"),
        (lambda: paired_ratio([1] * 5, [1] * 6, seed=0), "pairs"),
        (lambda: paired_ratio([1] * 5, [1, 1, 1, 1, 0], seed=0), "above 0"),
    ],
)
def test_samples_that_do_not_do_are_refused(call, says):
    with pytest.raises(UsageError, match=says):
        call()


def test_without_scipy_the_pip_command_is_named(monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(MissingExtra, match=r"pip install .*evidence"):
        t_interval([1.0, 2.0])
