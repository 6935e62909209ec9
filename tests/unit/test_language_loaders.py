"""Folders that are not decoders with a tokenizer are refused in one line, by name; odd tokenizers are told apart."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="transformers is in the llm extra")

import chat_models
import transformers

from netweight.errors import NetweightError, UsageError
from netweight.hf.language_model_folder import check_language_model
from netweight.hf.load_language_model import check_outputs, check_tokens, load_causal_lm
from netweight.hf.load_tokenizer import load_tokenizer


def save(folder, kind):
    """Write a tiny model of a kind, with a tokenizer."""
    small = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    if kind == "t5":
        config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        name = {"bert": "BertModel", "masked": "BertForMaskedLM", "bare": "BertForSequenceClassification"}[kind]
        model = getattr(transformers, name)(transformers.BertConfig(**small, intermediate_size=32))
    model.save_pretrained(folder)
    chat_models.chatml().save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5", "T5ForConditionalGeneration, an encoder-decoder"),
        ("bert", "BertModel, which does not generate text"),
        ("masked", "BertForMaskedLM, which does not generate text"),
        ("bare", "BertForSequenceClassification, which does not generate text"),
    ],
)
def test_other_models_are_refused_by_name_in_one_line(tmp_path, kind, reason):
    save(tmp_path, kind)
    with pytest.raises(UsageError, match=reason) as error:
        load_causal_lm(tmp_path)
    assert len(str(error.value)) < 400


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    chat_models.llama(chat_models.chatml()).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"with its tokenizer: .* Copy the tokenizer's files"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt", "gpt_neox", "gemma3_text", "mistral"])
def test_an_empty_tokenizer_that_transformers_makes_up_for_missing_files_is_refused(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UsageError, match="tokenizer") as error:
        load_tokenizer(tmp_path)
    assert "Copy the tokenizer's files" in str(error.value)


def test_a_tokenizer_of_bytes_needs_no_vocabulary_file(tmp_path):
    tokens = transformers.ByT5Tokenizer()
    chat_models.llama(tokens, rows=len(tokens)).save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    assert {each.name for each in tmp_path.glob("*token*")} <= {"tokenizer_config.json", "added_tokens.json"}
    check_language_model(tmp_path)
    model, tokenizer = load_causal_lm(tmp_path)
    check_tokens(model, tokenizer, [tokenizer("Größe")["input_ids"]])
    assert len(tokenizer("Größe", add_special_tokens=False)["input_ids"]) == 7


def test_a_padding_token_without_a_row_is_replaced_and_other_new_tokens_are_refused_where_rows_hold_them(tmp_path):
    tokens = chat_models.tokenizer(None, ["<s>", "</s>"], bos="<s>", eos="</s>")
    model = chat_models.llama(tokens, rows=len(tokens))
    tokens.add_special_tokens({"pad_token": "[PAD]"})
    tokens.add_tokens(["bomb"])
    model.save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    model, tokens = load_causal_lm(tmp_path)
    assert tokens.pad_token == "</s>"
    check_tokens(model, tokens, [tokens("make a cake")["input_ids"]])
    with pytest.raises(UsageError, match="'bomb', which were added to the tokenizer"):
        check_tokens(model, tokens, [tokens("make a bomb")["input_ids"]])


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder of a tiny chat model with random weights."""
    folder = tmp_path_factory.mktemp("sound")
    tokens = chat_models.chatml()
    chat_models.llama(tokens).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def changed(source, target, *, config=None, weights=None, files=None):
    """Copy a folder with other settings, weights and files; a file of None is removed."""
    shutil.copytree(source, target)
    (target / "config.json").write_text(json.dumps(json.loads((target / "config.json").read_text()) | (config or {})))
    if weights is not None:
        file = target / "model.safetensors"
        save_file(weights(load_file(file)), file, {"format": "pt"})
    for name, content in (files or {}).items():
        (target / name).unlink(missing_ok=True)
        if content is not None:
            (target / name).write_bytes(content)
    return target


