"""Buffers belong to a client, never to a process: the same bits for any number of workers and any network."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable

import pytest
import torch
from federation_under_test import examples
from torch import Tensor, nn

from netweight.errors import Unsupported, UsageError
from netweight.methods.federate import ClientData, Federation, HyperFL, LocalTraining, Task, fedavg, train
from netweight.methods.federate.algorithms.averaged_statistics import AveragedStatistics
from netweight.methods.federate.algorithms.direct import fedavg_private_head
from netweight.methods.federate.algorithms.fedbn import FedBN
from netweight.methods.federate.algorithms.private_sgd import dp_fedavg
from netweight.methods.federate.clipped_gradients import PrivateStep, by_examples, by_opacus, clipped_sum
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.finished import state_dicts
from netweight.methods.federate.local_model import LocalModel

TRAINING = LocalTraining(epochs=2, lr=0.05, batch_size=5)
ONCE = TRAINING.replace(epochs=1)


class MovingAverage(nn.Module):
    """Subtracts a moving average that is assigned anew in every batch."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class CachedPositions(nn.Module):
    """Adds positions from a table that is made when it is first needed and longer when a longer input comes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1])
        return x + self.table[: x.shape[1]]


class Counted(nn.Module):
    """Counts batches in an integer buffer, and scales by it."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x * (1 + 0.01 * self.steps)


class Sequence(nn.Module):
    """Reads the six inputs as a sequence of three."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x.view(-1, 3, 2))
        return (found[0] if isinstance(found, tuple) else found)[:, -1]


class Attention(nn.Module):
    """Attends over three positions."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.attention = nn.Linear(2, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.into(x.view(-1, 3, 2))
        return self.out(self.attention(seen, seen, seen, need_weights=False)[0].mean(1))


