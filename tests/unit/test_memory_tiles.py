"""Updates by tiles: the same bits as torch's optimizer on the dense model, and little memory."""

import copy
from functools import partial

import pytest
import torch
from models_under_test import Tied, pair, same
from torch import nn

import netweight
from netweight import LayerwiseOptimizer, codec
from netweight.methods.compress.runtime import tiled_updates

ROWS, WIDTH = 2000, 200  # two tiles of 262,144 numbers, one of them not whole


class Untied(Tied):
    """The same model with an output layer of its own."""

    def __init__(self):
        super().__init__(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS)


TIED = partial(Tied, ROWS, WIDTH)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OPTIMIZERS = [
    ADAMW,
    partial(torch.optim.AdamW, lr=0.01, fused=True),
    partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    partial(torch.optim.Adagrad, lr=0.01),
    partial(torch.optim.ASGD, lr=0.01),
    partial(torch.optim.NAdam, lr=0.01),
    partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(tiled_updates, "_NUMBERS", 1 << 18)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loss_of(model, step):
    ids = torch.randint(0, ROWS, (1, 6), generator=torch.Generator().manual_seed(step))
    return model(ids).float().square().mean() * 100


def layerwise(model, optimizer, **options):
    return LayerwiseOptimizer(model, optimizer.func, **optimizer.keywords, **options)


def assert_same_states(model, ours, dense, theirs):
    for one, other in zip(model.parameters(), dense.parameters(), strict=True):
        assert same(one, other)
        state, wanted = ours.state_of(one), theirs.state[other]
        assert list(state) == list(wanted)
        for name, value in wanted.items():
            assert same(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value


@pytest.mark.parametrize(
    ("make", "optimizer", "states"),
    [
        *((TIED, optimizer, "compressed") for optimizer in OPTIMIZERS),
        (TIED, ADAMW, "dense"),
        (Untied, ADAMW, "compressed"),
        (Untied, ADAMW, "dense"),
    ],
)
def test_every_bit_is_that_of_torch(make, optimizer, states):
    dense, model = pair(make, torch.bfloat16)
    theirs, ours = optimizer(dense.parameters()), layerwise(model, optimizer, states=states)
    assert tiled_updates.fit(ours.inner, model.embed.weight, torch.zeros(()))
    for step in range(3):
        theirs.zero_grad()
        loss_of(dense, step).backward()
        theirs.step()
        loss_of(model, step).backward()
    assert_same_states(model, ours, dense, theirs)
    kinds = {type(value) for value in ours.state_of(model.embed.weight).values() if getattr(value, "ndim", 0) == 2}
    assert kinds <= {netweight.CompressedTensor if states == "compressed" else torch.Tensor}


@pytest.mark.parametrize("make", [TIED, Untied])
def test_states_have_small_chunks_where_few_rows_have_a_gradient(make):
    """Nearly all chunks are zeros, and are kept; the head's gradient, or that of a tied embedding, has no zeros."""
    _, model = pair(make, torch.bfloat16)
    ours = layerwise(model, ADAMW, states="compressed")
    for step in range(2):
        loss_of(model, step).backward()
    sizes = {
        name: {
            codec.info(state.stored.blob).chunk_log2
            for state in ours.state_of(weight).values()
            if isinstance(state, netweight.CompressedTensor)
        }
        for name, weight in model.named_parameters()
    }
    assert sizes["embed.weight"] == ({12} if make is Untied else {18})
    assert make is TIED or sizes["head.weight"] == {18}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("prefer", ["memory", "speed"])
def test_clipping_and_accumulation(accumulation, prefer):
    dense, model = pair(TIED, torch.bfloat16, prefer=prefer)
    theirs = ADAMW(dense.parameters())
    ours = layerwise(model, ADAMW, states="compressed", clip_norm=0.5, accumulation_steps=accumulation)
    for step in range(2):
        theirs.zero_grad()
        for part in range(accumulation):
            loss_of(dense, 10 * step + part).backward()
        torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        theirs.step()

        def closure(step=step):
            loss = loss_of(model, 10 * step)
            loss.backward()
            return loss

        if accumulation == 1:
            ours.step(closure)
        else:
            for part in range(accumulation):
                loss_of(model, 10 * step + part).backward()
    assert_same_states(model, ours, dense, theirs)


def test_stochastic_rounding_draws_the_same_numbers_as_without_tiles(monkeypatch):
    first, second = (pair(TIED, torch.bfloat16)[1] for _ in range(2))
    for model, numbers in ((first, 1 << 18), (second, 1 << 30)):
        monkeypatch.setattr(tiled_updates, "_NUMBERS", numbers)
        layerwise(model, ADAMW, states="compressed", stochastic_rounding=True)
        for step in range(2):
            loss_of(model, step).backward()
    assert all(same(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(("before", "after"), [("dense", "compressed"), ("compressed", "dense")])
def test_states_may_be_kept_in_another_way_after_loading(before, after, tmp_path):
    dense, model = pair(TIED, torch.bfloat16)
    resumed = copy.deepcopy(model)
    theirs, ours = ADAMW(dense.parameters()), layerwise(model, ADAMW, states=before)
    later = layerwise(resumed, ADAMW, states=after)
    for step in range(3):
        theirs.zero_grad()
        loss_of(dense, step).backward()
        theirs.step()
        loss_of(model if step < 2 else resumed, step).backward()
        if step == 1:
            netweight.save_checkpoint(tmp_path / "c.safetensors", model, ours)
            netweight.load_checkpoint(tmp_path / "c.safetensors", resumed, later)
    assert_same_states(resumed, later, dense, theirs)
    kept = later.state_of(resumed.embed.weight)["exp_avg"]
    assert isinstance(kept, netweight.CompressedTensor) == (after == "compressed")


def test_an_error_between_tiles_leaves_every_number_old_or_new(monkeypatch):
    _, model = pair(TIED, torch.bfloat16)
    ours = layerwise(model, ADAMW, states="compressed")
    loss_of(model, 0).backward()
    before = model.embed.weight.dense()
    moment = ours.state_of(model.embed.weight)["exp_avg"].dense()
    step, calls = ours.inner.step, []

    def fail_at_the_second_tile():
        shell = ours.inner.param_groups[0]["params"][0]
        if shell.dim() == 1 and shell.numel() > 1 << 17:
            calls.append(shell.numel())
            if len(calls) == 2:
                raise RuntimeError("planted")
        return step()

    monkeypatch.setattr(ours.inner, "step", fail_at_the_second_tile)
    with pytest.raises(RuntimeError, match="planted"):
        loss_of(model, 1).backward()
    tile = 1 << 18
    weight, state = model.embed.weight.dense().view(-1), ours.state_of(model.embed.weight)["exp_avg"].dense().view(-1)
    assert same(weight[tile:], before.view(-1)[tile:])
    assert same(state[tile:], moment.view(-1)[tile:])
    assert not same(weight[:tile], before.view(-1)[:tile])
    assert not same(state[:tile], moment.view(-1)[:tile])
    assert netweight.codec.decode(model.embed.weight.stored.blob, check=True).shape == (ROWS, WIDTH)
    monkeypatch.undo()
    loss_of(model, 2).backward()  # training may go on


def test_optimizers_that_look_at_the_whole_weight_get_it():
    _, model = pair(TIED, torch.bfloat16)
    for kind in (torch.optim.Adafactor, type("Own", (torch.optim.AdamW,), {})):
        optimizer = LayerwiseOptimizer(model, kind, lr=0.01)
        assert not tiled_updates.fit(optimizer.inner, model.embed.weight, torch.zeros(()))
        loss_of(model, 0).backward()
        optimizer.close()
