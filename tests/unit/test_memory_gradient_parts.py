"""Gradients by parts: the bits of whole gradients, less memory, and whole ones for everybody who asks."""

from functools import partial

import pytest
import torch
from models_under_test import Tied, pair, same
from tensor_sizes import Sizes
from torch import nn
from torch.utils.checkpoint import checkpoint

from netweight import LayerwiseOptimizer
from netweight.errors import BadGradient
from netweight.methods.compress.runtime import gradient_parts, tiled_updates

ROWS, WIDTH = 2000, 200  # two tiles of 262,144 numbers, one of them not whole


class Untied(Tied):
    """The same model with an output layer of its own, and options of the embedding."""

    def __init__(self, **options):
        super().__init__(ROWS, WIDTH)
        self.embed = nn.Embedding(ROWS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, 50)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(tiled_updates, "_NUMBERS", 1 << 18)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loss_of(model, step, rows=ROWS):
    ids = torch.randint(0, rows, (2, 6), generator=torch.Generator().manual_seed(step))
    ids[0, 1] = ids[0, 0]
    return model(ids).float().square().mean() * 100


def train_both(make, *, steps=3, rows=ROWS, loss=loss_of, dtype=torch.bfloat16, **options):
    """Train the dense model by torch and the compressed one by tiles; return the latter with its optimizer."""
    kind = options.pop("kind", torch.optim.AdamW)
    dense, model = pair(make, dtype)
    theirs, ours = kind(dense.parameters(), **options), LayerwiseOptimizer(model, kind, states="compressed", **options)
    for step in range(steps):
        theirs.zero_grad()
        loss(dense, step, rows).backward()
        theirs.step()
        loss(model, step, rows).backward()
    for one, other in zip(model.parameters(), dense.parameters(), strict=True):
        assert same(one, other)
        state, wanted = ours.state_of(one), theirs.state[other]
        assert list(state) == list(wanted)
        assert all(same(state[name], value) for name, value in wanted.items() if isinstance(value, torch.Tensor))
    return model, ours


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 7}, {"padding_idx": -3}, {"scale_grad_by_freq": True}], ids=str
)
def test_every_bit_is_that_of_a_whole_gradient(options):
    def loss(model, step, rows):
        ids = torch.randint(0, rows, (2, 6), generator=torch.Generator().manual_seed(step))
        ids[0, 1], ids[1, 2], ids[1, 3] = ids[0, 0], 7, rows - 3
        return model(ids).float().square().mean() * 100

    train_both(partial(Untied, **options), lr=0.01, loss=loss)


def test_the_embeddings_gradient_never_exists_whole():
    _, model = pair(Untied, torch.bfloat16)
    LayerwiseOptimizer(model, torch.optim.AdamW, lr=0.01, states="compressed")
    loss_of(model, 0).backward()
    with Sizes() as sizes:
        loss_of(model, 1).backward()
    assert sizes.largest < ROWS * WIDTH
    assert model.embed.weight.grad is None


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01, 1.0])
def test_tiles_that_a_step_leaves_as_they_are_are_kept(kind, weight_decay, monkeypatch):
    """Exactly where a step rounds every number to itself, and states are zero: not if infinity would become NaN."""
    if kind is torch.optim.Rprop and weight_decay:
        pytest.skip("Rprop has no weight decay")
    options = {"weight_decay": weight_decay} if kind is not torch.optim.Rprop else {}
    written = []
    add = tiled_updates._CompressedTiles.write
    monkeypatch.setattr(
        tiled_updates._CompressedTiles,
        "write",
        lambda self, first, last, numbers: (
            written.append((self._tensor.shape, first)),
            add(self, first, last, numbers),
        ),
    )
    train_both(Untied, kind=kind, rows=1000, lr=0.01, **options)
    of_the_second = written.count(((ROWS, WIDTH), 1 << 18))
    if (
        weight_decay == 1.0
        or (weight_decay and kind is torch.optim.SGD)
        or kind in (torch.optim.ASGD, torch.optim.Rprop)
    ):
        assert of_the_second >= 3
    else:
        assert of_the_second == (kind is torch.optim.AdamW)  # in the first step, which makes the states


