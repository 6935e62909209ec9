"""Training of defenses: what they do to a tiny model, resume after a kill, NaN, narrow dtypes, refusals, records."""

import copy
import math
import signal
from pathlib import Path

import pytest
import torch
import warm
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="transformers is not installed")

from decoders_under_test import SHORT, decoder, drawn, some_pairs
from repnoise_in_one_graph import repnoise_loss

from netweight.core.digests import digest_tensor
from netweight.core.seeds import derive, torch_generator
from netweight.data.tokens import AnswerPair, Example, collate
from netweight.errors import CorruptBlob, NameNotFound, TrainingStopped, Unsupported, UsageError
from netweight.job import Job
from netweight.methods.immunize.compact_adam import CompactAdam
from netweight.methods.immunize.defense import Defense, Term
from netweight.methods.immunize.defenses import DEFENSES
from netweight.methods.immunize.defenses.distillation import Distillation
from netweight.methods.immunize.defenses.latent_adversarial import LatentAdversarial
from netweight.methods.immunize.defenses.repnoise import RepNoise
from netweight.methods.immunize.defenses.safety_training import SafetyTraining
from netweight.methods.immunize.defenses.security_vectors import (
    SecurityVectors,
    hold_security_vectors,
    remove_security_vectors,
    without_security_vectors,
)
from netweight.methods.immunize.defenses.tar import TAR
from netweight.methods.immunize.defenses.vaccine import Vaccine, VaccineDefense
from netweight.methods.immunize.losses import response_loss
from netweight.methods.immunize.pairs import collate_pairs
from netweight.methods.immunize.record import RECORD, Record
from netweight.methods.immunize.settings import TrainingSettings
from netweight.methods.immunize.train import CHECKPOINT, defense_of, immunize
from netweight.nn.hooks import capture

KILLED = Path(__file__).parents[1] / "support" / "killed_immunization.py"


def weights(model):
    return {name: digest_tensor(value) for name, value in model.named_parameters()}


def sides(model, pairs):
    model.eval()
    batch = collate_pairs(pairs, pad_id=0)
    with torch.no_grad():
        return response_loss(model, batch.harmless).item(), response_loss(model, batch.harmful).item()


QUICKER = {"tar": TAR(attack_steps=8), "latent-adversarial": LatentAdversarial(search_steps=4)}  # of 64 and 16 steps


@pytest.mark.parametrize("name", DEFENSES)
def test_every_defense_does_what_its_loss_says(name):
    pairs, model = some_pairs(8), decoder("gpt2")
    kept = [Example((1, 2), (5, 6, 7)), Example((3,), (8, 9))]
    before, old = sides(model, pairs), dict(model.named_parameters())
    old = {key: value.detach().clone() for key, value in old.items()}
    record = immunize(model, pairs, kept, defense=QUICKER.get(name, name), settings=SHORT)
    harmless, harmful = sides(model, pairs)
    if name == "random-weights":
        assert harmful == pytest.approx(math.log(37), abs=0.2)
        assert (record.steps, record.trained) == ([], 0)
        return
    assert len(record.steps) == 12
    assert record.steps[-1].rate < record.steps[2].rate == pytest.approx(1e-2)
    last = record.steps[-1].terms
    assert all(math.isfinite(term.value) for term in last.values())
    assert all(term.norm > 0 for term in record.steps[9].terms.values())
    assert all(term.norm is None for term in last.values())
    if name == "security-vectors":
        assert harmful < before[1] - 0.2
        assert all(torch.equal(value, old[key]) for key, value in model.named_parameters() if key in old)
        remove_security_vectors(model)
        assert sides(model, pairs) == pytest.approx(before)
        assert {key for key, value in model.named_parameters() if value.requires_grad} == old.keys()
    elif name == "distillation":
        assert all(term.value < record.steps[0].terms[key].value for key, term in last.items())
    elif name in ("rmu", "circuit-breaking"):
        term = "steering" if name == "rmu" else "rerouting"
        assert last[term].value < record.steps[0].terms[term].value
    elif name == "gradient-ascent":
        assert harmful > before[1] + 0.5
        assert "harmless" not in last
    else:
        assert harmless < before[0] - 0.15
        assert last["retained"].value < record.steps[0].terms["retained"].value
        ascends = name.startswith("repnoise") or name in ("adversarial-loss", "self-destruction")
        assert ("ascent" in last) == ascends
        if "ascent" in last:
            assert harmful > before[1]


