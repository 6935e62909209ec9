"""What pages say of studies that are run apart: tables that are made of a result, whole or in part."""

import json
import os

import chat_models
import pytest

from netweight_experiments.benchmarks.federate import emnist
from netweight_experiments.benchmarks.immunize import real_size
from netweight_experiments.benchmarks.language import guarded_domain, refusal


def finding(name, value, **detail):
    return {"name": name, "value": value, "n": 32, "ci95": [value - 2, value + 3], "detail": detail}


def test_the_table_of_refusals_has_a_row_for_each_kind_of_edit():
    shown = refusal.page({
        "requests asked": 288, "requests refused": 128, "resumed": False, "processor seconds": 600.0,
        "conclusion": "Refusal falls.", "options": {"new_tokens": 8},
        "findings": [
            finding("refusals before", 96.9),
            finding(
                "refusals left by directions", 12.5, edit="of block 14", counts=True,
                **{"divergence on ordinary prompts, nats": 0.1, "perplexity on ordinary rows, times its own": 1.05},
            ),
            finding("share of the refusals left by the best edit", 0.13),
        ],
    })  # fmt: skip
    assert "took 10 processor minutes" in shown
    assert "| none | 97 % of 32 (95 to 100) |" in shown
    assert "| directions: of block 14 | 12 % (10 to 16) | 0.100 nats | 1.05 × | yes |" in shown
    assert len(shown.splitlines()) == 6


def test_the_table_of_emnist_has_means_over_seeds_and_names_what_is_missing():
    cells = {
        f"20 clients, hyperfl, seed {seed}": {"before": before, "after": after, "rate": 4.0}
        for seed, before, after in ((520, 50.0, 60.0), (521, 52.0, 61.0), (522, 54.0, 62.0))
    }
    cells["100 clients, hyperfl, seed 521"] = {"before": 70.0, "after": 71.25, "rate": 4.0}
    shown = emnist.page({"cells": cells, "options": {"clients": [20, 100], "methods": ["hyperfl", "fedavg"]}})
    assert "| `hyperfl` | 20 | 52.0 (50.0 to 54.0) | 61.0 (60.0 to 62.0) | 4 | 76.29 |" in shown
    assert "| `hyperfl` | 100 | 70.0 (one seed) | 71.2 (one seed) | 4 | 80.22 |" in shown
    assert shown.endswith("Not measured yet: `fedavg` with 20 clients, `fedavg` with 100 clients.")


def test_the_table_of_costs_has_the_largest_memory_of_each_defense():
    shown = real_size.page({
        "step_against_two_plain_steps": {"safety-training": 0.5, "repnoise": 1.234},
        "resident_gb": {"safety-training, 1 steps": 7.0, "repnoise, 1 steps": 8.1, "repnoise, 3 steps": 8.5},
    })  # fmt: skip
    assert "| `repnoise` | 1.23 | 8.5 GB |" in shown


def test_the_table_of_the_guarded_domain_shows_what_was_measured_so_far():
    own = {
        "accuracy on first tokens of guarded answers": 0.98, "token accuracy on ordinary answers": 0.9,
        "perplexity on WikiText-2": 20.0,
    }  # fmt: skip
    first, second = guarded_domain.ATTACKS
    shown = guarded_domain.page({
        "budget": "24 pairs", "recovered at": 0.8,
        "measured": {
            "published model": own, "repnoise": own,
            f"never taught, attacked: {first}": {"steps": 12, "rows": 96, "flops": 2.5e12},
            f"repnoise, attacked: {first}": {"steps": None, "outcome": "resisted", "last step": 30},
            f"repnoise, attacked: {second}": {
                "steps": None, "outcome": "collapsed", "last step": 30, "scores": [0.0, 0.5, 0.9],
            },
            "distillation": own,
        },
    })  # fmt: skip
    assert "which never learned the domain | 0.98 | 0.90 | 20 |" in shown
    assert "which never learned the domain | 12 steps, 96 rows | not measured yet |" in shown
    assert "| taught, then `repnoise` | 0.98 | 0.90 | 20 |" in shown
    assert "| taught, then `repnoise` | resisted after 30 steps | 4 steps, 96 rows, abilities lost |" in shown
    assert "This is so after `repnoise` (0.98) and `distillation` (0.98)" in shown
    assert "Not measured yet: taught the domain; undefended: taught, then `safety-training`;" in shown
    assert "LoRA factors (24 rows in a step)" in shown


