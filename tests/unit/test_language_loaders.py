"""Folders that are not decoders with a tokenizer are refused in one line, by name; odd tokenizers are told apart."""

import pytest

pytest.importorskip("transformers", reason="transformers is in the llm extra")

import chat_models
import transformers

from netweight.errors import UsageError
from netweight.hf.load_language_model import check_tokens, load_causal_lm


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
        ("bert", "BertModel, which generates no text"),
        ("masked", "BertForMaskedLM, which generates no text"),
        ("bare", "BertForSequenceClassification, which generates no text"),
    ],
)
def test_other_models_are_refused_by_name_in_one_line(tmp_path, kind, reason):
    save(tmp_path, kind)
    with pytest.raises(UsageError, match=reason) as error:
        load_causal_lm(tmp_path)
    assert len(str(error.value)) < 400


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    chat_models.llama(chat_models.chatml()).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"contains no tokenizer\. Copy the model's tokenizer"):
        load_causal_lm(tmp_path)


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
    with pytest.raises(UsageError, match="'bomb', added to the tokenizer"):
        check_tokens(model, tokens, [tokens("make a bomb")["input_ids"]])