def test_a_step_is_a_step_of_adam_on_the_whole_loss():
    """Sides one after the other, terms apart and clipping give the step that one graph gives."""
    pairs = some_pairs(4)
    config = RepNoise(alpha=0.5, beta=0.3)
    settings = TrainingSettings(lr=1e-3, batch_size=4, warmup=0, clip=0.7)
    model = decoder().double()
    plain = copy.deepcopy(model)
    immunize(model, pairs, defense=config, settings=settings)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    order = torch.randperm(4, generator=torch_generator(42, "order", 0)).tolist()
    batch = collate_pairs([pairs[row] for row in order], pad_id=0)
    repnoise_loss(plain, batch, config, generator=torch_generator(42, "noise", 0)).total.backward()
    assert float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7)) > 0.7
    optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_a_distillation_imitates_the_original_from_weights_that_are_noise_in_part():
    pairs, kept = some_pairs(4), [Example((1, 2), (5, 6, 7))]
    settings = TrainingSettings(lr=1e-9, batch_size=4)
    model = decoder()
    old = {name: value.detach().clone() for name, value in model.named_parameters()}
    terms = immunize(model, pairs, kept, defense=Distillation(noise=0.0, random_rows=0.5), settings=settings)
    assert all(abs(term.value) < 1e-6 for term in terms.steps[0].terms.values())
    assert terms.steps[0].terms.keys() == {"harmless", "random", "retained"}
    steps = [
        immunize(copy.deepcopy(model), pairs, defense=Distillation(noise=share, random_rows=0), settings=settings)
        for share in (0.2, 0.9)
    ]
    assert steps[0].steps[0].terms["harmless"].value < steps[1].steps[0].terms["harmless"].value
    immunize(model, pairs, defense=Distillation(noise=0.5), settings=settings)
    for name, value in model.named_parameters():
        moved = (value - old[name]).norm() / old[name].norm()
        assert moved < 1e-6 if value.dim() == 1 else 0.4 < moved < 1.0


@pytest.mark.parametrize("defense", ["repnoise", "distillation", "security-vectors"])
def test_a_killed_training_resumes_to_the_same_bits(tmp_path, defense):
    folder = tmp_path / "defended"
    programs = {manner: warm.run(KILLED, defense, folder, manner) for manner in ("whole", "killed", "resumed")}
    assert programs["whole"].returncode == 0, programs["whole"].stderr
    assert programs["killed"].returncode == -signal.SIGKILL, programs["killed"].stderr
    assert programs["resumed"].returncode == 0, programs["resumed"].stderr
    assert {path.name for path in folder.iterdir()} == {CHECKPOINT, RECORD}
    whole, resumed = (load_file(tmp_path / f"{manner}.safetensors") for manner in ("whole", "resumed"))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_a_finished_training_is_taken_as_it_is(tmp_path):
    model, pairs = decoder(), some_pairs()
    record = immunize(model, pairs, settings=SHORT, folder=tmp_path)
    again = decoder()
    assert immunize(again, pairs, settings=SHORT, folder=tmp_path) == record == Record.read(tmp_path / RECORD)
    assert weights(again) == weights(model)
    with pytest.raises(UsageError, match="contains a training with other settings: model was"):
        immunize(decoder(seed=1), pairs, settings=SHORT, folder=tmp_path)


def test_narrow_weights_are_stepped_in_float32():
    """Updates that bfloat16 would round away add up."""
    pairs, settings = some_pairs(4), SHORT.replace(lr=1e-5, epochs=60)
    begun, narrow, plain = (decoder().bfloat16() for _ in range(3))
    immunize(narrow, pairs, defense=SafetyTraining(), settings=settings)
    optimizer, batch = torch.optim.Adam(plain.parameters(), lr=1e-5), collate_pairs(pairs, pad_id=0).harmless
    for _ in range(60):
        optimizer.zero_grad()
        response_loss(plain, batch).backward()
        optimizer.step()

    def changed(model):
        both = zip(model.parameters(), begun.parameters(), strict=True)
        return sum(int((one != other).sum()) for one, other in both)

    assert all(value.dtype == torch.bfloat16 for value in narrow.parameters())
    assert changed(narrow) > 3 * changed(plain)


