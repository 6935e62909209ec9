"""Model cards: what was done and what was found, in marked sections; the user's text and the folder's proof stay."""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from folders_under_test import transformers_folder
from spaces_under_test import random_adapters

from netweight import compress_folder, decompress_folder, verify
from netweight.cli import netweight
from netweight.errors import UsageError
from netweight.methods.space.space import WeightSpace
from netweight.plugins.model_card import CARD, add_evidence, update_card
from netweight.report.finding import Finding, Section
from netweight.report.report import Report, read_report
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.reading import read_adapter
from netweight.store.lora_formats.writing import write_adapter

USERS = "---\nlicense: apache-2.0\nlanguage: en\n---\n\n# My model\n\nWhat I say of it.\n"


def call(*arguments, code=0):
    answer = CliRunner().invoke(netweight, [*map(str, arguments), "--json"])
    assert answer.exit_code == code, answer.output
    return json.loads(answer.stdout)


@pytest.fixture
def model(tmp_path):
    folder = transformers_folder(tmp_path / "model", shards=2)
    (folder / CARD).write_text(USERS)
    return folder


@pytest.fixture
def run(tmp_path):
    found = [
        Finding("steps to recovery", 3.2, ci95=(2.9, 3.5), better="higher", target=3.0),
        Finding("ability lost | of all", 0.2, unit="points", better="lower", target=0.1),
    ]
    report = Report("An attack", command="netweight attack finetune model")
    report.section("Resistance", found, conclusion="It holds a while.").write(tmp_path / "run")
    return tmp_path / "run"


def test_a_compressed_folder_tells_what_was_done_and_keeps_its_proof(model, tmp_path):
    call("compress", model, tmp_path / "net", "--card")
    text = (tmp_path / "net" / CARD).read_text()
    head, body = USERS.split("\n---\n")
    assert text.startswith(f"{head}\ntags:\n- netweight\n- compressed\n---\n{body}")
    for expected in ("### Compressed, bit for bit", "License: apache-2.0, as stated above.", "| level | default |"):
        assert expected in text
    assert all(finding.passed is not False for finding in verify(tmp_path / "net", against=model))
    decompress_folder(tmp_path / "net", tmp_path / "back")
    assert (tmp_path / "back" / CARD).read_text() == USERS


def test_a_rounded_folder_says_by_how_much(model, tmp_path):
    call("compress", model, tmp_path / "net", "--mantissa-bits", 3, "--card")
    text = (tmp_path / "net" / CARD).read_text()
    assert "### Compressed, with rounding" in text
    bound, worst = map(
        float, re.search(r"by at most (0\.\d+) of itself, and the largest change was (0\.\d+)", text).groups()
    )
    assert 0 < worst <= bound < 0.064
    assert all(finding.passed is not False for finding in verify(tmp_path / "net", against=model))


def test_a_second_time_changes_nothing_and_what_users_add_stays(model, run, tmp_path):
    compress_folder(model, tmp_path / "net")
    card = update_card(tmp_path / "net", command="netweight compress model net")
    add_evidence(tmp_path / "net", run)
    once = card.read_text()
    assert call("report", run, "--card", tmp_path / "net", code=1)["card"] == str(card)
    assert card.read_text() == once  # the command that made it, too
    assert "`netweight compress model net`" in once
    changed = once.replace("What I say of it.", "What else I say.") + "\nAnd below.\n"
    card.write_text(changed)
    update_card(tmp_path / "net")
    add_evidence(tmp_path / "net", run)
    assert card.read_text() == changed
    assert all(finding.passed is not False for finding in verify(tmp_path / "net"))


