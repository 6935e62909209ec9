"""Examples, targets, losses and networks that cannot be trained are refused before a round, with the client named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation_under_test import examples, small_task
from torch import Tensor, nn

from netweight.errors import NetweightError, UsageError
from netweight.methods.federate import ClientData, Federation, LocalTraining, Task, fedavg, train
from netweight.methods.federate.algorithms.scaffold import scaffold
from netweight.methods.federate.data_checks import refuse_unfit_examples

TRAINING = LocalTraining(epochs=1, lr=0.05, batch_size=5)
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh())


def with_one_odd_client(*, of_train: Change | None = None, of_test: Change | None = None) -> Task:
    own, test = examples(20, 1), examples(10, 2)
    odd = ClientData(of_train(*own) if of_train else own, of_test(*test) if of_test else test)
    return Task(body(), nn.Linear(5, 3), {4: ClientData(examples(20, 3), examples(10, 4)), 7: odd})


def hole(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    holed = x.clone()
    holed[3, 2], holed[5, 0] = torch.nan, torch.inf
    return holed, y


IN_TRAINING: dict[str, tuple[Change, str]] = {
    "classes from 1": (lambda x, y: (x, y + 1), "training targets of client 7.*out of bounds.*from 0 to 2"),
    "unknown as -1": (lambda x, y: (x, y - 1), "training targets of client 7.*-1 is out of bounds"),
    "int32": (lambda x, y: (x, y.int()), "training targets of client 7, torch.int32"),
    "a column": (lambda x, y: (x, y[:, None]), r"training targets of client 7, torch.int64 of shape \(n, 1\)"),
    "NaN": (hole, "2 of 20 training inputs of client 7 contain NaN or infinity"),
    "fewer columns": (lambda x, y: (x[:, :5], y), r"training inputs of client 7, torch.float32 of shape \(n, 5\)"),
    "float64": (lambda x, y: (x.double(), y), "training inputs of client 7, torch.float64"),
}
IN_TEST: dict[str, tuple[Change, str]] = {
    "classes from 1": (lambda x, y: (x, y + 1), "test targets of client 7, .* from 1 to 3: the network has 3 outputs"),
    "one-hot": (lambda x, y: (x, F.one_hot(y, 3)), r"test targets of client 7, torch.int64 of shape \(n, 3\)"),
    "fractions": (lambda x, y: (x, y.float()), "test targets of client 7, torch.float32"),
    "fewer columns": (lambda x, y: (x[:, :5], y), "test inputs of client 7"),
    "NaN": (hole, "2 of 10 test inputs of client 7"),
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_training_examples_that_cannot_be_learned_name_their_client(name: str) -> None:
    change, words = IN_TRAINING[name]
    with pytest.raises(NetweightError, match=words):
        train(with_one_odd_client(of_train=change), fedavg(TRAINING), Federation(rounds=1), workers=1)


@pytest.mark.parametrize("name", IN_TEST)
def test_test_examples_on_which_accuracy_means_nothing_name_their_client(name: str) -> None:
    change, words = IN_TEST[name]
    with pytest.raises(NetweightError, match=words):
        train(with_one_odd_client(of_test=change), fedavg(TRAINING), Federation(rounds=1), workers=1)


class Tokens(nn.Module):
    """The mean of embeddings of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        mean: Tensor = self.embedding(tokens).mean(1)
        return mean


def test_a_token_outside_of_the_vocabulary_is_met_wherever_it_stands() -> None:
    tokens, labels = torch.zeros(600, 4, dtype=torch.int64), torch.zeros(600, dtype=torch.int64)
    tokens[598, 3] = 7
    data = ClientData((tokens, labels), (tokens[:10], labels[:10]))
    with pytest.raises(NetweightError, match=r"training inputs of client 0.*index out of range"):
        refuse_unfit_examples(Task(Tokens(), nn.Linear(5, 3), [data]), 0)


