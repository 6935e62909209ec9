"""The losses of later defenses against their papers' formulas, written down once more."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from decoders_under_test import SHORT, decoder, drawn, some_pairs

from netweight.core.seeds import torch_generator
from netweight.data.tokens import Example, collate
from netweight.errors import Unsupported, UsageError
from netweight.methods.immunize.defenses.booster import Booster, BoosterDefense
from netweight.methods.immunize.defenses.circuit_breaking import CircuitBreaking, CircuitBreakingDefense
from netweight.methods.immunize.defenses.latent_adversarial import LatentAdversarial, LatentAdversarialDefense
from netweight.methods.immunize.defenses.rmu import RMU, RMUDefense
from netweight.methods.immunize.defenses.self_destruction import SelfDestruction, SelfDestructionDefense
from netweight.methods.immunize.defenses.tar import TAR, TARDefense
from netweight.methods.immunize.defenses.vaccine import Vaccine, VaccineDefense
from netweight.methods.immunize.distributed import ALONE
from netweight.methods.immunize.pairs import collate_pairs
from netweight.methods.immunize.train import immunize
from netweight.nn.hooks import capture


def gradients(defense, model, batch, generator):
    """What a step gives every weight, and the terms of the loss by name."""
    model.zero_grad()
    terms = {}
    for group in defense.term_groups(model, batch, generator):
        sum(term.weight * term.value for term in group.values()).backward()
        terms |= {name: term.value.item() for name, term in group.items()}
    return [value.grad.clone() for value in model.parameters()], terms


def loss_of(model, rows):
    """Cross-entropy of the answers, token by token."""
    losses = []
    for prompt, answer in rows:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        losses += [-logits[len(prompt) + place - 1, token] for place, token in enumerate(answer)]
    return torch.stack(losses).mean()


def loss_of_rows(model, rows):
    """The same of a batch."""
    logits = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.labels[:, 1:].flatten())


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
    with defense.preparation(model, seed=9):
        for value in model.parameters():
            value.data.mul_(1.05)
        steering, harmless = (
            {name: term for name, term in group.items()} for group in defense.term_groups(model, batch, drawn())
        )
        general = defense.retained_terms(model, collate([pair.harmless for pair in pairs], pad_id=0), batch.group)
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
    assert harmless["harmless"].value.item() == pytest.approx(np.mean(kept), rel=1e-4)
    assert harmless["harmless"].weight == general["retained"].weight == 3.0
    assert general["retained"].value.item() == pytest.approx(np.mean(kept), rel=1e-4)
    with pytest.raises(Unsupported, match="rmu compares with the original model, which is kept only during"):
        defense.retained_terms(model, batch.harmless, batch.group)


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
    with defense.preparation(model, seed=0):
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
            later = np.exp(0.0625 * (step - 5))
            raised = [total + later * slope for total, slope in zip(raised, slopes, strict=True)]
    assert terms["uncertainty"] == pytest.approx(entropy_of(attacked, harmful[1::2]).item(), rel=1e-4)
    loss, moved = loss_of(before, [(pair.harmless.prompt, pair.harmless.response) for pair in pairs]), []
    for pair in pairs:
        ids = torch.tensor([[*pair.harmless.prompt, *pair.harmless.response]])
        one, other = (each(ids, output_hidden_states=True).hidden_states for each in (before, original))
        moved.append(torch.stack([(a - b)[0].pow(2).sum(-1).sqrt() for a, b in zip(one, other, strict=True)]))
    moved = torch.cat(moved, dim=1).mean()
    assert terms["harmless"] == pytest.approx(loss.item(), rel=1e-5)
    assert terms["harmless moved"] == pytest.approx(moved.item(), rel=1e-4)
    kept = torch.autograd.grad(loss + moved, weights)
    for value, old, one, k, u in zip(model.parameters(), weights, found, kept, raised, strict=True):
        assert torch.equal(value, old)
        torch.testing.assert_close(one, k - 4.0 * u, rtol=1e-3, atol=1e-6)


def test_t_vaccine_disturbs_the_blocks_that_harmful_answers_hang_on():
    """The disturbance has norm rho over the drawn blocks and points along the harmless loss's gradient."""
    model, pairs = decoder(layers=4).double(), some_pairs()
    batch, blocks = collate_pairs(pairs, pad_id=0), [f"model.layers.{number}" for number in range(4)]
    slopes = {}
    for kind, rows in (("harmful", batch.harmful), ("harmless", batch.harmless)):
        with capture(model, blocks, gradients=True) as states:
            logits = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows.labels[:, 1:].flatten())
        slopes[kind] = torch.autograd.grad(loss, [states[name] for name in blocks])
    norms = torch.stack([slope.norm() for slope in slopes["harmful"]]).float()
    chosen = torch.multinomial(norms, 2, generator=drawn()).tolist()
    length = torch.stack([slopes["harmless"][one].norm() for one in chosen]).norm()
    for place in chosen:
        layer, shift = model.model.layers[place], 0.5 * slopes["harmless"][place] / length
        layer.register_forward_hook(lambda _module, _inputs, output, shift=shift: output + shift)
    wanted = loss_of_rows(model, batch.harmless)
    for place in chosen:
        model.model.layers[place]._forward_hooks.clear()
    _, terms = gradients(VaccineDefense(Vaccine(rho=0.5, share=0.5)), model, batch, drawn())
    assert terms["harmless"] == pytest.approx(wanted.item(), rel=1e-5)
    _, all_of_them = gradients(VaccineDefense(Vaccine(rho=0.5)), model, batch, drawn())
    assert all_of_them["harmless"] != pytest.approx(terms["harmless"], rel=1e-5)


