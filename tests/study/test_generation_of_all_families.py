"""Every causal family of transformers: a batch answers as each prompt alone without a cache, or is refused."""

import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is in the llm extra")

from tiny_causal_families import FAMILIES, differences, some_prompts, tiny_model

from netweight.attacks.refusal.measurement import next_tokens
from netweight.errors import Unsupported
from netweight.hf.generate_answers import generate_answers
from netweight.hf.load_language_model import check_outputs

pytestmark = pytest.mark.study

# Families that see later tokens while they predict, as their code is called here.
REFUSED = {"cpmant", "prophetnet", "xlm", "xlnet"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_in_batches_as_alone_without_a_cache(family):
    try:
        model = tiny_model(family)
        with torch.no_grad():
            model(torch.tensor([[3, 4, 5]]))
    except Exception as error:
        pytest.skip(f"No tiny model: {type(error).__name__}: {error}")
    try:
        check_outputs(model)
    except Unsupported:
        assert family in REFUSED
        return
    assert family not in REFUSED
    prompts = some_prompts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = generate_answers(model, prompts, new_tokens=8, pad_id=0)
        assert answers == generate_answers(model, prompts, new_tokens=8, pad_id=0)
    assert differences(model, prompts, answers, 8) == []
    with torch.no_grad():
        alone = torch.stack([model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1) for prompt in prompts])
    torch.testing.assert_close(next_tokens(model, prompts, 0), alone, atol=2e-3, rtol=1e-3)