class LowRankLayer(nn.Module):
    """A frozen linear layer with trained factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6) * 0.3), nn.Parameter(torch.randn(5, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class TiedLayers(nn.Module):
    """Two layers that share one weight and have a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Symmetric(nn.Module):
    """A parametrization by the symmetric part of a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


def symmetric() -> nn.Module:
    return nn.utils.parametrize.register_parametrization(nn.Linear(5, 5), "weight", Symmetric())


def linear() -> nn.Linear:
    return nn.Linear(6, 5)


def weight_norm_by_hook() -> nn.Module:
    with warnings.catch_warnings():  # deprecated, and in many networks
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(linear())


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(linear(), layer, nn.Tanh(), layer)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "plain": lambda: (nn.Sequential(linear(), nn.Tanh()), nn.Linear(5, 3)),
    "batch norm in the body": lambda: (nn.Sequential(linear(), nn.BatchNorm1d(5), nn.ReLU()), nn.Linear(5, 3)),
    "batch norm in the head": lambda: (linear(), nn.Sequential(nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))),
    "batch norm in both": lambda: (
        nn.Sequential(linear(), nn.BatchNorm1d(5)), nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    ),
    "cumulative batch norm": lambda: (nn.Sequential(linear(), nn.BatchNorm1d(5, momentum=None)), nn.Linear(5, 3)),
    "spectral norm": lambda: (
        nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), nn.Tanh()), nn.Linear(5, 3)
    ),
    "spectral norm, hook": lambda: (nn.Sequential(nn.utils.spectral_norm(linear()), nn.Tanh()), nn.Linear(5, 3)),
    "moving average": lambda: (nn.Sequential(linear(), MovingAverage(), nn.Tanh()), nn.Linear(5, 3)),
    "cached positions": lambda: (nn.Sequential(CachedPositions(), linear(), nn.Tanh()), nn.Linear(5, 3)),
    "counted batches": lambda: (nn.Sequential(linear(), Counted(), nn.Tanh()), nn.Linear(5, 3)),
    "dropout": lambda: (
        nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.4)), nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 3))
    ),
    "dropout and batch norm": lambda: (
        nn.Sequential(linear(), nn.BatchNorm1d(5), nn.Dropout(0.4)), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    ),
    "group norm": lambda: (nn.Sequential(linear(), nn.GroupNorm(1, 5), nn.ReLU()), nn.Linear(5, 3)),
    "instance norm with statistics": lambda: (
        nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), linear()),
        nn.Linear(5, 3),
    ),
    "gru": lambda: (Sequence(nn.GRU(2, 5, batch_first=True)), nn.Linear(5, 3)),
    "lstm with dropout": lambda: (Sequence(nn.LSTM(2, 5, 2, dropout=0.3, batch_first=True)), nn.Linear(5, 3)),
    "attention": lambda: (Attention(), nn.Linear(5, 3)),
    "one layer twice": lambda: (twice(nn.Linear(5, 5)), nn.Linear(5, 3)),
    "tied weights": lambda: (nn.Sequential(linear(), TiedLayers()), nn.Linear(5, 3)),
    "weight norm": lambda: (nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.Tanh()), nn.Linear(5, 3)),
    "parametrization in the head": lambda: (
        nn.Sequential(linear(), nn.Tanh()), nn.Sequential(symmetric(), nn.Linear(5, 3))
    ),
    "orthogonal": lambda: (
        nn.Sequential(linear(), nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)), nn.Tanh()), nn.Linear(5, 3)
    ),
}  # fmt: skip


def task_of(name: str, sizes: tuple[int, ...] = (8, 20, 13, 9, 20)) -> Task:
    torch.manual_seed(0)
    body, head = NETWORKS[name]()
    return Task(body, head, [ClientData(examples(n, 10 + i), examples(10, 900 + i)) for i, n in enumerate(sizes)])


def same_bits(one: TrainedFederation, two: TrainedFederation) -> None:
    assert all(torch.equal(value, two.state[name]) for name, value in one.state.items())
    for client, tensors in one.private.items():
        assert all(torch.equal(value, two.private[client][name]) for name, value in tensors.items())
    assert [done.after for done in one.rounds] == [done.after for done in two.rounds]


@pytest.mark.parametrize("name", NETWORKS)
def test_any_number_of_workers_gives_the_same_bits(name: str) -> None:
    methods = [fedavg(ONCE)]
    if any(True for module in task_of(name).body.modules() for _ in module.buffers(recurse=False)):
        methods += [AveragedStatistics(fedavg_private_head(ONCE)), FedBN(fedavg(ONCE))]
    for method in methods:
        several = (2, 4) if name == "dropout and batch norm" else (4,)
        alone, *others = (
            train(task_of(name), method, Federation(rounds=2), workers=workers) for workers in (1, *several)
        )
        for run in others:
            same_bits(alone, run)


@pytest.mark.parametrize("name", NETWORKS)
def test_hyperfl_trains_every_network_alike(name: str) -> None:
    method = HyperFL(ONCE, embedding=4, hidden=(16,))
    one, two = (train(task_of(name), method, Federation(rounds=2), workers=workers) for workers in (1, 2))
    for key, value in one.state.items():  # products of clients side by side round in another order
        torch.testing.assert_close(value, two.state[key], rtol=1e-4, atol=1e-5)


def test_a_run_leaves_the_users_network_as_it_was_and_can_be_repeated() -> None:
    task = task_of("dropout and batch norm")
    before = {name: value.clone() for name, value in [*task.body.state_dict().items(), *task.head.state_dict().items()]}
    same_bits(*(train(task, fedavg(TRAINING), Federation(rounds=2)) for _ in range(2)))
    after = dict([*task.body.state_dict().items(), *task.head.state_dict().items()])
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_batch_norm_trains_as_torch_trains_it() -> None:
    """One client, one round: the weights and the statistics of an ordinary loop."""
    for name in ("batch norm in the head", "batch norm in both", "moving average"):
        task = task_of(name, sizes=(20,))
        run = train(task, fedavg(LocalTraining(epochs=1, lr=0.1, batch_size=20)), Federation(rounds=1))
        torch.manual_seed(0)
        whole = nn.Sequential(*NETWORKS[name]()).train()
        optimizer = torch.optim.SGD(whole.parameters(), 0.1, 0.5, weight_decay=5e-4)
        inputs, targets = task.client(0).train
        nn.functional.cross_entropy(whole(inputs), targets).backward()
        optimizer.step()
        found = {**run.state, **{n.removeprefix("statistics."): v for n, v in run.private[0].items()}}
        for key, value in whole.state_dict().items():
            half, _, rest = key.partition(".")
            torch.testing.assert_close(
                found[f"{'body' if half == '0' else 'head'}.{rest}"], value, atol=1e-5, rtol=1e-4
            )


def test_averaged_statistics_are_the_mean_and_the_same_for_all() -> None:
    task, kept = task_of("batch norm in both", (20, 20)), fedavg(TRAINING)
    own = train(task, kept, Federation(rounds=1, aggregator="mean"))
    run = train(task, AveragedStatistics(kept), Federation(rounds=1, aggregator="mean"))
    for name in ("statistics.body.1.running_mean", "statistics.head.1.running_var"):
        mean = sum(own.private[client][name] for client in task.clients) / 2
        torch.testing.assert_close(run.state[name], mean)
        assert all(name not in run.private[client] for client in task.clients)
    assert int(run.state["statistics.body.1.num_batches_tracked"]) == 8
    assert torch.equal(
        run.weights(0).statistics["body.1.running_mean"], run.weights(1).statistics["body.1.running_mean"]
    )


@pytest.mark.parametrize("n", [6, 11, 16])
def test_a_last_batch_of_one_joins_the_batch_before(n: int) -> None:
    task = task_of("batch norm in both", (n, 10))
    assert task.habits.needs_two
    run = train(task, fedavg(TRAINING), Federation(rounds=1))
    assert int(run.private[0]["statistics.body.1.num_batches_tracked"]) == 2 * (n // 5)
    plain = train(task_of("plain", (n, 10)), fedavg(TRAINING), Federation(rounds=1))
    assert plain.rounds[0].after


def test_batches_of_single_examples_are_refused_with_a_cure() -> None:
    with pytest.raises(UsageError, match="GroupNorm"):
        train(task_of("batch norm in the body", (1, 10)), fedavg(TRAINING), Federation(rounds=1))
    with pytest.raises(UsageError, match="batch size of at least 2"):
        train(task_of("batch norm in the body"), fedavg(TRAINING.replace(batch_size=1)), Federation(rounds=1))


def test_halves_that_share_a_weight_are_refused() -> None:
    shared = nn.Linear(5, 5)
    data = [ClientData(examples(10, 1), examples(10, 2))]
    with pytest.raises(UsageError, match=r"'1\.weight' and the head's weight '0\.weight' are one and the same"):
        Task(nn.Sequential(linear(), shared), nn.Sequential(shared, nn.Linear(5, 3)), data)
    tied = nn.Linear(5, 5)
    tied.weight = nn.Parameter(shared.weight.data)  # another parameter in the same memory
    with pytest.raises(UsageError, match="one and the same"):
        Task(nn.Sequential(linear(), shared), nn.Sequential(tied, nn.Linear(5, 3)), data)
    shared.requires_grad_(False)
    assert Task(nn.Sequential(linear(), shared), nn.Sequential(shared, nn.Linear(5, 3)), data)


class Remembers(nn.Module):
    """Keeps a sum of what it saw as an ordinary attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean(0)
        return x + self.seen


