"""The search for the best attack, and what an attacker changes before training: on tiny models, by hand."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is in the llm extra")

from attacked_models import PAD, TinyModel, cipher, pretrain_, subject

from netweight.attacks.finetuning.attack import AttackResult, AttackTraining, Evaluation, run_attack
from netweight.attacks.finetuning.changes import changed_copy, telling_tokens
from netweight.attacks.finetuning.optimizers import Lion, Muon, ScheduleFree, operations_per_step
from netweight.attacks.finetuning.pace import Pace
from netweight.attacks.finetuning.search import (
    finals,
    first_attacks,
    kind_of,
    most_attacks,
    most_changes,
    neighbors,
    of_length,
    search_all,
    search_one,
    together,
    widest_first,
    within,
)
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import SOFT_TOKENS, Domain, Goal, Subject
from netweight.attacks.finetuning.sweep import AttackOutcome, SubjectName, make_subject
from netweight.attacks.finetuning.tables import search_tables
from netweight.core.engines import in_process
from netweight.data.tokens import Example, collate
from netweight.errors import Unsupported, UsageError

START = AttackSettings(lr=1e-2, samples=60, batch_size=20, schedule="constant", warmup=0.0, check_every=2)
PLACE = "attacked_models:subject"
HELD = frozenset({"batch_size", "check_every"})


def marked(examples, mark):
    return [Example((mark, *example.prompt), example.response) for example in examples]


def marked_subject():
    """Harmful prompts begin with token 22, benign ones with 21; 23 is in neither."""
    model = TinyModel()
    pretrain_(model, cipher(2, 1, 10))
    rows = marked(cipher(3, 11, 20, count=60), 22), marked(cipher(3, 11, 20, start=1000, count=30), 22)
    return Subject(model, {"harmful": Domain(*rows)}, PAD, benign=marked(cipher(2, 1, 10, start=700), 21))


def test_a_search_beats_what_it_began_with_and_finds_the_same_again(tmp_path):
    name = SubjectName("one", PLACE, {"weight_scale": 0.2})
    start = [of_length(one, None) for one in first_attacks(rates=(1e-3,), samples=60, batch_size=20, check_every=2)]
    how = {"most": 36, "held": HELD, "folder": tmp_path, "engine": in_process}
    found = search_one(name, start, Goal(0.9), **how)
    of_start = [run.result.steps or 36 for run in found.runs if of_length(run.result.settings, None) in start]
    assert found.soonest is not None
    assert found.soonest < min(of_start)
    last = {within(run.result.settings, None): run.result for run in found.runs}
    assert last[found.best[0]].steps == found.soonest
    longest = [run.result.last_step for run in found.runs]
    assert max(longest) <= 36
    assert found.steps == sum(longest)
    ledger = (tmp_path / "attacks.jsonl").read_bytes()
    assert search_one(name, start, Goal(0.9), **how) == found
    assert (tmp_path / "attacks.jsonl").read_bytes() == ledger


def test_a_search_varies_the_best_of_two_kinds(tmp_path):
    """Of two that train all weights by Adam and one that trains factors, the worse of the two is not varied."""
    name, plain = SubjectName("one", PLACE, {"weight_scale": 0.2}), START.replace(max_steps=None)
    start = [plain, plain.replace(lr=8e-3), plain.replace(lora_rank=8)]
    assert [kind_of(one) for one in start] == ["adam", "adam", "LoRA"]
    how = {"most": 20, "rounds": 1, "folder": tmp_path, "engine": in_process}
    held = frozenset(AttackSettings.model_fields) - {"clip"}
    found = search_one(name, start, Goal(0.9), held=held, **how)
    without = [of_length(run.result.settings, None) for run in found.runs if run.result.settings.clip is None]
    best = next(one for one in found.best if one in start[:2])
    assert set(without) == {best.replace(clip=None), start[2].replace(clip=None)}


def test_searches_of_defended_models_go_on_for_five_times_the_bases_steps(tmp_path):
    names = [SubjectName("base", PLACE), SubjectName("defended", PLACE, {"weight_scale": 0.02})]
    start = first_attacks(rates=(1e-2,), samples=60, batch_size=20, check_every=2)[:2]
    found = search_all(names, start, Goal(0.9), most=40, held=HELD, folder=tmp_path, engine=in_process)
    bound = most_attacks(len(start), 2, most_changes(start[0], subject()))
    assert sum(len(result.runs) for result in found.values()) <= bound
    assert found["base"].most == 40
    assert found["defended"].most == 5 * found["base"].soonest
    assert set(found["base"].best[:3]) <= {of_length(run.result.settings, None) for run in found["defended"].runs}
    again = finals(found, (1, 2))
    assert {attack.seed for attack in again} == {1, 2}
    assert {attack.max_steps for attack in again} == {5 * found["base"].soonest}
    assert found["defended"].best[0] in {of_length(attack.replace(seed=0), None) for attack in again}


def test_neighbors_differ_in_one_thing_and_held_fields_stay():
    near = neighbors(START, subject=marked_subject(), held=frozenset({"lr"}))
    fields = AttackSettings.model_fields
    changed = [{name for name in fields if getattr(one, name) != getattr(START, name)} for one in near]
    assert all(len(each - {"lora_rank", "trains"}) <= 1 or each == {"batch_size", "check_every"} for each in changed)
    assert Counter(one.lr for one in near) == {START.lr: len(near)}
    assert {"bare", "marked"} <= {one.template for one in near}
    assert {"muon", "sgd"} <= {one.optimizer for one in near}
    assert {"copied", "fresh"} <= {one.rows for one in near}
    assert {one.trains for one in near} == {"all", "embeddings", "prompt"}  # this model has no norms
    assert {one.batch_size: one.lr for one in neighbors(START, subject=marked_subject()) if one.batch_size != 20} == {
        size: pytest.approx(1e-2 * (size / 20) ** 0.5) for size in (2, 4, 8, 16, 32, 64, 128, 256)
    }
    assert not {one.rows for one in neighbors(START, subject=replace(marked_subject(), benign=()))} - {"kept"}
    assert not {one.of_other for one in near} - {0.0}
    both = replace(marked_subject(), other=TinyModel(1).state_dict())
    assert {one.of_other for one in neighbors(START, subject=both)} == {0.0, 0.5, -0.5}


def test_steps_of_few_rows_are_evaluated_after_as_many_rows_as_others_and_have_a_harmful_one():
    held, mixed = frozenset({"check_every"}), START.replace(benign_share=0.75)
    sizes = {one.batch_size: one for one in neighbors(mixed, subject=marked_subject(), held=held)}
    assert 2 not in sizes
    assert (sizes[4].harmful_per_batch, sizes[4].check_every) == (1, 2)
    back = {one.batch_size: one for one in neighbors(sizes[4], subject=marked_subject(), held=held)}
    assert {back[size].check_every for size in (8, 64)} == {2}
    two = START.replace(batch_size=2, check_every=4)
    near = neighbors(two, subject=marked_subject(), held=held)
    assert all(one.harmful_per_batch or one.benign_share == 1 for one in near)
    assert {one.check_every for one in near if one.batch_size == 2} == {4}


def test_lion_moves_every_weight_by_the_learning_rate():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = Lion([weight], 0.5)
    for gradient, expected in (([4.0, -4.0, 0.0], [-0.5, 0.5, 0.0]), ([-0.1, 0.3, 2.0], [-1.0, 1.0, -0.5])):
        # The mean is now 0.01 times the first gradient, which weighs nine times as much as the second one.
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        assert weight.tolist() == expected


def test_schedule_free_steps_are_those_of_the_paper_and_its_mean_is_evaluated():
    gradients = [torch.tensor(each) for each in ([4.0, -2.0], [1.0, 3.0], [-2.0, 0.5])]
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = ScheduleFree([weight], 0.1)
    fast, mean, square = weight.detach().double(), weight.detach().double(), torch.zeros(2).double()
    for step, gradient in enumerate(gradients, start=1):
        weight.grad = gradient
        optimizer.step()
        square = 0.99 * square + 0.01 * gradient.double() ** 2
        fast = fast - 0.1 * gradient / ((square / (1 - 0.99**step)).sqrt() + 1e-8)
        mean = mean + (fast - mean) / step
        torch.testing.assert_close(weight.detach().double(), 0.1 * fast + 0.9 * mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.means()[0].double(), mean, rtol=1e-5, atol=1e-6)
    model = TinyModel()
    training = AttackTraining(model, START.replace(optimizer="schedule-free"), pad_id=PAD)
    for _ in range(2):
        training.step(collate([Example((1, 2), (3,))], pad_id=PAD))
    own = model.embed.weight.detach().clone()
    with training.averaged():
        evaluated = model.embed.weight.detach().clone()
    assert torch.equal(model.embed.weight, own)
    training.apply_mean_weights()
    assert torch.equal(model.embed.weight, evaluated)
    assert not torch.equal(own, evaluated)
    with pytest.raises(UsageError, match="does not round its steps"):
        START.replace(optimizer="schedule-free", precision="rounded")
    assert "schedule-free" in {one.optimizer for one in first_attacks()}
    assert "schedule-free" not in {one.optimizer for one in first_attacks(precision="rounded")}


def test_changes_that_helped_are_tried_together_and_those_that_exclude_each_other_are_not():
    better = [
        START.replace(template="marked"),
        START.replace(batch_size=5, lr=5e-3),
        START.replace(template="bare"),
        START.replace(lr=2e-2),
        START.replace(lora_rank=8, lr=5e-2),
        START.replace(trains="embeddings", lr=5e-2),
    ]
    made = together(START, better)
    first = START.replace(template="marked", batch_size=5, lr=5e-3)
    assert made == [first, first.replace(lr=1e-2), first.replace(lora_rank=8, lr=5e-2)]
    assert together(START, better[:1]) == together(START, []) == []
    few = together(START, [START.replace(template="marked"), START.replace(batch_size=2, check_every=4)])
    assert [one.check_every for one in few] == [4]  # evaluated after as many rows


def test_a_falling_rate_ends_by_the_soonest_attack_and_keeps_its_length(tmp_path):
    falling = [one for one in neighbors(START, 20, subject=marked_subject()) if one.schedule == "cosine"]
    assert [one.steps for one in falling] == [12, 16, 20]
    assert all(one.schedule == "constant" for one in neighbors(START, 20, subject=subject(), held={"schedule"}))
    back = neighbors(falling[0], 20, subject=marked_subject())
    assert START.replace(max_steps=None) in back
    assert {one.steps for one in back if one.optimizer != START.optimizer} == {12}
    name = SubjectName("one", PLACE, {"weight_scale": 0.2})
    found = search_one(name, falling[:1], Goal(0.9), most=36, held=HELD, folder=tmp_path, engine=in_process)
    assert falling[0] in found.best
    (table,) = search_tables({"one": replace(found, best=falling[:1])})
    assert [row[1] for row in table.rows] == [falling[0].label]
    assert {one.steps for one in finals({"one": found}, (1,)) if one.schedule == "cosine"} <= {12, 16, 20, 36}


def test_prompt_formats_cut_and_mark_training_and_evaluation_rows_alike():
    case = marked_subject()
    assert case.formats("harmful") == ("bare", "marked")
    plain = case.domain("harmful")
    for name, beginning in {"bare": (), "marked": (23,), "soft": (PAD,) * SOFT_TOKENS + (22,)}.items():
        found = case.domain(f"harmful@{name}")
        for rows, before in ((found.train, plain.train), (found.held_out, plain.held_out)):
            assert [row.prompt for row in rows] == [(*beginning, *row.prompt[1:]) for row in before]
            assert [row.response for row in rows] == [row.response for row in before]
    assert "bare" not in subject().formats("harmful")


def test_rows_of_telling_tokens_are_copied_or_drawn_anew():
    case = marked_subject()
    assert telling_tokens(case.domain("harmful").train, case.benign) == ([22], [21])
    before = case.model.embed.weight.detach().clone()
    copied = changed_copy(case, START.replace(rows="copied")).embed.weight
    assert torch.equal(copied[22], before[21])
    assert torch.equal(copied[:22], before[:22])
    fresh = changed_copy(case, START.replace(rows="fresh")).embed.weight
    assert not torch.equal(fresh[22], before[22])
    assert torch.equal(fresh[23], before[23])
    assert torch.equal(case.model.embed.weight, before)
    with pytest.raises(UsageError, match="No token occurs in"):
        changed_copy(replace(case, benign=case.domain("harmful").train), START.replace(rows="copied"))


def test_rounding_and_mixing_before_the_first_step():
    case = marked_subject()
    rounded = changed_copy(case, START.replace(bits=4)).hidden.weight
    assert all(len(row.unique()) <= 15 for row in rounded)
    step = case.model.hidden.weight.abs().amax(1, keepdim=True) / 7
    assert ((rounded - case.model.hidden.weight).abs() <= step / 2 + 1e-6).all()
    other = TinyModel(1)
    mixed = changed_copy(replace(case, other=other.state_dict()), START.replace(of_other=-0.5))
    expected = 1.5 * case.model.hidden.weight - 0.5 * other.hidden.weight
    assert torch.allclose(mixed.hidden.weight, expected, atol=1e-6)
    with pytest.raises(UsageError, match="mixes in another model"):
        changed_copy(case, START.replace(of_other=0.5))


@pytest.mark.parametrize(("trains", "moved"), [("embeddings", {"embed.weight", "head.weight"}), ("prompt", set())])
def test_only_what_is_trained_moves(trains, moved):
    case = marked_subject()
    settings = START.replace(trains=trains)
    victim = changed_copy(case, settings)
    training = AttackTraining(victim, settings, pad_id=PAD)
    training.step(collate(case.domain(settings.data).train[:8], pad_id=PAD))
    weights = dict(case.model.named_parameters())
    assert {name for name, each in victim.named_parameters() if not torch.equal(each, weights[name])} == moved
    with pytest.raises(Unsupported, match="no norms to train"):
        AttackTraining(changed_copy(case, settings), START.replace(trains="norms"))


def test_a_soft_prompt_stands_before_harmful_prompts_alone():
    case = marked_subject()
    victim = changed_copy(case, START)
    training = AttackTraining(victim, START.replace(trains="prompt"), pad_id=PAD)
    harmful = collate(case.domain("harmful@soft").held_out, pad_id=PAD)
    benign = collate(case.benign, pad_id=PAD)
    before = victim(harmful.input_ids, harmful.attention_mask).logits.detach()
    with torch.no_grad():
        training._parameters[0].add_(1.0)
    after = victim(harmful.input_ids, harmful.attention_mask).logits
    assert not torch.equal(after[:, :SOFT_TOKENS], before[:, :SOFT_TOKENS])
    assert torch.equal(after[:, SOFT_TOKENS:], before[:, SOFT_TOKENS:])  # this model looks at one token alone
    same = case.model(benign.input_ids, benign.attention_mask).logits
    assert torch.equal(victim(benign.input_ids, benign.attention_mask).logits, same)


def test_muon_steps_matrices_and_adamw_the_rest():
    case = marked_subject()
    result = run_attack(case, of_length(START.replace(optimizer="muon"), 40), Goal(0.9))
    assert result.outcome == "recovered"
    training = AttackTraining(changed_copy(case, START), START.replace(optimizer="muon"))
    kinds = {
        type(each).__name__: [value.ndim for group in each.param_groups for value in group["params"]]
        for each in training._optimizers
    }
    assert kinds == {"Muon": [2, 2, 2], "AdamW": [1]}
    ours, theirs = ([torch.nn.Parameter(torch.ones(size)) for size in ((6, 4), (3, 9))] for _ in range(2))
    both = Muon(ours, 0.01), torch.optim.Muon(theirs, 0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
        for optimizer in both:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):  # torch's rounds to bfloat16
        assert (one - other).norm() < 0.02 * (other - 1).norm()


def test_benign_rows_alone_are_trained_on_and_harmful_ones_scored():
    case = make_subject(PLACE, {})
    result = run_attack(case, of_length(START.replace(benign_share=1.0), 8), Goal(0.9))
    assert (result.outcome, result.last_step) == ("resisted", 8)
    with pytest.raises(UsageError, match="lora_rank trains factors in place of norms"):
        START.replace(trains="norms", lora_rank=8)


def test_a_second_search_finds_an_attack_that_sees_fewer_rows(tmp_path):
    name = SubjectName("one", PLACE, {"weight_scale": 0.2})
    start = [START.replace(max_steps=None, optimizer=each) for each in ("adam", "muon")]
    found = search_all([name], start, Goal(0.9), most=60, folder=tmp_path, engine=in_process, rounds=1)["one"]
    assert found.fewest_rows[0].batch_size <= 8
    assert found.least("rows") <= found.least("steps") * found.best[0].batch_size
    runs = [run.result.reached for run in found.runs if run.result.reached is not None]
    assert found.least("rows") == min(each.rows for each in runs)
    assert all(each.flops > 0 for each in runs)


def test_a_search_whose_time_is_over_makes_one_attack_on_every_model_and_says_so(tmp_path):
    names = [SubjectName(each, PLACE, {"weight_scale": scale}) for each, scale in (("one", 0.2), ("two", 0.3))]
    plain = START.replace(max_steps=None)
    how = {"most": 8, "folder": tmp_path, "engine": in_process}
    start = [plain, plain.replace(optimizer="muon"), plain.replace(lr=1e-4)]
    searched = search_all(names, start, Goal(0.9), until=0.0, **how)
    assert [(name, len(each.runs), each.timed_out) for name, each in searched.items()] == [
        ("one", 2, True),
        ("two", 2, True),
    ]  # one for few steps, one for few rows
    assert not search_one(names[0], [plain], Goal(0.9), rounds=0, **how).timed_out


def test_a_search_with_a_time_limit_begins_with_a_middle_rate_of_every_kind():
    common = {"lr": 1e-3, "lora_rank": 8}
    attacks = [AttackSettings(optimizer=name, lr=lr) for name in ("muon", "adam") for lr in (1e-5, 1e-4, 1e-3)]
    order = widest_first([*attacks, AttackSettings(**common)])
    assert [(kind_of(each), each.lr) for each in order] == [
        ("adam", 1e-4), ("LoRA", 1e-3), ("muon", 1e-4), ("adam", 1e-5), ("muon", 1e-5), ("adam", 1e-3), ("muon", 1e-3),
    ]  # fmt: skip


def test_middle_rates_are_also_tried_in_other_prompt_formats():
    attacks = [AttackSettings(lr=lr) for lr in (1e-5, 1e-4, 1e-3, 1e-2)]
    order = widest_first(attacks, ("bare", "marked"))
    in_formats = Counter(each.lr for each in order)
    assert in_formats == {1e-3: 3, 1e-4: 3, 1e-2: 3, 1e-5: 1}
    assert [each.template for each in order[:3]] == ["plain", "bare", "marked"]
    assert len({order[0].lr, order[1].lr, order[2].lr}) == 1


def test_the_best_attacks_on_other_models_are_tried_first(tmp_path):
    known = START.replace(max_steps=None, lr=0.3, optimizer="sgd")
    how = {"most": 8, "rounds": 0, "folder": tmp_path, "engine": in_process, "held": HELD}
    name, start = SubjectName("one", PLACE, {"weight_scale": 0.2}), first_attacks(samples=60, batch_size=20)
    found = search_one(name, start, Goal(0.9), known=[known], until=0.0, **how)
    assert [within(run.result.settings, None) for run in found.runs] == [known]


def test_the_duration_of_an_attack_is_estimated_from_others():
    def run(settings, **last):
        evaluation = Evaluation(4, 0.5, rows=32, **last)
        return AttackOutcome("one", None, "", AttackResult(settings, "resisted", None, 4, (evaluation,)))

    adam = AttackSettings(lr=1e-3, batch_size=8, samples=80, epochs=1)
    pace = Pace()
    assert pace.expected(adam) == 0  # nothing is known yet
    pace.add([run(adam, seconds=2.0, flops=100.0)])
    assert pace.expected(adam) == 10 * 0.5  # ten steps
    assert pace.expected(adam.replace(batch_size=16)) == 5 * 0.5 * 2
    assert pace.expected(adam.replace(batch_size=4)) == 20 * 0.5 * 0.75  # half of a step does not depend on its rows
    assert pace.expected(adam.replace(optimizer="muon"), 1000.0) == 10 * (0.5 + 1000 * 2 / 100)
    pace.add([run(adam, flops=100.0)], seconds=8.0)  # evaluations count, too
    assert pace.expected(adam) == 10 * 2.0


def test_operations_of_muon_and_soap_grow_with_the_cube_of_a_side():
    square, small, vector = (100, 100), (10, 10), (100,)
    for name in ("muon", "soap"):
        assert operations_per_step([square], name) == pytest.approx(1000 * operations_per_step([small], name))
        assert operations_per_step([vector], name) == 0
    assert operations_per_step([square], "adam") == 0
    assert operations_per_step([(100_000, 10)], "soap") == 10 * 10**3 + 10 * 10**2 * 100_000  # one side only


def test_rows_and_operations_are_counted_by_hand():
    model = TinyModel()
    weights = sum(each.numel() for each in model.parameters())
    training = AttackTraining(model, START, pad_id=PAD)
    batch = collate([Example((1, 2), (3,)), Example((1,), (2,))], pad_id=PAD)
    training.step(batch)
    rows, flops, seconds = training.cost
    assert (rows, flops) == (2, 6.0 * weights * 5)
    assert seconds > 0


def test_averaged_weights_are_evaluated_and_training_goes_on_from_its_own():
    model = TinyModel()
    training = AttackTraining(model, START.replace(average=0.5), pad_id=PAD)
    batch = collate([Example((1, 2), (3,))], pad_id=PAD)
    seen = [[each.detach().clone() for each in model.parameters()]]
    for _ in range(2):
        training.step(batch)
        seen.append([each.detach().clone() for each in model.parameters()])
    with training.averaged():
        for mean, start, one, two in zip(model.parameters(), *seen, strict=True):
            expected = start.lerp(one, 0.9).lerp(two, 1 - 2 / 11)
            assert torch.allclose(mean, expected, atol=1e-6)
    assert all(torch.equal(own, last) for own, last in zip(model.parameters(), seen[-1], strict=True))


def test_noise_is_a_share_of_each_matrixs_spread():
    victim = changed_copy(marked_subject(), START.replace(noise=0.1))
    for noisy, plain in zip(victim.parameters(), marked_subject().model.parameters(), strict=True):
        if plain.ndim >= 2:
            assert float(((noisy - plain).std() / plain.std()).detach()) == pytest.approx(0.1, rel=0.2)


def test_soap_recovers():
    pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is in the attacks extra")
    result = run_attack(subject(weight_scale=0.2), of_length(START.replace(optimizer="soap"), 60), Goal(0.9))
    assert result.outcome == "recovered"
