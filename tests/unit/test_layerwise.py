"""Training layer by layer: what is refused, bad gradients, rounding, schedulers' view, closing."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from models_under_test import Tied, differing, pair, same, stack
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import netweight
from netweight import LayerwiseOptimizer
from netweight.errors import BadGradient, LayerwiseConflict, UsageError
from netweight.methods.compress.runtime import storage
from netweight.methods.compress.runtime.layerwise import round_stochastically

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def unchanged(model, before):
    return all(same(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_optimizers_that_need_everything_at_once():
    with pytest.raises(LayerwiseConflict, match=r"LBFGS needs all gradients at once.*AdamW"):
        LayerwiseOptimizer(stack(), torch.optim.LBFGS)


@pytest.mark.parametrize("options", [{"accumulation_steps": 0}, {"clip_norm": 0.0}, {"clip_norm": float("nan")}])
def test_options_out_of_range(options):
    with pytest.raises(UsageError):
        LayerwiseOptimizer(stack(), torch.optim.SGD, lr=0.1, **options)


def test_nothing_to_train_and_two_optimizers():
    with pytest.raises(UsageError, match="requires a gradient"):
        LayerwiseOptimizer(stack().requires_grad_(False), torch.optim.SGD, lr=0.1)
    _, model = pair(stack)
    first = LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(LayerwiseConflict, match=r"0\.weight is stepped by another"):
        LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(LayerwiseConflict, match="groups"):
        first.add_param_group({"params": []})
    first.close()
    before = weights(model)
    model(X).sum().backward()
    assert unchanged(model, before)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(("checkpointed", "most", "times"), [(False, 0, 2), (True, 0, 3), (True, 1 << 20, 2)])
def test_a_backward_pass_decodes_a_weight_once_for_its_gradient_and_its_update(checkpointed, most, times, monkeypatch):
    monkeypatch.setitem(storage._RECENT_BYTES, "cpu", most)
    decode, counts = storage.decode_here, []
    monkeypatch.setattr(storage, "decode_here", lambda *given: (counts.append(given[0]), decode(*given))[1])
    dense, model = pair(stack, torch.bfloat16)
    for each in (dense, model):
        LayerwiseOptimizer(each, torch.optim.AdamW, lr=0.1)
        run = partial(checkpoint, each, use_reentrant=False) if checkpointed else each
        for _ in range(2):
            counts.clear()
            run(X.bfloat16().requires_grad_()).square().mean().backward()
    assert len(counts) == times * len(model) - (times == 3)  # a checkpoint's last product is not calculated again
    assert not differing(dense, model)
    assert not storage.recent(X.device)._weights


def test_a_model_that_nobody_has_any_more_is_freed_with_its_optimizer():
    _, model = pair(stack)
    optimizer = LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    model(X).sum().backward()
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    before = weights(model)
    del optimizer  # the model keeps it
    model(X).sum().backward()
    assert not unchanged(model, before)
    del model
    gc.collect()
    assert all(reference() is None for reference in left)


def test_reentrant_checkpointing_is_refused():
    _, model = pair(stack)
    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(LayerwiseConflict, match="use_reentrant=False"):
        checkpoint_sequential(model, 4, X.requires_grad_(), use_reentrant=True).sum().backward()
    assert all(p.grad is None for p in model.parameters())

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack()

        def forward(self, x):
            return {"logits": checkpoint_sequential(self.layers, 4, x, use_reentrant=True)}

    _, model = pair(Checkpointed)
    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    before = weights(model)
    with pytest.raises(LayerwiseConflict, match="use_reentrant=False"):
        model(X.requires_grad_())["logits"].sum().backward()
    assert unchanged(model, before)
    dense, model = pair(stack)
    for m in (dense, model):
        LayerwiseOptimizer(m, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            checkpoint_sequential(m, 2, X.requires_grad_(), use_reentrant=False).square().mean().backward()
    assert not differing(dense, model)


def test_clipping_needs_its_two_passes():
    _, model = pair(stack)
    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1, clip_norm=1.0)
    before = weights(model)
    with pytest.raises(LayerwiseConflict, match=r"optimizer\.step\(closure\)"):
        model(X).sum().backward()
    assert unchanged(model, before)
    assert all(p.grad is None for p in model.parameters())


def test_both_passes_of_clipping_drop_the_same_units():
    results = []
    for model in pair(lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))):
        optimizer = LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1, clip_norm=0.5)
        torch.manual_seed(0)

        def closure(model=model):
            loss = model(X).square().sum()
            loss.backward()
            return loss

        results.append((optimizer.step(closure), optimizer.grad_norm))
    assert same(results[0][0], results[1][0])
    assert same(results[0][1], results[1][1])


class Poisoned(nn.Module):
    """Passes values through; going backward, puts a NaN or infinity into the gradient."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        if x.requires_grad and self.value is not None:
            x.register_hook(lambda gradient: gradient * self.value)
        return x


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_gradients_are_named_and_update_nothing_where_all_can_be_seen_before(value):
    for options in ({"clip_norm": float("inf")}, {"clip_norm": 1.0, "accumulation_steps": 2}):
        _, model = pair(lambda: nn.Sequential(nn.Linear(64, 64), Poisoned(value), nn.Linear(64, 64)))
        optimizer = LayerwiseOptimizer(model, torch.optim.AdamW, lr=0.1, **options)
        before = weights(model)

        def closure(model=model):
            loss = model(X).sum()
            loss.backward()
            return loss

        if "accumulation_steps" in options:
            optimizer.step(closure)
        with pytest.raises(BadGradient, match=r"gradient of 0\.(weight|bias) contains NaN or infinity\. Nothing was"):
            optimizer.step(closure)
        assert unchanged(model, before)
        assert optimizer.steps == 0
        assert not any(optimizer.state_of(p) for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())
        model[1].value = None
        for _ in range(2):
            optimizer.step(closure)
        assert optimizer.steps == (1 if "accumulation_steps" in options else 2)
        assert not unchanged(model, before)


