"""Losses of defenses in transformers' Trainer: the same step, what is logged, what is refused."""

import dataclasses
import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from decoders_under_test import SHORT, decoder, some_pairs  # noqa: E402
from repnoise_in_one_graph import repnoise_loss  # noqa: E402
from trainer_under_test import arguments  # noqa: E402

from netweight.core.seeds import torch_generator  # noqa: E402
from netweight.data.public import train_bpe  # noqa: E402
from netweight.data.tokens import AnswerPair, Example, any_pairs, collate  # noqa: E402
from netweight.errors import TrainingStopped, Unsupported, UsageError  # noqa: E402
from netweight.methods.immunize.defenses.repnoise import RepNoise, RepNoiseReference  # noqa: E402
from netweight.methods.immunize.defenses.safety_training import SafetyTraining  # noqa: E402
from netweight.methods.immunize.defenses.tar import TAR  # noqa: E402
from netweight.methods.immunize.losses import response_loss  # noqa: E402
from netweight.methods.immunize.pairs import collate_pairs  # noqa: E402
from netweight.methods.immunize.train import immunize  # noqa: E402
from netweight.plugins.immunize_trainer import ImmunizeTrainer, PairCollator  # noqa: E402


def rows(pairs):
    return [dataclasses.asdict(pair) for pair in pairs]


def trainer(folder, model=None, data=None, config=RepNoise(), retain=(), evaluate=None, **changes):
    own = {name: changes.pop(name, None) for name in ("settings", "processing_class")}
    return ImmunizeTrainer(
        model or decoder(),
        arguments(folder, **{"weight_decay": 0.0, "per_device_train_batch_size": 4} | changes),
        defense=config,
        retain=retain,
        pad_id=0,
        measure_every=3,
        train_dataset=rows(some_pairs(10)) if data is None else data,
        eval_dataset=evaluate,
        **own,
    )


@pytest.mark.parametrize("fidelity", ["corrected", "reference"])
def test_one_update_is_that_of_the_loss(tmp_path, fidelity):
    config = RepNoiseReference() if fidelity == "reference" else RepNoise(beta=0.4)
    pairs, plain = some_pairs(4), decoder()
    options = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0}
    run = trainer(tmp_path, data=rows(pairs), config=config, train_sampling_strategy="sequential", **options)
    run.train()
    batch = collate_pairs(pairs, pad_id=0, aligned=True)
    parts = repnoise_loss(plain.train(), batch, config, generator=torch_generator(run.args.seed, "noise", 0))
    parts.total.backward()
    for one, other in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other - 0.1 * other.grad, rtol=1e-4, atol=1e-5)
    (logged,) = [entry for entry in run.state.log_history if "loss" in entry]
    assert logged["noise_weight"] == pytest.approx(parts.noise_weight, rel=1e-4)
    assert logged["loss"] == pytest.approx(parts.total.detach().item(), rel=1e-4)
    assert min(logged[name] for name in ("harmless_norm", "noise_norm", "ascent_norm")) > 0


def test_training_keeps_and_unlearns_with_accumulation_and_evaluation(tmp_path):
    run = trainer(
        tmp_path, max_steps=12, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=6,
        evaluate=rows(some_pairs(3, seed=9)),
    )  # fmt: skip
    run.train()
    history = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(history) == 12
    assert history[-1]["harmless"] < history[0]["harmless"]
    assert history[-1]["ascent"] > history[0]["ascent"]
    assert sorted(weights := [entry["noise_weight"] for entry in history], reverse=True) == weights
    assert [index for index, entry in enumerate(history) if "harmless_norm" in entry] == [0, 3, 6, 9]
    assert len([entry for entry in run.state.log_history if "eval_loss" in entry]) == 2


@pytest.mark.parametrize("name", ["vaccine", "distillation", "adversarial-loss", "booster", TAR(attack_steps=2)])
def test_any_defense_trains_with_what_is_kept_besides(tmp_path, name):
    kept = [Example((1, 2), (5, 6, 7)), Example((3,), (8, 9))]
    run = trainer(tmp_path, config=name, retain=kept, max_steps=4, eval_strategy="steps", eval_steps=4,
                  evaluate=rows(some_pairs(3, seed=9)), learning_rate=1e-2)  # fmt: skip
    run.train()
    history = [entry for entry in run.state.log_history if "loss" in entry]
    assert history[-1]["retained"] < history[0]["retained"]
    assert history[0]["retained_norm"] > 0
    assert any("eval_loss" in entry for entry in run.state.log_history)


def test_an_update_with_retain_is_that_of_immunize(tmp_path):
    kept, pairs = [Example((1, 2), (5, 6, 7))], some_pairs(1)
    model, plain = decoder(), decoder()
    options = {"max_steps": 1, "warmup_steps": 0, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0}
    run = trainer(tmp_path, model, rows(pairs), SafetyTraining(), kept, per_device_train_batch_size=1, **options)
    run.train()
    sides = (collate([pairs[0].harmless], pad_id=0), collate(kept, pad_id=0))
    (response_loss(plain.train(), sides[0]) + response_loss(plain, sides[1])).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other - 0.1 * other.grad, rtol=1e-4, atol=1e-5)


