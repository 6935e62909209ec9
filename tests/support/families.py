"""Tiny models of many families of transformers and diffusers, and what is tried with each, dense beside compressed.

As a program it tries everything, for some minutes: `python tests/support/families.py RESULT.json` writes what was
found, and the table of it into docs/model-families.md.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import diffusers
import torch
import transformers as tf
from models_under_test import bits

import netweight
from netweight import autoload
from netweight.core import environment
from netweight.errors import NetweightError

autoload.install()  # as torch does where netweight is installed

TEXT = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**TEXT, "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER = {**ENCODER, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {**DECODER, "head_dim": 16}
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
PATCHES = {**VISION, "image_size": 32, "patch_size": 8}
AUDIO = {
    **VISION, "vocab_size": 32, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": 128, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
CLIP_TEXT = {**ENCODER, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 32}


def ids():
    return {"input_ids": torch.randint(4, 100, (2, 8))}


def both():
    return {**ids(), "decoder_input_ids": torch.randint(4, 100, (2, 6))}


def image(name="pixel_values", size=32):
    return {name: torch.randn(2, 3, size, size)}


def wave():
    return {"input_values": torch.randn(2, 1000)}


def with_image(token, count):
    """Text in which an image of so many patches stands, for a model that puts them there."""
    found = ids()
    found["input_ids"] = torch.cat([torch.full((2, count), token), found["input_ids"]], dim=1)
    return {**found, **image()}


@dataclasses.dataclass(frozen=True)
class Family:
    """A tiny model of one family."""

    kind: str
    model: str  # its class in transformers or diffusers
    config: dict
    inputs: object  # a function
    options: dict = dataclasses.field(default_factory=dict)  # for the call

    def make(self):
        """The dense model, in bf16."""
        torch.manual_seed(0)
        if self.kind == "diffusion":
            return getattr(diffusers, self.model)(**self.config).bfloat16()
        kind = getattr(tf, self.model)
        return kind._from_config(kind.config_class(**self.config), dtype=torch.bfloat16)

    def call(self, model, seed=1):
        """What the model gives for the family's inputs: its floating point outputs."""
        tf.set_seed(seed)
        inputs = {name: _bf16(value) for name, value in self.inputs().items()}
        return _floats(model(**inputs, **self.options))

    def generated(self, model):
        torch.manual_seed(1)
        inputs = {name: _bf16(value) for name, value in self.inputs().items() if not name.startswith("decoder_")}
        return model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)


