"""Flower's apps message by message, in this process: the same model as the engine's, nothing private in what is sent,
and whatever clients may do wrong.
"""

import itertools
import json
import math
import secrets
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
with warnings.catch_warnings():  # typer, which Flower imports, asks click for names that click is going to drop
    warnings.filterwarnings("ignore", "'click.utils", DeprecationWarning)
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict

import flower_under_test
import numpy as np
import torch
from flower_federation import CLIENTS, METHODS, client_data, halves, whole_task
from flower_under_test import (
    NODES,
    GridHere,
    Leaky,
    ToEachItsOwn,
    averaged,
    history_in,
    new_grid,
    same,
    serve,
    task_of_client,
    task_of_server,
)

from netweight.errors import FederationStopped, UsageError
from netweight.job import Job
from netweight.methods.federate import Federation, Task, train
from netweight.methods.federate.accounting import guarantee, privacy_of
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.methods.federate.protections import HardenedMethod, UpdateNoise
from netweight.methods.federate.settings import Budget
from netweight.plugins.flower import (
    HISTORY,
    MethodStrategy,
    client_app,
    export_private,
    import_private,
    server_app,
    strategy,
)
from netweight.store import open_store

TOLERANCE = 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_both_engines_give_the_same_model(name, tmp_path):
    method, settings = METHODS[name], averaged(rounds=3)
    grid = new_grid(method, tmp_path / "nodes", seed=settings.seed)
    state, rounds = serve(grid, method, tmp_path, rounds=3)
    run = train(whole_task(), method, settings, workers=1)
    assert same(state, run.state, TOLERANCE if name == "hyperfl" else 0)
    for mine, theirs in zip(rounds, run.rounds, strict=True):
        if name == "dp-fedavg":  # beside noise a client says what it has spent, and nothing else
            assert (mine.before, mine.after, mine.loss) == ({}, {}, {})
            assert all(
                value == pytest.approx(guarantee([privacy_of(method, 20 + 4 * client)] * mine.round, 1e-5).epsilon)
                for client, value in mine.epsilon.items()
            )
            continue
        assert (mine.before, mine.after, mine.clients) == (theirs.before, theirs.after, theirs.clients)
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-5)
    for client in range(CLIENTS):
        kept = exported(tmp_path, client) if run.private[client] else {}  # a method that keeps nothing writes nothing
        assert same(kept, run.private[client], TOLERANCE)


def exported(folder, client):
    """What a client keeps, by name."""
    with open_store(export_private(folder / "nodes", client, folder / f"{client}.safetensors")) as store:
        return {key: store.get(key) for key in store.names()}


def test_sampling_and_rehearsed_drop_out_are_the_engines(tmp_path):
    method, settings = METHODS["fedavg"], {"rounds": 4, "fraction": 0.7, "drop_out": 0.3, "min_clients": 1}
    state, rounds = serve(new_grid(method), method, tmp_path, **settings)
    run = train(whole_task(), method, averaged(**settings, retries=1), workers=1)
    assert same(state, run.state)
    assert [(done.clients, done.attempts, sorted(done.loss)) for done in rounds] == [
        (done.clients, done.attempts, sorted(done.loss)) for done in run.rounds
    ]


@pytest.mark.parametrize("name", ["hyperfl", "fedavg", "fedavg-private-head", "local", "pfedhn-pc"])
def test_no_private_tensor_leaves_a_client(name, tmp_path):
    """Not by name, and not by any name: the bytes of what is private are in nothing that is sent."""
    method = METHODS[name]
    grid = new_grid(method, tmp_path / "nodes")
    serve(grid, method, tmp_path)
    assert len(grid.traffic) == 2 * CLIENTS
    for client in range(CLIENTS):
        kept = exported(tmp_path, client) if name != "fedavg" else {}
        private = [value.numpy().tobytes() for value in kept.values()]
        assert bool(private) == (name != "fedavg")
        last = [sent for node, sent in grid.traffic if NODES[node] == client][-1]
        assert not any(tensor in data for tensor in private for data in last.values())
    shared = {name.partition(".")[0] for name in method.shared}
    sent = b"".join(data for _, messages in grid.traffic for data in messages.values())
    kinds = {"hypernetwork": b"hypernetwork.", "body": b'"body.', "head": b'"head.'}
    assert {kind for kind, sign in kinds.items() if sign in sent} == shared


