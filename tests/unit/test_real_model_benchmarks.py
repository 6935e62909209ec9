"""Benchmarks of a real language model run on a tiny one: every setting is measured, and tokens and losses are equal."""

import json

import pytest
import torch
from tiny_llama import save, tiny_llama

from netweight_experiments.benchmarks import script
from netweight_experiments.benchmarks.language import generation


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a tiny Llama in bf16, with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "model"
    llama, tokenizer = tiny_llama()
    save(llama.to(torch.bfloat16), tokenizer, folder)
    return str(folder)


def result_of(name, model, output, *options):
    threads = torch.get_num_threads()
    try:
        script.run(name, [model, "--output", str(output), *options])
    finally:
        torch.set_num_threads(threads)
    return json.loads(output.read_text())


def test_generation_measures_batches_and_threads_in_both_forms(model, tmp_path):
    result = result_of("compress.generation", model, tmp_path / "r.json", "--tokens", "2", "--turns", "2")
    assert list(result["settings"]) == [f"batch {batch}, threads {threads}" for threads in (1, 2) for batch in (1, 8)]
    for row in result["settings"].values():
        assert row["tokens equal"]
        for form in ("codec", "fixed"):
            speed = row[f"{form}, speed / dense"]
            assert 0 < speed["least"] <= speed["median"] <= speed["most"]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A folder of a tiny Gemma 3 with sliding windows, whose texts begin with a token of their own."""
    transformers = pytest.importorskip("transformers", reason="transformers is in the llm extra")
    folder = tmp_path_factory.mktemp("models") / "windows"
    _, tokenizer = tiny_llama()
    tokenizer.bos_token = "</s>"
    config = transformers.Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=128, pad_token_id=0,
        eos_token_id=1, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    save(transformers.Gemma3ForCausalLM(config), tokenizer, folder)
    return str(folder)


def test_generation_in_batches_gives_the_tokens_of_transformers_beyond_a_sliding_window(base_model, tmp_path):
    options = ("--tokens", "3", "--turns", "2", "--batch", "3")
    result = result_of("language.generation", base_model, tmp_path / "r.json", *options)
    speed, window = result["measured"]["speed"], result["measured"]["window"]
    assert speed["tokens equal"]
    assert 0 < speed["speed / transformers"]["least"] <= speed["speed / transformers"]["most"]
    assert window["sliding window"] == 8
    assert max(window["prompt tokens"]) > 8
    assert window["tokens equal"] == window["tokens"] == 9
    shown = generation.page(result)
    assert "all tokens are equal. In a batch of 3 prompts of different lengths, one of them longer than" in shown
    before = (tmp_path / "r.json").read_text()
    assert result_of("language.generation", base_model, tmp_path / "r.json", *options) == json.loads(before)


def test_loading_compares_two_folders(model, tmp_path):
    result = result_of("compress.loading", model, tmp_path / "r.json", "--turns", "1")
    assert set(result["medians"]) == {"dense", "compressed"}
    assert result["compressed bytes"] < result["dense bytes"]
    assert result["compressed / dense"]["seconds"] > 0


def test_training_gives_the_losses_of_layerwise_training(model, tmp_path):
    result = result_of("compress.training", model, tmp_path / "r.json")
    assert result["codec"]["losses"] == result["fixed"]["losses"] == result["LOMO"]["losses"]
    assert result["plain"]["peak bytes"] > 0
    assert result["codec"]["peak / plain"] > 0