def test_by_settings_a_training_is_that_of_immunize(tmp_path):
    """With dropout, a schedule, clipping, frozen layers, balanced weights and rows to keep: to the rounding of sums."""
    settings = SHORT.replace(epochs=2, frozen="0", clip=0.5)
    kept, pairs = [Example((1, 2), (5, 6, 7)), Example((3,), (8, 9)), Example((4, 4), (9,))], some_pairs(10)
    model, plain = decoder("gpt2").double(), decoder("gpt2").double()  # Adam enlarges last bits where a gradient is 0
    record = immunize(plain, pairs, kept, settings=settings)
    run = trainer(tmp_path, model, rows(pairs), "repnoise", kept, settings=settings, max_steps=-1)
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(logged) == len(record.steps) == 6
    for entry, step in zip(logged, record.steps, strict=True):
        for name, term in step.terms.items():
            assert entry[name] == pytest.approx(term.value, rel=1e-4), (name, step.step)
            assert entry.get(f"{name}_norm") == (term.norm and pytest.approx(term.norm, rel=1e-3)), (name, step.step)
        assert entry["grad_norm"] == pytest.approx(step.norm, rel=1e-3)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * settings.lr)


def test_a_stream_without_an_end_is_read_as_it_is_trained_on(tmp_path):
    class Endless(torch.utils.data.IterableDataset):
        read = 0

        def __iter__(self):
            for row in itertools.cycle(rows(some_pairs(3))):
                Endless.read += 1
                yield {name: torch.tensor(value) for name, value in row.items()}

    run = trainer(tmp_path, data=Endless(), max_steps=2)
    assert Endless.read == 0
    run.train()
    assert 8 <= Endless.read < 50


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path):
    """From a checkpoint of Trainer, with dropout, rows to keep and a weight that was balanced before."""
    kept = [Example((1, 2), (5, 6, 7)), Example((3,), (8, 9)), Example((4, 4), (9,))]
    how = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    whole = trainer(tmp_path, decoder("gpt2"), retain=kept, **how)
    whole.train()
    resumed = trainer(tmp_path, decoder("gpt2"), retain=kept, **how)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.stateful_callbacks["netweight.balance"] == whole.state.stateful_callbacks["netweight.balance"]
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_rows_of_text_train_as_their_tokens_do(tmp_path):
    """By a tokenizer, as they stand or streamed."""
    text = [{"prompt": f"{name} ", "chosen": "no", "rejected": f"yes {name}"} for name in "abcd"]
    tokenizer = train_bpe([" ".join(row.values()) for row in text] * 3, 300)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(text)

    ends = []
    for data in (any_pairs(text, tokenizer), text, Stream()):
        model = decoder(vocabulary=400)
        run = trainer(
            tmp_path, model, data, max_steps=1, train_sampling_strategy="sequential", processing_class=tokenizer
        )
        run.train()
        ends.append(list(run.model.parameters()))
    for end in ends[1:]:
        assert all(map(torch.equal, end, ends[0]))


def test_one_batch_holds_both_sides_of_each_pair():
    pairs = some_pairs(3)
    batch = PairCollator(pad_id=7)(rows(pairs))
    for row, pair in enumerate(pairs):
        for side, example in (("harmless", pair.harmless), ("harmful", pair.harmful)):
            tokens = batch[side]["input_ids"][row][batch[side]["attention_mask"][row] == 1]
            assert tuple(tokens.tolist()) == example.prompt + example.response
    assert any_pairs(pairs)[0] is pairs[0]


def test_a_training_that_diverges_stops(tmp_path):
    """transformers' own logs would leave NaN out."""
    with pytest.raises(TrainingStopped, match=r"of repnoise stopped: .* (is nan|above 7\.2, twice that of guessing)"):
        trainer(tmp_path, learning_rate=30.0, max_steps=20).train()


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(UsageError, match="lacks rejected"):
        trainer(tmp_path, data=[{"prompt": [1], "chosen": [2]}])
    with pytest.raises(UsageError, match="'chosen' of a row contains no token ids"):
        trainer(tmp_path, data=[{"prompt": [1], "chosen": "no", "rejected": [2]}])
    with pytest.raises(UsageError, match="context of 32"):
        trainer(tmp_path, data=[AnswerPair((1,) * 32, (2,), (3,))])
    with pytest.raises(UsageError, match="narrower than float32"):
        trainer(tmp_path, model=decoder().bfloat16())
    with pytest.raises(Unsupported, match="vocabulary"):
        trainer(tmp_path, model=torch.nn.Linear(2, 2))
    with pytest.raises(Unsupported, match="random-weights: there is nothing to train"):
        trainer(tmp_path, config="random-weights")
    with pytest.raises(Unsupported, match="vaccine while activations are recomputed"):
        trainer(tmp_path, config="vaccine", activation_checkpointing=True)
    with pytest.raises(UsageError, match="pad_id"):
        ImmunizeTrainer(decoder(), arguments(tmp_path), train_dataset=some_pairs())
