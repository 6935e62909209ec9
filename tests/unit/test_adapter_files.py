"""Adapters in files: old and foreign ways of writing them, what is refused, and by what name."""

import json
import re

import pytest
import torch
from adapters_under_test import PROJ_IN, SHAPES, TO_OUT, TO_Q, close, random_adapter, same
from safetensors.torch import load_file, save_file

from netweight import Adapter, open_store, read_adapter, write_adapter
from netweight.errors import (
    CorruptBlob,
    NameNotFound,
    NetweightError,
    OutputExists,
    UnsafeInput,
    Unsupported,
    UsageError,
)
from netweight.methods.compress.compress_folder import compress_folder
from netweight.nn.lora import LowRank
from netweight.store.lora_formats import writing

BLOCK = "unet.mid_block.attentions.0.transformer_blocks.0"
CLIP = "text_encoder.text_model.encoder.layers.0"


def pair(down_name, up_name, *, rank=2, rows=4, columns=3, dtype=torch.float32):
    stream = torch.Generator().manual_seed(len(down_name))
    return {
        down_name: torch.randn(rank, columns, generator=stream).to(dtype),
        up_name: torch.randn(rows, rank, generator=stream).to(dtype),
    }


def file_of(tmp_path, tensors, metadata=None):
    save_file(tensors, tmp_path / "adapter.safetensors", metadata)
    return tmp_path / "adapter.safetensors"


@pytest.mark.parametrize("layout", ["peft", "diffusers"])
def test_what_was_written_is_compared_with_the_adapter_unless_that_is_switched_off(tmp_path, layout, monkeypatch):
    adapter, whole = random_adapter(0), writing._write_safetensors

    def damaged(file, tensors, *more):
        whole(file, {name: value + (1e-3 if "lora_B" in name or ".up." in name else 0) for name, value in
                     tensors.items()}, *more)  # fmt: skip

    plain = [write_adapter(adapter, tmp_path / name, layout=layout, check=check)
             for name, check in (("checked", True), ("unchecked", False))]  # fmt: skip
    assert same(*map(read_adapter, plain))
    monkeypatch.setattr(writing, "_write_safetensors", damaged)
    with pytest.raises(CorruptBlob, match="what was written has another change of"):
        write_adapter(adapter, tmp_path / "refused", layout=layout)
    assert not same(read_adapter(write_adapter(adapter, tmp_path / "taken", layout=layout, check=False)), adapter)


def peft_folder(tmp_path, tensors, **config):
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config))
    return folder


