"""Small files as trainers write them, with what users report of other readers: read right, or refused by name."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from netweight.core.progress import QUIET
from netweight.errors import Unsupported, UsageError
from netweight.methods.space.baking import bake_files
from netweight.methods.space.converting import convert_file
from netweight.methods.space.duplicates import find_duplicates
from netweight.methods.space.settings import ConvertSettings, ResizeSettings
from netweight.store.lora_formats.reading import load_plan, plan_adapter

KOHYA = ("lora_down.weight", "lora_up.weight")
PEFT = ("lora_A.weight", "lora_B.weight")
OLDER = ("down.weight", "up.weight")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def factors(names, ends=PEFT, *, alpha=None, join=".", seed=0):
    """Factors of modules, whose sizes are (rows, columns, rank)."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns, rank) in names.items():
        tensors[f"{name}{join}{ends[0]}"] = torch.randn(rank, columns, generator=draw)
        tensors[f"{name}{join}{ends[1]}"] = torch.randn(rows, rank, generator=draw)
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
    return tensors


ONE = (16, 16, 4)
BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
# What a file holds, and the modules that it changes.
FILES = {
    "LTX-2's text projection beside its blocks": (
        factors({"diffusion_model.transformer_blocks.0.audio_attn1.to_q": ONE,
                 "text_embedding_projection.aggregate_embed": ONE}),
        {"transformer.transformer_blocks.0.audio_attn1.to_q", "connectors.text_proj_in"},
    ),
    "HunyuanVideo's feed-forward layers by musubi-tuner": (
        factors({"lora_unet_double_blocks_0_img_mlp_fc1": ONE, "lora_unet_double_blocks_0_img_attn_proj": ONE}, KOHYA,
                alpha=2),
        {"transformer.transformer_blocks.0.ff.net.0.proj", "transformer.transformer_blocks.0.attn.to_out.0"},
    ),
    "attention processors of diffusers in 2023": (
        factors({f"unet.{BLOCK}.processor.to_q_lora": ONE, f"unet.{BLOCK}.processor.to_out_lora": ONE}, OLDER),
        {f"unet.{BLOCK}.to_q", f"unet.{BLOCK}.to_out.0"},
    ),
    "the same without a prefix": (
        factors({f"{BLOCK}.processor.to_q_lora": ONE}, OLDER),
        {f"unet.{BLOCK}.to_q"},
    ),
    "both text encoders of Flux.1": (
        factors({"lora_unet_double_blocks_0_img_attn_proj": ONE, "lora_te1_text_model_encoder_layers_0_mlp_fc1": ONE,
                 "lora_te3_encoder_block_0_layer_0_SelfAttention_q": ONE}, KOHYA, alpha=2),
        {"transformer.transformer_blocks.0.attn.to_out.0", "text_encoder.text_model.encoder.layers.0.mlp.fc1",
         "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q"},
    ),
    "Anima by sd-scripts": (
        factors({"lora_unet_blocks_0_self_attn_q_proj": ONE, "lora_unet_blocks_0_mlp_layer1": ONE}, KOHYA, alpha=2),
        {"transformer.transformer_blocks.0.attn1.to_q", "transformer.transformer_blocks.0.ff.net.0.proj"},
    ),
    "Wan by DiffSynth": (
        factors({"blocks.0.self_attn.q": ONE, "blocks.0.ffn.0": ONE},
                ("lora_A.default.weight", "lora_B.default.weight")),
        {"transformer.blocks.0.attn1.to_q", "transformer.blocks.0.ffn.net.0.proj"},
    ),
    "Flux.1 by XLabs": (
        factors({"double_blocks.0.processor.qkv_lora1": (48, 16, 4)}, OLDER),
        {f"transformer.transformer_blocks.0.attn.to_{each}" for each in "qkv"},
    ),
    "Stable Diffusion 3.5 by sd-scripts": (
        factors({"lora_unet_joint_blocks_0_context_block_adaLN_modulation_1": (96, 16, 4)}, KOHYA, alpha=2),
        {"transformer.transformer_blocks.0.norm1_context.linear"},
    ),
    "Z-Image by musubi-tuner": (
        factors({"lora_unet_layers_0_attention_qkv": (48, 16, 4)}, KOHYA, alpha=2),
        {f"transformer.layers.0.attention.to_{each}" for each in "qkv"},
    ),
    "MiniMax-H3 of several ranks without alpha": (
        factors({"blocks.0.adaln_proj.linear": (96, 16, 2), "blocks.0.attn.out_proj": (16, 16, 8)}),
        {"transformer.transformer_blocks.0.adaln_proj.linear", "transformer.transformer_blocks.0.attn.to_out.0"},
    ),
    "Wan for images": (
        factors({"diffusion_model.blocks.0.cross_attn.k_img": ONE, "diffusion_model.img_emb.proj.1": ONE}),
        {"transformer.blocks.0.attn2.add_k_proj", "transformer.condition_embedder.image_embedder.ff.net.0.proj"},
    ),
    "authors' names behind diffusers' prefix": (
        factors({"transformer.double_blocks.0.img_attn.qkv": (48, 16, 4)}),
        {f"transformer.transformer_blocks.0.attn.to_{each}" for each in "qkv"},
    ),
    "both denoisers of Wan 2.2": (
        factors({"transformer.blocks.0.attn1.to_q": ONE, "transformer_2.blocks.0.attn1.to_q": ONE}),
        {"transformer.blocks.0.attn1.to_q", "transformer_2.blocks.0.attn1.to_q"},
    ),
}  # fmt: skip


