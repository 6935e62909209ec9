"""The loss by blocks of rows of the head: that of whole logits, with neither head nor gradient whole."""

import copy

import pytest
import torch
from models_under_test import same
from tensor_sizes import Sizes
from transformers import LlamaConfig, LlamaForCausalLM

import netweight
from netweight import LayerwiseOptimizer
from netweight.errors import BadGradient, UsageError
from netweight.methods.compress.runtime import chunked_loss, loss_by_rows, tiled_updates

ROWS, WIDTH = 3000, 128  # two tiles of 262,144 numbers, one of them not whole


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(tiled_updates, "_NUMBERS", 1 << 18)
    monkeypatch.setattr(loss_by_rows, "_NUMBERS", 1 << 16)  # six blocks
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama(*, tied, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(ROWS) * 0.1)
    return model.to(dtype)


def batch(seed=1, tokens=21):
    ids = torch.randint(ROWS, (2, tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100  # a prompt
    return {"input_ids": ids, "labels": labels}


def gradients_of(model, *, factor=1.0, **inputs):
    """The loss and the gradients that a step of SGD with rate 1 subtracts, layer by layer and with `chunk_loss`."""
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = LayerwiseOptimizer(model, torch.optim.SGD, lr=1.0)
    with netweight.chunk_loss(model):
        loss = model(**inputs).loss
        (loss * factor).backward()
    optimizer.close()
    return loss, [old - each.detach() for old, each in zip(before, model.parameters(), strict=True)]


@pytest.fixture
def uses(monkeypatch):
    """How often the loss was calculated by rows."""
    calls, collector_for = [], loss_by_rows.collector_for

    def noting(weight, tokens):
        collector = collector_for(weight, tokens)
        calls.append(collector is not None)
        return collector

    monkeypatch.setattr(chunked_loss, "collector_for", noting)
    return calls


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_the_models_own(tied, bias, uses):
    model = llama(tied=tied, bias=bias)
    own = copy.deepcopy(model)
    wanted = own(**batch()).loss
    (wanted * 3).backward()
    loss, gradients = gradients_of(model, factor=3, **batch())
    assert uses == [True]
    torch.testing.assert_close(loss, wanted)
    for gradient, parameter in zip(gradients, own.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=2e-6)


def test_bf16_is_as_near_to_the_exact_gradient_as_whole_logits_are(uses):
    exact, rounded = llama(tied=False), llama(tied=False, dtype=torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    exact(**batch()).loss.backward()
    plain = copy.deepcopy(rounded)
    plain(**batch()).loss.backward()
    seen = {}
    part = loss_by_rows.ProductPart

    class Noting(part):
        def is_finite(self):
            seen["head"] = self.whole()
            return super().is_finite()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_by_rows, "ProductPart", Noting)
        handle = rounded.model.norm.weight.register_hook(lambda gradient: seen.update(norm=gradient.clone()))
        gradients_of(rounded, **batch())
        handle.remove()

    def error(gradient, wanted):
        return (gradient.float() - wanted).norm() / wanted.norm()

    for name, own, wanted in (
        ("head", plain.lm_head.weight.grad, exact.lm_head.weight.grad),
        ("norm", plain.model.norm.weight.grad, exact.model.norm.weight.grad),
    ):
        assert error(seen[name], wanted) < 1.1 * error(own, wanted) < 0.02
    assert uses == [True]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("states", ["dense", "compressed"])
def test_a_compressed_model_trains_as_the_dense_one(tied, states, uses):
    dense = llama(tied=tied, dtype=torch.bfloat16)
    compressed = copy.deepcopy(dense)
    netweight.compress_(compressed)
    optimizers = []
    for model, kept in ((dense, "dense"), (compressed, states)):
        optimizers.append(LayerwiseOptimizer(model, torch.optim.AdamW, lr=1e-3, states=kept))
        with netweight.chunk_loss(model):
            for step in range(3):
                model(**batch(step)).loss.backward()
    assert uses == [True] * 6
    for one, other in zip(dense.parameters(), compressed.parameters(), strict=True):
        assert same(one, other)
        for name, state in optimizers[0].state_of(one).items():
            assert same(state, optimizers[1].state_of(other)[name])


@pytest.mark.parametrize("tied", [False, True])
def test_neither_head_nor_gradient_nor_logits_exist_as_one_tensor(tied, uses):
    model = llama(tied=tied, dtype=torch.bfloat16)
    netweight.compress_(model)
    LayerwiseOptimizer(model, torch.optim.AdamW, lr=1e-3, states="compressed")
    inputs = batch(tokens=40)
    with netweight.chunk_loss(model):
        model(**inputs).loss.backward()
        with Sizes() as sizes:
            model(**inputs).loss.backward()
    assert sizes.largest <= 1 << 18  # a tile
    assert uses == [True] * 2


def test_autocast_calculates_as_the_model_would(uses):
    model = llama(tied=True)
    own = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = own(**batch()).loss
        wanted.backward()
        loss, gradients = gradients_of(model, **batch())
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-3)
    for gradient, parameter in zip(gradients, own.parameters(), strict=True):
        assert (gradient - parameter.grad).norm() < 0.02 * parameter.grad.norm()
    assert uses == [True]


@pytest.mark.parametrize("why", ["more tokens than columns", "clipping", "accumulation", "no optimizer", "fixed"])
def test_where_the_gradient_is_needed_whole_or_is_smaller_the_tokens_come_in_chunks(why, uses):
    dense = llama(tied=False, dtype=torch.bfloat16)
    model = copy.deepcopy(dense)
    if why == "fixed":
        netweight.compress_(model, prefer="speed")
    inputs = batch(tokens=70 if why == "more tokens than columns" else 21)
    options = {"clipping": {"clip_norm": 0.1}, "accumulation": {"accumulation_steps": 2}}.get(why, {})

    def closure():
        loss = model(**inputs).loss
        loss.backward()
        return loss

    optimizer = None if why == "no optimizer" else LayerwiseOptimizer(model, torch.optim.SGD, lr=1.0, **options)
    with netweight.chunk_loss(model):
        optimizer.step(closure) if why == "clipping" else closure()
    assert not any(uses)
    assert (why == "accumulation") == (why != "no optimizer" and model.lm_head.weight.grad is not None)


def test_gradients_of_the_head_for_whoever_asks(uses):
    model = llama(tied=False)
    (wanted,) = torch.autograd.grad(model(**batch()).loss, model.lm_head.weight)
    before = model.lm_head.weight.detach().clone()
    LayerwiseOptimizer(model, torch.optim.SGD, lr=1.0)
    with netweight.chunk_loss(model):
        (gradient,) = torch.autograd.grad(model(**batch()).loss, model.lm_head.weight)
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6)
    assert torch.equal(model.lm_head.weight, before)
    assert uses == [True]


@pytest.mark.parametrize("factor", [float("nan"), 1e38])
def test_a_gradient_that_is_not_finite_changes_nothing(factor, uses):
    model = llama(tied=False)
    before = [each.detach().clone() for each in model.parameters()]
    LayerwiseOptimizer(model, torch.optim.SGD, lr=1.0)
    with netweight.chunk_loss(model), pytest.raises(BadGradient, match=r"lm_head\.weight contains NaN"):
        (model(**batch()).loss * factor * factor).backward()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert uses == [True]


def test_a_loss_goes_backward_once():
    model = llama(tied=False)
    LayerwiseOptimizer(model, torch.optim.SGD, lr=1e-3)
    with netweight.chunk_loss(model):
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        with pytest.raises(UsageError, match="once"):
            loss.backward()
