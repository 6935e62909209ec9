"""The engine in this process: rounds, sampling, faults, drop-out, resuming."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from federation_under_test import small_task
from hypothesis import given
from hypothesis import strategies as st

from netweight.errors import FederationStopped, PrivateTensor, UsageError
from netweight.methods.federate import (
    ClientData,
    Federation,
    HyperFL,
    LocalTraining,
    Task,
    fedavg,
    train,
)
from netweight.methods.federate import engine as engine_module
from netweight.methods.federate.algorithms.direct import DirectMethod, fedavg_private_head, local_only
from netweight.methods.federate.algorithms.ditto import Ditto
from netweight.methods.federate.algorithms.fedbn import FedBN
from netweight.methods.federate.algorithms.fedprox import FedProx
from netweight.methods.federate.algorithms.scaffold import Scaffold
from netweight.methods.federate.catalog import METHODS as METHODS_BY_NAME
from netweight.methods.federate.catalog import named_method
from netweight.methods.federate.engine import TrainedFederation, finished
from netweight.methods.federate.history import Round, at_plateau
from netweight.methods.federate.joining import join
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, LocalResult
from netweight.methods.federate.plan import FederationPlan
from netweight.methods.federate.settings import Phase
from netweight.methods.federate.updates import Update

TRAINING = LocalTraining(epochs=2, lr=0.1, batch_size=10)
METHODS = {
    "fedavg": fedavg(TRAINING),
    "private head": fedavg_private_head(TRAINING),
    "local": local_only(TRAINING),
    "fedprox": FedProx(fedavg(TRAINING)),
    "ditto": Ditto(fedavg(TRAINING)),
    "fedbn": FedBN(fedavg(TRAINING)),
    "scaffold": Scaffold(fedavg(TRAINING.replace(momentum=0.0))),
    "hyperfl": HyperFL(TRAINING, embedding=4, hidden=(16,)),
    "from the body": HyperFL(TRAINING, embedding=4, hidden=(16,), start_from="body", joint_head=True),
    "whole": HyperFL(TRAINING, embedding=4, hidden=(16,), start_from="body", private_head=False),
}


class Faulty:
    """A method whose updates of some clients are spoiled on the way."""

    def __init__(self, method: object, spoil: dict[int, object]) -> None:
        self._method, self._spoil = method, spoil

    def __getattr__(self, name: str) -> object:
        return getattr(self._method, name)

    def train(self, task: object, model: object, clients: Sequence[Client], **settings: object) -> list[LocalResult]:
        found = self._method.train(task, model, clients, **settings)  # type: ignore[attr-defined]
        return [self._spoiled(one) for one in found if self._spoil.get(one.update.client) != "silent"]

    def _spoiled(self, one: LocalResult) -> LocalResult:
        change = self._spoil.get(one.update.client)
        return one if change is None else dataclasses.replace(one, update=change(one.update))  # type: ignore[operator]


def same(first: TrainedFederation, second: TrainedFederation, *, exact: bool = True) -> None:
    for name, value in first.state.items():
        torch.testing.assert_close(value, second.state[name], **({"rtol": 0, "atol": 0} if exact else {}))
    for client, tensors in first.private.items():
        for name, value in tensors.items():
            other = second.private[client][name]
            torch.testing.assert_close(value, other, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name: str) -> None:
    run = train(small_task(n=40), METHODS[name], Federation(rounds=8))
    first, last = run.rounds[0], run.rounds[-1]
    assert last.mean_loss < 0.7 * first.mean_loss  # type: ignore[operator]
    assert last.mean_after > 0.8  # type: ignore[operator]
    assert last.mean_before > first.mean_before + 0.1  # type: ignore[operator]


@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_workers_does_not_matter(name: str) -> None:
    task = small_task(clients=5, sizes=(8, 20, 13, 9, 20))
    one, three = (train(task, METHODS[name], Federation(rounds=2), workers=workers) for workers in (1, 3))
    same(one, three, exact=not isinstance(METHODS[name], HyperFL))


def test_factors_of_a_round_lie_in_the_memory_of_the_round_before() -> None:
    with engine_module.round_by_round(small_task(), METHODS["hyperfl"], seed=1, workers=1) as run_round:
        (model,) = run_round.__self__._models  # type: ignore[attr-defined]
        blocks = []
        for _ in range(3):
            run_round()
            blocks.append({name: memory.ctypes.data for name, (memory, _) in model.memory._blocks.items()})
            assert all(given() is None for _, given in model.memory._blocks.values())  # nothing lies in them any more
    assert blocks[0].keys() == {"left", "base"}
    assert blocks[0] == blocks[1] == blocks[2]


@pytest.mark.parametrize("name", METHODS)
def test_a_federation_goes_on_where_it_was_stopped(name: str, tmp_path: Path) -> None:
    task = small_task(clients=5)
    whole = train(task, METHODS[name], Federation(rounds=4, fraction=0.5), workers=1)
    train(task, METHODS[name], Federation(rounds=2, fraction=0.5), workers=1, folder=tmp_path)
    rest = train(task, METHODS[name], Federation(rounds=4, fraction=0.5), workers=1, folder=tmp_path)
    same(whole, rest)
    assert [r.loss for r in whole.rounds] == [r.loss for r in rest.rounds]


def test_a_federation_ends_at_a_plateau_and_can_go_on(tmp_path: Path) -> None:
    task, method = small_task(n=40), METHODS["fedavg"]
    asked = Federation(rounds=60, evaluate_every=2, until_plateau=True)
    early = train(task, method, asked, folder=tmp_path)
    assert 24 <= len(early.rounds) < 60
    assert at_plateau(early.rounds)
    assert not at_plateau(early.rounds[:-2])
    again = train(task, method, asked, folder=tmp_path)
    assert len(again.rounds) == len(early.rounds)
    longer = train(task, method, asked.replace(until_plateau=False, rounds=40), folder=tmp_path)
    assert [r.loss for r in longer.rounds[: len(early.rounds)]] == [r.loss for r in early.rounds]
    assert len(longer.rounds) == max(40, len(early.rounds))


@given(st.lists(st.integers(0, 1000), min_size=0, max_size=30), st.integers(1, 5))
def test_a_plateau_is_where_means_stop_rising(after: list[int], evaluations: int) -> None:
    rounds = [Round(i + 1, (0,), {0: 0.5}, {0: value / 1000}) for i, value in enumerate(after)]
    last, before = np.array(after[-evaluations:]), np.array(after[-2 * evaluations : -evaluations])
    flat = len(before) == evaluations and last.mean() - before.mean() < 100 - 1e-6
    assert at_plateau(rounds, evaluations=evaluations, least=0.1 - 1e-9) == flat
    rounds = [dataclasses.replace(r, before=r.after, after=r.before) for r in rounds]
    assert at_plateau(rounds, evaluations=evaluations, least=0.1 - 1e-9) == flat


def test_a_folder_of_another_federation_is_refused(tmp_path: Path) -> None:
    train(small_task(), METHODS["fedavg"], Federation(rounds=1), folder=tmp_path)
    with pytest.raises(UsageError, match=r"other settings: settings\.seed was \d+ and is 2 now\."):
        train(small_task(), METHODS["fedavg"], Federation(rounds=1, seed=2), folder=tmp_path)
    with pytest.raises(UsageError, match=r"other settings: initial_weights\.body was"):
        train(small_task(seed=3), METHODS["fedavg"], Federation(rounds=1), folder=tmp_path)


def test_fedavg_is_plain_sgd_when_there_is_one_client_and_one_step() -> None:
    task = small_task(clients=1, n=6)
    training = LocalTraining(epochs=1, lr=0.1, batch_size=6, momentum=0.5, weight_decay=0.01)
    run = train(task, fedavg(training), Federation(rounds=1))
    model = torch.nn.Sequential(task.body, task.head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    task.loss(model(task.client(0).train[0]), task.client(0).train[1]).backward()
    optimizer.step()
    for half in ("body", "head"):
        for name, value in getattr(task, half).named_parameters():
            torch.testing.assert_close(run.state[f"{half}.{name}"], value.detach())


def test_before_and_after_are_what_the_weights_give() -> None:
    task = small_task(n=40)
    method = METHODS["hyperfl"]
    run = train(task, method, Federation(rounds=2))
    again = train(task, method, Federation(rounds=3))
    weights = run.weights(1)
    body = torch.func.functional_call(task.body, task.body_layout.split(weights.body), (task.client(1).test[0],))
    outputs = torch.func.functional_call(task.head, task.head_layout.split(weights.head), (body,))
    accuracy = float((outputs.argmax(1) == task.client(1).test[1]).float().mean())
    assert again.rounds[2].before[1] == pytest.approx(accuracy)


def nan(update: Update) -> Update:
    tensors = {name: torch.full(value.shape, torch.nan) for name, value in update.tensors.items()}  # type: ignore[attr-defined]
    return dataclasses.replace(update, tensors=tensors)  # type: ignore[type-var]


def in_round(number: int, change: Callable[[Update], Update]) -> Callable[[Update], Update]:
    """Spoil the update of one round alone."""
    return lambda update: change(update) if update.round == number else update


def test_faulty_clients_are_left_out_and_the_round_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    task, method = small_task(clients=5), METHODS["hyperfl"]
    wrong = in_round(2, lambda update: dataclasses.replace(update, round=7))
    spoiled = Faulty(method, {1: in_round(2, nan), 3: "silent", 4: wrong})
    with caplog.at_level(logging.WARNING):
        run = train(task, spoiled, Federation(rounds=2, min_clients=2))  # type: ignore[arg-type]
    assert run.rounds[1].refusals == {1: run.rounds[1].refusals[1], 3: "sent nothing", 4: run.rounds[1].refusals[4]}
    assert [done.errors for done in run.rounds] == [(), (1, 4)]
    assert all(torch.isfinite(value).all() for value in run.state.values())
    assert "client 1 left out" in caplog.text
    before = train(task, Faulty(method, {3: "silent"}), Federation(rounds=1, min_clients=2))  # type: ignore[arg-type]
    assert all(torch.equal(run.private[1][name], value) for name, value in before.private[1].items())


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_client_whose_updates_never_count_fails_the_run(rounds: int, tmp_path: Path) -> None:
    """The others' result is saved and can be opened."""
    spoiled = Faulty(METHODS["fedavg"], {2: nan})
    times = "the only round" if rounds == 1 else f"each of the {rounds} rounds"
    with pytest.raises(FederationStopped, match=rf"Client 2 .*NaN.* in {times} that asked it.* is saved in"):
        train(small_task(), spoiled, Federation(rounds=rounds), folder=tmp_path)  # type: ignore[arg-type]
    saved = finished(small_task(), spoiled, Federation(rounds=rounds), folder=tmp_path)  # type: ignore[arg-type]
    assert [(set(done.after), done.errors) for done in saved.rounds] == [({0, 1, 3}, (2,))] * rounds


