"""Methods with differentially private local training, on a small problem."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from netweight.errors import Unsupported, UsageError
from netweight.methods.federate import ClientData, Federation, LocalTraining, Task, train
from netweight.methods.federate.algorithms.direct import DirectMethod, epsilon_caveats, fedavg
from netweight.methods.federate.algorithms.private_sgd import centaur, dp_fedavg, ppsgd
from netweight.methods.federate.clipped_gradients import PrivateStep, by_vmap
from netweight.methods.federate.local import Learner, padded, poisson_batches, train_phase
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, ClientWeights, LocalResult
from netweight.methods.federate.settings import Phase, Privacy

TRAINING = LocalTraining(epochs=2, lr=0.1, batch_size=6)


def make_task(body: nn.Module | None = None, n: int = 20, clients: int = 2) -> Task:
    torch.manual_seed(0)
    body = body or nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    head, direction = nn.Linear(8, 2), torch.randn(6)

    def part(n: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(n, 6)
        return inputs, (inputs @ direction > 0).long()

    return Task(body, head, [ClientData(part(n), part(50)) for _ in range(clients)])


def train_one(task: Task, method: DirectMethod, *, seed: int = 0) -> LocalResult:
    state = method.start(task, seed=seed)
    client = Client(0, method.private_start(task, 0, seed=seed), method.message(state, 0))
    return method.train(task, LocalModel(task), [client], round=1, seed=seed)[0]


def moved(task: Task, weights: ClientWeights) -> Tensor:
    return torch.cat([weights.body - task.initial_body(), weights.head - task.initial_head()])


def test_without_noise_and_clipping_it_is_fedavg() -> None:
    task = make_task(n=18)  # three batches of six, so that no batch is smaller than expected
    private = train_one(task, dp_fedavg(0, training=TRAINING, clip=1e9, sampling="shuffled"))
    plain = train_one(task, fedavg(TRAINING))
    torch.testing.assert_close(private.weights.body, plain.weights.body)
    torch.testing.assert_close(private.weights.head, plain.weights.head)
    assert private.update.metrics["loss"] == pytest.approx(plain.update.metrics["loss"], rel=1e-5)


def test_a_step_moves_by_at_most_clip_over_batch_for_each_example() -> None:
    training = LocalTraining(epochs=1, lr=1.0, batch_size=20, momentum=0.0, weight_decay=0.0)
    task = make_task()
    found = train_one(task, dp_fedavg(0, training=training, clip=0.01, sampling="shuffled"))
    model = LocalModel(task)
    model.train("both")
    batch, mask = task.client(0).train, torch.ones(20, dtype=torch.bool)
    wanted = by_vmap(PrivateStep(model, task.initial_body(), task.initial_head(), batch, mask, "both", 0.01))
    assert wanted.body is not None
    assert wanted.head is not None
    assert moved(task, found.weights).norm() <= 0.01
    torch.testing.assert_close(moved(task, found.weights), -torch.cat([wanted.body, wanted.head]) / 20)


def test_noise_has_the_deviation_asked_for_and_depends_on_the_seed_alone() -> None:
    training = LocalTraining(epochs=1, lr=1.0, batch_size=20, momentum=0.0, weight_decay=0.0)
    task = make_task(nn.Sequential(nn.Linear(6, 2000), nn.ReLU(), nn.Linear(2000, 8)))
    method = dp_fedavg(5.0, training=training, clip=1e-3, sampling="shuffled")
    state = torch.get_rng_state()
    first, again, other = (moved(task, train_one(task, method, seed=seed).weights) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    clean = moved(task, train_one(task, dataclasses.replace(method, phases=_without_noise(method))).weights)
    noise = (first - clean) * 20
    assert float(noise.std()) == pytest.approx(5.0 * 1e-3, rel=0.03)  # 30,000 values: deviation known to 0.4 %
    assert abs(float(noise.mean())) < 5.0 * 1e-3 * 4 / len(noise) ** 0.5


def _without_noise(method: DirectMethod) -> tuple[Phase, ...]:
    return tuple(
        phase.replace(privacy=phase.privacy and phase.privacy.replace(noise_multiplier=0.0)) for phase in method.phases
    )


def test_a_step_without_examples_is_noise_alone() -> None:
    training = LocalTraining(epochs=1, lr=1.0, batch_size=1, momentum=0.0, weight_decay=0.0)
    task = make_task(n=4)
    phase = Phase(trains="both", epochs=1, lr=1.0, privacy=Privacy(noise_multiplier=1.0))
    start = ClientWeights(task.initial_body(), task.initial_head())
    empty = next(seed for seed in range(2000) if not any(len(index) for index in poisson_batches(4, 1, 1, seed)))
    (found,), (loss,) = train_phase(LocalModel(task), [Learner(0, start, empty)], phase, training)
    assert loss == 0
    assert float(moved(task, found).std()) == pytest.approx(0.04 * 4**0.5, rel=0.3)  # four steps of noise


def test_centaur_and_ppsgd_keep_the_head_and_train_it_without_noise() -> None:
    task = make_task()
    for method in (centaur(3.0, training=TRAINING), ppsgd(3.0, training=TRAINING)):
        found = train_one(task, method)
        assert {name.partition(".")[0] for name in found.update.tensors} == {"body"}
        assert {name.partition(".")[0] for name in found.private} == {"head"}
        assert not torch.equal(found.weights.head, task.initial_head())
    quiet, loud = (train_one(task, centaur(noise, training=TRAINING)) for noise in (0.0, 9.0))
    assert torch.equal(quiet.weights.head, loud.weights.head)
    assert not torch.equal(quiet.weights.body, loud.weights.body)


def test_ppsgd_takes_the_bodys_gradient_at_the_new_head() -> None:
    training = LocalTraining(epochs=1, lr=1.0, head_lr=0.5, batch_size=20, momentum=0.0, weight_decay=0.0)
    task = make_task()
    found = train_one(task, ppsgd(0.0, training=training, clip=0.02, sampling="shuffled"))
    model, (inputs, targets) = LocalModel(task), task.client(0).train
    body, head = task.initial_body(), task.initial_head().requires_grad_()
    head = (head - 0.5 * torch.autograd.grad(model.loss(body, head, inputs, targets), head)[0]).detach()
    torch.testing.assert_close(found.weights.head, head)
    model.train("body")
    wanted = by_vmap(PrivateStep(model, body, head, (inputs, targets), torch.ones(20, dtype=torch.bool), "body", 0.02))
    assert wanted.body is not None
    torch.testing.assert_close(found.weights.body, body - wanted.body / 20)


@pytest.mark.parametrize("make", [dp_fedavg, centaur, ppsgd])
def test_a_federation_learns_with_little_noise_whatever_the_workers(make) -> None:  # type: ignore[no-untyped-def]
    task = make_task(n=60)
    method = make(0.1, training=LocalTraining(epochs=3, lr=0.5, batch_size=20), clip=1.0)
    runs = [train(task, method, Federation(rounds=4, evaluate_every=4), workers=workers) for workers in (1, 2)]
    for client in task.clients:
        assert torch.equal(runs[0].weights(client).body, runs[1].weights(client).body)
    accuracies = list(runs[0].rounds[-1].after.values())
    assert sum(accuracies) / len(accuracies) > 0.8


def test_batch_normalization_is_refused_before_the_first_step() -> None:
    task = make_task(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()))
    with pytest.raises(Unsupported, match="BatchNorm1d"):
        train_one(task, dp_fedavg(1.0, training=TRAINING))


def test_a_step_of_the_head_goes_with_private_training_of_the_body() -> None:
    with pytest.raises(UsageError, match="privately"):
        Phase(trains="body", epochs=1, lr=0.1, head_lr=0.1)


def test_epsilon_is_claimed_only_where_it_holds() -> None:
    assert epsilon_caveats(dp_fedavg(1.0).phases) == ()
    assert epsilon_caveats(fedavg().phases) == ()
    assert [text for text in epsilon_caveats(dp_fedavg(0.0).phases) if "no noise" in text]
    assert [text for text in epsilon_caveats(dp_fedavg(1.0, sampling="shuffled").phases) if "Poisson" in text]
    assert [text for text in epsilon_caveats(centaur(1.0).phases) if "head" in text]
    assert [text for text in epsilon_caveats(ppsgd(1.0).phases) if "head" in text]


def test_batches_are_filled_up_with_their_own_examples() -> None:
    index, mask = padded(torch.tensor([5, 3, 9]), 8)
    assert index.tolist() == [5, 3, 9, 5, 5, 5, 5, 5]
    assert mask.tolist() == [True] * 3 + [False] * 5
    assert [len(part) for part in padded(torch.arange(16), 8)] == [16, 16]