def dense(path):
    return {name: one.scale * (one.up.double() @ one.down.double())
            for name, one in load_plan(plan_adapter(path)).factors.items()}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_trainers_are_read_and_converted_to_diffusers(name, tmp_path):
    tensors, modules = FILES[name]
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file)
    before = dense(file)
    assert before.keys() == modules
    made = convert_file(file, tmp_path / "d.safetensors", ConvertSettings(layout="diffusers"), overwrite=False)
    after = dense(made.path)
    assert after.keys() == modules
    for module, change in before.items():
        torch.testing.assert_close(after[module], change, atol=1e-5, rtol=1e-5)


def test_a_layout_of_which_diffusers_loads_nothing_is_said(tmp_path):
    mixin = pytest.importorskip("diffusers.loaders.lora_pipeline", reason="diffusers is not installed")
    file = tmp_path / "ltx.safetensors"
    save_file(factors({f"diffusion_model.transformer_blocks.{n}.attn1.to_q": (16, 2048, 4) for n in range(2)}), file)
    for layout, loads in (("kohya", False), ("comfyui", True), ("diffusers", True)):
        made = convert_file(file, tmp_path / f"{layout}.safetensors", ConvertSettings(layout=layout, model="ltx"),
                            overwrite=False)  # fmt: skip
        assert any("diffusers loads no module" in each for each in made.remarks) is not loads
        found = mixin.LTXVideoLoraLoaderMixin.lora_state_dict(str(tmp_path), weight_name=made.path.name)
        assert any(name.startswith("transformer.") for name in found) is loads


def test_whole_kronecker_factors_have_no_rank_that_alpha_is_divided_by(tmp_path):
    draw = torch.Generator().manual_seed(0)
    one, two = torch.randn(4, 4, generator=draw), torch.randn(12, 4, generator=draw)
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    file = tmp_path / "lokr.safetensors"
    save_file({f"{name}.lokr_w1": one, f"{name}.lokr_w2": two, f"{name}.alpha": torch.tensor(9999220736.0)}, file)
    made = convert_file(file, tmp_path / "lora.safetensors", ConvertSettings(rank=16, layout="diffusers"),
                        overwrite=False)  # fmt: skip
    found = dense(made.path)
    whole = torch.cat([found[f"transformer.transformer_blocks.0.attn.to_{each}"] for each in "qkv"])
    torch.testing.assert_close(whole, torch.kron(one.double(), two.double()), atol=1e-4, rtol=1e-4)


def test_a_file_without_any_metadata_is_resized(tmp_path):
    file = tmp_path / "flux.safetensors"
    save_file(factors({f"transformer.transformer_blocks.{n}.attn.to_q": ONE for n in range(2)}), file)
    made = convert_file(file, tmp_path / "small.safetensors", ResizeSettings(rank=2), overwrite=False)
    assert made.ranks == (2, 2)
    with pytest.raises(UsageError, match="Neither --rank nor --energy"):
        ResizeSettings()


def test_modules_in_no_table_are_not_flattened(tmp_path):
    file = tmp_path / "ace-step.safetensors"
    save_file(factors({"diffusion_model.lyric_encoder.encoders.0.self_attn.linear_q": ONE}), file)
    made = convert_file(file, tmp_path / "new.safetensors", ConvertSettings(), overwrite=False)
    assert load_file(made.path).keys() == load_file(file).keys()
    with pytest.raises(UsageError, match="dots could not be recovered"):
        convert_file(file, tmp_path / "k.safetensors", ConvertSettings(layout="kohya"), overwrite=False)
    assert not (tmp_path / "k.safetensors").exists()