@pytest.mark.parametrize("layout", ["diffusers", "peft", "kohya"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_layout_gives_back_what_it_was_given(tmp_path, layout, dtype):
    adapter = random_adapter(0, ranks=(2, 2, 2), scales=(27 / 2,), dtype=dtype)
    path = write_adapter(adapter, tmp_path / "out", layout=layout, kernels={PROJ_IN: (2, 2)})
    for found in (read_adapter(path), read_adapter(tmp_path / "out")):
        assert close(found, adapter)
        assert layout == "diffusers" or same(found, adapter)
        assert {change.down.dtype for change in found.factors.values()} <= {dtype, torch.float32}
    with pytest.raises(OutputExists):
        write_adapter(adapter, tmp_path / "out", layout=layout, kernels={PROJ_IN: (2, 2)})
    other = random_adapter(1)
    write_adapter(other, tmp_path / "out", layout=layout, kernels={PROJ_IN: (2, 2)}, overwrite=True)
    assert close(read_adapter(path), other)


def test_convolutions_are_written_in_four_dimensions(tmp_path):
    file = write_adapter(random_adapter(0), tmp_path / "a.safetensors", kernels={PROJ_IN: (2, 2)})
    tensors = load_file(file)
    assert tensors[f"{PROJ_IN}.lora_A.weight"].shape == (3, 1, 2, 2)
    assert tensors[f"{PROJ_IN}.lora_B.weight"].shape == (3, 3, 1, 1)
    with pytest.raises(UsageError, match=r"kernel of \(3, 3\) does not fit"):
        write_adapter(random_adapter(0), tmp_path / "b.safetensors", kernels={PROJ_IN: (3, 3)})


@pytest.mark.parametrize("scale", [1 / 3, 8 / 3**0.5, 0.1, 27.0, 0.0, 1e-9, -2.5])
@pytest.mark.parametrize("layout", ["diffusers", "peft", "kohya"])
def test_scales_come_back_to_the_last_bit_or_the_one_before(tmp_path, layout, scale):
    adapter = random_adapter(0, ranks=(3,), scales=(scale,))
    found = read_adapter(write_adapter(adapter, tmp_path / "out", layout=layout))
    assert close(found, adapter)
    for change in found.factors.values():
        if layout == "diffusers":  # multiplied in, for programs that look at no metadata
            assert change.scale == 1.0
        elif layout == "peft" or scale:
            assert change.scale == pytest.approx(scale, rel=3e-16)


def test_diffusers_files_mean_the_same_to_who_looks_at_no_metadata(tmp_path):
    for scale, dtype in ((0.5, torch.bfloat16), (0.3, torch.float32)):
        adapter = random_adapter(0, ranks=(2, 3), scales=(scale,), dtype=torch.bfloat16)
        tensors = load_file(write_adapter(adapter, tmp_path / f"{scale}.safetensors"))
        for name, change in adapter.factors.items():
            down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
            assert (down.dtype, up.dtype) == (torch.bfloat16, dtype)
            dense = scale * (change.up.double() @ change.down.double())
            torch.testing.assert_close(up.double() @ down.double(), dense, rtol=1e-6, atol=1e-7)


def test_kohya_has_one_alpha_and_multiplies_other_scales_in_exactly_or_in_fp32(tmp_path):
    adapter = random_adapter(0, ranks=(2,), scales=(0.5, 2.0, 0.3), dtype=torch.bfloat16)
    file = write_adapter(adapter, tmp_path / "a.safetensors", layout="kohya")
    tensors = load_file(file)
    assert len({float(value) for name, value in tensors.items() if name.endswith(".alpha")}) == 1
    found = read_adapter(file)
    assert {name: change.up.dtype for name, change in found.factors.items()} == {
        TO_Q: torch.bfloat16, TO_OUT: torch.bfloat16, PROJ_IN: torch.float32
    }  # fmt: skip
    for name, change in adapter.factors.items():
        other = found.factors[name]
        dense = other.scale * (other.up.double() @ other.down.double())
        expected = change.scale * (change.up.double() @ change.down.double())
        torch.testing.assert_close(
            dense, expected, rtol=0 if name != PROJ_IN else 1e-6, atol=0 if name != PROJ_IN else 1e-7
        )


@pytest.mark.parametrize(
    ("written", "module"),
    [
        ("unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora.{}.weight", f"{BLOCK}.attn1.to_q"),
        ("mid_block.attentions.0.proj_out.lora_{}.weight", "unet.mid_block.attentions.0.proj_out"),
        (f"{BLOCK.removeprefix('unet.')}.attn1.processor.to_out_lora.{{}}.weight", f"{BLOCK}.attn1.to_out.0"),
        ("unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_k.lora.{}.weight", f"{BLOCK}.attn1.to_k"),
        ("text_encoder.text_model.encoder.layers.0.self_attn.to_q_lora.{}.weight", f"{CLIP}.self_attn.q_proj"),
        ("text_encoder.text_model.encoder.layers.0.self_attn.to_out_lora.{}.weight", f"{CLIP}.self_attn.out_proj"),
        ("text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.{}.weight", f"{CLIP}.mlp.fc1"),
        ("transformer.transformer_blocks.0.attn.to_q.lora_{}.weight", "transformer.transformer_blocks.0.attn.to_q"),
    ],
)  # fmt: skip
def test_older_names_of_diffusers(tmp_path, written, module):
    tensors = pair(written.format("down"), written.format("up"))
    alpha = written.rpartition("{}")[0].rstrip("._").removesuffix(".lora").removesuffix("_lora") + ".alpha"
    found = read_adapter(file_of(tmp_path, tensors))
    assert found.modules == (module,)
    assert found.factors[module].scale == 1.0
    assert torch.equal(found.factors[module].down, tensors[written.format("down")])
    scaled = read_adapter(file_of(tmp_path, tensors | {alpha: torch.tensor(5.0)}))
    assert scaled.factors[module].scale == 2.5


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("lora_unet_down_blocks_1_attentions_0_transformer_blocks_9_attn2_to_out_0",
         "unet.down_blocks.1.attentions.0.transformer_blocks.9.attn2.to_out.0"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_ff_net_0_proj",
         "unet.down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj"),
        ("lora_unet_input_blocks_3_0_op", "unet.down_blocks.0.downsamplers.0.conv"),
        ("lora_unet_input_blocks_1_0_in_layers_2", "unet.down_blocks.0.resnets.0.conv1"),
        ("lora_unet_input_blocks_7_0_skip_connection", "unet.down_blocks.2.resnets.0.conv_shortcut"),
        ("lora_unet_middle_block_0_emb_layers_1", "unet.mid_block.resnets.0.time_emb_proj"),
        ("lora_unet_middle_block_1_proj_in", "unet.mid_block.attentions.0.proj_in"),
        ("lora_unet_middle_block_2_out_layers_3", "unet.mid_block.resnets.1.conv2"),
        ("lora_unet_output_blocks_2_2_conv", "unet.up_blocks.0.upsamplers.0.conv"),
        ("lora_unet_output_blocks_5_1_transformer_blocks_1_attn1_to_k",
         "unet.up_blocks.1.attentions.2.transformer_blocks.1.attn1.to_k"),
        ("lora_unet_input_blocks_0_0", "unet.conv_in"),
        ("lora_unet_out_2", "unet.conv_out"),
        ("lora_unet_time_embed_2", "unet.time_embedding.linear_2"),
        ("lora_unet_label_emb_0_0", "unet.add_embedding.linear_1"),
        ("lora_te_text_model_encoder_layers_11_self_attn_k_proj",
         "text_encoder.text_model.encoder.layers.11.self_attn.k_proj"),
        ("lora_te2_text_model_encoder_layers_3_mlp_fc2", "text_encoder_2.text_model.encoder.layers.3.mlp.fc2"),
        ("lora_te3_encoder_block_2_layer_1_DenseReluDense_wi_0",
         "text_encoder_3.encoder.block.2.layer.1.DenseReluDense.wi_0"),
        ("lora_transformer_single_transformer_blocks_7_norm_linear",
         "transformer.single_transformer_blocks.7.norm.linear"),
    ],
)  # fmt: skip
def test_names_of_kohya(tmp_path, name, module):
    tensors = pair(f"{name}.lora_down.weight", f"{name}.lora_up.weight") | {f"{name}.alpha": torch.tensor(1.0)}
    found = read_adapter(file_of(tmp_path, tensors))
    assert found.modules == (module,)
    assert found.factors[module].scale == 0.5


