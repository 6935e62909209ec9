"""The law: N steps on compressed weights are N layerwise steps on dense ones, and N plain steps, to the last bit."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_under_test import Conv1D, Tied, differing, pair, same
from torch import nn

from netweight import LayerwiseOptimizer

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),  # makes its state before the first step
}


@st.composite
def models(draw):
    """Embedding, some layers of drawn kinds and widths, and an output layer, tied or not."""
    width, rows, tied = draw(st.sampled_from([16, 24, 40])), draw(st.integers(50, 90)), draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from([nn.Linear, Conv1D]), max_size=3))
    bias = draw(st.booleans())

    def make():
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(rows, width)
                self.layers = nn.ModuleList([kind(width, width) for kind in kinds])
                self.norm = nn.LayerNorm(width)
                self.head = nn.Linear(width, rows, bias=bias)
                if tied:
                    self.head.weight = self.embed.weight

            def forward(self, ids):
                x = self.embed(ids)
                for layer in self.layers:
                    x = x + torch.tanh(layer(x))
                return self.head(self.norm(x))

        return Model()

    return make


def train(model, optimizer, steps, accumulation=1, scheduler=None, closure=False):
    losses = []
    for step in range(steps * accumulation):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 50, (2, 9), generator=generator)

        def loss(ids=ids):
            logits = model(ids[:, :-1]).float()
            value = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / accumulation
            value.backward()
            return value

        losses.append((optimizer.step(loss) if closure else loss()).detach())
        if (step + 1) % accumulation == 0:
            optimizer.step() if not closure else None
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
    return losses


def states_agree(dense, one, compressed, other):
    for p, q in zip(dense.parameters(), compressed.parameters(), strict=True):
        mine, theirs = one.state_of(p), other.state_of(q)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert same(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]


@given(
    make=models(),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    steps=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    clip=st.sampled_from([None, 0.1, 100.0]),
    stochastic=st.booleans(),
    scheduled=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_compressed_is_dense(make, name, dtype, steps, accumulation, clip, stochastic, scheduled, seed):
    dense, model = pair(make, dtype, seed=seed)
    plain = copy.deepcopy(dense)
    kind, options = OPTIMIZERS[name]
    losses, optimizers = [], []
    for m in (dense, model):
        optimizer = LayerwiseOptimizer(
            m,
            kind,
            accumulation_steps=accumulation,
            clip_norm=clip,
            stochastic_rounding=stochastic,
            seed=seed,
            **options,
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled else None
        two_passes = clip is not None and accumulation == 1
        losses.append(train(m, optimizer, steps, accumulation, scheduler, closure=two_passes))
        optimizers.append(optimizer)
        assert optimizer.steps == steps
        assert optimizer.micro_step == 0
        assert all(p.grad is None for p in m.parameters())
    assert all(map(same, *losses))
    assert not differing(dense, model)
    states_agree(dense, optimizers[0], model, optimizers[1])
    if not stochastic:  # then they are also what torch's own loop gives
        optimizer = kind(plain.parameters(), **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduled else None
        if clip is not None:
            optimizer.register_step_pre_hook(
                lambda *_: torch.nn.utils.clip_grad_norm_(plain.parameters(), clip) and None
            )
        train(plain, optimizer, steps, accumulation, scheduler)
        assert not differing(dense, plain)


def test_one_dense_gradient_at_a_time():
    """The layers' gradients never live together: what one hook sees is freed before the next gradient comes."""
    _, model = pair(Tied, torch.bfloat16)
    optimizer = LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    most = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: most.append(sum(p.grad is not None for p in model.parameters())))
    train(model, optimizer, 2)
    assert most
    assert max(most) == 0
