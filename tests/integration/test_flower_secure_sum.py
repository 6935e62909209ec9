"""Secure sums message by message: the sum is the engine's, single updates are not to be seen, whoever vanishes."""

import importlib

import pytest

pytest.importorskip("flwr")

import flower_under_test
import numpy as np
from flower_federation import CLIENTS, METHODS, whole_task
from flower_under_test import NODES, Leaky, ToEachItsOwn, averaged, history_in, new_grid, same, serve
from flwr.app import ConfigRecord
from flwr.common import bytes_to_ndarray, ndarray_to_bytes

from netweight.errors import FederationStopped, UsageError
from netweight.methods.federate import train
from netweight.methods.federate.malicious_clients import WithMaliciousClients
from netweight.plugins.flower.secure_sum import CLIP, stream_mask

STEP = 2 * CLIP / 2**22
"""What a value is rounded to, by chance up or down; a weighted mean of three is off by less than three of these."""


@pytest.mark.parametrize("name", ["hyperfl", "fedavg"])
def test_the_sum_is_the_engines(name, tmp_path):
    """One round: later ones train on from rounded weights, which the engine does not have."""
    method = METHODS[name]
    state, rounds = serve(new_grid(method, secure_sum=True), method, tmp_path, secure_sum=True, rounds=1)
    run = train(whole_task(), method, averaged(rounds=1), workers=1)
    assert same(state, run.state, 3 * STEP)
    assert not same(state, run.state, STEP / 1e4)  # it did go through the rounding of masked sums
    assert rounds[0].after == run.rounds[0].after
    assert rounds[0].refusals == {}


def test_no_update_is_to_be_seen(tmp_path):
    """Nothing that a client sends holds its update or is near it: what is sent under masks looks like noise."""
    method = METHODS["fedavg"]
    grid = new_grid(method, secure_sum=True)
    serve(grid, method, tmp_path, secure_sum=True, rounds=1)
    clear = new_grid(method)
    serve(clear, method, tmp_path / "clear", rounds=1)
    assert len(clear.arrays) == 4 * CLIENTS
    assert grid.arrays == []
    masked = [vector for _, vector in grid.masked]
    assert len(masked) == CLIENTS
    words = np.concatenate([part.reshape(-1) for vector in masked for part in vector]).astype(np.float64) / 2**32
    assert 0 <= words.min() <= words.max() < 1
    assert abs(words.mean() - 0.5) < 5 / np.sqrt(12 * len(words))


@pytest.mark.parametrize("message", [1, 2, 3, 4], ids=["setup", "sharing", "masked", "unmasking"])
def test_who_vanishes_while_it_is_summed_is_left_out(message, tmp_path):
    method = METHODS["fedavg"]
    grid = new_grid(method, secure_sum=True)

    def vanish(node, reply, grid):
        """Client 1 does not answer one of the protocol's four messages."""
        vanish.count = getattr(vanish, "count", 0) + (reply.metadata.message_type == "train" and NODES[node] == 1)
        return None if NODES[node] == 1 and vanish.count >= message else reply

    grid.spoil = vanish
    state, rounds = serve(grid, method, tmp_path, secure_sum=True, rounds=1)
    counts = message == 4  # its masked change is there, and the others have the shares that undo its mask
    assert rounds[0].refusals == ({} if counts else {1: "sent nothing"})
    reference = new_grid(method, spoil=lambda node, reply, g: None if NODES[node] == 1 and not counts else reply)
    other, _ = serve(reference, method, tmp_path / "clear", rounds=1)
    assert same(state, other, 3 * STEP)


@pytest.mark.parametrize("spoiled", ["shape", "record"])
def test_what_a_client_sends_does_not_stop_the_server(spoiled, tmp_path, caplog):
    """The round fails, as nobody can tell whose words are wrong; the federation stops in order, its state saved."""
    method = METHODS["fedavg"]

    def spoil(node, reply, grid):
        record = reply.content.config_records.get("secaggplus_configs") if reply.has_content() else None
        if NODES[node] == 1 and record is not None and "masked_params" in record:
            wrong = ndarray_to_bytes(np.zeros((7, 7), np.int64))
            record["masked_params"] = [wrong] * 5 if spoiled == "shape" else "nothing"
        return reply

    with pytest.raises(FederationStopped):
        serve(new_grid(method, secure_sum=True, spoil=spoil), method, tmp_path, secure_sum=True, retries=0)
    assert "the sum" in caplog.text
    assert history_in(tmp_path) == []


