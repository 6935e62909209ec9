"""Watching and changing outputs of a live model: what is taken, and that no hook stays."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from netweight.core.names import Units
from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.nn import capture, edit_outputs, intervene, scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.widen = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, states, fail=False):
        if fail:
            raise RuntimeError("inside forward")
        return self.widen(torch.tanh(self.mix(states))) + states, "beside"


class Stack(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.reentrant = reentrant

    def forward(self, states, fail=False):
        for block in self.blocks:
            if self.reentrant is None:
                states, _ = block(states, fail)
            else:
                states, _ = checkpoint(block, states, use_reentrant=self.reentrant)
        return states


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_outputs_are_those_of_the_latest_run_and_the_first_of_several():
    model, states = Stack(), torch.randn(3, 4)
    with capture(model, ["blocks.*", "**.widen"]) as outputs:
        model(torch.zeros(3, 4))
        model(states)
    assert list(outputs) == ["blocks.0", "blocks.0.widen", "blocks.1", "blocks.1.widen"]
    assert len(outputs) == 4
    torch.testing.assert_close(outputs["blocks.0"], outputs["blocks.0.widen"] + states)
    assert not any(output.requires_grad for output in outputs.values())
    with pytest.raises(NameNotFound, match="not watched"):
        outputs["blocks.0.mix"]


def test_gradients_flow_through_what_was_taken_with_and_without_checkpointing():
    states, found = torch.randn(3, 4, requires_grad=True), []
    for reentrant in (None, False):
        model = Stack(reentrant)
        with capture(model, "**.widen", gradients=True) as outputs:
            model(states)
            sum(output.square().sum() for output in outputs.values()).backward()
            assert all(output.requires_grad for output in outputs.values())  # the recomputed ones were not taken
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(found[0]) == 8
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    model = Stack(True)
    with pytest.raises(Unsupported, match="use_reentrant"), capture(model, "**.widen", gradients=True):
        model(states)


def test_no_hook_outlives_its_block():
    model = Stack()
    cases = [  # whether the model itself fails, and what is entered
        (True, lambda: capture(model, "**.mix")),
        (True, lambda: capture(model, ["**.mix", "**.missing"])),
        (True, lambda: edit_outputs(model, {"blocks.0": torch.tanh})),
        (True, lambda: edit_outputs(model, {"blocks.0": torch.tanh, "blocks.7": torch.tanh})),
        (False, lambda: edit_outputs(model, {"blocks.0": lambda _states: 1 / 0})),
        (True, lambda: intervene(model, scale(Units({"blocks.0.mix": [3]}), 0.0))),
        (False, lambda: intervene(model, {"blocks.0": torch.tanh}, {"blocks.7": torch.tanh})),
        (False, lambda: intervene(model, scale(Units({"blocks.0.mix": [4]}), 0.0))),
        (False, lambda: intervene(model, scale(Units({"blocks.0.mix": [3]}), 0.0), {"blocks.1": lambda _: 1 / 0})),
    ]
    for fail, case in cases:
        with pytest.raises((RuntimeError, UsageError, NameNotFound, ZeroDivisionError)), case():
            model(torch.zeros(1, 4), fail=fail)
        assert hooks(model) == 0


def test_what_did_not_run_or_is_no_tensor_is_named():
    class Words(nn.Module):
        def forward(self, states):
            return {"states": states}

    model = nn.ModuleDict({"words": Words()})
    with capture(model, "words") as outputs, pytest.raises(Unsupported, match=r"'words' returns a dict"):
        model["words"](torch.zeros(1))
    with pytest.raises(UsageError, match="has not run"):
        outputs["words"]


def test_an_edit_changes_what_follows_and_keeps_the_rest():
    model, states = Stack(), torch.randn(2, 4)
    with edit_outputs(model, {"blocks.0": torch.zeros_like}), capture(model, "blocks.1") as outputs:
        changed = model(states)
        assert model.blocks[0](states)[1] == "beside"
    torch.testing.assert_close(changed, model.blocks[1](torch.zeros(2, 4))[0])
    assert torch.equal(outputs["blocks.1"], changed.detach())
    with pytest.raises(NameNotFound, match="Nearest"), edit_outputs(model, {"block.0": torch.tanh}):
        pass


def test_scaled_neurons_are_those_of_a_model_whose_rows_are_scaled():
    model, other, states = Stack(), Stack(), torch.randn(2, 4)
    with torch.no_grad():
        other.blocks[0].mix.weight[[1, 3]] *= 0.5
        other.blocks[0].mix.bias[[1, 3]] *= 0.5
        other.blocks[1].widen.weight[0], other.blocks[1].widen.bias[0] = 0, 0
    before = model(states)
    halved, off = Units({"blocks.0.mix": [1, 3]}), Units({"blocks.1.widen": [0]})
    with intervene(model, scale(halved, 0.5), scale(off, 0.0)):
        torch.testing.assert_close(model(states), other(states))
    assert torch.equal(model(states), before)
    with pytest.raises(UsageError, match="4 neurons, and the set contains number 4"):
        with intervene(model, scale(Units({"blocks.0.mix": [4]}), 0.0)):
            model(states)


def test_the_first_of_several_edits_comes_first_and_a_convolution_has_its_neurons_in_dimension_1():
    model, states = nn.Sequential(nn.Conv2d(1, 3, 1)), torch.randn(2, 1, 5, 5)
    plain = model(states)
    with intervene(model, scale(Units({"0": [2]}), 0.0, dim=1), {"0": lambda output: output + 1}):
        changed = model(states)
    torch.testing.assert_close(changed[:, :2], plain[:, :2] + 1)
    assert torch.equal(changed[:, 2], torch.ones(2, 5, 5))


def test_captured_outputs_are_reduced_as_asked():
    model, states = Stack(), torch.randn(2, 5, 4)
    with capture(model, "**.mix", reduce="mean:tokens") as means, capture(model, "**.mix") as outputs:
        model(states)
    assert all(torch.equal(means[name], outputs[name].mean(1)) for name in outputs)
    with capture(model, "blocks.0.mix", reduce=torch.abs) as sizes:
        model(states)
    assert torch.equal(sizes["blocks.0.mix"], outputs["blocks.0.mix"].abs())
