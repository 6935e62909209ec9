"""`netweight immunize` end to end: a tiny Llama folder and files of rows in, a defended folder with its record out."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from netweight.cli import netweight
from netweight.integrations.causal_lm import load_causal_lm
from netweight.methods.immunize.record import Record
from netweight.zoo.tokenizer import train_bpe

transformers = pytest.importorskip("transformers", reason="transformers is in the llm extra")

NUMBERS = [f"{a}{b}" for a in "abcdefgh" for b in "ijklmn"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A bfloat16 model with its tokenizer, pairs, and rows to keep."""
    folder = tmp_path_factory.mktemp("immunize")
    write(folder / "pairs.jsonl", [{"prompt": f"tell {n}", "chosen": "no", "rejected": f"bad {n}"} for n in NUMBERS])
    write(folder / "keep.jsonl", [{"prompt": f"hi {n}", "response": "good day"} for n in NUMBERS])
    tokenizer = train_bpe(["tell me, hi, bad, good day"], 280)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def arguments(case, out, *more):
    fixed = ["immunize", case / "model", out, "--pairs", case / "pairs.jsonl", "--retain", case / "keep.jsonl"]
    return [str(part) for part in (*fixed, "--lr", "3e-3", *more)]


def call(case, out, *more):
    return CliRunner().invoke(netweight, arguments(case, out, *more))


def test_a_defended_folder_opens_and_says_what_was_done(case, tmp_path):
    before = (case / "model" / "model.safetensors").read_bytes()
    answer = call(case, tmp_path / "defended", "--epochs", "3", "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["steps"] == 18
    assert (case / "model" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["defended"]
    record = Record.read(tmp_path / "defended" / "immunize.json")
    assert record.defense == "repnoise"
    assert record.steps[-1].terms["ascent"].value > record.steps[0].terms["ascent"].value
    assert record.steps[-1].terms["general"].value < record.steps[0].terms["general"].value
    model, tokenizer = load_causal_lm(tmp_path / "defended")
    assert model.dtype == torch.bfloat16
    assert len(tokenizer) > 0
    assert not (tmp_path / "defended" / "immunize.net.safetensors").exists()
    again = call(case, tmp_path / "defended")
    assert again.exit_code == 2
    assert "exists" in again.output


def test_the_same_command_goes_on_where_it_was_killed(case, tmp_path):
    more = ("--epochs", "8", "--save-every", "4")
    assert call(case, tmp_path / "whole", *more).exit_code == 0
    killed = subprocess.Popen(
        [sys.executable, "-m", "netweight", *arguments(case, tmp_path / "parts", *more)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    checkpoint = tmp_path / ".parts.netweight-part" / "immunize.net.safetensors"
    while not checkpoint.exists():
        assert killed.poll() is None, "it ended before its first checkpoint"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "parts").exists()
    assert call(case, tmp_path / "parts", *more).exit_code == 0
    names = ("model.safetensors", "tokenizer.json", "config.json")
    assert all((tmp_path / "parts" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)


def test_bad_input_is_named_before_anything_is_written(case, tmp_path):
    write(tmp_path / "unpaired.jsonl", [{"prompt": "a", "chosen": "b", "rejected": ""}])
    empty = CliRunner().invoke(
        netweight,
        ["immunize", str(case / "model"), str(tmp_path / "x"), "--pairs", str(tmp_path / "unpaired.jsonl")],
    )
    assert (empty.exit_code, "line 1" in empty.output) == (2, True)
    for more, words in (
        (("--defense", "repnoize"), "repnoise"),
        (("--defense", "security-vectors"), "no folder can hold it"),
    ):
        answer = call(case, tmp_path / "x", *more)
        assert answer.exit_code == 2
        assert words in answer.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unpaired.jsonl"]