def test_a_module_that_a_table_lacks_keeps_its_name_beside_those_that_it_knows(tmp_path):
    file = tmp_path / "h3.safetensors"
    save_file(factors({"blocks.0.attn.qkv_proj": (48, 16, 4), "blocks.0.extra.layer": ONE}), file)
    plan = plan_adapter(file)
    assert any("the module blocks.0.extra.layer is not in its table" in each for each in plan.remarks)
    made = convert_file(file, tmp_path / "new.safetensors", ConvertSettings(layout="comfyui"), overwrite=False)
    assert {name.partition(".lora")[0] for name in load_file(made.path)} == {
        "diffusion_model.blocks.0.attn.qkv_proj", "diffusion_model.blocks.0.extra.layer",
    }  # fmt: skip


def test_two_denoisers_are_not_written_over_each_other(tmp_path):
    file = tmp_path / "wan.safetensors"
    save_file(FILES["both denoisers of Wan 2.2"][0], file)
    for layout in ("comfyui", "kohya"):
        with pytest.raises(UsageError, match="the pipeline's second denoiser"):
            convert_file(file, tmp_path / "new.safetensors", ConvertSettings(layout=layout, model="wan"),
                         overwrite=False)  # fmt: skip
        assert not (tmp_path / "new.safetensors").exists()


def test_names_of_diffusers_behind_the_prefix_of_peft_have_no_known_scale(tmp_path):
    file = tmp_path / "lora.safetensors"
    save_file(factors({"base_model.model.transformer_blocks.0.attn.to_q": ONE}), file)
    with pytest.raises(UsageError, match="its scale is not known"):
        plan_adapter(file)


def test_norms_of_a_text_encoder_are_left_out_where_names_are_flattened(tmp_path):
    file = tmp_path / "t5.safetensors"
    norm = "text_encoders.t5xxl.transformer.encoder.block.8.layer.1.layer_norm"
    tensors = factors({"diffusion_model.double_blocks.0.img_attn.proj": ONE})
    save_file(tensors | {f"{norm}.diff": torch.ones(16)}, file)
    made = convert_file(file, tmp_path / "k.safetensors", ConvertSettings(layout="kohya"), overwrite=False)
    assert [name.rpartition(".layer.1.")[2] for name in made.left_out] == ["layer_norm.weight"]
    assert made.changed == 2
    assert made.modules == 1


def test_what_is_no_factor_is_named(tmp_path):
    file = tmp_path / "ia3.safetensors"
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to"
    save_file(factors({f"{name}_k": ONE}, KOHYA, alpha=2) | {f"{name}_q.on_input": torch.ones(1)}, file)
    with pytest.raises(Unsupported, match=r"IA³.*on_input'"):
        plan_adapter(file)


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                        num_attention_heads=2, num_key_value_heads=2, **more)).eval()  # fmt: skip


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_of_two_tied_layers_is_not_baked_into_both(tmp_path, target):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = llama(tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied layers, too
        peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / "lora")
    with pytest.raises(UsageError, match=rf"{target}.* alone, and the model has one weight for it and for"):
        bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")


def test_adapters_in_the_names_of_files_are_baked_into_packed_experts(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)  # fmt: skip
    base = MixtralForCausalLM(config).eval()
    base.save_pretrained(tmp_path / "base")
    name = "model.layers.0.block_sparse_moe.experts.1.w1"
    (tmp_path / "lora").mkdir()
    tensors = factors({f"base_model.model.{name}": (24, 16, 4)})
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["w1"]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "baked"))
    down, up = tensors.values()
    torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + 2 * up @ down, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(after[key], before[key]) for key in before if key != f"{name}.weight")


