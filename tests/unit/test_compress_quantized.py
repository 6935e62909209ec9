"""Checkpoints that another method has quantized: recognized, compressed as bytes, and never opened wrong."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from folders_under_test import diffusers_folder, transformers_folder, weights, write_safetensors
from safetensors.torch import load_file, save_file
from torch import nn

import netweight
from netweight.errors import Unsupported
from netweight.methods.compress.compress_folder import compress_folder, decompress_folder
from netweight.methods.compress.folder_format import MANIFEST, NOTE, Manifest
from netweight.methods.compress.quantized import foreign_method
from netweight.methods.compress.verify import verify

CODES = (16, 64)


def quantized_folder(folder, tensors, config=None):
    """A model's folder with tensors given as name -> (dtype, shape), beside ordinary norms."""
    folder.mkdir(parents=True)
    content = {"model_type": "llama", "hidden_size": 64, **(config or {})}
    (folder / "config.json").write_text(json.dumps(content))
    everything = {"model.norm.weight": ("F32", (64,)), **tensors}
    write_safetensors(
        folder / "model.safetensors",
        [
            (name, dtype, shape, weights(dtype, shape, at))
            for at, (name, (dtype, shape)) in enumerate(everything.items())
        ],
        metadata={"format": "pt"},
    )
    return folder


def assert_bytes_alone(source, target):
    """The configuration is untouched, no loader finds weights, a person is told, and all bytes come back."""
    summary = compress_folder(source, target)
    assert set(summary.bytes_only) == {"."}
    assert "netweight decompress" in " ".join(summary.notes())
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not (target / "model.safetensors").exists()
    assert "netweight decompress" in (target / NOTE).read_text()
    assert all(finding.passed is not False for finding in verify(target, source))
    back = target.with_name(f"{target.name}-back")
    decompress_folder(target, back)
    assert {path.name: path.read_bytes() for path in back.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": method}}
        for method in ("fp8", "fbgemm_fp8", "torchao", "bitsandbytes", "gptq", "awq", "compressed-tensors", "mxfp4",
                       "hqq", "quanto", "aqlm", "vptq", "bitnet", "eetq", "higgs", "spqr", "quark", "auto-round")
    ]
    + [
        {"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
        {"parts": [{"llm": {"quantization_config": {"quant_method": "awq"}}}]},
        {"compression_config": {"format": "pack-quantized"}},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"quantization_config": {"bits": 4}},
    ],
    ids=lambda config: json.dumps(config)[:60],
)  # fmt: skip
def test_a_quantization_in_the_configuration_is_kept(tmp_path, config):
    source = quantized_folder(tmp_path / "m", {"layers.0.q.weight": ("BF16", CODES)}, config)
    assert_bytes_alone(source, tmp_path / "net")


@pytest.mark.parametrize(
    "tensors",
    [
        {"l.0.q.weight": ("F8_E4M3", CODES), "l.0.q.weight_scale_inv": ("F32", (1, 1))},
        {"l.0.q.weight": ("F8_E4M3", CODES), "l.0.q.weight_scale": ("F32", ())},
        {"l.0.q.weight": ("F8_E4M3", CODES), "l.0.q.scale_weight": ("F32", (1,)), "scaled_fp8": ("F8_E4M3", (2,))},
        {"q.weight": ("F8_E5M2", CODES), "scaled_fp8": ("F8_E5M2", (0,))},
        {"l.0.q.weight": ("I8", CODES), "l.0.q.SCB": ("F32", (16,))},
        {"l.0.q.weight": ("U8", (512, 1)), "l.0.q.weight.absmax": ("F32", (16,)),
         "l.0.q.weight.quant_map": ("F32", (16,))},
        {"l.0.q.qweight": ("I32", CODES), "l.0.q.qzeros": ("I32", (1, 8)), "l.0.q.scales": ("F16", (1, 64))},
        {"l.0.q.weight_packed": ("I32", CODES), "l.0.q.weight_scale": ("BF16", (16, 1))},
        {"l.0.experts.up_blocks": ("U8", (2, 16, 16)), "l.0.experts.up_scales": ("U8", (2, 16))},
        {"l.0.q._weight_qdata": ("I8", CODES), "l.0.q._weight_scale": ("BF16", (16, 1))},
        {"l.0.q.weight._data": ("I8", CODES), "l.0.q.weight._scale": ("BF16", (16, 1))},
        {"q.weight": ("I8", CODES)},
    ],
    ids=lambda tensors: "+".join(tensors),
)  # fmt: skip
def test_codes_with_scales_are_recognized_without_a_configuration(tmp_path, tensors):
    assert_bytes_alone(quantized_folder(tmp_path / "m", tensors), tmp_path / "net")


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_quantizers_file_beside_a_plain_configuration_is_heeded(tmp_path, name):
    source = transformers_folder(tmp_path / "m")
    (source / name).write_text('{"bits": 4}')
    assert_bytes_alone(source, tmp_path / "net")


