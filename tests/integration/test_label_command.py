"""`netweight label` as it is typed: what it prints, writes and returns, cards, bases, comparisons, whole folders."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file

import netweight
from netweight.cli import netweight as command


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A small language model, as transformers saves it, in the current folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, eos_token_id=[3, 5], tie_word_embeddings=True)  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("tiny")
    Path("tiny/README.md").write_text("---\nlicense: apache-2.0\nbase_model: some/base\n---\n# Tiny\n\nBy me.\n")
    return Path("tiny")


def run(*arguments, code=0):
    result = CliRunner().invoke(command, ["label", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_prints_and_writes_a_label(model):
    text = run(model)
    assert "language model: LlamaForCausalLM" in text
    assert re.search(r"Gross weight +\d", text)
    assert "apache-2.0" in text
    assert "some/base" in text
    assert "--minutes --harmful --base" in text  # what was not measured
    written = sorted(file.name for file in Path("tiny-label").iterdir())
    assert written == ["label-badge.json", "label.html", "label.json", "label.svg"]
    Draft202012Validator(netweight.Label.json_schema()).validate(json.loads(Path("tiny-label/label.json").read_text()))
    ElementTree.parse("tiny-label/label.svg")
    badge = json.loads(Path("tiny-label/label-badge.json").read_text())
    assert badge["schemaVersion"] == 1
    assert badge["label"] == "net weight"


def test_python_and_the_command_give_the_same_label(model):
    printed = json.loads(run(model, "--json"))["label"]
    assert netweight.Label.from_json(printed) == netweight.label(model)
    assert netweight.Label.read("tiny-label/label.json") == netweight.label(model)


def test_the_card_keeps_what_its_author_wrote(model):
    run(model, "--card")
    run(model, "--card")
    card = (model / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "By me." in card
    assert card.count("## Net weight facts") == 1
    assert (model / "label.svg").is_file()


def test_a_base_shows_what_changed_by_layer(model):
    from transformers import LlamaForCausalLM

    tuned = LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    tuned.save_pretrained("tuned")
    made = netweight.label("tuned", base=model)
    changed = {layer.layer: layer.change for layer in made.layers}
    assert changed["model.layers.0"] == 0
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (model, "tuned"))
    names = [name for name in before if name.startswith("model.layers.1.")]
    gap = sum(float((after[name].double() - before[name].double()).square().sum()) for name in names)
    norm = sum(float(before[name].double().square().sum()) for name in names)
    assert changed["model.layers.1"] == pytest.approx((gap / norm) ** 0.5, rel=1e-4)
    assert made.row("base_changed").number == 1
    assert "Change of each layer" not in run("tuned")
    run("tuned", "--base", model)
    assert "Change of each layer" in Path("tuned-label/label.html").read_text()


def test_an_unrelated_base_is_named(model):
    save_file({"other": torch.ones(4)}, "other.safetensors")
    row = netweight.label(model, base="other.safetensors").row("base_unrelated")
    assert row.state == "warning"
    assert row.value == "nothing in common"


def test_two_labels_side_by_side(model):
    run(model, "--out", "a")
    text = run(model, "--against", model)
    assert text.count("LlamaForCausalLM") >= 2
    assert not any(line.startswith("* ") for line in text.splitlines())
    save_file({"x": torch.ones(4)}, "x.safetensors")
    assert any(line.startswith("* Gross weight") for line in run(model, "--against", "x.safetensors").splitlines())


def test_one_table_for_a_folder(model):
    save_file({"x": torch.ones(4)}, "x.safetensors")
    Path("broken.safetensors").write_bytes(b"123")
    result = CliRunner().invoke(command, ["label", ".", "--all"])
    assert result.exit_code == 0, result.output
    assert "2 of 3 labels" in result.output
    page = next(Path().glob("*-labels/labels.html")).read_text()
    assert "broken.safetensors" in page
    assert run("x.safetensors", "--all", code=2)
    assert run(".", "--all", "--card", code=2)


def test_compressed_models_weigh_what_they_weighed_before(model):
    netweight.compress_folder(model, "net")
    before, after = netweight.label(model), netweight.label("net")
    assert after.row("gross_weight").number == before.row("gross_weight").number
    assert after.row("net_weight").number == pytest.approx(before.row("net_weight").number, rel=0.01)


def test_a_file_has_no_card(model):
    assert "--card" in run(model / "model.safetensors", "--card", code=2)