def test_circuit_breaking_turns_answers_away_and_holds_the_rest():
    model, pairs = decoder(layers=5).double(), some_pairs()
    original, batch = copy.deepcopy(model), collate_pairs(pairs, pad_id=0)
    defense = CircuitBreakingDefense(CircuitBreaking(rerouting=2.0, retention=3.0))
    with defense.preparation(model, seed=0):
        for number, value in enumerate(model.parameters()):
            value.data += torch.randn(value.shape, generator=drawn(number)) * value.std()
        rerouting, harmless = defense.term_groups(model, batch, drawn())
    alike, apart = [], []
    for pair in pairs:
        for answer in (pair.rejected, pair.chosen):
            ids = torch.tensor([[*pair.prompt, *answer]])
            with torch.no_grad():
                here, there = (
                    [states[0].numpy() for states in one(ids, output_hidden_states=True).hidden_states]
                    for one in (model, original)
                )
            if answer is pair.rejected:  # behind blocks 2 and 4 of 5
                for depth in (2, 4):
                    for one, other in zip(
                        here[depth][len(pair.prompt) :], there[depth][len(pair.prompt) :], strict=True
                    ):
                        alike.append(max(0.0, one @ other / np.sqrt((one @ one) * (other @ other))))
            else:
                apart += [np.sqrt(((one - other) ** 2).sum(-1)) for one, other in zip(here, there, strict=True)]
    assert rerouting["rerouting"].value.item() == pytest.approx(np.mean(alike), rel=1e-4)
    assert harmless["harmless"].value.item() == pytest.approx(
        np.concatenate([each.ravel() for each in apart]).mean(), rel=1e-4
    )
    assert (rerouting["rerouting"].weight, harmless["harmless"].weight) == (2.0, 3.0)