@pytest.mark.parametrize(
    "tensors",
    [
        {"h.0.attn.bias": ("U8", (1, 1, 32, 32)), "h.0.attn.weight": ("BF16", CODES)},
        {"positions": ("I64", (1, 64)), "logit_scale": ("F32", ()), "a.weight": ("BF16", CODES)},
        {"relative.index": ("I64", (8, 8)), "l.layer_scale.lambda1": ("F32", (64,)), "l.weight": ("F16", CODES)},
        {"l.0.q.weight": ("F8_E4M3", CODES), "l.0.norm.weight": ("BF16", (64,))},
    ],
    ids=lambda tensors: "+".join(tensors),
)  # fmt: skip
def test_masks_indices_and_plain_casts_are_not_taken_for_codes(tmp_path, tensors):
    target = tmp_path / "net"
    assert compress_folder(quantized_folder(tmp_path / "m", tensors), target).bytes_only == {}
    assert not (target / NOTE).exists()
    assert "weights" in json.loads((target / "config.json").read_text())["quantization_config"]


def test_shards_of_quantized_models_are_not_found_by_their_index(tmp_path):
    source, target = transformers_folder(tmp_path / "m", shards=2), tmp_path / "net"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    compress_folder(source, target)
    assert not list(target.glob("model*of-*[0-9].safetensors"))
    assert not (target / "model.safetensors.index.json").exists()
    assert (target / "model.net.safetensors.index.json").exists()


