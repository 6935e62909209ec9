"""The recipe for spaces from a bank to adapters: one step after another, each remembered, every file read back."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from spaces_under_test import random_adapters

from netweight.cli import netweight
from netweight.methods.space.points import read_points
from netweight.methods.space.space import WeightSpace
from netweight.report.report import read_report
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.reading import read_adapter
from netweight.store.lora_formats.writing import write_adapter

SHIPPED = Path(__file__).parents[2] / "src" / "netweight" / "recipes" / "space.yaml"
COUNT = 24


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bank")
    (folder / "loras").mkdir()
    for number, adapter in enumerate(random_adapters(COUNT, dtype=torch.float32)):
        write_adapter(adapter, folder / "loras" / f"person-{number:02d}.safetensors")
    bank = AdapterBank.ingest(folder / "loras", folder / "bank")
    rows = [f"{name},{number % 2}" for number, name in enumerate(bank.names)]
    (folder / "labels.csv").write_text("\n".join(["name,beard", *rows]) + "\n")
    return folder


@pytest.fixture
def here(loras, tmp_path, monkeypatch):
    monkeypatch.chdir(loras)
    text = SHIPPED.read_text().replace("components: 100", "components: 8")
    assert "components: 8" in text

    def call(*arguments, change=("", ""), code=0):
        assert change[0] in text
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text.replace(*change) if change[0] else text)
        command = ["run", str(recipe), "--subject", "bank", "--output", str(tmp_path / "out"), *arguments, "--json"]
        answer = CliRunner().invoke(netweight, command)
        assert answer.exit_code == code, answer.output
        return json.loads(answer.stdout) if code in (0, 1) else answer.stderr

    return call


def test_a_bank_becomes_adapters_of_drawn_and_moved_points(here, tmp_path):
    result = here()
    fitted, drawn, moved, written = (Path(step["path"]) for step in result["steps"])
    space = WeightSpace.open(fitted)
    samples, edited = read_points(drawn / "points.json"), read_points(moved / "points.json")
    assert space.components == 8
    assert samples.names == edited.names
    assert not torch.equal(samples.scores, edited.scores)
    for name, scores in zip(edited.names, edited.scores, strict=True):
        cut = space.adapter(scores).truncated(4)
        back = read_adapter(written / name, modules=list(space.shapes))
        for module, change in cut.adapter.factors.items():
            torch.testing.assert_close(back.factors[module].dense(), change.dense())
    found = [step["findings"] for step in result["steps"]]
    assert [list(each) for each in found] == [["fit"], ["neighbors"], ["directions"], ["files"]]
    error = found[3]["files"][0]
    assert error["target"] is None
    assert error["value"] > 0.01  # what rank 4 leaves out is told
    assert [section.missing_audits for section in read_report(tmp_path / "out").sections] == [
        (), ("images",), ("images",), ()
    ]  # fmt: skip
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_a_changed_step_leaves_those_before_it_alone_and_the_plan_says_so(here):
    first = here()
    told = here("--plan", change=("rank: 4", "rank: 2"))["plan"]["steps"]
    assert [step["finished"] for step in told] == [True, True, True, False]
    second = here(change=("rank: 4", "rank: 2"))
    assert [step["from_ledger"] for step in second["steps"]] == [True, True, True, False]
    assert [step["path"] for step in second["steps"]][:3] == [step["path"] for step in first["steps"]][:3]
    Path("labels.csv").write_text(Path("labels.csv").read_text() + "\n")  # a file that a setting names
    told = here("--plan")["plan"]["steps"]
    assert [step["finished"] for step in told] == [True, True, False, False]


def test_without_a_rank_files_hold_the_points_themselves(here):
    result = here(change=(", rank: 4", ""))
    (error,) = result["steps"][3]["findings"]["files"]
    assert error["passed"] is True


def test_a_share_of_the_square_chooses_the_rank_of_files(here):
    ranks = []
    for energy in ("0.2", "0.9"):
        written = Path(here(change=("rank: 4", f"energy: {energy}"))["steps"][3]["path"])
        adapters = [read_adapter(path) for path in written.iterdir()]
        ranks.append(sum(change.rank for one in adapters for change in one.factors.values()))
    assert ranks[0] < ranks[1]


def test_what_cannot_follow_or_is_not_there_is_said_before_work(here):
    assert "treatments.1.space-fit: needs a bank, but the treatment before it produces a space" in here(
        change=("space-sample: {count: 8, seed: 0}", "space-fit"), code=2
    )
    assert "treatments.2.space-edit.labels: " in here(change=("labels.csv, moves", "nowhere.csv, moves"), code=2)
    assert "labels.csv has no column 'beerd'. Nearest: beard" in here(change=("beard: 2.0", "beerd: 2.0"), code=2)
    assert "treatments.0.space-fit: A bank of 24 has at most 23 principal components" in here(
        change=("components: 8", "components: 24"), code=2
    )
    assert "treatments.3.space-export.rnak: there is no such key. Nearest: rank" in here(
        change=("rank: 4", "rnak: 4"), code=2
    )
