"""CLIP text encoders for small worlds: a tokenizer that knows the world's words whole, and a frozen random transformer.

A transformer with random weights tells captions apart, which is all that a small denoiser needs of one. Any other text
is taken, too: words that are not in the vocabulary fall into letters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from netweight.core.seeds import derive, torch_generator
from netweight.errors import MissingExtra

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTokenizer

__all__ = ["random_text_encoder", "word_clip_tokenizer"]

_START, _END = "<|startoftext|>", "<|endoftext|>"
_SUFFIX = "</w>"
_HEADS, _LAYERS = 4, 2


def word_clip_tokenizer(words: Iterable[str], *, length: int) -> CLIPTokenizer:
    """Make a tokenizer of CLIP's kind: byte pairs merged until every word is one token.

    Args:
        words: In lower case, letters only.
        length: Tokens of a prompt, with its beginning and end; longer ones are cut by pipelines.

    Raises:
        MissingExtra: transformers is not installed.
    """
    try:
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers import CLIPTokenizer
    except ImportError as error:
        raise _missing() from error
    letters = sorted(ByteLevel.alphabet())
    merges = _merges(sorted(set(words)))
    tokens = [*letters, *(letter + _SUFFIX for letter in letters), *(a + b for a, b in merges), _START, _END]
    make: Any = CLIPTokenizer  # whose annotations forbid the pairs that it asks for
    made: CLIPTokenizer = make(
        vocab={token: number for number, token in enumerate(dict.fromkeys(tokens))},
        merges=merges,
        model_max_length=length,
    )
    return made


def random_text_encoder(tokenizer: CLIPTokenizer, *, width: int, seed: int) -> CLIPTextModel:
    """Make a text encoder with random weights, whose states tell every token and its place.

    Args:
        tokenizer: Its tokenizer.
        width: Of the states.
        seed: Decides on the weights; torch's own stream is left as it was.

    Returns:
        A model in evaluation mode, fp32, whose weights take no gradient.

    Raises:
        MissingExtra: transformers is not installed.
    """
    try:
        from transformers import CLIPTextConfig, CLIPTextModel
    except ImportError as error:
        raise _missing() from error
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "text encoder"))
        model = CLIPTextModel(config)
    # CLIP begins with embeddings so small that untrained attention drowns them.
    generator = torch_generator(seed, "embeddings")
    for embedding, deviation in (("token_embedding", 1.0), ("position_embedding", 0.3)):
        weight = next(value for name, value in model.named_parameters() if name.endswith(f"{embedding}.weight"))
        with torch.no_grad():
            weight.normal_(0, deviation, generator=generator)
    model.train(False)
    model.requires_grad_(False)
    return model


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Merge the most frequent pair of neighbors, the first in the alphabet of equals, until all words are whole."""
    parts = [[*word[:-1], word[-1] + _SUFFIX] for word in words]
    merges: list[tuple[str, str]] = []
    while True:
        counts: dict[tuple[str, str], int] = {}
        for word in parts:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            return merges
        merges.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        parts = [_merged(word, merges[-1]) for word in parts]


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    found: list[str] = []
    for part in word:
        if found and (found[-1], part) == pair:
            found[-1] += part
        else:
            found.append(part)
    return found


def _missing() -> MissingExtra:
    return MissingExtra(
        "Text encoders are made by transformers, which is not installed.",
        cure='Run: pip install "netweight[diffusion]"',
    )