def test_ranks_differ_inside_a_file_and_an_alpha_that_is_missing_is_the_rank(tmp_path):
    to_q, to_k = (f"lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_{part}" for part in ("to_q", "to_k"))
    tensors = pair(f"{to_q}.lora_down.weight", f"{to_q}.lora_up.weight") | {f"{to_k}.alpha": torch.tensor(6.0)}
    tensors |= pair(f"{to_k}.lora_down.weight", f"{to_k}.lora_up.weight", rank=3)
    found = read_adapter(file_of(tmp_path, tensors)).factors
    assert {(name.rpartition(".")[2], one.rank, one.scale) for name, one in found.items()} == {
        ("to_q", 2, 1.0), ("to_k", 3, 2.0),
    }  # fmt: skip


def test_names_of_kohya_agree_with_diffusers_own_reading():
    conversion = pytest.importorskip("diffusers.loaders.lora_conversion_utils", reason="diffusers is not installed")
    from netweight.store.lora_formats.naming import naming_called

    table = naming_called("stable-diffusion")
    for entry in table.entries:
        if re.search("norm|motion", entry.diffusers[0]):  # which diffusers does not read in kohya's names
            continue
        module = entry.diffusers[0].replace("#", "1")
        name = module.replace(".", "_")
        theirs = conversion._convert_unet_lora_key(f"lora_unet_{name}.lora_down.weight").replace(".processor.", ".")
        theirs = theirs.replace("_lora.down.weight", "").replace(".lora.down.weight", "").replace("to_out", "to_out.0")
        [piece] = table.match(name, flattened=True).pieces(1, 1, "unet")
        assert piece.module == f"unet.{module}"
        assert theirs == module