@pytest.mark.parametrize(
    ("reduction", "words"), [("sum", "The loss is a sum over the examples"), ("none", "more than one value")]
)
def test_a_loss_that_is_no_mean_is_refused(reduction: str, words: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction=reduction)

    task = Task(body(), nn.Linear(5, 3), [ClientData(examples(20, 1), examples(10, 2))], loss)
    with pytest.raises(NetweightError, match=words):
        train(task, fedavg(TRAINING), Federation(rounds=1), workers=1)


def test_soft_targets_and_losses_of_ones_own_pass() -> None:
    x, y = examples(20, 1)
    for targets, loss in (
        (F.one_hot(y, 3).float(), F.cross_entropy),
        (F.one_hot(y, 3).float(), F.binary_cross_entropy_with_logits),
        (torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), F.mse_loss),
    ):
        task = Task(body(), nn.Linear(5, 3), [ClientData((x, targets), examples(10, 2))] * 2, loss)
        assert train(task, fedavg(TRAINING), Federation(rounds=1), workers=1).rounds


def test_networks_without_weights_of_their_own_are_refused_with_a_cure() -> None:
    data = [ClientData(examples(20, 1), examples(10, 2))]
    with pytest.raises(NetweightError, match=r"lazy layer .* Run the network once"):
        Task(nn.Sequential(nn.LazyLinear(5), nn.Tanh()), nn.Linear(5, 3), data)
    spoiled, complex_ = nn.Linear(6, 5), nn.Linear(6, 5, dtype=torch.complex64)
    with torch.no_grad():
        spoiled.weight[0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(6, 5))
    for body_, words in (
        (spoiled, "'weight' contains NaN or infinity"),
        (complex_, r"'weight' is complex .*torch\.complex"),
        (scripted, r"compiled by torch\.jit"),
    ):
        with pytest.raises(NetweightError, match=words):
            Task(body_, nn.Linear(5, 3), data)
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(6, 5))
    with pytest.raises(NetweightError, match=r"torch\.nn\.utils\.parametrizations"):
        train(Task(nn.Sequential(old), nn.Linear(5, 3), data), fedavg(TRAINING), Federation(rounds=1), workers=1)
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)))
    assert train(Task(new, nn.Linear(5, 3), data), fedavg(TRAINING), Federation(rounds=1), workers=1).rounds


class Unused(nn.Module):
    """A body with a layer that its forward leaves out."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(6, 5), nn.Linear(6, 5).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.used(x)
        return hidden


class WithoutGradient(nn.Linear):
    """A layer that computes without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


UNTRAINABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "an unused layer": (Unused, lambda: nn.Linear(5, 3), r"not depend on 2 of 6 weights.*body\.spare"),
    "no gradient": (lambda: WithoutGradient(6, 5), lambda: nn.Linear(5, 3), r"not depend on 2 of 4 weights.*body\."),
    "probabilities": (body, lambda: nn.Sequential(nn.Linear(5, 3), nn.Softmax(1)), "returns probabilities"),
    "overwritten": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.ReLU(inplace=True)),
        lambda: nn.Linear(5, 3),
        "cannot be trained on the examples of client",
    ),
    "several processors": (lambda: nn.DataParallel(body()), lambda: nn.Linear(5, 3), "DataParallel wraps"),
    "several types": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5, dtype=torch.float64)),
        lambda: nn.Linear(5, 3),
        r"several types \(float32, float64\)",
    ),
    "no values": (lambda: nn.Linear(6, 5, device="meta"), lambda: nn.Linear(5, 3), "device meta"),
}


class MeanOfEmbeddings(nn.Module):
    """The mean of embeddings; numbers are rounded to tokens."""

    def __init__(self, **kind: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 5, **kind)

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.table(x.abs().round().long() % 4).mean(1)
        return mean


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"sparse": True}, r"sparse gradients.*sparse=False"),
        ({"max_norm": 1.0}, "forward changes its own weights.*Leave max_norm out"),
        ({"scale_grad_by_freq": True}, "depends on the other examples.*Leave scale_grad_by_freq out"),
    ],
)
def test_embeddings_that_are_not_a_function_of_one_example_are_refused(kind: dict[str, Any], words: str) -> None:
    data = [ClientData(examples(20, 1), examples(10, 2))] * 2
    with pytest.raises(NetweightError, match=words):
        Task(MeanOfEmbeddings(**kind), nn.Linear(5, 3), data)
    task = Task(MeanOfEmbeddings(padding_idx=0), nn.Linear(5, 3), data)
    assert train(task, fedavg(TRAINING), Federation(rounds=1), workers=1).rounds