def test_a_bad_gradient_in_one_pass_says_what_was_updated():
    _, model = pair(lambda: nn.Sequential(nn.Linear(64, 64), Poisoned(float("nan")), nn.Linear(64, 64)))
    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    first = model[0].weight.dense()
    with pytest.raises(BadGradient, match=r"gradient of 0\..*2 other parameters were updated in this pass before"):
        model(X).sum().backward()
    assert same(model[0].weight, first)
    _, model = pair(stack)
    LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    before = weights(model)
    loss = model(X).sum() * float("nan")
    with pytest.raises(BadGradient, match=r"gradient of 3\..*Nothing was updated"):
        loss.backward()
    assert unchanged(model, before)


def test_groups_schedulers_and_state_dicts():
    dense, model = pair(Tied)
    results = []
    for m in (dense, model):
        decayed = [p for p in m.parameters() if p.dim() > 1]
        rest = [p for p in m.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.5}]
        optimizer = LayerwiseOptimizer(m, torch.optim.AdamW, groups=groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.5], total_steps=10)
        for step in range(4):
            m(torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            scheduler.step()
            if step == 1:  # as accelerate does: dictionaries are replaced by equal ones
                optimizer.load_state_dict(optimizer.state_dict())
        results.append([group["lr"] for group in optimizer.param_groups])
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(decayed), len(rest)]
        assert optimizer.state_dict()["layerwise"] == {"steps": 4}
        assert len(repr(optimizer)) > 50
    assert results[0] == results[1]
    assert results[0][0] != 0.01
    assert not differing(dense, model)


def test_states_are_not_saved_in_the_midst_of_accumulation():
    _, model = pair(stack)
    optimizer = LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1, accumulation_steps=2)
    model(X).sum().backward()
    assert optimizer.micro_step == 1
    with pytest.raises(LayerwiseConflict, match="1 of 2 backward passes"):
        optimizer.state_dict()
    optimizer.zero_grad()
    assert optimizer.state_dict()["layerwise"] == {"steps": 0}