def test_a_private_tensor_is_refused_before_anything_is_sent(tmp_path, caplog):
    grid = new_grid(Leaky(METHODS["hyperfl"]))
    with pytest.raises(FederationStopped):
        serve(grid, METHODS["hyperfl"], tmp_path)
    assert "was about to send the private tensors" in caplog.text
    assert all(b"embedding" not in name.encode() for _, sent in grid.traffic for name in sent)
    assert all(len(sent) == 1 for _, sent in grid.traffic)  # an error, which has no record


def spoiled(change, *, client=1, round=2):
    """Change the reply of one client in one round."""

    def spoil(node, reply, grid):
        wrong = reply.metadata.message_type == "train" and NODES[node] == client
        return change(reply, grid) if wrong and reply.metadata.group_id == str(round) else reply

    return spoil


def with_arrays(change):
    def spoil(reply, grid):
        arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
        reply.content["arrays"] = ArrayRecord({name: Array(value) for name, value in change(arrays).items()})
        return reply

    return spoil


def first(change):
    """Change the first tensor."""
    return with_arrays(lambda arrays: {k: change(v) if i == 0 else v for i, (k, v) in enumerate(arrays.items())})


def reported(**values):
    def spoil(reply, grid):
        reply.content["report"] = ConfigRecord({**reply.content["report"], **values})
        return reply

    return spoil


def false_header(reply, grid):
    """Announce an array of terabytes."""
    name, array = next(iter(reply.content["arrays"].items()))
    data = np.zeros(3, np.float32)
    array.data = array.data[:0] + Array(data).data.replace(b"(3,), ", b"(999999999999,), ".ljust(6))[: len(array.data)]
    reply.content["arrays"][name] = array
    return reply


def without_records(reply, grid):
    reply.content = RecordDict({"metrics": MetricRecord({"loss": 0.1})})
    return reply


def vanished(reply, grid):
    return None


FAULTS = {
    "nan": (first(lambda value: value * np.float32(math.nan)), "NaN"),
    "infinity": (first(lambda value: value + np.float32(math.inf)), "NaN or infinity"),
    "shape": (first(lambda value: np.zeros((*value.shape, 2), value.dtype)), "shape"),
    "dtype": (first(lambda value: value.astype(np.float64)), "dtype"),
    "missing": (with_arrays(lambda arrays: dict(list(arrays.items())[1:])), "missing tensors"),
    "extra": (with_arrays(lambda arrays: {**arrays, "body.extra": np.zeros(2, np.float32)}), "extra tensors"),
    "replayed round": (reported(round=1), "replayed or late"),
    "someone else": (reported(client=0), "in the name of client 0"),
    "no examples": (reported(n=0), "0 examples"),
    "text for a number": (reported(n="many"), "cannot be read"),
    "no records": (without_records, "cannot be read"),
    "false header": (false_header, "cannot be read"),
    "nothing": (vanished, "sent nothing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_client_is_named_and_the_round_goes_on(fault, tmp_path, caplog):
    change, said = FAULTS[fault]
    method = METHODS["fedavg"]
    state, rounds = serve(new_grid(method, spoil=spoiled(change)), method, tmp_path, rounds=3)
    assert [list(done.refusals) for done in rounds] == [[], [1], []]
    assert said in rounds[1].refusals[1]
    assert sorted(rounds[1].after) == [0, 2]
    assert "client 1 left out" in caplog.text
    assert all(value.isfinite().all() for value in state.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_arrays(lambda a: {k: v for k, v in a.items() if not k.endswith("|left")}), "cannot be read"),
        (with_arrays(lambda a: {k: v * (np.float32(1e30) if "|" in k else 1) for k, v in a.items()}), "overflow"),
        (with_arrays(lambda a: {k: v * (math.nan if k.endswith("|scale") else 1) for k, v in a.items()}), "NaN"),
    ],
)
def test_faulty_low_rank_factors_are_refused(change, said, tmp_path):
    method = METHODS["hyperfl"]
    state, rounds = serve(new_grid(method, spoil=spoiled(change)), method, tmp_path)
    assert said in rounds[1].refusals[1]
    assert all(value.isfinite().all() for value in state.values())


