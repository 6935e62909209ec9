"""A small encoder-decoder in the shape of T5, trained here to write SQL from questions: the stand-in for T5 1B to 11B.

`trained` makes it from a seed and keeps it as an ordinary model folder with its tokenizer; `batches` turns pairs into
what such a model takes. Used by the table that measures what compression does to an encoder-decoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from netweight.core.digests import digest_bytes
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.data.public import SourceAndTarget, train_bpe
from netweight.metrics.perplexity import IGNORED, encoder_decoder_losses
from netweight_experiments.toys.fitting import Schedule, finished, fitted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Batch = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class EncoderDecoderRecipe:
    """Everything that decides on the trained model, but the pairs."""

    vocabulary: int = 2048
    """Tokens of the byte-pair encoding."""
    width: int = 256
    inner: int = 512
    """Width of the feed-forward layers."""
    layers: int = 3
    """Number of blocks of the encoder, and of the decoder."""
    heads: int = 4
    """Attention heads."""
    dropout: float = 0.1
    """Share of activations that training switches off."""
    batch: int = 32
    """Pairs per step."""
    seed: int = 20241031
    """Seed of initialization and batches."""
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=900))
    """How it is trained."""


# 5.2 million weights; some eight minutes of training on one core.
SMALL = EncoderDecoderRecipe()
# Most tokens of a source and of a target; what is beyond is cut off. 14 of 8,594 queries are longer.
LONGEST = (128, 64)


def trained(
    pairs: Sequence[SourceAndTarget],
    held_out: Sequence[SourceAndTarget],
    folder: Path,
    recipe: EncoderDecoderRecipe = SMALL,
    *,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Train the model on pairs, or find it trained."""
    digest = digest_bytes(repr([*pairs, "held out", *held_out]).encode())
    about = {"recipe": recipe, "pairs": digest}
    known = finished(folder, about)
    if known is not None:
        return known
    tokenizer = train_bpe([f"{pair.source}\n{pair.target}" for pair in pairs], recipe.vocabulary)
    checked = list(batches(held_out, tokenizer, 2 * recipe.batch))
    return fitted(
        _initialized(recipe, len(tokenizer)),
        tokenizer,
        lambda step: _drawn(pairs, tokenizer, recipe, step),
        lambda current: encoder_decoder_losses(current, checked).mean,
        recipe.schedule,
        folder,
        about,
        lambda loss: {
            "training pairs": len(pairs),
            "held-out perplexity per token": math.exp(loss),
            "held-out perplexity per token of token frequencies": math.exp(_frequencies(pairs, tokenizer, checked)),
        },
        progress=progress,
    )


def batches(
    pairs: Sequence[SourceAndTarget],
    tokenizer: PreTrainedTokenizerBase,
    size: int,
    *,
    longest: tuple[int, int] = LONGEST,
) -> Iterator[Batch]:
    """Turn pairs into arguments of an encoder-decoder, in their order."""
    for start in range(0, len(pairs), size):
        yield _batch(pairs[start : start + size], tokenizer, longest)


def _batch(
    pairs: Sequence[SourceAndTarget], tokenizer: PreTrainedTokenizerBase, longest: tuple[int, int] = LONGEST
) -> Batch:
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    sources = tokenizer([pair.source for pair in pairs], add_special_tokens=False)["input_ids"]
    targets = tokenizer([pair.target for pair in pairs], add_special_tokens=False)["input_ids"]
    inputs = _padded([[*source[: longest[0] - 1], end] for source in sources], pad)
    mask = _padded([[1] * min(len(source) + 1, longest[0]) for source in sources], 0)
    labels = _padded([[*target[: longest[1] - 1], end] for target in targets], IGNORED)
    made = {"input_ids": inputs, "attention_mask": mask, "labels": labels}
    return {name: torch.tensor(rows) for name, rows in made.items()}


def _padded(rows: list[list[int]], filler: int) -> list[list[int]]:
    longest = max(len(row) for row in rows)
    return [row + [filler] * (longest - len(row)) for row in rows]


def _drawn(
    pairs: Sequence[SourceAndTarget], tokenizer: PreTrainedTokenizerBase, recipe: EncoderDecoderRecipe, step: int
) -> Batch:
    generator = torch_generator(recipe.seed, "batch", step)
    chosen = torch.randint(len(pairs), (recipe.batch,), generator=generator).tolist()
    return _batch([pairs[number] for number in chosen], tokenizer)


def _initialized(recipe: EncoderDecoderRecipe, vocabulary: int) -> PreTrainedModel:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary,
        d_model=recipe.width,
        d_kv=recipe.width // recipe.heads,
        d_ff=recipe.inner,
        num_layers=recipe.layers,
        num_decoder_layers=recipe.layers,
        num_heads=recipe.heads,
        dropout_rate=recipe.dropout,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    config.decoder_start_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "initialization"))
        return T5ForConditionalGeneration(config)


def _frequencies(pairs: Sequence[SourceAndTarget], tokenizer: PreTrainedTokenizerBase, checked: list[Batch]) -> float:
    """Nats per held-out token of a model that knows only how frequent each token of a query is, each seen once more."""

    def tokens(found: Iterator[Batch] | list[Batch]) -> torch.Tensor:
        labels = torch.cat([batch["labels"].flatten() for batch in found])
        return labels[labels != IGNORED]

    counts = tokens(batches(pairs, tokenizer, 256)).bincount(minlength=len(tokenizer)) + 1.0
    return float(-(counts / counts.sum()).log()[tokens(checked)].mean())
