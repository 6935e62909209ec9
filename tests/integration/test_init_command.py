"""`netweight init`: recipes that can be run where they are written, for a model of one's own by its kind."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_llama import immunization_files

from netweight.cli import netweight
from netweight.recipes import read_recipe

pytest.importorskip("transformers", reason="transformers is in the llm extra")
pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")


def init(*arguments, code=0):
    answer = CliRunner().invoke(netweight, ["init", *map(str, arguments), "--json"])
    assert answer.exit_code == code, answer.output
    return json.loads(answer.stdout)


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "Größe zwei"
    folder.mkdir()
    monkeypatch.chdir(folder)
    immunization_files(folder)
    return folder


def test_every_recipe_that_begins_with_a_model_can_be_run_where_it_is_written(here):
    written = init("new")["recipes"]
    assert "quickstart.yaml" in written
    made = {"attack-finetune.yaml", "attack-embedding.yaml", "space.yaml"}  # after other commands
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("new")
        for recipe in set(written) - made:
            read_recipe(recipe)
    assert len(list(Path("new", "my-loras").iterdir())) == 256
    assert json.loads(Path("new", "recipe.schema.json").read_text())["title"] == "A recipe of netweight"


def test_a_model_of_ones_own_gets_the_recipe_for_its_kind_and_rows_to_replace(here):
    assert init("mine", "--subject", "model") == {"folder": "mine", "recipes": ["recipe.yaml"]}
    rows = {f"{name}.jsonl" for name in ("pairs", "retain", "harmful", "keep", "task")}
    assert {each.name for each in Path("mine").iterdir()} == {"recipe.yaml", "recipe.schema.json", *rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("mine")
        recipe = read_recipe("recipe.yaml")
    assert [chosen.what.verb for chosen in recipe.treatments] == ["immunize", "compress"]
    assert recipe.subject == here / "model"
    shutil.copy("model/model.safetensors", "one.safetensors")
    init("other", "--subject", "one.safetensors")
    assert "compress" in Path("other", "recipe.yaml").read_text()


def test_what_is_there_is_not_written_over(here):
    init("mine", "--subject", "model")
    error = init("mine", "--subject", "model", code=2)["error"]
    assert error["kind"] == "OutputExists"
    assert "exists already" in error["message"]


def test_the_plan_says_what_a_run_will_take(here):
    Path("recipe.yaml").write_text("subject: model\ntreatments: [compress]\noutput: out\n")
    answer = CliRunner().invoke(netweight, ["run", "recipe.yaml", "--plan", "--measure"])
    assert answer.exit_code == 0, answer.output
    assert "step 1: at least 1 run, about 0.0 minutes on this machine" in answer.output
    assert "disk: at most" in answer.output
    assert not Path("out").exists()