def test_too_few_clients_stop_the_federation_with_its_state_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = small_task()
    train(task, METHODS["fedavg"], Federation(rounds=1), folder=tmp_path)
    spoiled = Faulty(METHODS["fedavg"], dict.fromkeys(range(4), "silent"))
    parts = engine_module.parts_of  # the method that is spoiled on the way is the same
    monkeypatch.setattr(engine_module, "parts_of", lambda method: parts(getattr(method, "_method", method)))
    with pytest.raises(FederationStopped, match="Round 2 had fewer than 1"):
        train(task, spoiled, Federation(rounds=2), folder=tmp_path)  # type: ignore[arg-type]
    assert len(train(task, METHODS["fedavg"], Federation(rounds=2), folder=tmp_path).rounds) == 2


def test_thirty_percent_drop_out_is_survived() -> None:
    task = small_task(clients=10, n=40)
    run = train(task, METHODS["hyperfl"], Federation(rounds=8, drop_out=0.3, min_clients=3))
    missing = [len(r.refusals) for r in run.rounds]
    assert 0 < sum(missing) < 50
    assert all(
        why == "was dropped, to simulate a failure (drop_out)" for r in run.rounds for why in r.refusals.values()
    )
    assert run.rounds[-1].mean_after > 0.8  # type: ignore[operator]


