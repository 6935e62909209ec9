"""Models that libraries load in the fixed-length form: what they compute, and the ordinary folders that they save."""

import json

import pytest
import torch
from models_under_test import differing

import netweight

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from netweight.plugins.transformers import NetweightConfig  # noqa: E402

IDS = torch.arange(1, 13).reshape(2, 6)
LINEAR = {f"model.layers.0.{part}" for part in (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
)}  # fmt: skip


def fixed_names(model):
    compressed = netweight.CompressedTensor
    return {name for name, p in model.named_parameters() if isinstance(p, compressed) and p.stored.fixed}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def case(request, tmp_path_factory):
    """A tiny Llama in bf16 from its dense folder, both folders, and the names of the weights that can be fixed."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=2, vocab_size=320,
        tie_word_embeddings=request.param,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place / "dense")
    netweight.compress_folder(place / "dense", place / "net")
    model = transformers.LlamaForCausalLM.from_pretrained(place / "dense")
    head = "model.embed_tokens.weight" if request.param else "lm_head.weight"
    return model, place / "dense", place / "net", LINEAR | {head}


def same(ours, theirs):
    with torch.no_grad():
        return torch.equal(ours(IDS).logits, theirs(IDS).logits)


def load(kind, dense, net):
    """A model that prefers speed, in each of the ways to get one."""
    if kind == "dense":
        return transformers.LlamaForCausalLM.from_pretrained(dense, quantization_config=NetweightConfig(prefer="speed"))
    if kind == "net":
        config = transformers.AutoConfig.from_pretrained(net)
        config.quantization_config["prefer"] = "speed"
        return transformers.LlamaForCausalLM.from_pretrained(net, config=config)
    model = transformers.LlamaForCausalLM.from_pretrained(net)
    netweight.set_layout_(model, "speed")
    return model


@pytest.mark.parametrize("kind", ["dense", "net", "changed"])
def test_loaded_models_are_fixed_and_save_ordinary_folders(case, tmp_path, kind):
    theirs, dense, net, linear = case
    ours = load(kind, dense, net)
    assert fixed_names(ours) == linear
    assert not differing(theirs, ours)
    assert same(ours, theirs)
    ours.save_pretrained(tmp_path / "saved")
    assert not any(finding.passed is False for finding in netweight.verify(tmp_path / "saved"))
    assert "prefer" not in json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert fixed_names(again) == set()
    assert same(again, theirs)


def test_what_was_rounded_stays_as_it_was_stored(case, tmp_path):
    _, dense, _, _ = case
    netweight.compress_folder(dense, tmp_path / "rounded", mantissa_bits=3)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "rounded")
    config.quantization_config["prefer"] = "speed"
    ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "rounded", config=config)
    assert not fixed_names(ours)
    assert same(ours, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "rounded"))


def test_another_dtype_is_fixed_if_it_is_bf16(case):
    theirs, _, net, linear = case
    config = transformers.AutoConfig.from_pretrained(net)
    config.quantization_config["prefer"] = "speed"
    wide = transformers.LlamaForCausalLM.from_pretrained(net, config=config, dtype=torch.float32)
    assert not fixed_names(wide)
    wide.to(torch.bfloat16)
    assert netweight.set_layout_(wide, "speed")
    assert fixed_names(wide) == linear
    assert not differing(theirs, wide)


def test_diffusers_models_too(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from netweight.plugins.diffusers import NetweightConfig

    torch.manual_seed(0)
    make = diffusers.DiTTransformer2DModel
    dense = make(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=1, sample_size=8,
        norm_num_groups=4, num_embeds_ada_norm=10,
    ).to(torch.bfloat16)  # fmt: skip
    dense.save_pretrained(tmp_path / "dense")
    ours = make.from_pretrained(
        tmp_path / "dense", torch_dtype=torch.bfloat16, quantization_config=NetweightConfig(prefer="speed")
    )
    assert fixed_names(ours) == {
        f"{name}.weight" for name, module in ours.named_modules() if isinstance(module, torch.nn.Linear)
    }
    assert not differing(dense, ours)
    ours.save_pretrained(tmp_path / "saved")
    assert not any(finding.passed is False for finding in netweight.verify(tmp_path / "saved"))
