"""Perplexity of language models with intervals: losses per window or example, and what they come to per token or word.

Models are plain modules in the manner of transformers: keyword arguments in, an object with `logits` out. Nothing here
loads a model or a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.metrics.intervals import Interval, ratio_of_sums

if TYPE_CHECKING:
    import torch
    from torch import nn

IGNORED = -100
"""Label of positions that are not scored, as transformers has it."""


@dataclass(frozen=True)
class Losses:
    """Losses of independent pieces of text."""

    nats: tuple[float, ...]
    """Summed negative log-likelihood of each piece."""
    tokens: tuple[int, ...]
    """Number of scored tokens of each piece."""

    @property
    def mean(self) -> float:
        """Nats per token over all pieces."""
        return math.fsum(self.nats) / sum(self.tokens)


def cut_windows(ids: Sequence[int] | torch.Tensor, size: int) -> torch.Tensor:
    """Cut a text into windows that do not overlap; an incomplete last one is dropped.

    `ids`: tokens of the whole text, shape `(tokens,)`.

    Returns:
        int64, shape `(windows, size)`.
    """
    import torch

    tokens = torch.as_tensor(ids, dtype=torch.int64)
    count = len(tokens) // size if size >= 2 else 0
    if count == 0:
        raise UsageError(
            f"{len(tokens)} tokens cannot be cut into windows of {size}.",
            cure="Choose shorter windows, of at least 2 tokens.",
        )
    return tokens[: count * size].view(count, size)


def causal_losses(
    model: nn.Module, windows: torch.Tensor, *, batch: int, progress: Progress = QUIET, description: str = "perplexity"
) -> Losses:
    """Score windows by a decoder: every token but a window's first, given those before it in the window.

    Under bf16 autocast and without a key-value cache, as the paper's authors measure.

    `windows`: int64, shape `(windows, size)`.
    """
    import torch

    nats: list[float] = []
    with progress.task(description, len(windows), unit="windows") as task:
        for part in torch.split(windows, batch):
            with torch.inference_mode(), torch.autocast(part.device.type, torch.bfloat16):
                logits = model(input_ids=part, use_cache=False).logits
            nats += _sums(logits[:, :-1], part[:, 1:])
            task.update(len(part))
    return Losses(tuple(nats), (windows.shape[1] - 1,) * len(windows))


def encoder_decoder_losses(
    model: nn.Module,
    batches: Iterable[Mapping[str, torch.Tensor]],
    *,
    progress: Progress = QUIET,
    description: str = "perplexity",
) -> Losses:
    """Score target sequences by an encoder-decoder, given their sources, under bf16 autocast and without a cache.

    `batches`: keyword arguments of the model, with `labels` of shape `(examples, tokens)` padded by `IGNORED`.
    """
    import torch

    nats: list[float] = []
    tokens: list[int] = []
    with progress.task(description, unit="examples") as task:
        for given in batches:
            labels = given["labels"]
            with torch.inference_mode(), torch.autocast(labels.device.type, torch.bfloat16):
                logits = model(**given, use_cache=False).logits
            nats += _sums(logits, labels)
            tokens += (labels != IGNORED).sum(1).tolist()
            task.update(len(labels))
    return Losses(tuple(nats), tuple(tokens))


def perplexity(losses: Losses, *, tokens_per_word: float = 1.0, seed: int) -> Interval:
    """Return perplexity with its interval, from a bootstrap over pieces; infinite where a loss is not finite.

    `tokens_per_word`: tokens of the whole text over its words. Perplexity per word compares models of different
    tokenizers; 1 gives perplexity per token.
    """
    return _exponential(_interval(losses.nats, losses.tokens, seed), tokens_per_word)


def compare(losses: Losses, baseline: Losses, *, tokens_per_word: float = 1.0, seed: int) -> Interval:
    """Return the ratio of two perplexities on the same pieces; the pieces are resampled in pairs."""
    if losses.tokens != baseline.tokens:
        raise UsageError("Perplexities can be compared on the same pieces only.", cure="Score both on the same text.")
    differences = [ours - theirs for ours, theirs in zip(losses.nats, baseline.nats, strict=True)]
    return _exponential(_interval(differences, losses.tokens, seed), tokens_per_word)


def _sums(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Negative log-likelihood of each row, summed in fp32; one row at a time, for logits are large."""
    import torch

    sums = []
    for row, targets in zip(logits, labels, strict=True):
        loss = torch.nn.functional.cross_entropy(row.float(), targets, ignore_index=IGNORED, reduction="sum")
        sums.append(float(loss))
    return sums


def _interval(nats: Sequence[float], tokens: Sequence[int], seed: int) -> Interval:
    """Nats per token."""
    loss, count = np.asarray(nats), np.asarray(tokens)
    if not np.isfinite(loss).all():
        return Interval(math.inf, math.inf, math.inf, len(loss), "a loss is not finite")
    if (loss / count == loss[0] / count[0]).all():
        return Interval(loss[0] / count[0], *(loss[0] / count[0],) * 2, len(loss), "all pieces equal")
    return ratio_of_sums(nats, tokens, seed=seed)


def _exponential(interval: Interval, tokens_per_word: float) -> Interval:
    def grow(nats: float) -> float:
        return math.exp(nats * tokens_per_word) if nats * tokens_per_word < 700 else math.inf

    estimate, low, high = (grow(end) for end in (interval.estimate, interval.low, interval.high))
    return Interval(estimate, low, high, interval.n, interval.method)