def test_low_rank_factors_for_a_message_of_its_own_are_taken_as_what_they_are(tmp_path):
    """A method may expect dense tensors: factors, which any client can send, neither stop the server nor mislead it."""

    def factors(arrays):
        first = "body.0.weight"
        rank = {"scale": np.ones(1), "left": np.zeros((6, 1), np.float32), "right": np.zeros((8, 1), np.float32)}
        others = {name: value for name, value in arrays.items() if name != first}
        return {**others, **{f"{first}|{part}": value for part, value in rank.items()}}

    method = METHODS["pfedhn"]
    _, rounds = serve(new_grid(method, spoil=spoiled(with_arrays(factors))), method, tmp_path)
    assert [dict(done.refusals) for done in rounds] == [{}, {}]


def test_a_client_whose_update_was_refused_goes_on_from_where_it_was(tmp_path):
    """As in the engine of one process, a refused round leaves no trace in a client's private tensors."""
    method = METHODS["fedavg-private-head"]
    spoil = spoiled(FAULTS["nan"][0])
    state, _ = serve(new_grid(method, tmp_path / "a", spoil=spoil), method, tmp_path / "first", rounds=3)
    # The same, but the client never sees round 2.
    grid = new_grid(method, tmp_path / "b", spoil=spoiled(vanished))
    other, _ = serve(grid, method, tmp_path / "second", rounds=3)
    assert same(state, other)


@pytest.mark.parametrize("call", ["get_node_ids", "push_messages", "pull_messages"])
def test_a_superlink_whose_database_is_locked_is_asked_again(call, tmp_path, monkeypatch):
    """As Flower's grid says it: an error of httpx that holds the response."""

    class Failed(Exception):
        def __init__(self, code):
            self.response = SimpleNamespace(status_code=code)

    monkeypatch.setattr(strategy, "_AGAIN", (0.0, 0.0))
    method, codes = METHODS["fedavg"], [500, 500]
    plain, _ = serve(new_grid(method), method, tmp_path / "plain", rounds=2)
    grid = new_grid(method)
    sound = getattr(grid, call)

    def failing(*arguments):
        if codes:
            raise Failed(codes.pop())
        return sound(*arguments)

    monkeypatch.setattr(grid, call, failing)
    state, rounds = serve(grid, method, tmp_path, rounds=2)
    assert same(state, plain)
    assert not codes
    assert not any(done.refusals for done in rounds)
    codes.append(403)
    with pytest.raises(Failed):
        serve(grid, method, tmp_path / "forbidden", rounds=1)


def test_an_exception_in_a_client_is_named(tmp_path):
    asked = []

    def broken(context):
        asked.append(context.node_config["partition-id"])
        if asked[-1] == 1 and asked.count(1) > 1:  # it could still say who it is
            raise RuntimeError("the disk is gone")
        return task_of_client(context)

    method = METHODS["fedavg"]
    grid = GridHere({node: client_app(broken, method) for node in NODES}, NODES)
    with pytest.raises(FederationStopped, match=r"the disk is gone.* in each of the 2 rounds"):  # no quiet end
        serve(grid, method, tmp_path)
    history = json.loads((tmp_path / HISTORY).read_text())["rounds"]
    assert all("the disk is gone" in done["refusals"]["1"] for done in history)
    assert all(done["errors"] == [1] for done in history)


