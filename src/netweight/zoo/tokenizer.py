"""Tokenizers made on the spot, so that small language models need nothing but text.

Used by the tables that train a model of their own and by the small worlds. The same texts give the same tokenizer, in
any order and process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from netweight.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["SPECIAL_TOKENS", "train_bpe", "word_tokenizer"]

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
"""Padding, end of text, unknown; their ids are 0, 1 and 2. No text needs the third: every byte has a token."""
_SMALLEST = 256 + len(SPECIAL_TOKENS)


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level byte-pair encoding, in the manner of GPT-2.

    Nothing is normalized and no token is added by itself, so decoding gives every text back as it was.

    Args:
        texts: What to learn from; their order does not matter.
        vocab_size: Tokens, the three special ones and one per byte included: at least 259. Texts with few different
            words give fewer.

    Returns:
        A tokenizer of transformers with the tokens of `SPECIAL_TOKENS`.

    Raises:
        MissingExtra: transformers is not installed.
        UsageError: `vocab_size` is too small.
    """
    if vocab_size < _SMALLEST:
        raise UsageError(
            f"A byte-level tokenizer cannot have {vocab_size} tokens.", cure=f"Choose {_SMALLEST} or more."
        )
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise _missing() from error
    pad, end, unknown = SPECIAL_TOKENS
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )


def word_tokenizer(words: Sequence[str], *, pad: str, end: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of given words, parted by white space; decoding puts one space between them.

    Args:
        words: The vocabulary, in the order of the ids; no two are equal and none holds white space.
        pad: The word of padding.
        end: The word of the end of a text; it stands for unknown words too.

    Raises:
        MissingExtra: transformers is not installed.
    """
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise _missing() from error
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, clean_up_tokenization_spaces=False
    )


def _missing() -> MissingExtra:
    return MissingExtra(
        "Tokenizers are made with transformers, which is not installed.", cure='Run: pip install "netweight[llm]"'
    )
