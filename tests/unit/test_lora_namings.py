"""LoRAs in every naming of every architecture: what is read is what diffusers loads, and every layout leads back."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from lora_namings import authors_modules, factors, in_diffusers, numbers, probe, size, write
from naming_families import FAMILIES, Family, table

from netweight import read_adapter, write_adapter
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.space.converting import convert_file
from netweight.methods.space.settings import ConvertSettings
from netweight.store.lora_formats.naming import flat, naming_called, namings
from netweight.store.lora_formats.reading import load_plan, plan_adapter
from netweight.store.lora_formats.writing import layout_like

TOLERANCE = 1e-6


def name_of(family: Family) -> str:
    return f"{family.table}-{family.trainers.replace(' ', '')}"


def modules_of(family: Family) -> dict[str, tuple[int, int]]:
    naming = naming_called(family.table)
    if family.diffusers:
        found = {}
        for entry in naming.entries:
            for each in entry.diffusers:
                if ":" not in each:
                    found.setdefault(numbers(each), size(naming, "", 1))
    else:
        found = authors_modules(naming)
    allowed = {name: shape for name, shape in found.items() if re.fullmatch(family.only, name)}
    return {
        name: shape for name, shape in allowed.items()
        if not (family.skip and re.fullmatch(family.skip, flat(name) if family.start == "lora_unet_" else name))
        and not (family.skip and re.fullmatch(family.skip, name))
    }  # fmt: skip


@pytest.mark.parametrize("family", [each for each in FAMILIES if each.mixin], ids=name_of)
def test_what_is_read_is_what_diffusers_loads(family, tmp_path):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    file = write(tmp_path / "lora.safetensors", modules_of(family), family.start, kohya=family.kohya,
                 alpha=family.alpha)  # fmt: skip
    ours = {name: (one.down, one.up * one.scale) for name, one in read_adapter(file).factors.items()}
    theirs = in_diffusers(family.mixin, file)
    theirs = {name if "." in name and name.split(".")[0] in ("transformer", "unet", "text_encoder") else
              f"transformer.{name}": one for name, one in theirs.items()}  # fmt: skip
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        mine, other = probe(one), probe(theirs[name])
        assert float((mine - other).norm() / other.norm()) < TOLERANCE, name


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_the_architecture_is_told_and_every_layout_leads_back(family, tmp_path):
    naming = naming_called(family.table)
    file = write(tmp_path / "lora.safetensors", modules_of(family), family.start, kohya=family.kohya,
                 alpha=family.alpha)  # fmt: skip
    plan = plan_adapter(file)
    assert plan.naming is not None
    assert plan.naming.key == naming.key or not family.start.startswith("lora_unet")
    adapter = load_plan(plan)
    assert layout_like(plan, adapter, tmp_path / "new.safetensors") == plan.layout
    probes = {name: probe((one.down, one.up * one.scale)) for name, one in adapter.factors.items()}
    for layout in ("diffusers", "comfyui", "kohya"):
        place = write_adapter(adapter, tmp_path / f"{layout}.safetensors", layout=layout, naming=naming)
        again = load_plan(plan_adapter(place, naming=naming))
        assert again.factors.keys() == adapter.factors.keys()
        for name, mine in probes.items():
            other = again.factors[name]
            theirs = probe((other.down, other.up * other.scale))
            assert float((mine - theirs).norm() / mine.norm()) < TOLERANCE, name


@pytest.mark.parametrize("naming", namings(), ids=lambda each: each.key)
def test_tables_know_every_module_of_the_class_of_diffusers(naming):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    if naming.cls in (None, "UNet2DConditionModel", "HunyuanDiT2DModel"):
        return
    how = {} if naming.key != "hidream" else {
        "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 1, "num_single_layers": 1,
        "attention_head_dim": 8, "num_attention_heads": 2, "caption_channels": [8, 8], "text_emb_dim": 8,
        "num_routed_experts": 2, "num_activated_experts": 1, "axes_dims_rope": (4, 2, 2), "max_resolution": (16, 16),
        "llama_layers": [0, 1],
    }  # fmt: skip
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = getattr(diffusers, naming.cls)(**how)
    linear = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    missing = [
        name for name, module in model.named_modules()
        if isinstance(module, linear) and naming.match(name, names="diffusers") is None
    ]  # fmt: skip
    assert not missing


def fused(tmp_path, name, rows, columns, **more):
    down, up = factors(name, rows, columns)
    from safetensors.torch import save_file

    file = tmp_path / "fused.safetensors"
    save_file({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, **more}, file)
    return file


def test_a_fused_module_is_split_with_its_rank_and_joined_with_it_again(tmp_path):
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    adapter = read_adapter(fused(tmp_path, name, 36, 12), architecture="flux")
    assert [one.rank for one in adapter.factors.values()] == [4, 4, 4]
    again = read_adapter(write_adapter(adapter, tmp_path / "again.safetensors", layout="kohya"))
    assert [one.rank for one in again.factors.values()] == [4, 4, 4]


def test_two_architectures_in_one_file_are_refused_by_name(tmp_path):
    from safetensors.torch import save_file

    tensors = {}
    for name in ("diffusion_model.blocks.0.self_attn.q", "diffusion_model.joint_blocks.0.x_block.mlp.fc1"):
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = factors(name, 12, 12)
    save_file(tensors, tmp_path / "two.safetensors")
    with pytest.raises(CorruptBlob, match=r"two architectures: .*(Wan|Stable Diffusion 3).*(Wan|Stable Diffusion 3)"):
        read_adapter(tmp_path / "two.safetensors")


def test_names_that_two_architectures_have_are_told_by_the_shapes_or_asked_for(tmp_path):
    flux = read_adapter(fused(tmp_path, "double_blocks.0.img_mlp.0", 48, 12))
    assert flux.modules == ("transformer.transformer_blocks.0.ff.net.0.proj",)
    flux2 = read_adapter(fused(tmp_path, "diffusion_model.double_blocks.0.img_mlp.0", 72, 12))
    assert flux2.modules == ("transformer.transformer_blocks.0.ff.linear_in",)
    with pytest.raises(UsageError, match=r"z-image|lumina2") as caught:
        read_adapter(fused(tmp_path, "diffusion_model.layers.0.feed_forward.w1", 30, 10))
    assert "--model" in caught.value.cure
    found = read_adapter(fused(tmp_path, "diffusion_model.layers.0.feed_forward.w1", 30, 10), architecture="lumina2")
    assert found.modules == ("transformer.layers.0.feed_forward.linear_1",)


def test_an_unknown_architecture_keeps_its_names(tmp_path):
    plan = plan_adapter(fused(tmp_path, "diffusion_model.strange_blocks.0.mix", 12, 12))
    assert list(plan.parts) == ["diffusion_model.strange_blocks.0.mix"]
    assert "Architecture unknown" in plan.remarks[0]
    place = write_adapter(load_plan(plan), tmp_path / "again.safetensors")
    assert list(plan_adapter(place).parts) == ["diffusion_model.strange_blocks.0.mix"]
    with pytest.raises(UsageError, match="is not in any table of names") as caught:
        write_adapter(load_plan(plan), tmp_path / "other.safetensors", layout="diffusers")
    assert "--layout comfyui" in caught.value.cure


def test_the_page_has_the_table_of_families():
    """Set NETWEIGHT_WRITE_PAGES=1 to write the table anew."""
    page = Path(__file__).parents[2] / "docs" / "lora-namings.md"
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition("<!-- families: begin -->\n")
    _, end, tail = rest.partition("<!-- families: end -->")
    assert begin
    assert end
    written = f"{head}{begin}{table()}\n{end}{tail}"
    if os.environ.get("NETWEIGHT_WRITE_PAGES") == "1":
        page.write_text(written, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == written


@pytest.mark.parametrize("names", [
    ("transformer.transformer_blocks.0.attn1.to_q", "transformer.transformer_blocks.0.norm1.linear"),  # CogVideoX
    ("diffusion_model.layers.0.attn.to_q", "diffusion_model.noise_refiner.0.attn.to_q"),  # OmniGen2
])  # fmt: skip
def test_names_that_two_tables_share_with_an_unknown_architecture_are_kept(tmp_path, names):
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name in names:
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = factors(name, 12, 12)
    save_file(tensors, tmp_path / "lora.safetensors")
    plan = plan_adapter(tmp_path / "lora.safetensors")
    assert plan.naming is None
    assert set(plan.parts) == set(names)
    made = convert_file(tmp_path / "lora.safetensors", tmp_path / "new.safetensors", ConvertSettings(),
                        overwrite=False)  # fmt: skip
    assert load_file(made.path).keys() == tensors.keys()