def test_a_client_that_takes_no_part_is_named(tmp_path, caplog):
    """Client 0 has the fewest examples, 20, which make 3 steps; the others 3 and 4."""
    method = HardenedMethod(METHODS["hyperfl"], minimum_steps=4)
    _, rounds = serve(new_grid(method), method, tmp_path, min_clients=1)
    assert sorted(rounds[0].after) == [2]
    assert all("does not take part in round 1" in rounds[0].refusals[client] for client in (0, 1))
    assert "local steps are fewer than 4" in caplog.text
    assert rounds[0].errors == ()  # to decline is no failure


@pytest.mark.parametrize("name", ["dp-fedavg", "hardened"])
def test_noise_is_not_drawn_from_a_seed_that_the_server_knows(name, tmp_path):
    """Two runs of the same federation differ, and both from what the server could work out."""
    method = {**METHODS, "hardened": HardenedMethod(METHODS["fedavg"], UpdateNoise(1.0, 0.1))}[name]
    first, _ = serve(new_grid(method, seed=None), method, tmp_path / "first", rounds=1)
    second, _ = serve(new_grid(method, seed=None), method, tmp_path / "second", rounds=1)
    run = train(whole_task(), method, averaged(rounds=1), workers=1)
    assert not same(first, second, 1e-4)
    assert not same(first, run.state, 1e-4)
    given, _ = serve(new_grid(method, seed=520), method, tmp_path / "given", rounds=1)
    assert same(given, run.state)


def test_too_few_updates_stop_the_federation_with_its_state_saved(tmp_path):
    method = METHODS["hyperfl"]
    grid = new_grid(method, tmp_path / "nodes", spoil=lambda node, reply, g: reply if NODES[node] == 0 else None)
    with pytest.raises(FederationStopped, match="Round 1 had fewer than 2 valid updates in 2 attempts"):
        serve(grid, method, tmp_path)
    grid.spoil = None
    state, rounds = serve(grid, method, tmp_path)
    assert len(rounds) == 2
    assert same(state, train(whole_task(), method, averaged(rounds=2), workers=1).state, TOLERANCE)


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def test_a_killed_server_costs_one_round(tmp_path):
    method = METHODS["hyperfl"]

    def kill(node, reply, grid):
        if reply.metadata.group_id == "3" and NODES[node] == 2:
            raise Killed
        return reply

    grid = new_grid(method, tmp_path / "nodes", spoil=kill)
    with pytest.raises(Killed):
        serve(grid, method, tmp_path, rounds=4)
    assert len(history_in(tmp_path)) == 2
    # A new run: nodes have forgotten everything but what is on their disks.
    state, rounds = serve(new_grid(method, tmp_path / "nodes"), method, tmp_path, rounds=4)
    run = train(whole_task(), method, averaged(rounds=4), workers=1)
    assert same(state, run.state, TOLERANCE)
    assert [done.after for done in rounds] == [done.after for done in run.rounds]


class Silent:
    """A method some of whose clients' answers never come, from a round on."""

    def __init__(self, method, silent, since=1):
        self._method, self._silent, self._since = method, silent, since

    def __getattr__(self, name):
        return getattr(self._method, name)

    def train(self, task, model, clients, **options):
        found = self._method.train(task, model, clients, **options)
        return [one for one in found if one.update.client not in self._silent or options["round"] < self._since]