def test_names_of_kohya_that_need_the_model(tmp_path):
    name = "lora_unet_double_blocks_0_img_attn_all"
    file = file_of(tmp_path, pair(f"{name}.lora_down.weight", f"{name}.lora_up.weight"))
    with pytest.raises(Unsupported, match="is not in any table"):
        read_adapter(file)
    assert read_adapter(file, modules=["unet.double_blocks.0.img_attn.all"]).modules == (
        "unet.double_blocks.0.img_attn.all",
    )
    with pytest.raises(
        UsageError, match=r"may mean unet.double_blocks.0.img.attn_all or unet.double_blocks.0.img_attn.all"
    ):
        read_adapter(file, modules=["unet.double_blocks.0.img.attn_all", "unet.double_blocks.0.img_attn.all"])
    with pytest.raises(NameNotFound, match=r"nearest names are unet.double_blocks.0.txt_attn.qkv"):
        read_adapter(file, modules=["unet.double_blocks.0.txt_attn.qkv"])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (f"{BLOCK}.attn1.to_q.lora_magnitude_vector", "DoRA"),
        ("lora_unet_mid_block_attentions_0_proj_in.dora_scale", "DoRA"),
        ("lora_unet_mid_block_attentions_0_proj_in.hada_w1_a", "LoHa"),
        ("lora_unet_mid_block_attentions_0_proj_in.lokr_w1", "LoKr"),
        ("lora_unet_mid_block_attentions_0_proj_in.diff_b", "biases or other vectors"),
        (f"{BLOCK}.attn1.to_q.lora_B.bias", "biases or other vectors"),
        (f"{BLOCK}.attn1.to_q.bias", "is a whole bias, not a factor of a LoRA"),
        (f"{BLOCK}.norm.weight", "factor of a LoRA"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path, tensor, message):
    head = "lora_unet_mid_block_attentions_0_proj_out" if "lora_unet" in tensor else f"{BLOCK}.attn1.to_v"
    middle = ("lora_down", "lora_up") if "lora_unet" in tensor else ("lora_A", "lora_B")
    tensors = pair(*(f"{head}.{part}.weight" for part in middle)) | {tensor: torch.ones(2, 2)}
    with pytest.raises(Unsupported, match=message) as caught:
        read_adapter(file_of(tmp_path, tensors))
    assert tensor in str(caught.value)
    assert caught.value.cure


@pytest.mark.parametrize(
    "names", [["<cat-toy>"], ["cattoy"], ["clip_l", "clip_g"], ["text_encoders_0", "text_encoders_1"], ["emb_params"]]
)
def test_embeddings_of_words_are_called_so_however_they_are_written(tmp_path, names):
    file = file_of(tmp_path, {name: torch.ones(2, 8) for name in names})
    with pytest.raises(Unsupported, match="contains a textual inversion") as caught:
        read_adapter(file)
    assert "--embedding" in caught.value.cure


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "trains biases"),
        ({"modules_to_save": ["head"]}, "modules_to_save"),
        ({"peft_type": "LOHA"}, "kind LOHA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
    ],
)
def test_settings_of_peft_that_mean_more_than_a_low_rank_change(tmp_path, config, message):
    folder = peft_folder(tmp_path, pair("proj.lora_A.weight", "proj.lora_B.weight"), **config)
    with pytest.raises(Unsupported, match=message) as caught:
        read_adapter(folder)
    assert caught.value.cure


