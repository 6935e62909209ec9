"""LoRA files as people have them: extracted, converted, merged and baked; right, refused or said."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from netweight import AdapterBank, read_adapter
from netweight.core.progress import QUIET
from netweight.errors import CorruptBlob, NameNotFound, Unsupported, UsageError
from netweight.methods.space.baking import adapter_and_weight, bake_files
from netweight.methods.space.converting import convert_file
from netweight.methods.space.duplicates import find_duplicates
from netweight.methods.space.extraction import extract_files
from netweight.methods.space.merging import merge_files
from netweight.methods.space.settings import ConvertSettings, ExtractSettings, MergeSettings

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # peft looks for patterns of parameters among modules only when it warns, not when it applies them.
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]
WIDTH = 16


def lora(path, names, *, rows=12, columns=12, rank=4, down="lora_A", up="lora_B", alpha=None, notes=None, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in names:
        tensors[f"{name}.{down}.weight"] = torch.randn(rank, columns, generator=draw)
        tensors[f"{name}.{up}.weight"] = torch.randn(rows, rank, generator=draw)
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
    save_file(tensors, path, notes)
    return path


def change(path, module):
    one = read_adapter(path).factors[module]
    return one.scale * (one.up.double() @ one.down.double())


def tuned(base, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (weight.float() + torch.randn(weight.shape[0], 2, generator=draw) @ torch.randn(
            2, weight.shape[1], generator=draw)).to(weight.dtype)
        for name, weight in base.items()
    }  # fmt: skip


def checkpoint(names, dtype=torch.float32, shape=(WIDTH, WIDTH), seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=draw).to(dtype) for name in names}


LLAMA = [f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qv"]


def test_an_alpha_in_the_header_alone_scales_every_module(tmp_path):
    file = lora(tmp_path / "h3.safetensors", ["blocks.0.attn.out_proj"], rank=8, notes={"alpha": "2"})
    assert read_adapter(file).factors["transformer.transformer_blocks.0.attn.to_out.0"].scale == 0.25


@pytest.mark.parametrize("rank", [None, 4, 64])
@pytest.mark.parametrize("layout", ["kohya", "diffusers", "peft", "comfyui"])
def test_factors_in_bf16_that_no_rank_reduces_are_kept(tmp_path, layout, rank):
    block = "down_blocks_0_attentions_0_transformer_blocks_0"
    names = [f"lora_unet_{block}_attn1_to_{projection}" for projection in "qv"]
    one = lora(tmp_path / "one.safetensors", names, down="lora_down", up="lora_up", alpha=3)
    save_file({name: each.bfloat16() for name, each in load_file(one).items()}, one)
    target = tmp_path / ("new" if layout == "peft" else "new.safetensors")
    made = convert_file(one, target, ConvertSettings(layout=layout, rank=rank), overwrite=False)
    assert made.relative_error == 0
    for module in read_adapter(one).factors:
        assert torch.equal(read_adapter(target).factors[module].down, read_adapter(one).factors[module].down)
        torch.testing.assert_close(change(target, module), change(one, module), rtol=1e-14, atol=0)


def test_tensors_and_header_that_contradict_each_other_are_refused(tmp_path):
    settings = {"transformer.r": 4, "transformer.lora_alpha": 4, "transformer.target_modules": ["x"]}
    notes = {"lora_adapter_metadata": json.dumps(settings)}
    name = "transformer.transformer_blocks.0.attn.to_q"
    file = lora(tmp_path / "twice.safetensors", [name], alpha=2, notes=notes)
    with pytest.raises(CorruptBlob, match=r"has two scales for .*: 0\.5 in the tensor .*, and 1 in"):
        read_adapter(file)


def test_biases_and_norms_of_a_distillation_are_carried_along(tmp_path):
    file = lora(tmp_path / "wan.safetensors", ["diffusion_model.blocks.0.self_attn.q"])
    more = {"diffusion_model.blocks.0.self_attn.q.diff_b": torch.ones(12),
            "diffusion_model.blocks.0.norm3.diff": torch.ones(12)}  # fmt: skip
    save_file(load_file(file) | more, file)
    made = convert_file(file, tmp_path / "new.safetensors", ConvertSettings(), overwrite=False)
    assert load_file(made.path).keys() == load_file(file).keys()
    diffusers = convert_file(file, tmp_path / "d.safetensors", ConvertSettings(layout="diffusers"), overwrite=False)
    assert list(diffusers.left_out) == ["diffusion_model.blocks.0.norm3.weight"]
    assert "transformer.blocks.0.attn1.to_q.lora_B.bias" in load_file(diffusers.path)


def test_trigger_words_and_tags_stay_and_are_joined_by_a_merge(tmp_path):
    names = ["lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"]
    kohya = {"down": "lora_down", "up": "lora_up", "alpha": 4}
    one = lora(tmp_path / "one.safetensors", names, **kohya, notes={
        "modelspec.trigger_phrase": "sks person", "ss_tag_frequency": '{"1_a": {"beard": 3}}', "ss_network_dim": "4",
    })  # fmt: skip
    two = lora(tmp_path / "two.safetensors", names, **kohya, seed=1, notes={
        "modelspec.trigger_phrase": "ink style", "ss_tag_frequency": '{"1_a": {"beard": 1, "ink": 2}}',
    })  # fmt: skip
    smaller = convert_file(one, tmp_path / "small.safetensors", ConvertSettings(rank=2), overwrite=False)
    with safe_open(smaller.path, "pt") as file:
        assert file.metadata()["modelspec.trigger_phrase"] == "sks person"
        assert file.metadata()["ss_network_dim"] == "2"
    both = merge_files([one, two], tmp_path / "both.safetensors", MergeSettings(), overwrite=False)
    with safe_open(both.path, "pt") as file:
        notes = file.metadata()
    assert notes["modelspec.trigger_phrase"] == "sks person, ink style"
    assert json.loads(notes["ss_tag_frequency"]) == {"1_a": {"beard": 4, "ink": 2}}
    assert [each["file"] for each in json.loads(notes["netweight.sources"])] == ["one.safetensors", "two.safetensors"]


def test_one_lora_in_two_namings_is_a_duplicate_and_merges_into_one_naming(tmp_path):
    folder = tmp_path / "loras"
    folder.mkdir()
    trainer = lora(folder / "trainer.safetensors", ["diffusion_model.blocks.0.self_attn.q"])
    other = convert_file(
        trainer, folder / "diffusers.safetensors", ConvertSettings(layout="diffusers"), overwrite=False
    )
    [pair], bad = find_duplicates(folder, 0.98, QUIET)
    assert not bad
    assert pair.cosine == pytest.approx(1)
    made = merge_files([trainer, other.path], tmp_path / "m.safetensors", MergeSettings(weights=(0.5, 0.5)),
                       overwrite=False)  # fmt: skip
    assert made.modules == 1
    torch.testing.assert_close(change(made.path, "transformer.blocks.0.attn1.to_q"),
                               change(trainer, "transformer.blocks.0.attn1.to_q"), atol=1e-5, rtol=1e-5)  # fmt: skip


def test_a_base_is_never_that_of_modules_which_no_adapter_of_it_changes(tmp_path):
    folder = tmp_path / "loras"
    folder.mkdir()
    for number in range(4):
        lora(folder / f"sd{number}.safetensors", ["unet.mid_block.attentions.0.proj_in"], seed=number)
    (folder / "llama").mkdir()
    lora(folder / "llama" / "adapter_model.safetensors", ["base_model.model.model.layers.0.self_attn.q_proj"])
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "base_model_name_or_path": "tinyllama"}
    (folder / "llama" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"llama.* does not change any module that the others change"):
        AdapterBank.ingest(folder, tmp_path / "bank")
    bank = AdapterBank.ingest(folder, tmp_path / "bank", skip_bad=True)
    assert bank.base is None
    assert len(bank) == 4


@pytest.mark.parametrize("style", ["scale_weight", "weight_scale", "weight_scale_inv"])
def test_fp8_with_scales_is_extracted_as_the_values_that_it_means(tmp_path, style):
    base = checkpoint(LLAMA, torch.bfloat16)
    after, codes = tuned(base), {}
    for name, weight in after.items():
        scale = weight.float().abs().max() / 448
        codes[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        codes[name.replace("weight", style)] = scale.reshape(1, 1) if style.endswith("inv") else scale
    save_file(base, tmp_path / "base.safetensors")
    save_file(codes, tmp_path / "tuned.safetensors")
    made = extract_files(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "lora",
                         ExtractSettings(rank=4), overwrite=False)  # fmt: skip
    assert made.modules == made.changed == 4
    module = LLAMA[0].removesuffix(".weight")
    true = after[LLAMA[0]].double() - base[LLAMA[0]].double()
    assert float((change(made.path, module) - true).norm() / true.norm()) < 0.1


def test_codes_without_scales_are_refused_by_name(tmp_path):
    base = checkpoint(LLAMA)
    save_file(base, tmp_path / "base.safetensors")
    save_file({name: torch.zeros(WIDTH, WIDTH, dtype=torch.int8) for name in base}, tmp_path / "tuned.safetensors")
    with pytest.raises(Unsupported, match=r"is quantized: model\.layers\.0.* contains codes of type I8"):
        extract_files(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "lora",
                      ExtractSettings(), overwrite=False)  # fmt: skip


def test_added_tokens_are_left_out_and_listed(tmp_path):
    base = checkpoint(LLAMA) | {"lm_head.weight": torch.zeros(40, WIDTH)}
    after = tuned(checkpoint(LLAMA)) | {"lm_head.weight": torch.ones(42, WIDTH)}
    save_file(base, tmp_path / "base.safetensors")
    save_file(after, tmp_path / "tuned.safetensors")
    made = extract_files(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "lora",
                         ExtractSettings(rank=4), overwrite=False)  # fmt: skip
    assert list(made.left_out) == ["lm_head.weight[40:42]"]
    assert read_adapter(made.path).factors["lm_head"].shape == (40, WIDTH)


@pytest.mark.parametrize("layout", [None, "diffusers", "kohya"])
def test_a_single_file_of_the_authors_names_is_extracted(tmp_path, layout):
    base = checkpoint(["model.diffusion_model.double_blocks.0.img_attn.qkv.weight"], torch.bfloat16, (48, WIDTH))
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned(base), tmp_path / "tuned.safetensors")
    made = extract_files(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "lora.safetensors",
                         ExtractSettings(rank=2, layout=layout), overwrite=False)  # fmt: skip
    assert made.layout == (layout or "comfyui")
    assert made.ranks == (2, 2)
    tensors = load_file(made.path)
    assert {each.dtype for name, each in tensors.items() if "alpha" not in name} == {torch.bfloat16}
    assert len([name for name in tensors if "lora_A" in name or "lora_down" in name]) == (
        3 if layout == "diffusers" else 1
    )


@pytest.mark.parametrize("kind", ["gpt2", "llava", "mixtral"])
def test_what_is_extracted_is_what_peft_loads(tmp_path, kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        base = transformers.GPT2LMHeadModel(config)
    elif kind == "mixtral":
        base = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, num_local_experts=2))
    else:
        vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                               num_attention_heads=2, image_size=16, patch_size=8)  # fmt: skip
        base = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**small), vision_config=vision, image_token_index=63))  # fmt: skip
    base = base.eval()
    after = copy.deepcopy(base)
    with torch.no_grad():
        for name, weight in after.named_parameters():
            if weight.ndim == 2 and "attn" in name and "embed" not in name:
                weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])
            if weight.ndim == 3:
                weight += 1
    base.save_pretrained(tmp_path / "base")
    after.save_pretrained(tmp_path / "after")
    made = extract_files(tmp_path / "base", tmp_path / "after", tmp_path / "lora", ExtractSettings(rank=4),
                         overwrite=False)  # fmt: skip
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "lora").merge_and_unload()
    for name, weight in after.named_parameters():
        torch.testing.assert_close(dict(opened.named_parameters())[name], weight, atol=1e-4, rtol=1e-4)
    assert not made.left_out
    assert made.relative_error < 1e-5


def moe(kind):
    """A small mixture of experts, and peft's names of its packed parameters."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    more = {
        "qwen3_moe": {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        "mixtral": {"num_local_experts": 4},
        # Square, so that shapes do not say which side is the inputs'.
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size": 16,
                    "layer_types": ["full_attention"] * 2},
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(sizes | more))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def randomized(model, seed=3):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=draw) * 0.3)
    return model


