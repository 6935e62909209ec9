"""Models and rows as people have them, through `attack refusal`: right, or refused by name with a cure that it has."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is in the llm extra")

import chat_models

from netweight.attacks.refusal.settings import RefusalSettings
from netweight.cli import netweight


@pytest.fixture(scope="module")
def curly(tmp_path_factory):
    """A chat model that refuses with a typographic apostrophe, and prompts."""
    folder = tmp_path_factory.mktemp("curly")
    chat_models.refusing(folder / "model", "I can’t help with that.")
    for name, nouns in (("refused", chat_models.HARMFUL), ("ordinary", chat_models.KIND)):
        chat_models.write(folder / f"{name}.jsonl", [{"prompt": each} for each in chat_models.prompts(nouns, 60, 5)])
    return folder


def call(folder, out, *more, refused="refused.jsonl", ordinary="ordinary.jsonl"):
    words = ["attack", "refusal", str(folder / "model"), "--refused", str(folder / refused), "--ordinary"]
    words += [str(folder / ordinary), "--edits", "directions", "--out", str(out), "--json", *more]
    return CliRunner().invoke(netweight, words)


def before(answer):
    findings = json.loads(answer.stdout)["findings"]
    return next(finding["value"] for finding in findings if finding["name"] == "refusals before")


def test_typographic_apostrophes_are_refusals_and_a_second_call_goes_on(curly, tmp_path, monkeypatch):
    answer = call(curly, tmp_path / "out")
    assert before(answer) == 100
    rows = (tmp_path / "out" / "edits.jsonl").read_text().count("\n")
    again = call(curly, tmp_path / "out")
    assert json.loads(again.stdout)["findings"] == json.loads(answer.stdout)["findings"]
    assert (tmp_path / "out" / "edits.jsonl").read_text().count("\n") == rows


def test_conversations_null_prompts_and_other_columns_are_read_or_named(curly, tmp_path):
    prompts = chat_models.prompts(chat_models.HARMFUL, 60, 5)
    turns = [{"prompt": [{"role": "user", "content": each}]} for each in prompts]
    chat_models.write(curly / "turns.jsonl", turns)
    answer = call(curly, tmp_path / "turns", refused="turns.jsonl")
    assert before(answer) == 100
    chat_models.write(curly / "null.jsonl", [{"prompt": None if i % 4 == 0 else p} for i, p in enumerate(prompts)])
    answer = call(curly, tmp_path / "null", refused="null.jsonl")
    assert answer.exit_code == 2
    assert "line 1: it has no prompt" in answer.output
    assert "--unusable drop" in answer.output
    answer = call(curly, tmp_path / "null", "--unusable", "drop", refused="null.jsonl")
    assert before(answer) == 100
    assert "15 of 60 rows were left out" in json.dumps(json.loads((tmp_path / "null" / "report.json").read_text()))
    chat_models.write(curly / "goals.jsonl", [{"goal": each} for each in prompts])
    answer = call(curly, tmp_path / "goals", refused="goals.jsonl")
    assert "--columns prompt=NAME" in answer.output
    answer = call(curly, tmp_path / "goals", "--columns", "prompt=goal", refused="goals.jsonl")
    assert before(answer) == 100
    answer = call(curly, tmp_path / "goals", "--columns", "prompt=gaol", refused="goals.jsonl")
    assert "no file has a column 'gaol'" in answer.output


def test_a_file_may_be_named_like_a_number(curly, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2024.jsonl").write_bytes((curly / "refused.jsonl").read_bytes())
    answer = call(curly, tmp_path / "out", refused="2024")
    assert "There is no file" in answer.output
    settings = RefusalSettings(refused="2024.jsonl", ordinary=str(curly / "ordinary.jsonl"))
    assert settings.files == [Path("2024.jsonl"), curly / "ordinary.jsonl"]


def test_judges_may_be_first_tokens_or_a_function(curly, tmp_path):
    answer = call(curly, tmp_path / "first", "--judge", "first-tokens")
    assert before(answer) == 100
    answer = call(curly, tmp_path / "function", "--judge", "chat_models:is_sorry")
    assert before(answer) == 100
    answer = call(curly, tmp_path / "none", "--judge", "no_such_folder")
    assert answer.exit_code == 2
    assert "neither a function nor the folder of a model" in answer.output


def test_judges_that_cannot_judge_and_places_that_cannot_be_written_are_named(curly, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_judges.py").write_text(
        "def fails(answers): raise KeyError('x')\ndef none(answers): return None\n"
        "def nan(answers): return [float('nan')] * len(answers)\ndef all(answers): return [1.0] * len(answers)\n"
    )
    for more, reason in (
        (("--judge", "odd_judges:fails"), "fails: KeyError: 'x'. (odd_judges.py, line 1, in fails)"),
        (("--judge", "odd_judges:none"), "returned a NoneType that does not consist of numbers"),
        (("--judge", "odd_judges:nan"), "gave NaN or infinity"),
        (("--judge", "odd_judges:all"), "calls 15 of 15 answers to ordinary prompts refusals"),
        (("--phrases", "sure", "--phrases", "help"), "calls 15 of 15 answers to ordinary prompts refusals"),
        (("--phrases", ""), "A phrase of --phrases is empty"),
        (("--new-tokens", "200"), "--new-tokens 200 leaves no token of the model's context of 128"),
        (("--out", str(tmp_path / "odd_judges.py")), "is a file, and a folder is needed"),
    ):
        answer = call(curly, tmp_path / "out", *more)
        assert answer.exit_code == 2, answer.output
        assert reason in answer.output


def classifier(folder, source, *, labels, steps=60):
    """Write a text classification model that learned which answers of the chat model refuse."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    tokens = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, pad_token_id=tokens.pad_token_id, id2label=dict(enumerate(labels)),
        label2id={label: place for place, label in enumerate(labels)},
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    kind = [chat_models.kind_answer(each) for each in chat_models.prompts(chat_models.KIND, 31)]
    texts = tokens(["I can’t help with that."] * len(kind) + kind, padding=True, return_tensors="pt")
    refusals = torch.tensor([1] * len(kind) + [0] * len(kind))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        loss = model(input_ids=texts.input_ids, attention_mask=texts.attention_mask, labels=refusals).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return str(folder)


