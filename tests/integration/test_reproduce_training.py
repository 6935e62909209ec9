"""NeuZip's tables 1 and 2 and figure 2 through the command line, on models that train in a moment."""

import json
from functools import partial

import pytest
from click.testing import CliRunner

from netweight.cli import netweight

pytest.importorskip("transformers", reason="transformers is in the llm extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")

from netweight.data.public import text_file
from netweight.errors import UsageError
from netweight_experiments import memory as memory_ledger
from netweight_experiments.tables.neuzip import finetuning, pretraining, training
from netweight_experiments.tables.neuzip.training import COMPRESSED, LOMO, VANILLA, WAYS
from netweight_experiments.toys import decoder as shapes

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 320,
}


def call(*arguments):
    result = CliRunner().invoke(netweight, [str(part) for part in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def measured(answer):
    return {(row["row"], row["column"]): row["measured"] for row in answer["rows"] if row["measured"] is not None}


def findings(answer):
    return {finding["name"]: finding for finding in answer["findings"]}


@pytest.fixture
def here(monkeypatch, data_folder):
    """What runs in fresh processes runs in this one, on tiny models; yields how often something ran."""
    ran = []

    def run(function, argument, **options):
        ran.append(function.__name__)
        return json.loads(json.dumps(function(argument)))

    monkeypatch.setattr(training, "in_fresh_process", run)
    texts = {
        split: text_file(f"wikitext2-{split}.txt").read_text(encoding="utf-8")[:8000] for split in ("valid", "test")
    }
    monkeypatch.setattr(pretraining, "wikitext2", texts.__getitem__)
    monkeypatch.setitem(shapes.SHAPES, shapes.MINIATURE, {"type": "llama", "fields": TINY})
    small = {"batch": 1, "window": 32, "vocabulary": 320}
    monkeypatch.setattr(pretraining, "ROUNDS", 5)
    monkeypatch.setattr(pretraining, "Pretraining", partial(pretraining.Pretraining, steps=7, held_out=2, **small))
    return ran


def test_table_1_finds_the_same_losses_and_weights_and_resumes(tmp_path, here):
    answer = call("reproduce", "neuzip-table1", "--out", tmp_path, "--json")
    assert here == ["run", "run", "run", "take_turns"]
    values = measured(answer)
    assert {row for row, _ in values} == set(WAYS)
    losses = {values[way, "miniature loss"] for way in WAYS}
    assert len(losses) == 1
    assert 5 < losses.pop() < 30
    found = findings(answer)
    for base, what in ((LOMO, "updates whose loss differs"), (VANILLA, "parameters that differ")):
        same = found[f"miniature, {COMPRESSED} against {base}: {what}"]
        assert (same["value"], same["target"], same["passed"]) == (0, 0, True)
        assert same["n"] > 5
    assert values[COMPRESSED, "miniature memory"] < values[VANILLA, "miniature memory"]
    assert found[f"miniature, {COMPRESSED} against {LOMO}: iterations per second"]["n"] == 5
    published = {(row["row"], row["column"]): row["published"] for row in answer["rows"]}
    assert published[COMPRESSED, "Llama-3 8B memory"] == 15.25
    (tmp_path / "neuzip-table1-small" / "result.json").unlink()
    again = call("reproduce", "neuzip-table1", "--out", tmp_path, "--json")
    assert len(here) == 4
    assert measured(again) == values


def test_a_difference_would_be_found(tmp_path, here, monkeypatch):
    arrange = pretraining.arrange

    def wrong(way, model, *arguments, **options):
        if way == COMPRESSED:
            model.model.norm.weight.data[0] += 0.5
        return arrange(way, model, *arguments, **options)

    monkeypatch.setattr(pretraining, "arrange", wrong)
    found = findings(call("reproduce", "neuzip-table1", "--out", tmp_path, "--json"))
    for what in ("updates whose loss differs", "parameters that differ"):
        assert found[f"miniature, {COMPRESSED} against {LOMO}: {what}"]["passed"] is False
    assert training.differing_steps(["a", "b"], ["a"]) == 1


def test_a_run_that_fails_is_named_and_tried_again(tmp_path, here, monkeypatch):
    step = pretraining.Trainee.step

    def fail(self):
        raise RuntimeError("no luck")

    monkeypatch.setattr(pretraining.Trainee, "step", fail)
    arguments = ["reproduce", "neuzip-table1", "--out", str(tmp_path)]
    result = CliRunner().invoke(netweight, arguments)
    assert result.exit_code == 2
    assert "Training by Vanilla failed: RuntimeError: no luck" in result.output
    monkeypatch.setattr(pretraining.Trainee, "step", step)
    assert CliRunner().invoke(netweight, arguments).exit_code in (0, 1)


def test_paper_scale_is_refused_with_the_arithmetic_where_memory_is_too_small(tmp_path, monkeypatch, data_folder):
    monkeypatch.setattr(pretraining, "_available", lambda: 3 << 30)
    result = CliRunner().invoke(netweight, ["reproduce", "neuzip-table1", "--scale", "paper", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "has 3.0 GiB of free memory" in result.output
    assert "Llama-3 8B, Vanilla: 15.0 GiB weights + 15.0 GiB gradients" in result.output
    assert "--scale small" in result.output
    monkeypatch.setattr(pretraining, "_available", lambda: 12 << 30)
    fitting, left_out = pretraining._affordable()
    assert {(config.shape, config.way) for config in fitting} == {
        ("GPT-Neo-XL 2.7B", way) for way in (LOMO, COMPRESSED)
    }
    assert len(left_out) == 7


def test_figure_2_is_a_ledger_that_adds_up(tmp_path, here):
    answer = call("reproduce", "neuzip-fig2", "--out", tmp_path, "--json")
    assert len(here) == 8
    values = measured(answer)
    rows = {row for row, _ in values}
    assert len(rows) == 8
    for row in rows:
        parts = [values[row, part] for part in memory_ledger.PARTS]
        assert sum(parts) == pytest.approx(values[row, "all tensors"])
    plain, last = "AdamW, vanilla", "AdamW, checkpointing + LOMO + NeuZip"
    assert values[plain, "optimizer state"] == pytest.approx(2 * values[plain, "weights"], rel=0.02)
    assert values["SGD, vanilla", "optimizer state"] == 0
    assert values[last, "weights"] < 0.9 * values[plain, "weights"]
    assert values["SGD, checkpointing", "activations"] < values["SGD, vanilla", "activations"]
    page = (tmp_path / "neuzip-fig2-small" / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "checkpointing" in page


@pytest.mark.filterwarnings("ignore")  # peft and bitsandbytes call what transformers and torch call deprecated
def test_table_2_agrees_to_the_bit_and_says_what_could_not_run(tmp_path, here, monkeypatch):
    pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    from netweight.data.public import wikisql
    from netweight_experiments.toys.encoder_decoder import EncoderDecoderRecipe, trained
    from netweight_experiments.toys.fitting import Schedule

    recipe = EncoderDecoderRecipe(
        vocabulary=300, width=64, inner=64, layers=1, heads=2, batch=4, schedule=Schedule(steps=2, check_every=1)
    )
    base = tmp_path / "base"
    about = trained(wikisql("train")[:100], wikisql("dev")[:4], base, recipe)
    monkeypatch.setattr(finetuning, "_base", lambda out: (base, about))
    tiny = partial(finetuning.FineTuning, steps=6, batch=2, tests=4)
    monkeypatch.setattr(finetuning, "FineTuning", tiny)
    monkeypatch.setattr(finetuning, "ROUNDS", 5)
    adapters = {"LoRA on the bf16 base": None, "QLoRA NF4": "Quant NF4"}
    monkeypatch.setattr(finetuning, "ADAPTERS", adapters)
    monkeypatch.setattr("netweight_experiments.tables.neuzip.quantizers.missing", lambda quantizer: "it is not there")
    answer = call("reproduce", "neuzip-table2", "--out", tmp_path, "--json")
    values = measured(answer)
    assert len({values[way, "stand-in BLEU"] for way in WAYS}) == 1
    assert values[VANILLA, "speed"] == 1
    assert any("QLoRA NF4 was not measured" in note and "it is not there" in note for note in answer["notes"])
    assert ("QLoRA NF4", "stand-in BLEU") not in values
    found = findings(answer)
    for base_way in (LOMO, VANILLA):
        for what in ("updates whose loss differs", "parameters that differ", "difference in BLEU"):
            assert found[f"{COMPRESSED} against {base_way}: {what}"]["passed"] is True
    by_adamw = f"{COMPRESSED} by AdamW against Vanilla by AdamW: parameters that differ"
    assert (found[by_adamw]["passed"], found[by_adamw]["n"] > 5) == (True, True)
    assert found["BLEU, Vanilla"]["n"] == 4
    assert "paper" in found[f"{COMPRESSED} against {LOMO}: peak of tensors"]["detail"]["bound"]


def test_paper_scale_of_table_2_needs_a_model(tmp_path, data_folder):
    with pytest.raises(UsageError, match="--model FOLDER"):
        finetuning.table2("paper", tmp_path)


def test_bleu_is_that_of_sacrebleu_with_an_interval():
    pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    right = ["SELECT a FROM t WHERE b = 1", "SELECT c FROM t WHERE d = 2", "SELECT e FROM t WHERE f = 3"]
    assert finetuning.score(right, right)["value"] == pytest.approx(100)
    wrong = [right[0], right[1].replace("c", "x"), "nothing"]
    found = finetuning.score(wrong, right)
    assert found["low"] < found["value"] < found["high"]
    assert (found["n"], found["exact"]) == (3, 1)
