"""The losses of RMU, Booster and TAR against their papers' formulas, written down once more."""

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from decoders_under_test import SHORT, decoder, drawn, some_pairs

from netweight.core.seeds import torch_generator
from netweight.data.tokens import collate
from netweight.errors import Unsupported, UsageError
from netweight.methods.immunize.baselines import BoosterDefense, RMUDefense, TARDefense
from netweight.methods.immunize.defense import collate_pairs
from netweight.methods.immunize.settings import RMU, TAR, Booster
from netweight.methods.immunize.train import immunize


def gradients(defense, model, batch, generator):
    """What a step gives every weight, and the terms of the loss by name."""
    model.zero_grad()
    terms = {}
    for side in defense.sides(model, batch, generator):
        sum(term.weight * term.value for term in side.values()).backward()
        terms |= {name: term.value.item() for name, term in side.items()}
    return [value.grad.clone() for value in model.parameters()], terms


def loss_of(model, rows):
    """Cross-entropy of the answers, token by token."""
    losses = []
    for prompt, answer in rows:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        losses += [-logits[len(prompt) + place - 1, token] for place, token in enumerate(answer)]
    return torch.stack(losses).mean()


def entropy_of(model, rows):
    found = []
    for prompt, answer in rows:
        predicted = model(input_ids=torch.tensor([prompt + answer])).logits[0].softmax(-1)
        found += [-(one * one.log()).sum() for one in predicted[len(prompt) - 1 : -1]]
    return torch.stack(found).mean()


def test_rmu_steers_answers_to_one_direction_and_holds_the_rest():
    model, pairs = decoder(layers=5).double(), some_pairs()
    original, batch = copy.deepcopy(model), collate_pairs(pairs, pad_id=0)
    defense = RMUDefense(RMU(coefficient=2.0, alpha=3.0))
    with defense.prepared(model, seed=9):
        for value in model.parameters():
            value.data.mul_(1.05)
        steering, retain = (
            {name: term for name, term in side.items()} for side in defense.sides(model, batch, drawn())
        )
        general = defense.kept(model, collate([pair.harmless for pair in pairs], pad_id=0), batch.group)
    direction = torch.rand(16, generator=torch_generator(9, "direction")).numpy()
    target = 2.0 * direction / np.sqrt((direction**2).sum())
    forget, kept = [], []
    for pair in pairs:
        for answer, into in ((pair.harmful.response, forget), (pair.harmless.response, kept)):
            ids = torch.tensor([[*pair.harmful.prompt, *answer]])
            with torch.no_grad():  # a quarter deep is behind the second block of five
                here, there = (
                    one(ids, output_hidden_states=True).hidden_states[2][0].numpy() for one in (model, original)
                )
            if into is forget:
                into += [((state - target) ** 2).mean() for state in here[len(pair.harmful.prompt) :]]
            else:
                into += [((one - other) ** 2).mean() for one, other in zip(here, there, strict=True)]
    assert steering["steering"].value.item() == pytest.approx(np.mean(forget), rel=1e-5)
    assert steering["steering"].weight == 1.0
    assert retain["retain"].value.item() == pytest.approx(np.mean(kept), rel=1e-4)
    assert retain["retain"].weight == general["general"].weight == 3.0
    assert general["general"].value.item() == pytest.approx(np.mean(kept), rel=1e-4)
    with pytest.raises(Unsupported, match="rmu measures against the original, which is kept while it trains"):
        defense.kept(model, batch.harmless, batch.group)


def test_rmu_refuses_a_block_that_is_not_there():
    with pytest.raises(UsageError, match="no block 9: LlamaForCausalLM has 3"):
        immunize(decoder(), some_pairs(4), defense=RMU(block=9), settings=SHORT)