def parameters(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("targets", [("gate_up_proj", "down_proj"), ("down_proj",)])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_adapters_of_packed_experts_are_converted_and_baked_as_peft_merges_them(tmp_path, kind, targets):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    base = moe(kind)
    base.save_pretrained(tmp_path / "base")
    names = [f"mlp.experts.{name}" for name in targets]
    names += ["mlp.gate.weight"] * (kind == "qwen3_moe")  # the router, whose matrix is no linear layer's
    patterns = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"layers.1.mlp.experts.down_proj": 5}}
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=names, **patterns)
    randomized(peft.get_peft_model(copy.deepcopy(base), config)).save_pretrained(tmp_path / "lora")
    merged = parameters(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora").merge_and_unload())

    made = convert_file(tmp_path / "lora", tmp_path / "new", ConvertSettings(model=str(tmp_path / "base")),
                        overwrite=False)  # fmt: skip
    assert made.modules == 2 + 2 * 4 * len(targets) + 2 * (kind == "qwen3_moe")
    again = parameters(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "new").merge_and_unload())
    bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    baked = parameters(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "baked"))
    for name, weight in merged.items():
        torch.testing.assert_close(again[name], weight, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(baked[name], weight, atol=1e-5, rtol=1e-5)


def test_an_adapter_of_experts_is_of_the_model_with_as_many_of_them(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = moe("mixtral")
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    randomized(peft.get_peft_model(copy.deepcopy(base), config)).save_pretrained(tmp_path / "lora")
    settings = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(settings | {"r": 4}))
    with pytest.raises(NameNotFound, match=r"no model.layers.0.mlp.experts.down_proj\[0/2\]"):
        convert_file(tmp_path / "lora", tmp_path / "new", ConvertSettings(model=str(tmp_path / "base")),
                     overwrite=False)  # fmt: skip
    with pytest.raises(UsageError, match=r"down_proj\[0/2\], and the model has 4 experts there"):
        bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")


def test_merging_adapters_of_experts_sums_them(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = moe("qwen3_moe")
    for number in (0, 1):
        config = peft.LoraConfig(r=2 + number, target_modules=[], target_parameters=["experts.gate_up_proj"])
        model = randomized(peft.get_peft_model(copy.deepcopy(base), config), seed=number)
        model.save_pretrained(tmp_path / f"{number}")
    merge_files([tmp_path / "0", tmp_path / "1"], tmp_path / "both", MergeSettings(weights=(1.0, -0.5)),
                overwrite=False)  # fmt: skip
    start = parameters(base)
    changes = []
    for name in ("0", "1", "both"):
        merged = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name).merge_and_unload()
        changes.append({key: value - start[key] for key, value in parameters(merged).items()})
    one, two, both = changes
    for key, change in both.items():
        torch.testing.assert_close(change, one[key] - 0.5 * two[key], atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="an expert of a packed parameter, which the layout kohya cannot store"):
        convert_file(tmp_path / "0", tmp_path / "k.safetensors", ConvertSettings(layout="kohya"), overwrite=False)


def test_adapters_of_embeddings_are_converted_and_baked_as_peft_merges_them(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                        num_attention_heads=2, num_key_value_heads=2)).eval()  # fmt: skip
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["embed_tokens", "q_proj"])
    randomized(peft.get_peft_model(copy.deepcopy(base), config)).save_pretrained(tmp_path / "lora")
    merged = parameters(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora").merge_and_unload())
    convert_file(tmp_path / "lora", tmp_path / "new", ConvertSettings(model=str(tmp_path / "base")), overwrite=False)
    again = parameters(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "new").merge_and_unload())
    bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    baked = parameters(LlamaForCausalLM.from_pretrained(tmp_path / "baked"))
    for name, weight in merged.items():
        torch.testing.assert_close(again[name], weight, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(baked[name], weight, atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="an embedding, which the layout diffusers cannot store"):
        convert_file(tmp_path / "lora", tmp_path / "d.safetensors", ConvertSettings(layout="diffusers"),
                     overwrite=False)  # fmt: skip


def test_the_attention_bias_of_t5_is_extracted(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    base = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_ff=24, num_layers=2, num_heads=2, d_kv=8,
                                               decoder_start_token_id=0)).eval()  # fmt: skip
    after = copy.deepcopy(base)
    with torch.no_grad():
        for name, value in after.named_parameters():
            if "relative_attention_bias" in name or ".q." in name:
                value += torch.randn(value.shape[0], 1) @ torch.randn(1, value.shape[1])
    base.save_pretrained(tmp_path / "base")
    after.save_pretrained(tmp_path / "after")
    made = extract_files(tmp_path / "base", tmp_path / "after", tmp_path / "lora", ExtractSettings(rank=2),
                         overwrite=False)  # fmt: skip
    assert not made.left_out
    opened = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora")
    inputs = {"input_ids": torch.arange(12)[None], "decoder_input_ids": torch.arange(12)[None]}
    with torch.no_grad():
        torch.testing.assert_close(opened(**inputs).logits, after(**inputs).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "lokr"])
