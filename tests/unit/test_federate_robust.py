"""What a server does about clients that lie: bounds, aggregates by name, who is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from federation_under_test import small_task

from netweight.errors import UsageError
from netweight.methods.federate import Federation, HyperFL, LocalTraining, fedavg, train
from netweight.methods.federate.aggregators.krum import MultiKrum
from netweight.methods.federate.algorithms.pfedhn import PFedHN
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.malicious_clients import WithMaliciousClients
from netweight.methods.federate.screening import screen
from netweight.methods.federate.settings import Lie
from netweight.methods.federate.updates import LowRankUpdate, Update

TRAINING = LocalTraining(epochs=2, lr=0.1, batch_size=10)
LIES = Lie.__args__  # type: ignore[attr-defined]
UNSEEN = ("knowing", "alie", "minmax", "late-sybils", "hidden-backdoor")  # lies that keep within what a screen can see
LOW_RANK_LIES = ("scaled", "claimed", "colluding", "knowing", "late")
ROBUST = ("bounded-mean", "screened-mean", "clipped-mean", "trimmed-mean", "median", "krum", "multi-krum")


def accuracy(run: object, liars: tuple[int, ...]) -> float:
    last = run.rounds[-1]  # type: ignore[attr-defined]
    honest = [value for client, value in last.after.items() if client not in liars]
    return sum(honest) / len(honest)


# How a client lies does not depend on its method, and screening sees dense or low-rank changes: of each kind of lie
# one meets the second.
BY_METHOD = [
    pytest.param(lie, name, marks=[] if name == "fedavg" or lie in LOW_RANK_LIES else [pytest.mark.study])
    for lie in LIES
    if lie != "backdoor"  # which is planted into images
    for name in ("fedavg", "hyperfl")
]


@pytest.mark.parametrize(("lie", "name"), BY_METHOD)
def test_a_liar_is_named_and_a_bounded_mean_survives(lie: Lie, name: str) -> None:
    method = {"fedavg": fedavg(TRAINING), "hyperfl": HyperFL(TRAINING, embedding=4, hidden=(16,))}[name]
    clients, liars = (7, (2, 5)) if lie == "colluding" else (5, (2,))
    task = small_task(clients=clients, n=40)
    learned = lie in ("scaled", "late", "free-rider")  # whose accuracy is looked at; the others are named at once
    rounds = 6 if learned or lie == "late-sybils" else 3
    run = train(task, WithMaliciousClients(method, lie, liars), Federation(rounds=rounds), workers=1)
    if (name, lie) == ("hyperfl", "label-flipped"):  # its own head, which it keeps, takes all of the lie up
        return
    named = [set(done.suspects) | set(done.refusals) for done in run.rounds]
    if lie not in UNSEEN:
        assert all(set(liars) & who for who in named[:3])
    assert all(value.isfinite().all() and value.abs().max() < 5 for value in run.state.values())
    if learned:
        assert accuracy(run, liars) > 0.8


LOUD = ("constant", "sign-flipped", "claimed")


@pytest.mark.parametrize(
    ("aggregator", "lie"),
    # The default aggregate meets every loud lie, the others one each.
    [(ROBUST[0], lie) for lie in LOUD] + [(name, LOUD[place % 3]) for place, name in enumerate(ROBUST[1:])],
)
def test_robust_aggregates_learn_beside_a_liar(aggregator: str, lie: Lie) -> None:
    method = WithMaliciousClients(fedavg(TRAINING), lie, (1,))
    run = train(small_task(clients=6, n=40), method, Federation(rounds=8, aggregator=aggregator), workers=1)
    assert accuracy(run, (1,)) > 0.8


def honest_updates(count: int, *, low_rank: bool = False) -> tuple[dict[str, torch.Tensor], list[Update]]:
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(shape, generator=generator) for name, shape in {"a": (6, 4), "b": (5,)}.items()}
    towards = {name: torch.randn(value.shape, generator=generator) for name, value in state.items()}

    def tensors() -> dict[str, torch.Tensor | LowRankUpdate]:
        own = {n: v + towards[n] + 0.3 * torch.randn(v.shape, generator=generator) for n, v in state.items()}
        left, right = torch.randn(6, 2, generator=generator), torch.randn(4, 2, generator=generator)
        return {**own, "a": LowRankUpdate(0.99, left, right)} if low_rank else own

    return state, [Update(client, 10 + client, tensors()) for client in range(count)]


@pytest.mark.parametrize("low_rank", [False, True])
def test_aggregates_are_flowers_own(low_rank: bool) -> None:
    theirs = pytest.importorskip("flwr.server.strategy.aggregate")
    state, updates = honest_updates(7, low_rank=low_rank)
    sent = dict.fromkeys(range(7), state)
    dense = [
        {n: v.dense(state[n]) if isinstance(v, LowRankUpdate) else v for n, v in update.tensors.items()}
        for update in updates
    ]
    arrays = [([value.numpy() for value in one.values()], update.n) for one, update in zip(dense, updates, strict=True)]
    far = Federation(most_norm=1e9, most_examples=1e9)

    def made(name: str) -> list[np.ndarray]:
        expected = {} if name == "median" else {name: {"liars": 2}}
        (one,) = screen(sent, state, updates, far.replace(aggregator=name, **expected), round=1)[0]
        found = one.tensors.items()
        return [(v.dense(state[n]) if isinstance(v, LowRankUpdate) else v).numpy() for n, v in found]

    for name, wanted in {
        "median": theirs.aggregate_median(arrays),
        "trimmed-mean": theirs.aggregate_trimmed_avg(arrays, 2 / 7),
        "krum": theirs.aggregate_krum(arrays, 2, 0),
    }.items():
        for mine, other in zip(made(name), wanted, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5)
    kept = screen(sent, state, updates, far.replace(aggregator=MultiKrum(liars=2)), round=1)[0]
    assert len(kept) == 5
    if not low_rank:
        assert not screen(sent, state, updates, Federation(), round=1)[1]


def test_weights_and_norms_are_bounded_by_the_rounds_medians() -> None:
    state, updates = honest_updates(5)
    sent = dict.fromkeys(range(5), state)
    far = {name: value + 100 * torch.ones_like(value) for name, value in state.items()}
    updates[3] = dataclasses.replace(updates[3], n=2**50, tensors=far)
    mean = Federation(aggregator="mean")
    kept, suspects = screen(sent, state, updates, mean, round=1)
    assert "claims 1125899906842624 examples; its weight is that of 36" in suspects[3]
    assert "times as far as the median client" in suspects[3]
    assert kept[3].n == 36

    def length(update: Update) -> float:
        return float(sum((v - state[n]).square().sum() for n, v in update.tensors.items()) ** 0.5)  # type: ignore[operator]

    products = sorted(update.n * length(update) for update in kept[:3] + kept[4:])
    assert kept[3].n * length(kept[3]) == pytest.approx(3 * products[2], rel=1e-4)  # weight times length is what acts
    assert kept[:3] == updates[:3]
    clipped = Federation(aggregator="clipped-mean")
    quiet, _ = screen(sent, state, updates, clipped, round=1)
    noisy, _ = screen(sent, state, updates, clipped.replace(clipped_mean={"noise": 0.5}), round=1)
    assert {one.n for one in quiet} == {1}  # claims that nobody vouches for do not count
    assert max(map(length, quiet)) == pytest.approx(sorted(map(length, updates))[2], rel=1e-4)
    assert len(noisy) == 1
    vouched = {client: 10 + client for client in range(5)}
    known, suspects = screen(sent, state, updates, clipped, round=1, registered=vouched)
    assert [one.n for one in known] == [10, 11, 12, 13, 14]
    assert "13 are registered" in suspects[3]
    influence = sorted(one.n * length(one) for one in known)
    assert influence[-1] == pytest.approx(influence[2], rel=1e-4)
    with pytest.raises(UsageError, match="clipped-mean: belongs to the aggregator 'clipped-mean'"):
        Federation(clipped_mean={"noise": 0.5}, aggregator="mean")


def test_nobody_is_named_where_noise_hides_all_directions() -> None:
    generator = torch.Generator().manual_seed(3)
    state = {"a": torch.zeros(100, 60), "b": torch.zeros(40)}
    noisy = [
        Update(client, 10, {n: torch.randn(v.shape, generator=generator) for n, v in state.items()})
        for client in range(20)
    ]
    agreeing = [
        dataclasses.replace(each, tensors={n: v + 0.5 for n, v in each.tensors.items()})
        for each in noisy  # type: ignore[operator]
    ]
    agreeing[7] = dataclasses.replace(agreeing[7], tensors={n: v - 0.5 for n, v in noisy[7].tensors.items()})  # type: ignore[operator]
    sent = dict.fromkeys(range(20), state)
    assert not screen(sent, state, noisy, Federation(), round=1)[1]
    assert set(screen(sent, state, agreeing, Federation(), round=1)[1]) == {7}


def test_rules_that_compare_clients_need_one_message_for_all() -> None:
    method = PFedHN(steps=2, hidden=(6,), training=TRAINING)
    with pytest.raises(UsageError, match="median has nothing to compare"):
        train(small_task(), method, Federation(rounds=1, aggregator="median"), workers=1)
    assert train(small_task(), method, Federation(rounds=1, aggregator="clipped-mean"), workers=1).rounds


@pytest.mark.parametrize(
    "lie", ["knowing", "alie", "minmax", "inner-product", "late-sybils", "hidden-backdoor", "colluding"]
)
def test_what_liars_send_depends_on_no_worker(lie: Lie) -> None:
    task, rounds = small_task(clients=5, n=20), 5 if lie == "late-sybils" else 2
    runs = [
        train(task, WithMaliciousClients(fedavg(TRAINING), lie, (1, 3)), Federation(rounds=rounds), workers=workers)
        for workers in (1, 3)
    ]
    assert all(torch.equal(value, runs[1].state[name]) for name, value in runs[0].state.items())


@pytest.mark.parametrize("claim", [1.0, 2.9, 1000.0])
def test_influence_is_bounded_whatever_a_liar_claims_and_sends(claim: float) -> None:
    """One liar moves the default aggregate by at most its equal share of the median length."""
    for length in (1.0, 2.0, 2.9, 50.0):
        state, updates = honest_updates(5)
        sent, towards = dict.fromkeys(range(5), state), {"a": torch.ones(6, 4), "b": -torch.ones(5)}
        far = {name: value + length * towards[name] for name, value in state.items()}
        lying = [*updates[:4], dataclasses.replace(updates[4], n=int(14 * claim), tensors=far)]
        honest, _ = screen(sent, state, updates[:4], Federation(), round=1)
        all_of_them, _ = screen(sent, state, lying, Federation(), round=1)
        one, two = aggregate(state, honest), aggregate(state, all_of_them)
        moved = float(sum((two[n] - one[n]).square().sum() for n in state) ** 0.5)
        usual = sorted(float(sum((v - state[n]).square().sum() for n, v in u.tensors.items()) ** 0.5) for u in updates)[
            2
        ]  # type: ignore[operator]
        assert moved <= 2 * usual / 5 * 1.01


def test_the_default_leaves_out_a_fifth_of_each_value_at_either_end_weighted_by_examples() -> None:
    state, updates = honest_updates(10)
    sent, vouched = dict.fromkeys(range(10), state), {client: 10 + client for client in range(10)}
    clipped, _ = screen(sent, state, updates, Federation(aggregator="clipped-mean"), round=1, registered=vouched)
    (joint,), _ = screen(sent, state, updates, Federation(), round=1, registered=vouched)
    assert [member.client for member in joint.members] == list(range(10))
    for name, base in state.items():
        products = np.sort(np.stack([one.n * (one.tensors[name] - base).numpy() for one in clipped]), axis=0)  # type: ignore[operator]
        wanted = products[2:8].mean(0) * 10 / sum(one.n for one in clipped)
        np.testing.assert_allclose((joint.tensors[name] - base).numpy(), wanted, atol=1e-5)  # type: ignore[operator]


def test_the_default_averages_low_rank_changes_and_trims_what_a_few_send_in_another_form() -> None:
    """Hypernetworks stay what they are; a liar cannot leave the trimming by sending a matrix as a low-rank change."""
    state, low = honest_updates(5, low_rank=True)
    sent = dict.fromkeys(range(5), state)
    (joint,), _ = screen(sent, state, low, Federation(), round=1)
    clipped, _ = screen(sent, state, low, Federation(aggregator="clipped-mean"), round=1)
    torch.testing.assert_close(joint.tensors["a"], aggregate(state, clipped)["a"])
    flat = {"a": torch.zeros(6, 4)}
    left, right = torch.zeros(6, 1), torch.zeros(4, 1)
    left[0], right[0] = -(24**0.5), 1.0  # as long as the others' change, and all of it in one value
    few = [Update(client, 10, {"a": torch.ones(6, 4)}) for client in range(4)]
    few.append(Update(4, 10, {"a": LowRankUpdate(1.0, left, right)}))
    (trimmed,), _ = screen(dict.fromkeys(range(5), flat), flat, few, Federation(), round=1)
    assert float(trimmed.tensors["a"][0, 0]) == pytest.approx(1.0)  # type: ignore[index]


def test_one_value_that_stands_alone_does_not_act_on_the_default() -> None:
    state = {"a": torch.zeros(200)}
    alone = torch.zeros(200)
    alone[7] = 200**0.5  # as long as the others
    updates = [Update(client, 10, {"a": torch.ones(200)}) for client in range(4)] + [Update(4, 10, {"a": alone})]
    sent = dict.fromkeys(range(5), state)
    (joint,), _ = screen(sent, state, updates, Federation(), round=1)
    assert float(joint.tensors["a"][7]) == pytest.approx(1.0)  # type: ignore[index]
    counters = {"a": torch.zeros(3), "batches": torch.tensor(0)}
    counted = [
        Update(c, 10, {"a": torch.ones(3), "batches": torch.tensor(n)}) for c, n in enumerate((5, 5, 6, 6, 2**40))
    ]
    for rule in ("bounded-mean", "median"):
        (one,), _ = screen(dict.fromkeys(range(5), counters), counters, counted, Federation(aggregator=rule), round=1)
        assert int(one.tensors["batches"]) == 6  # type: ignore[arg-type]