def test_booster_is_its_formula():
    """The gradient is f' + λ (h'(w) - h'(w - α h'(w) / |h'(w)|)), and the weights are as before."""
    model, pairs = decoder().double(), some_pairs()
    attacked, batch = copy.deepcopy(model), collate_pairs(pairs, pad_id=0)
    found, terms = gradients(BoosterDefense(Booster(strength=3.0, step=0.2)), model, batch, drawn())
    for one, other in zip(model.parameters(), attacked.parameters(), strict=True):
        assert torch.equal(one, other)
    harmless = [(pair.harmless.prompt, pair.harmless.response) for pair in pairs]
    harmful = [(pair.harmful.prompt, pair.harmful.response) for pair in pairs]
    weights, ahead = list(model.parameters()), list(attacked.parameters())
    aligned = torch.autograd.grad(loss_of(model, harmless), weights)
    here = torch.autograd.grad(loss_of(model, harmful), weights)
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in here))
    with torch.no_grad():
        for value, gradient in zip(ahead, here, strict=True):
            value -= 0.2 * gradient / norm
    there = torch.autograd.grad(loss_of(attacked, harmful), ahead)
    for one, f, h, later in zip(found, aligned, here, there, strict=True):
        torch.testing.assert_close(one, f + 3.0 * (h - later), rtol=1e-4, atol=1e-6)
    assert terms["attacked"] == pytest.approx(loss_of(attacked, harmful).item())
    assert terms["attacked"] < terms["harmful"]


def test_tar_is_its_formula():
    """Adam attacks with half of the rows; the gradients of the others' entropy on its way count."""
    settings = TAR(attack_steps=5, attack_lr=3e-3, look_every=2, strength=4.0)
    model, pairs = decoder().double(), some_pairs(5)
    original, batch = copy.deepcopy(model), collate_pairs(pairs, pad_id=0)
    defense = TARDefense(settings)
    with defense.prepared(model, seed=0):
        for value in model.parameters():
            value.data.mul_(1.05)
        before = copy.deepcopy(model)
        found, terms = gradients(defense, model, batch, drawn())
    rate = 3e-3 * (0.1, 1.0, 2.0)[int(torch.randint(3, (), generator=drawn()))]
    harmful = [(pair.harmful.prompt, pair.harmful.response) for pair in pairs]
    attacked, weights = copy.deepcopy(before), list(before.parameters())
    ahead = list(attacked.parameters())
    means, squares = [0.0] * len(ahead), [0.0] * len(ahead)
    raised = [torch.zeros_like(value) for value in weights]
    for step in range(1, 6):
        slopes = torch.autograd.grad(loss_of(attacked, harmful[::2]), ahead)
        with torch.no_grad():
            for place, (value, slope) in enumerate(zip(ahead, slopes, strict=True)):
                means[place] = 0.9 * means[place] + 0.1 * slope
                squares[place] = 0.999 * squares[place] + 0.001 * slope**2
                moved = means[place] / (1 - 0.9**step) / ((squares[place] / (1 - 0.999**step)).sqrt() + 1e-8)
                value.copy_(value * (1 - rate * 0.01) - rate * moved)
        if step in (2, 4, 5):
            slopes = torch.autograd.grad(entropy_of(attacked, harmful[1::2]), ahead)
            raised = [total + slope / 3 for total, slope in zip(raised, slopes, strict=True)]
    assert terms["uncertainty"] == pytest.approx(entropy_of(attacked, harmful[1::2]).item(), rel=1e-4)
    loss, moved = loss_of(before, [(pair.harmless.prompt, pair.harmless.response) for pair in pairs]), []
    for pair in pairs:
        ids = torch.tensor([[*pair.harmless.prompt, *pair.harmless.response]])
        one, other = (each(ids, output_hidden_states=True).hidden_states for each in (before, original))
        moved.append(torch.stack([(a - b)[0].pow(2).sum(-1).sqrt() for a, b in zip(one, other, strict=True)]))
    moved = torch.cat(moved, dim=1).mean()
    assert terms["retain"] == pytest.approx(loss.item(), rel=1e-5)
    assert terms["retain moved"] == pytest.approx(moved.item(), rel=1e-4)
    kept = torch.autograd.grad(loss + moved, weights)
    for value, old, one, k, u in zip(model.parameters(), weights, found, kept, raised, strict=True):
        assert torch.equal(value, old)
        torch.testing.assert_close(one, k - 4.0 * u, rtol=1e-3, atol=1e-6)
