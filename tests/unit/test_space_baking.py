"""`netweight space bake`: what is refused, said and left out, and whole weights that adapters of peft contain."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from netweight.errors import OutputFailed, UnsafeInput, UsageError
from netweight.methods.space.baking import adapter_and_weight, bake_files
from netweight.methods.space.converting import convert_file
from netweight.methods.space.settings import ConvertSettings
from netweight.store import changed_copy
from netweight.store.lora_formats.reading import read_adapter

NAME = "model.layers.0.self_attn.q_proj"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                        num_attention_heads=2, num_key_value_heads=2, **more)).eval()  # fmt: skip


def lora(folder, scale=1.0, name=NAME, size=16):
    """A LoRA of peft of one module."""
    draw = torch.Generator().manual_seed(1)
    folder.mkdir()
    down, up = torch.randn(4, size, generator=draw), torch.randn(size, 4, generator=draw) * scale
    tensors = {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [name.rpartition(".")[2]]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return up @ down


def test_pieces_smaller_than_a_tensor_give_the_same_weights(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "base")
    change = lora(tmp_path / "lora")
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr(changed_copy, "PIECE", size)
        bake_files(tmp_path / "base", [(tmp_path / "lora", 0.5)], tmp_path / f"baked-{size}")
        before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("base", f"baked-{size}"))
        torch.testing.assert_close(after[f"{NAME}.weight"], before[f"{NAME}.weight"] + 0.5 * change)
        assert all(torch.equal(after[key], before[key]) for key in before if key != f"{NAME}.weight")


def test_a_file_that_reads_back_otherwise_is_not_published(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "base")
    lora(tmp_path / "lora")
    write = changed_copy.ChangedCopy._write

    def damaged(self, piece):
        write(self, piece)
        self._out.flush()
        self._out.seek(-1, 1)
        self._out.write(b"\x7f")

    monkeypatch.setattr(changed_copy.ChangedCopy, "_write", damaged)
    with pytest.raises(OutputFailed, match="other bytes were read back"):
        bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    assert not (tmp_path / "baked").exists()


def test_values_that_fp16_does_not_hold_are_refused(tmp_path):
    llama().half().save_pretrained(tmp_path / "base")
    lora(tmp_path / "lora", 1e5)
    with pytest.raises(UsageError, match=r"q_proj\.weight has values that F16 cannot represent .*smaller weight"):
        bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    assert not (tmp_path / "baked").exists()


@pytest.mark.parametrize("weight", ["nan", "inf", "-inf"])
def test_weights_are_finite(tmp_path, weight):
    lora(tmp_path / "lora")
    with pytest.raises(UsageError, match="not a finite number"):
        adapter_and_weight(f"{tmp_path / 'lora'}={weight}")


def test_factors_that_are_not_numbers_are_refused(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    lora(tmp_path / "lora", float("nan"))
    with pytest.raises(UsageError, match=r"q_proj contains NaN or infinity"):
        bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")


def test_a_change_below_the_rounding_is_said(tmp_path):
    llama().bfloat16().save_pretrained(tmp_path / "base")
    lora(tmp_path / "lora", 1e-9)
    made = bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    assert made.rounded_away == (f"{NAME}.weight",)
    assert made.modules == 0


def test_other_copies_of_the_weights_are_left_out_and_hashes_of_them_removed(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    lora(tmp_path / "lora")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    metadata = {"format": "pt", "modelspec.hash_sha256": "0x1", "modelspec.title": "mine"}
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata)
    half = {name: one.half() for name, one in weights.items()}
    save_file(half, tmp_path / "base" / "model.fp16.safetensors")
    torch.save(weights, tmp_path / "base" / "pytorch_model.bin")
    for name in ("original", "2_Dense", ".git"):
        (tmp_path / "base" / name).mkdir()
        save_file({"linear.weight": torch.ones(2, 2)}, tmp_path / "base" / name / "model.safetensors")
    made = bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    assert made.left_out == ("model.fp16.safetensors", "original/model.safetensors", "pytorch_model.bin")
    assert (tmp_path / "baked" / "2_Dense" / "model.safetensors").is_file()
    assert not (tmp_path / "baked" / ".git").exists()
    assert {file.name for file in (tmp_path / "baked").glob("*model*")} == {"model.safetensors"}
    with safe_open(tmp_path / "baked" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "modelspec.title": "mine"}


@pytest.mark.parametrize("more", [{"modules_to_save": ["lm_head", "embed_tokens"]}, {"bias": "all"}])
def test_whole_weights_of_an_adapter_replace_the_models(tmp_path, more):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = llama(attention_bias=True)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False, **more)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(tmp_path / "lora")
    bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    baked, merged = load_file(tmp_path / "baked" / "model.safetensors"), model.merge_and_unload().state_dict()
    for name, weight in baked.items():
        torch.testing.assert_close(weight, merged[name], atol=1e-6, rtol=1e-5)


def test_whole_weights_of_tied_layers(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = llama(tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["q_proj"]))
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(1)
        model.save_pretrained(tmp_path / "lora", save_embedding_layers=True)
    bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    baked = load_file(tmp_path / "baked" / "model.safetensors")
    assert torch.equal(baked["model.embed_tokens.weight"], base.get_input_embeddings().weight + 1)
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    head = next(name for name in tensors if "lm_head" in name)
    save_file({**tensors, head: tensors[head] + 1}, tmp_path / "lora" / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="which differ, and the model has one weight for both"):
        bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "again")


def test_an_adapter_with_added_tokens_names_what_to_do(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    lora(tmp_path / "lora")
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(70, 16)
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    with pytest.raises(UsageError, match="resize its embeddings first"):
        bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")


def test_square_layers_of_gpt2_are_turned_without_a_config(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
                               eos_token_id=0)).save_pretrained(tmp_path / "base")  # fmt: skip
    name = "transformer.h.0.attn.c_proj"
    change = lora(tmp_path / "lora", name=name)
    file = tmp_path / "base" / "model.safetensors"
    for model in (tmp_path / "base", file):
        out = tmp_path / ("baked" if model.is_dir() else "baked.safetensors")
        bake_files(model, [(tmp_path / "lora", 1.0)], out)
        after = load_file(out / "model.safetensors" if out.is_dir() else out)
        torch.testing.assert_close(after[f"{name}.weight"], load_file(file)[f"{name}.weight"] + change.T)


def gemma(folder):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    text = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, head_dim=8)  # fmt: skip
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                  patch_size=14)  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


@pytest.mark.parametrize("body", ["model", "language_model.model", "model.language_model"])
def test_a_language_models_adapter_fits_the_model_that_also_takes_images(tmp_path, body):
    gemma(tmp_path / "base")
    change = lora(tmp_path / "lora", name=f"{body}.layers.0.self_attn.q_proj")
    bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "baked"))
    differing = [name for name in before if not torch.equal(before[name], after[name])]
    assert [name.partition("layers.")[2] for name in differing] == ["0.self_attn.q_proj.weight"]
    assert "vision" not in differing[0]
    torch.testing.assert_close(after[differing[0]], before[differing[0]] + change)
    how = ConvertSettings(model=str(tmp_path / "base"))
    made = convert_file(tmp_path / "lora", tmp_path / "fitting", how, overwrite=False)
    [named] = read_adapter(made.path).factors
    assert named == "model.language_model.layers.0.self_attn.q_proj"


def test_a_folder_of_pickles_says_how_to_save_it(tmp_path):
    (tmp_path / "base").mkdir()
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "base" / "pytorch_model.bin")
    lora(tmp_path / "lora")
    with pytest.raises(UnsafeInput, match=r"save_pretrained"):
        bake_files(tmp_path / "base", [(tmp_path / "lora", 1.0)], tmp_path / "baked")


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_adapters_of_a_small_pipeline_and_its_text_encoder_are_baked_as_diffusers_fuses_them(tmp_path, wrapped, layout):
    """Releases of transformers write the text encoder's weights with or without `text_model` in front."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    peft = pytest.importorskip("peft", reason="peft is in the llm extra")
    from small_pipelines import stable_diffusion

    pipeline = stable_diffusion()
    pipeline.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "text_encoder" / "model.safetensors"
    start = "text_model." if wrapped else ""
    weights = {start + name.removeprefix("text_model."): value for name, value in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    torch.manual_seed(1)
    pipeline.unet.add_adapter(peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q"], init_lora_weights=False))
    pipeline.text_encoder.add_adapter(
        peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    layers, words = map(peft.get_peft_model_state_dict, (pipeline.unet, pipeline.text_encoder))
    words = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in words.items()}
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path / "lora", unet_lora_layers=layers, text_encoder_lora_layers=words
    )
    lora_file = tmp_path / "lora" / "pytorch_lora_weights.safetensors"
    if layout == "kohya":
        names = {"unet": "lora_unet_", "text_encoder": "lora_te_"}
        flat = {}
        for name, value in load_file(lora_file).items():
            part, _, rest = name.partition(".")
            module, role = rest.rsplit(".lora", 1)
            kind = "lora_down" if role.startswith(("_A", ".down", "_linear_layer.down")) else "lora_up"
            flat[f"{names[part]}{module.replace('.', '_')}.{kind}.weight"] = value
        save_file(flat, lora_file)
    made = bake_files(tmp_path / "base", [(lora_file, 1.0)], tmp_path / "baked")
    assert made.modules == len(layers) // 2 + len(words) // 2
    pipeline.fuse_lora(components=["unet", "text_encoder"])
    for part, name in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        baked = load_file(tmp_path / "baked" / part / f"{name}.safetensors")
        fused = getattr(pipeline, part).state_dict()
        for key, value in fused.items():
            if ".base_layer.weight" not in key:
                continue
            own = key.replace(".base_layer", "").removeprefix("text_model.")
            own = own if own in baked else f"text_model.{own}"
            torch.testing.assert_close(baked[own], value)