def test_evidence_is_told_with_what_missed_its_target(model, run):
    text = add_evidence(model, run).read_text()
    assert text.startswith(USERS.partition("\n\n")[0])
    verdict = (
        "This model failed its audits: 1 of 2 targets is missed: ability lost | of all is 0.2000 points "
        "(target: at most 0.1). Its author was advised not to publish it."
    )
    assert text.index(verdict) < text.index("# My model") < text.rindex(verdict)
    assert "| steps to recovery | 3.200 | 2.900 to 3.500 | 3.000 | met |" in text
    assert "| ability lost \\| of all | 0.2000 points |  | 0.1000 | **missed** |" in text
    assert "It holds a while." in text
    Report("Nothing proved").section("Defense", [], treatment="compress", audits=()).write(run)
    text = add_evidence(model, run).read_text()
    assert "**Audits left out**: compress (identity, size, outputs)." in text
    assert "steps to recovery" not in text


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "compressed"])
def test_a_report_that_lacked_an_audit_has_it_once_a_run_made_it(packed, model, run, tmp_path):
    """What is published beside the evidence says no longer that nothing attacked the model."""
    training = Section("Training", [Finding("steps", 8)], treatment="immunize", missing_audits=("fine-tuning attack",))
    Report("A defense", environment={}).add(training).write(model / "immunize-report")
    page = model / "immunize-report" / "report.html"
    assert "Audits left out" in page.read_text() or "fine-tuning attack" in page.read_text()
    folder = model
    if packed:
        folder = tmp_path / "packed"
        compress_folder(model, folder)
    add_evidence(folder, run)
    report = read_report(folder / "immunize-report")
    assert [section.title for section in report.sections] == ["Training", "Resistance"]
    assert report.sections[0].missing_audits == ()
    assert report.sections[0].audits == ("fine-tuning attack",)
    assert "steps to recovery" in (folder / "immunize-report" / "report.html").read_text()
    before = (folder / "immunize-report" / "report.json").read_bytes()
    add_evidence(folder, run)
    assert (folder / "immunize-report" / "report.json").read_bytes() == before
    if packed:
        assert all(found.passed is not False for found in verify(folder))
        decompress_folder(folder, tmp_path / "again")
        assert read_report(tmp_path / "again" / "immunize-report").sections[0].missing_audits == ("fine-tuning attack",)


def test_a_run_of_another_audit_leaves_a_report_as_it_was(model, tmp_path):
    training = Section("Training", [Finding("steps", 8)], treatment="immunize", missing_audits=("fine-tuning attack",))
    Report("A defense", environment={}).add(training).write(model / "immunize-report")
    before = (model / "immunize-report" / "report.json").read_bytes()
    other = Report("Refusal", command="netweight attack refusal model", environment={})
    other.section("Refusal", [Finding("refusals", 0.5)]).write(tmp_path / "other")
    add_evidence(model, tmp_path / "other")
    assert (model / "immunize-report" / "report.json").read_bytes() == before


def test_the_hub_reads_a_card_that_is_begun(model, tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub comes with the llm extra")
    (model / CARD).unlink()
    compress_folder(model, tmp_path / "net")
    update_card(tmp_path / "net", base_model="someone/model")
    data = hub.ModelCard.load(tmp_path / "net" / CARD).data
    assert (data.base_model, data.library_name) == ("someone/model", "transformers")
    assert data.tags == ["netweight", "compressed"]
    assert "License: not stated here." in (tmp_path / "net" / CARD).read_text()
    decompress_folder(tmp_path / "net", tmp_path / "back")
    assert not (tmp_path / "back" / CARD).exists()


def test_an_adapter_of_a_space_says_what_it_is(tmp_path):
    (tmp_path / "loras").mkdir()
    for number, adapter in enumerate(random_adapters(8, dtype=torch.float32)):
        write_adapter(adapter, tmp_path / "loras" / f"{number}.safetensors")
    bank = AdapterBank.ingest(tmp_path / "loras", tmp_path / "bank")
    WeightSpace.fit(bank, components=4).save(tmp_path / "space", bank=tmp_path / "bank")
    call("space", "export", tmp_path / "space", "mean", tmp_path / "mean", "--rank", 2, "--card")
    text = (tmp_path / "mean" / CARD).read_text()
    for expected in ("| point | mean |", "| of a space of | 8 adapters, 4 components |", "| rank | 2 |", "- lora"):
        assert expected in text
    assert read_adapter(tmp_path / "mean").modules == WeightSpace.open(tmp_path / "space").mean_adapter.modules
    answer = CliRunner().invoke(
        netweight, ["space", "export", str(tmp_path / "space"), "mean", str(tmp_path / "m.safetensors"), "--card"]
    )
    assert "A single file cannot have a model card" in answer.stderr


def test_what_cannot_be_is_refused(model, tmp_path):
    with pytest.raises(UsageError, match="does not contain a record of a treatment"):
        update_card(model)
    with pytest.raises(UsageError, match="is not a folder of a model"):
        add_evidence(tmp_path / "nowhere", tmp_path)
    compress_folder(model, tmp_path / "net")
    card = update_card(tmp_path / "net")
    card.write_text(card.read_text().replace("<!-- netweight done: end -->", ""))
    with pytest.raises(UsageError, match="does not have the marks"):
        update_card(tmp_path / "net")