def test_peft_scales_by_patterns_and_by_the_root_of_the_rank(tmp_path):
    tensors = pair("a.proj.lora_A.weight", "a.proj.lora_B.weight") | pair("proj.lora_A.weight", "proj.lora_B.weight")
    folder = peft_folder(tmp_path, tensors, use_rslora=True, alpha_pattern={"a.proj": 10}, base_model_name_or_path="b")
    found = read_adapter(folder)
    assert found.factors["a.proj"].scale == 10 / 2**0.5
    assert found.factors["proj"].scale == 4 / 2**0.5


def test_a_component_is_known_by_the_folder_or_by_the_names(tmp_path):
    tensors = pair("mid_block.attentions.0.proj_in.lora_A.weight", "mid_block.attentions.0.proj_in.lora_B.weight")
    assert read_adapter(peft_folder(tmp_path, tensors)).modules == ("unet.mid_block.attentions.0.proj_in",)
    both = Adapter({
        "unet.mid_block.attentions.0.proj_in": LowRank(torch.ones(1, 2), torch.ones(3, 1)),
        "text_encoder.encoder.layers.0.mlp.fc1": LowRank(torch.ones(2, 2), torch.ones(3, 2), 0.25),
    })  # fmt: skip
    write_adapter(both, tmp_path / "both", layout="peft")
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["text_encoder", "unet"]
    assert same(read_adapter(tmp_path / "both"), both)


def test_a_language_models_own_transformer_is_no_component(tmp_path):
    adapter = random_adapter(0, shapes={"transformer.h.0.attn.c_attn": (3, 4)})
    path = write_adapter(adapter, tmp_path / "gpt", layout="peft")
    assert open_store(path / "adapter_model.safetensors").names()[0].startswith("base_model.model.transformer.h.0")
    assert same(read_adapter(path), adapter)
    for layout in ("diffusers", "kohya"):
        with pytest.raises(UsageError, match=r"'?transformer\.h\.0"):
            write_adapter(adapter, tmp_path / layout, layout=layout)


def test_a_compressed_file_is_read_and_a_compressed_folder_of_peft_is_to_be_restored_first(tmp_path):
    adapter = random_adapter(0, scales=(0.25,))
    file = write_adapter(adapter, tmp_path / "a.safetensors")
    compress_folder(file, tmp_path / "b.safetensors")
    assert same(read_adapter(tmp_path / "b.safetensors"), read_adapter(file))
    write_adapter(adapter, tmp_path / "plain", layout="peft")
    compress_folder(tmp_path / "plain", tmp_path / "net")
    with pytest.raises(Unsupported, match="Run: netweight decompress"):
        read_adapter(tmp_path / "net")