def test_latent_adversarial_training_meets_the_worst_disturbance_within_its_bound():
    model, pairs = decoder(layers=4).double(), some_pairs()
    batch = collate_pairs(pairs, pad_id=0)
    places = [model.model.embed_tokens, *model.model.layers[1:]]  # the 9th, 17th, 25th and 31st of 32
    found, terms = gradients(
        LatentAdversarialDefense(LatentAdversarial(bound=0.3, search_steps=3)), model, batch, drawn()
    )
    shifts = [torch.zeros(*batch.harmless.input_ids.shape, 16, dtype=torch.float64) for _ in places]

    def refused_and_not_answered(shifts):
        """Both losses, row by row, with what is added to the prompts' states."""
        lost = {"chosen": [], "rejected": []}
        for row, pair in enumerate(pairs):
            for kind, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                ids, size = torch.tensor([[*pair.prompt, *answer]]), len(pair.prompt)

                def add(_module, _inputs, output, place, row=row, size=size):
                    return torch.cat([output[:, :size] + shifts[place][row, :size], output[:, size:]], 1)

                handles = [
                    layer.register_forward_hook(lambda m, i, o, place=place: add(m, i, o, place))
                    for place, layer in enumerate(places)
                ]
                logs = model(ids).logits[0].log_softmax(-1)
                [handle.remove() for handle in handles]
                lost[kind] += [logs[size + place - 1, token] for place, token in enumerate(answer)]
        return {kind: torch.stack(logs) for kind, logs in lost.items()}

    for _ in range(3):
        [shift.requires_grad_(True) for shift in shifts]
        logs = refused_and_not_answered(shifts)
        loss = -logs["rejected"].mean() - (1 - logs["chosen"].exp()).log().mean()
        slopes = torch.autograd.grad(loss, shifts)
        for place, slope in enumerate(slopes):
            moved = shifts[place].detach() - 2.5 * 0.3 / 3 * torch.nn.functional.normalize(slope, dim=-1)
            shifts[place] = moved / (moved.norm(dim=-1, keepdim=True) / 0.3).clamp(min=1)
    logs = refused_and_not_answered(shifts)
    assert max(shift.norm(dim=-1).max() for shift in shifts) == pytest.approx(0.3)
    retain, harmful = -logs["chosen"].mean(), -(1 - logs["rejected"].exp()).log().mean()
    assert (terms["harmless"], terms["harmful"]) == pytest.approx((retain.item(), harmful.item()), rel=1e-4)
    # What is kept besides weighs three times as much.
    for one, other in zip(found, torch.autograd.grad((retain + harmful) / 3, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_what_is_certain_still_has_a_gradient_and_what_is_unlikely_none():
    """-log(1 - p) of the answer's token with a logit of 30 over three zeros is 30 - log 3; below log p = -5 it is 0."""
    rows = collate([Example((1,), (2,))], pad_id=0)
    for logit, wanted, slope in ((30.0, 30 - np.log(3), 1.0), (0.0, -np.log(3 / 4), 0.25), (-9.0, 0.0, 0.0)):
        logits = torch.tensor([[[0.0, 0.0, logit, 0.0]] * 2], dtype=torch.float64, requires_grad=True)
        loss = LatentAdversarialDefense(LatentAdversarial()).unlikely(
            lambda logits=logits, **_: SimpleNamespace(logits=logits), rows, ALONE
        )
        assert loss.item() == pytest.approx(wanted, rel=1e-5)
        assert torch.autograd.grad(loss, logits)[0][0, 0, 2].item() == pytest.approx(slope, rel=1e-5)


def test_self_destruction_is_its_formula_and_opposes_the_gradients():
    """The measured gradient of the cosine is that by second derivatives."""
    model, pairs = decoder().double(), some_pairs()
    model.config._attn_implementation = "eager"  # has second derivatives
    batch, kept = collate_pairs(pairs, pad_id=0), collate([pair.harmless for pair in some_pairs(5, seed=8)], pad_id=0)
    defense = SelfDestructionDefense(SelfDestruction(distance=1e-4))
    weights = list(model.parameters())
    harmless, ascent = (
        {name: term for name, term in group.items()} for group in defense.term_groups(model, batch, drawn())
    )
    terms = defense.retained_terms(model, kept, batch.group)
    found = torch.autograd.grad(terms["cosine"].value, weights, retain_graph=True)
    slopes = [
        torch.autograd.grad(loss_of_rows(model, rows), weights, create_graph=True) for rows in (kept, batch.harmful)
    ]
    one, other = (torch.cat([slope.flatten() for slope in each]) for each in slopes)
    cosine = one @ other / (one.norm() * other.norm())
    assert terms["cosine"].value.item() == pytest.approx(cosine.item(), rel=1e-5)
    measured, exact = (
        torch.cat([each.flatten() for each in grads]) for grads in (found, torch.autograd.grad(cosine, weights))
    )
    assert (measured - exact).norm() < 0.01 * exact.norm()
    assert (terms["cosine"].weight, terms["retained"].weight) == (1e-2, 1.0)
    assert terms["retained"].value.item() == pytest.approx(loss_of_rows(model, kept).item())
    states = model(
        input_ids=batch.harmful.input_ids, attention_mask=batch.harmful.attention_mask, output_hidden_states=True
    ).hidden_states
    depths = [loss_of_rows(model, batch.harmful).item()]
    for state in states[:-1]:
        logits = model.lm_head(model.model.norm(state))[:, :-1].flatten(0, 1)
        depths.append(torch.nn.functional.cross_entropy(logits, batch.harmful.labels[:, 1:].flatten()).item())
    assert ascent["ascent"].value.item() == pytest.approx(np.log1p(np.mean(depths)))
    assert (ascent["ascent"].weight, harmless["harmless"].weight) == (-1.0, 1.0)
    with pytest.raises(UsageError, match="self-destruction needs rows of answers that the model should keep"):
        immunize(model, pairs, defense="self-destruction", settings=SHORT)
