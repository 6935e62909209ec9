"""The example as people deploy it: a SuperLink and three SuperNodes as processes, with TLS and registered nodes."""

import json

import pytest

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

import torch
from flower_processes import EXAMPLE, Deployment, example_task, lying_example, wait

from netweight.methods.federate import train
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client
from netweight.methods.federate.rounds import Rounds
from netweight.plugins.flower import HISTORY, export_private
from netweight.plugins.flower.server import method_of, settings_of
from netweight.store import open_store

CONFIG = {
    "clients": 3,
    "epochs": 1,
    "seed": 520,
    "min-clients": 2,
    "method": "hyperfl",
    "timeout": 200.0,
    "patience": 1.0,
}
# Sums of clients that train side by side and alone differ by 3e-8; a bound that is left out, by 2e-5.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    deployment = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        deployment.fork()
        deployment.start_server()
        for node in range(3):
            deployment.register(node)
            deployment.start_node(node, **{"rehearsal-seed": CONFIG["seed"]})
        wait(lambda: len(deployment.online()) == 3, 120, "three nodes")
        yield deployment
    finally:
        deployment.stop()
        assert deployment.living() == {}


@pytest.fixture(scope="module")
def expected() -> TrainedFederation:
    """The same federation's first round by the engine of one process."""
    config = {**CONFIG, "rounds": 1}
    return train(example_task(config), method_of(config), settings_of(config), workers=1)


class WithoutTheThird:
    """Carry a round's messages to clients 0 and 1 of an engine's run; client 2 cannot be reached."""

    def __init__(self, run: TrainedFederation) -> None:
        self.run = run

    def reach(self):
        return (0, 1), {2: "gone"}

    def collect(self, trial):
        there = [Client(client, self.run.private[client], sent) for client, sent in trial.messages.items()]
        model = LocalModel(self.run.task)
        trained = self.run.method.train(self.run.task, model, there, round=trial.round, seed=self.run.seed)
        return [one.update for one in trained]

    def finish_round(self, done) -> None:
        pass


def after_a_round_without_the_third(run) -> dict[str, torch.Tensor]:
    """Return the state after one round more, in which the engine bounds and joins the updates of clients 0 and 1."""
    settings = settings_of({**CONFIG, "rounds": 2})
    rounds = Rounds(run.method, settings, run.task.clients, run.state)
    rounds.rounds = list(run.rounds)
    rounds.run_round(WithoutTheThird(run))
    return rounds.state


def largest_difference(folder, state) -> float:
    with open_store(folder / CHECKPOINT) as store:
        saved = {name.removeprefix("state|"): store.get(name) for name in store.names() if name.startswith("state|")}
    assert saved.keys() == state.keys()
    return max((value - saved[name]).abs().max().item() for name, value in state.items())


def finished(deployment, folder, run, rounds):
    """Whether a run ended well, asked when its last round is written: every question is a process of Flower's."""
    written = folder / HISTORY
    wait(lambda: written.exists() and len(json.loads(written.read_text())["rounds"]) == rounds, 400, "the last round")
    return deployment.finish(run) == "finished:completed"


def test_the_example_learns_what_the_engine_of_one_process_learns(deployment, expected):
    folder = deployment.folder / "federation"
    run = deployment.run(EXAMPLE, **CONFIG, rounds=1, folder=str(folder))
    assert finished(deployment, folder, run, rounds=1), deployment.log("server")[-3000:]
    assert largest_difference(folder, expected.state) < TOLERANCE
    rounds = json.loads((folder / HISTORY).read_text())["rounds"]
    assert [done["refusals"] for done in rounds] == [{}]
    assert rounds[0]["after"] == {str(client): value for client, value in expected.rounds[0].after.items()}
    for client in range(3):  # each head is on its own node's disk, and is the one of the other engine
        exported = export_private(
            deployment.folder / f"private-{client}", client, folder / f"head-{client}.safetensors"
        )
        with open_store(exported) as store:
            for name, value in expected.private[client].items():
                assert torch.allclose(store.get(name), value, atol=TOLERANCE)


def test_an_unregistered_node_is_refused(deployment):
    process = deployment.start_node(3)
    assert process.wait(90) != 0
    assert "Failed to activate SuperNode" in deployment.log("node-3")


@pytest.mark.study  # test_flower_apps.py asks the same of the same apps in one process
def test_a_node_that_claims_all_examples_and_another_constant_is_named_and_bounded(deployment, expected):
    """The claim of 2**50 examples with every weight 7, which owned the average once."""
    folder = deployment.folder / "lied to"
    app = lying_example(deployment.folder)
    config = {**CONFIG, "method": "fedavg", "rounds": 1, "folder": str(folder), "lie": "claimed 2"}
    run = deployment.run(app, **config)
    assert finished(deployment, folder, run, rounds=1), deployment.log("server")[-3000:]
    (done,) = json.loads((folder / HISTORY).read_text())["rounds"]
    assert done["refusals"] == {"2": "reports 1125899906842624 examples; it registered 500"}
    with open_store(folder / CHECKPOINT) as store:
        assert all(store.get(name).abs().max() < 2 for name in store.names() if name.startswith("state|"))


@pytest.mark.study  # test_flower_apps.py resumes the same apps without a node in one process
def test_a_dropped_node_is_named_and_the_federation_goes_on(deployment, expected):
    """The same federation is asked for one round more, after one node has gone: it is resumed, not begun anew."""
    folder = deployment.folder / "federation"
    before = json.loads((folder / HISTORY).read_text())["rounds"]
    deployment.end("node-2")
    wait(lambda: len(deployment.online()) == 2, 60, "the SuperLink to notice")
    run = deployment.run(EXAMPLE, **CONFIG, rounds=2, folder=str(folder))
    assert finished(deployment, folder, run, rounds=2), deployment.log("server")[-3000:]
    rounds = json.loads((folder / HISTORY).read_text())["rounds"]
    assert rounds[:1] == before
    assert list(rounds[1]["refusals"]) == ["2"]
    assert sorted(rounds[1]["after"]) == ["0", "1"]
    assert largest_difference(folder, after_a_round_without_the_third(expected)) < TOLERANCE