LAYER = "model.layers.1.mlp.down_proj.weight"
CHANGES = {
    "a weight is missing": (
        {"weights": lambda all: {n: w for n, w in all.items() if n != LAYER}}, f"lack the weight '{LAYER}'",
    ),
    "the head is missing": ({"config": {"tie_word_embeddings": False}}, "lack the weight 'lm_head.weight'"),
    "names of a compiled model": (
        {"weights": lambda all: {f"_orig_mod.{n}": w for n, w in all.items()}},
        "lack the weight .* and 29 others, .*'_orig_mod.model.embed_tokens.weight' and others instead",
    ),
    "another shape": (
        {"weights": lambda all: all | {LAYER: torch.zeros(3, 4)}}, rf"'{LAYER}' .*shape \(3, 4\).*\(64, 128\)",
    ),
    "a shard that is not there": (
        {"files": {"model.safetensors.index.json": b'{"weight_map": {"a": "model-1-of-2.safetensors"}}'}},
        "is incomplete: it lacks model-1-of-2.safetensors",
    ),
    "one of two shards, without an index": (
        {"files": {"model-00001-of-00002.safetensors": bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}"}},
        "is incomplete: it lacks model-00002-of-00002.safetensors",
    ),
    "a pointer in place of weights": (
        {"files": {"model.safetensors": b"version https://git-lfs"}}, "is a Git LFS pointer",
    ),
    "a number as text": ({"config": {"num_hidden_layers": "three"}}, "num_hidden_layers"),
    "heads that do not fit": ({"config": {"num_attention_heads": 5}}, "attention heads"),
    "code of its own": (
        {"config": {"model_type": "frob", "auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"}}},
        "needs program code beside its weights, and such code is not run here",
    ),
    "quantized by others": (
        {"config": {"quantization_config": {"quant_method": "bitsandbytes"}}}, r"is quantized \(bitsandbytes\)",
    ),
    "an adapter": ({"files": {"config.json": None, "adapter_config.json": b"{}"}}, "contains an adapter .*space bake"),
    "an adapter beside": ({"files": {"adapter_config.json": b"{}"}}, "adapter .*beside the files of a model"),
    "GGUF": ({"files": {"config.json": None, "q.gguf": b"GGUF"}}, r"q\.gguf is a GGUF file"),
    "a damaged generation_config": (
        {"files": {"generation_config.json": b"{"}}, r"generation_config\.json cannot be read",
    ),
    "a damaged tokenizer": ({"files": {"tokenizer.json": b"{"}}, r"tokenizer\.json cannot be read"),
    "a tokenizer without vocabulary": ({"files": {"tokenizer.json": b'{"version": "1.0"}'}}, "cannot be opened as a"),
    "the settings of a tokenizer alone": ({"files": {"tokenizer.json": None}}, "with its tokenizer: "),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_damaged_and_foreign_folders_are_refused_by_name_and_no_weight_is_drawn(sound, tmp_path, what):
    change, reason = CHANGES[what]
    with pytest.raises(NetweightError, match=reason) as error:
        load_causal_lm(changed(sound, tmp_path / "odd", **change))
    assert error.value.cure
    assert len(str(error.value)) < 900


def test_unused_tensors_are_named(sound, tmp_path):
    folder = changed(sound, tmp_path / "odd", weights=lambda all: all | {"model.layers.9.w": torch.zeros(2)})
    with pytest.warns(UserWarning, match=r"contains 1 tensors .*'model\.layers\.9\.w'"):
        load_causal_lm(folder)


Q_BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize("name", [Q_BIAS, "model.layers.0.mlp.up_proj.weight_scale", f"{LAYER[:-7]}.lora_A.weight"])
def test_a_tensor_of_a_layer_that_the_configuration_does_not_name_is_not_left_out(sound, tmp_path, name):
    folder = changed(sound, tmp_path / "odd", weights=lambda all: all | {name: torch.ones(64)})
    refused = pytest.raises(UsageError, match=f"contain '{name}', a part of the layer .*config")
    with refused, pytest.warns(UserWarning, match="contains 1 tensors"):
        load_causal_lm(folder)


def test_a_bias_of_zeros_may_be_left_out(sound, tmp_path):
    folder = changed(sound, tmp_path / "odd", weights=lambda all: all | {Q_BIAS: torch.zeros(64)})
    with pytest.warns(UserWarning, match="contains 1 tensors"):
        load_causal_lm(folder)


def test_a_tied_output_layer_that_is_stored_otherwise_is_refused_and_a_copy_is_not(sound, tmp_path):
    def with_head(change):
        return lambda all: all | {"lm_head.weight": change(all["model.embed_tokens.weight"].clone())}

    load_causal_lm(changed(sound, tmp_path / "copy", weights=with_head(lambda head: head)))
    other = changed(sound, tmp_path / "other", weights=with_head(lambda head: head + 1))
    with pytest.raises(UsageError, match=r'ties the output layer .*"tie_word_embeddings": false'):
        load_causal_lm(other)
    config = json.loads((other / "config.json").read_text()) | {"tie_word_embeddings": False}
    (other / "config.json").write_text(json.dumps(config))
    load_causal_lm(other)


def test_a_kernel_of_attention_that_is_not_installed_is_replaced(sound, tmp_path):
    named = changed(sound, tmp_path / "odd", config={"attn_implementation": "flash_attention_2"})
    ids = torch.arange(9)[None]
    assert torch.equal(load_causal_lm(named)[0](ids).logits, load_causal_lm(sound)[0](ids).logits)


def test_code_beside_the_weights_of_a_known_family_is_named_and_not_run(sound, tmp_path):
    own = {"AutoConfig": "configuration_x.A", "AutoModelForCausalLM": "modeling_x.B"}
    files = {f"{each}_x.py": b"raise SystemExit" for each in ("configuration", "modeling")}
    with pytest.warns(UserWarning, match=r"code of its own .*auto_map.*LlamaForCausalLM of transformers"):
        load_causal_lm(changed(sound, tmp_path / "odd", config={"auto_map": own}, files=files))


def test_an_end_without_a_row_does_not_fill_short_rows(sound, tmp_path):
    folder = changed(sound, tmp_path / "odd")
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    tokens.add_special_tokens({"eos_token": "<|new_end|>", "pad_token": "<|new_pad|>"})
    tokens.save_pretrained(folder)
    model, tokens = load_causal_lm(folder)
    assert tokens.pad_token_id == 0
    assert tokens.eos_token_id >= model.config.vocab_size


def test_a_tokenizer_without_padding_and_end_takes_those_of_the_model(sound, tmp_path):
    settings = json.loads((sound / "tokenizer_config.json").read_text()) | {"eos_token": None, "pad_token": None}
    files = {"tokenizer_config.json": json.dumps(settings).encode()}
    _, tokens = load_causal_lm(changed(sound, tmp_path / "odd", files=files))
    assert tokens.eos_token == tokens.pad_token == "<|im_end|>"
    _, tokens = load_causal_lm(
        changed(
            sound, tmp_path / "none", files={**files, "generation_config.json": None}, config={"eos_token_id": None}
        )
    )
    assert tokens.eos_token is None
    assert tokens.pad_token_id == 0


def test_predictions_that_overflow_are_refused_with_a_wider_type_as_the_cure(sound, tmp_path):
    def overflow(weights):
        return {
            name: (torch.full_like(w, 60000.0) if name == "model.norm.weight" else w).half()
            for name, w in weights.items()
        }

    model, _ = load_causal_lm(changed(sound, tmp_path / "odd", weights=overflow, config={"dtype": "float16"}))
    check_outputs(load_causal_lm(sound)[0])
    with pytest.raises(UsageError, match=r"NaN or infinite; it is computed in float16.*bfloat16"):
        check_outputs(model)


def test_the_template_of_a_processor_is_the_tokenizers(sound, tmp_path):
    template = json.dumps({"chat_template": chat_models.CHATML}).encode()
    files = {"chat_template.jinja": None, "chat_template.json": template}
    folder = changed(sound, tmp_path / "processor", files=files)
    assert load_causal_lm(folder)[1].chat_template == chat_models.CHATML
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(UsageError, match=r"chat_template\.json cannot be read"):
        load_causal_lm(folder)


@pytest.mark.parametrize("device", ["gpu0", "", pytest.param("cuda:99")])
def test_a_device_that_is_not_there_is_named_before_a_model_is_opened(sound, device):
    with pytest.raises(UsageError, match=f"The device '{device}' cannot be used: .*--device cpu"):
        load_causal_lm(sound, device=device)