def broken(tmp_path, kind):
    """A path with one fault."""
    tensors = pair(f"{TO_Q}.lora_A.weight", f"{TO_Q}.lora_B.weight")
    down, up = tensors
    if kind == "pickle":
        torch.save(tensors, tmp_path / "a.bin")
        return tmp_path / "a.bin"
    if kind == "pickle in peft's folder":
        folder = peft_folder(tmp_path, tensors)
        (folder / "adapter_model.safetensors").unlink()
        torch.save(tensors, folder / "adapter_model.bin")
        return folder
    if kind == "no settings":
        folder = peft_folder(tmp_path, tensors)
        (folder / "adapter_config.json").unlink()
        return folder
    if kind == "other rank in settings":
        return peft_folder(tmp_path, {"proj.lora_A.weight": torch.ones(3, 2), "proj.lora_B.weight": torch.ones(2, 3)})
    if kind == "settings no JSON":
        folder = peft_folder(tmp_path, tensors)
        (folder / "adapter_config.json").write_text("{")
        return folder
    if kind == "several":
        file_of(tmp_path, tensors).rename(tmp_path / "b.safetensors")
    if kind == "nothing":
        (tmp_path / "empty").mkdir()
        return tmp_path / "empty"
    if kind == "missing":
        return tmp_path / "absent"
    changes = {
        "NaN": {down: torch.full((2, 3), float("nan"))},
        "infinity": {up: torch.full((4, 2), float("inf"))},
        "rank 0": {down: torch.ones(0, 3), up: torch.ones(4, 0)},
        "ranks differ": {down: torch.ones(3, 3)},
        "integers": {down: torch.ones(2, 3, dtype=torch.int32)},
        "one dimension": {down: torch.ones(6)},
        "wide up": {up: torch.ones(4, 2, 3, 3)},
        "alpha twice": {f"{TO_Q}.alpha": torch.tensor(1.0)},
        "alpha": {f"{TO_Q}.alpha": torch.tensor(float("nan"))},
    }
    tensors |= changes.get(kind, {})
    if kind == "half":
        del tensors[up]
    metadata = {"lora_adapter_metadata": json.dumps({"unet.r": 2, "unet.lora_alpha": 2})}
    path = file_of(tmp_path, tensors, metadata if kind == "alpha twice" else None)
    return tmp_path if kind == "several" else path


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("pickle", UnsafeInput, "a.bin is a pickle"),
        ("pickle in peft's folder", UnsafeInput, "adapter_model.bin is a pickle"),
        ("no settings", UsageError, "adapter_config.json is missing"),
        ("other rank in settings", CorruptBlob, "proj has rank 3, but 2 according to its settings"),
        ("settings no JSON", CorruptBlob, "is not valid JSON"),
        ("several", UsageError, "several adapters"),
        ("nothing", UsageError, "contains no adapter"),
        ("missing", UsageError, "no file or folder"),
        ("NaN", UsageError, f"{TO_Q} contains NaN or infinity"),
        ("infinity", UsageError, f"{TO_Q} contains NaN or infinity"),
        ("rank 0", UsageError, f"{TO_Q} has rank 0"),
        ("ranks differ", CorruptBlob, "rank 3 and an up factor of 2"),
        ("integers", Unsupported, "dtype I32"),
        ("one dimension", Unsupported, "no LoRA of a linear layer"),
        ("wide up", Unsupported, "no LoRA of a linear layer"),
        ("half", CorruptBlob, r"no up \(lora_B\) factor"),
        ("alpha twice", CorruptBlob, "has two scales for"),
        ("alpha", UsageError, "scale of .* is nan"),
    ],
)
def test_faults_are_named(tmp_path, kind, error, message):
    with pytest.raises(error, match=message) as caught:
        read_adapter(broken(tmp_path, kind))
    assert isinstance(caught.value, NetweightError)


def test_a_truncated_file_is_refused(tmp_path):
    file = write_adapter(random_adapter(0), tmp_path / "a.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CorruptBlob, match="cut short"):
        read_adapter(file)


def test_a_kohya_name_for_two_modules_is_refused(tmp_path):
    change = random_adapter(0).factors[TO_Q]
    layer = "encoder.layers.0.mlp.fc1"
    adapter = Adapter({f"text_encoder.{layer}": change, f"text_encoder.text_model.{layer}": change})
    with pytest.raises(UsageError, match="Two modules are called 'lora_te_text_model_encoder_layers_0_mlp_fc1'"):
        write_adapter(adapter, tmp_path / "a.safetensors", layout="kohya")
    assert not list(tmp_path.iterdir())


def test_shapes_are_those_of_the_changes():
    assert {name: change.shape for name, change in random_adapter(0).factors.items()} == SHAPES


def test_xlabs_names_of_flux(tmp_path):
    import safetensors.torch

    head = "double_blocks.0.processor.proj_lora2"
    tensors = {f"{head}.down.weight": torch.randn(2, 5), f"{head}.up.weight": torch.randn(6, 2)}
    safetensors.torch.save_file(tensors, tmp_path / "xlabs.safetensors")
    assert read_adapter(tmp_path / "xlabs.safetensors").modules == ("transformer.transformer_blocks.0.attn.to_add_out",)