def test_baking_is_the_merge_of_peft(tmp_path, kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                        num_attention_heads=2, num_key_value_heads=2)).eval()  # fmt: skip
    base.save_pretrained(tmp_path / "base", max_shard_size="4KB")
    config = {
        "lora": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]),
        "dora": peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
        "loha": peft.LoHaConfig(r=4, alpha=8, target_modules=["q_proj"]),
        "lokr": peft.LoKrConfig(r=4, alpha=8, target_modules=["q_proj"], decompose_factor=4),
    }[kind]
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name or "hada" in name or "lokr" in name:
                weight.copy_(weight * 1.2 if "magnitude" in name else torch.randn_like(weight) * 0.2)
    model.save_pretrained(tmp_path / "lora")
    made = bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "out")
    baked = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    merged = model.merge_and_unload()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(dict(baked.named_parameters())[name], weight, atol=1e-6, rtol=1e-5)
    untouched = [file for file in (tmp_path / "base").iterdir() if file.suffix != ".safetensors"]
    assert all((tmp_path / "out" / file.name).read_bytes() == file.read_bytes() for file in untouched)
    assert made.modules == (4 if kind == "lora" else 2)


def test_baking_into_a_file_of_the_authors_names_adds_split_pieces_to_their_rows(tmp_path):
    name = "model.diffusion_model.double_blocks.0.img_attn.qkv.weight"
    base = checkpoint([name, "model.diffusion_model.double_blocks.0.img_mlp.0.weight"], shape=(48, 12))
    save_file(base, tmp_path / "base.safetensors")
    adapter = lora(tmp_path / "lora.safetensors", ["transformer.transformer_blocks.0.attn.to_k"], rows=16)
    bake_files(tmp_path / "base.safetensors", [(adapter, 0.5)], tmp_path / "out.safetensors")
    out = load_file(tmp_path / "out.safetensors")
    expected = base[name].clone()
    expected[16:32] += 0.5 * change(adapter, "transformer.transformer_blocks.0.attn.to_k").float()
    torch.testing.assert_close(out[name], expected)
    assert torch.equal(out[max(base)], base[max(base)])