@pytest.mark.parametrize("layer", [nn.GroupNorm(5, 5), nn.Sequential(nn.Unflatten(1, (5, 1)), nn.LayerNorm(1))])
def test_a_normalization_over_single_values_is_refused(layer: nn.Module) -> None:
    """Reported of other libraries: a network whose outputs are the same for all inputs trains, and learns nothing."""
    data = [ClientData(examples(20, 1), examples(10, 2))]
    with pytest.raises(UsageError, match=r"body\.1.*normalizes single values.*fewer groups"):
        train(Task(nn.Sequential(nn.Linear(6, 5), layer, nn.Flatten()), nn.Linear(5, 3), data), fedavg(TRAINING))
    fitting = Task(nn.Sequential(nn.Linear(6, 5), nn.GroupNorm(1, 5)), nn.Linear(5, 3), data)
    assert train(fitting, fedavg(TRAINING), Federation(rounds=1), workers=1).rounds


def test_targets_that_are_names_are_refused() -> None:
    x, y = examples(20, 1)
    with pytest.raises(UsageError, match=r"training targets of a client are a list, not a tensor.*class numbers"):
        ClientData((x, [str(each) for each in y.tolist()]), (x, y))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_networks_that_would_not_learn_are_refused_with_a_cure(name: str) -> None:
    make_body, make_head, words = UNTRAINABLE[name]
    data = {7: ClientData(examples(20, 1), examples(10, 2))}
    with pytest.raises(NetweightError, match=words) as refusal:
        refuse_unfit_examples(Task(make_body(), make_head(), data), 7)
    assert refusal.value.cure


def test_inputs_too_large_for_the_network_are_refused() -> None:
    """Without the check, a message on what the network keeps from batch to batch names another cause."""
    x, y = examples(20, 1)
    data = {7: ClientData((1e20 * x, y), (x, y))}
    with pytest.raises(UsageError, match=r"NaN or infinity for the training inputs of client 7, whose largest.*Scale"):
        refuse_unfit_examples(Task(nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), nn.Linear(5, 3), data), 7)


def test_one_class_alone_is_refused() -> None:
    """The loss is 0 and the accuracy 100 %, whatever the network is."""
    x, y = examples(20, 1)
    data = {7: ClientData((x, y * 0), (x, y * 0))}
    with pytest.raises(UsageError, match=r"has one output.*at least two outputs"):
        refuse_unfit_examples(Task(body(), nn.Linear(5, 1), data), 7)


def test_a_frozen_layer_that_is_not_used_passes() -> None:
    data = {7: ClientData(examples(20, 1), examples(10, 2))}
    refuse_unfit_examples(Task(Unused(frozen=True), nn.Linear(5, 3), data), 7)


@pytest.mark.parametrize(
    ("fraction", "clients", "asked"), [(0.29, 100, 29), (0.57, 100, 57), (0.3, 10, 3), (0.1, 5, 1)]
)
def test_a_fraction_asks_as_many_clients_as_it_says(fraction: float, clients: int, asked: int) -> None:
    assert Federation(fraction=fraction).sampled(clients) == asked


def test_scaffold_moves_its_control_variate_alike_under_joint_rules() -> None:
    """A median of equal updates is their mean, so that the rule changes nothing but how they are joined."""
    whole = small_task(clients=1, n=20)
    task = Task(whole.body, whole.head, [whole.client(0)] * 5)
    plain = LocalTraining(epochs=1, lr=0.05, momentum=0.0, batch_size=20)
    mean, median = (
        train(task, scaffold(plain), Federation(rounds=2, aggregator=rule), workers=1).state
        for rule in ("mean", "median")
    )
    for name, value in mean.items():
        torch.testing.assert_close(median[name], value, rtol=1e-4, atol=1e-6)
