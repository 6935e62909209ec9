"""Names of weights in a compressed folder, and configurations that refuse."""

import json

import pytest

from netweight.autoload import HINT
from netweight.methods.compress.folder_format import (
    is_diffusers_config,
    is_index,
    mark_config,
    rewrite_index,
    stored_name,
    variant_of,
)


@pytest.mark.parametrize(
    ("name", "variant", "stored"),
    [
        ("model.safetensors", None, "model.net.safetensors"),
        ("model.fp16.safetensors", "fp16", "model.fp16.net.safetensors"),
        ("model-00001-of-00002.safetensors", None, "model-00001-of-00002.net.safetensors"),
        ("model.fp16-00001-of-00002.safetensors", "fp16", "model.fp16-00001-of-00002.net.safetensors"),
        ("model-00001-of-00002.fp16.safetensors", "fp16", "model-00001-of-00002.fp16.net.safetensors"),
        ("model.safetensors.index.json", None, "model.net.safetensors.index.json"),
        ("model.safetensors.index.fp16.json", "fp16", "model.fp16.net.safetensors.index.json"),
        ("adapter_model.safetensors", None, "adapter_model.net.safetensors"),
    ],
)
def test_names_and_variants(name, variant, stored):
    assert variant_of(name) == variant
    assert stored_name(name, keeps_name=False) == stored
    assert stored_name(name, keeps_name=True) == name
    assert is_index(name) == name.endswith(".json")


def test_other_files_have_no_variant():
    assert variant_of("config.json") is None
    assert not is_index("config.json")


def test_a_transformers_config_names_its_weights_and_the_cure():
    original = {"model_type": "bert", "quantization_config": {"quant_method": "fp8"}}
    marked = json.loads(mark_config("config.json", json.dumps(original).encode(), ["model.safetensors"]))
    assert marked["quantization_config"] == {
        "quant_method": HINT,
        "version": 1,
        "weights": "model.net.safetensors",
    }
    assert marked["model_type"] == "bert"


@pytest.mark.parametrize(
    ("config", "weights", "main"),
    [
        ({}, ["other.safetensors", "model.safetensors"], "model.net.safetensors"),
        ({}, ["model-00001-of-00001.safetensors", "model.safetensors.index.json"], "model.net.safetensors.index.json"),
        ({"transformers_weights": "b.safetensors"}, ["model.safetensors", "b.safetensors"], "b.net.safetensors"),
        ({}, ["model.fp16.safetensors"], "model.fp16.net.safetensors"),
        ({}, ["z.safetensors", "y.safetensors.index.fp16.json"], "y.fp16.net.safetensors.index.json"),
    ],
)
def test_the_main_weights_are_those_that_transformers_would_load(config, weights, main):
    marked = json.loads(mark_config("config.json", json.dumps(config).encode(), weights))
    assert marked["quantization_config"]["weights"] == main


def test_diffusers_and_peft_configs_refuse_by_name():
    model = b'{"_class_name": "UNet2DModel"}'
    assert is_diffusers_config(model)
    assert not is_diffusers_config(b"{}")
    marked = json.loads(mark_config("config.json", model, ["diffusion_pytorch_model.safetensors"]))
    assert marked["quantization_config"] == {
        "quant_method": HINT,
        "version": 1,
        "weights": "diffusion_pytorch_model.safetensors",
    }
    adapter = json.loads(mark_config("adapter_config.json", b'{"peft_type": "LORA"}', ["adapter_model.safetensors"]))
    assert adapter["peft_type"] == HINT


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_what_is_no_configuration_stays(content):
    assert mark_config("config.json", content, ["model.safetensors"]) is None


def test_an_index_names_the_stored_tensors():
    index = {"metadata": {"total_size": 10, "total_parameters": 5}, "weight_map": {"a": "m-00001-of-00001.safetensors"}}
    written = json.loads(rewrite_index(json.dumps(index).encode(), keeps_names=False, total_size=7))
    assert written["metadata"] == {"total_size": 7, "total_parameters": 5}
    assert written["weight_map"] == {"a.net": "m-00001-of-00001.net.safetensors"}
