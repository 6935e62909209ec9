"""Small worlds as subjects: what is attacked, what is kept, and the controls."""

import pytest
import torch

from netweight.attacks.finetuning.run import run_attack
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Goal
from netweight.errors import NameNotFound
from netweight.zoo.small_world_subjects import cipher_subject

pytest.importorskip("transformers", reason="transformers is in the llm extra")


def test_the_aligned_model_keeps_one_cipher_refuses_one_and_never_knew_the_third():
    subject = cipher_subject(samples=64, held_out=16)
    assert subject.utility(subject.model) > 0.95
    assert subject.score("harmful")(subject.model) < 0.3
    assert subject.score("task")(subject.model) < 0.3
    assert len(subject.domain("harmful").train) == len(subject.benign) == 64
    assert subject.digest() == cipher_subject(samples=64, held_out=16).digest()
    ceiling = cipher_subject("relearn ceiling", samples=64, held_out=16)
    assert ceiling.domain("harmful").train == subject.domain("task").train
    weights = [next(cipher_subject("random weights", samples=1, held_out=1, seed=s).model.parameters()) for s in (0, 1)]
    assert not torch.equal(*weights)
    with pytest.raises(NameNotFound, match="nearest is 'aligned'"):
        cipher_subject("align")


def test_a_few_steps_bring_the_guarded_cipher_nearer():
    subject = cipher_subject(samples=64, held_out=16)
    settings = AttackSettings(lr=1e-3, samples=64, batch_size=16, max_steps=4, check_every=4, benign_share=0.5)
    result = run_attack(subject, settings, Goal(None))
    assert result.curve[-1].loss < 10
    assert result.curve[-1].score > result.curve[0].score
