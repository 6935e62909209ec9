"""`netweight immunize` end to end: a tiny Llama folder and files of rows in, a defended folder with its record out."""

import json
import signal
from pathlib import Path

import chat_models
import pytest
import torch
import warm
import yaml
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is in the llm extra")

from tiny_llama import KEPT, PAIRS, save, tiny_llama, write

from netweight.attacks.finetuning.folder_checks import check
from netweight.attacks.finetuning.settings import FolderAttack
from netweight.cli import netweight
from netweight.errors import UsageError
from netweight.hf.load_language_model import load_causal_lm
from netweight.methods.immunize.record import Record
from netweight.report.report import read_report


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A bfloat16 model with its tokenizer, pairs, and rows to keep."""
    folder = tmp_path_factory.mktemp("immunize")
    write(folder / "pairs.jsonl", PAIRS)
    write(folder / "keep.jsonl", KEPT)
    model, tokenizer = tiny_llama(layers=2, dtype="bfloat16")
    save(model.to(torch.bfloat16), tokenizer, folder / "model")
    (folder / "model" / "LICENSE").write_text("MIT License")
    (folder / "model" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nBy its author.\n")
    (folder / "model" / "logo.svg").write_text("<svg/>")
    return folder


def arguments(case, out, *more):
    fixed = ["immunize", case / "model", out, "--pairs", case / "pairs.jsonl", "--retain", case / "keep.jsonl"]
    return [str(part) for part in (*fixed, "--lr", "3e-3", *more)]


def call(case, out, *more):
    return CliRunner().invoke(netweight, arguments(case, out, *more))


def test_a_defended_folder_opens_and_says_what_was_done(case, tmp_path):
    before = (case / "model" / "model.safetensors").read_bytes()
    answer = call(case, tmp_path / "defended", "--epochs", "3", "--card", "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["steps"] == 18
    assert (case / "model" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["defended"]
    record = Record.read(tmp_path / "defended" / "immunize.json")
    assert record.defense == "repnoise"
    assert record.steps[-1].terms["ascent"].value > record.steps[0].terms["ascent"].value
    assert record.steps[-1].terms["retained"].value < record.steps[0].terms["retained"].value
    card = (tmp_path / "defended" / "README.md").read_text()
    assert "| steps | 18 |" in card
    assert card.startswith("---\nlicense: mit\n")
    assert "By its author." in card
    assert (tmp_path / "defended" / "LICENSE").read_text() == "MIT License"
    assert (tmp_path / "defended" / "logo.svg").is_file()
    model, tokenizer = load_causal_lm(tmp_path / "defended")
    assert model.dtype == torch.bfloat16
    assert len(tokenizer) > 0
    assert not (tmp_path / "defended" / "immunize.net.safetensors").exists()
    training, depth = read_report(tmp_path / "defended" / "immunize-report").sections
    assert training.missing_audits == ("fine-tuning attack",)
    assert [len(depth.figures), len(depth.tables)] == [4, 2]
    assert [row[0] for row in depth.tables[0].rows][:2] == ["model.layers.0", "model.layers.1"]
    harmful = next(part for part in depth.findings if "harmful answers, mean" in part.name)
    assert harmful.value > harmful.baseline
    again = call(case, tmp_path / "defended")
    assert again.exit_code == 2
    assert "exists" in again.output


def test_an_attack_that_leaves_out_the_chat_template_of_a_defense_is_refused(case, tmp_path):
    model, tokenizer = tiny_llama()
    tokenizer.chat_template, model.config.max_position_embeddings = chat_models.SWITCHED, 128
    save(model, tokenizer, tmp_path / "model")
    write(tmp_path / "few.jsonl", PAIRS[:4])
    for name, given in (("by-chat", ["--chat"]), ("by-option", ["--template", "enable_thinking=false"])):
        words = ["immunize", tmp_path / "model", tmp_path / name, "--pairs", tmp_path / "few.jsonl"]
        words += ["--batch-size", "4", "--defense", "random-weights", *given]
        answer = CliRunner().invoke(netweight, [str(word) for word in words])
        assert answer.exit_code == 0, answer.output
        settings = {"harmful": tmp_path / "few.jsonl", "grid": "quick"}
        with pytest.raises(UsageError, match="was trained with the chat template, and the attack uses another format"):
            check(tmp_path / name, FolderAttack(**settings))
        check(tmp_path / name, FolderAttack(**settings, chat=True))
        check(tmp_path / name, FolderAttack(**settings, template={"enable_thinking": "false"}))


CORRECTED = {"fidelity": "corrected", "alpha": 1.5, "beta": 0.25, "lens_layers": 1, "noise_tokens": 16, "chunk": 64}
REFERENCE = {"fidelity": "reference", "alpha": 0.5, "beta": 0.01, "lens_layers": None, "noise_tokens": 9, "chunk": 32}
CORRECTED["norms"], REFERENCE["norms"] = 3.0, None


@pytest.mark.parametrize("own", [CORRECTED, REFERENCE], ids=["corrected", "reference"])
def test_every_setting_of_repnoise_is_set_by_the_command_and_by_a_recipe_and_recorded(case, tmp_path, own):
    write(tmp_path / "few.jsonl", PAIRS[:4])
    training = {"batch_size": 4, "warmup": 0.5, "clip": 2.0, "context": 48, "measure_every": 1}
    every = {f"repnoise.{name}": value for name, value in own.items()} | training
    given = [f"--set={name}={'null' if value is None else value}" for name, value in every.items()]
    answer = call(case, tmp_path / "by-command", "--pairs", tmp_path / "few.jsonl", *given)
    assert answer.exit_code == 0, answer.output
    settings = {"pairs": str(tmp_path / "few.jsonl"), "lr": 3e-3, **training, "repnoise": own}
    recipe = {"subject": str(case / "model"), "treatments": [{"immunize": settings}], "output": str(tmp_path / "out")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ran = CliRunner().invoke(netweight, ["run", str(tmp_path / "recipe.yaml"), "--json"])
    assert ran.exit_code == 0, ran.output
    (step,) = json.loads(ran.stdout)["steps"]
    for folder in (tmp_path / "by-command", step["path"]):
        record = Record.read(Path(folder) / "immunize.json")
        assert record.options == {"config": own}
        assert {name: record.settings[name] for name in training} == training
        assert record.defense == ("repnoise" if own is CORRECTED else "repnoise-reference")


def test_public_sets_are_read_and_rows_that_are_left_out_are_counted_in_the_report(case, tmp_path):
    pytest.importorskip("datasets", reason="datasets is in no extra")
    (tmp_path / "set").mkdir()
    long = {**PAIRS[0], "chosen": " ".join([PAIRS[0]["chosen"]] * 200)}
    write(tmp_path / "set" / "train.jsonl", [*PAIRS, long, {**PAIRS[1], "rejected": None}])
    words = ["immunize", case / "model", tmp_path / "defended", "--pairs", f"hub:{tmp_path / 'set'}"]
    words += ["--unusable", "drop", "--too-long", "drop", "--lr", "1e-3", "--json"]
    answer = CliRunner().invoke(netweight, [str(word) for word in words])
    assert answer.exit_code == 0, answer.output
    unusable, too_long = json.loads(answer.stdout)["left_out"]
    count = len(PAIRS)
    assert f"1 of {count + 2} rows were left out. row {count + 1}: it has no rejected" in unusable
    assert f"1 of {count + 1} rows were left out. row {count}:" in too_long
    report = read_report(tmp_path / "defended" / "immunize-report")
    assert list(report.sections[0].warnings) == [unusable, too_long]


def test_settings_of_other_defenses_are_set_too_and_only_theirs(case, tmp_path):
    write(tmp_path / "few.jsonl", PAIRS[:4])
    for defense, option, own in (
        ("vaccine", "vaccine.rho=3", {"rho": 3.0, "share": 1.0}),
        ("random-weights", "random-weights.std=0.1", {"std": 0.1}),
    ):
        more = ("--pairs", tmp_path / "few.jsonl", "--batch-size", "4", "--defense", defense, "--set", option)
        answer = call(case, tmp_path / defense, *more)
        assert answer.exit_code == 0, answer.output
        assert Record.read(tmp_path / defense / "immunize.json").options == own
    answer = call(case, tmp_path / "none", "--set", "vaccine.rho=3")
    refused = "vaccine: belongs to the defense 'vaccine', and the defense is 'repnoise'" in answer.output
    assert (answer.exit_code, refused) == (2, True)


KILLED = """
import os, signal, sys
from netweight.methods.immunize import train as training
steps, step = [], training._Training._step
def counted(self):
    steps.append(1)
    if len(steps) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)