def test_a_round_is_tried_again_with_other_clients() -> None:
    run = train(small_task(clients=6), METHODS["fedavg"], Federation(rounds=6, drop_out=0.5, min_clients=4, retries=50))
    assert max(r.attempts for r in run.rounds) > 1
    assert all(6 - len(r.refusals) >= 4 for r in run.rounds)


def test_a_private_tensor_does_not_leave() -> None:
    leaking = DirectMethod("leak", ("body", "head"), (Phase(trains="both", epochs=1, lr=0.1),), TRAINING)
    object.__setattr__(leaking, "halves", ("body", "head"))

    class Leak(Faulty):
        shared = ("body.**",)

    with pytest.raises(PrivateTensor, match=r"head\.bias"):
        train(small_task(), Leak(leaking, {}), Federation(rounds=1))  # type: ignore[arg-type]


def test_clients_are_sampled_without_replacement() -> None:
    run = train(small_task(clients=10), METHODS["fedavg"], Federation(rounds=5, fraction=0.3, evaluate_every=5))
    assert all(len(set(r.clients)) == 3 for r in run.rounds)
    assert len({r.clients for r in run.rounds}) > 1
    assert [bool(r.after) for r in run.rounds] == [False, False, False, False, True]


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"fraction": 0.0}, {"fraction": 1.1}, {"drop_out": 1.0}, {"min_clients": 0}, {"retries": -1}],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Federation(**wrong)  # type: ignore[arg-type]


