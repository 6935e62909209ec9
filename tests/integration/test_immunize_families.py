"""Every family of decoders is defended by each kind of defense and then attacked."""

import math

import pytest
from click.testing import CliRunner
from decoders_under_test import ALL_FAMILIES, SHORT, decoder, some_pairs
from tiny_llama import immunization_files, save, tiny_llama

from netweight.attacks.finetuning.attack import run_attack
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Domain, Goal, Subject
from netweight.cli import netweight
from netweight.methods.immunize.defenses.latent_adversarial import LatentAdversarial
from netweight.methods.immunize.defenses.tar import TAR
from netweight.methods.immunize.layers import analyze_layers
from netweight.methods.immunize.train import immunize
from netweight.report.report import read_report


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_family_is_defended_analyzed_and_attacked(family):
    model, pairs = decoder(family, layers=2), some_pairs(8)
    named = ("repnoise", "repnoise-reference", "t-vaccine", "distillation", "rmu", "booster", "circuit-breaking")
    for defense in (*named, "self-destruction", TAR(attack_steps=2), LatentAdversarial(search_steps=1)):
        kept = [pair.harmless for pair in pairs] if defense == "self-destruction" else []
        terms = immunize(model, pairs, kept, defense=defense, settings=SHORT.replace(epochs=1)).steps[0].terms
        still = {"harmless moved", "rerouting"} | (
            {"harmless"} if defense in ("rmu", "circuit-breaking") else set()
        )  # at first
        assert all(math.isfinite(term.value) and (term.norm > 0 or name in still) for name, term in terms.items())
    assert analyze_layers(model, pairs, pad_id=0)
    harmful = [pair.harmful for pair in pairs]
    subject = Subject(model, {"harmful": Domain(harmful[:6], harmful[6:])}, 0)
    for how in ({"lr": 1e-2}, {"lr": 1e-2, "lora_rank": 2}):
        result = run_attack(subject, AttackSettings(samples=6, batch_size=2, check_every=3, **how), Goal(None))
        assert (result.outcome, result.last_step) == ("resisted", 3)
        assert result.curve[-1].loss != result.curve[0].loss


SHAPES = ("llama", "gpt2")  # of which the others are variations; the test above trains and attacks all of them


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in SHAPES else pytest.mark.study) for one in ALL_FAMILIES]
)
def test_a_folder_of_a_family_is_defended_attacked_and_reported_by_the_commands(family, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
    immunization_files(tmp_path)
    _, tokenizer = tiny_llama()
    save(decoder(family, layers=2, vocabulary=len(tokenizer)), tokenizer, tmp_path / "model")

    def call(*parts):
        answer = CliRunner().invoke(netweight, [str(part) for part in parts])
        assert answer.exit_code in (0, 1), answer.output  # 1: as many steps as were asked for are not shown

    files = {name: tmp_path / f"{name}.jsonl" for name in ("pairs", "retain", "harmful", "keep")}
    call("immunize", tmp_path / "model", tmp_path / "defended", "--pairs", files["pairs"],
         "--retain", files["retain"], "--lr", "1e-3")  # fmt: skip
    call("attack", "finetune", tmp_path / "defended", "--base", tmp_path / "model", "--harmful", files["harmful"],
         "--benign", files["keep"], "--trained-on", files["pairs"], "--grid", "quick", "--lr", "1e-2", "--seeds", "1",
         "--max-steps", "4", "--check-every", "4", "--threshold", "0.25", "--out", tmp_path / "attack")  # fmt: skip
    (section,) = read_report(tmp_path / "attack").sections
    (table,) = (table for table in section.tables if table.title == "Attacks with harmful data")
    assert {row[1] for row in table.rows} == {"undefended", "defended"}
    assert {finding.name for finding in section.findings} >= {"resistance, defended", "kept ability, defended"}
    assert (tmp_path / "defended" / "immunize-report" / "report.html").exists()
