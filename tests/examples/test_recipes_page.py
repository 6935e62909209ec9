"""What docs/recipes.md and docs/recipe-steps.md show is true: the recipe is read, the tables name what there is."""

import re
from pathlib import Path

import pytest

from netweight.recipes import read_recipe
from netweight.registry import known_attacks, known_methods

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
STEPS = ROOT / "docs" / "recipe-steps.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def test_the_table_says_what_each_step_takes_makes_and_is_proved_by():
    rows = re.findall(r"^\| `([a-z-]+)` \| ([a-z, ]+) \| (\w+) \| (.*) \|$", STEPS.read_text(), re.M)
    said = {verb: (tuple(takes.split(", ")), makes, tuple(re.findall(r"`(.*?)`", audits)))
            for verb, takes, makes, audits in rows}  # fmt: skip
    assert said == {verb: (each.takes, each.makes, tuple(each.audits)) for verb, each in known_methods().items()}
    for attack in known_attacks():
        assert f"`{attack}`" in STEPS.read_text()


def test_the_recipes_to_copy_are_those_that_there_are():
    named = set(re.findall(r"`([a-z-]+\.yaml)`", PAGE.read_text().split("## Recipes to copy")[1]))
    assert named == {path.name for path in (ROOT / "src" / "netweight" / "recipes").glob("*.yaml")}


def test_the_recipe_shown_is_read(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is in the llm extra")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers comes with transformers")
    monkeypatch.chdir(tmp_path)
    shown, *_ = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)
    Path("recipe.yaml").write_text(shown)
    Path("my-model").mkdir()
    Path("my-model", "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save("my-model/tokenizer.json")
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 8)
    Path("harmful.jsonl").write_text('{"prompt": "b", "response": "c"}\n')
    recipe = read_recipe("recipe.yaml")
    assert [each.registration.verb for each in (*recipe.treatments, *recipe.attacks)] == [
        "immunize",
        "compress",
        "finetune",
    ]
