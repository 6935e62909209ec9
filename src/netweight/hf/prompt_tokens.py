"""What a pipeline's tokenizer knows of prompts: which positions are padding, and which words are one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from netweight.errors import Unsupported
from netweight.hf.load_pipeline import PipelineModel


def padding_masks(model: PipelineModel) -> Callable[[Sequence[str]], Tensor]:
    """Make the function that tells which tokens of prompts count, as `AttentionScaling` takes it."""

    def masks(prompts: Sequence[str]) -> Tensor:
        known = model.embed(prompts).mask
        if known is not None:
            return known
        tokenizer = model.pipeline.tokenizer
        length = tokenizer.model_max_length
        told = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        found: Tensor = told.attention_mask.bool()
        return found

    return masks


def one_token_words(model: PipelineModel, *, letters: int = 3) -> tuple[str, ...]:
    """Return the words that a pipeline's tokenizer makes one token of, for `RandomTokens`."""
    tokenizer = model.pipeline.tokenizer
    pieces = (piece.removesuffix("</w>").removeprefix("▁").lower() for piece in tokenizer.get_vocab())
    words = sorted({piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) >= letters})
    single = tuple(word for word in words if len(tokenizer(word, add_special_tokens=False).input_ids) == 1)
    if not single:
        raise Unsupported(f"The tokenizer of {model.name} makes no word of {letters} letters or more one token.")
    return single