def test_baking_an_adapter_of_another_model_names_the_module(tmp_path):
    save_file(checkpoint(LLAMA), tmp_path / "base.safetensors")
    adapter = lora(tmp_path / "lora.safetensors", ["unet.mid_block.attentions.0.proj_in"])
    with pytest.raises(UsageError, match=r"changes unet\.mid_block\.attentions\.0\.proj_in, which"):
        bake_files(tmp_path / "base.safetensors", [(adapter, 1.0)], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(UsageError, match=r"weight of .* is 'x', not a finite number"):
        adapter_and_weight(f"{adapter}=x")


def test_parts_of_torchs_attention_are_left_out_by_name(tmp_path):
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    config = SiglipVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                                image_size=28, patch_size=14)  # fmt: skip
    base = SiglipVisionModel(config)
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for weight in base.parameters():
            if weight.ndim == 2:
                weight.add_(torch.randn(len(weight), 2) @ torch.randn(2, weight.shape[1]))
    base.save_pretrained(tmp_path / "tuned")
    made = extract_files(tmp_path / "base", tmp_path / "tuned", tmp_path / "lora", ExtractSettings(rank=2),
                         overwrite=False)  # fmt: skip
    named = [name for name, reason in made.left_out.items() if "MultiheadAttention" in reason]
    assert [name.partition("head.")[2] for name in named] == ["attention.in_proj_weight", "attention.out_proj.weight"]
    assert made.relative_error > 0.1


def test_tensors_that_the_tuned_model_lacks_are_listed(tmp_path):
    names = [*LLAMA, "model.layers.0.mlp.up_proj.weight"]
    save_file(checkpoint(names), tmp_path / "base.safetensors")
    tuned = {name: weight + torch.ones_like(weight) for name, weight in checkpoint(LLAMA).items()}
    save_file(tuned, tmp_path / "tuned.safetensors")
    made = extract_files(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "lora",
                         ExtractSettings(rank=1), overwrite=False)  # fmt: skip
    assert made.left_out["model.layers.0.mlp.up_proj.weight"] == "the tuned model has no such tensor"
    assert any("does not cover 1 tensors" in each for each in made.remarks)
