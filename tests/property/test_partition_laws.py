"""Partitions of any labels: valid indices, exact sizes and mixtures, the same for the same seed."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from netweight.errors import UsageError
from netweight.methods.federate.partition import (
    EMNIST_BYCLASS_GROUPS,
    TEN_CLASS_GROUPS,
    by_writer,
    dirichlet,
    dominant_groups,
    matching_test,
)

SEEDS = st.integers(0, 2**32)


@st.composite
def labels_of(draw, classes=None, least=1, most=60):
    """Labels in random order, every class with some samples."""
    n = classes or draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(least, most), min_size=n, max_size=n))
    labels = np.repeat(np.arange(n), counts)
    np.random.default_rng(draw(SEEDS)).shuffle(labels)
    return torch.from_numpy(labels)


@given(
    labels_of(classes=10, least=40),
    st.integers(1, 30),
    st.integers(1, 60),
    st.floats(0, 1),
    SEEDS,
    st.integers(0, 50),
)
def test_dominant_groups_have_their_sizes_and_shares(labels, clients, per_client, uniform, seed, start):
    options = {"clients": clients, "per_client": per_client, "groups": TEN_CLASS_GROUPS, "uniform": uniform}
    parts = dominant_groups(labels, **options, seed=seed, start=start)
    again = dominant_groups(labels, **options, seed=seed, start=start)
    even = int(per_client * uniform)
    assert len(parts) == clients
    for client, (part, same) in enumerate(zip(parts, again, strict=True)):
        assert torch.equal(part, same)
        assert part.dtype == torch.int64
        assert len(part) == len(part.unique()) == per_client
        assert 0 <= int(part.min())
        assert int(part.max()) < len(labels)
        counts = torch.bincount(labels[part], minlength=10).numpy()
        dominant = list(TEN_CLASS_GROUPS[client % 5])
        others = [label for label in range(10) if label not in dominant]
        # What the uniform share leaves is all in dominant classes, and no share prefers a class by more than 1.
        assert set(counts[others]) <= {even // 10, -(-even // 10)}
        assert counts[dominant].sum() == per_client - counts[others].sum()
        assert np.ptp(counts[dominant]) <= 2


@given(labels_of(classes=10, least=30), st.integers(1, 8), SEEDS)
def test_runs_use_a_class_up_before_they_share_it(labels, clients, seed):
    parts = dominant_groups(labels, clients=clients, per_client=10, groups=TEN_CLASS_GROUPS, uniform=0, seed=seed)
    taken = torch.cat(parts)
    for label in range(10):
        own = taken[labels[taken] == label]
        size = int((labels == label).sum())
        if len(own) <= size - 4:  # a run of at most 4 may skip what is left at the end
            assert len(own.unique()) == len(own)


def test_the_paper_sizes_on_labels_like_its_own():
    labels = torch.arange(60_000) % 10
    parts = dominant_groups(labels, clients=20, per_client=600, groups=TEN_CLASS_GROUPS, seed=2022)
    assert len(torch.cat(parts).unique()) == 12_000  # 20 clients need no sample twice
    assert torch.bincount(labels[parts[3]]).tolist() == [12, 12, 12, 12, 12, 12, 172, 172, 172, 12]
    shared = dominant_groups(labels, clients=100, per_client=600, groups=TEN_CLASS_GROUPS, seed=2022)
    assert len(torch.cat(shared).unique()) < 60_000
    characters = torch.arange(62 * 1900) % 62
    parts = dominant_groups(characters, clients=3, per_client=1000, groups=EMNIST_BYCLASS_GROUPS, seed=2022)
    for part, group in zip(parts, EMNIST_BYCLASS_GROUPS, strict=True):
        assert int(torch.isin(characters[part], torch.tensor(group)).sum()) >= 800


def test_a_start_passes_samples_over_and_a_seed_decides_on_the_order():
    labels = torch.arange(100) % 2
    options = {"clients": 1, "per_client": 50, "groups": [(0, 1)]}
    first, second = (dominant_groups(labels, **options, seed=1, start=start)[0] for start in (0, 25))
    assert len(torch.cat([first, second]).unique()) == 100
    assert not torch.equal(first, dominant_groups(labels, **options, seed=2)[0])


@given(labels_of(), st.integers(1, 8), st.floats(0.05, 50), SEEDS)
def test_dirichlet_divides_every_sample_once(labels, clients, alpha, seed):
    parts = dirichlet(labels, clients=clients, alpha=alpha, seed=seed, minimum=0)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels)))
    again = dirichlet(labels, clients=clients, alpha=alpha, seed=seed, minimum=0)
    assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))


def test_dirichlet_has_its_marginals():
    """A client's share of a class has mean 1/K and variance (1/K)(1 − 1/K)/(Kα + 1), as the distribution says."""
    labels, clients, alpha = torch.arange(40_000) % 40, 5, 0.5
    shares = []
    for seed in range(10):
        parts = dirichlet(labels, clients=clients, alpha=alpha, seed=seed)
        shares.append(np.stack([np.bincount(labels[part].numpy(), minlength=40) / 1000 for part in parts]))
    values = np.concatenate(shares, axis=1)
    np.testing.assert_allclose(values.sum(0), 1)
    np.testing.assert_allclose(values.mean(1), 1 / clients, atol=0.05)
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    np.testing.assert_allclose(values.var(1), expected, rtol=0.3)


