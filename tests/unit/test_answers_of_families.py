"""Families with states, chunks or no cache of their own: a batch answers as each prompt alone, and scores alike."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is in the llm extra")

import transformers
from tiny_causal_families import differences, some_prompts, tiny_model

from netweight.attacks.refusal.measurement import next_tokens
from netweight.errors import Unsupported
from netweight.hf.generate_answers import generate_answers, hides_padding
from netweight.hf.load_language_model import check_outputs, positions_of

SIZES = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "reformer": {
        "hidden_size": 32, "attn_layers": ["local", "local"], "axial_pos_embds": False, "attention_head_size": 8,
        "num_attention_heads": 4, "feed_forward_size": 64, "max_position_embeddings": 128, "is_decoder": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_answers_as_each_prompt_alone(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    numbers = torch.randint(3, 64, (40,)).tolist()
    prompts = [tuple(numbers[:10] + numbers[10 : 10 + more]) for more in (1, 4, 9, 4, 20)]  # all begin alike
    alone = [generate_answers(model, [prompt], new_tokens=6)[0] for prompt in prompts]
    assert generate_answers(model, prompts, new_tokens=6, pad_id=0) == alone
    with torch.no_grad():
        scores = torch.stack([model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in prompts])
    torch.testing.assert_close(next_tokens(model, prompts, 0), scores, atol=1e-4, rtol=1e-4)


def test_a_family_without_a_limit_of_positions_has_none():
    config = transformers.XLNetConfig(vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=16)
    model = transformers.XLNetLMHeadModel(config)
    assert positions_of(model) is None
    assert not hides_padding(model)


@pytest.mark.parametrize(
    ("family", "changes", "uncached"),
    [
        ("bart", {}, False),  # learned positions, which padding on the left shifts
        ("roberta", {}, True),  # positions begin at another number with a cache
        ("moshi", {}, True),  # a window of the configuration cuts the cache and not the attention
        ("llama", {"sliding_window": 8}, True),
        ("mistral", {}, False),  # both have the window
    ],
)
def test_a_cache_and_padding_that_change_answers_are_not_used(family, changes, uncached, recwarn):
    model, prompts = tiny_model(family, **changes), some_prompts()
    answers = generate_answers(model, prompts, new_tokens=5, pad_id=0)
    assert differences(model, prompts, answers, 5) == []
    said = [each for each in recwarn if "answers otherwise with a key-value cache" in str(each.message)]
    assert len(said) == uncached
    with torch.no_grad():
        alone = torch.stack([model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1) for prompt in prompts])
    torch.testing.assert_close(next_tokens(model, prompts, 0), alone, atol=2e-3, rtol=1e-3)


def test_a_model_that_sees_later_tokens_is_refused():
    with pytest.raises(Unsupported, match="XLNetLMHeadModel predicts a token otherwise when other tokens follow it"):
        check_outputs(tiny_model("xlnet"))
    model = tiny_model("bert")
    check_outputs(model)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.is_decoder = False
        if hasattr(module, "is_causal"):
            module.is_causal = False
    with pytest.raises(Unsupported, match='"is_decoder": true'):
        check_outputs(model)
    check_outputs(tiny_model("qwen2").bfloat16())


def test_a_model_whose_rows_change_each_other_is_refused():
    model = tiny_model("llama")
    embed = model.get_input_embeddings()
    embed.register_forward_hook(
        lambda module, inputs, output: output - output.mean(0, keepdim=True) * (len(output) - 1)
    )
    with pytest.raises(Unsupported, match="when padding or another row is beside it"):
        check_outputs(model)
