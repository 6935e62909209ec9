"""Aggregation as a pure function, what is refused before it, and what may leave a client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from netweight.errors import PrivateTensor, UsageError
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.updates import (
    LowRankUpdate,
    Update,
    check_allow_list,
    from_wire,
    to_wire,
    validate_updates,
)

STATE = {"heads.weight": torch.zeros(3, 2), "heads.bias": torch.zeros(3)}


def update(client: int = 0, **changed: object) -> Update:
    tensors = {"heads.weight": torch.ones(3, 2) * client, "heads.bias": torch.ones(3) * client}
    values = {"client": client, "n": 1, "tensors": tensors, "round": 1} | changed
    return Update(**values)  # type: ignore[arg-type]


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    order=st.randoms(use_true_random=False),
)
def test_the_aggregate_is_the_weighted_mean_in_any_order(sizes: list[int], seed: int, order: object) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = {"a": torch.randn(4, 3, generator=generator, dtype=torch.float64)}
    updates = []
    for client, n in enumerate(sizes):
        value: torch.Tensor | LowRankUpdate = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        if client % 2:
            left, right = (torch.randn(rows, 2, generator=generator, dtype=torch.float64) for rows in (4, 3))
            value = LowRankUpdate(0.9, left, right)
        updates.append(Update(client, n, {"a": value}))
    dense = [
        (u.tensors["a"].dense(base["a"]) if isinstance(u.tensors["a"], LowRankUpdate) else u.tensors["a"]).numpy()
        for u in updates
    ]
    wanted = np.average(dense, axis=0, weights=sizes)
    found = aggregate(base, updates)["a"]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)
    order.shuffle(updates)  # type: ignore[attr-defined]
    assert torch.equal(aggregate(base, updates)["a"], found)


def test_aggregation_changes_nothing_that_it_was_given() -> None:
    state = {name: value.clone() for name, value in STATE.items()}
    updates = [update(1), update(2)]
    aggregate(state, updates)
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)
    assert torch.equal(updates[0].tensors["heads.bias"], torch.ones(3))  # type: ignore[arg-type]


def test_nothing_to_aggregate_is_refused() -> None:
    with pytest.raises(UsageError, match="no update"):
        aggregate(STATE, [])


def test_two_updates_of_one_client_are_not_averaged() -> None:
    with pytest.raises(UsageError, match="two updates"):
        aggregate(STATE, [update(1), update(1)])


FAULTS = {
    "replayed": (update(1, round=3), "answers round 3"),
    "no examples": (update(1, n=0), "0 examples"),
    "missing": (update(1, tensors={"heads.bias": torch.ones(3)}), r"missing tensors \['heads.weight'\]"),
    "extra": (update(1, tensors={**update(1).tensors, "embedding": torch.ones(3)}), r"extra tensors \['embedding'\]"),
    "shape": (update(1, tensors={**update(1).tensors, "heads.bias": torch.ones(4)}), r"shape \(4,\)"),
    "NaN": (update(1, tensors={**update(1).tensors, "heads.bias": torch.full((3,), torch.nan)}), "NaN or infinity"),
    "Inf": (update(1, tensors={**update(1).tensors, "heads.bias": torch.full((3,), torch.inf)}), "NaN or infinity"),
    "kind": (update(1, tensors={**update(1).tensors, "heads.bias": torch.ones(3, dtype=torch.int64)}), "dtype"),
    "NaN in a factor": (
        update(
            1,
            tensors={**update(1).tensors, "heads.weight": LowRankUpdate(torch.nan, torch.ones(3, 1), torch.ones(2, 1))},
        ),
        "NaN or infinity",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_update_is_named_and_the_others_pass(name: str) -> None:
    faulty, why = FAULTS[name]
    accepted, refused = validate_updates({0: STATE, 1: STATE, 2: STATE}, [update(2), faulty, update(0)], round=1)
    assert [good.client for good in accepted] == [0, 2]
    assert list(refused) == [1]
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(refused[1])


def test_silence_uninvited_guests_and_duplicates_are_named() -> None:
    accepted, refused = validate_updates(
        {0: STATE, 1: STATE, 3: STATE}, [update(0), update(0), update(9), update(3)], round=1
    )
    assert [good.client for good in accepted] == [3]
    assert refused == {
        0: "sent two updates in one round",
        9: "was not asked in this round",
        1: "sent nothing",
    }


def test_the_wire_brings_low_rank_matrices_whole() -> None:
    low = LowRankUpdate(0.25, torch.randn(3, 1), torch.randn(2, 1))
    sent = to_wire({"heads.weight": low, "heads.bias": torch.ones(3)})
    assert set(sent) == {"heads.weight|scale", "heads.weight|left", "heads.weight|right", "heads.bias"}
    found = from_wire(sent)["heads.weight"]
    assert isinstance(found, LowRankUpdate)
    base = torch.randn(3, 2)
    assert torch.equal(found.dense(base), low.dense(base))


@pytest.mark.parametrize("broken", ["missing", "misfit"])
def test_a_broken_low_rank_matrix_is_refused(broken: str) -> None:
    sent = to_wire({"a": LowRankUpdate(0.25, torch.randn(3, 1), torch.randn(2, 1))})
    if broken == "missing":
        del sent["a|right"]
    else:
        sent["a|right"] = torch.randn(2, 5)
    with pytest.raises(UsageError, match="'a'"):
        from_wire(sent)


def test_only_shared_names_leave() -> None:
    check_allow_list(["hypernetwork.heads.weight|left", "hypernetwork.trunk.0.bias"], ("hypernetwork.**",), client=3)
    with pytest.raises(PrivateTensor, match=r"Client 3 .*'embedding', 'head.weight'"):
        check_allow_list(["embedding", "head.weight", "hypernetwork.heads.bias"], ("hypernetwork.**",), client=3)
    with pytest.raises(PrivateTensor, match="none"):
        check_allow_list(["body.0.weight"], (), client=3)


def test_low_rank_matrices_of_many_rows_are_averaged_part_by_part() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(10_000, 3, generator=generator, dtype=torch.float64)
    lows = [
        LowRankUpdate(s, *(torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (10_000, 3)))
        for s in (0.9, 0.8)
    ]
    whole = torch.randn(10_000, 3, generator=generator, dtype=torch.float64)
    sent = [*lows, whole]
    found = aggregate({"w": base}, [Update(i, i + 1, {"w": value}) for i, value in enumerate(sent)])["w"]
    expected = (lows[0].dense(base) + 2 * lows[1].dense(base) + 3 * whole) / 6
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
