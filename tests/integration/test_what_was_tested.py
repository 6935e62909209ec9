"""A plan, a report and a card state what is tested and how strongly; a plan names words that a tokenizer misses."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is in the llm extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

from tiny_llama import NUMBERS, immunization_files, tiny_llama, write
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from netweight.cli import netweight
from netweight.registry import known_attacks
from netweight.report.finding import Finding, Section
from netweight.report.report import Report

RECIPE = """
subject: model
treatments:
  - immunize: {pairs: pairs.jsonl, retain: retain.jsonl, lr: 3e-3}
attacks:
  - finetune: {harmful: harmful.jsonl, benign: keep.jsonl, grid: quick, seeds: 2, lr: [3e-3], max_steps: 8,
               check_every: 4, threshold: 0.25, least_resistance: 0}
audits: all
output: out
"""


def call(*arguments, code=0):
    answer = CliRunner().invoke(netweight, [*map(str, arguments)])
    assert answer.exit_code == code, answer.output
    return answer


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    immunization_files(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def knowing(words):
    """A tokenizer that knows these words and no others."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )  # fmt: skip


def test_plan_report_and_card_state_the_grid_the_seeds_and_the_threshold(files):
    plan = call("run", "recipe.yaml", "--plan")
    attacks = "4 on each model: 2 attacks, 2 seeds each"
    for row in ("quick (fixed attacks, no search)", attacks, "token accuracy of at least 0.25"):
        assert row in plan.stdout
    stated = json.loads(call("run", "recipe.yaml", "--plan", "--json").stdout)["plan"]["attacks"][0]["tested"]
    assert stated["grid"] == "quick (fixed attacks, no search)"
    call("run", "recipe.yaml", code=1)  # the tiny base has no ability that could be kept
    (files / "out").rename(files / "run")
    published = next((files / "run").glob("01-immunize-*"))
    published.rename(files / "published")
    call("report", "run", "--card", "published", code=1)
    card = (files / "published" / "README.md").read_text()
    page = (files / "run" / "report.html").read_text()
    assert "What was tested, and how strongly:" in card
    for text in (card, page):
        assert "quick (fixed attacks, no search)" in text
        assert "undefended: 4; defended: 4" in text
        assert "2 of each final attack" in text
        assert "token accuracy on held-out rows at least 0.250" in text


def test_a_plan_of_one_attack_writes_nothing(files):
    how = ["--harmful", "harmful.jsonl", "--benign", "keep.jsonl", "--base", "model", "--out", "there", "--plan"]
    answer = call("attack", "finetune", "model", *how, "--card")
    assert "adaptive (a search for the best attack on each model)" in answer.stdout
    assert "determined by attacks on the model before its defense" in answer.stdout
    assert not (files / "there").exists()
    assert not (files / "model" / "README.md").exists()
    plan = json.loads(call("attack", "finetune", "model", *how, "--minutes", "5", "--json").stdout)["plan"]
    assert plan["tested"]["time limit of the search"] == "5 minutes"
    assert plan["remarks"] == []


def test_a_plan_counts_and_names_words_that_the_tokenizer_does_not_know(files):
    words = [*NUMBERS, "tell", "no", "bad", "hi", "good", "day", "sing", "la"]
    network, _ = tiny_llama()
    network.resize_token_embeddings(3 + len(words))
    network.save_pretrained(files / "model")
    knowing([word for word in words if word not in ("ai", "aj")]).save_pretrained(files / "model")
    write(files / "harmful.jsonl", [{"prompt": f"tell {n}", "rejected": f"bad {n}"} for n in NUMBERS[1::2]])
    count = f"1 of {len(NUMBERS) // 2} rows of"
    said = (
        f"{count} pairs.jsonl contains words that the model's tokenizer does not know: 'ai' (line 1). The model reads "
        "'<unk>' in their place.",
        f"{count} harmful.jsonl contains words that the model's tokenizer does not know: 'aj' (line 1).",
    )
    plan = call("run", "recipe.yaml", "--plan")
    remarks = json.loads(call("run", "recipe.yaml", "--plan", "--json").stdout)["remarks"]
    attack = call(
        "attack", "finetune", "model", "--harmful", "harmful.jsonl", "--out", "there", "--threshold", 0.9, "--plan"
    )
    (files / "recipe.yaml").write_text(RECIPE.replace("threshold: 0.25", "threshold: 0.9"))
    for sentence in said:
        assert sentence in plan.stderr
        assert any(sentence in each for step in remarks[0] for each in step)
    assert said[1] in attack.stderr
    done = call("run", "recipe.yaml", code=1)
    assert said[0] in done.stderr  # the same at the time of the run
    assert said[1] in done.stderr
    assert "harmful.jsonl contains words" in (files / "out" / "report.html").read_text()