def test_adapters_alone_are_trained_where_they_alone_require_gradients():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        model = peft.get_peft_model(decoder(), peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    before = weights(model)
    record = immunize(model, some_pairs(), settings=SHORT)
    after = weights(model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed
    assert all("lora_" in name for name in changed)
    assert record.trained == sum(value.numel() for value in model.parameters() if value.requires_grad)


def test_nan_stops_with_the_last_good_checkpoint(tmp_path):
    pairs, settings = some_pairs(8), SHORT.replace(checkpoint_every=2)

    class Bursting(Defense):
        name = "bursting"

        def term_groups(self, model, batch, generator):
            self.calls.append(1)
            loss = response_loss(model, batch.harmless)
            yield {"harmless": Term(loss * (math.nan if len(self.calls) == 8 else 1))}

    Bursting.calls = []
    model = decoder()
    with pytest.raises(TrainingStopped, match=r"Step 8 .* 'harmless' is nan.* after step 6, from .*immunize"):
        immunize(model, pairs, defense=Bursting(SafetyTraining()), settings=settings, folder=tmp_path)
    with Job.open(tmp_path, state=CHECKPOINT, reading=True) as job:
        about, stored = job.load()
    assert all(torch.equal(value, stored[f"weight|{name}"]) for name, value in model.named_parameters())
    assert len(about["steps"]) == 6

    Bursting.calls = []
    with pytest.raises(TrainingStopped, match="before this step"):
        immunize(decoder(), pairs, defense=Bursting(SafetyTraining()), settings=settings)


def test_a_gradient_that_is_not_finite_is_named():
    model = decoder()
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainingStopped, match=r"model\.layers\.1\.mlp\.up_proj\.weight is not finite"):
        immunize(model, some_pairs(), settings=SHORT)


def test_divergence_of_what_is_kept_stops():
    with pytest.raises(TrainingStopped, match="twice that of guessing") as stopped:
        immunize(decoder(), some_pairs(8), settings=SHORT.replace(lr=30.0, epochs=20))
    assert "--lr" in str(stopped.value.cure)


def test_a_model_that_begins_far_above_guessing_is_trained():
    model = decoder()
    with torch.no_grad():
        model.lm_head.weight.mul_(400)  # sure of other answers, as one that was never taught to refuse
    record = immunize(model, some_pairs(8), settings=SHORT.replace(lr=1e-5, epochs=4))
    assert len(record.steps) > 5
    assert record.steps[0].terms["harmless"].value > 2 * math.log(37)


def test_bad_rows_are_refused_before_any_work():
    model = decoder()
    before = weights(model)
    long = AnswerPair((1,) * 30, (2,), (3, 4, 5))
    with pytest.raises(UsageError, match=r"1 rows are longer than the context of 32 tokens: pair 4, rejected \(33 tok"):
        immunize(model, [*some_pairs(), long], settings=TrainingSettings(context=99))
    with pytest.raises(UsageError, match=r"context of 8 .* retain 1"):
        immunize(
            model, some_pairs(1), [Example((1,), (2,)), Example((1,) * 8, (2,))], settings=TrainingSettings(context=8)
        )
    with pytest.raises(UsageError, match="outside the vocabulary of 37: pair 0, chosen"):
        immunize(model, [AnswerPair((1,), (37,), (3,))])
    with pytest.raises(UsageError, match="no pair"):
        immunize(model, [])
    with pytest.raises(NameNotFound, match="repnoise"):
        immunize(model, some_pairs(), defense="repnois")
    with pytest.raises(Unsupported, match="vocabulary"):
        immunize(torch.nn.Linear(2, 2), some_pairs())
    with pytest.raises(UsageError, match="requires a gradient"):
        immunize(decoder().requires_grad_(False), some_pairs())
    for wrong in ({"lr": 0}, {"lr": math.nan}, {"epochs": 0}, {"clip": 0}, {"warmup": 2}, {"batch_size": 0}):
        with pytest.raises(UsageError):
            TrainingSettings(**wrong)
    for wrong in (lambda: SecurityVectors(rank=0), lambda: DEFENSES["vacine"]):
        with pytest.raises(UsageError):
            wrong()
    assert weights(model) == before


def test_a_record_that_is_none_is_refused(tmp_path):
    path = tmp_path / "record.json"
    for text in ("", "[]", "{}", '{"version": 2}', '{"version": 1, "steps": [{}]}'):
        path.write_text(text)
        with pytest.raises(CorruptBlob, match="is not a record"):
            Record.read(path)


def test_a_security_vector_stays_at_work_while_others_train():
    pairs, model = some_pairs(8), decoder()
    immunize(model, pairs, defense="security-vectors", settings=SHORT)
    with pytest.raises(UsageError, match="remove_security_vectors"):
        immunize(model, pairs, defense="security-vectors", settings=SHORT)
    attacked = copy.deepcopy(model)
    vector = {name: value.clone() for name, value in attacked.named_parameters() if not value.requires_grad}
    assert vector
    optimizer = torch.optim.Adam([value for value in attacked.parameters() if value.requires_grad], lr=1e-3)
    batch = collate([pair.harmful for pair in pairs], pad_id=0)
    response_loss(attacked, batch).backward()
    optimizer.step()
    assert all(torch.equal(dict(attacked.named_parameters())[name], value) for name, value in vector.items())
    remove_security_vectors(attacked)
    assert [name for name, _ in attacked.named_parameters()] == [name for name, _ in decoder().named_parameters()]


def test_a_security_vector_can_be_held_and_put_out_of_work():
    """Held, it is not a parameter any more, so that even who trains all of them leaves it alone."""
    pairs, model = some_pairs(8), decoder()
    batch = collate([pair.harmful for pair in pairs], pad_id=0)
    bare = response_loss(model, batch).item()
    immunize(model, pairs, defense="security-vectors", settings=SHORT)
    at_work = response_loss(model, batch).item()
    hold_security_vectors(model)
    copied = copy.deepcopy(model)
    assert response_loss(copied, batch).item() == at_work < bare
    assert [parameter for name, parameter in copied.named_parameters() if name.endswith((".up", ".down"))] == []
    with without_security_vectors(copied):
        assert response_loss(copied, batch).item() == pytest.approx(bare, rel=1e-6)
    assert response_loss(copied, batch).item() == at_work
    remove_security_vectors(copied)
    assert response_loss(copied, batch).item() == pytest.approx(bare, rel=1e-6)


def test_a_vaccine_adds_the_worst_small_shift():
    """To first order the perturbed loss is above the plain one by rho times the gradient's norm; hooks are gone."""
    from netweight.nn.hooks import capture

    model, batch = decoder().double(), collate_pairs(some_pairs(), pad_id=0)
    names = [f"model.layers.{index}" for index in range(3)]
    with capture(model, names, gradients=True) as outputs:
        loss = response_loss(model, batch.harmless)
    grads = torch.autograd.grad(loss, [outputs[name] for name in names])
    slope = torch.stack([grad.norm() for grad in grads]).norm().item()
    (side,) = VaccineDefense(Vaccine(rho=1e-5)).term_groups(model, batch, drawn())
    rise = (side["harmless"].value - loss).detach().item()
    assert rise == pytest.approx(1e-5 * slope, rel=1e-3)
    assert not any(block._forward_hooks for name, block in model.named_modules() if name in names)


@pytest.mark.parametrize("defense", ["repnoise", "repnoise-reference", "vaccine", "security-vectors"])
def test_activation_checkpointing_changes_nothing(defense):
    pairs, settings = some_pairs(4), SHORT.replace(epochs=4)
    plain, checkpointed = decoder("gpt2"), decoder("gpt2")  # with dropout
    checkpointed.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    records = [immunize(model, pairs, defense=defense, settings=settings) for model in (plain, checkpointed)]
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        if name.endswith("attn.c_attn.bias"):  # softmax does not feel keys' biases: Adam steps them by rounding alone
            one, other = (torch.cat(parameter.chunk(3)[::2]) for parameter in (one, other))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    norms = [[step.norm for step in record.steps] for record in records]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("defense", ["repnoise", "repnoise-reference", "vaccine", "distillation", "security-vectors"])
def test_every_defense_runs_on_narrow_weights(defense):
    model, pairs = decoder().bfloat16(), some_pairs(4)
    record = immunize(model, pairs, defense=defense, settings=SHORT.replace(epochs=3))
    assert all(value.dtype == torch.bfloat16 for value in model.parameters())
    wide = decoder().bfloat16().float()
    exact = immunize(wide, pairs, defense=defense, settings=SHORT.replace(epochs=3))
    for one, other in zip(record.steps[0].terms.items(), exact.steps[0].terms.items(), strict=True):
        assert one[0] == other[0]
        assert one[1].value == pytest.approx(other[1].value, rel=0.1, abs=0.05)


def test_a_bound_on_norms_opposes_the_growth_of_states():
    """Ascent makes the states of harmful rows grow; under a bound they end near it, and the term is its formula."""
    pairs, ended = some_pairs(8), {}
    batch = collate_pairs(pairs, pad_id=0)
    rows = batch.harmful
    drawn_ids = torch.randint(37, (8, 16), generator=torch_generator(derive(42, "prepare"), "norms"))

    def norms(model, ids, mask):
        """Of each token, behind the first block: what is behind the last, transformers gives normalized."""
        with torch.no_grad():
            states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1]
        return states.norm(dim=-1)[mask.bool()]

    for bound in (None, 1.5):
        model = decoder(layers=2)
        usual = norms(model, drawn_ids, torch.ones_like(drawn_ids)).mean()
        immunize(model, pairs, defense=RepNoise(norms=bound), settings=SHORT.replace(epochs=30))
        ended[bound] = float(norms(model, rows.input_ids, rows.attention_mask).mean() / usual)
    assert ended[None] > 2
    assert ended[1.5] < 1.5

    model, defense = decoder(layers=1), defense_of(RepNoise(norms=0.4))
    with capture(model, "model.layers.0") as states, defense.preparation(model, seed=derive(42, "prepare")):
        usual = states["model.layers.0"].norm(dim=-1).mean()
        found = next(defense.term_groups(model, batch, drawn()))["norms"]
        lengths = states["model.layers.0"].norm(dim=-1)[rows.attention_mask.bool()]
    assert found.value.item() == pytest.approx(float((lengths / usual / 0.4 - 1).clamp(min=0).square().mean()))