def test_of_a_pipeline_only_the_quantized_part_needs_decompressing(tmp_path):
    source, target = diffusers_folder(tmp_path / "m"), tmp_path / "net"
    config = json.loads((source / "unet/config.json").read_text())
    (source / "unet/config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "torchao"}}))
    summary = compress_folder(source, target)
    assert set(summary.bytes_only) == set(Manifest.read(target).bytes_only) == {"unet"}
    assert not (target / "unet/diffusion_pytorch_model.safetensors").exists()
    assert (target / "unet/config.json").read_bytes() == (source / "unet/config.json").read_bytes()
    assert (target / "vae/diffusion_pytorch_model.safetensors").exists()
    assert "unet is quantized" in (target / NOTE).read_text()


def test_scales_are_not_rounded(tmp_path):
    source = quantized_folder(tmp_path / "m", {"q.weight": ("I8", CODES), "q.weight_scale": ("F32", (16, 1))})
    with pytest.raises(Unsupported, match="scales"):
        compress_folder(source, tmp_path / "net", mantissa_bits=3)
    assert not (tmp_path / "net").exists()


def test_settings_for_loading_of_our_own_are_no_quantization_and_stay(tmp_path):
    source = transformers_folder(tmp_path / "m")
    ours = {"quant_method": "netweight", "version": 1, "prefer": "speed", "exclude": ["lm_head"]}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": ours}
    (source / "config.json").write_text(json.dumps(config))
    assert foreign_method(config) is None
    assert compress_folder(source, tmp_path / "net").bytes_only == {}
    written = json.loads((tmp_path / "net/config.json").read_text())["quantization_config"]
    assert written["prefer"] == "speed"
    assert written["exclude"] == ["lm_head"]
    assert written["weights"] == "model.net.safetensors"


def test_a_gguf_beside_is_copied_and_said(tmp_path):
    source = transformers_folder(tmp_path / "m")
    (source / "model.Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(20_000))
    summary = compress_folder(source, tmp_path / "net")
    assert "model.Q4_K_M.gguf (20.0 kB)" in " ".join(summary.notes())
    assert (tmp_path / "net/model.Q4_K_M.gguf").read_bytes() == (source / "model.Q4_K_M.gguf").read_bytes()


def tiny_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(folder)
    return folder


def fp8_llama(folder):
    """A checkpoint as DeepSeek publishes them: fp8 codes, a scale for each block of 128 by 128."""
    plain = tiny_llama(folder.with_name("plain"))
    shutil.copytree(plain, folder)
    tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        tensors[name] = weight
        if "proj" in name:
            scale = weight.float().abs().max() / 448
            tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in weight.shape]
            tensors[f"{name}_scale_inv"] = scale.expand(blocks).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_transformers_refuses_a_compressed_fp8_model_and_opens_the_restored_one(tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    source, target = fp8_llama(tmp_path / "fp8"), tmp_path / "net"
    compress_folder(source, target)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(target)
    decompress_folder(target, tmp_path / "back")
    ids = torch.arange(12)[None]
    opened = [
        AutoModelForCausalLM.from_pretrained(at, quantization_config=FineGrainedFP8Config(dequantize=True))
        for at in (source, tmp_path / "back")
    ]
    with torch.no_grad():
        assert torch.equal(*(model(ids).logits for model in opened))


def test_transformers_refuses_a_compressed_fp8_model_whose_configuration_says_nothing(tmp_path):
    from transformers import AutoModelForCausalLM

    source = fp8_llama(tmp_path / "fp8")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    compress_folder(source, tmp_path / "net")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "net")


def test_a_saved_torchao_model_stays_torchaos(tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    plain, ids = tiny_llama(tmp_path / "plain"), torch.arange(12)[None]
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    model.save_pretrained(tmp_path / "ao")
    compress_folder(tmp_path / "ao", tmp_path / "net")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "net")
    decompress_folder(tmp_path / "net", tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path / "ao")(ids).logits,
            AutoModelForCausalLM.from_pretrained(tmp_path / "back")(ids).logits,
        )


def test_quantized_layers_of_a_live_model_stay_as_they_are_and_its_folder_is_not_written_without_them(tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    plain, ids = tiny_llama(tmp_path / "plain"), torch.arange(12)[None]
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).eval()
    with torch.no_grad():
        before = model(ids).logits
    report = netweight.compress_(model)
    assert all("proj" not in name for name in report.compressed)
    assert any("has quantized" in reason for reason in report.left_dense.values())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    with pytest.raises(Unsupported, match="torchao"):
        model.save_pretrained(tmp_path / "saved")
    netweight.decompress_(model)
    model.save_pretrained(tmp_path / "saved")


def test_codes_with_scales_in_a_layer_stay_as_they_are():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(64, 64, bias=False)
            self.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.float8_e4m3fn), requires_grad=False)
            self.weight_scale_inv = nn.Parameter(torch.ones(1, 1))

    model = nn.Sequential(Scaled(), nn.Linear(64, 64).bfloat16())
    report = netweight.compress_(model)
    assert report.compressed == ("1.weight",)
    with pytest.raises(Unsupported, match="quantized"):
        netweight.compress_(nn.Sequential(Scaled()), include="0")


def test_the_command_says_what_to_do(tmp_path):
    source = quantized_folder(tmp_path / "m", {"q.weight": ("I8", CODES)})
    command = [sys.executable, "-m", "netweight", "compress", str(source), str(tmp_path / "net")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "restore it: netweight decompress" in done.stderr
    assert json.loads((tmp_path / "net" / MANIFEST).read_text())["bytes_only"]
