"""The privacy account: every promise of docs/privacy-account.md, against a count by hand with opacus's accountant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from federation_under_test import examples, small_task
from torch import nn

from netweight.errors import FederationStopped, UsageError
from netweight.methods.federate import ClientData, Federation, LocalTraining, Task, fedavg, train
from netweight.methods.federate.acceptance import AcceptanceLimits
from netweight.methods.federate.accounting import AnswerPrivacy, Release, epsilon_of, guarantee, privacy_of
from netweight.methods.federate.algorithms.direct import DirectMethod
from netweight.methods.federate.algorithms.private_sgd import centaur, dp_fedavg, ppsgd
from netweight.methods.federate.plan import FederationPlan
from netweight.methods.federate.protections import HardenedMethod, UpdateNoise
from netweight.methods.federate.report import guarantees
from netweight.methods.federate.task_privacy import holders_of_examples, noise_for_task, task_guarantee

opacus = pytest.importorskip("opacus")
DELTA = 1e-3
TRAINING = LocalTraining(epochs=2, lr=0.1, batch_size=6)


def pooled(parts: Sequence[Sequence[int]], rows: int = 60) -> Task:
    """A task whose clients hold these rows of one table."""
    torch.manual_seed(0)
    inputs, targets = examples(rows, 5)
    data = [ClientData((inputs[list(own)], targets[list(own)]), examples(10, 1000)) for own in parts]
    return Task(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3), data)


def by_hand(parts: Sequence[Sequence[int]], method: DirectMethod, answers: Mapping[int, int]) -> float:
    """The largest ε of any row: each step of each holder is told to opacus one after another."""
    worst, training, counted = 0.0, method.training, set()
    (phase,) = method.phases
    assert phase.privacy is not None
    for row in sorted({row for own in parts for row in own}):
        accountant = opacus.accountants.RDPAccountant()
        for client, own in enumerate(parts):
            if row in own:
                steps = answers.get(client, 0) * phase.epochs * math.ceil(len(own) / training.batch_size)
                for _ in range(steps):
                    accountant.step(
                        noise_multiplier=phase.privacy.noise_multiplier,
                        sample_rate=min(1.0, training.batch_size / len(own)),
                    )
        if accountant.history and (history := tuple(accountant.history)) not in counted:  # rows of one fate count once
            counted.add(history)
            worst = max(worst, accountant.get_epsilon(DELTA))
    return worst


APART = (range(0, 20), range(20, 40), range(40, 60))
SOME = (range(0, 20), range(15, 40), range(38, 60))
ALL = (range(0, 20),) * 3
CHAIN = (range(0, 30), range(20, 50), range(25, 60))  # rows 25 to 29 are with all three
SIZES = (range(0, 7), range(5, 45), range(0, 60))
HISTORIES = ({0: 2, 1: 2, 2: 2}, {0: 6, 1: 1, 2: 0}, {0: 1, 1: 5, 2: 3}, {0: 0, 1: 0, 2: 1})
# Every division of rows with two histories, every history with two or three divisions.
CASES = [
    (parts, answers)
    for place, parts in enumerate((APART, SOME, ALL, CHAIN, SIZES))
    for number, answers in enumerate(HISTORIES)
    if (place + number) % 2 == 0
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_printed_epsilon_is_below_a_count_by_hand(case: int) -> None:
    parts, answers = CASES[case]
    method = dp_fedavg(1.0 + 0.2 * case, training=TRAINING)
    found = task_guarantee(pooled(parts), method, answers, DELTA)
    assert found is not None
    wanted = by_hand(parts, method, answers)
    assert found.epsilon == pytest.approx(wanted, rel=1e-6)
    assert f"{found.epsilon:.4g}" in str(found)
    assert "one example (added or removed" in str(found)


def test_examples_are_found_wherever_they_are_held() -> None:
    assert holders_of_examples(pooled(APART), range(3)) == [(0,), (1,), (2,)]
    assert holders_of_examples(pooled(CHAIN), range(3)) == [(0, 1, 2)]
    assert sorted(holders_of_examples(pooled(SOME), range(3))) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("parts", [ALL, SOME])
def test_noise_for_a_budget_counts_every_holder(parts: Sequence[Sequence[int]]) -> None:
    task = pooled(parts)
    noise = noise_for_task(task, 4.0, DELTA, batch_size=6, epochs=6)
    method = dp_fedavg(noise, training=TRAINING)
    assert by_hand(parts, method, dict.fromkeys(range(3), 3)) <= 4.0
    less = dp_fedavg(0.97 * noise, training=TRAINING)
    assert by_hand(parts, less, dict.fromkeys(range(3), 3)) > 4.0


def test_repeated_attempts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    method, task = dp_fedavg(1.5, training=TRAINING), small_task()
    settings = Federation(rounds=4, min_clients=3, drop_out=0.4, retries=50, seed=3)
    run = train(task, method, settings, workers=1)
    attempts = sum(done.attempts for done in run.rounds)
    assert attempts > 4
    assert sum(run.answers.values()) > sum(len(done.loss) for done in run.rounds)
    (promise,) = guarantees(run, DELTA)
    answers = max(run.answers.values())
    assert promise.answers == answers
    assert promise.epsilon == pytest.approx(by_hand([range(20)], method, {0: answers}))


def test_attempts_of_a_stopped_federation_count_when_it_goes_on(tmp_path) -> None:  # type: ignore[no-untyped-def]
    method, task = dp_fedavg(1.5, training=TRAINING), small_task()
    rare = Federation(rounds=2, min_clients=4, drop_out=0.6, retries=2, seed=1)
    with pytest.raises(FederationStopped):
        train(task, method, rare, workers=1, folder=tmp_path)
    with pytest.raises(FederationStopped) as stopped:
        train(task, method, rare, workers=1, folder=tmp_path)
    assert "attempts" in str(stopped.value)
    from netweight.job import Job
    from netweight.methods.federate.checkpoint import CHECKPOINT

    with Job.open(tmp_path, state=CHECKPOINT, reading=True) as job:
        about, _ = job.load()  # type: ignore[misc]
    assert sum(about["attempt_answers"].values()) > 0


def test_a_budgets_noise_is_for_as_many_answers_as_there_are_rounds() -> None:
    plan = FederationPlan(
        data="digits", method="dp-fedavg", clients=4, rounds=2, epochs=1, batch_size=20, min_clients=4, drop_out=0.5,
        retries=30, partition="dirichlet", evaluate_every=2,
    )  # fmt: skip
    task = plan.task()
    method = plan.make_method(task)
    with pytest.raises(FederationStopped):
        train(task, method, plan, workers=1)
    assert plan.most_answers() == 2
    assert plan.replace(noise_multiplier=3.0).most_answers() is None


def test_an_answer_without_noise_makes_epsilon_infinite() -> None:
    noisy = privacy_of(dp_fedavg(2.0, training=TRAINING), 20)
    for plain in (fedavg(TRAINING), dp_fedavg(0.0, training=TRAINING)):
        for order in ([noisy, privacy_of(plain, 20)], [privacy_of(plain, 20), noisy, noisy]):
            found = guarantee(order, DELTA)
            assert math.isinf(found.epsilon)
            assert "without noise" in str(found)
            assert found.to_json()["epsilon"] is None


def test_units_are_never_added() -> None:
    example, client = Release("example", 2.0, 0.1, 10), Release("client", 4.0, 1.0, 1)
    found = guarantee([AnswerPrivacy((example,)), AnswerPrivacy((client,))], DELTA)
    assert math.isinf(found.epsilon)
    assert "do not add up" in str(found)


@pytest.mark.parametrize("method", [centaur(3.0), ppsgd(3.0), dp_fedavg(3.0, sampling="shuffled")])
def test_no_epsilon_is_stated_where_none_holds(method: DirectMethod) -> None:
    found = guarantee([privacy_of(method, 100)], DELTA)
    assert math.isinf(found.epsilon)
    assert "epsilon not valid" in str(found)
    assert f"{'ε'} {0:.4g}" not in str(found)


@pytest.mark.parametrize("name", ["centaur", "ppsgd"])
def test_a_budget_is_refused_where_no_epsilon_holds(name: str) -> None:
    for epsilon in (None, 4.0):
        with pytest.raises(UsageError, match="No ε holds") as refused:
            FederationPlan(method=name, epsilon=epsilon)
        assert "--noise-multiplier" in str(refused.value)
    assert FederationPlan(method=name, noise_multiplier=8.0)
    with pytest.raises(UsageError, match="adds no noise to gradients"):
        FederationPlan(method="fedavg", epsilon=4.0)
    with pytest.raises(UsageError, match="Leave one of the two out"):
        FederationPlan(method="dp-fedavg", epsilon=4.0, noise_multiplier=2.0)


def test_a_clients_epsilon_is_stated_for_replaced_data_and_for_a_change_left_out() -> None:
    method = HardenedMethod(fedavg(TRAINING), UpdateNoise(1.0, 0.01))
    found = guarantee([privacy_of(method, 600)], 1e-5)
    assert found.removed == pytest.approx(5612, abs=1)
    assert found.epsilon == pytest.approx(22112, abs=1)
    assert "one client (all its data replaced; 5612 if its change is only left out)" in str(found)
    assert found.epsilon == epsilon_of([(0.005, 1.0, 1)], 1e-5)


def test_a_refusal_that_depends_on_examples_has_no_epsilon() -> None:
    method = HardenedMethod(fedavg(TRAINING), UpdateNoise(1.0, 4.0), acceptance=AcceptanceLimits())
    assert math.isinf(guarantee([privacy_of(method, 600)], 1e-5).epsilon)
    assert math.isfinite(guarantee([privacy_of(dataclasses.replace(method, acceptance=None), 600)], 1e-5).epsilon)


def test_a_method_without_noise_states_no_epsilon() -> None:
    run = train(small_task(), fedavg(TRAINING), Federation(rounds=1), workers=1)
    assert guarantees(run, DELTA) == []
    with pytest.raises(UsageError, match="no answer"):
        guarantee([], DELTA)