def test_numbers_of_32_bits_are_all_stepped():
    train_both(Untied, rows=1000, lr=0.01, dtype=torch.float32)


def test_an_embedding_that_is_used_twice_or_calculated_again_has_a_whole_gradient():
    def twice(model, step, rows):
        return loss_of(model, step, rows) + loss_of(model, step + 10, rows)

    train_both(Untied, lr=0.01, loss=twice)

    class Checkpointed(Untied):
        def forward(self, ids):
            return checkpoint(super().forward, ids, use_reentrant=False)

    train_both(Checkpointed, lr=0.01)


def test_whoever_asks_for_the_gradient_gets_it_whole():
    dense, model = pair(Untied, torch.bfloat16)
    (wanted,) = torch.autograd.grad(loss_of(dense, 0), dense.embed.weight)
    LayerwiseOptimizer(model, torch.optim.AdamW, lr=0.01)
    before = model.embed.weight.dense()
    (gradient,) = torch.autograd.grad(loss_of(model, 0), model.embed.weight)
    assert same(gradient, wanted)
    assert same(model.embed.weight, before)
    seen = []
    handle = model.embed.weight.register_hook(seen.append)
    loss_of(model, 0).backward()
    handle.remove()
    assert same(seen[0], wanted)
    assert not same(model.embed.weight, before)
    before = model.embed.weight.dense()
    loss_of(model, 1).backward(inputs=[model.up.weight])
    assert same(model.embed.weight, before)
    assert model.embed.weight.grad is None


def test_a_gradient_by_parts_that_is_not_finite_changes_nothing():
    _, model = pair(Untied, torch.bfloat16)
    ours = LayerwiseOptimizer(model, torch.optim.AdamW, lr=0.01, states="compressed")
    before = model.embed.weight.dense()

    def spoil(module, ids, output):
        output.register_hook(lambda gradient: gradient * float("nan"))

    model.embed.register_forward_hook(spoil)
    with pytest.raises(BadGradient, match=r"embed\.weight contains NaN"):
        loss_of(model, 0).backward()
    assert same(model.embed.weight, before)
    assert not ours.state_of(model.embed.weight)


def test_parts_of_a_backward_pass_that_failed_are_dropped():
    dense, model = pair(Untied, torch.bfloat16)
    ours = LayerwiseOptimizer(model, torch.optim.SGD, lr=0.01)
    theirs = LayerwiseOptimizer(dense, torch.optim.SGD, lr=0.01)

    def fail(gradient):
        raise RuntimeError("planted")

    for each in (dense, model):
        product = nn.functional.linear(
            torch.ones(1, WIDTH, dtype=torch.bfloat16, requires_grad=True), each.embed.weight
        )
        product.register_hook(fail)  # of the same weight, later in the backward pass than the embedding
        with pytest.raises(RuntimeError, match="planted"):
            (each.embed(torch.tensor([1, 2])).sum() + product.sum()).backward()
        each.zero_grad()
        loss_of(each, 1).backward()
    assert all(same(one, other) for one, other in zip(model.parameters(), dense.parameters(), strict=True))
    assert ours.steps == theirs.steps


def test_a_closed_optimizer_takes_no_parts():
    dense, model = pair(Untied, torch.bfloat16)
    ours = LayerwiseOptimizer(model, torch.optim.AdamW, lr=0.01)
    loss = loss_of(model, 0)  # the graph is made while there is an optimizer
    ours.close()
    loss.backward()
    loss_of(dense, 0).backward()
    assert same(model.embed.weight.grad, dense.embed.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
def test_only_bits_of_zero_are_zero(dtype):
    for count in (1, 3, 4096, 4099):
        numbers = torch.zeros(count + 1, dtype=dtype)
        assert gradient_parts.is_zero(numbers[1:])
        numbers[-1] = 1 if dtype == torch.uint8 else -0.0
        assert not gradient_parts.is_zero(numbers[1:])
        assert not gradient_parts.is_zero(numbers)
