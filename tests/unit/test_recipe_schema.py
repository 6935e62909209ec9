"""The JSON schema of recipes: that of the file beside the recipes, and saying the same as the reader."""

import json
from pathlib import Path

import pytest
import warm
import yaml

from netweight.errors import UsageError
from netweight.recipes import read_recipe

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the dev extra")

RECIPES = Path(__file__).parents[2] / "src" / "netweight" / "recipes"
FILE = RECIPES / "recipe.schema.json"
SHIPPED = sorted(RECIPES.glob("*.yaml"))
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="outside a source tree")


@pytest.fixture(scope="module")
def schema():
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def validator(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_file_is_what_the_command_prints(schema):
    """In a process of its own: here tests register treatments."""
    printed = warm.run("-m", "netweight", "run", "--schema")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout == FILE.read_text(), "netweight run --schema > src/netweight/recipes/recipe.schema.json"


def test_every_setting_says_what_it_is(schema):
    bare = [
        f"{verb}.{name}"
        for verb in ("compress", "immunize", "forget", "federate", "finetune", "embedding", "space-fit", "space-edit",
                     "space-sample", "space-export")
        for name, field in schema["$defs"][verb]["properties"].items()
        if not field.get("description")
    ]  # fmt: skip
    assert bare == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_recipes_fit_and_name_it(validator, path):
    validator.validate(yaml.safe_load(path.read_text()))
    assert path.read_text().startswith(f"# yaml-language-server: $schema={FILE.name}\n")


@pytest.mark.parametrize(
    "recipe",
    [
        {"subject": "a", "output": "b"},
        {"subject": "a", "output": "b", "treatments": []},
        {"subject": "a", "output": "b", "treatments": ["compres"]},
        {"subject": "a", "output": "b", "treatments": [{"compress": {"levle": "max"}}]},
        {"subject": "a", "output": "b", "treatments": [{"compress": {"level": "maximal"}}]},
        {"subject": "a", "output": "b", "treatments": ["immunize"]},  # its pairs are needed
        {"subject": "a", "output": "b", "treatments": ["compress"], "subjekt": "c"},
        {"subject": "a", "output": "b", "attacks": [{"finetune": {"harmful": "h.jsonl", "lr": [0]}}]},
        {"subject": "a", "output": "b", "treatments": ["compress"], "seed": "x"},
    ],
)
def test_what_does_not_fit_is_refused_by_the_reader_too(validator, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("h.jsonl").write_text("{}")
    assert not validator.is_valid(recipe)
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(UsageError):
        read_recipe("recipe.yaml")