class BeginsFromData(nn.Module):
    """Takes its shift from the first batch, as a buffer that has no value before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is None:
            self.shift = x.mean(0).detach()
        return x - self.shift


@pytest.mark.parametrize(("layer", "name"), [(Remembers, "body.0.seen"), (BeginsFromData, "body.0.shift")])
def test_state_that_no_client_could_own_is_refused_by_name(layer: type[nn.Module], name: str) -> None:
    data = [ClientData(examples(10, 1), examples(10, 2))]
    with pytest.raises(Unsupported, match=name):
        train(Task(nn.Sequential(layer(), linear()), nn.Linear(5, 3), data), fedavg(TRAINING), Federation(rounds=1))


class Draws(nn.Module):
    """Draws by Python's generator or by one of its own, so rarely that trials seldom show it."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = torch.Generator() if own else None

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random() if self.own is None else float(torch.rand((), generator=self.own))
        return x * 0 if self.training and drawn < 0.001 else x


class ActsLate(nn.Module):
    """Counts batches, and changes what it does after fifty."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += self.training
        return x if self.batches < 50 else 0.1 * x


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Draws(own=False), "by Python or NumPy"),
        (Draws(own=True), "generator of its own, 'body.1.own'"),
        (ActsLate(), "keeps 'body.1.batches' from batch to batch"),
    ],
)
def test_state_that_acts_rarely_is_refused(layer: nn.Module, words: str) -> None:
    task = Task(nn.Sequential(nn.Linear(6, 5), layer), nn.Linear(5, 3), [ClientData(examples(12, 0), examples(6, 1))])
    with pytest.raises(Unsupported, match=words):
        _ = task.habits


def test_a_weight_under_two_names_is_exported_under_both() -> None:
    task = Task(
        nn.Sequential(nn.Linear(6, 5), TiedLayers()), nn.Linear(5, 3), [ClientData(examples(12, 0), examples(6, 1))]
    )
    run = train(task, fedavg(ONCE), Federation(rounds=1))
    body, _ = state_dicts(task, run.weights(0))
    assert torch.equal(body["1.first.weight"], body["1.second.weight"])
    task.body.load_state_dict(body)
    assert torch.equal(task.body_layout.join(dict(task.body.named_parameters())), run.weights(0).body)


def test_complex_buffers_are_averaged() -> None:
    body = nn.Linear(6, 5)
    body.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
    run = train(
        Task(body, nn.Linear(5, 3), [ClientData(examples(12, c), examples(6, c)) for c in (0, 1)]),
        AveragedStatistics(fedavg(ONCE)),
        Federation(rounds=1),
    )
    torch.testing.assert_close(run.state["statistics.body.turns"], body.turns)


def test_weight_norm_by_a_hook_is_refused_with_its_successor() -> None:
    data = [ClientData(examples(8, 1), examples(8, 2))] * 2
    task = Task(nn.Sequential(weight_norm_by_hook(), nn.Tanh()), nn.Linear(5, 3), data)
    with pytest.raises(Unsupported, match=r"torch\.nn\.utils\.parametrizations"):
        train(task, fedavg(TRAINING), Federation(rounds=1), workers=1)


def test_a_network_for_other_inputs_is_refused_without_torchs_traceback() -> None:
    data = [ClientData(examples(10, 1), examples(10, 2))]
    with pytest.raises(UsageError, match=r"cannot take the training inputs of client 0, .* \(n, 6\)"):
        train(Task(nn.Linear(7, 5), nn.Linear(5, 3), data), fedavg(TRAINING), Federation(rounds=1))


# ---- differential privacy for layers that people use -----------------------------------------------------------------

PRIVATE: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: Sequence(nn.GRU(2, 5, batch_first=True)),
    "two gru, both ways": lambda: nn.Sequential(
        Sequence(nn.GRU(2, 5, 2, batch_first=True, bidirectional=True)), nn.Linear(10, 5)
    ),
    "rnn": lambda: Sequence(nn.RNN(2, 5, batch_first=True)),
    "rnn, relu": lambda: Sequence(nn.RNN(2, 5, batch_first=True, nonlinearity="relu")),
    "lstm": lambda: Sequence(nn.LSTM(2, 5, batch_first=True)),
    "attention": Attention,
    "transformer layer": lambda: Sequence(
        nn.Sequential(
            nn.Linear(2, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(4, 5)
        )
    ),
    "lora": LowRankLayer,
    "embedding of bins": lambda: nn.Sequential(nn.LayerNorm(6), linear(), nn.GroupNorm(1, 5)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(linear()),
    "one layer twice": lambda: twice(nn.Linear(5, 5)),
}  # fmt: skip


def private_step(name: str) -> PrivateStep:
    torch.manual_seed(0)
    inputs, targets = examples(12, 3)
    task = Task(PRIVATE[name](), nn.Linear(5, 3), [ClientData((inputs, targets), (inputs, targets))])
    model = LocalModel(task)
    model.train("both")
    if name == "spectral norm":  # its vectors move in training mode, with every example of a loop
        model.body.eval()
    mask = torch.tensor([True] * 11 + [False])
    return PrivateStep(model, task.initial_body(), task.initial_head(), (inputs, targets), mask, "both", 0.5)


@pytest.mark.parametrize("name", PRIVATE)
def test_clipped_sums_are_those_of_a_loop_over_examples(name: str) -> None:
    step = private_step(name)
    body, head, total = step.model.body, step.model.head, 0
    weights = [p for p in [*body.parameters(), *head.parameters()] if p.requires_grad]
    for x, y in zip(step.batch[0][:11], step.batch[1][:11], strict=True):
        slopes = torch.autograd.grad(nn.functional.cross_entropy(head(body(x[None])), y[None]), weights)
        own = torch.cat([slope.flatten() for slope in slopes])
        total = total + own * min(1.0, 0.5 / float(own.norm()))
    found = clipped_sum(step)
    torch.testing.assert_close(torch.cat([found.body, found.head]), total, rtol=1e-4, atol=1e-5)  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["gru", "two gru, both ways", "rnn", "rnn, relu", "lstm", "lora"])
def test_opacus_and_a_loop_agree(name: str) -> None:
    pytest.importorskip("opacus")
    step = private_step(name)
    for trains in ("both", "body", "head"):
        own = dataclasses.replace(step, trains=trains)  # type: ignore[arg-type]
        one, two = by_opacus(own), by_examples(own)
        for half in ("body", "head"):
            a, b = getattr(one, half), getattr(two, half)
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Halved(nn.Module):
    """Computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        computed: Tensor = self.layer(x.bfloat16())
        return computed.float()