def under_the_mask(change, *, client=1, round=1):
    """A client that changes what it has masked already: masks are added, so that this changes what is summed."""

    def spoil(node, reply, grid):
        record = reply.content.config_records.get("secaggplus_configs") if reply.has_content() else None
        if NODES[node] == client and reply.metadata.group_id == str(round) and record and "masked_params" in record:
            factor, *values = (bytes_to_ndarray(part) for part in record["masked_params"])
            record["masked_params"] = [ndarray_to_bytes(part % 2**32) for part in change(factor, values)]
        return reply

    return spoil


CHANGED = {
    "a weight of a thousand": (lambda factor, values: [factor + 1000 * 2**22, *values], "not those that clients"),
    "a value of a thousand": (
        lambda factor, values: [factor, values[0] + 250 * 2**22, *values[1:]],
        "out of the range",
    ),
}


@pytest.mark.parametrize("attack", CHANGED)
def test_what_a_client_claims_under_its_mask_is_seen_in_the_sum(attack, tmp_path, caplog):
    method, (change, said) = METHODS["fedavg"], CHANGED[attack]
    grid = new_grid(method, secure_sum=True, spoil=under_the_mask(change, round=2))
    with pytest.raises(FederationStopped):
        serve(grid, method, tmp_path, secure_sum=True, retries=0)
    assert said in caplog.text
    assert len(history_in(tmp_path)) == 1  # what was learned before stays
    state, _ = serve(new_grid(method, secure_sum=True), method, tmp_path, secure_sum=True)
    assert all(value.abs().max() < 5 for value in state.values())


