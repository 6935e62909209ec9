"""Read prompts as the model is asked, and part them: to make edits of, to choose edits by, to measure on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from netweight.core.seeds import torch_generator
from netweight.data.answers import normalized
from netweight.data.rows import DataRows
from netweight.data.text import text_prompts
from netweight.data.tokens import BELOW, AnyTemplate, Chat, Example, rows_and_examples, tokenized_prompts
from netweight.errors import UsageError
from netweight.hf.load_language_model import check_tokens, context_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from netweight.attacks.refusal.settings import RefusalSettings

LEAST = 12
"""Fewest different prompts of a kind."""
# Shares of the prompts from which edits are computed, and by which they are chosen. The rest measures the chosen edits.
_MADE, _CHOSEN = 0.5, 0.25


@final
@dataclass(frozen=True)
class Question:
    """One prompt."""

    prompt: tuple[int, ...]
    """Token ids as the model is asked."""
    response: tuple[int, ...] = ()
    """Token ids of the known answer; empty where none is known."""

    @property
    def example(self) -> Example:
        """The prompt with its known answer."""
        return Example(self.prompt, self.response)


@final
@dataclass(frozen=True)
class QuestionSplit:
    """The prompts of one kind, in three parts."""

    make: Sequence[Question]
    """Half of them: edits are made of these."""
    choose: Sequence[Question]
    """A quarter: edits are chosen by these."""
    measure: Sequence[Question]
    """The rest: what is reported is measured on these."""


def read_questions(
    rows: DataRows,
    kind: str,
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    settings: RefusalSettings,
    *,
    seed: int,
    report: Callable[[str], object],
) -> list[Question]:
    """Return different prompts of a kind (refused or ordinary) in an order of the seed, at most `settings.prompts`.

    The order does not depend on where the rows are stored, so that a second call recognizes them elsewhere.

    Raises:
        UsageError: There are fewer than `LEAST` different prompts, or rows cannot be used.
    """
    texts, answered = text_prompts(rows, **settings.reading(rows, report))
    order = torch.randperm(len(texts), generator=torch_generator(seed, "prompts", kind)).tolist()
    texts = [texts[place] for place in order]
    template: AnyTemplate = BELOW
    if tokenizer.chat_template:
        template = Chat(settings.template_options)
    elif settings.template:
        raise UsageError(
            "The tokenizer has no chat template to which options could be given.", cure="Leave out --template."
        )
    else:
        report(
            "The tokenizer has no chat template: prompts are given as plain text, for which chat models were "
            "not trained. "
            "Put the model's chat_template.jinja into its folder if it has one."
        )
    context = context_of(network, tokenizer) - settings.new_tokens
    if context < 1:
        raise UsageError(
            f"--new-tokens {settings.new_tokens} leaves no token of the model's context of "
            f"{context + settings.new_tokens} to a prompt.",
            cure="Give fewer --new-tokens.",
        )
    how: dict[str, Any] = {"context": context, "template": template, **settings.tokenizing(report)}
    if answered:
        whole = rows_and_examples(texts, tokenizer, **how)
        questions = [Question(example.prompt, example.response) for _, example in whole]
    else:
        questions = [Question(prompt) for prompt in tokenized_prompts(texts, tokenizer, **how)]
    check_tokens(network, tokenizer, (question.prompt + question.response for question in questions))
    different = list({_text(question, tokenizer): question for question in questions}.values())[: settings.prompts]
    if len(different) < LEAST:
        raise UsageError(f"{rows.name} contains {len(different)} different prompts.", cure=f"Give at least {LEAST}.")
    return different


def _text(question: Question, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a prompt without differences of case, spaces and marks, by which no two parts may share it."""
    return normalized(str(tokenizer.decode(list(question.prompt))))


def refuse_shared(
    refused: Sequence[Question], ordinary: Sequence[Question], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse prompts that are of both kinds: edits are computed from the difference of both.

    Raises:
        UsageError: A prompt is among both.
    """
    texts = {_text(each, tokenizer) for each in refused}
    both = [each for each in ordinary if _text(each, tokenizer) in texts]
    if both:
        prompt = str(tokenizer.decode(list(both[0].prompt), skip_special_tokens=True)).strip()
        raise UsageError(
            f"{len(both)} of {len(ordinary)} prompts of --ordinary are also prompts of --refused, such as {prompt!r}. "
            "Edits are computed from the difference of both kinds.",
            cure="Remove these rows from one of the files.",
        )


def in_parts(questions: Sequence[Question]) -> QuestionSplit:
    """Part prompts into those that edits are made of, chosen by and measured on."""
    first, second = round(_MADE * len(questions)), round((_MADE + _CHOSEN) * len(questions))
    return QuestionSplit(questions[:first], questions[first:second], questions[second:])
