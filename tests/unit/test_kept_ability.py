"""Kept ability: what a defense costs before any attack, row by row, with intervals, and by judges that users bring."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("scipy", reason="scipy is in the evidence extra")
pytest.importorskip("transformers", reason="transformers is in the llm extra")

from decoders_under_test import decoder, some_pairs

from netweight.attacks.finetuning.resistance import JudgedPrompts, OrdinaryAbility, ability_findings, measure_ability
from netweight.errors import UsageError


def test_a_model_is_measured_row_by_row():
    model, examples = decoder(), [pair.harmful for pair in some_pairs(5)]
    found = measure_ability(model, examples, pad_id=0, batch_size=2)
    for row, example in enumerate(examples):
        ids = torch.tensor([example.prompt + example.response])
        with torch.no_grad():
            chances = model(input_ids=ids).logits[0, len(example.prompt) - 1 : -1].double().log_softmax(-1)
        wanted = torch.tensor(example.response)
        assert found.nats[row] == pytest.approx(-chances[range(len(wanted)), wanted].sum().item(), rel=1e-4)
        assert found.right[row] == int((chances.argmax(-1) == wanted).sum())
        assert found.tokens[row] == len(wanted)
    with pytest.raises(UsageError, match="at least one example"):
        measure_ability(model, [], pad_id=0)


def test_findings_are_ratios_on_the_same_rows_with_intervals():
    rng = np.random.default_rng(0)
    tokens = tuple(int(n) for n in rng.integers(4, 9, 80))
    before = OrdinaryAbility(tokens, tokens, tuple(0.1 * n for n in tokens), {"harm": tuple(rng.random(80))})
    right = tuple(n - int(rng.random() < 0.2) for n in tokens)
    after = OrdinaryAbility(
        right, tokens, tuple(0.2 * n for n in tokens), {"harm": tuple(v / 2 for v in before.judge_scores["harm"])}
    )
    ability, perplexity, ratio, harm = ability_findings("d", before, after, seed=0)
    assert ability.value == pytest.approx(sum(right) / sum(tokens))
    assert ability.ci95[0] < ability.value < ability.ci95[1] < 1
    assert ability.passed is False
    assert (perplexity.value, perplexity.baseline) == (pytest.approx(math.exp(0.2)), pytest.approx(math.exp(0.1)))
    assert ratio.value == pytest.approx(math.exp(0.1))
    assert harm.value == pytest.approx(harm.baseline / 2)
    assert harm.detail["difference after − before, same prompts"][2] < 0
    same = ability_findings("d", before, before, seed=0)[0]
    assert (same.value, same.ci95, same.passed) == (1, (1, 1), True)
    few = OrdinaryAbility(tokens[:3], tokens[:3], before.nats[:3])
    assert [finding.ci95 for finding in ability_findings("d", few, few, seed=0)] == [None, None]
    with pytest.raises(UsageError, match="same rows"):
        ability_findings("d", before, few, seed=0)


def test_users_bring_judges():
    examples = [pair.harmful for pair in some_pairs(2)]
    judged = JudgedPrompts(lambda model, prompts: [prompt * 2 for prompt in prompts], ["a", "bb"], {
        "length": lambda texts: torch.tensor([float(len(text)) for text in texts])
    })  # fmt: skip
    assert measure_ability(decoder(), examples, pad_id=0, judged=judged).judge_scores == {"length": (2.0, 4.0)}
    lazy = JudgedPrompts(judged.generate, judged.prompts, {"lazy": lambda texts: torch.zeros(1)})
    with pytest.raises(UsageError, match="'lazy' gave numbers of shape"):
        measure_ability(decoder(), examples, pad_id=0, judged=lazy)
