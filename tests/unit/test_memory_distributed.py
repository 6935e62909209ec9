"""Compressed weights in two processes: gradients reduced by DDP or in the hook, and what is refused by name."""

import copy
import os

import pytest
import torch
import warm
from models_under_test import Tied, differing, pair, same, stack
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

import netweight
from netweight import LayerwiseOptimizer, average_gradient
from netweight.errors import LayerwiseConflict, Unsupported

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")


def train(model, optimizer, ids, steps=3):
    for _ in range(steps):
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def equal_everywhere(model):
    mine = model.embed.weight.detach().clone()
    mine = mine.dense() if isinstance(mine, netweight.CompressedTensor) else mine
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    return torch.equal(*both)


def ordinary_optimizers_under_ddp(ids, rank):
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        dense, model = pair(Tied)
        if rank:  # DDP gives everyone the weights of the first
            with torch.no_grad():
                [p.mul_(2) for m in (dense, model) for p in m.parameters()]
        for m in (dense, model):
            wrapped = DistributedDataParallel(m, **options)
            train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01), ids)
        assert not differing(dense, model)
        assert equal_everywhere(model)
        assert sum(isinstance(p, netweight.CompressedTensor) for p in model.parameters()) == 3


def layer_by_layer_is_as_ddp(ids, rank):
    dense, model = pair(Tied)
    plain = copy.deepcopy(dense)
    wrapped = DistributedDataParallel(plain)
    train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01), ids)
    for m in (dense, model):
        train(m, LayerwiseOptimizer(m, torch.optim.AdamW, lr=0.01, reduce=average_gradient), ids)
        assert not differing(plain, m)
    assert equal_everywhere(model)


def unreduced_gradients_are_refused(ids, rank):
    _, model = pair(Tied)
    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    before = copy.deepcopy(model)
    with pytest.raises(LayerwiseConflict, match="unreduced gradients"):
        model(ids).sum().backward()
    assert not differing(model, before)


def layer_by_layer_within_ddp_is_refused(ids, rank):
    _, model = pair(Tied)
    wrapped = DistributedDataParallel(model)
    with pytest.raises(LayerwiseConflict, match=r"DistributedDataParallel.*reduce=average_gradient"):
        LayerwiseOptimizer(wrapped, torch.optim.SGD, lr=0.1)
    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1, reduce=average_gradient)
    before = copy.deepcopy(model)
    with pytest.raises(LayerwiseConflict, match=r"DistributedDataParallel.*reduce=average_gradient"):
        wrapped(ids)
    assert not differing(model, before)


def dense_gradients_are_reduced_before_the_update(ids, rank):
    """In the hook, layer by layer: what is reduced is dense, and its layer still has the values of the step before."""
    _, model = pair(Tied)
    before = {p: copy.deepcopy(p) for p in model.parameters()}
    reduced = []

    def reduce(gradient):
        assert type(gradient) is torch.Tensor
        waiting = [p for p in model.parameters() if p.grad is not None and p.grad.data_ptr() == gradient.data_ptr()]
        assert len(waiting) == 1
        assert same(waiting[0], before[waiting[0]])
        average_gradient(gradient)
        reduced.append(waiting[0])

    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1, reduce=reduce)
    model(ids).square().mean().backward()
    assert {id(p) for p in reduced} == {id(p) for p in model.parameters()}
    assert not any(same(p, before[p]) for p in model.parameters())


def tensors_that_know_nothing_of_compression_are_refused(ids, rank):
    """What is sharded by FSDP2 is in test_memory_sharding.py."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    dense, model = pair(stack)
    for shard, named in (
        (lambda: distribute_module(model, mesh), r"DTensor cannot distribute.*fully_shard"),
        (lambda: FullyShardedDataParallel(model), r"first version cannot shard.*fully_shard"),
    ):
        with pytest.raises(Unsupported, match=named):
            shard()
    x = torch.randn(2, 64)
    assert same(dense(x), model(x))
    assert all(not isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())


CHECKS = (
    ordinary_optimizers_under_ddp,
    layer_by_layer_is_as_ddp,
    unreduced_gradients_are_refused,
    layer_by_layer_within_ddp_is_refused,
    dense_gradients_are_reduced_before_the_update,
    tensors_that_know_nothing_of_compression_are_refused,
)


def _process(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ids = torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(rank))
    for check in CHECKS:
        check(ids, rank)
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path):
    """All checks in one pair of processes, since starting them takes longer than all checks; a traceback names one."""
    environment = dict(os.environ)
    warm.run_in_ranks(__file__, "_process", tmp_path)
    assert dict(os.environ) == environment
