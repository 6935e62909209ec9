"""What an attack is measured by: functions from a model to one number. Ready ones, and adapters for users' judges.

A `Score` is any function from a model to a float. Those made here hold their batches ready, so that a look at a model
costs its forward passes and little else. A model whose logits are not finite scores NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.data.examples import IGNORED, Batch, Example, LossOn, collate
from netweight.errors import UsageError

# A number that says something of a model; it must leave the model as it is.
Score: TypeAlias = Callable[[nn.Module], float]
# A user's judge: texts → one number for each, shape `(n,)`; harm, toxicity or fluency.
Judge: TypeAlias = Callable[[list[str]], Tensor]
# A user's generation: a model and prompts → one answer for each prompt.
Generate: TypeAlias = Callable[[nn.Module, list[str]], list[str]]


def token_accuracy(examples: Sequence[Example], *, pad_id: int, batch_size: int = 64) -> Score:
    """Make a score: the share of response tokens that are the model's first choice, the tokens before them given."""
    batches = _batches(examples, pad_id, batch_size, "response")

    def score(model: nn.Module) -> float:
        right, all_ = 0, 0
        for logits, targets in _predictions(model, batches):
            if not bool(logits.isfinite().all()):
                return math.nan
            right += int((logits.argmax(-1) == targets).sum())
            all_ += len(targets)
        return right / all_

    return score


def mean_loss(examples: Sequence[Example], *, pad_id: int, loss_on: LossOn = "response", batch_size: int = 64) -> Score:
    """Make a score: the mean cross-entropy per predicted token, in nats. Lower is better for the attacker."""
    batches = _batches(examples, pad_id, batch_size, loss_on)

    def score(model: nn.Module) -> float:
        total, count = 0.0, 0
        for logits, targets in _predictions(model, batches):
            total += float(functional.cross_entropy(logits.float(), targets, reduction="sum"))
            count += len(targets)
        return total / count if math.isfinite(total) else math.nan

    return score


def exact_match(examples: Sequence[Example], *, pad_id: int, batch_size: int = 64) -> Score:
    """Make a score: the share of prompts whose greedy generation begins with exactly the response."""
    # Nothing is generated. Greedy generation gives the response if and only if every one of its tokens is the first
    # choice after those before it, which one forward pass tells.
    for row, example in enumerate(examples):
        if not example.prompt:
            raise UsageError(f"Example {row} has no prompt to generate from.", cure="Give it one, or leave it out.")
    batches = _batches(examples, pad_id, batch_size, "response")

    def score(model: nn.Module) -> float:
        right = 0
        with evaluating(model):
            for batch in batches:
                batch = batch.to(_device(model))
                logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
                if not bool(logits.isfinite().all()):
                    return math.nan
                targets = batch.labels[:, 1:]
                agrees = (logits[:, :-1].argmax(-1) == targets) | (targets == IGNORED)
                right += int(agrees.all(1).sum())
        return right / len(examples)

    return score


def distinct_share(prompts: Sequence[Sequence[int]], *, new_tokens: int = 32, end_id: int | None = None) -> Score:
    """Make a fluency score: the share of different trigrams among all trigrams of greedy answers, mean over prompts."""
    # A model that repeats itself scores near 0. An answer of fewer than three tokens counts as 1: its shortness is for
    # other scores to judge.

    def score(model: nn.Module) -> float:
        shares = []
        for answer in greedy(model, prompts, new_tokens=new_tokens, end_id=end_id):
            trigrams = list(zip(answer, answer[1:], answer[2:], strict=False))
            shares.append(len(set(trigrams)) / len(trigrams) if trigrams else 1.0)
        return sum(shares) / len(shares)

    return score


def judged(judge: Judge, generate: Generate, prompts: Sequence[str]) -> Score:
    """Make a score of a user's judge: the mean of its numbers over the model's answers."""
    asked = list(prompts)
    if not asked:
        raise UsageError("A judge needs at least one prompt.")

    def score(model: nn.Module) -> float:
        with evaluating(model):
            answers = generate(model, asked)
        numbers = torch.as_tensor(judge(answers))
        if len(answers) != len(asked) or numbers.shape != (len(asked),):
            raise UsageError(
                f"{len(asked)} prompts got {len(answers)} answers and numbers of shape {tuple(numbers.shape)}.",
                cure="Return one answer for each prompt, and one number for each answer.",
            )
        return float(numbers.double().mean())

    return score


def greedy(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, new_tokens: int, end_id: int | None = None
) -> list[list[int]]:
    """Generate the most likely token again and again, without a cache: for short answers of small models."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"Prompt {row} is empty, so there is nothing to generate from.")
        by_length.setdefault(len(prompt), []).append(row)
    answers: list[list[int]] = [[] for _ in prompts]
    with evaluating(model):
        for length, rows in by_length.items():
            ids = torch.tensor([list(prompts[row]) for row in rows], device=_device(model))
            for _ in range(new_tokens):
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            for row, tokens in zip(rows, ids[:, length:].tolist(), strict=True):
                answers[row] = tokens[: tokens.index(end_id)] if end_id in tokens else tokens
    return answers


def _batches(examples: Sequence[Example], pad_id: int, batch_size: int, loss_on: LossOn) -> list[Batch]:
    """Batches of examples of like length, so that little is padding."""
    if not examples:
        raise UsageError("A score needs at least one example.")
    for row, example in enumerate(examples):
        if len(example) < 2:
            raise UsageError(f"Example {row} is one token long: nothing comes before it.", cure="Leave it out.")
    ordered = sorted(examples, key=len)
    return [
        collate(ordered[first : first + batch_size], pad_id=pad_id, loss_on=loss_on)
        for first in range(0, len(ordered), batch_size)
    ]


def _predictions(model: nn.Module, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and targets where there is something to predict, batch by batch: shapes `(n, V)` and `(n,)`."""
    for batch in batches:
        batch = batch.to(_device(model))
        with evaluating(model):
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        targets = batch.labels[:, 1:]
        wanted = targets != IGNORED
        yield logits[:, :-1][wanted], targets[wanted]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Look at a model without dropout and gradients, and leave every part of it in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
