"""Clipped sums of single examples' gradients, computed in two ways, against a loop over examples and against opacus."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from netweight.errors import Unsupported
from netweight.methods.federate import ClientData, Task
from netweight.methods.federate.clipped_gradients import ClippedGradients, PrivateStep, by_layers, by_vmap, clipped_sum
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.settings import Trains


def double_model(body: nn.Module, head: nn.Module, inputs: Tensor, targets: Tensor) -> LocalModel:
    part = (inputs, targets)
    return LocalModel(Task(body.double(), head.double(), [ClientData(part, part)]))


def loop(model: LocalModel, batch: tuple[Tensor, Tensor], mask: Tensor, trains: str, clip: float) -> ClippedGradients:
    """The same by its definition: a gradient for each example, clipped, added."""
    body, head = model.task.initial_body(), model.task.initial_head()
    sums, losses, norms = [torch.zeros_like(body), torch.zeros_like(head)], [], []
    for x, y, counts in zip(*batch, mask, strict=True):
        vectors = [body.clone().requires_grad_(trains != "head"), head.clone().requires_grad_(trains != "body")]
        loss = model.loss(*vectors, x[None], y[None])
        gradients = [torch.zeros_like(v) for v in vectors]
        wanted = [i for i, v in enumerate(vectors) if v.requires_grad]
        for i, found in zip(wanted, torch.autograd.grad(loss, [vectors[i] for i in wanted]), strict=True):
            gradients[i] = found
        norm = float(torch.cat(gradients).norm())
        norms.append(norm)
        if counts:
            losses.append(loss.detach())
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient * min(1.0, clip / norm)
    kept = (sums[0] if trains != "head" else None, sums[1] if trains != "body" else None)
    return ClippedGradients(*kept, torch.stack(losses).mean(), torch.tensor(norms, dtype=body.dtype))


def assert_same(found: ClippedGradients | None, wanted: ClippedGradients, mask: Tensor) -> None:
    assert found is not None
    for mine, other in ((found.body, wanted.body), (found.head, wanted.head)):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.norms[mask], wanted.norms[mask], rtol=1e-10, atol=1e-10)


class TwoAxes(nn.Module):
    """A convolution, then a linear layer that sees several vectors per example."""

    def __init__(self, kernel: int, stride: int, padding: int, dilation: int, bias: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, kernel, stride, padding, dilation, bias=bias)
        self.linear = nn.LazyLinear(4, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(self.linear(F.leaky_relu(self.convolution(images).flatten(2)))).flatten(1)


@settings(max_examples=25, deadline=None)
@given(
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    trains=st.sampled_from(["body", "head", "both"]),
    mask=st.lists(st.booleans(), min_size=1, max_size=4).filter(any),
    clip=st.sampled_from([0.04, 0.5, 100.0]),
    last=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_both_ways_are_the_loop(
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    bias: bool,
    trains: str,
    mask: list[bool],
    clip: float,
    last: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    inputs = torch.randn(len(mask), 2, 7, 6).double()
    targets, counts = torch.randint(0, 3, (len(mask),)), torch.tensor(mask)
    body = TwoAxes(kernel, stride, padding, dilation, bias)
    width = body(inputs.float()).shape[1]
    model = double_model(body, nn.Linear(width, 3, bias=bias), inputs, targets)
    if last:
        inputs = inputs.to(memory_format=torch.channels_last)
    wanted = loop(model, (inputs, targets), counts, trains, clip)
    for way in (by_layers, by_vmap):
        found = way(
            PrivateStep(
                model, model.task.initial_body(), model.task.initial_head(), (inputs, targets), counts, trains, clip
            )
        )
        assert_same(found, wanted, counts)


def test_gradients_are_those_of_opacus() -> None:
    grad_sample = pytest.importorskip("opacus.grad_sample", reason="opacus is not installed")
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    inputs, targets = torch.randn(6, 1, 8, 8).double(), torch.randint(0, 3, (6,))
    model = double_model(body, nn.Linear(64, 3), inputs, targets)
    body[1].inplace = False  # which opacus cannot, and we can
    whole = grad_sample.GradSampleModule(nn.Sequential(body, model.task.head), loss_reduction="sum")
    F.cross_entropy(whole(inputs.requires_grad_()), targets, reduction="sum").backward()  # it warns without
    rows = torch.cat([p.grad_sample.flatten(1) for p in whole.parameters()], dim=1)
    clip = float(rows.norm(dim=1).median())
    wanted = (rows * (clip / rows.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    mask = torch.ones(6, dtype=torch.bool)
    found = by_layers(
        PrivateStep(
            model, model.task.initial_body(), model.task.initial_head(), (inputs.detach(), targets), mask, "both", clip
        )
    )
    assert found is not None
    assert found.body is not None
    assert found.head is not None
    torch.testing.assert_close(torch.cat([found.body, found.head]), wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.norms, rows.norm(dim=1), rtol=1e-10, atol=1e-10)


class Twice(nn.Module):
    """A layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Elsewhere(nn.Module):
    """A layer whose weight is used outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(torch.tanh(self.layer(x)), self.layer.weight.T))


class Mixing(nn.Module):
    """A model in which every example sees the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x - x.mean(0)))