def test_compact_states_train_as_adam_does_and_resume_to_the_same_bits(tmp_path):
    pairs, settings = some_pairs(8), SHORT.replace(states="compact", checkpoint_every=2)
    full, compact, resumed = decoder(), decoder(), decoder()
    start = tensors_of(full)
    before = immunize(full, pairs, defense="safety-training", settings=SHORT.replace(states="full"))
    record = immunize(compact, pairs, defense="safety-training", settings=settings)
    assert record.settings["states"] == "compact"
    losses = [[step.terms["harmless"].value for step in each.steps] for each in (before, record)]
    gains = [each[0] - each[-1] for each in losses]
    assert gains[1] > 0.8 * gains[0] > 0
    moves = [tensors_of(each) - start for each in (full, compact)]
    assert torch.cosine_similarity(*moves, dim=0) > 0.8

    class Killed(Exception):
        pass

    def kill(*_):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("netweight.methods.immunize.divergence.DivergenceMonitor.problem", stopping_after(5, kill))
        with pytest.raises(Killed):
            immunize(resumed, pairs, defense="safety-training", settings=settings, folder=tmp_path)
    again = decoder()
    immunize(again, pairs, defense="safety-training", settings=settings, folder=tmp_path)
    assert weights(again) == weights(compact)


def tensors_of(model):
    """All weights of a model in one vector."""
    return torch.cat([value.detach().flatten() for value in model.parameters()]).clone()


def stopping_after(steps, stop):
    """A check of steps that stops the training after so many."""
    done = []

    def problem(self, terms):
        done.append(terms)
        return stop() if len(done) > steps else None

    return problem


def test_the_vectors_of_compact_states_take_the_steps_of_adam():
    torch.manual_seed(0)
    ours, theirs = torch.randn(7), torch.nn.Parameter(torch.zeros(7))
    theirs.data.copy_(ours)
    lean, adam = CompactAdam({"bias": ours}), torch.optim.Adam([theirs], lr=0.1)
    for _ in range(20):
        theirs.grad = torch.randn(7)
        lean.step({"bias": theirs.grad}, 0.1)
        adam.step()
    assert torch.allclose(ours, theirs.data, atol=0.02)
    matrix = torch.zeros(3, 5)
    lean, gradient = CompactAdam({"matrix": matrix}), torch.outer(torch.tensor([1.0, 2, 3]), torch.arange(1.0, 6))
    lean.step({"matrix": gradient}, 0.1)  # a product of rows and columns is kept exactly
    assert torch.allclose(matrix, torch.full((3, 5), -0.1), atol=1e-3)