def test_of_twenty_nodes_with_two_slow_and_a_killed_server_nothing_is_lost(tmp_path, monkeypatch):
    """The engine with the same two silent ends in the same state, whoever was killed when."""
    monkeypatch.setattr(flower_under_test, "CLIENTS", 20)
    nodes, slow, method = {100 + number: number for number in range(20)}, {4, 11}, METHODS["hyperfl"]

    def late(node, reply, grid):
        """Answers of slow nodes come when their round is over."""
        if reply.metadata.message_type == "train" and nodes[node] in slow:
            return None
        if reply.metadata.group_id == "2" and nodes[node] == 19 and kill:
            raise Killed
        return reply

    def run():
        grid = new_grid(method, tmp_path / "nodes", spoil=late, nodes=nodes)
        return serve(grid, method, tmp_path, rounds=3, min_clients=18)

    kill = True
    with pytest.raises(Killed):
        run()
    assert len(history_in(tmp_path)) == 1
    kill = False
    state, rounds = run()
    whole = Task(*halves(), [client_data(number) for number in range(20)])
    expected = train(whole, Silent(method, slow), averaged(rounds=3), workers=1)
    assert same(state, expected.state, TOLERANCE)
    assert [done.after for done in rounds] == [done.after for done in expected.rounds]
    assert [done.refusals for done in rounds] == [dict.fromkeys(slow, "sent nothing")] * 3


class Alike(Silent):
    """The same, where clients do not say how many examples they have: over Flower nobody vouches for numbers."""

    def train(self, *arguments, **options):
        found = super().train(*arguments, **options)
        return [replace(one, update=replace(one.update, n=1)) for one in found]


def test_a_resumed_federation_without_one_node_bounds_updates_as_the_engine_does(tmp_path):
    """With two updates the default bound shortens the longer one to the mean of both lengths."""
    method, bounded = METHODS["hyperfl"], {"aggregator": "clipped-mean", "nodes": NODES}
    serve(new_grid(method, tmp_path / "nodes"), method, tmp_path, rounds=1, **bounded)
    grid = new_grid(method, tmp_path / "nodes")
    grid.online.discard(12)
    state, rounds = serve(grid, method, tmp_path, rounds=2, **bounded)
    assert list(rounds[1].refusals) == [2]
    task, silent = whole_task(), Alike(method, {2}, since=2)
    expected, plain = (
        train(task, silent, Federation(rounds=2, min_clients=2, aggregator=name), workers=1).state
        for name in ("clipped-mean", "mean")
    )
    assert same(state, expected, TOLERANCE)
    assert not same(state, plain, TOLERANCE)


def test_a_method_without_private_tensors_is_resumed_without_a_folder(tmp_path):
    method = METHODS["fedavg"]
    serve(new_grid(method), method, tmp_path, rounds=1)
    state, rounds = serve(new_grid(method), method, tmp_path, rounds=2)
    assert rounds[1].refusals == {}
    assert same(state, train(whole_task(), method, averaged(rounds=2), workers=1).state)


def test_private_tensors_that_were_not_kept_are_missed(tmp_path, caplog):
    method = METHODS["fedavg-private-head"]
    serve(new_grid(method), method, tmp_path, rounds=1)
    with pytest.raises(FederationStopped):
        serve(new_grid(method), method, tmp_path, rounds=2)
    assert "the server continues from round 1" in caplog.text


def test_flowers_own_loop_can_drive_the_strategy(tmp_path):
    method, settings = METHODS["fedavg"], averaged(rounds=2)
    strategy = MethodStrategy(method, settings, range(CLIENTS), federation="ours", timeout=0.0)
    start = ArrayRecord({name: Array(value.numpy()) for name, value in method.start(whole_task(), seed=520).items()})
    result = strategy.start(grid=new_grid(method), initial_arrays=start, num_rounds=2)
    run = train(whole_task(), method, settings, workers=1)
    assert same(result.arrays.to_torch_state_dict(), run.state)
    assert result.train_metrics_clientapp[2]["after"] == run.rounds[1].mean_after
    assert result.train_metrics_clientapp[2]["after.1"] == run.rounds[1].after[1]