def tied() -> nn.Module:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


@pytest.mark.parametrize(
    "body",
    [Twice(), Elsewhere(), tied(), nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5))],
    ids=["called twice", "used elsewhere", "tied", "another parameterized layer"],
)
def test_what_the_fast_way_cannot_do_is_done_by_vmap(body: nn.Module) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 5).double(), torch.randint(0, 3, (6,))
    model = double_model(body, nn.Linear(5, 3), inputs, targets)
    mask = torch.tensor([True] * 5 + [False])
    wanted = loop(model, (inputs, targets), mask, "both", 0.5)
    for _ in range(2):  # when it is found out, and afterwards
        found = clipped_sum(
            PrivateStep(
                model, model.task.initial_body(), model.task.initial_head(), (inputs, targets), mask, "both", 0.5
            )
        )
        assert_same(found, wanted, mask)


def test_a_batch_too_large_to_hold_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(10, 5).double(), torch.randint(0, 3, (10,))
    model = double_model(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3), inputs, targets)
    mask = torch.tensor([True] * 4 + [False] * 3 + [True] * 2 + [False])
    monkeypatch.setattr("netweight.methods.federate.clipped_gradients._VALUES_AT_ONCE", 3 * 39)
    found = clipped_sum(
        PrivateStep(model, model.task.initial_body(), model.task.initial_head(), (inputs, targets), mask, "both", 0.5)
    )
    assert_same(found, loop(model, (inputs, targets), mask, "both", 0.5), mask)


@pytest.mark.parametrize("trains", ["both", "body", "head"])
def test_a_network_in_which_examples_see_each_other_is_refused(trains: Trains) -> None:
    """One example alone would be another input, here always zero; evaluation changes nothing about this."""
    inputs, targets = torch.randn(4, 5).double(), torch.randint(0, 3, (4,))
    model = double_model(Mixing(), nn.Linear(5, 3), inputs, targets)
    body, head, mask = model.task.initial_body(), model.task.initial_head(), torch.ones(4, dtype=torch.bool)
    model.train(trains)
    with pytest.raises(Unsupported, match="depend on the other examples of its batch"):
        clipped_sum(PrivateStep(model, body, head, (inputs, targets), mask, trains, 0.5))


def test_batch_normalization_is_refused_by_name() -> None:
    inputs, targets = torch.randn(4, 5).double(), torch.randint(0, 3, (4,))
    model = double_model(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3), inputs, targets)
    body, head, mask = model.task.initial_body(), model.task.initial_head(), torch.ones(4, dtype=torch.bool)
    model.train("both")
    with pytest.raises(Unsupported, match=r"body's layer '1' \(BatchNorm1d\)"):
        clipped_sum(PrivateStep(model, body, head, (inputs, targets), mask, "both", 0.5))
    model.train("head")  # the body then only evaluates, with its statistics
    assert clipped_sum(PrivateStep(model, body, head, (inputs, targets), mask, "head", 0.5)).head is not None