def test_a_layer_that_only_some_passes_use():
    """Its gradient from an earlier pass of the accumulation is not lost."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.use_b = nn.Linear(64, 64), nn.Linear(64, 64), True

        def forward(self, x):
            return self.b(self.a(x)) if self.use_b else self.a(x)

    dense, model = pair(Sometimes)
    plain = torch.optim.SGD(dense.parameters(), lr=0.1)
    layerwise = LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1, accumulation_steps=2)
    for m, optimizer in ((dense, plain), (model, layerwise)):
        for step, use_b in enumerate((True, False, False, True)):
            m.use_b = use_b
            m(X).square().sum().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert layerwise.steps == 2
    assert not differing(dense, model)


def test_training_goes_on_after_a_conversion_of_the_model():
    dense, model = pair(stack)
    for m in (dense, model):
        optimizer = LayerwiseOptimizer(m, torch.optim.SGD, lr=0.01)
        m(X).square().sum().backward()
        m.to("cpu").bfloat16()
        m(X.bfloat16()).square().sum().backward()
        assert optimizer.steps == 2
    assert not differing(dense, model)


def test_stochastic_rounding():
    values = torch.full((100_000,), 1.0 + 2**-10)  # an eighth of the way from 1 to the next bf16 number
    rounded = round_stochastically(values, 7, "w", 0)
    assert rounded.unique().tolist() == [1.0, 1.0078125]
    assert abs((rounded == 1.0).float().mean().item() - 0.875) < 0.005
    assert same(rounded, round_stochastically(values, 7, "w", 0))
    assert not same(rounded, round_stochastically(values, 7, "w", 1))
    exact = torch.tensor([0.0, -0.0, 1.5, float("inf"), -float("inf"), float("nan"), 2.0**-133])
    assert same(round_stochastically(exact, 1, "w"), exact.bfloat16())
    assert round_stochastically(-values, 7, "w", 0).unique().tolist() == [-1.0078125, -1.0]


def test_copies_of_a_model_train_by_themselves():
    _, model = pair(stack)
    optimizer = LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    copied = copy.deepcopy(model)
    copied(X).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert not differing(model, copied)
    assert optimizer.steps == 0


@pytest.mark.parametrize("states", ["compressed", "offloaded"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, partial(torch.optim.SGD, momentum=0.9)])
def test_states_that_wait_compressed_are_the_dense_ones(states, kind, tmp_path):
    twins = [pair(Tied, torch.bfloat16)[1] for _ in range(3)]
    make = partial(netweight.LayerwiseOptimizer, optimizer_class=getattr(kind, "func", kind), lr=0.01)
    make.keywords.update(getattr(kind, "keywords", {}))
    dense, kept, resumed = make(twins[0]), make(twins[1], states=states), make(twins[2], states=states)
    for step in range(4):
        ids = torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(step))
        for model in twins[:2] if step < 2 else twins:
            model(ids).square().mean().backward()
        if step == 1:
            netweight.save_checkpoint(tmp_path / "c.safetensors", twins[1], kept)
            netweight.load_checkpoint(tmp_path / "c.safetensors", twins[2], resumed)
    for model, optimizer in ((twins[1], kept), (twins[2], resumed)):
        assert not differing(twins[0], model)
        for p, q in zip(twins[0].parameters(), model.parameters(), strict=True):
            ours, theirs = optimizer.state_of(q), dense.state_of(p)
            assert ours.keys() == theirs.keys()
            assert all(same(ours[k], theirs[k]) for k in ours if isinstance(ours[k], torch.Tensor))
    held = [v for p in twins[1].parameters() for v in kept.state_of(p).values()]
    assert any(isinstance(value, netweight.CompressedTensor) for value in held) == (
        states == "compressed" and kind is not torch.optim.Adafactor
    )
