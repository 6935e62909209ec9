"""Adapters in a live model do what merging them into its weights does, sample by sample, and leave nothing behind."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.nn import Adapter, AdapterStack, LowRank, applied, linear_layers, merge_

SHAPES = {"net.one": (4, 5), "net.two": (3, 4)}
few = settings(max_examples=30, deadline=None)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential()
        model.add_module("one", nn.Linear(5, 4))
        model.add_module("between", nn.Tanh())
        model.add_module("two", nn.Linear(4, 3))
    return model


def drawn(seed, rank):
    noise = torch.Generator().manual_seed(seed)
    return Adapter(
        {
            name: LowRank(torch.randn(rank, columns, generator=noise), torch.randn(rows, rank, generator=noise), 0.5)
            for name, (rows, columns) in SHAPES.items()
        }
    )


def merged(adapter):
    model = network()
    merge_(model, adapter, component="net")
    return model


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@few
@given(
    ranks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    picks=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    even=st.booleans(), copies=st.integers(1, 2), flat=st.booleans(), seed=st.integers(0, 2**31), dense=st.booleans(),
)  # fmt: skip
def test_each_sample_runs_with_its_own_adapter(ranks, picks, even, copies, flat, seed, dense):
    adapters = [drawn(seed + number, rank) for number, rank in enumerate(ranks)]
    groups = torch.tensor([pick % len(ranks) for pick in picks])
    if even:
        groups = torch.arange(len(ranks)).repeat_interleave(2)
    inputs = torch.randn(copies * len(groups), *([] if flat else [7]), 5, generator=torch.Generator().manual_seed(seed))
    model, changes = network(), AdapterStack.of(adapters)
    if dense:
        changes = {name: torch.stack([one.factors[name].dense() for one in adapters]) for name in SHAPES}
    with torch.no_grad(), applied(model, changes, groups, component="net"):
        found = model(inputs)
    with torch.no_grad():
        for row, sample in enumerate(inputs):
            expected = merged(adapters[groups[row % len(groups)]])(sample)
            torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(inputs), network()(inputs))
    assert hooks(model) == 0


@few
@given(seed=st.integers(0, 2**31), stacked=st.booleans())
def test_gradients_flow_to_dense_changes_as_to_weights(seed, stacked):
    model, inputs = network(), torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
    adapter = drawn(seed, 2)
    change = {name: one.dense().requires_grad_() for name, one in adapter.factors.items()}
    given = {name: value[None] for name, value in change.items()} if stacked else change
    with applied(model, given, torch.zeros(6, dtype=torch.int64) if stacked else None, component="net"):
        model(inputs).square().sum().backward()
    other = merged(adapter)
    other(inputs).square().sum().backward()
    for name, value in change.items():
        torch.testing.assert_close(value.grad, other.get_submodule(name[4:]).weight.grad, atol=1e-4, rtol=1e-4)


def test_one_adapter_needs_no_groups():
    model, adapter, inputs = network(), drawn(3, 2), torch.randn(2, 5)
    for changes in (adapter, AdapterStack.of([adapter])):
        with applied(model, changes, component="net"):
            torch.testing.assert_close(model(inputs), merged(adapter)(inputs))


@pytest.mark.parametrize(
    ("changes", "groups", "error", "said"),
    [
        ({"net.on": torch.zeros(4, 5)}, None, NameNotFound, "Nearest: net.one"),
        ({"one": torch.zeros(4, 5)}, None, NameNotFound, "net.one"),
        ({"net.one": torch.zeros(5, 4)}, None, UsageError, "5 × 4, its layer 4 × 5"),
        ({"net.between": torch.zeros(4, 5)}, None, Unsupported, "Tanh"),
        ({"net.one": torch.zeros(5)}, None, UsageError, "1 dimensions"),
        ({}, None, UsageError, "no change"),
        ({"net.one": torch.zeros(2, 4, 5)}, None, UsageError, "no groups"),
        ({"net.one": torch.zeros(2, 4, 5)}, torch.tensor([0, 2]), UsageError, "from 0 to 2"),
        ({"net.one": torch.zeros(2, 4, 5)}, torch.tensor([0.0]), UsageError, "float32"),
        ({"net.one": torch.zeros(2, 4, 5), "net.two": torch.zeros(3, 3, 4)}, None, UsageError, "different numbers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changes, groups, error, said):
    model = network()
    with pytest.raises(error, match=said), applied(model, changes, groups, component="net"):
        pass
    assert hooks(model) == 0


def test_no_hook_is_left_when_the_model_fails():
    model, stack = network(), AdapterStack.of([drawn(0, 1), drawn(1, 1)])
    with pytest.raises(UsageError, match="batch of 3, with groups for 2"):
        with applied(model, stack, torch.tensor([0, 1]), component="net"):
            model(torch.zeros(3, 5))
    assert hooks(model) == 0


def test_merging_is_refused_before_anything_changes():
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="its layer 3 × 4"):
        merge_(model, {"one": torch.ones(4, 5), "two": torch.ones(4, 5)})
    with pytest.raises(UsageError, match="Several"):
        merge_(model, {"one": torch.ones(1, 4, 5)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_are_named_as_adapters_name_them():
    assert linear_layers(network(), ("one", "two"), component="net") == SHAPES
    with pytest.raises(Unsupported, match="Tanh"):
        linear_layers(network(), "between")
    transformers = pytest.importorskip("transformers")
    conv = nn.ModuleDict({"fc": transformers.pytorch_utils.Conv1D(6, 4)})  # 4 inputs, 6 outputs, transposed weight
    assert linear_layers(conv, "fc") == {"fc": (6, 4)}
    change, inputs = torch.randn(6, 4), torch.randn(3, 4)
    with applied(conv, {"fc": change}):
        found = conv["fc"](inputs)
    merge_(conv, {"fc": change})
    torch.testing.assert_close(conv["fc"](inputs), found)
