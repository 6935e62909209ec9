"""HyperFL's low-rank training against a hypernetwork that torch trains densely."""

from __future__ import annotations

import pytest
import torch
from federation_under_test import as_double, small_task
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from netweight.core import seeds
from netweight.errors import UsageError
from netweight.methods.federate import HyperFL, LocalTraining, Task
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.local import shuffled_batches
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, LocalResult
from netweight.methods.federate.updates import LowRankUpdate


def started(task: Task, method: HyperFL) -> list[Client]:
    """Return every client of the task in double precision, each with an embedding of its own."""
    state = {name: value.double() for name, value in method.start(task, seed=1).items()}
    clients = []
    for number in task.clients:
        private = {name: value.double() for name, value in method.private_start(task, number, seed=1).items()}
        private["embedding"] = torch.randn(method.embedding, generator=torch.Generator().manual_seed(number)).double()
        clients.append(Client(number, private, state))
    return clients


def train_densely(
    task: Task, method: HyperFL, client: Client, round: int, seed: int
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Train one client as the paper's algorithm says, with torch's modules, optimizers and clipping."""
    training, data = method.training, task.client(client.number)
    draw = seeds.derive(seed, "client", client.number, "round", round)
    network = method.hypernetwork(task).double()
    network.load_state_dict({name.removeprefix("hypernetwork."): value for name, value in client.message.items()})
    embedding = nn.Parameter(client.private["embedding"].clone())
    head = nn.Linear(*reversed(task.head.weight.shape)).double()
    head.load_state_dict({k.removeprefix("head."): v for k, v in client.private.items() if k.startswith("head.")})

    def body(inputs: Tensor) -> Tensor:
        return functional_call(task.body, task.body_layout.split(network(embedding)), (inputs,))

    def optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=training.momentum, weight_decay=training.weight_decay)

    inputs, targets = data.train
    first = optimizer(list(head.parameters()), training.head_lr)
    for index in shuffled_batches(data.n, training.batch_size, training.head_epochs, seeds.derive(draw, "head")):
        first.zero_grad()
        task.loss(head(body(inputs[index]).detach()), targets[index]).backward()
        first.step()
    second = optimizer([*network.parameters(), embedding], training.lr)
    for index in shuffled_batches(data.n, training.batch_size, training.epochs, draw):
        second.zero_grad()
        head.zero_grad()
        task.loss(head(body(inputs[index])), targets[index]).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), training.clip)
        torch.nn.utils.clip_grad_norm_([embedding], training.clip)
        second.step()
    shared = {f"hypernetwork.{name}": value.detach() for name, value in network.named_parameters()}
    return shared, embedding.detach(), network(embedding).detach(), head.weight.detach()


def run(task: Task, method: HyperFL, clients: list[Client]) -> list[LocalResult]:
    return method.train(task, LocalModel(task), clients, round=3, seed=7)


def dense(tensor: Tensor | LowRankUpdate, base: Tensor) -> Tensor:
    return tensor.dense(base) if isinstance(tensor, LowRankUpdate) else tensor


@settings(max_examples=20)
@given(
    hidden=st.sampled_from([(16,), (8, 12), (3,)]),
    batch=st.integers(3, 9),
    epochs=st.integers(1, 2),
    clip=st.sampled_from([0.05, 0.5, 50.0]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.05]),
)
def test_low_rank_training_is_dense_sgd(
    hidden: tuple[int, ...], batch: int, epochs: int, clip: float, momentum: float, decay: float
) -> None:
    task = as_double(small_task(sizes=(9, 17, 5)))
    training = LocalTraining(epochs=epochs, lr=0.1, batch_size=batch, momentum=momentum, weight_decay=decay, clip=clip)
    method = HyperFL(training, embedding=4, hidden=hidden)
    clients = started(task, method)
    for client, trained in zip(clients, run(task, method, clients), strict=True):
        shared, embedding, body, head = train_densely(task, method, client, 3, 7)
        for name, value in shared.items():
            found = dense(trained.update.tensors[name], client.message[name])
            torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trained.private["embedding"], embedding, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trained.weights.body, body, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(trained.private["head.weight"], head, rtol=1e-10, atol=1e-10)


def test_clipping_is_active_where_it_is_tested() -> None:
    task = as_double(small_task(sizes=(9,)))
    loose, tight = (HyperFL(LocalTraining(batch_size=5, clip=clip), embedding=4, hidden=(16,)) for clip in (50.0, 0.05))
    moved = [
        float((run(task, method, clients)[0].private["embedding"] - clients[0].private["embedding"]).norm())
        for method in (loose, tight)
        for clients in [started(task, method)]
    ]
    assert moved[1] < 0.9 * moved[0]


def test_updates_are_low_rank_until_that_is_larger() -> None:
    task = small_task(clients=1, n=20)
    few, many = (HyperFL(LocalTraining(epochs=e, batch_size=5), embedding=4, hidden=(16,)) for e in (2, 5))
    for method, kind in ((few, LowRankUpdate), (many, Tensor)):
        client = Client(0, method.private_start(task, 0, seed=1), method.start(task, seed=1))
        update = method.train(task, LocalModel(task), [client], round=1, seed=1)[0].update
        assert isinstance(update.tensors["hypernetwork.heads.weight"], kind)


def test_low_rank_updates_average_like_dense_ones() -> None:
    task = as_double(small_task(sizes=(9, 17, 5)))
    method = HyperFL(LocalTraining(batch_size=5), embedding=4, hidden=(32,))
    clients = started(task, method)
    updates = [one.update for one in run(task, method, clients)]
    found = aggregate(clients[0].message, updates)
    for name, base in clients[0].message.items():
        parts = [dense(update.tensors[name], base) * update.n / 31 for update in updates]
        torch.testing.assert_close(found[name], torch.stack(parts).sum(0), rtol=1e-12, atol=1e-12)


def test_weights_are_generated_from_what_was_received() -> None:
    task = small_task()
    method = HyperFL(embedding=4, hidden=(8, 16))
    state, private = method.start(task, seed=1), method.private_start(task, 0, seed=1)
    network = method.hypernetwork(task)
    network.load_state_dict({name.removeprefix("hypernetwork."): value for name, value in state.items()})
    torch.testing.assert_close(method.weights(task, state, private).body, network(private["embedding"]).detach())


def test_starting_from_the_body_generates_it() -> None:
    task = small_task()
    method = HyperFL(start_from="body")
    weights = method.weights(task, method.start(task, seed=1), method.private_start(task, 0, seed=1))
    assert torch.equal(weights.body, task.initial_body())


def test_the_same_seeds_give_the_same_update() -> None:
    task = small_task(clients=2)
    method = HyperFL(LocalTraining(batch_size=5))
    state = method.start(task, seed=1)
    first, again, other = (
        method.train(
            task, LocalModel(task), [Client(0, method.private_start(task, 0, seed=1), state)], round=1, seed=seed
        )[0].update.tensors["hypernetwork.heads.bias"]
        for seed in (5, 5, 6)
    )
    assert isinstance(first, Tensor)
    assert isinstance(again, Tensor)
    assert isinstance(other, Tensor)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(UsageError, match="nowhere"):
        HyperFL(start_from="nowhere")  # type: ignore[arg-type]


def test_an_update_outlives_the_next_round_of_the_same_worker() -> None:
    task, method = as_double(small_task(clients=2)), HyperFL(LocalTraining(batch_size=5, head_epochs=0))
    model, clients = LocalModel(task), started(task, method)
    first = method.train(task, model, clients, round=1, seed=1)
    factors = [one.update.tensors["hypernetwork.heads.weight"] for one in first]
    kept = [(low.left.clone(), low.right.clone()) for low in factors if isinstance(low, LowRankUpdate)]
    assert len(kept) == 2
    del first  # the factors alone must hold on to the memory that the worker would use again
    method.train(task, model, clients, round=2, seed=2)
    for low, (left, right) in zip(factors, kept, strict=True):
        assert isinstance(low, LowRankUpdate)
        assert torch.equal(low.left, left)
        assert torch.equal(low.right, right)
    address = factors[0].left.data_ptr()
    del factors, low
    again = method.train(task, model, clients, round=1, seed=1)[0].update.tensors["hypernetwork.heads.weight"]
    assert isinstance(again, LowRankUpdate)
    assert again.left.data_ptr() != address  # the second round took a block of its own, and this one takes that again
    assert torch.equal(again.left, kept[0][0])


class Same(nn.Module):
    """A head that leaves what it gets as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor) -> Tensor:
        return self.factor * outputs


def test_generating_the_head_too_is_generating_a_longer_body() -> None:
    task = as_double(small_task(clients=2))
    joined = Task(nn.Sequential(task.body, task.head), Same().double(), task.data)
    training = LocalTraining(batch_size=5, head_epochs=0)
    whole = HyperFL(training, start_from="body", private_head=False)
    longer = HyperFL(training, start_from="body")
    state = {name: value.double() for name, value in whole.start(task, seed=1).items()}
    for ours, theirs in zip(
        whole.train(task, LocalModel(task), started(task, whole), round=1, seed=1),
        longer.train(joined, LocalModel(joined), started(joined, longer), round=1, seed=1),
        strict=True,
    ):
        for name, value in theirs.update.tensors.items():
            found, expected = dense(ours.update.tensors[name], state[name]), dense(value, state[name])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.cat([ours.weights.body, ours.weights.head]), theirs.weights.body)
        assert set(ours.private) == {"embedding"}
        again = whole.weights(task, whole.aggregate(state, [ours.update]), ours.private)
        torch.testing.assert_close(again.head, ours.weights.head)