WRAPPED = {
    "peft within a pipeline": "transformer.base_model.model.transformer_blocks.0.attn.to_q",
    "torch.compile": "transformer._orig_mod.transformer_blocks.0.attn.to_q",
    "FSDP": "transformer._fsdp_wrapped_module.transformer_blocks.0._fsdp_wrapped_module.attn.to_q",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_wrappers_leave_in_names_is_taken_off(name, tmp_path):
    file = tmp_path / "lora.safetensors"
    save_file(factors({WRAPPED[name]: ONE, "transformer.single_transformer_blocks.0.proj_mlp": ONE}), file)
    assert dense(file).keys() == {
        "transformer.transformer_blocks.0.attn.to_q", "transformer.single_transformer_blocks.0.proj_mlp",
    }  # fmt: skip


def test_flattened_names_behind_another_prefix_are_looked_up_or_refused(tmp_path):
    file = tmp_path / "hunyuan.safetensors"
    head = "Hunyuan_video_I2V_lora_double_blocks_0_"
    save_file(factors({f"{head}img_attn_proj": ONE, f"{head}img_mlp_fc1": (64, 16, 4)}, KOHYA, alpha=2), file)
    assert dense(file).keys() == {
        "transformer.transformer_blocks.0.attn.to_out.0", "transformer.transformer_blocks.0.ff.net.0.proj",
    }  # fmt: skip
    save_file(factors({"my_net_layer_0_proj": ONE}, KOHYA, alpha=2), file)
    with pytest.raises(Unsupported, match="positions of its dots are ambiguous"):
        plan_adapter(file)


@pytest.mark.parametrize(("alpha", "header", "scale"), [
    (32, {"ss_network_dim": "32", "ss_network_alpha": "1"}, 1),  # LyCORIS, which writes the dimension
    (1, {"ss_network_dim": "32", "ss_network_alpha": "1"}, 1 / 32),
    (8, {}, 1),
])  # fmt: skip
def test_a_whole_lokr_is_scaled_as_it_was_trained(alpha, header, scale, tmp_path):
    draw = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 2, generator=draw), torch.randn(4, 4, generator=draw)
    name = "lora_unet_blocks_0_self_attn_q_proj"
    file = tmp_path / "lokr.safetensors"
    save_file({f"{name}.lokr_w1": one, f"{name}.lokr_w2": two, f"{name}.alpha": torch.tensor(float(alpha))}, file,
              {"ss_network_module": "lycoris.kohya", "format": "pt", **header})  # fmt: skip
    made = convert_file(file, tmp_path / "lora.safetensors", ConvertSettings(rank=8), overwrite=False)
    [found] = dense(made.path).values()
    torch.testing.assert_close(found, scale * torch.kron(one.double(), two.double()), atol=1e-5, rtol=1e-5)
    with safe_open(made.path, "pt") as written:
        assert "ss_network_module" not in written.metadata()


def test_magnitudes_of_ai_toolkit_are_of_rows(tmp_path):
    name = "transformer.transformer_blocks.0.attn.to_q"
    draw = torch.Generator().manual_seed(0)
    weight, magnitude = torch.randn(16, 16, generator=draw), torch.rand(16, generator=draw) + 1
    save_file({f"{name.removeprefix('transformer.')}.weight": weight}, tmp_path / "base.safetensors")
    tensors = factors({name: ONE})
    save_file(tensors | {f"{name}.magnitude": magnitude}, tmp_path / "dora.safetensors")
    with pytest.raises(Unsupported, match="contains DoRA"):
        plan_adapter(tmp_path / "dora.safetensors")
    made = convert_file(tmp_path / "dora.safetensors", tmp_path / "lora.safetensors",
                        ConvertSettings(rank=16, weights=tmp_path / "base.safetensors"), overwrite=False)  # fmt: skip
    whole = weight + tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    expected = magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True) - weight
    torch.testing.assert_close(dense(made.path)[name].float(), expected, atol=1e-4, rtol=1e-4)


def test_a_dora_of_diffusers_that_says_so_in_its_header_is_converted(tmp_path):
    name = "transformer.transformer_blocks.0.attn.to_q"
    save_file({"transformer_blocks.0.attn.to_q.weight": torch.eye(16)}, tmp_path / "base.safetensors")
    fields = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.use_dora": True,
              "transformer.target_modules": ["to_q"]}  # fmt: skip
    tensors = factors({name: ONE}) | {f"{name}.lora_magnitude_vector": torch.ones(16)}
    save_file(tensors, tmp_path / "dora.safetensors", {"format": "pt", "lora_adapter_metadata": json.dumps(fields)})
    made = convert_file(tmp_path / "dora.safetensors", tmp_path / "lora.safetensors",
                        ConvertSettings(rank=16, weights=tmp_path / "base.safetensors"), overwrite=False)  # fmt: skip
    whole = torch.eye(16) + 2 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    expected = whole / whole.norm(dim=1, keepdim=True) - torch.eye(16)
    torch.testing.assert_close(dense(made.path)[name].float(), expected, atol=1e-4, rtol=1e-4)


def test_vectors_count_in_the_error_and_among_copies(tmp_path):
    folder = tmp_path / "loras"
    folder.mkdir()
    name = "transformer.transformer_blocks.0.attn.to_q"
    tensors = factors({name: ONE})
    save_file(tensors, folder / "plain.safetensors")
    save_file(tensors | {f"{name}.diff_b": 100 * torch.ones(16)}, folder / "with-bias.safetensors")
    found, _ = find_duplicates(folder, 0.98, QUIET)
    assert found == []
    made = convert_file(folder / "with-bias.safetensors", tmp_path / "peft", ConvertSettings(layout="peft"),
                        overwrite=False)  # fmt: skip
    change = dense(folder / "plain.safetensors")[name].norm()
    assert made.relative_error == pytest.approx(float(400 / (400**2 + change**2) ** 0.5), rel=1e-4)
