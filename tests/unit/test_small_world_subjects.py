"""Small worlds as subjects: what is attacked, what is kept, and the controls."""

import pytest
import torch

from netweight.attacks.finetuning.attack import run_attack
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Goal
from netweight.errors import NameNotFound, UsageError
from netweight.toys.language_subjects import defend_world, defended_subject, undefended_subject, world_named

pytest.importorskip("transformers", reason="transformers is in the llm extra")


def test_the_aligned_model_keeps_one_cipher_refuses_one_and_never_knew_the_third():
    subject = undefended_subject(samples=64, held_out=16)
    assert subject.ability(subject.model) > 0.95
    assert subject.score("harmful")(subject.model) < 0.3
    assert subject.score("task")(subject.model) < 0.3
    assert len(subject.domain("harmful").train) == len(subject.benign) == 64
    assert subject.digest() == undefended_subject(samples=64, held_out=16).digest()
    ceiling = undefended_subject("relearn ceiling", samples=64, held_out=16)
    assert ceiling.domain("harmful").train == subject.domain("task").train
    weights = [
        next(undefended_subject("random weights", samples=1, held_out=1, seed=s).model.parameters()) for s in (0, 1)
    ]
    assert not torch.equal(*weights)
    with pytest.raises(NameNotFound, match="Nearest: aligned"):
        undefended_subject("align")
    with pytest.raises(NameNotFound, match="The worlds are ciphers, content, speakers"):
        undefended_subject(world="cipher")
    with pytest.raises(UsageError, match="do not come with netweight"):
        undefended_subject(world="speakers")


def test_what_was_defended_is_a_subject_of_its_world(tmp_path):
    file = tmp_path / "defended.safetensors"
    model, record = defend_world(file, world_named(), defense="safety-training", seed=3, rows=24)
    subject = defended_subject(str(file), samples=16, held_out=8, reference_ability=1.0)
    assert len(record.steps) == 1
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), subject.model.parameters(), strict=True))
    assert subject.reference_ability == 1.0


def test_a_few_steps_bring_the_guarded_cipher_nearer():
    subject = undefended_subject(samples=64, held_out=16)
    settings = AttackSettings(lr=1e-3, samples=64, batch_size=16, max_steps=4, check_every=4, benign_share=0.5)
    result = run_attack(subject, settings, Goal(None))
    assert result.curve[-1].loss < 10
    assert result.curve[-1].score > result.curve[0].score
