"""Benchmarks of a real language model run on a tiny one: every setting is measured, and tokens and losses are equal."""

import json

import pytest
import torch
from tiny_llama import save, tiny_llama

from netweight_experiments.benchmarks import script


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
