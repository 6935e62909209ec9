"""What takes minutes: simulation, killed and hanging processes, secure sums, each with Flower's own processes."""

import json
import os
import signal
import threading

import pytest

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from flower_processes import EXAMPLE, Deployment, Simulation, example_task, faulty_example, wait

from netweight.core.file_locks import take_lock
from netweight.methods.federate import train
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.plugins.flower import HISTORY
from netweight.plugins.flower.secure_sum import CLIP
from netweight.plugins.flower.server import method_of, settings_of
from netweight.store import open_store

# twenty nodes are waited for longer than other tests may take
pytestmark = [pytest.mark.study, pytest.mark.timeout(3600)]

CONFIG = {"clients": 3, "epochs": 1, "seed": 520, "min-clients": 2, "method": "hyperfl"}
TOLERANCE = 1e-5
STEP = 2 * CLIP / 2**22


@pytest.fixture
def deployment(tmp_path):
    deployment = Deployment(tmp_path, remembers=True)
    try:
        deployment.start_server()
        for node in range(3):
            deployment.register(node)
            deployment.start_node(node, **{"rehearsal-seed": CONFIG["seed"]})
        wait(lambda: len(deployment.online()) == 3, 240, "three nodes", every=4.0)
        yield deployment
    finally:
        deployment.stop()
        assert deployment.living() == {}


@pytest.fixture(scope="module")
def expected():
    """The state after two rounds by the engine of one process."""
    return by_the_engine(rounds=2)


def by_the_engine(**options):
    config = {**CONFIG, **options}
    return train(example_task(config), method_of(config), settings_of(config), workers=1).state


def largest_difference(folder, state):
    with open_store(folder / CHECKPOINT) as store:
        saved = {name.removeprefix("state|"): store.get(name) for name in store.names() if name.startswith("state|")}
    assert saved.keys() == state.keys()
    return max((value - saved[name]).abs().max().item() for name, value in state.items())


def history(folder):
    return json.loads((folder / HISTORY).read_text())["rounds"] if (folder / HISTORY).exists() else []


def free(folder):
    """Whether no server's process writes in a folder; one may outlive its SuperLink by some seconds."""
    try:
        with (folder / "job.lock").open("r+b") as file:
            return take_lock(file.fileno())
    except FileNotFoundError:
        return True


def test_a_simulation_goes_through_its_rounds_with_every_client(tmp_path, expected):
    simulation, folder = Simulation(tmp_path), tmp_path / "federation"
    try:
        config = {**CONFIG, "rounds": 2, "folder": str(folder), "private-folder": str(tmp_path / "private")}
        assert simulation.finish(EXAMPLE, **config) == "finished:completed"
    finally:
        simulation.stop()
        assert simulation.living() == {}
    # Its nodes have no settings of their own, so that clients draw secret seeds: weights are others than the engine's.
    assert 0 < largest_difference(folder, expected) < 1
    assert [(set(done["after"]), done["refusals"]) for done in history(folder)] == [({"0", "1", "2"}, {})] * 2


