"""`netweight benchmark gpu` on tiny models and the CPU: what it measures, that it resumes, what it leaves out."""

import json

import pytest

pytest.importorskip("transformers", reason="models are made by transformers")
pytest.importorskip("scipy", reason="reports need the extra evidence")

import torch
from click.testing import CliRunner

from netweight.cli import netweight

TABLES = ("neuzip-fig4", "neuzip-table1", "neuzip-table3-decoder")


def call(*arguments):
    return CliRunner().invoke(netweight, ["benchmark", "gpu", *map(str, arguments)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("at-size")
    result = call("--trial", "--folder", folder, "--json")
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def test_all_tables_are_measured(measured):
    folder, found = measured
    assert tuple(found["tables"]) == TABLES
    assert not found["left_out"]
    assert (folder / "report.html").exists()
    rows = {one["row"] for one in found["tables"]["neuzip-table3-decoder"]["numbers"] if one["measured"] is not None}
    assert {"Vanilla", "NeuZip 7-bit (lossless)", "netweight, fixed length"} <= rows
    names = {one["name"] for one in found["tables"]["neuzip-table3-decoder"]["findings"]}
    assert {
        "miniature, netweight, fixed length: speed of step 2 over bf16",
        "miniature, NeuZip 7-bit (lossless): converted weights saved, as the driver sees it",
        "miniature, netweight, fixed length: allocated by a step at batch 1",
    } <= names
    assert "without a CUDA graph" not in str(found["tables"]["neuzip-table3-decoder"]["tables"])
    reloaded = [
        note for note in found["tables"]["neuzip-table3-decoder"]["notes"] if note.startswith("miniature, Offload")
    ]
    assert "no host to offload to" in reloaded[0]


def test_losses_are_equal_and_memory_is_less(measured):
    _, found = measured
    findings = {one["name"]: one for one in found["tables"]["neuzip-table1"]["findings"]}
    assert findings["miniature, compressed against LOMO: updates whose loss differs"]["value"] == 0
    memory = {one["row"]: one["measured"] for one in found["tables"]["neuzip-table1"]["numbers"]
              if one["column"] == "miniature memory"}  # fmt: skip
    assert memory["LOMO + NeuZip lossless"] < memory["LOMO"] < memory["Vanilla"]


def test_a_second_call_goes_on_and_takes_no_time(measured):
    folder, found = measured
    again = call("--trial", "--folder", folder, "--minutes", 0, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["tables"] == found["tables"]


def test_without_time_it_says_what_is_left_out(tmp_path):
    result = call("--trial", "--folder", tmp_path, "--minutes", 0)
    assert result.exit_code == 0, result.output
    assert "No time was left for: miniature NeuZip 7-bit (lossless) cpu True. Run it again to go on." in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU, and there is one")
def test_without_a_gpu_it_says_so_before_anything_is_written(tmp_path):
    result = call("--folder", tmp_path / "out")
    assert result.exit_code == 2
    assert "torch sees no GPU" in result.output
    assert "--trial" in result.output
    assert not (tmp_path / "out").exists()