def test_tasks_that_cannot_be_are_refused() -> None:
    good = small_task()
    with pytest.raises(UsageError, match="at least one client"):
        Task(good.body, good.head, [])
    with pytest.raises(UsageError, match="head requires gradients"):
        Task(good.body, torch.nn.Tanh(), [good.client(0)])
    with pytest.raises(UsageError, match="3 inputs and 2 targets"):
        ClientData((torch.zeros(3, 6), torch.zeros(2)), (torch.zeros(1, 6), torch.zeros(1)))
    with pytest.raises(UsageError, match="no client 9"):
        good.client(9)


def test_running_statistics_stay_with_their_client() -> None:
    body = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    run = train(small_task(body=body), METHODS["hyperfl"], Federation(rounds=2))
    means = [run.private[client]["statistics.body.1.running_mean"] for client in range(4)]
    assert not any(torch.equal(means[0], other) for other in means[1:])
    assert not any("running" in name for name in run.state)


def test_a_plan_takes_the_methods_own_rate_unless_it_says_another() -> None:
    """What generates the head too has a gentler schedule than the paper's; pFedHN's is of another kind."""
    own, told = FederationPlan(method="hyperfl-whole"), FederationPlan(method="hyperfl-whole", lr=0.02, epochs=2)
    assert own.training() == named_method("hyperfl-whole").training == METHODS_BY_NAME["hyperfl-whole"].training
    assert FederationPlan(method="hyperfl").training() == LocalTraining()
    assert told.training() == own.training().replace(lr=0.02, epochs=2)
    assert FederationPlan(method="pfedhn").training() is None


def test_clients_that_join_after_training_learn_an_embedding_and_a_head() -> None:
    task = small_task(clients=4, n=40)
    # Smaller steps than those of other tests: the client that joins learns from as few examples as they.
    method = HyperFL(TRAINING.replace(lr=0.05, batch_size=5), embedding=4, hidden=(16,))
    run = train(task, method, Federation(rounds=8))
    late = small_task(clients=5, n=40).client(4)
    begun = run.method.weights(task, run.state, run.method.private_start(task, 0, seed=1))
    learned = join(run, late, seed=1)
    model = LocalModel(task)
    before, after = (model.accuracy(w.body, w.head, late.test) for w in (begun, learned))
    assert after > 0.7 > before
    with pytest.raises(UsageError, match="shares no hypernetwork"):
        join(train(task, METHODS["fedavg"], Federation(rounds=1)), late, seed=1)


def test_scaffolds_control_variates_average_to_the_servers() -> None:
    task = small_task(clients=4, n=20)
    run = train(task, METHODS["scaffold"], Federation(rounds=3, aggregator="mean"), workers=1)
    for name, value in run.state.items():
        if name.startswith("control."):
            mean = torch.stack([run.private[client][name] for client in task.clients]).mean(0)
            torch.testing.assert_close(value, mean)
            assert value.abs().max() > 0


def test_proximal_terms_hold_clients_near_and_normalization_layers_stay() -> None:
    task = small_task(clients=3, n=20, body=torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5)))
    moved = {}
    for strength in (0.0, 5.0):
        run = train(task, FedProx(fedavg(TRAINING), strength=strength), Federation(rounds=1), workers=1)
        start = run.method.start(task, seed=520)
        moved[strength] = sum(float((run.state[n] - start[n]).square().sum()) for n in start)
    plain = train(task, fedavg(TRAINING), Federation(rounds=1), workers=1)
    assert all(
        torch.equal(plain.state[name], run_0)
        for name, run_0 in train(
            task, FedProx(fedavg(TRAINING), strength=0.0), Federation(rounds=1), workers=1
        ).state.items()
    )
    assert moved[5.0] < 0.5 * moved[0.0]
    own = train(task, FedBN(fedavg(TRAINING)), Federation(rounds=2), workers=1)
    assert sorted(set(plain.state) - set(own.state)) == ["body.1.bias", "body.1.weight"]
    assert not torch.equal(own.private[0]["body.1.weight"], own.private[1]["body.1.weight"])