def test_a_client_that_stays_in_range_moves_a_sum_no_farther_than_a_bound(tmp_path, caplog):
    """Every value moved by a third of the range: what the sum may be, and what no training makes."""
    method = METHODS["fedavg"]
    lie = under_the_mask(lambda factor, values: [factor, *(value + 2**22 // 3 for value in values)], round=3)
    states = {}
    for name, spoil, rounds in (("start", None, 2), ("lied to", lie, 3), ("honest", None, 3)):
        grid = new_grid(method, secure_sum=True, spoil=spoil)
        states[name], _ = serve(grid, method, tmp_path / name, secure_sum=True, rounds=rounds)
    start = states.pop("start")
    moved = [sum(float((state[n] - start[n]).square().sum()) for n in start) ** 0.5 for state in states.values()]
    assert "the sum moves" in caplog.text
    assert moved[0] < 4 * moved[1]


def test_a_claim_of_many_examples_takes_no_part_in_a_sum(tmp_path, monkeypatch):
    """It would make the honest clients' weights 0."""
    monkeypatch.setattr(flower_under_test, "CLIENTS", 4)
    nodes, method = {**NODES, 13: 3}, METHODS["fedavg"]

    def claim(node, reply, grid):
        if nodes[node] == 3 and reply.metadata.message_type == "query":
            reply.content["report"] = ConfigRecord({**reply.content["report"], "n": 2**40})
        return reply

    grid = new_grid(method, nodes=nodes, secure_sum=True, spoil=claim)
    state, rounds = serve(grid, method, tmp_path, secure_sum=True, rounds=1)
    assert rounds[0].refusals[3].startswith("reports 1099511627776 examples, more than")
    monkeypatch.undo()
    honest, _ = serve(new_grid(method, secure_sum=True), method, tmp_path / "honest", secure_sum=True, rounds=1)
    assert same(state, honest, 6 * STEP)


def test_a_liar_under_masks_is_named_by_the_sums_that_it_is_in(tmp_path, monkeypatch):
    """Nine clients in three sums, whose groups change: the liar is in an odd sum every time."""
    monkeypatch.setattr(flower_under_test, "CLIENTS", 9)
    nodes, method, liar, states = {20 + number: number for number in range(9)}, METHODS["fedavg"], 4, []
    for lying, name in ((WithMaliciousClients(method, "scaled", (liar,)), "lied to"), (method, "honest")):
        grid = new_grid(lying, nodes=nodes, secure_sum=True)
        asked = {"secure_sum": 3, "rounds": 4, "aggregator": "screened-mean"}
        state, rounds = serve(grid, method, tmp_path / name, **asked)
        states.append(state)
        if name == "lied to":
            odd = [client for done in rounds for client in done.suspects]
            assert odd.count(liar) == 4 > max(odd.count(client) for client in range(9) if client != liar)
            assert "is in a suspicious sum" in rounds[0].suspects[liar]
    assert same(*states, 0.3)


def test_fewer_than_are_wanted_are_not_unmasked(tmp_path):
    """Their sum, beside that of the next attempt with all, would give away the one who was missing."""
    method = METHODS["fedavg"]
    grid = new_grid(method, secure_sum=True)
    stages = []

    def vanish(node, reply, grid):
        stages.append((node, reply.metadata.message_type))
        return None if NODES[node] == 1 and stages.count((node, "train")) == 3 else reply

    grid.spoil = vanish
    with pytest.raises(FederationStopped):
        serve(grid, method, tmp_path, secure_sum=True, rounds=1, min_clients=3, retries=0)
    assert len(grid.masked) == 2
    assert max(stages.count((node, "train")) for node in NODES) == 3  # nobody was asked for shares, the fourth message


@pytest.mark.parametrize("client_masks", [True, False])
def test_client_and_server_must_agree(client_masks, tmp_path, caplog):
    method = METHODS["fedavg"]
    grid = new_grid(method, secure_sum=client_masks)
    with pytest.raises(FederationStopped):
        serve(grid, method, tmp_path, secure_sum=not client_masks)
    assert "this client sends them" in caplog.text


def test_a_sum_over_two_is_refused(tmp_path):
    method, nodes = METHODS["fedavg"], {10: 0, 11: 1}
    with pytest.raises(FederationStopped):
        serve(new_grid(method, nodes=nodes, secure_sum=True), method, tmp_path, secure_sum=True)


def test_a_change_too_large_to_be_summed_is_not_sent(tmp_path, caplog):

    from netweight.methods.federate import LocalTraining, fedavg

    wild = fedavg(LocalTraining(epochs=1, batch_size=8, lr=1e4))
    with pytest.raises(FederationStopped):
        serve(new_grid(wild, secure_sum=True), wild, tmp_path, secure_sum=True)
    assert "can be summed under masks" in caplog.text


def test_a_private_tensor_is_refused_under_masks_too(tmp_path, caplog):
    with pytest.raises(FederationStopped):
        serve(
            new_grid(Leaky(METHODS["fedavg-private-head"]), secure_sum=True),
            METHODS["fedavg-private-head"],
            tmp_path,
            secure_sum=True,
        )
    assert "was about to send the private tensors" in caplog.text


def test_messages_of_each_clients_own_have_no_sum(tmp_path):
    method = ToEachItsOwn()
    with pytest.raises(UsageError, match="cannot be summed"):
        serve(new_grid(method, secure_sum=True), method, tmp_path, secure_sum=True)


def test_masks_depend_on_the_whole_secret():
    """Flower's own masks do not: two secrets whose words have the same exclusive or give the same mask."""
    secret, twin = bytes(range(32)), bytes(range(4, 8)) + bytes(range(4)) + bytes(range(8, 32))
    shapes = [(1000,), (), (2, 3)]
    mine, other, again = (stream_mask(seed, 2**32, shapes) for seed in (secret, twin, secret))
    assert [part.shape for part in mine] == shapes
    assert all((a == b).all() for a, b in zip(mine, again, strict=True))
    assert (mine[0] == other[0]).sum() <= 1
    assert mine[0].min() >= 0
    assert mine[0].max() < 2**32
    original = importlib.import_module("flwr.common.secure_aggregation.secaggplus_utils").pseudo_rand_gen
    assert (original(secret, 2**32, shapes)[0] == original(twin, 2**32, shapes)[0]).all()