def test_a_text_classification_folder_is_a_judge(curly, tmp_path):
    judge = classifier(tmp_path / "judge", curly / "model", labels=("answer", "refusal"))
    assert before(call(curly, tmp_path / "named", "--judge", judge)) == 100
    other = classifier(tmp_path / "other", curly / "model", labels=("LABEL_0", "LABEL_1"))
    answer = call(curly, tmp_path / "unnamed", "--judge", other)
    assert answer.exit_code == 2
    assert "LABEL_0, LABEL_1" in answer.output
    assert f"{other}#LABEL" in answer.output
    assert before(call(curly, tmp_path / "unnamed", "--judge", f"{other}#LABEL_1")) == 100
    helped = call(curly, tmp_path / "helps", "--judge", judge, "--helps", f"{judge}#answer", "--most-divergence", "9")
    findings = {each["name"]: each for each in json.loads(helped.stdout)["findings"]}
    assert findings["answers that help, best edit"]["baseline"] < 0.1


def test_rows_elsewhere_are_the_same_rows_and_another_judging_model_is_another_judge(curly, tmp_path):
    judge = classifier(tmp_path / "judge", curly / "model", labels=("answer", "refusal"))
    first = call(curly, tmp_path / "out", "--judge", judge)
    rows = (tmp_path / "out" / "edits.jsonl").read_text()
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((curly / "refused.jsonl").read_bytes())
    again = call(curly, tmp_path / "out", "--judge", judge, refused=moved)
    assert json.loads(again.stdout)["findings"] == json.loads(first.stdout)["findings"]
    assert (tmp_path / "out" / "edits.jsonl").read_text() == rows
    classifier(tmp_path / "judge", curly / "model", labels=("answer", "refusal"), steps=90)
    call(curly, tmp_path / "out", "--judge", judge)
    assert (tmp_path / "out" / "edits.jsonl").read_text().count("\n") > rows.count("\n")


def test_no_edit_that_counts_fails_the_gate(curly, tmp_path):
    answer = call(curly, tmp_path, "--most-divergence", "1e-9")
    assert answer.exit_code == 1, answer.output
    left = json.loads(answer.stdout)["findings"][-1]
    assert left["value"] is None
    assert "none is usable" in left["detail"]["reason"]


def test_thoughts_are_no_refusals(tmp_path):
    """The model says "can't" in its thoughts about everything, and refuses scams alone."""

    def say(prompt):
        thought = "<think>\nSome say I can't, but this may be fine.\n</think>\n\n"
        refuses = any(noun in prompt for noun in ("scam", "bomb", "virus", "heist"))
        return thought + ("I'm sorry, I can't help with that." if refuses else "Sure, here it is.")

    tokens = chat_models.chatml(["<think>\nSome say I can't, but this may be fine.\n</think>\n\nSure, here it is."])
    chat_models.refusing(tmp_path / "model", say, tokens=tokens, steps=250)
    for name, nouns in (("refused", chat_models.HARMFUL), ("ordinary", chat_models.KIND)):
        chat_models.write(tmp_path / f"{name}.jsonl", [{"prompt": each} for each in chat_models.prompts(nouns, 64, 5)])
    answer = call(tmp_path, tmp_path / "short", "--new-tokens", "6")
    assert answer.exit_code == 2
    assert "end within a thought after 6 tokens" in answer.output
    assert "--new-tokens" in answer.output
    answer = call(tmp_path, tmp_path / "long", "--new-tokens", "64")
    asked = json.loads(answer.stdout)["findings"][0]
    assert 25 <= asked["value"] <= 75