def test_another_federation_does_not_mix_with_the_one_in_the_folder(tmp_path, caplog):
    method = METHODS["hyperfl"]
    serve(new_grid(method, tmp_path / "nodes"), method, tmp_path)
    with pytest.raises(UsageError, match="other settings"):
        serve(new_grid(method, tmp_path / "nodes"), method, tmp_path, seed=1)
    with pytest.raises(FederationStopped):  # clients refuse, too, as the history of their tensors is another
        serve(new_grid(method, tmp_path / "nodes"), method, tmp_path / "new", seed=1)
    assert "belong to another federation" in caplog.text
    with pytest.raises(FederationStopped):
        serve(new_grid(method, tmp_path / "nodes"), method, tmp_path / "newer")
    assert "the server continues from round 0" in caplog.text


def test_private_tensors_move_to_another_machine_and_to_another_federation(tmp_path):
    method = METHODS["hyperfl"]
    serve(new_grid(method, tmp_path / "nodes"), method, tmp_path)
    moved, begun = tmp_path / "moved", tmp_path / "begun"
    for client in range(CLIENTS):
        exported = export_private(tmp_path / "nodes", client, tmp_path / f"{client}.safetensors")
        import_private(exported, moved)
        import_private(exported, begun, start=True)
        with pytest.raises(UsageError, match="already"):
            import_private(exported, moved)
    state, _ = serve(new_grid(method, moved), method, tmp_path, rounds=3)
    run = train(whole_task(), method, averaged(rounds=3), workers=1)
    assert same(state, run.state, TOLERANCE)
    _, rounds = serve(new_grid(method, begun), method, tmp_path / "again", seed=8)
    _, fresh = serve(new_grid(method), method, tmp_path / "fresh", seed=8)
    assert rounds[0].before != fresh[0].before
    with pytest.raises(UsageError, match="no private tensors of client 7"):
        export_private(moved, 7, tmp_path / "7.safetensors")


def test_each_client_can_be_sent_a_message_of_its_own(tmp_path):
    method = ToEachItsOwn()
    state, _ = serve(new_grid(method, nodes={10: 2, 11: 0, 12: 1}), method, tmp_path, rounds=1, min_clients=3)
    assert state["number"].tolist() == [0.0, 11.0, 22.0]


def test_two_nodes_with_one_number_are_both_left_out(tmp_path):
    method, nodes = METHODS["fedavg"], {10: 0, 11: 1, 12: 2, 13: 2, 14: 9}
    _, rounds = serve(new_grid(method, nodes=nodes), method, tmp_path)
    assert rounds[0].refusals == {2: "is claimed by 2 nodes"}


def test_a_number_belongs_to_the_node_that_is_registered_or_came_first(tmp_path, caplog):
    """Another node that claims the number is not asked, and the honest client stays."""
    method, nodes = METHODS["fedavg"], {10: 0, 11: 1, 12: 2, 13: 2}
    expected = train(whole_task(), method, averaged(rounds=2), workers=1)
    registered = {10: 0, 11: 1, 12: 2}
    state, rounds = serve(new_grid(method, nodes=nodes), method, tmp_path / "registered", nodes=registered)
    assert [done.refusals for done in rounds] == [{}, {}]
    assert same(state, expected.state)
    assert "Node 13 claims to be client 2; it is not registered as this client" in caplog.text

    def arrive(node, reply, grid):
        grid.online.add(13)
        return reply

    grid = new_grid(method, nodes=nodes, spoil=arrive)
    grid.online = {10, 11, 12}
    state, rounds = serve(grid, method, tmp_path / "first come")
    assert same(state, expected.state)
    assert "Node 13 claims to be client 2, who is node 12" in caplog.text


