"""Recipes for immunization and fine-tuning attacks on a tiny Llama: one report, resumed, errors that name the key."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is in the llm extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

from tiny_llama import immunization_files

from netweight.cli import netweight
from netweight.report.report import read_report

RECIPES = Path(__file__).parents[2] / "src" / "netweight" / "recipes"
SMALL = ", lr: [3e-3], max_steps: 8, check_every: 4, threshold: 0.25, least_resistance: 0}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    immunization_files(tmp_path)
    return tmp_path


def shipped(name, old, new):
    text = (RECIPES / name).read_text().replace("seeds: 5}", "grid: quick, seeds: 1" + SMALL)
    assert old in text
    Path("recipe.yaml").write_text(text.replace(old, new))
    return "recipe.yaml"


def run(*arguments):
    return CliRunner().invoke(netweight, ["run", *map(str, arguments)])


def test_one_recipe_defends_attacks_both_and_writes_one_report(here):
    recipe = shipped("immunize.yaml", "defense: repnoise", "defense: repnoise, lr: 3e-3")
    call = (recipe, "--subject", "model", "--output", "out", "--json")
    answer = run(*call)
    assert answer.exit_code in (0, 1), answer.output
    defended, attacked = json.loads(answer.stdout)["steps"]
    assert defended["findings"]["depth"][0]["name"].startswith("change of the weights")
    found = {finding["name"] for finding in attacked["findings"]["finetune"]}
    assert {"resistance, defended", "kept ability, defended", "training on task, defended"} <= found
    depth, second = read_report("out").sections
    assert (depth.title, depth.missing_audits, len(depth.figures)) == ("1. immunize: Depth of the defense", (), 4)
    assert second.title.startswith("2. finetune: ")
    assert len(second.figures) == 2  # one seed: no curve over runs
    lines = Path("out/attacks.jsonl").read_text()
    again = run(*call)
    assert json.loads(again.stdout)["steps"][0]["from_ledger"] is True
    assert Path("out/attacks.jsonl").read_text() == lines
    attack = shipped("attack-finetune.yaml", "base: my-model", "base: model")
    answer = run(attack, "--subject", defended["path"], "--output", "alone", "--json")
    (alone,) = json.loads(answer.stdout)["steps"]
    # Processor seconds differ from run to run.
    values = [[f["value"] for f in each["findings"]["finetune"] if f["unit"] != "s"] for each in (attacked, alone)]
    assert values[0] == values[1]


def test_without_an_attack_the_report_says_what_was_not_proved(here):
    recipe = shipped("immunize.yaml", "defense: repnoise", "defense: repnoise")
    text = Path(recipe).read_text()
    Path(recipe).write_text(re.sub(r"attacks:\n.*\n", "", text))
    plan = run(recipe, "--subject", "model", "--plan").stdout
    assert "audits left out: fine-tuning attack" in plan
    assert "audits: depth\n" in plan


def test_what_is_wrong_is_named_by_its_key(here):
    Path("recipe.yaml").write_text("""
subject: model
treatments:
  - immunize: {pairs: nowhere.jsonl, epochs: 0}
  - immunize: {pairs: pairs.jsonl, defense: repnoize}
  - immunize: {pears: pairs.jsonl}
attacks:
  - fintune: {}
  - finetune: {harmful: harmful.jsonl, grid: huge, lr: [0]}
  - finetune: {harmful: harmful.jsonl, benign_share: 0.5}
output: out
""")
    answer = run("recipe.yaml")
    assert answer.exit_code == 2
    for expected in (
        "treatments.0.immunize.pairs: There is no file nowhere.jsonl.",
        "treatments.0.immunize.epochs: must be at least 1, not 0",
        "treatments.1.immunize.defense: there is no defense 'repnoize'. Nearest: repnoise",
        "treatments.2.immunize.pears: there is no such key. Nearest: pairs",
        "attacks.0: there is no attack 'fintune'. Nearest: finetune",
        "attacks.1.finetune.grid: must be 'adaptive', 'single', 'quick' or 'paper', not 'huge'",
        "attacks.1.finetune.lr.0: must be greater than 0, not 0",
        "attacks.2.finetune: A benign_share needs benign rows",
    ):
        assert expected in answer.stderr
    Path("recipe.yaml").write_text("subject: model\noutput: out\n")
    assert "the recipe has neither treatments nor attacks" in run("recipe.yaml").stderr
