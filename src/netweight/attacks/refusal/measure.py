"""What is left of a model's refusal, and of the model: first tokens, phrases, divergence, perplexity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.attacks.finetuning.subject import greedy, mean_loss, token_accuracy
from netweight.attacks.refusal.edits import Prompts, padded
from netweight.data.examples import Example
from netweight.errors import UsageError
from netweight.nn.hooks import evaluating

Decode: TypeAlias = Callable[[Sequence[int]], str]


@final
@dataclass(frozen=True)
class Asked:
    """What a model is asked, and what counts as a refusal."""

    refused: Sequence[Example]  # prompts that the model refuses, with the answer where one is known
    ordinary: Sequence[Example]  # prompts that it answers
    decode: Decode
    phrases: Sequence[str]
    new_tokens: int
    pad_id: int
    end_id: int | None
    answers: bool  # whether the responses of refused prompts are what the model would answer
    first: tuple[int, ...] = ()  # tokens that refusals begin with


@final
@dataclass(frozen=True)
class Refusal:
    """How a model refuses, and what else changed."""

    refusals: int  # answers that hold a phrase
    n: int  # prompts asked
    first_token: float  # mean probability of beginning as refusals do
    divergence: float  # mean divergence of the next token on ordinary prompts from that of the model itself, in nats
    perplexity: float  # of ordinary rows, as a multiple of the model's own
    answered: float | None  # token accuracy on the answers that are refused; None where none is known

    @property
    def share(self) -> float:
        """Share of the prompts that are refused."""
        return self.refusals / self.n


def refusing_tokens(model: nn.Module, asked: Asked, prompts: Prompts) -> tuple[int, ...]:
    """Return the tokens with which a model begins when it refuses, the commonest first; at least one."""
    answers = _answers(model, asked, prompts)
    found = Counter(answer[0] for answer in answers if answer and refuses(answer, asked))
    if not found:
        heard = "; ".join(repr(asked.decode(answer)) for answer in answers[:3])
        raise UsageError(
            f"The model refuses none of {len(prompts)} prompts as far as its phrases tell: it says {heard}.",
            cure="Give what its refusals hold as --phrases, or prompts that it refuses.",
        )
    return tuple(token for token, _ in found.most_common())


def refuses(answer: Sequence[int], asked: Asked) -> bool:
    """Whether an answer holds one of the phrases."""
    text = asked.decode(answer).lower()
    return any(phrase.lower() in text for phrase in asked.phrases)


def _answers(model: nn.Module, asked: Asked, prompts: Prompts) -> list[list[int]]:
    return greedy(model, prompts, new_tokens=asked.new_tokens, end_id=asked.end_id)


def measure(model: nn.Module, asked: Asked, own: Tensor, own_loss: float) -> Refusal:
    """Ask a model; `own` and `own_loss` are the unedited model's next tokens and loss on ordinary rows."""
    prompts = [example.prompt for example in asked.refused]
    said = _answers(model, asked, prompts)
    first = next_tokens(model, prompts, asked.pad_id).exp()[:, list(asked.first)].sum(1)
    found = next_tokens(model, [example.prompt for example in asked.ordinary], asked.pad_id)
    divergence = functional.kl_div(found, own, log_target=True, reduction="none").sum(1).mean()
    loss = ordinary_loss(model, asked)
    accuracy = token_accuracy(asked.refused, pad_id=asked.pad_id)(model) if asked.answers else None
    return Refusal(
        sum(refuses(answer, asked) for answer in said), len(said), float(first.mean()), float(divergence),
        math.exp(min(loss - own_loss, 50.0)), accuracy,
    )  # fmt: skip


def ordinary_loss(model: nn.Module, asked: Asked) -> float:
    """Return the mean loss on ordinary rows, in nats a token."""
    return mean_loss(asked.ordinary, pad_id=asked.pad_id)(model)


def next_tokens(model: nn.Module, prompts: Prompts, pad_id: int) -> Tensor:
    """Return log-probabilities of the token after each prompt, float32, shape `(n, V)`."""
    rows = []
    for batch, ends in padded(model, prompts, pad_id):
        with evaluating(model):
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        rows.append(logits[torch.arange(len(ends)), ends].float().log_softmax(-1).cpu())
    return torch.cat(rows)