def test_a_client_has_as_many_examples_as_it_said_when_it_came(tmp_path):
    method = METHODS["fedavg"]
    grid = new_grid(method, spoil=spoiled(reported(n=2**40)))
    _, rounds = serve(grid, method, tmp_path)
    assert rounds[1].refusals == {1: "reports 1099511627776 examples; it registered 24"}

    def boast(node, reply, grid):
        boasts = reply.metadata.message_type == "query" and NODES[node] == 1
        return reported(n=2**50)(reply, grid) if boasts else reply

    def keep_to_it(node, reply, grid):
        return reported(n=2**50)(reply, grid) if NODES[node] == 1 else boast(node, reply, grid)

    state, rounds = serve(new_grid(method, spoil=keep_to_it), method, tmp_path / "capped")
    assert "its weight is that of 84" in rounds[0].suspects[1]
    assert all(value.abs().max() < 5 for value in state.values())


def test_finite_values_of_any_size_are_bounded_and_named(tmp_path):
    """What passes every check of single tensors, and owned the average once."""
    method = METHODS["fedavg"]
    grid = new_grid(method, spoil=spoiled(first(lambda value: np.full_like(value, 1e30))))
    state, rounds = serve(grid, method, tmp_path)
    assert rounds[1].refusals == {}
    assert "times as far as the median client" in rounds[1].suspects[1]
    assert all(value.abs().max() < 5 for value in state.values())


@pytest.mark.parametrize("name", ["dp-fedavg", "hardened"])
def test_beside_noise_neither_losses_nor_numbers_of_examples_are_sent(name, tmp_path):
    method, seen = {**METHODS, "hardened": HardenedMethod(METHODS["fedavg"], UpdateNoise(1.0, 2.0))}[name], []

    def look(node, reply, grid):
        metrics = reply.content.metric_records.get("metrics", {})
        seen.append((reply.metadata.message_type, reply.content["report"]["n"], set(metrics)))
        return reply

    serve(new_grid(method, spoil=look), method, tmp_path, rounds=1)
    assert seen == [("query", 1, set())] * CLIENTS + [("train", 1, {"epsilon"})] * CLIENTS


@pytest.mark.parametrize("where", ["from the start", "later"])
def test_a_server_that_changes_the_models_shape_is_refused_by_clients(where, tmp_path, caplog):
    method, grid = METHODS["hyperfl"], new_grid(METHODS["hyperfl"], tmp_path / "nodes")
    push = grid.push_messages

    def longer(messages):
        for message in messages:
            if "arrays" in message.content and (where == "from the start" or message.metadata.group_id == "2"):
                arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
                bias = arrays["hypernetwork.heads.bias"]
                arrays["hypernetwork.heads.bias"] = np.concatenate([bias, bias])
                message.content["arrays"] = ArrayRecord({name: Array(value) for name, value in arrays.items()})
        return push(messages)

    grid.push_messages = longer
    with pytest.raises(FederationStopped):
        serve(grid, method, tmp_path)
    assert len(history_in(tmp_path)) == (where == "later")
    assert ("the shape of the model was changed" if where == "later" else "left out") in caplog.text


@pytest.mark.parametrize("folder", [None, "nodes"])
def test_a_state_is_answered_a_few_times_only(folder, tmp_path, caplog):
    """A server that asks for the same again and again, as one that averages noise away does."""
    method = METHODS["fedavg"]
    grid = new_grid(method, folder and tmp_path / folder, repeats=1)
    for attempt in range(2):
        serve(grid, method, tmp_path / str(attempt), rounds=1)
    with pytest.raises(FederationStopped):
        serve(grid, method, tmp_path / "again", rounds=1)
    assert "has answered the same state 2 times already" in caplog.text


