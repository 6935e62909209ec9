"""LoRAs of every transformer that diffusers has, in the names that diffusers saves: read as they are, never renamed."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch
from safetensors.torch import save_file

from netweight.errors import UsageError
from netweight.methods.space.converting import convert_file
from netweight.methods.space.settings import ConvertSettings
from netweight.store.lora_formats.reading import plan_adapter

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
# Classes whose sizes have no default.
SIZES = {
    "DreamLiteTransformer2DModel": {"in_channels": 4},
    "HunyuanDiT2DModel": {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 2, "attention_head_dim": 16,
                          "cross_attention_dim": 16, "patch_size": 2, "activation_fn": "gelu-approximate"},
    "LatteTransformer3DModel": {"in_channels": 4, "patch_size": 2, "sample_size": 16, "num_layers": 2},
    "LuminaNextDiT2DModel": {"in_channels": 4, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4},
}  # fmt: skip
NAMES = sorted(
    name
    for name in dir(diffusers)
    if re.search("Transformer|DiT", name)
    and not re.search("ControlNet|Vae|^Dual|^Transformer2DModel$|Temporal", name)
    and inspect.isclass(getattr(diffusers, name, None))
    and issubclass(getattr(diffusers, name), torch.nn.Module)
)


def linears(name: str) -> dict[str, tuple[int, int]]:
    """Linear layers of the first two blocks of each kind, from a model without memory."""
    cls = getattr(diffusers, name)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            model = cls(**SIZES.get(name, {}))
        except (TypeError, ValueError):
            pytest.skip(f"{name} has no sizes of its own")
    found = {}
    for path, module in model.named_modules():
        deep = any(
            int(number) > 1
            for number in re.findall(r"blocks\.(\d+)\.|layers\.(\d+)\.", path)
            for number in number
            if number
        )
        if isinstance(module, torch.nn.Linear) and not deep:
            found[path] = (module.weight.shape[0], module.weight.shape[1])
    return found


def saved(path, names, start):
    tensors = {}
    for name, (rows, columns) in names.items():
        tensors[f"{start}{name}.lora_A.weight"] = torch.ones(1, columns, dtype=torch.float16)
        tensors[f"{start}{name}.lora_B.weight"] = torch.ones(rows, 1, dtype=torch.float16)
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_names_of_diffusers_stay_as_they_are(name, tmp_path):
    names = linears(name)
    plan = plan_adapter(saved(tmp_path / "lora.safetensors", names, "transformer."))
    assert plan.parts.keys() == {f"transformer.{each}" for each in names}
    assert not any(part.rows for part in plan.parts.values())


def test_architectures_whose_names_agree_in_diffusers_alone_are_told_apart_by_the_user(tmp_path):
    file = saved(tmp_path / "sd3.safetensors", {"transformer_blocks.0.attn.to_q": (12, 12)}, "transformer.")
    with pytest.raises(UsageError, match=r"may be of .* or of .*: both call its modules alike in diffusers"):
        convert_file(file, tmp_path / "new.safetensors", ConvertSettings(layout="comfyui"), overwrite=False)
    assert not (tmp_path / "new.safetensors").exists()
    settings = ConvertSettings(layout="comfyui", model="sd3")
    made = convert_file(file, tmp_path / "new.safetensors", settings, overwrite=False)
    assert plan_adapter(made.path).parts.keys() == {
        f"transformer.transformer_blocks.0.attn.to_{each}" for each in "qkv"
    }
    assert convert_file(file, tmp_path / "same.safetensors", ConvertSettings(), overwrite=False).layout == "diffusers"
