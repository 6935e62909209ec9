"""The quickstart recipe on a small model folder, through the command line."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from netweight import cli, open_store

QUICKSTART = Path(__file__).parents[2] / "src" / "netweight" / "recipes" / "quickstart.yaml"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {f"layer.{number}.weight": torch.randn(64, 64).to(torch.bfloat16) for number in range(3)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return folder


def run(model, *arguments):
    command = ["run", str(QUICKSTART), "--subject", str(model), "--output", str(model.parent / "out"), *arguments]
    return CliRunner().invoke(cli.netweight, command, catch_exceptions=False)


def test_quickstart_compresses_and_proves_it(model):
    answer = run(model, "--json")
    assert answer.exit_code == 0, answer.output
    (step,) = json.loads(answer.stdout)["steps"]
    findings = {finding["name"]: finding for finding in step["findings"]["identity"]}
    assert findings["tensors that differ"]["passed"] is True
    store, original = open_store(step["path"]), open_store(model)
    for name in original.names():
        assert torch.equal(store.get(name).view(torch.int16), original.get(name).view(torch.int16))
    assert (model.parent / "out" / "report.html").is_file()


def test_a_second_run_is_remembered_and_the_plan_names_the_audit(model):
    assert "audits: identity" in run(model, "--plan").stdout
    assert run(model).exit_code == 0
    assert json.loads(run(model, "--json").stdout)["steps"][0]["from_ledger"] is True


def test_all_settings_are_those_of_the_command(model, tmp_path):
    answer = run(model, "--plan", "--json")
    settings = json.loads(answer.stdout)["plan"]["steps"][0]["settings"]
    assert settings == {
        "level": "default", "threads": None, "base": None, "variant": None, "exclude": [],
        "mantissa_bits": 7, "block_size": 512, "fidelity": "corrected",
    }  # fmt: skip


def test_a_recipe_may_round_and_its_audit_proves_the_bound(model, tmp_path):
    recipe = tmp_path / "rounded.yaml"
    recipe.write_text(QUICKSTART.read_text().replace("{level: default}", "{mantissa_bits: 2, block_size: 64}"))
    command = ["run", str(recipe), "--subject", str(model), "--output", str(tmp_path / "out"), "--json"]
    answer = CliRunner().invoke(cli.netweight, command, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    (step,) = json.loads(answer.stdout)["steps"]
    findings = {finding["name"]: finding for finding in step["findings"]["identity"]}
    assert findings["rounded tensors beyond their bound"]["passed"] is True
    assert 0 < findings["largest relative change"]["value"] <= findings["largest relative change"]["target"]
