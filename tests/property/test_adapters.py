"""Laws of low-rank adapters, against dense matrices: algebra depends on the change alone, never on its factors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from netweight.errors import NameNotFound, UsageError
from netweight.nn import Adapter, AdapterStack, LowRank, combined

SHAPES = {"a.to_q": (4, 5), "b.to_v": (6, 3)}
few = settings(max_examples=40, deadline=None)


def drawn(rank, seed, scale=1.0, shapes=SHAPES):
    noise = torch.Generator().manual_seed(seed)
    return Adapter(
        {
            name: LowRank(torch.randn(rank, columns, generator=noise), torch.randn(rows, rank, generator=noise), scale)
            for name, (rows, columns) in shapes.items()
        }
    )


def dense(adapter):
    return torch.cat([adapter.factors[name].dense().double().flatten() for name in adapter.modules])


ranks, seeds, scales = st.integers(1, 4), st.integers(0, 2**31), st.floats(-3, 3).filter(lambda x: abs(x) > 0.01)


@few
@given(ranks, ranks, seeds, scales)
def test_inner_product_is_that_of_the_changes(one, other, seed, scale):
    x, y = drawn(one, seed, scale), drawn(other, seed + 1)
    assert x.inner(y) == pytest.approx(float(dense(x) @ dense(y)), rel=1e-4, abs=1e-3)
    assert x.norm() == pytest.approx(float(dense(x).norm()), rel=1e-5)


@few
@given(st.lists(st.tuples(ranks, seeds, scales), min_size=1, max_size=4))
def test_sum_is_exact_and_ranks_add(parts):
    adapters = [drawn(rank, seed) for rank, seed, _ in parts]
    weights = [weight for _, _, weight in parts]
    whole = combined(adapters, weights)
    expected = sum(weight * dense(adapter) for weight, adapter in zip(weights, adapters, strict=True))
    assert torch.allclose(dense(whole), expected, rtol=1e-4, atol=1e-4)
    assert {change.rank for change in whole.factors.values()} == {sum(rank for rank, _, _ in parts)}


@few
@given(ranks, st.integers(1, 4), seeds)
def test_truncation_is_the_best_and_says_its_error(rank, kept, seed):
    whole = drawn(rank, seed, 2.0)
    cut = whole.truncated(kept)
    lost = float((dense(whole) - dense(cut.adapter)).norm() / dense(whole).norm())
    assert cut.relative_error == pytest.approx(lost, abs=1e-5)
    best = sum(
        float((torch.linalg.svdvals(change.dense().double())[kept:] ** 2).sum()) for change in whole.factors.values()
    )
    assert cut.relative_error**2 * whole.norm() ** 2 == pytest.approx(best, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (40, 40)])
def test_few_components_of_a_matrix_are_those_of_its_decomposition(shape):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * torch.arange(1, shape[1] + 1) ** -0.5
    u, values, vh = torch.linalg.svd(drawn.double(), full_matrices=False)
    change = LowRank.of(drawn)
    for rank in (1, 3, 8):
        kept, lost = change.truncated(rank)
        best = (u[:, :rank] * values[:rank]) @ vh[:rank]
        torch.testing.assert_close(kept.dense().double(), best, rtol=0, atol=1e-6 * float(values[0]))
        torch.testing.assert_close(kept.up.T @ kept.up, kept.down @ kept.down.T, rtol=0, atol=1e-5)  # √σ on each side
        assert lost == pytest.approx(float(values[rank:].square().sum()), rel=1e-9)
    low = torch.outer(drawn[:, 0], drawn[0])
    assert LowRank.of(low).truncated(8)[0].rank == 1
    nothing, lost = LowRank.of(torch.zeros(shape)).truncated(2)
    assert (nothing.rank, lost) == (1, 0.0)
    assert not nothing.dense().any()


@few
@given(st.lists(st.tuples(ranks, seeds), min_size=1, max_size=5))
def test_stack_returns_each_adapter_as_it_was(parts):
    adapters = [drawn(rank, seed, 1 / 3) for rank, seed in parts]
    stack = AdapterStack.of(adapters)
    assert len(stack) == len(adapters)
    assert stack.shapes == SHAPES
    for number, adapter in enumerate(adapters):
        for name, change in stack.adapter(number).factors.items():
            assert torch.equal(change.down, adapter.factors[name].down)
            assert torch.equal(change.up, adapter.factors[name].up)
            assert change.scale == 1 / 3


def test_what_makes_no_adapter_is_refused():
    with pytest.raises(UsageError, match="low-rank"):
        LowRank(torch.zeros(0, 5), torch.zeros(4, 0))
    with pytest.raises(UsageError, match="at least one module"):
        Adapter({})
    with pytest.raises(UsageError, match="rank 0"):
        drawn(2, 0).truncated(0)
    with pytest.raises(UsageError, match="2 adapters cannot be summed with 1"):
        combined([drawn(1, 0), drawn(1, 1)], [1.0])
    with pytest.raises(UsageError, match=r"a\.to_q in different shapes"):
        combined([drawn(1, 0), drawn(1, 1, shapes={"a.to_q": (4, 4)})])
    with pytest.raises(UsageError, match="Adapter 1 has other"):
        AdapterStack.of([drawn(1, 0), drawn(1, 1, shapes={"a.to_q": (4, 5)})])
    with pytest.raises(NameNotFound, match=r"Only one of the two adapters changes 'a\.to_k'"):
        drawn(1, 0).inner(drawn(1, 0, shapes={"a.to_k": (4, 5), "b.to_v": (6, 3)}))


def test_nothing_is_truncated_to_nothing():
    none = Adapter({"a": LowRank(torch.zeros(2, 3), torch.zeros(4, 2))})
    cut = none.truncated(1)
    assert cut.relative_error == 0
    assert not cut.adapter.factors["a"].dense().any()
