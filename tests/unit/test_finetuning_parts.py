"""What an attack is made of: settings and grids, low-rank factors against dense weights, scores against generation."""

import copy
import math
import re
from types import SimpleNamespace

import attacked_models as attacked
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from netweight.attacks.finetuning.factors import attach_factors_
from netweight.attacks.finetuning.settings import GRIDS, AttackSettings, capped, grid, named_grid
from netweight.attacks.finetuning.subject import distinct_share, judged, mean_loss, token_accuracy
from netweight.data.tokens import Example
from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.hf.generate_answers import generate_answers
from netweight.toys.language import answers


@pytest.fixture(scope="module")
def model():
    return attacked.subject(kept=False).model


# ---- settings ----


def test_the_papers_grid_is_the_papers():
    paper = named_grid("paper")
    assert [(one.lr, one.samples) for one in paper] == [(lr, n) for lr in (3e-5, 6e-5, 8e-5) for n in (1000, 10_000)]
    assert {(one.optimizer, one.schedule, one.warmup, one.batch_size, one.epochs) for one in paper} == {
        ("adam", "cosine", 0.1, 4, 1)
    }
    assert [one.steps for one in paper[:2]] == [250, 2500]


def test_grids_multiply_and_fixed_values_win():
    made = grid(lr=(1e-4, 1e-3), lora_rank=[None, 8], seed=range(2), samples=50)
    assert len(made) == 8
    assert [one.seed for one in made[:2]] == [0, 1]
    assert {one.samples for one in made} == {50}
    assert len(grid(lr=(1e-3, 1e-3))) == 1
    assert {(one.batch_size, one.seed) for one in named_grid("quick", seeds=(7,), batch_size=2)} == {(2, 7)}
    fitted = capped(named_grid("paper"), 500)
    assert {one.samples for one in fitted} == {500}
    assert [one.steps for one in fitted] == [one.steps for one in named_grid("paper")], "fewer rows, as many steps"
    few = capped(named_grid("quick", seeds=(0,)), 25)
    assert {(one.samples, one.steps) for one in few} == {(25, 100)}


def test_steps_and_words():
    one = AttackSettings(lr=1e-3, samples=50, epochs=3, batch_size=20, benign_first=5, lora_rank=8)
    assert one.steps == 5 + 9
    assert AttackSettings(samples=50, max_steps=4).steps == 4
    assert one.label == "adam 1.0e-03, LoRA 8, 50 samples, 14 steps, batches of 20, 5 benign steps first"
    assert AttackSettings(seed=1).label == AttackSettings(seed=2).label
    for name in GRIDS:
        by_label = {}
        for one in named_grid(name):
            by_label.setdefault(one.label, []).append(one.seed)
        assert all(len(set(seeds)) == len(seeds) for seeds in by_label.values()), name


def test_settings_that_cannot_be_meant_are_refused_all_at_once():
    with pytest.raises(UsageError) as caught:
        AttackSettings(lr=-1, samples=0, optimizer="tiger")
    for line in ("lr: .* greater than 0, not -1", "optimizer: .* not 'tiger'", "samples: .* 1, not 0"):
        assert re.search(line, str(caught.value))
    for wrong in (
        {"warmup": 1.0},
        {"clip": 0.0},
        {"lr": math.inf},
        {"lora_rank": 0},
        {"benign_share": 0.9},
        {"benign_first": 9, "max_steps": 9},
        {"loss_on": "x"},
    ):
        with pytest.raises(UsageError):
            AttackSettings(**wrong)
    with pytest.raises(NameNotFound, match=r"no field 'rate'"):
        grid(rate=1)
    with pytest.raises(UsageError, match="'lr' of a grid is empty"):
        grid(lr=[])
    with pytest.raises(NameNotFound, match="quick, paper"):
        named_grid("fast")


# ---- low-rank factors ----


