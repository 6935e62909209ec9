"""A finished federation is read again: the report, the audit and the weights, of one process and of a Flower server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import nn

from netweight.cli import netweight
from netweight.job import Job
from netweight.methods.federate import train
from netweight.methods.federate.checkpoint import CHECKPOINT, Checkpoint
from netweight.methods.federate.finished import HISTORY, PRIVATE_KEY, open_run, state_dicts
from netweight.methods.federate.settings import Federation

pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
CONFIG = {"clients": 3, "method": "fedavg", "epochs": 1, "seed": 5, "rounds": 2, "data": "none", "min-clients": 2}
APP = """
import torch
from torch import nn
from netweight.methods.federate import ClientData
from netweight.plugins.flower import apps

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU()), nn.Linear(12, 3)

def data(config, client):
    generator = torch.Generator().manual_seed(client)
    labels = torch.arange(12) % 3
    images = torch.rand(12, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1)
    return ClientData((images, labels), (images, labels))

both = apps(model, data)
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(netweight, [str(part) for part in arguments])


def test_weights_of_one_process_go_back_into_ones_own_modules(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = ["--clients", "3", "--rounds", "1", "--epochs", "1", "--method", "fedavg-private-head", "--no-audit"]
    made = call("federate", "run", *small, "--out", folder)
    assert made.exit_code == 0, made.output
    told = call("federate", "export", folder, tmp_path / "weights", "--client", "1")
    assert told.exit_code == 0, told.output
    assert "The personal model of client 1: body.safetensors and head.safetensors." in told.output
    run = open_run(folder)
    body, head = run.task.body, run.task.head
    before = body.state_dict()["fc1.weight"].clone()
    body.load_state_dict(load_file(tmp_path / "weights" / "body.safetensors"))
    head.load_state_dict(load_file(tmp_path / "weights" / "head.safetensors"))
    assert not torch.equal(body.state_dict()["fc1.weight"], before)
    assert torch.equal(run.task.body_layout.join(dict(body.named_parameters())), run.weights(1).body)
    assert call("federate", "report", folder).exit_code == 0
    assert call("federate", "export", folder, tmp_path / "other", "--client", "7").exit_code == 2


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a Flower server leaves, with the app beside it."""
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "flower_app_of_test", raising=False)
    (tmp_path / "flower_app_of_test.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    from flower_app_of_test import both

    task, method = both.task(CONFIG), both.make_method(CONFIG)
    run = train(task, method, Federation(rounds=2, seed=5), folder=tmp_path / "server", workers=1)
    about = {"method": method.name, "config": CONFIG, "rounds": [done.to_json() for done in run.rounds]}
    (tmp_path / "server" / HISTORY).write_text(json.dumps(about))
    return tmp_path / "server"


def test_a_shared_model_is_called_shared(tmp_path: Path) -> None:
    small = ["--clients", "3", "--rounds", "1", "--epochs", "1", "--method", "fedavg", "--no-audit"]
    assert call("federate", "run", *small, "--model", "tiny_networks:halves", "--out", tmp_path / "run").exit_code == 0
    told = call("federate", "export", tmp_path / "run", tmp_path / "weights")
    assert "The shared model, which all clients have: body.safetensors and head.safetensors." in told.output


def test_a_flower_run_is_reported_audited_and_exported(server: Path, tmp_path: Path) -> None:
    told = call("federate", "report", server)
    assert told.exit_code == 0, told.output
    assert "fedavg: mean accuracy" in told.output
    assert (server / "report.html").is_file()
    refused = call("federate", "export", server, tmp_path / "weights")
    assert refused.exit_code == 2
    assert "--app" in refused.output
    app = ["--app", "flower_app_of_test:both"]
    refused = call("federate", "export", server, tmp_path / "weights", *app)
    assert refused.exit_code == 2
    assert "does not have what client 0 keeps: statistics.body.2.running_mean" in refused.output
    with Job.open(server, state=CHECKPOINT, reading=True) as job:
        saved = Checkpoint.load(job)
    for client in (0, 1):
        about = {PRIVATE_KEY: json.dumps({"client": client})}
        save_file(dict(saved.private[client]), tmp_path / f"private-{client}.safetensors", about)
    app += ["--private"]
    refused = call("federate", "export", server, tmp_path / "no", *app, tmp_path / "private-1.safetensors")
    assert "contains what client 1 keeps" in " ".join(refused.output.split())
    told = call("federate", "export", server, tmp_path / "weights", *app, tmp_path / "private-0.safetensors")
    assert told.exit_code == 0, told.output
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())
    body.load_state_dict(load_file(tmp_path / "weights" / "body.safetensors"))
    assert torch.equal(body.state_dict()["1.weight"], open_run(server, app[1]).state["body.1.weight"])
    mean = next(value for name, value in saved.private[0].items() if name.endswith("running_mean"))
    assert torch.equal(body.state_dict()["2.running_mean"], mean)
    assert mean.any()
    told = call("federate", "audit", server, *app[:2], "--updates", "1", "--threat", "2x1", "--search-steps", "5")
    assert told.exit_code in (0, 1), told.output
    assert "processor seconds an update" in " ".join(told.output.split())


def test_state_dicts_hold_frozen_weights_and_buffers(server: Path) -> None:
    run = open_run(server, "flower_app_of_test:both")
    body, head = state_dicts(run.task, run.weights(0))
    assert body.keys() == run.task.body.state_dict().keys()
    assert head.keys() == run.task.head.state_dict().keys()