def test_a_simulation_goes_on_when_a_worker_of_ray_dies(tmp_path):
    """Once, in the third round: its clients are left out of at most one attempt, and later rounds have them again."""
    simulation, folder = Simulation(tmp_path), tmp_path / "federation"

    def workers():
        return [number for number, command in simulation.living().items() if "ClientAppActor" in command]

    def kill_one():
        wait(lambda: len(history(folder)) >= 2, 240, "two rounds", every=0.2)
        os.kill(workers()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        config = {**CONFIG, "rounds": 6, "folder": str(folder), "private-folder": str(tmp_path / "private")}
        assert simulation.finish(EXAMPLE, **config) == "finished:completed"
    finally:
        killer.join()
        simulation.stop()
    assert len(history(folder)) == 6
    assert set(history(folder)[-1]["after"]) == {"0", "1", "2"}


@pytest.mark.parametrize(("fault", "status"), [("raise 1", "finished:completed"), ("broken 1", "finished:failed")])
def test_a_site_that_fails_in_every_round_fails_the_run_and_one_that_fails_once_does_not(fault, status, tmp_path):
    """In both, every failure is in the history, and the result of the others is saved."""
    simulation, folder = Simulation(tmp_path), tmp_path / "federation"
    try:
        config = {**CONFIG, "rounds": 2, "folder": str(folder), "private-folder": str(tmp_path / "private")}
        assert simulation.finish(faulty_example(tmp_path), **config, fault=fault) == status
    finally:
        simulation.stop()
    first, second = history(folder)
    assert "out of memory" in first["refusals"]["1"]
    assert (first["errors"], second["errors"]) == ([1], [1] if fault == "broken 1" else [])
    assert set(second["after"]) == ({"0", "2"} if fault == "broken 1" else {"0", "1", "2"})
    with open_store(folder / CHECKPOINT) as store:
        assert any(name.startswith("state|") for name in store.names())


def test_a_killed_server_costs_one_round(deployment, expected):
    folder = deployment.folder / "federation"
    config = {**CONFIG, "rounds": 2, "folder": str(folder), "timeout": 200.0}
    deployment.run(EXAMPLE, **config)
    wait(lambda: len(history(folder)) == 1, 400, "the first round")
    deployment.kill("server")
    deployment.start_server()
    wait(lambda: len(deployment.online()) == 3, 240, "the nodes to come back", every=4.0)
    wait(lambda: free(folder), 120, "the first run to end")
    first = history(folder)
    assert deployment.finish(deployment.run(EXAMPLE, **config)) == "finished:completed"
    assert history(folder)[: len(first)] == first
    assert [done["refusals"] for done in history(folder)] == [{}, {}]
    assert largest_difference(folder, expected) < TOLERANCE


def test_a_hanging_client_is_named_and_the_round_goes_on(deployment):
    """The others have long answered when the time for the round is over."""
    folder = deployment.folder / "federation"
    config = {**CONFIG, "rounds": 1, "folder": str(folder), "timeout": 90.0, "fault": "hang 1"}
    run = deployment.run(faulty_example(deployment.folder), **config, signs=str(deployment.folder))
    assert deployment.finish(run) == "finished:completed", deployment.log("server")[-3000:]
    (done,) = history(folder)
    assert done["refusals"] == {"1": "sent nothing"}
    assert sorted(done["after"]) == ["0", "2"]


def test_a_node_that_is_killed_in_a_round_is_named_before_the_time_is_over(deployment):
    folder = deployment.folder / "federation"
    config = {**CONFIG, "rounds": 1, "folder": str(folder), "timeout": 400.0, "fault": "hang 2"}
    run = deployment.run(faulty_example(deployment.folder), **config, signs=str(deployment.folder))
    wait((deployment.folder / "hangs").exists, 240, "the client to begin")
    deployment.kill("node-2")
    assert deployment.finish(run) == "finished:failed", deployment.log("server")[-3000:]  # it was asked once
    (done,) = history(folder)
    assert "answered with error" in done["refusals"]["2"]
    assert done["seconds"] < 390
    assert sorted(done["after"]) == ["0", "1"]


def test_a_secure_sum_is_the_engines(deployment):
    """The reference takes the mean of the updates, since a server that sees only their sum cannot bound any."""
    folder = deployment.folder / "federation"
    config = {**CONFIG, "rounds": 1, "folder": str(folder), "timeout": 200.0, "secure-sum": True}
    run = deployment.run(EXAMPLE, **config)
    assert deployment.finish(run) == "finished:completed", deployment.log("server")[-3000:]
    difference = largest_difference(folder, by_the_engine(rounds=1, aggregator="mean"))
    assert STEP / 1e4 < difference < 3 * STEP + TOLERANCE
    (done,) = history(folder)
    assert done["refusals"] == {}


def test_a_secure_sum_goes_on_without_a_client_that_fails(deployment):
    folder = deployment.folder / "federation"
    config = {**CONFIG, "rounds": 2, "folder": str(folder), "timeout": 200.0, "secure-sum": True, "fault": "raise 1"}
    run = deployment.run(faulty_example(deployment.folder), **config, signs=str(deployment.folder))
    assert deployment.finish(run) == "finished:completed", deployment.log("server")[-3000:]
    first, second = history(folder)
    assert "out of memory" in first["refusals"]["1"]
    assert (sorted(first["after"]), sorted(second["after"])) == (["0", "2"], ["0", "1", "2"])


def test_twenty_nodes_two_slow_one_killed_in_a_round_and_a_killed_server(tmp_path):
    """The round goes on without these three, the run without the server: nothing of what was learned is lost."""
    place, folder, most = Deployment(tmp_path, nodes=20, remembers=True), tmp_path / "federation", 280.0
    config = {"clients": 20, "epochs": 1, "seed": 520, "method": "fedavg", "min-clients": 12, "aggregator": "mean"}
    asked = {**config, "rounds": 2, "folder": str(folder), "timeout": most, "patience": 30.0, "signs": str(tmp_path)}
    app = faulty_example(tmp_path)
    try:
        place.fork()
        place.start_server()
        for node in range(20):
            place.register(node)
            place.start_node(node, **{"rehearsal-seed": 520})
        wait(lambda: len(place.online()) == 20, 900, "twenty nodes", every=10.0)
        place.run(app, **asked, fault=f"hang 7; late{most + 30} 3 12")
        wait((tmp_path / "hangs").exists, most, "client 7 to begin")
        place.kill("node-7")
        wait(lambda: len(history(folder)) == 1, 2 * most, "the first round")
        place.kill("server")
        place.start_server()
        wait(lambda: len(place.online()) >= 17, 600, "the nodes to come back", every=10.0)
        wait(lambda: free(folder), 120, "the first run to end")
        first = history(folder)
        assert place.finish(place.run(app, **asked), seconds=2 * most) == "finished:completed"
    finally:
        place.stop()
    assert history(folder)[0] == first[0]
    assert set(first[0]["refusals"]) == {"3", "7", "12"}
    assert len(first[0]["after"]) == 17
    assert "7" in history(folder)[1]["refusals"]
    assert len(history(folder)[1]["after"]) >= 17