@given(st.integers(0, 40), SEEDS)
def test_dirichlet_gives_everyone_the_minimum(minimum, seed):
    labels = torch.arange(1000) % 10
    assert min(map(len, dirichlet(labels, clients=10, alpha=1.0, seed=seed, minimum=minimum))) >= minimum


@given(st.lists(st.integers(0, 9), min_size=1, max_size=80), st.integers(1, 4))
def test_writers_stay_together(writers, each):
    writers = torch.tensor(writers)
    known = sorted(set(writers.tolist()))
    assume(each <= len(known))
    parts = by_writer(writers, writers_per_client=each)
    assert len(parts) == len(known) // each
    for number, part in enumerate(parts):
        own = known[number * each : (number + 1) * each]
        assert part.tolist() == [index for index, writer in enumerate(writers.tolist()) if writer in own]


@given(labels_of(classes=6, least=20), labels_of(classes=6, least=20), st.integers(1, 5), SEEDS)
def test_matching_tests_have_the_mixture_of_training(labels, test_labels, clients, seed):
    parts = dirichlet(labels, clients=clients, alpha=1.0, seed=seed, minimum=1)
    tests = matching_test(labels, parts, test_labels, per_client=20, seed=seed)
    for part, test in zip(parts, tests, strict=True):
        assert len(test) == len(test.unique()) == 20
        trained, tested = (torch.bincount(own, minlength=6).numpy() for own in (labels[part], test_labels[test]))
        np.testing.assert_array_less(np.abs(tested - trained / trained.sum() * 20), 1)


def test_matching_tests_take_no_more_than_there_is():
    labels, test_labels = torch.tensor([0] * 9 + [1]), torch.tensor([0] * 3 + [1] * 50)
    (test,) = matching_test(labels, [torch.arange(10)], test_labels, per_client=50, seed=0)
    assert torch.bincount(test_labels[test]).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: dominant_groups(y, clients=0, per_client=1, groups=[(0,)], seed=0), "clients=0"),
        (lambda y: dominant_groups(y, clients=1, per_client=1, groups=[(0, 5)], seed=0), r"\(0, 5\).*2 classes"),
        (lambda y: dominant_groups(y, clients=1, per_client=1, groups=[()], seed=0), "dominant classes"),
        (lambda y: dominant_groups(y, clients=1, per_client=1, groups=[], seed=0), "no groups"),
        (lambda y: dominant_groups(y, clients=1, per_client=60, groups=[(0,)], seed=0), "Client 0 needs 54 .* class 0"),
        (lambda y: dominant_groups(y.float(), clients=1, per_client=1, groups=[(0,)], seed=0), "float32"),
        (lambda y: dirichlet(y, clients=2, alpha=0.0, seed=0), "alpha"),
        (lambda y: dirichlet(y, clients=2, alpha=float("nan"), seed=0), "alpha"),
        (lambda y: dirichlet(y, clients=11, alpha=1.0, seed=0), "11 clients with at least 10"),
        (lambda y: dirichlet(y, clients=50, alpha=0.01, seed=0, minimum=2), "1000 random partitions"),
        (lambda y: by_writer(y, writers_per_client=3), "3 of 2 writers"),
        (lambda y: matching_test(y, [torch.arange(0)], y, per_client=3, seed=0), "training samples"),
        (lambda y: matching_test(y, [(y == 0).nonzero()[:, 0]], y[y == 1], per_client=3, seed=0), "class of client 0"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(torch.arange(100) % 2)


def test_a_class_without_test_samples_has_no_part_in_the_mixture():
    labels = torch.arange(100) % 3
    for missing in range(3):
        tests = labels[labels != missing]
        (found,) = matching_test(labels, [torch.arange(99)], tests, per_client=10, seed=0)
        assert torch.bincount(tests[found], minlength=3).tolist() == [0 if c == missing else 5 for c in range(3)]