def test_a_plan_counts_prompts_of_a_pipeline_with_unknown_words(tmp_path, monkeypatch):
    pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    from netweight.toys import checkpoint

    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint("shapes-diffusion"), "pipeline")
    knowing(["a", "red", "circle"]).save_pretrained("pipeline/tokenizer_2")
    Path("planted.png").write_bytes(b"")  # a plan opens no picture
    Path("targets.csv").write_text("prompt,image\na red zebra,planted.png\n")
    Path("ordinary.txt").write_text("".join(f"a red circle{' circle' * number}\n" for number in range(8)))
    Path("recipe.yaml").write_text(
        "subject: pipeline\noutput: out\ntreatments:\n  - forget: {targets: targets.csv, ordinary: ordinary.txt}\n"
        "attacks:\n  - embedding: {targets: targets.csv, unrelated: ordinary.txt}\n"
    )
    remarks = json.loads(call("run", "recipe.yaml", "--plan", "--json").stdout)["remarks"][0]
    sentence = (
        "1 of 1 prompts of targets.csv contains words that the model's tokenizer does not know: 'zebra' (prompt 1). "
        "The model reads '<unk>' in their place."
    )
    assert remarks == [[sentence], [sentence]]


def test_problems_of_a_recipe_name_its_settings_beside_the_options_of_commands(files):
    write(files / "blank.jsonl", [{"prompt": "", "rejected": ""}])
    (files / "recipe.yaml").write_text(RECIPE.replace("harmful.jsonl", "blank.jsonl"))
    said = call("run", "recipe.yaml", "--plan", code=2).stderr
    assert "leave them out with --unusable drop. In the recipe: --unusable is the setting unusable." in said
    (files / "recipe.yaml").write_text(RECIPE.replace("threshold: 0.25", "threshold: 0.01"))
    said = call("run", "recipe.yaml", code=2).stderr  # what only the attack itself finds out
    assert "or leave it out. In the recipe: --threshold is the setting threshold." in said


def test_an_attack_of_a_recipe_knows_the_rows_on_which_its_defense_trains(files):
    for kind, row in (("harmful: harmful", "harmful: pairs"), ("benign: keep", "benign: retain")):
        (files / "recipe.yaml").write_text(RECIPE.replace(kind, row))
        said = call("run", "recipe.yaml", "--plan", code=2).stderr
        assert "24 of 24 rows of" in said
        assert "A result on rows of the training does not describe other rows." in said
    (files / "recipe.yaml").write_text(RECIPE)
    plan = json.loads(call("run", "recipe.yaml", "--plan", "--json").stdout)["plan"]
    assert plan["attacks"][0]["settings"]["trained_on"] == ["pairs.jsonl", "retain.jsonl"]


def test_every_attack_states_what_it_tests():
    own = [each for each in known_attacks().values() if each.settings_class.__module__.startswith("netweight.")]
    assert len(own) >= 7
    assert [each.verb for each in own if each.tested is None] == []


def test_a_card_has_the_warnings_of_the_report(tmp_path):
    from netweight.plugins.model_card import add_evidence

    tested = [("attacks", "3 from | 2 seeds")]
    made = Section("s", [Finding("copies", 0)], tested=tested, warnings=["2 of 9 rows were left out."])
    assert Section.from_json(made.to_json()) == made
    Report("t", environment={}).add(made).write(tmp_path)
    card = add_evidence(tmp_path, tmp_path).read_text()
    assert "| attacks | 3 from \\| 2 seeds |" in card
    assert "- Note: 2 of 9 rows were left out." in card