def test_what_is_spent_is_counted_on_the_clients_disk_and_never_passes_the_budget(tmp_path, caplog):
    method, folder = HardenedMethod(METHODS["fedavg"], UpdateNoise(1.0, 4.0)), tmp_path / "nodes"
    budget = Budget(epsilon=5.0)
    allowed = max(
        k for k in range(1, 8) if guarantee([privacy_of(method, 20)] * k, budget.delta).epsilon <= budget.epsilon
    )
    assert 1 < allowed < 7
    taken = 0
    for attempt in range(allowed + 2):  # each time another server, and nodes that have forgotten all but their disks
        grid = new_grid(method, folder, seed=None, budget=budget, repeats=1000)
        try:
            _, rounds = serve(grid, method, tmp_path / str(attempt), rounds=1, seed=attempt, retries=0)
        except FederationStopped:
            continue
        taken += 1
        assert all(done.epsilon[0] <= budget.epsilon for done in rounds)
        assert not any(done.loss or done.before or done.after for done in rounds)
    assert taken == allowed
    assert f"the budget is {budget.epsilon:g}" in caplog.text
    with pytest.raises(UsageError, match="on the client's disk"):
        client_app(task_of_client, method, budget=budget)


def test_embeddings_come_from_each_clients_own_seed(tmp_path, monkeypatch):
    method = METHODS["hyperfl"]
    secret = itertools.count(1000)  # stands for the system's randomness, so that the draws are the same in every run
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(secret))
    drawn = []
    for name in ("a", "b"):
        serve(new_grid(method, tmp_path / name, seed=None), method, tmp_path / f"server {name}", rounds=1)
        for client in range(CLIENTS):
            exported = export_private(tmp_path / name, client, tmp_path / f"{name}{client}.safetensors")
            with open_store(exported) as store:
                drawn.append(store.get("embedding"))
    assert not any(torch.allclose(a, b, atol=0.5) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_node_that_comes_later_takes_part(tmp_path):
    method = METHODS["fedavg"]

    def arrive(node, reply, grid):
        if reply.metadata.group_id == "1":
            grid.online.add(12)
        return reply

    grid = new_grid(method, spoil=arrive)
    grid.online = {10, 11}
    _, rounds = serve(grid, method, tmp_path, rounds=2)
    assert [sorted(done.loss) for done in rounds] == [[0, 1], [0, 1, 2]]


def test_a_server_has_no_data_and_needs_an_absolute_folder(tmp_path):
    with pytest.raises(UsageError, match="does not have the data of client"):
        task_of_server(None).client(0)
    app = server_app(task_of_server, METHODS["fedavg"], folder="somewhere")
    with pytest.raises(UsageError, match="not an absolute path"):
        app(new_grid(METHODS["fedavg"]), Context(1, 1, {}, RecordDict(), {}, 0))


def test_checkpoints_of_a_server_hold_nothing_private(tmp_path):
    method = METHODS["hyperfl"]
    serve(new_grid(method, tmp_path / "nodes"), method, tmp_path)
    with open_store(tmp_path / CHECKPOINT) as store:
        assert all(name == "about" or name.startswith("state|hypernetwork.") for name in store.names())
    with (
        pytest.raises(UsageError, match="other settings"),
        Job.open(tmp_path, key={"another": "federation"}, of="a federation", state=CHECKPOINT, reading=True),
    ):
        pass


def test_replies_do_not_wait_in_memory(tmp_path, monkeypatch):
    """However many clients answer, the server holds few replies at a time: their updates lie in files."""
    monkeypatch.setattr(strategy, "_PULLED", 1)
    grid, seen, most = new_grid(METHODS["fedavg"]), [], []
    pull = grid.pull_messages

    def counted(message_ids):
        assert len(message_ids) == 1
        most.append(sum(reference() is not None for reference in seen))
        replies = pull(message_ids)
        seen.extend(weakref.ref(reply) for reply in replies)
        return replies

    grid.pull_messages = counted
    state, _ = serve(grid, METHODS["fedavg"], tmp_path, rounds=1)
    expected = train(whole_task(), METHODS["fedavg"], averaged(rounds=1)).state
    assert same(state, expected)
    assert len(seen) == 2 * CLIENTS  # a question and a round
    assert max(most) <= 1