class TimeFirst(nn.Module):
    """Reads six inputs as a sequence of six, with time before the examples, as recurrent layers do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer = nn.Linear(1, 4), nn.GRU(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.layer(self.into(x.T[:, :, None]))[0][-1]
        return read


class CenteredBatch(nn.Module):
    """Subtracts the mean of the batch, and keeps nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def step_of(body: nn.Module, count: int) -> PrivateStep:
    torch.manual_seed(0)
    task = Task(body, nn.Linear(5, 3), [ClientData(examples(count, 0), examples(6, 1))])
    model = LocalModel(task)
    model.train("both")
    batch, mask = task.client(0).train, torch.ones(count, dtype=torch.bool)
    return PrivateStep(
        model, task.initial_body(), task.initial_head(), batch, mask, "both", 0.01, model.layer_state({}, 0)
    )


@pytest.mark.parametrize("count", [6, 8])
def test_examples_are_not_taken_for_points_in_time(count: int) -> None:
    """Opacus would, and without an error where there are as many of both."""
    step = step_of(TimeFirst(), count)
    torch.testing.assert_close(clipped_sum(step).body, by_examples(step).body, rtol=1e-4, atol=1e-6)


def test_weights_that_a_hook_computes_have_gradients_of_examples() -> None:
    step = step_of(nn.utils.spectral_norm(nn.Linear(6, 5)), 8)
    norms = clipped_sum(step).norms
    assert norms.shape == (8,)
    assert bool((norms > 0).all())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (nn.Sequential(nn.Linear(6, 5), CenteredBatch()), "depend on the other examples of its batch"),
        (Halved(), "weights are bfloat16"),
    ],
)
def test_dp_refuses_what_no_norm_of_one_example_holds_for(body: nn.Module, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        clipped_sum(step_of(body, 8))


@pytest.mark.parametrize("name", ["gru", "attention", "dropout"])
def test_dp_fedavg_trains_them_with_any_number_of_workers(name: str) -> None:
    method = dp_fedavg(1.0, training=TRAINING, clip=1.0)
    same_bits(*(train(task_of(name), method, Federation(rounds=1), workers=workers) for workers in (1, 2)))


@pytest.mark.parametrize("name", ["batch norm in the head", "moving average"])
def test_dp_refuses_buffers_that_are_computed_from_examples(name: str) -> None:
    with pytest.raises(Unsupported, match="privacy"):
        train(task_of(name), dp_fedavg(1.0, training=TRAINING), Federation(rounds=1))
