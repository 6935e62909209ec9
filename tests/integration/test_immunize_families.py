"""Every family of decoders is defended by each kind of defense and then attacked."""

import math

import pytest
from decoders_under_test import ALL_FAMILIES, SHORT, decoder, some_pairs

from netweight.attacks.finetuning.attack import run_attack
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Domain, Goal, Subject
from netweight.methods.immunize.layer_metrics import analyze_layers
from netweight.methods.immunize.train import immunize


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_family_is_defended_analyzed_and_attacked(family):
    model, pairs = decoder(family, layers=2), some_pairs(8)
    for defense in ("repnoise", "repnoise-reference", "vaccine", "distillation"):
        terms = immunize(model, pairs, defense=defense, settings=SHORT.replace(epochs=1)).steps[0].terms
        assert all(math.isfinite(term.value) and term.norm > 0 for term in terms.values()), terms
    assert analyze_layers(model, pairs, pad_id=0)
    harmful = [pair.harmful for pair in pairs]
    subject = Subject(model, {"harmful": Domain(harmful[:6], harmful[6:])}, 0)
    for how in ({"lr": 1e-2}, {"lr": 1e-2, "lora_rank": 2}):
        result = run_attack(subject, AttackSettings(samples=6, batch_size=2, check_every=3, **how), Goal(None))
        assert (result.outcome, result.last_step) == ("resisted", 3)
        assert result.curve[-1].loss != result.curve[0].loss