class Conv1D(nn.Module):
    """A linear layer with its weight transposed, as transformers has it."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x):
        return x @ self.weight


class Stack(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 6)
        self.first = Conv1D(8, 6)
        self.second = nn.Linear(8, 6)
        self.head = nn.Linear(6, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.tied = tied

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.head(self.second(torch.tanh(self.first(self.embed(input_ids))))))

    def get_output_embeddings(self):
        return None if self.tied else self.head


@pytest.mark.parametrize("tied", [True, False])
@given(rank=st.integers(1, 6), alpha=st.sampled_from([None, 1.0, 16.0]), seed=st.integers(0, 5))
def test_factors_are_the_merged_dense_weights(tied, rank, alpha, seed):
    model = Stack(tied)
    start = copy.deepcopy(model.state_dict())
    ids = torch.arange(10).reshape(2, 5)
    before = model(ids, torch.ones_like(ids)).logits
    parameters = attach_factors_(model, rank=rank, alpha=alpha, seed=seed)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        f"{layer}.low_rank_factors.{part}" for layer in ("first", "second") for part in ("down", "up")
    ]
    assert torch.equal(model(ids, torch.ones_like(ids)).logits, before)  # nothing has changed at the start
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(generator=torch.Generator().manual_seed(seed))
    expected = dict(start)
    scale = (2 * rank if alpha is None else alpha) / rank
    for layer, turned in (("first", True), ("second", False)):
        factors = getattr(model, layer).low_rank_factors
        dense = torch.tensor(scale * (factors.up.detach().numpy() @ factors.down.detach().numpy()))
        expected[f"{layer}.weight"] = start[f"{layer}.weight"] + (dense.T if turned else dense)
    merged = Stack(tied)
    merged.load_state_dict(expected)
    changed = [one(ids, torch.ones_like(ids)).logits for one in (model, merged)]
    torch.testing.assert_close(*changed, rtol=1e-4, atol=1e-4)


def test_factors_twice_or_on_nothing_are_refused():
    model = Stack(tied=True)
    attach_factors_(model, rank=2, seed=0)
    with pytest.raises(UsageError, match="'first' has low-rank factors already"):
        attach_factors_(model, rank=2, seed=0)
    with pytest.raises(Unsupported, match="no linear layer"):
        attach_factors_(nn.Embedding(3, 3), rank=2, seed=0)


# ---- scores ----


def test_scores_by_hand_one_example_at_a_time(model):
    examples = [*attacked.cipher(2, 1, 11, count=9), *attacked.cipher(3, 12, 23, count=7)]
    right, losses, matched = [], [], []
    for example in examples:
        tokens = torch.tensor([example.prompt + example.response])
        logits = model(tokens, None).logits[0, len(example.prompt) - 1 : -1].double()
        target = torch.tensor(example.response)
        right += (logits.argmax(1) == target).tolist()
        losses += (-logits.log_softmax(1)[range(len(target)), target]).tolist()
        answer = generate_answers(model, [example.prompt], new_tokens=len(example.response))[0]
        matched.append(answer == list(example.response))
    for size in (1, 4, 100):
        assert token_accuracy(examples, pad_id=0, batch_size=size)(model) == sum(right) / len(right)
        assert mean_loss(examples, pad_id=0, batch_size=size)(model) == pytest.approx(sum(losses) / len(losses))
        assert answers(model, examples, pad_id=0, at_once=size).whole == sum(matched) / len(matched)
    assert 0 < sum(matched) < len(matched)


def test_full_text_loss_looks_at_prompts_too(model):
    one = [Example((1, 2, 3), (4,))]
    logits = model(torch.tensor([[1, 2, 3, 4]]), None).logits[0].detach().log_softmax(-1)
    by_hand = -float(logits[range(3), [2, 3, 4]].mean())
    assert mean_loss(one, pad_id=0, loss_on="full")(model) == pytest.approx(by_hand)


def test_greedy_answers_end_at_the_end_token_and_keeps_the_order(model):
    prompts = [(1, 2, 3), (5,), (1, 2, 5), (3, 5)]
    free = generate_answers(model, prompts, new_tokens=6)
    assert free[1] == free[2] == free[3]  # this model looks at the last token alone
    assert [len(answer) for answer in free] == [6] * 4
    ended = generate_answers(model, prompts, new_tokens=6, ends=(free[1][2],))
    assert ended[1] == free[1][:2]
    with pytest.raises(UsageError, match="Prompt 1 is empty"):
        generate_answers(model, [(1,), ()], new_tokens=1)


def test_fluency_falls_with_repetition(model):
    counting = distinct_share([(1,), (5,)], new_tokens=11)(model)
    stuck = copy.deepcopy(model)
    with torch.no_grad():
        stuck.head.weight.zero_()
    assert counting == 1
    assert distinct_share([(1,), (5,)], new_tokens=11)(stuck) == pytest.approx(1 / 9)
    assert distinct_share([(1,)], new_tokens=2)(stuck) == 1


def test_users_judges_become_scores(model):
    modes = []

    def generate(model, prompts):
        modes.append((model.training, torch.is_grad_enabled()))
        return [prompt.upper() for prompt in prompts]

    model.train()
    score = judged(lambda texts: torch.tensor([float(len(text)) for text in texts]), generate, ["a", "bcd"])
    assert score(model) == 2
    assert modes == [(False, False)]
    assert model.training
    with pytest.raises(
        UsageError, match=r"2 prompts got 2 answers, and the judge 'given' gave numbers of shape \(1,\)"
    ):
        judged(lambda texts: torch.tensor([0.0]), generate, ["a", "b"])(model)
    with pytest.raises(UsageError, match="at least one prompt"):
        judged(lambda texts: torch.zeros(0), generate, [])


def test_a_broken_model_scores_nan_and_bad_examples_are_named(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.head.weight[3] = math.nan
    examples = attacked.cipher(2, 1, 11, count=5)
    for make in (token_accuracy, mean_loss):
        assert math.isnan(make(examples, pad_id=0)(broken)), make
        with pytest.raises(UsageError):
            make([], pad_id=0)
    with pytest.raises(UsageError, match="Example 1 is one token long"):
        token_accuracy([examples[0], Example((), (1,))], pad_id=0)
