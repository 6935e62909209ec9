"""`netweight publish`: what it checks, and the upload to a hub on the loopback."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from folders_under_test import transformers_folder
from hub_stand_in import hub

from netweight.cli import netweight
from netweight.plugins.model_card import CARD, add_evidence
from netweight.report.finding import Finding
from netweight.report.report import Report

pytest.importorskip("huggingface_hub", reason="huggingface_hub comes with the llm extra")
HEAD = "---\nlicense: apache-2.0\n---\n\n# My model\n"


def call(*arguments, code=0):
    answer = CliRunner().invoke(netweight, [*map(str, arguments)])
    assert answer.exit_code == code, answer.output
    return " ".join(answer.output.split())


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = transformers_folder(tmp_path / "model", shards=2)
    (folder / CARD).write_text(HEAD)
    return folder


def test_a_sound_folder_may_be_published_and_the_command_is_printed(model):
    call("compress", "model", "net", "--card")
    text = call("publish", "net")
    assert "Publish, because all" in text
    assert "hf upload OWNER/net net" in text


def test_each_fault_is_named_and_stops_the_upload(model, tmp_path):
    faults = {
        "the check 'a license is stated' did not pass": lambda: (model / CARD).write_text("# My model\n"),
        "the check 'there is a model card' did not pass": lambda: (model / CARD).unlink(),
        "files that do not belong in a published model is 1": lambda: (model / "optimizer.pt").write_bytes(b""),
        "files that run code when they are opened is 1": lambda: (model / "weights.bin").write_bytes(b""),
        "files that contain paths of this machine is 1": lambda: (model / "generation_config.json").write_text(
            json.dumps({"_name_or_path": "/home/me/models/mine"})
        ),
        "weight files that are damaged is 1": lambda: (model / "extra.safetensors").write_bytes(b"nothing"),
    }
    assert "Publish, because" in call("publish", "model")
    for name, spoil in faults.items():
        before = {file: file.read_bytes() for file in model.iterdir()}
        spoil()
        with hub() as (address, repositories):
            text = call("publish", "model", "--to", "me/mine", code=1)
            assert repositories == {}, address
        assert "Do not publish, because" in text
        assert name in text
        for file in list(model.iterdir()):
            if file not in before:
                file.unlink()
        for file, content in before.items():
            file.write_bytes(content)


def test_the_verdict_of_the_card_decides(model, tmp_path):
    for value, code in ((1.0, 1), (9.0, 0)):
        report = Report("An attack", environment={})
        report.section("Resistance", [Finding("steps", value, better="higher", target=4.0)]).write(tmp_path / "run")
        add_evidence(model, tmp_path / "run")
        assert ("Publish, because" if not code else "Do not publish, because") in call("publish", "model", code=code)


def test_a_folder_is_uploaded_to_a_hub(model, tmp_path):
    with hub() as (address, repositories):
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
        environment["HF_HUB_DISABLE_XET"] = "1"
        command = [sys.executable, "-m", "netweight", "publish", "model", "--to", "me/mine", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["uploaded"].startswith(address)
        assert set(repositories["me/mine"]) >= {"config.json", CARD, "model.safetensors.index.json"}
        assert repositories["me/mine"]["config.json"] == (model / "config.json").read_bytes()
