"""The ledger of a training step: what adds up, what belongs where, and that nothing is forgotten or kept."""

import os
import sys

import ledger_under_test
import pytest
import torch
from models_under_test import Tied, pair, stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import netweight
from netweight.errors import NetweightError, UsageError
from netweight_experiments.memory import PARTS, TensorLedger, in_fresh_process

IDS = torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(5))
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what a process holds")


def peak_of(model, optimizer, step):
    ledger = TensorLedger(model, optimizer)
    with ledger:
        step()
    assert sum(ledger.peak.parts.values()) == ledger.peak.nbytes
    assert tuple(ledger.peak.parts) == PARTS
    return ledger.peak


def nbytes(model):
    return sum(p.nbytes for p in model.parameters())


def test_tensors_count_while_they_live_and_only_once():
    ledger = TensorLedger(nn.Identity())
    with ledger:
        first = torch.zeros(1000)
        second = first.view(10, 100)[3:]  # the same memory
        del first
        third = torch.zeros(500) + second.sum()
        del second
        torch.zeros(900)
    assert ledger.peak.nbytes == 4000 + 2000 + 2000 + 4  # two terms of the sum, and the first of them
    assert third.numel() == 500
    before = ledger.peak
    with ledger:
        torch.zeros(1000)
    assert ledger.peak == before


def test_plain_training_holds_every_gradient_and_state():
    model = stack(6, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(2, 128)

    def step():
        model(x).square().mean().backward()
        optimizer.step()

    step()
    peak = peak_of(model, optimizer, step)
    assert peak.parts["weights"] == peak.parts["gradients"] == nbytes(model)
    steps = len(optimizer.state) * 4
    assert peak.parts["optimizer state"] == 2 * nbytes(model) + steps
    assert peak.parts["decoded weights"] == 0


@pytest.mark.parametrize("which", [0, 1], ids=["dense", "compressed"])
def test_layer_by_layer_training_holds_one_gradient(which):
    model = pair(lambda: stack(6, 128), torch.bfloat16)[which]
    optimizer = netweight.LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(2, 128).bfloat16()
    peak = peak_of(model, optimizer, lambda: model(x).square().mean().backward())
    layer = 128 * 128 * 2
    assert peak.parts["weights"] == netweight.memory_footprint(model)
    assert peak.parts["gradients"] <= layer
    assert peak.parts["optimizer state"] == 0
    assert peak.parts["decoded weights"] <= (2 * layer if which else 0)
    assert peak.nbytes < netweight.memory_footprint(model) + 4 * layer


class Deep(nn.Module):
    """Layers whose activations are large, with checkpointing or without."""

    def __init__(self, again):
        super().__init__()
        self.layers, self.again = stack(8, 32), again

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False).relu() if self.again else layer(x).relu()
        return x


@pytest.mark.parametrize("which", [0, 1], ids=["dense", "compressed"])
def test_activations_are_told_from_the_rest_and_checkpointing_makes_them_fewer(which):
    x = torch.randn(4096, 32)

    def peak(again):
        model = pair(lambda: Deep(again))[which]
        return peak_of(model, None, lambda: model(x).mean().backward())

    kept, again = peak(False), peak(True)
    assert kept.parts["activations"] >= 8 * x.nbytes
    assert again.parts["activations"] <= kept.parts["activations"]
    assert kept.parts["other"] < 4 * x.nbytes
    assert kept.parts["weights"] < x.nbytes


def test_memory_of_a_compressed_payload_is_seen_wherever_it_lies():
    _, model = pair(Tied)
    optimizer = netweight.LayerwiseOptimizer(model, torch.optim.AdamW, lr=0.1)
    step = lambda: model(IDS).square().mean().backward()  # noqa: E731
    step()  # payloads outgrow their capacity and move
    peak = peak_of(model, optimizer, step)
    assert peak.parts["weights"] == netweight.memory_footprint(model)
    assert peak.parts["optimizer state"] >= 2 * sum(p.numel() * 4 for p in model.parameters())


@LINUX
def test_private_memory_is_sampled_in_a_fresh_process():
    found = in_fresh_process(ledger_under_test.allocate, [8, 96, 8])
    assert 95 < found["peak"] < 110
    assert found["threads"] == 1


def test_a_process_that_fails_says_why():
    with pytest.raises(NetweightError, match=r"ledger_under_test:fail failed: ValueError: no luck"):
        in_fresh_process(ledger_under_test.fail, "luck")
    with pytest.raises(UsageError, match="cannot be imported"):
        in_fresh_process(lambda argument: os.getpid(), None)