def _bf16(value):
    return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _floats(value):
    """The floating point tensors of an output, caches left out."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _floats(part)]


def llm(model, **changes):
    return Family("decoder", model, {**DECODER, **changes}, ids)


def moe(model, **changes):
    return Family("mixture of experts", model, {**HEADS, **changes}, ids)


def encoder(model, **changes):
    return Family("encoder", model, {**ENCODER, **changes}, ids)


def vision(model, config, **options):
    return Family("vision", model, config, image, options)


FAMILIES = {
    "GPT-2": Family(
        "decoder",
        "GPT2LMHeadModel",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 128,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        ids,
    ),
    "GPT-NeoX": llm("GPTNeoXForCausalLM"),
    "GPT-J": Family(
        "decoder",
        "GPTJForCausalLM",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 128,
            "n_positions": 64,
            "rotary_dim": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        ids,
    ),
    "GPT-BigCode": Family(
        "decoder",
        "GPTBigCodeForCausalLM",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 128,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        ids,
    ),
    "OPT": llm("OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=64),
    "BLOOM": Family(
        "decoder",
        "BloomForCausalLM",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2},
        ids,
    ),
    "Falcon": llm("FalconForCausalLM"),
    "Llama": llm("LlamaForCausalLM"),
    "Llama, tied": llm("LlamaForCausalLM", tie_word_embeddings=True),
    "Mistral": llm("MistralForCausalLM"),
    "Qwen2": llm("Qwen2ForCausalLM"),
    "Qwen3": Family("decoder", "Qwen3ForCausalLM", HEADS, ids),
    "Gemma": Family("decoder", "GemmaForCausalLM", HEADS, ids),
    "Gemma 2": Family("decoder", "Gemma2ForCausalLM", HEADS, ids),
    "Gemma 3": Family("decoder", "Gemma3ForCausalLM", HEADS, ids),
    "Phi": llm("PhiForCausalLM"),
    "Phi-3": llm("Phi3ForCausalLM"),
    "OLMo 2": llm("Olmo2ForCausalLM"),
    "StarCoder2": llm("Starcoder2ForCausalLM"),
    "Cohere": llm("CohereForCausalLM"),
    "StableLM": llm("StableLmForCausalLM"),
    "Granite": llm("GraniteForCausalLM"),
    "Mixtral": moe("MixtralForCausalLM", num_local_experts=4),
    "Qwen3-MoE": moe("Qwen3MoeForCausalLM", moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2),
    "OLMoE": moe("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "gpt-oss": moe("GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": Family(
        "mixture of experts",
        "DeepseekV3ForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        ids,
    ),
    "Mamba": Family(
        "state space",
        "MambaForCausalLM",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": 128,
            "state_size": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        ids,
    ),
    "Mamba-2": Family(
        "state space",
        "Mamba2ForCausalLM",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": 128,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        ids,
    ),
    "RecurrentGemma": Family(
        "state space",
        "RecurrentGemmaForCausalLM",
        {**HEADS, "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 32},
        ids,
    ),
    "BERT": encoder("BertModel"),
    "RoBERTa": encoder("RobertaModel"),
    "DistilBERT": Family(
        "encoder", "DistilBertModel", {"vocab_size": 128, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}, ids
    ),
    "ALBERT": encoder("AlbertModel", embedding_size=32),
    "ELECTRA": encoder("ElectraModel", embedding_size=32),
    "DeBERTa-v2": encoder("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "MPNet": encoder("MPNetModel"),
    "ModernBERT": encoder(
        "ModernBertModel", cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2, global_attn_every_n_layers=2
    ),
    "T5": Family(
        "encoder–decoder",
        "T5ForConditionalGeneration",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 128,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        both,
    ),
    "BART": Family("encoder–decoder", "BartForConditionalGeneration", SEQ2SEQ, both),
    "Marian": Family("encoder–decoder", "MarianMTModel", SEQ2SEQ, both),
    "Pegasus": Family("encoder–decoder", "PegasusForConditionalGeneration", SEQ2SEQ, both),
    "ViT": vision("ViTForImageClassification", PATCHES),
    "DINOv2": vision("Dinov2Model", PATCHES),
    "BEiT": vision("BeitModel", PATCHES),
    "Swin": vision(
        "SwinModel",
        {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    "ConvNeXt": vision("ConvNextModel", {"hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2}),
    "ResNet": vision(
        "ResNetForImageClassification",
        {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [1, 1], "num_labels": 5},
    ),
    "SegFormer": vision(
        "SegformerModel",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [32, 64],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "Wav2Vec2": Family("audio", "Wav2Vec2ForCTC", AUDIO, wave),
    "HuBERT": Family("audio", "HubertForCTC", AUDIO, wave),
    "WavLM": Family("audio", "WavLMForCTC", AUDIO, wave),
    "Whisper": Family(
        "audio",
        "WhisperForConditionalGeneration",
        {
            **SEQ2SEQ,
            "max_source_positions": 50,
            "max_target_positions": 64,
            "num_mel_bins": 20,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        lambda: {"input_features": torch.randn(2, 20, 100), "decoder_input_ids": torch.randint(4, 100, (2, 6))},
    ),
    "AST": Family(
        "audio",
        "ASTModel",
        {**VISION, "patch_size": 8, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
        lambda: {"input_values": torch.randn(2, 32, 16)},
    ),
    "CLIP": Family(
        "multimodal",
        "CLIPModel",
        {"text_config": CLIP_TEXT, "vision_config": PATCHES, "projection_dim": 32},
        lambda: {**ids(), **image()},
    ),
    "SigLIP": Family(
        "multimodal", "SiglipModel", {"text_config": CLIP_TEXT, "vision_config": PATCHES}, lambda: {**ids(), **image()}
    ),
    "BLIP": Family(
        "multimodal",
        "BlipForConditionalGeneration",
        {"text_config": {**CLIP_TEXT, "encoder_hidden_size": 64, "sep_token_id": 3}, "vision_config": PATCHES},
        lambda: {**ids(), **image()},
    ),
    "LLaVA": Family(
        "multimodal",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**DECODER, "model_type": "llama"},
            "vision_config": {**PATCHES, "model_type": "clip_vision_model"},
            "image_token_index": 127,
            "image_token_id": 127,
        },
        lambda: with_image(127, 16),
    ),
    "ViLT": Family(
        "multimodal", "ViltModel", {**ENCODER, "image_size": 32, "patch_size": 8}, lambda: {**ids(), **image()}
    ),
    "U-Net": Family(
        "diffusion",
        "UNet2DModel",
        {
            "sample_size": 8,
            "layers_per_block": 1,
            "block_out_channels": (32, 64),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {"sample": torch.randn(2, 3, 16, 16), "timestep": 7},
    ),
    "conditional U-Net": Family(
        "diffusion",
        "UNet2DConditionModel",
        {
            "sample_size": 8,
            "layers_per_block": 1,
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
        },
        lambda: {"sample": torch.randn(2, 4, 8, 8), "timestep": 7, "encoder_hidden_states": torch.randn(2, 4, 32)},
    ),
    "ControlNet": Family(
        "diffusion",
        "ControlNetModel",
        {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
            "conditioning_embedding_out_channels": (16, 32),
        },
        lambda: {
            "sample": torch.randn(2, 4, 8, 8),
            "timestep": 7,
            "encoder_hidden_states": torch.randn(2, 4, 32),
            "controlnet_cond": torch.randn(2, 3, 16, 16),
        },
    ),
    "AutoencoderKL": Family(
        "diffusion",
        "AutoencoderKL",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda: image("sample", 16),
    ),
    "VQ model": Family(
        "diffusion",
        "VQModel",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "num_vq_embeddings": 32,
        },
        lambda: image("sample", 16),
    ),
    "DiT": Family(
        "diffusion",
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 16,
            "norm_num_groups": 4,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "class_labels": torch.tensor([1, 2]),
        },
    ),
    "PixArt": Family(
        "diffusion",
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "cross_attention_dim": 64,
            "caption_channels": 32,
            "norm_num_groups": 4,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": torch.randn(2, 4, 32),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "Stable Diffusion 3": Family(
        "diffusion",
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 64,
            "pooled_projection_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 8,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": torch.randn(2, 4, 32),
            "pooled_projections": torch.randn(2, 32),
        },
    ),
    "Flux": Family(
        "diffusion",
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": torch.randn(2, 16, 4),
            "timestep": torch.tensor([0.3, 0.5]),
            "encoder_hidden_states": torch.randn(2, 4, 32),
            "pooled_projections": torch.randn(2, 32),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(4, 3),
        },
    ),
}


# ---- what is tried ---------------------------------------------------------------------------------------------------


class DenseFails(Exception):
    """The dense model cannot do it either, or there is nothing to do."""


def tried(family, folder, columns=None):
    """Try each column with fresh models: "same" to the last bit, "–", "refused: …", "differs: …" or "fails: …"."""
    found = {}
    for name in columns or COLUMNS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dense = family.make().eval()
            compressed = copy.deepcopy(dense)
            assert netweight.compress_(compressed).compressed
            try:
                different = COLUMNS[name](family, dense, compressed, folder)
                found[name] = f"differs: {different}" if different else "same"
            except DenseFails:
                found[name] = "–"
            except NetweightError as error:
                found[name] = f"refused: {error.reason}"
            except Exception as error:  # a row of the table, whatever it is
                found[name] = f"fails: {type(error).__name__}: {error}".splitlines()[0][:200]
    return found


def _dense(run):
    try:
        return run()
    except Exception as error:
        raise DenseFails from error


def _differing(theirs, ours, what):
    assert len(theirs) > 0
    equal = len(theirs) == len(ours) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        for a, b in zip(theirs, ours, strict=True)
    )
    return "" if equal else what


def _weights(theirs, ours):
    ours = dict(ours.named_parameters())
    names = [name for name, p in theirs.named_parameters() if not torch.equal(bits(p), bits(ours[name]))]
    return f"{len(names)} weights, such as {names[0]}" if names else ""


def _forward(family, dense, compressed, folder):
    with torch.no_grad():
        return _differing(family.call(dense), family.call(compressed), "outputs")


def _generate(family, dense, compressed, folder):
    if not getattr(dense, "can_generate", bool)():
        raise DenseFails
    theirs = _dense(lambda: family.generated(dense))
    return _differing([theirs], [family.generated(compressed)], "tokens")


def _step(family, model, optimizer, seed):
    loss = sum(output.float().square().mean() for output in family.call(model, seed))
    assert torch.isfinite(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _training(family, dense, compressed, folder):
    for model in (dense, compressed):
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for seed in range(3):
            _step(family, model, optimizer, seed)
    return _weights(dense, compressed)


def _saving(family, dense, compressed, folder):
    def kept(model):
        return {name for name, p in model.named_parameters() if isinstance(p, netweight.CompressedTensor)}

    dense.save_pretrained(f"{folder}/dense")  # loaded again, it may have buffers of another dtype
    compressed.save_pretrained(f"{folder}/net")
    dense, again = (type(dense).from_pretrained(f"{folder}/{f}", dtype=torch.bfloat16).eval() for f in ("dense", "net"))
    assert kept(again) >= kept(compressed) - set(getattr(dense, "_keys_to_ignore_on_save", None) or ()) != set()
    with torch.no_grad():
        return _weights(dense, again) or _differing(family.call(dense), family.call(again), "outputs")


def _lora(family, dense, compressed, folder):
    import peft

    head = getattr(dense, "get_output_embeddings", lambda: None)()
    layers = [
        name for name, m in dense.named_modules() if isinstance(m, (torch.nn.Linear, tf.Conv1D)) and m is not head
    ]
    settings = peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False)

    def adapted(model):
        torch.manual_seed(2)
        model = peft.get_peft_model(model, settings)
        with torch.no_grad():
            before = family.call(model)
        _step(family, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), 1)
        return model, before

    theirs, before = _dense(lambda: adapted(dense))
    ours, ours_before = adapted(compressed)
    if _differing(before, ours_before, "outputs") or _weights(theirs, ours):
        return "adapted outputs or trained adapters"
    theirs, ours = theirs.merge_and_unload(), ours.merge_and_unload()
    with torch.no_grad():
        return _weights(theirs, ours) or _differing(family.call(theirs), family.call(ours), "merged outputs")


def compiling(family, dense, compressed, folder, backend="aot_eager"):
    def run(model):
        torch.compiler.reset()
        compiled = torch.compile(model, backend=backend)
        with torch.no_grad():
            return family.call(compiled)

    theirs = _dense(lambda: run(dense))
    return _differing(theirs, run(compressed), "outputs")


COLUMNS = {
    "forward": _forward,
    "generate": _generate,
    "training": _training,
    "saving": _saving,
    "LoRA": _lora,
    "compiling": compiling,
}


# ---- the table -------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"
MARKS = "<!-- families: begin -->\n", "<!-- families: end -->\n"


def table(rows):
    """What was found, in Markdown: how many families of each kind are the same, and each that is not."""
    kinds = list(dict.fromkeys(family.kind for family in FAMILIES.values()))
    lines = ["| kind | families | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for kind in kinds:
        names = [name for name, family in FAMILIES.items() if family.kind == kind]
        cells = []
        for column in COLUMNS:
            found = [rows[name][column] for name in names if rows[name][column] != "–"]
            cells.append(f"{found.count('same')}/{len(found)}" if found else "–")
        lines.append(f"| {kind} | {', '.join(names)} | {' | '.join(cells)} |")
    rest = [
        f"- {name}, {column}: {found}"
        for name, row in rows.items()
        for column, found in row.items()
        if found not in ("same", "–")
    ]
    return "\n".join(lines + (["", *rest] if rest else [])) + "\n"


def in_page(rows, page):
    """The page with the table of these rows."""
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + table(rows) + MARKS[1] + rest.split(MARKS[1])[1]


def main(result):
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    diffusers.logging.set_verbosity_error()
    rows = {}
    for name, family in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = tried(family, folder)
        print(name, {column: found for column, found in rows[name].items() if found != "same"}, flush=True)
    found = {
        "benchmark": "families",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"transformers": tf.__version__, "diffusers": diffusers.__version__},
        "environment": environment.describe(),
        "rows": rows,
    }
    Path(result).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(in_page(rows, PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
