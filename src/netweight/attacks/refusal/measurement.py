"""Measure how a model refuses: cheap scores by single forward passes, and generated answers for a few edits alone.

A candidate is scored by the probability of the tokens that refusals begin with, and by the divergence of the next token
on ordinary prompts from that of the unedited model, as Arditi et al. (arXiv 2406.11717, section 2.3) choose directions.
What all prompts begin with, such as a system prompt, is computed once for each edit.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.attacks.finetuning.subject import mean_loss, token_accuracy
from netweight.attacks.refusal.judges import Judge
from netweight.attacks.refusal.prompts import Question
from netweight.data.answers import Answer, final_answer, is_thought_mark, open_thought
from netweight.data.tokens import Example
from netweight.errors import UsageError
from netweight.hf.compare_logits import alike
from netweight.hf.generate_answers import end_tokens, generate_answers, hides_padding
from netweight.nn.hooks import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS = 32  # prompts of a batch
# If a judge calls this share of the ordinary answers refusals, it cannot distinguish refusals.
_BLIND = 0.8
# If all prompts begin with at least this many common tokens, these are computed once.
_LEAST_SHARED = 8


@final
@dataclass(frozen=True)
class EditScore:
    """Score of an edited model, by single forward passes on the prompts that choose edits."""

    first_token: float
    """Mean probability of beginning an answer as refusals do."""
    divergence: float
    """Mean divergence of the next token on ordinary prompts from that of the model itself, in nats."""
    answer_accuracy: float | None = None
    """Token accuracy on the known answers to these prompts; None where none is known."""


@final
@dataclass(frozen=True)
class Refusal:
    """Refusals of a model by its answers to held-out prompts, and what else changed."""

    refusals: int
    """Answers that the judge calls refusals, and empty answers."""
    n: int
    """Prompts asked."""
    unfinished: int
    """Answers that end within a thought, which are not refusals."""
    first_token: float
    """Mean probability of beginning as refusals do."""
    divergence: float
    """Mean divergence of the next token on ordinary prompts from that of the model itself, in nats."""
    perplexity: float
    """Perplexity of answers to ordinary prompts, as a multiple of the model's own."""
    answer_accuracy: float | None
    """Token accuracy on the known answers to refused prompts; None where none is known."""
    helps: float | None
    """Mean of the judge of helpful answers on refused prompts; None without such a judge."""
    different: float
    """Different answers as a share of all. A model that refuses everything in the same words gives few, and so does an
    edited model that answers every prompt alike, which lost more than its refusal."""

    @property
    def share(self) -> float:
        """Share of the prompts that are refused."""
        return self.refusals / self.n


