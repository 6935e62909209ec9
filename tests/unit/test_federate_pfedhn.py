"""pFedHN and pFedHN-PC: the server's step against autograd, learning, and the methods' catalog."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from netweight.errors import NameNotFound, UsageError
from netweight.methods.federate import ClientData, Federation, LocalTraining, Task, train
from netweight.methods.federate.algorithms.pfedhn import (
    PFedHN,
    ServerHypernetwork,
    first_state,
    pfedhn,
    pfedhn_pc,
)
from netweight.methods.federate.catalog import METHODS, named_method
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.observation import observe, read_update
from netweight.methods.federate.threats import ThreatModel
from netweight.methods.federate.updates import Update, check_allow_list
from netweight.nn import Hypernetwork, ParameterLayout

DIGITS = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")


def digits_task(clients: int = 4) -> Task:
    """Handwritten digits; each client has three classes, and no two the same."""
    torch.manual_seed(0)
    data = DIGITS.load_digits()
    images = torch.from_numpy(data.data).float() / 16
    labels = torch.from_numpy(data.target).long()
    parts = []
    for client in range(clients):
        mine = torch.nonzero(sum(labels == (2 * client + k) % 10 for k in range(3))).flatten()
        learn, test = mine[::2][:120], mine[1::2][:100]
        parts.append(ClientData((images[learn], labels[learn]), (images[test], labels[test])))
    return Task(nn.Sequential(nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, 10), parts)


def test_the_servers_steps_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    layout = ParameterLayout(("body.a", "head.b"), (torch.Size([3, 4]), torch.Size([5])))
    network = Hypernetwork(17, embedding=2, hidden=(6, 7)).double()
    embeddings = nn.Embedding(3, 2).double()
    state = first_state(network, embeddings.weight.detach().clone(), (4, 9, 11), layout)
    given = {name: value.clone() for name, value in state.items()}
    optimizer = torch.optim.SGD(
        [*network.parameters(), *embeddings.parameters()], lr=0.3, momentum=0.9, weight_decay=0.1
    )
    server = ServerHypernetwork(state)
    parameters = [*network.parameters(), *embeddings.parameters()]
    clipped = []
    for asked, scale in itertools.product(((4,), (9, 11)), (1.0, 0.01)):
        gradients = {
            client: {"body.a": scale * torch.randn(3, 4).double(), "head.b": scale * torch.randn(5).double()}
            for client in asked
        }
        server.step(gradients, PFedHN(lr=0.3, momentum=0.9, weight_decay=0.1, clip=2.0))
        optimizer.zero_grad()
        for client, gradient in gradients.items():
            network(embeddings(torch.tensor((4, 9, 11).index(client)))).backward(layout.join(gradient))
        clipped.append(float(nn.utils.clip_grad_norm_(parameters, 2.0)) > 2.0)
        optimizer.step()
    assert set(clipped) == {True, False}
    for name, value in network.named_parameters():
        torch.testing.assert_close(server.state[name], value.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(server.state["embeddings"], embeddings.weight.detach(), rtol=1e-10, atol=1e-10)
    generated = network(embeddings(torch.tensor(1))).detach()
    torch.testing.assert_close(layout.join(server.generate(9)), generated, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(state[name], value) for name, value in given.items())  # what was given is unchanged


def test_one_step_follows_all_clients_in_any_order() -> None:
    task, method = digits_task(), pfedhn()
    state = method.start(task, seed=0)
    generator = torch.Generator().manual_seed(0)
    moves, updates = {}, []
    for client in task.clients:
        sent = method.message(state, client)
        moves[client] = {name: torch.randn(value.shape, generator=generator) for name, value in sent.items()}
        updates.append(Update(client, 10, {name: value + moves[client][name] for name, value in sent.items()}))
    joined = method.aggregate(state, updates)
    assert all(torch.equal(joined[name], value) for name, value in method.aggregate(state, updates[::-1]).items())
    server = ServerHypernetwork(state)
    against = {client: {name: -value for name, value in move.items()} for client, move in moves.items()}
    server.step(against, PFedHN())
    for name, value in server.state.items():
        torch.testing.assert_close(joined[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [pfedhn, pfedhn_pc])
def test_digits_are_learned_before_and_after_local_training(make, tmp_path) -> None:  # type: ignore[no-untyped-def]
    task = digits_task()
    method = dataclasses.replace(make(LocalTraining(lr=0.02, batch_size=32, momentum=0.9)), steps=10, lr=1e-2)
    asked = Federation(rounds=25, evaluate_every=25)
    run = train(task, method, asked, workers=1)
    before, after = (sum(found.values()) / 4 for found in (run.rounds[-1].before, run.rounds[-1].after))
    assert before > 0.85  # what the hypernetwork alone gives each client
    assert after > 0.9
    train(task, method, asked.replace(rounds=12), workers=2, folder=tmp_path)
    resumed = train(task, method, asked, workers=2, folder=tmp_path)
    for client in task.clients:
        assert torch.equal(run.weights(client).body, resumed.weights(client).body)


def test_what_leaves_a_client_is_its_generated_model_alone() -> None:
    task = digits_task()
    for method, kept in ((pfedhn(), set()), (pfedhn_pc(), {"head.weight", "head.bias"})):
        run = train(task, dataclasses.replace(method, steps=1), Federation(rounds=1), workers=1)
        assert set(run.private[0]) == kept
        sent = method.message(run.state, 0)
        check_allow_list(sent, method.shared, client=0)
        assert {name.partition(".")[0] for name in sent} == ({"body"} if kept else {"body", "head"})
    with pytest.raises(NameNotFound, match="no embedding of client 77"):
        pfedhn().message(run.state, 77)


def test_sizes_follow_the_paper() -> None:
    task = digits_task(clients=9)
    state = pfedhn().start(task, seed=0)
    assert state["embeddings"].shape == (9, 1 + 9 // 4)
    assert state["heads.weight"].shape == (64 * 16 + 16 + 16 * 10 + 10, 100)
    assert pfedhn_pc().start(task, seed=0)["heads.weight"].shape == (64 * 16 + 16, 100)
    assert (pfedhn().lr, pfedhn_pc().lr) == (1e-2, 5e-2)
    with pytest.raises(UsageError, match="0 local steps"):
        PFedHN(steps=0)


def test_the_catalog_makes_every_method_under_its_name() -> None:
    task = digits_task()
    for name, entry in METHODS.items():
        noise = 1.0 if entry.private else None
        method = named_method(name, noise_multiplier=noise)
        assert method.name == name
        quick = named_method(name, training=LocalTraining(epochs=1, batch_size=100), noise_multiplier=noise)
        assert len(train(task, quick, Federation(rounds=1), workers=1).rounds) == 1
    with pytest.raises(NameNotFound, match="Nearest: fedavg"):
        named_method("fedavgg")
    with pytest.raises(UsageError, match="needs noise"):
        named_method("centaur")
    with pytest.raises(UsageError, match="adds no noise"):
        named_method("fedavg", noise_multiplier=1.0)


def test_a_server_that_asks_for_one_step_reads_the_gradient() -> None:
    task = digits_task()
    run = TrainedFederation(task, pfedhn_pc(), {}, {}, (), 0)
    (seen,) = observe(run, ThreatModel(first_round=True), [2], seed=0)
    recovered = read_update(run, seen.message, seen.answer())
    assert float(torch.cosine_similarity(recovered.first, seen.gradient.double(), dim=0)) > 0.9999
