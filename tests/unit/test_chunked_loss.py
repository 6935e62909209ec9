"""The loss in chunks of tokens: transformers' own loss and gradients, without whole logits."""

import copy

import peft
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import netweight
from netweight.errors import Unsupported, UsageError

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(*, tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype)


def batch():
    ids = torch.randint(300, (2, 21), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100  # a prompt
    return {"input_ids": ids, "labels": labels}


def gradients(model, **more):
    model.zero_grad()
    output = model(**batch(), **more)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, None])
@pytest.mark.parametrize("items", [None, 50])
def test_loss_and_gradients_are_the_models_own(tied, tokens, items):
    model = llama(tied=tied)
    more = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    plain, wanted = gradients(model, **more)
    with netweight.chunk_loss(model, tokens=tokens):
        chunked, found = gradients(model, **more)
    torch.testing.assert_close(chunked.loss, plain.loss)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert chunked.logits is None
    assert "logits" not in chunked
    again, _ = gradients(model, **more)  # closed
    assert torch.equal(again.loss, plain.loss)
    assert again.logits is not None


def test_a_bias_of_the_head_and_a_factor_of_the_loss():
    model = llama()
    model.lm_head = torch.nn.Linear(32, 300)
    plain = model(**batch()).loss * 3
    plain.backward()
    wanted = model.lm_head.bias.grad.clone()
    model.zero_grad()
    with netweight.chunk_loss(model, tokens=5):
        (model(**batch()).loss * 3).backward()
    torch.testing.assert_close(model.lm_head.bias.grad, wanted, rtol=1e-4, atol=1e-6)


def test_bf16_rounds_the_gradient_of_the_head_once_for_each_chunk():
    exact, rounded = llama(), llama(dtype=torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    wanted = gradients(exact)[1]["lm_head.weight"]
    plain = gradients(rounded)[1]["lm_head.weight"]
    with netweight.chunk_loss(rounded, tokens=8):
        chunked = gradients(rounded)[1]["lm_head.weight"]

    def error(gradient):
        return (gradient.float() - wanted).norm() / wanted.norm()

    assert error(chunked) < 2 * error(plain) < 0.01


def test_autocast_calculates_as_the_model_would():
    model = llama()
    with torch.autocast("cpu", torch.bfloat16):
        plain, wanted = gradients(model)
        with netweight.chunk_loss(model, tokens=8):
            chunked, found = gradients(model)
    torch.testing.assert_close(chunked.loss, plain.loss, rtol=1e-3, atol=1e-3)
    for name, gradient in wanted.items():
        assert found[name].dtype == gradient.dtype == torch.float32
        assert (found[name] - gradient).norm() < 0.02 * gradient.norm()


@pytest.mark.parametrize("prefer", ["memory", "speed"])
def test_a_compressed_model_trains_as_the_dense_one(prefer):
    dense = llama(tied=True, dtype=torch.bfloat16)
    compressed = copy.deepcopy(dense)
    netweight.compress_(compressed, prefer=prefer)
    for model in (dense, compressed):
        optimizer = netweight.LayerwiseOptimizer(model, torch.optim.AdamW, lr=1e-3)
        with netweight.chunk_loss(model, tokens=9):
            for _ in range(3):
                model(**batch()).loss.backward()
        optimizer.close()
    netweight.decompress_(compressed)
    assert all(torch.equal(one, other) for one, other in zip(dense.parameters(), compressed.parameters(), strict=True))


def test_calls_without_labels_or_gradients_do_not_change():
    model = llama().eval()
    ids = batch()["input_ids"]
    plain, answer = model(ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)
    with netweight.chunk_loss(model, tokens=4):
        assert torch.equal(model(ids).logits, plain)
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), answer)
        with torch.no_grad():
            assert torch.equal(model(**batch()).logits, plain)
        as_tuple = model(**batch(), return_dict=False)
        assert torch.equal(as_tuple[1], plain)


def test_losses_of_routers_are_added_as_before():
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    )
    plain = model(**batch())
    with netweight.chunk_loss(model, tokens=6):
        chunked = model(**batch())
    torch.testing.assert_close(chunked.loss, plain.loss)
    assert chunked.loss > model(**batch(), output_router_logits=False).loss


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_adapters_of_peft_train_on_a_compressed_model():
    model = llama(dtype=torch.bfloat16)
    netweight.compress_(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)

    def trained():
        adapted.zero_grad()
        output = adapted(**batch())
        output.loss.backward()
        return output, [each.grad.clone() for each in adapted.parameters() if each.requires_grad]

    plain, wanted = trained()
    with netweight.chunk_loss(adapted, tokens=7):
        chunked, gradients_ = trained()
    assert chunked.logits is None
    torch.testing.assert_close(chunked.loss, plain.loss, rtol=1e-3, atol=1e-3)
    for one, other in zip(gradients_, wanted, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm()
    again = trained()[0]
    assert again.logits is not None


def test_an_error_in_a_call_leaves_the_next_call_right():
    model = llama()
    plain = model(**batch()).loss
    with netweight.chunk_loss(model, tokens=6):
        with pytest.raises(Exception, match=r".+"):
            model(input_ids=torch.tensor([[301]]), labels=torch.tensor([[1]]))
        assert model(batch()["input_ids"]).logits is not None
        torch.testing.assert_close(model(**batch()).loss, plain)


def test_what_is_refused():
    with pytest.raises(Unsupported, match="softcap"):
        netweight.chunk_loss(Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16)))
    with pytest.raises(Unsupported, match="does not have a linear output head"):
        netweight.chunk_loss(torch.nn.Linear(2, 2))
    model = llama()
    with pytest.raises(UsageError, match="tokens is 0"):
        netweight.chunk_loss(model, tokens=0)
    with netweight.chunk_loss(model), pytest.raises(UsageError, match="another chunk_loss"):
        netweight.chunk_loss(model)
    half = llama(dtype=torch.float16)
    with netweight.chunk_loss(half), pytest.raises(Unsupported, match="float16"):
        half(**batch())
    model.loss_function = lambda *arguments, **options: torch.zeros(())
    with pytest.raises(Unsupported, match="loss of its own"):
        netweight.chunk_loss(model)
    model = llama()
    with netweight.chunk_loss(model):
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        with pytest.raises(UsageError, match="once"):
            loss.backward()
