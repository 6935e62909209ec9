"""Laws of weight spaces: what may not depend on how adapters are written, and what must be each other's inverse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from spaces_under_test import bank_of, dense, flat, random_adapters, regauged, sharing_adapters

from netweight.methods.space.gram import inner_products, norms_of
from netweight.methods.space.space import WeightSpace
from netweight.nn.lora import AdapterStack

few = settings(max_examples=15, deadline=None)
seeds = some.integers(0, 10_000)


def aligned(found, expected):
    return found * (found * expected).sum(dim=0).sign()


@few
@given(seeds, some.integers(3, 12), some.lists(some.integers(1, 4), min_size=1, max_size=3))
def test_inner_products_depend_on_changes_alone(seed, count, ranks):
    adapters = random_adapters(count, seed=seed, ranks=ranks)
    one, other = AdapterStack.of(adapters), AdapterStack.of(regauged(adapters, seed=seed))
    expected = dense(adapters) @ dense(adapters).T
    torch.testing.assert_close(inner_products(one, one), expected, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(inner_products(one, other), expected, rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(norms_of(other), expected.diagonal(), rtol=1e-7, atol=1e-6)


@few
@given(seeds, some.integers(4, 14), some.integers(1, 3))
def test_the_gauge_changes_nothing(seed, count, components):
    adapters = random_adapters(count, seed=seed)
    one = WeightSpace.fit(bank_of(adapters), components=components)
    other = WeightSpace.fit(bank_of(regauged(adapters, seed=seed)), components=components)
    torch.testing.assert_close(other.scores, one.scores, rtol=1e-4, atol=1e-3)
    point = one.scores[0] * 1.3
    torch.testing.assert_close(flat(other.changes(point)), flat(one.changes(point)), rtol=1e-3, atol=1e-3)


REPRESENTATIONS = [
    ("delta", {}), ("delta", {"solver": "streaming", "sketch": 4}), ("factors", {}),
    ("factors", {"solver": "streaming", "standardize": False}),
]  # fmt: skip


@pytest.mark.parametrize(("representation", "how"), REPRESENTATIONS)
@few
@given(seed=seeds)
def test_scores_and_points_fit_each_other(representation, how, seed):
    """Variances of scores are the eigenvalues; an adapter's projection is its score; a point's is itself."""
    adapters = sharing_adapters(12, seed=seed)
    space = WeightSpace.fit(bank_of(adapters), components=4, representation=representation, **how)
    torch.testing.assert_close(space.scores.mean(dim=0), torch.zeros(4), rtol=0, atol=1e-4)
    torch.testing.assert_close(space.scores.std(dim=0), space.deviations, rtol=1e-4, atol=0)
    correlations = space.scores.T @ space.scores / (11 * space.deviations[:, None] * space.deviations)
    torch.testing.assert_close(correlations, torch.eye(4), rtol=0, atol=1e-4)
    for number in (0, 7):
        torch.testing.assert_close(space.project(adapters[number]), space.scores[number], rtol=1e-3, atol=2e-3)
    points = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) * space.deviations
    changes = space.changes(points)
    for point, row in zip(points, flat(changes), strict=True):
        adapter = space.adapter(point)
        torch.testing.assert_close(dense([adapter])[0].float(), row, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(flat(space.changes(point)), row, rtol=1e-4, atol=1e-4)
        if representation != "factors":  # whose rows are not what the changes are linear in, but its own factors
            torch.testing.assert_close(space.project(adapter), point, rtol=1e-3, atol=5e-3)
