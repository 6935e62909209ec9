"""A small decoder language model in the shape of Llama, trained here on real text: the stand-in for Llama-3 8B.

`trained` makes it from a seed and keeps it as an ordinary model folder with its tokenizer. Used by the tables that
measure what compression does to a language model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from netweight.core.digests import digest_bytes
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.data.public import count_words, train_bpe
from netweight_experiments.toys.fitting import Schedule, finished, fitted

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class DecoderRecipe:
    """Everything that decides on the trained model, but the text."""

    vocabulary: int = 2048
    """Tokens of the byte-pair encoding."""
    width: int = 256
    inner: int = 768
    """Width of the feed-forward layers."""
    layers: int = 4
    """Number of transformer blocks."""
    heads: int = 4
    """Attention heads."""
    window: int = 256
    """Tokens of context."""
    batch: int = 8
    """Windows per step."""
    seed: int = 20241031
    """Seed of initialization and batches."""
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=1500))
    """How it is trained."""


# 3.9 million weights; some eight minutes of training on one core.
SMALL = DecoderRecipe()
_HELD_OUT = 0.1


def trained(text: str, folder: Path, recipe: DecoderRecipe = SMALL, *, progress: Progress = QUIET) -> dict[str, Any]:
    """Train the model on a text, or find it trained."""
    # The last tenth of the text is held out: it decides when to stop and is otherwise unseen, by the tokenizer too.
    about = {"recipe": recipe, "text": digest_bytes(text.encode())}
    known = finished(folder, about)
    if known is not None:
        return known
    cut = text.rfind("\n", 0, round(len(text) * (1 - _HELD_OUT))) + 1
    tokenizer = train_bpe([text[:cut]], recipe.vocabulary)
    ids, held = (torch.tensor(tokenizer(part, verbose=False)["input_ids"]) for part in (text[:cut], text[cut:]))
    windows = held[: len(held) // recipe.window * recipe.window].view(-1, recipe.window)
    per_word = len(held) / count_words(text[cut:])
    return fitted(
        _initialized(recipe, len(tokenizer)),
        tokenizer,
        lambda step: _batch(ids, recipe, step),
        lambda current: _loss(current, windows, recipe.batch),
        recipe.schedule,
        folder,
        about,
        lambda loss: {
            "training tokens": len(ids),
            "held-out perplexity per word": math.exp(loss * per_word),
            "held-out perplexity per word of token frequencies": math.exp(_frequencies(ids, held) * per_word),
        },
        progress=progress,
    )


def _initialized(recipe: DecoderRecipe, vocabulary: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.width,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=recipe.window,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "initialization"))
        return LlamaForCausalLM(config)


def _batch(ids: torch.Tensor, recipe: DecoderRecipe, step: int) -> Mapping[str, torch.Tensor]:
    """Windows that begin anywhere, so that no two passes over the text are cut alike."""
    generator = torch_generator(recipe.seed, "batch", step)
    starts = torch.randint(len(ids) - recipe.window + 1, (recipe.batch,), generator=generator).tolist()
    windows = torch.stack([ids[start : start + recipe.window] for start in starts])
    return {"input_ids": windows, "labels": windows}


def _loss(model: nn.Module, windows: torch.Tensor, batch: int) -> float:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        parts = [(len(part), float(model(input_ids=part, labels=part).loss)) for part in torch.split(windows, batch)]
    return sum(count * loss for count, loss in parts) / len(windows)


def _frequencies(ids: torch.Tensor, held: torch.Tensor) -> float:
    """Nats per held-out token of a model that knows only how frequent each token is, every one seen once more."""
    counts = ids.bincount(minlength=int(max(ids.max(), held.max())) + 1) + 1.0
    return float(-(counts / counts.sum()).log()[held].mean())


MINIATURE = "miniature"
# Models by the names of the paper's columns.
SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("decoders.yaml").read_text("utf-8"))


def made(shape: str, **changes: Any) -> PreTrainedModel:
    """Make a model with random weights, in torch's default dtype and on its default device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(SHAPES[shape]["type"], **SHAPES[shape]["fields"] | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def parameters_of(shape: str) -> tuple[int, int]:
    """Return the numbers of a model: all its weights, and those of the largest one; nothing is allocated."""
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in made(shape).parameters()]
    return sum(sizes), max(sizes)