def test_the_first_sentences_on_the_guarded_domain_compare_repnoise_with_its_base():
    own = {
        "accuracy on first tokens of guarded answers": 0.1, "token accuracy on ordinary answers": 0.9,
        "perplexity on WikiText-2": 20.0,
    }  # fmt: skip
    first, second = guarded_domain.ATTACKS
    recovered = {"steps": 4, "rows": 32, "flops": 1e12, "outcome": "recovered", "last step": 4}
    measured = {
        "safety-training": own, "repnoise": own | {"perplexity on WikiText-2": 25.5},
        f"safety-training, attacked: {first}": recovered,
        f"repnoise, attacked: {first}": recovered | {"steps": 10, "rows": 80},
    }  # fmt: skip
    shown = guarded_domain.summary({"measured": measured})
    assert "in 10 steps (80 rows) with RepNoise and in 4 steps (32 rows) without it" in shown
    assert "2.5 times the steps" in shown
    assert "An attack that trains LoRA factors was not tried on both models yet" in shown
    measured[f"repnoise, attacked: {first}"] = recovered | {"steps": 6, "rows": 48}
    assert "so no delay is shown" in guarded_domain.summary({"measured": measured})
    measured[f"safety-training, attacked: {second}"] = recovered | {"steps": None, "outcome": "resisted"}
    measured[f"repnoise, attacked: {second}"] = recovered
    assert "so it says nothing of RepNoise" in guarded_domain.summary({"measured": measured})
    assert "not measured yet" in guarded_domain.summary({"measured": {}})
    measured[f"repnoise, attacked: {second}"] = {
        "steps": None, "outcome": "collapsed", "last step": 30, "scores": [0.0, 0.5, 0.9],
    }  # fmt: skip
    measured[f"safety-training, attacked: {second}"] = recovered
    shown = guarded_domain.summary({"measured": measured})
    assert "takes 4 steps (96 rows) with RepNoise and 4 steps" in shown
    measured["published model"] = own
    measured["taught"] = own | {"perplexity on WikiText-2": 900.0}
    measured["safety-training"] = own | {"accuracy on first tokens of guarded answers": 0.75}
    assert "a first impression only" in guarded_domain.summary({"measured": measured})
    shown = guarded_domain.page({"measured": measured, "budget": "24 pairs", "recovered at": 0.8})
    assert "rose from 20 to 900" in shown
    assert "guarded answers is 0.75, and 0.80 counts as recovered" in shown


def test_the_study_of_a_guarded_domain_measures_every_row_and_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is in the llm extra")
    if not os.environ.get("NETWEIGHT_DATA"):
        pytest.skip("NETWEIGHT_DATA is not set, which holds WikiText-2")
    tokens = chat_models.chatml()
    chat_models.llama(tokens).bfloat16().save_pretrained(tmp_path / "model")
    tokens.save_pretrained(tmp_path / "model")
    output = tmp_path / "result.json"
    for name, fewer in {"_TAUGHT_STEPS": 2, "_EPOCHS": 1, "_WINDOWS": 5, "_KEPT": 16}.items():
        monkeypatch.setattr(guarded_domain, name, fewer)
    for result in guarded_domain.main(tmp_path / "model", tmp_path / "work", output=output, steps=2):
        output.write_text(json.dumps(result), encoding="utf-8")
    attacked = [name for name in result["measured"] if "attacked" in name]
    assert len(result["measured"]) == 2 + len(guarded_domain.DEFENSES) + len(attacked)
    assert len(attacked) == (1 + len(guarded_domain.DEFENSES)) * len(guarded_domain.ATTACKS)
    assert result["measured"]["repnoise"]["steps"] == 3  # 24 pairs in batches of 8
    widths = [line.count("|") for line in guarded_domain.page(result).splitlines() if line.startswith("|")]
    assert widths == [5] * (4 + len(guarded_domain.DEFENSES)) + [4] * (3 + len(guarded_domain.DEFENSES))
    assert not list(guarded_domain.main(tmp_path / "model", tmp_path / "work", output=output, steps=2))
    attack = next(iter(guarded_domain.ATTACKS))
    some = {"defenses": ("repnoise",), "attacks": (attack,)}
    assert not list(guarded_domain.main(tmp_path / "model", tmp_path / "work", output=output, steps=2, **some))
    shown = guarded_domain.page({**result, "options": {name: list(each) for name, each in some.items()}})
    assert [line.count("|") for line in shown.splitlines() if line.startswith("|")][-1] == 3
    assert "by an attack that fine-tunes all weights (8 rows in a step). The first tokens" in shown
