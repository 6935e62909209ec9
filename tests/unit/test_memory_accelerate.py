"""Compressed models under accelerate's hooks, which move weights when their layers run, as far as a CPU shows it."""

import pytest
import torch
from models_under_test import Tied, differing, pair, same, stack

import netweight
from netweight import CompressedTensor
from netweight.errors import DenseOnly

accelerate = pytest.importorskip("accelerate")

IDS = torch.arange(20).reshape(4, 5)
ROWS = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))


def test_a_dispatched_model_keeps_its_compressed_weights():
    """What `device_map="auto"` does once it knows where layers go."""
    dense, model = pair(Tied)
    places = {name: "cpu" for name, _ in model.named_children()}
    accelerate.dispatch_model(model, device_map=places, main_device="cpu", force_hooks=True)
    assert sum(isinstance(parameter, CompressedTensor) for parameter in model.parameters()) == 3
    assert model.head.weight is model.embed.weight
    assert same(model(IDS), dense(IDS))
    accelerate.hooks.remove_hook_from_submodules(model)
    assert not differing(dense, model)


def test_offloaded_weights_come_for_their_layer_and_go():
    dense, model = pair(stack, torch.bfloat16)
    x = ROWS.bfloat16()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    seen = []
    forward = model[1]._old_forward
    model[1]._old_forward = lambda y: seen.append(type(model[1].weight)) or forward(y)
    with torch.no_grad():
        assert same(model(x), dense(x))
    assert seen == [CompressedTensor]
    assert all(parameter.is_meta for parameter in model.parameters())
    accelerate.hooks.remove_hook_from_submodules(model)
    assert all(isinstance(layer.weight, CompressedTensor) for layer in model)
    assert not differing(dense, model)


def test_disks_are_refused(tmp_path):
    _, model = pair(stack)
    with pytest.raises(DenseOnly):
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))


def test_addresses_tell_weights_apart_and_lead_nowhere():
    tensor, other = (netweight.CompressedTensor.of(torch.ones(64, 64)) for _ in range(2))
    assert tensor.data_ptr() == tensor.detach().data_ptr() != other.data_ptr()
    assert tensor.data_ptr() != tensor.payload.data_ptr()
