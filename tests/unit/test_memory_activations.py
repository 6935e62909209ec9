"""Activations kept compressed: the same gradients to the last bit, less memory, with and without checkpoints."""

import copy
import gc

import pytest
import torch
from models_under_test import differing, same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import netweight
from netweight import codec
from netweight.errors import Unsupported, UsageError


class Block(nn.Module):
    """Saves what real layers save: one tensor several times, a transposed one, bf16 made wider, products."""

    def __init__(self, width=128):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        wide = x.float()
        x = x + (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        turned = self.first(x).transpose(1, 2)
        scores = torch.softmax(turned @ self.second(x), -1)
        return x + nn.functional.silu(self.third(x)) * (x @ scores)


class Stack(nn.Module):
    def __init__(self, run, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.run = run

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x


def plain(block, x):
    return block(x)


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def checkpointed_compressed(block, x):
    return checkpoint(block, x, use_reentrant=False, context_fn=netweight.compress_recomputed)


def gradients(model, x, *, compressed, retain=False):
    model.zero_grad()
    x = x.clone().requires_grad_()
    if compressed:
        with netweight.compress_activations():
            loss = model(x).float().square().mean()
    else:
        loss = model(x).float().square().mean()
    if retain:
        loss.backward(retain_graph=True)
    loss.backward()
    return loss, x.grad


def inputs(dtype):
    return torch.randn(4, 96, 128, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("run", [plain, checkpointed, checkpointed_compressed])
@pytest.mark.parametrize("retain", [False, True])
def test_gradients_are_the_same_to_the_last_bit(run, dtype, retain):
    torch.manual_seed(1)
    model = Stack(plain).to(dtype)
    twin = copy.deepcopy(model)
    twin.run = run
    expected = gradients(model, inputs(dtype), compressed=False, retain=retain)
    for one, other in zip(expected, gradients(twin, inputs(dtype), compressed=True, retain=retain), strict=True):
        assert same(one, other)
    assert not differing(model, twin, lambda parameter: parameter.grad)


def test_with_compressed_weights_and_layerwise_steps():
    torch.manual_seed(1)
    dense = Stack(checkpointed).bfloat16()
    model = copy.deepcopy(dense)
    model.run = checkpointed_compressed
    netweight.compress_(model)
    optimizers = [netweight.LayerwiseOptimizer(m, torch.optim.AdamW, lr=1e-3) for m in (dense, model)]
    for _ in range(3):
        assert same(
            gradients(dense, inputs(torch.bfloat16), compressed=False)[0],
            gradients(model, inputs(torch.bfloat16), compressed=True)[0],
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not differing(dense, model)


def alive_after_forward(monkeypatch, run, *, compressed):
    """Bytes that the forward pass leaves alive for the backward pass, and how many tensors were encoded."""
    torch.manual_seed(1)
    model = Stack(run, blocks=16).bfloat16()
    encoded, encode = [], codec.encode
    monkeypatch.setattr(
        codec, "encode", lambda tensor, **kwargs: encoded.append(tensor.nbytes) or encode(tensor, **kwargs)
    )
    storages = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return result

    x = inputs(torch.bfloat16).requires_grad_()
    with Watch():
        if compressed:
            with netweight.compress_activations():
                loss = model(x).float().square().mean()
        else:
            loss = model(x).float().square().mean()
        gc.collect()
        alive = sum(size for reference, size in storages.values() if not reference.expired())
        loss.backward()
    return alive, len(encoded)


@pytest.mark.parametrize(("run", "share"), [(plain, 0.8), (checkpointed, 0.8)])
def test_less_memory_is_alive_between_the_passes(monkeypatch, run, share):
    dense, none = alive_after_forward(monkeypatch, run, compressed=False)
    packed, encoded = alive_after_forward(monkeypatch, run, compressed=True)
    assert none == 0
    assert encoded > 0
    assert packed < share * dense


def test_one_tensor_saved_three_times_is_encoded_once(monkeypatch):
    encoded, encode = [], codec.encode
    monkeypatch.setattr(codec, "encode", lambda tensor, **kwargs: encoded.append(1) or encode(tensor, **kwargs))
    layers = [nn.Linear(256, 256).bfloat16() for _ in range(3)]
    x = inputs(torch.bfloat16).reshape(-1, 256).requires_grad_() * 1.5
    with netweight.compress_activations():
        ys = [layer(x) for layer in layers]
        loss = sum(y.exp().mean() for y in ys)  # three more tensors, of which the last waits
    loss.backward()
    assert len(encoded) == 3


def test_values_are_those_of_the_time_of_saving():
    x = inputs(torch.bfloat16).requires_grad_()
    with netweight.compress_activations():
        y = x * 1
        z = y.square().sum() + (x * 2).square().sum()  # the second pushes the first out of the waiting line
        with torch.no_grad():
            y.zero_()
    z.backward()
    assert torch.equal(x.grad, (2 * x.detach()) + (8 * x.detach()))


def test_a_change_in_place_is_refused_as_without_compression():
    """The newest tensor waits as it is, so a change of it would be a change of the gradient."""
    x = inputs(torch.bfloat16).requires_grad_()
    with netweight.compress_activations():
        y = x * 1
        z = y.square().sum()
        with torch.no_grad():
            y.zero_()
    with pytest.raises(UsageError, match="changed in place after it was saved"):
        z.backward()


def test_a_long_block_remembers_nothing_of_steps_that_are_over():
    x = inputs(torch.bfloat16).requires_grad_()

    def alive():
        gc.collect()
        return sum(type(thing) is StorageWeakRef for thing in gc.get_objects())

    before = alive()
    with netweight.compress_activations():
        for _ in range(20):
            (x * 1.5).exp().square().sum().backward()
        assert alive() <= before + 1


def test_noise_small_tensors_and_parameters_are_left_alone(monkeypatch):
    encoded, encode = [], codec.encode
    monkeypatch.setattr(codec, "encode", lambda tensor, **kwargs: encoded.append(1) or encode(tensor, **kwargs))
    noise = torch.randint(0, 2**15, (512, 512), dtype=torch.int16).view(torch.float16).nan_to_num().requires_grad_()
    small = torch.randn(8, 8).bfloat16().requires_grad_()
    weight = nn.Parameter(torch.randn(512, 512).bfloat16())
    with netweight.compress_activations():
        loss = small.exp().sum() + weight.square().sum() + torch.randn(512, 512).requires_grad_().exp().sum()
        assert not encoded
        y = (noise * 1).abs().float().mean() + (noise * 1).abs().float().mean()
    (loss + y).backward()
    assert torch.isfinite(small.grad).all()


def test_outside_of_a_checkpoint_it_says_where_it_belongs():
    first, second = netweight.compress_recomputed()
    for context in (first, second):
        with pytest.raises(Unsupported, match="use_reentrant=False"), context:
            pass
