"""Runs on a local Ray: the same ledger, failures, kills and early ends as with processes of this machine."""

import functools
import os
import signal
import subprocess
import sys
import time

import numpy
import pytest
import runs_under_test
import torch
from runs_under_test import Config, unsendable, work

from netweight.core.engines import in_process
from netweight.errors import UsageError
from netweight.job import Ledger, map_runs
from netweight.methods.space.fit import MatrixShard, fit_shards, fit_streaming
from netweight.nn.matrix import MatrixFile

pytest.importorskip("ray", reason="ray is in the ray extra")

import ray

from netweight.core.engines import ray_cluster

# Ray leaves its own processes, sockets and logs to the collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    """A Ray of two cores, made by the engine itself, that all tests here connect to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers import what tests import
        with ray_cluster(workers=2):
            yield ray.get_runtime_context().gcs_address
    assert not ray.is_initialized()


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


def times_run(traces):
    return {int(path.name): len(path.read_text()) for path in traces.iterdir() if path.name.isdigit()}


def test_single_runs_fail_alone_and_a_ledger_does_not_know_its_engine(cluster, tmp_path, traces):
    deeds = ["square", "fail", "die", "square", "exit", "square"]
    configs = [Config(number, str(traces), deed) for number, deed in enumerate(deeds)]
    (remembered,) = map_runs(work, configs[3:4], ledger=tmp_path / "ledger", engine=in_process)
    with ray_cluster() as engine:
        results = list(map_runs(work, configs, ledger=tmp_path / "ledger", engine=engine, ordered=True))
        assert [result.ok for result in results] == [deed == "square" for deed in deeds]
        assert [result.from_ledger for result in results] == [number == 3 for number in range(6)]
        assert results[3].digest == remembered.digest
        assert "ValueError: number 1 is unwell" in results[1].error
        assert all("Ray lost the worker process of the task" in results[number].error for number in (2, 4))
        (traces / "mended").touch()
        again = list(map_runs(work, configs[:2], ledger=tmp_path / "ledger", engine=engine))
        assert [result.ok for result in again] == [True, True]
    assert times_run(traces)[0] == times_run(traces)[3] == 1
    assert ray.is_initialized()  # who connected it, ends it


def test_what_cannot_be_sent_is_named(cluster, tmp_path, traces):
    config = Config(1, str(traces))
    with ray_cluster() as engine:
        (result,) = map_runs(unsendable, [config], ledger=tmp_path / "value", engine=engine)
        assert not result.ok
        with open(tmp_path / "open", "w") as file, pytest.raises(UsageError, match="cannot be sent to worker"):
            list(map_runs(functools.partial(work, file), [config], ledger=tmp_path / "item", engine=engine))
    assert times_run(traces) == {}


def test_stopping_early_stops_what_is_under_way(cluster, tmp_path, traces):
    configs = [Config(number, str(traces), "slow") for number in range(8)]
    with ray_cluster(workers=1) as engine:
        results = map_runs(work, configs, ledger=tmp_path / "ledger", engine=engine)
        next(results)
        results.close()
        with Ledger(tmp_path / "ledger") as ledger:
            assert len(ledger.records) == 1
        time.sleep(1)
    assert len(times_run(traces)) <= 2


def test_a_killed_study_continues(cluster, tmp_path, traces):
    ledger = tmp_path / "ledger"
    command = [sys.executable, runs_under_test.__file__, str(ledger), str(traces), "ray", cluster]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    study = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (ledger.exists() and ledger.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < end, "waited too long"
        assert study.poll() is None, study.communicate()[1]
        time.sleep(0.02)
    study.send_signal(signal.SIGKILL)
    study.communicate()
    done = ledger.read_bytes().count(b"\n")
    configs = [Config(number, str(traces), "slow") for number in range(6)]
    with ray_cluster() as engine:
        results = list(map_runs(work, configs, ledger=ledger, engine=engine))
    assert [result.ok for result in results] == [True] * 6
    assert [result.from_ledger for result in results].count(True) == done


@pytest.mark.study  # test_space_fit_processes.py fits over shards in processes of this machine
def test_a_basis_is_fitted_over_shards(cluster, tmp_path):
    values = numpy.random.default_rng(0).standard_normal((40, 9)).astype(numpy.float32) ** 3
    numpy.save(tmp_path / "rows.npy", values)
    shards = [MatrixShard(str(tmp_path / "rows.npy"), 0, 25), MatrixShard(str(tmp_path / "rows.npy"), 25)]
    with ray_cluster() as engine:
        found = fit_shards(shards, 3, most_passes=1, folder=tmp_path / "kept", engine=engine)
    alone = fit_streaming(MatrixFile(tmp_path / "rows.npy"), 3, most_passes=1)
    torch.testing.assert_close(found.scores, alone.scores, rtol=1e-3, atol=1e-3)


def test_mistakes_are_named(cluster, monkeypatch):
    for wrong in ({"workers": 0}, {"cpus": 0}, {"gpus": -1}):
        with pytest.raises(UsageError, match="out of range"), ray_cluster(**wrong):
            pass
    with pytest.raises(UsageError, match="connected to another cluster already"), ray_cluster("auto"):
        pass
