"""One fine-tuning attack: it learns, it is exact, it never touches its victim, and collapse is not resistance."""

import copy
import json
import math
from dataclasses import replace

import attacked_models as attacked
import pytest
import torch

from netweight.attacks.finetuning.attack import AttackResult, attacked_model, run_attack
from netweight.attacks.finetuning.rounded_steps import rounded_at_random
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Domain, Goal, Subject, in_parts, mean_loss, token_accuracy
from netweight.core.digests import canonical_json
from netweight.core.seeds import torch_generator
from netweight.data.tokens import Example, collate
from netweight.errors import NameNotFound, UsageError

FAST = AttackSettings(lr=1e-2, samples=60, epochs=8, batch_size=12, check_every=5)


@pytest.fixture(scope="module")
def subject():
    return attacked.subject()


def test_an_attack_recovers_and_leaves_its_victim_alone(subject):
    before = copy.deepcopy(subject.model.state_dict())
    gradients = [parameter.grad.clone() for parameter in subject.model.parameters()]  # left there by its training
    torch.manual_seed(3)
    state = torch.get_rng_state()
    result = run_attack(subject, FAST, Goal(0.9))
    assert result.outcome == "recovered"
    assert result.steps == result.time
    assert [look.step for look in result.curve] == list(range(0, result.steps + 10, 5))[: len(result.curve)]
    below, at = [look for look in result.curve if look.step < result.steps], result.curve[-2]
    assert all(look.score < 0.9 for look in below)
    assert at.step == result.steps
    assert at.score >= 0.9 <= at.ability
    assert result.last_step == result.steps + 5  # one more look, then it stops
    assert all(torch.equal(before[name], value) for name, value in subject.model.state_dict().items())
    assert all(torch.equal(grad, p.grad) for grad, p in zip(gradients, subject.model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_the_seed_decides_and_a_ledger_can_keep_the_result(subject):
    first, again, other = (run_attack(subject, FAST.replace(seed=seed), Goal(0.9)) for seed in (1, 1, 2))
    assert first == again
    assert first.curve[1:] != other.curve[1:]
    assert AttackResult.from_json(json.loads(canonical_json(first, allow_nan=True))) == first


def test_the_attacked_model_is_the_one_that_was_looked_at(subject):
    settings, before = FAST.replace(max_steps=10), copy.deepcopy(subject.model.state_dict())
    made = attacked_model(subject, settings)
    assert subject.score("harmful")(made) == run_attack(subject, settings, Goal(None)).curve[-1].score
    assert not made.training
    assert all(torch.equal(before[name], value) for name, value in subject.model.state_dict().items())


def test_dropout_is_seeded_too(subject):
    noisy = replace(subject, model=attacked.TinyModel(dropout=0.3), ability=None)
    first, again = (run_attack(noisy, FAST.replace(max_steps=10), Goal(None)) for _ in range(2))
    assert first == again


def test_every_step_is_what_plain_torch_does(subject):
    settings = AttackSettings(lr=3e-3, samples=24, epochs=2, batch_size=10, warmup=0.34, check_every=3, seed=5)
    victim = copy.deepcopy(subject.model)
    train = subject.domains["harmful"].train
    rows = torch.randperm(len(train), generator=torch_generator(5, "samples"))[:24].tolist()
    generator = torch_generator(5, "order")
    order = [rows[place] for _ in range(2) for place in torch.randperm(24, generator=generator).tolist()]
    optimizer = torch.optim.Adam(victim.parameters(), lr=1.0, foreach=False, fused=False)
    rates = [1.5e-3, 3e-3] + [3e-3 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    for step, (first, last) in enumerate([(0, 10), (10, 20), (20, 24), (24, 34), (34, 44), (44, 48)]):
        batch = collate([train[row] for row in order[first:last]], pad_id=0)
        logits = victim(batch.input_ids, batch.attention_mask).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(victim.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rates[step]
        optimizer.step()
    weights = []

    def spy(model):
        weights.append(copy.deepcopy(model.state_dict()))
        return 0.0

    spied = replace(subject, domains={"harmful": Domain(train, (), score=spy)})
    result = run_attack(spied, settings, Goal(None))
    assert result.last_step == settings.steps == 6
    for name, value in victim.state_dict().items():
        torch.testing.assert_close(weights[-1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "adamw"},
        {"optimizer": "sgd", "lr": 1.0},
        {"optimizer": "schedule-free", "lr": 3e-2, "schedule": "constant"},
        {"lora_rank": 4, "lr": 3e-2, "epochs": 16},
        {"loss_on": "full", "epochs": 12},
        {"schedule": "constant"},
        {"precision": "bf16"},
        {"precision": "mixed"},
        {"precision": "rounded"},
        {"precision": "rounded", "optimizer": "muon", "lr": 3e-2},
        {"precision": "rounded", "lora_rank": 8, "lr": 3e-2, "epochs": 16},
        {"precision": "rounded", "average": 0.5},
        {"benign_first": 7},
        {"benign_share": 0.5, "epochs": 6},
        {"clip": None},
    ],
    ids=str,
)
def test_every_way_of_training_recovers(subject, change):
    settings = FAST.replace(**change)
    result = run_attack(subject, settings, Goal(0.9, least_ability=0.5))
    assert result.outcome == "recovered", result.curve
    assert result.steps > settings.benign_first


def test_bfloat16_alone_loses_small_updates_that_float32_keeps(subject):
    small = AttackSettings(lr=1e-5, samples=60, max_steps=5, warmup=0.0, schedule="constant", check_every=1)
    moved = {}
    for precision in ("fp32", "bf16", "rounded"):
        counts = []

        def share_moved(model, counts=counts):
            now = torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])
            counts.append(now)
            return 0.0

        victim = copy.deepcopy(subject.model).bfloat16()
        watched = replace(
            subject, model=victim, domains={"harmful": Domain(subject.domains["harmful"].train, (), share_moved)}
        )
        run_attack(watched, small.replace(precision=precision), Goal(None))
        moved[precision] = counts[-1] - counts[0]
    assert float((moved["bf16"] != 0).float().mean()) < 0.25 * float((moved["fp32"] != 0).float().mean())
    # What random rounding keeps are the steps in the mean: their projection on those of float32.
    kept = {name: float(moved[name] @ moved["fp32"] / (moved["fp32"] @ moved["fp32"])) for name in moved}
    assert kept["rounded"] == pytest.approx(1, abs=0.35)


def test_numbers_are_rounded_to_a_neighbor_and_to_themselves_in_the_mean():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, generator=generator) * torch.logspace(-20, 20, 64)
    drawn = torch.stack([rounded_at_random(values, generator).double() for _ in range(4000)])
    apart = (drawn - values.double()).abs().amax(0) / values.double().abs()
    assert float(apart.max()) <= 2**-7
    spread = drawn.std(0) / 4000**0.5
    assert bool(((drawn.mean(0) - values.double()).abs() <= 5 * spread + 1e-12 * values.abs()).all())
    fixed = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan])
    same = rounded_at_random(fixed[:5], generator)
    assert torch.equal(same, fixed[:5].bfloat16())
    assert bool(rounded_at_random(fixed, generator)[5].isnan())


