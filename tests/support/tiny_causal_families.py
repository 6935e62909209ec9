"""Tiny models of all families of transformers that write text, made by shrinking the sizes of their configurations."""

import dataclasses
import inspect

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 96
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MOST_WEIGHTS = 20_000_000


def _all(size, names):
    return dict.fromkeys(names.split(), size)


# The names that families give to their sizes. Windows and chunks are shorter than the prompts of tests.
SIZES = {
    **_all(VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    **_all(32, "hidden_size d_model n_embd emb_dim dim dim_model word_embed_proj_dim embedding_size lru_width"),
    **_all(64, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff dim_ff n_inner dff feed_forward_size"),
    **_all(64, "ffn_hidden_size d_inner intermediate_size_mlp shared_intermediate_size dense_intermediate_size"),
    **_all(64, "block_ff_dim mamba_d_ssm"),
    **_all(16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    **_all(4, "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers"),
    **_all(4, "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads num_heads"),
    **_all(4, "attention_heads linear_num_value_heads num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_all(4, "qk_rope_head_dim rotary_dim laurel_rank mamba_dt_rank time_step_rank"),
    **_all(2, "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k"),
    **_all(2, "top_k_experts n_mamba_heads linear_num_key_heads index_n_heads"),
    **_all(1, "n_group topk_group n_shared_experts moe_num_shared_experts mamba_n_groups n_groups mamba_ngroups"),
    **_all(1, "first_k_dense_replace num_dense_layers"),
    **_all(8, "head_dim attention_head_size kv_channels global_head_dim dim_head q_lora_rank kv_lora_rank"),
    **_all(8, "qk_nope_head_dim v_head_dim qk_head_dim sliding_window attention_window_size window_size"),
    **_all(8, "sliding_window_size attention_chunk_size local_attention state_size mamba_d_state ssm_state_size"),
    **_all(8, "mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim mamba_headdim chunk_size mamba_chunk_size"),
    **_all(8, "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input index_topk index_head_dim"),
    **_all(128, "max_position_embeddings n_positions n_ctx max_target_positions context_length max_seq_len"),
    **_all(128, "max_sequence_length"),
    "num_kv_shared_layers": 0,
    "conv_L_cache": 3,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SLIDING = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
# The scores by which a small indexer chooses the tokens to see are often equal, and then the choice is arbitrary. So it
# sees all.
_INDEXED = {"index_topk": 64}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
# Sizes that depend on each other, or that have no default.
CHANGES = {
    "axk2": _INDEXED,
    "bailing_hybrid": _MIXED,
    "bamba": {"attn_layer_indices": [1, 3], "mamba_expand": 2},
    "deepseek_v2": _EXPERTS,
    "deepseek_v32": _INDEXED,
    "dots1": _EXPERTS,
    "gemma3_text": _SLIDING,
    "gemma3n_text": {**_SLIDING, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**_SLIDING, "head_dim": 8, "global_head_dim": 8},
    "glm_moe_dsa": _INDEXED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_expand": 2},
    "hy_v4": _INDEXED,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": _MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "minicpm3": {"head_dim": 4},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen3_moe": {"head_dim": 8},
    "reformer": {
        "attn_layers": ["local", "local"], "axial_pos_embds": False, "num_hidden_layers": 2,
        "local_attn_chunk_length": 8,
    },
    "youtu": {"head_dim": 4},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_expand": 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def _names(kind):
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return (fields | set(inspect.signature(kind.__init__).parameters)) - {"self", "kwargs"}


def tiny_config(kind, changes=None):
    """A configuration of a class with small sizes; those of its parts likewise."""
    default, sizes = kind(), {}
    parts = getattr(kind, "sub_configs", None) or {}
    for name in _names(kind) - set(parts):
        try:
            value = getattr(default, name, None)
        except Exception:  # a size that may differ from layer to layer
            continue
        if name in IDS:
            sizes[name] = IDS[name]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            sizes[name] = SIZES[name]
    if {"qk_rope_head_dim", "head_dim"} <= sizes.keys():
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    if {"kv_lora_rank", "num_key_value_heads"} <= sizes.keys():  # each head has keys of its own
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name in parts:
        if isinstance(part := getattr(default, name, None), transformers.PreTrainedConfig):
            sizes[name] = tiny_config(type(part)).to_dict()
    return kind(**{**sizes, **(changes or {})})


def tiny_model(family, **changes):
    """A model of a family with random weights that make its predictions differ clearly."""
    config = tiny_config(CONFIG_MAPPING[family], {**CHANGES.get(family, {}), **changes})
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert sum(weight.numel() for weight in model.parameters()) < MOST_WEIGHTS, "too large"
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    return model


def some_prompts():
    """Prompts of several lengths with a common beginning, most of them longer than windows and chunks."""
    numbers = torch.randint(3, VOCABULARY, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    return [tuple(numbers[:10] + numbers[12 : 12 + more]) for more in (1, 4, 9, 4, 25)]


@torch.no_grad()
def plain_answer(model, prompt, new_tokens):
    """The likeliest tokens one by one, of the prompt alone, without a cache; and the lead of each over the next."""
    ids, leads = torch.tensor([prompt]), []
    for _ in range(new_tokens):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1].float()
        first, second = logits.topk(2).values.tolist()
        leads.append(first - second)
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    return ids[0, len(prompt) :].tolist(), leads


def differences(model, prompts, answers, new_tokens):
    """Rows whose answer differs from the plain one at a token that leads clearly."""
    found = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens, leads = plain_answer(model, prompt, new_tokens)
        place = next((place for place, (a, b) in enumerate(zip(tokens, answer, strict=True)) if a != b), None)
        if place is not None and leads[place] > 0.02:
            found.append((row, place, leads[place]))
    return found