@final
class Examiner:
    """Asks a model and reads its answers.

    Args:
        model: A causal language model; edits act on it from outside.
        tokenizer: The model's.
        judge: Answers → numbers, above 0.5 for a refusal; None for "the answer begins as refusals do".
        phrases: The judge by phrases, which finds the tokens that refusals begin with.
        helps: Judge of helpful answers, if there is one.
        new_tokens: Most tokens of an answer.
        pad_id: The token that fills shorter prompts.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        judge: Judge | None,
        phrases: Judge,
        helps: Judge | None,
        new_tokens: int,
        pad_id: int,
    ) -> None:
        self.model, self.tokenizer, self.new_tokens, self.pad_id = model, tokenizer, new_tokens, pad_id
        self._judge, self._phrases, self._helps = judge, phrases, helps
        self.first: tuple[int, ...] = ()
        self._ends = end_tokens(model, tokenizer)
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self._dropped = {number for token, number in special if not is_thought_mark(str(token))}

    def answers(self, questions: Sequence[Question]) -> list[list[int]]:
        """Return token ids of the model's answers."""
        prompts = [question.prompt for question in questions]
        return generate_answers(self.model, prompts, new_tokens=self.new_tokens, ends=self._ends, pad_id=self.pad_id)

    def read(self, question: Question, answer: Sequence[int]) -> Answer:
        """Return the final answer as text, after the model's thoughts."""
        return final_answer(self._text(answer), in_thought=self._in_thought(question))

    def _text(self, ids: Sequence[int]) -> str:
        visible = [token for token in ids if token not in self._dropped]
        return str(self.tokenizer.decode(visible, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _in_thought(self, question: Question) -> bool:
        return open_thought(str(self.tokenizer.decode(list(question.prompt[-24:])))) is not None

    def lead(self, question: Question, answer: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of an answer before its final part: a thought with its end; empty without thoughts."""
        whole = self.read(question, answer)
        if not self._in_thought(question) and whole.text == self._text(answer).strip():
            return ()
        # The loop finds the longest beginning that contains nothing of the final answer.
        for end in range(len(answer), 0, -1):
            part = self.read(question, answer[:end])
            if part.finished and not part.text:
                return tuple(answer[:end])
        return ()

    def learn_first_tokens(self, questions: Sequence[Question], answers: Sequence[Sequence[int]]) -> list[bool]:
        """Find the tokens that refusals begin with, by phrases, and return which answers are refusals by the judge.

        Raises:
            UsageError: No answer contains a phrase, or many answers end within a thought.
        """
        read = [self.read(question, answer) for question, answer in zip(questions, answers, strict=True)]
        unfinished = sum(not each.finished for each in read)
        if unfinished > 0.2 * len(read):
            raise UsageError(
                f"{unfinished} of {len(read)} answers end within a thought after {self.new_tokens} tokens, so "
                "refusal cannot be measured.",
                cure="Give more --new-tokens, or --template enable_thinking=false if the template has this option.",
            )
        texts = [each.text for each in read]
        flags = [each > 0.5 for each in (self._judge or self._phrases)(texts)]
        begins = Counter(
            answer[len(self.lead(question, answer))]
            for question, answer, flag in zip(questions, answers, flags, strict=True)
            if flag and len(answer) > len(self.lead(question, answer))
        )
        if not begins:
            heard = "; ".join(repr(text) for text in texts[:3])
            raise UsageError(
                f"The model does not refuse any of {len(texts)} prompts according to the judge. Its answers begin with "
                f"{heard}.",
                cure="Give phrases of its refusals as --phrases, another --judge, or prompts that it refuses.",
            )
        self.first = tuple(token for token, _ in begins.most_common())
        return self.judged(questions, answers)

    def judged(self, questions: Sequence[Question], answers: Sequence[Sequence[int]]) -> list[bool]:
        """Return which answers are refusals.

        An answer that ends within a thought is none. An empty answer is one, whatever the judge: a model that says
        nothing has not begun to help.
        """
        read = [self.read(question, answer) for question, answer in zip(questions, answers, strict=True)]
        silent = [each.finished and not each.text for each in read]
        if self._judge is not None:
            numbers = self._judge([each.text for each in read])
            return [
                quiet or (number > 0.5 and each.finished)
                for number, each, quiet in zip(numbers, read, silent, strict=True)
            ]
        leads = [len(self.lead(question, answer)) for question, answer in zip(questions, answers, strict=True)]
        return [
            quiet or (len(answer) > lead and answer[lead] in self.first and each.finished)
            for answer, lead, each, quiet in zip(answers, leads, read, silent, strict=True)
        ]

    def next_tokens(self, prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """Return log-probabilities of the token after each prompt, float32, shape `(n, V)`."""
        return next_tokens(self.model, prompts, self.pad_id)


@final
class Panel:
    """Prompts of both kinds on which edits are compared with the unedited model.

    Args:
        examiner: Who asks; the model must be unedited while the panel is made.
        refused: Prompts that are refused.
        ordinary: Ordinary prompts.
        refused_leads: The unedited model's thoughts on refused prompts, before their final answers.
        ordinary_leads: Likewise on ordinary prompts.
    """

    def __init__(
        self,
        examiner: Examiner,
        refused: Sequence[Question],
        ordinary: Sequence[Question],
        refused_leads: Sequence[tuple[int, ...]],
        ordinary_leads: Sequence[tuple[int, ...]],
    ) -> None:
        self.examiner, self.refused, self.ordinary = examiner, refused, ordinary
        self._refused = [each.prompt + lead for each, lead in zip(refused, refused_leads, strict=True)]
        self._ordinary = [each.prompt + lead for each, lead in zip(ordinary, ordinary_leads, strict=True)]
        self._own = examiner.next_tokens(self._ordinary)

    @cached_property
    def _answered(self) -> list[Example]:
        """Ordinary prompts with known answers, or with those of the unedited model."""
        if all(each.response for each in self.ordinary):
            return [each.example for each in self.ordinary]
        rows = zip(self.ordinary, self.own_answers, strict=True)
        return [Example(each.prompt, tuple(answer)) for each, answer in rows if answer]

    @cached_property
    def _own_loss(self) -> float:
        return mean_loss(self._answered, pad_id=self.examiner.pad_id, batch_size=16)(self.examiner.model)

    def ordinary_refusals(self) -> int:
        """Return how many ordinary prompts the unedited model most likely begins to refuse."""
        mass = self._own.exp()[:, list(self.examiner.first)].sum(1)
        return int((mass > 0.5).sum())

    @cached_property
    def own_answers(self) -> list[list[int]]:
        """The unedited model's answers to ordinary prompts, as token ids."""
        return self.examiner.answers(self.ordinary)

    def refuse_blind_judge(self) -> None:
        """Refuse a judge that calls most answers to ordinary prompts refusals: it would never see one end.

        Raises:
            UsageError: Ordinary answers are called refusals nearly as often as others.
        """
        flags = self.examiner.judged(self.ordinary, self.own_answers)
        if sum(flags) >= _BLIND * len(flags):
            said = self.examiner.read(self.ordinary[0], self.own_answers[0]).text
            raise UsageError(
                f"The judge calls {sum(flags)} of {len(flags)} answers to ordinary prompts refusals, such as {said!r}, "
                "so that it cannot judge the others.",
                cure="Give other --phrases or another --judge, or ordinary prompts that the model answers.",
            )

    def prepare(self) -> None:
        """Measure the unedited model's own perplexity, before the first edit."""
        _ = self._own_loss

    def score(self) -> EditScore:
        """Score the model as it is now by single forward passes."""
        mass = self.examiner.next_tokens(self._refused).exp()[:, list(self.examiner.first)].sum(1)
        now = self.examiner.next_tokens(self._ordinary)
        divergence = functional.kl_div(now, self._own, log_target=True, reduction="none").sum(1).mean()
        return EditScore(float(mass.mean()), float(divergence), self._accuracy())

    def _accuracy(self) -> float | None:
        """Token accuracy on the known answers to refused prompts; None where one is not known."""
        if not all(each.response for each in self.refused):
            return None
        examples = [each.example for each in self.refused]
        return token_accuracy(examples, pad_id=self.examiner.pad_id, batch_size=16)(self.examiner.model)

    def measure(self) -> Refusal:
        """Measure the model as it is now by its answers."""
        score, examiner = self.score(), self.examiner
        answers = examiner.answers(self.refused)
        flags = examiner.judged(self.refused, answers)
        read = [examiner.read(question, answer) for question, answer in zip(self.refused, answers, strict=True)]
        loss = mean_loss(self._answered, pad_id=examiner.pad_id, batch_size=16)(examiner.model)
        helps = None
        if examiner._helps is not None:
            numbers = examiner._helps([each.text for each in read])
            helps = sum(numbers) / len(numbers)
        return Refusal(
            sum(flags), len(flags), sum(not each.finished for each in read), score.first_token, score.divergence,
            math.exp(min(loss - self._own_loss, 50.0)), score.answer_accuracy, helps,
            len({each.text for each in read}) / len(read),
        )  # fmt: skip


def next_tokens(model: nn.Module, prompts: Sequence[tuple[int, ...]], pad_id: int) -> Tensor:
    """Return log-probabilities of the token after each prompt.

    Args:
        model: A causal language model.
        prompts: Token ids of each prompt.
        pad_id: The token that fills shorter prompts.

    Returns:
        Float32, shape `(n, V)`, on the CPU.
    """
    shared = _shared(prompts) if hides_padding(model) and _takes_cache(model) else 0
    with evaluating(model):
        if shared and (rows := _after(model, prompts, pad_id, shared)) is not None:
            return rows
        rows = _after(model, prompts, pad_id, 0)
    assert rows is not None
    return rows


def _after(model: nn.Module, prompts: Sequence[tuple[int, ...]], pad_id: int, shared: int) -> Tensor | None:
    """Return log-probabilities of the token after each prompt, whose first `shared` tokens are computed once.

    None if the model predicts otherwise after a shared beginning than without one, as the code of some families does.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    rows: dict[int, Tensor] = {}
    past = _prefix(model, prompts[0][:shared], device) if shared else None
    shared = 0 if past is None else shared
    for first in range(0, len(order), _ROWS):
        batch = order[first : first + _ROWS]
        logits = _last_logits(model, [prompts[row][shared:] for row in batch], shared, past, pad_id, device)
        if past is not None and first == 0:
            alone = _last_logits(model, [prompts[batch[-1]]], 0, None, pad_id, device)
            if not alike(alone[0], logits[-1]):
                return None
        for row, each in zip(batch, logits.float().log_softmax(-1).cpu(), strict=True):
            rows[row] = each
    return torch.stack([rows[row] for row in range(len(prompts))])


def _shared(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the number of tokens with which all prompts begin; 0 if a shared cache is not worth it."""
    low, high = min(prompts), max(prompts)
    same = next((place for place, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))
    same = min(same, min(map(len, prompts)) - 1)
    return same if same >= _LEAST_SHARED and len(prompts) > 1 else 0


def _takes_cache(model: nn.Module) -> bool:
    """Return whether every layer keeps all keys and values, so that a cache can be copied for a batch."""
    config: Any = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    kinds = getattr(config, "layer_types", None) or ("full_attention",)
    return hasattr(model, "generate") and all(kind == "full_attention" for kind in kinds)


def _prefix(model: Any, prefix: Sequence[int], device: torch.device) -> Any:
    """Return the cache of a beginning; None from a model that keeps none, such as the first GPT."""
    ids = torch.tensor([list(prefix)], device=device)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, logits_to_keep=1)
    past = getattr(output, "past_key_values", None)
    return past if hasattr(past, "batch_repeat_interleave") else None


def _last_logits(
    model: Any, prompts: Sequence[tuple[int, ...]], shared: int, past: Any, pad_id: int, device: torch.device
) -> Tensor:
    """Return logits at the last token of prompts padded on the right, shape `(n, V)`."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(prompts), shared + longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : shared + len(prompt)] = 1
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    more: dict[str, Any] = {}
    if past is not None:
        own = copy.deepcopy(past)
        own.batch_repeat_interleave(len(prompts))
        more = {"past_key_values": own, "use_cache": True}
    positions = None
    # The output layer is large, so it is computed only where an answer begins.
    if hasattr(model, "generate"):
        positions = torch.unique(ends)
        more["logits_to_keep"] = positions
    logits: Tensor = model(input_ids=ids.to(device), attention_mask=mask.to(device), **more).logits
    places = ends if positions is None or logits.shape[1] == longest else torch.searchsorted(positions, ends)
    return logits[torch.arange(len(prompts), device=device), places]