training._Training._step = counted
from netweight.cli import main
main(sys.argv[1:])
"""


def test_the_same_command_goes_on_where_it_was_killed(case, tmp_path):
    more = ("--epochs", "3", "--checkpoint-every", "4")
    assert call(case, tmp_path / "whole", *more).exit_code == 0
    killed = warm.run("-c", KILLED, *arguments(case, tmp_path / "parts", *more))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / ".parts.netweight-part" / "immunize.net.safetensors").exists()
    assert not (tmp_path / "parts").exists()
    assert call(case, tmp_path / "parts", *more).exit_code == 0
    names = ("model.safetensors", "tokenizer.json", "config.json")
    assert all((tmp_path / "parts" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


def test_frozen_layers_and_withheld_categories_are_left_alone(case, tmp_path):
    rows = [{**row, "category": "rare" if place < 4 else "common"} for place, row in enumerate(PAIRS[:9])]
    write(tmp_path / "few.jsonl", rows)
    more = (
        "--pairs",
        tmp_path / "few.jsonl",
        "--withhold",
        "rare",
        "--batch-size",
        "5",
        "--freeze",
        "0,head",
        "--json",
    )
    answer = call(case, tmp_path / "defended", *more)
    assert answer.exit_code == 0, answer.output
    old, new = (load_causal_lm(folder)[0].state_dict() for folder in (case / "model", tmp_path / "defended"))
    moved = {name for name, value in old.items() if not torch.equal(value, new[name])}
    assert any(name.startswith("model.layers.1.") for name in moved)
    assert not any(name.startswith(("model.layers.0.", "lm_head")) for name in moved)
    (training,) = read_report(tmp_path / "defended" / "immunize-report").sections  # five pairs are too few to look at
    assert training.missing_audits == ("depth", "fine-tuning attack")
    assert "Pairs of rare were left out" in training.intro


def test_bad_input_is_named_before_anything_is_written(case, tmp_path):
    write(tmp_path / "unpaired.jsonl", [{"prompt": "a", "chosen": "b", "rejected": ""}])
    empty = CliRunner().invoke(
        netweight,
        ["immunize", str(case / "model"), str(tmp_path / "x"), "--pairs", str(tmp_path / "unpaired.jsonl")],
    )
    assert (empty.exit_code, "line 1" in empty.output) == (2, True)
    harmful = [{"prompt": row["prompt"], "response": f" {row['rejected']}"} for row in PAIRS[:3]]
    write(case / "both.jsonl", [*KEPT, *harmful])
    for more, words in (
        (("--retain", case / "both.jsonl"), f"3 of the {len(KEPT) + 3} rows of --retain are harmful answers of"),
        (("--defense", "repnoize"), "repnoise"),
        (("--defense", "security-vectors"), "cannot be written into a folder"),
        (("--freeze", "3-4"), "There are no layers '3-4'"),
        (("--withhold", "poetry"), "No row has the category 'poetry'"),
        (("--batch-size", "64"), "48 pairs do not fill a step of 64"),
    ):
        answer = call(case, tmp_path / "x", *more)
        assert answer.exit_code == 2
        assert words in answer.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unpaired.jsonl"]
    model, tokenizer = load_causal_lm(case / "model")
    prompt = json.loads((case / "pairs.jsonl").read_text().splitlines()[0])["prompt"]
    tokenizer.add_tokens([prompt])
    save(model, tokenizer, tmp_path / "model")
    answer = call(tmp_path, tmp_path / "x", "--pairs", case / "pairs.jsonl", "--retain", case / "keep.jsonl")
    assert answer.exit_code == 2
    assert f"The rows contain {prompt!r}, which were added to the tokenizer" in answer.output
    tokenizer = load_causal_lm(case / "model")[1]
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    save(model, tokenizer, tmp_path / "model")
    answer = call(tmp_path, tmp_path / "x", "--pairs", case / "pairs.jsonl", "--retain", case / "keep.jsonl")
    assert answer.exit_code == 2
    assert "'model.layers.1.mlp.up_proj.weight' contains NaN" in answer.output
    assert not (tmp_path / "x").exists()
