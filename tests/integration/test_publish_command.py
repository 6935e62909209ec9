"""`netweight publish`: what it checks, and the upload to a hub on the loopback."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from folders_under_test import transformers_folder
from hub_stand_in import hub
from safetensors.torch import load_file, save_file

from netweight import compress_folder
from netweight.cli import netweight
from netweight.hf.carry_over import carry_over
from netweight.plugins.model_card import CARD, add_evidence
from netweight.report.card_sections import verdict_in
from netweight.report.finding import Finding
from netweight.report.report import Report
from netweight.store.weights_digest import weights_digest

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


def test_a_card_that_was_edited_in_a_compressed_folder_is_named_with_the_cure(model):
    call("compress", "model", "net", "--card")
    with (model.parent / "net" / CARD).open("a") as card:
        card.write("\nContact: the team\n")
    text = " ".join(call("publish", "net", code=1).split())
    assert "README.md: its digest is not the recorded one" in text
    assert "repeat netweight report RUN --card net" in text


def test_each_fault_is_named_and_stops_the_upload(model, tmp_path):
    faults = {
        "the check 'a license is stated' did not pass": lambda: (model / CARD).write_text("# My model\n"),
        "the check 'there is a model card' did not pass": lambda: (model / CARD).unlink(),
        "files that do not belong in a published model is 1": lambda: (model / "optimizer.pt").write_bytes(b""),
        "files that run code when they are opened is 1": lambda: (model / "weights.bin").write_bytes(b""),
        "files that contain paths of this machine is 1": lambda: (model / "generation_config.json").write_text(
            json.dumps({"_name_or_path": "/home/me/models/mine"})
        ),
        "files that are damaged or were changed is 1": lambda: (model / "extra.safetensors").write_bytes(b"nothing"),
    }
    untested = call("publish", "model")
    assert "No test of this model is recorded in its card." in untested
    assert "targets are met." in untested
    assert "Publish, because" not in untested
    for name, spoil in faults.items():
        before = {file: file.read_bytes() for file in model.iterdir()}
        spoil()
        with hub() as (address, repositories):
            text = call("publish", "model", "--to", "me/mine", code=1)
            assert repositories == {}, address
        assert "Nothing was uploaded." in text
        assert "Do not publish, because" in text
        assert name in text
        for file in list(model.iterdir()):
            if file not in before:
                file.unlink()
        for file, content in before.items():
            file.write_bytes(content)


def test_a_first_line_that_was_edited_by_hand_does_not_hide_what_the_evidence_says(model, tmp_path):
    run = report_about(model, tmp_path / "run", 1.0)
    call("report", run, "--card", model, code=1)
    card = (model / CARD).read_text()
    failed, passed = verdict_in(card), "This model passed its audits: the target is met."
    (model / CARD).write_text(card.replace(failed, passed, 1))
    text = call("publish", model, code=1)
    assert f"Its evidence states another verdict: {failed} The first line was edited." in text
    assert f"This command writes it again: netweight report RUN --card {model}" in text
    (model / CARD).write_text(card.replace("<!-- netweight verdict: end -->\n", ""))
    assert "Remove the rest of the section." in call("publish", model, code=2)
    call("report", run, "--card", model, code=2)
    (model / CARD).write_text(card.replace(failed, passed, 1))
    call("report", run, "--card", model, code=1)
    assert (model / CARD).read_text() == card


def test_a_missing_license_and_a_missing_card_have_a_cure(model):
    (model / CARD).write_text("# My model\n")
    cure = "a license is stated: no. Write `license: NAME` into the metadata of README.md"
    assert cure in call("publish", "model", code=1)
    (model / CARD).unlink()
    card = "there is a model card: no. This command writes one: netweight report RUN --card model"
    assert card in call("publish", "model", code=1)
    call("compress", "model", "net")
    assert "Then repeat: netweight report RUN --card net" in call("publish", "net", code=1)


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


def report_about(folder, run, value, command="netweight attack refusal model"):
    """Write the report of an attack on a model's weights, whose target of 4 is met or missed."""
    weights = {folder.name: weights_digest(folder)}
    report = Report(f"Attack in {run.name}", command=command, environment={}, weights=weights)
    report.section("Resistance", [Finding("steps", value, better="higher", target=4.0)]).write(run)
    return run


@pytest.mark.parametrize("order", [(1.0, 9.0), (9.0, 1.0)], ids=["failed first", "passed first"])
def test_an_attack_that_failed_is_not_hidden_by_another_one_that_passed(order, model, tmp_path):
    text = ""
    for number, value in enumerate(order):
        run = report_about(model, tmp_path / f"run-{number}", value)
        text = call("report", run, "--card", model, code=0 if value > 4 else 1)
    assert ("The card states the worst verdict of its 2 reports" in text) == (order[-1] > 4)
    assert "Next: netweight publish" not in text
    assert (model / CARD).read_text().count("## Evidence") == 2
    assert "the check 'the card states that the model passed its audits' did not pass" in call("publish", model, code=1)
    report_about(model, tmp_path / f"run-{order.index(1.0)}", 8.0)  # it was repeated into the same folder
    call("report", tmp_path / f"run-{order.index(1.0)}", "--card", model)
    assert "Publish, because" in call("publish", model)
    assert "Next: netweight publish" in call("report", tmp_path / f"run-{order.index(1.0)}", "--card", model)


def test_weights_that_changed_after_the_attack_are_not_published(model, tmp_path):
    run = report_about(model, tmp_path / "run", 9.0)
    call("report", run, "--card", model)
    assert "Publish, because" in call("publish", model)
    compress_folder(model, tmp_path / "net")  # the same weights
    assert "Publish, because" in call("publish", tmp_path / "net")
    file = next(model.glob("*.safetensors"))
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    text = call("publish", model, code=1)
    assert "the check 'the evidence in the card is about these weights' did not pass" in text
    before = (model / CARD).read_bytes()
    text = call("report", run, "--card", model, code=2)
    assert "repeat the test on this one: netweight attack refusal model" in text
    assert (model / CARD).read_bytes() == before
    report_about(model, tmp_path / "again", 8.0)
    call("report", tmp_path / "again", "--card", model)
    assert (model / CARD).read_text().count("## Evidence") == 1
    assert "Publish, because" in call("publish", model)


def test_evidence_about_the_source_does_not_go_into_what_a_treatment_makes(model, tmp_path):
    call("report", report_about(model, tmp_path / "run", 9.0), "--card", model)
    (tmp_path / "treated").mkdir()
    carry_over(model, tmp_path / "treated")
    assert (tmp_path / "treated" / CARD).read_text() == HEAD