def test_batches_whose_logits_would_not_fit_go_in_parts_with_the_same_result(subject, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is in the llm extra")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    data = {"harmful": Domain(attacked.cipher(3, 12, 23, count=60), attacked.cipher(3, 12, 23, start=1000, count=30))}
    victim = Subject(transformers.LlamaForCausalLM(config), data, 0)
    settings = FAST.replace(max_steps=10, batch_size=13)
    whole = run_attack(victim, settings, Goal(None))
    monkeypatch.setattr("netweight.attacks.finetuning.subject._MOST_LOGITS", 24 * 20 * 5)
    parts = [len(each.input_ids) for each in in_parts(collate(data["harmful"].train[:13], pad_id=0), victim.model)]
    assert max(parts) < 13
    assert sum(parts) == 13
    in_pieces = run_attack(victim, settings, Goal(None))
    for one, other in zip(whole.curve, in_pieces.curve, strict=True):
        assert one.score == pytest.approx(other.score, abs=0.02)
        assert one.loss == other.loss is None or one.loss == pytest.approx(other.loss, rel=1e-3)
        assert (one.rows, one.flops) == (other.rows, other.flops)


def test_an_attacker_who_mixes_benign_examples_in_keeps_more(subject):
    batches = []

    class Watching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(subject.model)

        def forward(self, input_ids, attention_mask):
            if self.training:
                batches.append(input_ids.clone())
            return self.inner(input_ids, attention_mask)

    mixed = FAST.replace(benign_share=0.25, benign_first=1, max_steps=6)
    run_attack(replace(subject, model=Watching()), mixed, Goal(None))
    benign = [int((batch[:, 0] < 12).sum()) for batch in batches]
    assert benign == [12, 3, 3, 3, 3, 3]
    hot = FAST.replace(lr=3e-2, max_steps=40, optimizer="adam", schedule="constant")
    alone, with_benign = (run_attack(subject, hot.replace(benign_share=share), Goal(None)) for share in (0, 0.5))
    assert with_benign.curve[-1].ability > alone.curve[-1].ability


def test_a_collapsed_model_is_not_a_resistant_one(subject):
    wild = FAST.replace(lr=3.0, optimizer="sgd", clip=None, epochs=2, schedule="constant", loss_on="full")
    result = run_attack(subject, wild, Goal(1.1))
    assert result.outcome in ("collapsed", "diverged")
    assert result.steps is None
    gentle = FAST.replace(lr=1e-6, epochs=1)
    assert run_attack(subject, gentle, Goal(0.9)).outcome == "resisted"
    # The score is there, but not the model: what it kept is far below the model before its defense.
    spoiled = replace(subject, reference_ability=1.0, ability=lambda model: 0.5)
    assert run_attack(spoiled, FAST, Goal(0.9)).outcome == "collapsed"
    mute = replace(subject, fluency=lambda model: 0.1)
    assert run_attack(mute, FAST, Goal(0.9, fluency_at_least=0.5)).outcome == "collapsed"
    assert run_attack(mute, FAST, Goal(0.9)).outcome == "recovered"


def test_nan_is_an_outcome(subject):
    broken = copy.deepcopy(subject.model)
    calls = []

    def forward(input_ids, attention_mask, real=broken.forward):
        calls.append(1)
        answer = real(input_ids, attention_mask)
        if len(calls) > 4:
            answer.logits = answer.logits * math.nan
        return answer

    class Breaking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = broken

        def forward(self, input_ids, attention_mask):
            return forward(input_ids, attention_mask)

    result = run_attack(replace(subject, model=Breaking()), FAST.replace(check_every=2), Goal(0.9))
    assert result.outcome == "diverged"
    assert result.steps is None
    assert math.isnan(result.curve[-1].score)
    assert result.last_step < FAST.steps


def test_a_threshold_reached_before_the_first_step(subject):
    result = run_attack(subject, FAST, Goal(0.0, extra_checks=0))
    assert (result.outcome, result.steps, len(result.curve)) == ("recovered", 0, 1)


def test_far_from_the_threshold_some_rows_are_scored_and_near_it_and_at_the_end_all(subject):
    train = subject.domains["harmful"].train
    held_out = attacked.cipher(3, 12, 23, start=2000, count=70)
    assert subject.quick_score("harmful") is None  # of 30 rows
    many = replace(subject, domains={"harmful": Domain(train, held_out)})
    exact, quick = run_attack(many, FAST, Goal(0.9)), run_attack(many, FAST, Goal(0.9, near=0.12))
    assert (quick.outcome, quick.steps) == ("recovered", exact.steps)
    pairs = [(one.score, other.score) for one, other in zip(exact.curve, quick.curve, strict=True)]
    assert any(one != other for one, other in pairs)
    assert all(one == other for one, other in pairs if other >= 0.9 - 0.12)
    assert all(abs(one - other) < 0.12 for one, other in pairs)
    short, whole = (run_attack(many, FAST.replace(max_steps=5), Goal(0.9, near=each)) for each in (0.12, None))
    assert short.curve[-1] == whole.curve[-1]  # the last score is of all rows
    every = run_attack(many, FAST, Goal(0.9, near=1.0))
    assert every.curve == exact.curve
    assert many.quick_score("harmful")(many.model) == token_accuracy(held_out[::2][:32], pad_id=0)(many.model)
    own = replace(subject, domains={"harmful": Domain(train, held_out, score=lambda model: 0.0)})
    assert own.quick_score("harmful") is None
    with pytest.raises(UsageError, match="near must be at least 0"):
        Goal(0.9, near=-1)


def test_losses_recover_downwards_and_domains_have_thresholds_of_their_own(subject):
    train, held_out = subject.domains["harmful"].train, subject.domains["harmful"].held_out
    loss = Domain(train, held_out, score=mean_loss(held_out, pad_id=0), threshold=0.3)
    result = run_attack(replace(subject, domains={"harmful": loss}), FAST, Goal(0.01, lower_is_recovered=True))
    assert result.outcome == "recovered"
    assert result.curve[0].score > 1 > 0.3 >= result.curve[-2].score


def test_a_row_of_both_attack_and_evaluation_is_named():
    train = attacked.cipher(3, 12, 23, count=10)
    with pytest.raises(UsageError, match=r"Evaluation row 1 has the same prompt as attack row 4\."):
        Domain(train, [Example((1, 2), (3,)), Example(train[4].prompt, (1,))])
    Domain(train, [Example(train[4].prompt, (1,))], apart_by="example")
    with pytest.raises(UsageError, match="same example as attack row 4"):
        Domain(train, [train[4]], apart_by="example")
    with pytest.raises(UsageError, match="Attack row 0 is one token long"):
        Domain([Example((), (1,))], train)
    with pytest.raises(UsageError, match="needs examples to train on"):
        Domain([], train)


def test_what_cannot_be_is_refused_before_training(subject):
    with pytest.raises(UsageError, match="asks for 61 samples, and the domain 'harmful' has 60"):
        run_attack(subject, FAST.replace(samples=61), Goal(0.9))
    with pytest.raises(NameNotFound, match=r"no data named 'harmfull'.*Nearest: harmful"):
        run_attack(subject, FAST.replace(domain="harmfull"), Goal(0.9))
    with pytest.raises(NameNotFound, match="harmful@chat"):
        run_attack(subject, FAST.replace(template="chat"), Goal(0.9))
    with pytest.raises(UsageError, match="needs benign examples"):
        run_attack(replace(subject, benign=()), FAST.replace(benign_first=3), Goal(0.9))
    with pytest.raises(UsageError, match="needs benign examples"):
        run_attack(replace(subject, benign=()), FAST.replace(benign_share=0.5), Goal(0.9))
    with pytest.raises(UsageError, match=r"reference ability is -0\.5"):
        run_attack(replace(subject, ability=lambda model: -0.5), FAST, Goal(0.9))
    for wrong in ({"threshold": math.nan}, {"threshold": 1, "least_ability": 2}, {"threshold": 1, "extra_checks": -1}):
        with pytest.raises(UsageError):
            Goal(**wrong)


def test_the_digest_knows_weights_and_data(subject):
    digest = subject.digest()
    assert digest == attacked.subject().digest()
    assert digest != attacked.subject(seed=1).digest()
    fewer = Domain(subject.domains["harmful"].train[1:], subject.domains["harmful"].held_out)
    assert digest != replace(subject, domains={"harmful": fewer}).digest()


def test_a_transformers_model_is_a_victim_as_it_is():
    transformers = pytest.importorskip("transformers", reason="transformers is in the llm extra")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config)
    held_out = attacked.cipher(3, 12, 23, start=1000, count=30)
    subject = Subject(model, {"harmful": Domain(attacked.cipher(3, 12, 23, count=60), held_out)}, 0)
    for settings in (FAST, FAST.replace(lora_rank=4, lr=3e-2, epochs=16)):
        assert run_attack(subject, settings, Goal(0.9)).outcome == "recovered"
    assert model.config.use_cache
    assert token_accuracy(held_out, pad_id=0)(model) < 0.5
