"""Adapters of mlx-lm are read as what its layers compute, and refused where their scale is not known."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.methods.space.converting import convert_file
from netweight.methods.space.settings import ConvertSettings
from netweight.store.lora_formats.reading import read_adapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
NAME = "model.layers.3.self_attn.k_proj"


@pytest.fixture
def folder(tmp_path):
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 4, generator=draw), torch.randn(4, 8, generator=draw)
    save_file({f"{NAME}.lora_a": a, f"{NAME}.lora_b": b}, tmp_path / "adapters.safetensors", {"format": "mlx"})
    settings = {"fine_tune_type": "lora", "num_layers": 4, "model": "mlx-community/small",
                "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    return tmp_path, 20 * (a @ b).T


def test_factors_are_turned_and_scaled(folder):
    path, change = folder
    for each in (path, path / "adapters.safetensors"):
        one = read_adapter(each).factors[NAME]
        torch.testing.assert_close(one.dense(), change)


def test_the_converted_adapter_opens_in_peft(folder, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    path, change = folder
    convert_file(path, tmp_path / "peft", ConvertSettings(), overwrite=False)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=8, num_hidden_layers=4,
                                        num_attention_heads=4, num_key_value_heads=2))  # fmt: skip
    before = base.get_submodule(NAME).weight.detach().clone()
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "peft").merge_and_unload()
    torch.testing.assert_close(merged.get_submodule(NAME).weight - before, change, atol=1e-4, rtol=1e-4)


def test_without_settings_the_scale_is_not_known(folder):
    path, _ = folder
    (path / "adapters.safetensors").rename(path / "mine.safetensors")
    with pytest.raises(UsageError, match=r"factor in the layout of mlx-lm, whose scale is in adapter_config\.json"):
        read_adapter(path / "mine.safetensors")
    (path / "mine.safetensors").rename(path / "adapters.safetensors")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(CorruptBlob, match="states no scale"):
        read_adapter(path)
    (path / "adapter_config.json").unlink()
    with pytest.raises(UsageError, match=r"adapter_config\.json is missing"):
        read_adapter(path / "adapters.safetensors")


def test_embeddings_and_experts_are_refused_by_name(folder):
    path, _ = folder
    for name, shapes in (("model.embed_tokens", ((32, 4), (4, 16))), ("model.layers.0.mlp.switch_mlp.up_proj",
                                                                      ((2, 4, 16), (2, 8, 4)))):  # fmt: skip
        a, b = (torch.ones(shape) for shape in shapes)
        save_file({f"{name}.lora_a": a, f"{name}.lora_b": b}, path / "adapters.safetensors")
        with pytest.raises(Unsupported, match="is an embedding or a set of experts"):
            read_adapter(path)
