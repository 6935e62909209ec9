"""Text for defenses and attacks on language models: a user's files and the public data sets, as token ids.

`load_pairs` and `load_examples` do it in one step. In two: `text_pairs` and `text_examples`, or a loader of a public
data set, give rows of text; `withhold` parts them by category; `tokenized_pairs` and `tokenized_examples` make of them
what `netweight.methods.immunize` and `netweight.attacks.finetuning` take. No row is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from netweight.zoo.language.public import beavertails, decoding_trust, decoding_trust_refusals, paired_refusals
from netweight.zoo.language.texts import TextExample, TextPair, text_examples, text_pairs, withhold
from netweight.zoo.language.tokens import (
    BELOW,
    PLAIN,
    QUESTION_AND_ANSWER,
    Template,
    padding_of,
    tokenized_examples,
    tokenized_pairs,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from netweight.attacks.finetuning.examples import Example, Pair

__all__ = [
    "BELOW",
    "PLAIN",
    "QUESTION_AND_ANSWER",
    "Template",
    "TextExample",
    "TextPair",
    "beavertails",
    "decoding_trust",
    "decoding_trust_refusals",
    "load_examples",
    "load_pairs",
    "padding_of",
    "paired_refusals",
    "text_examples",
    "text_pairs",
    "tokenized_examples",
    "tokenized_pairs",
    "withhold",
]


def load_pairs(
    source: str | Path | Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    columns: Mapping[str, str] | None = None,
    template: Template | Literal["chat"] = PLAIN,
    too_long: Literal["refuse", "cut"] = "refuse",
) -> list[Pair]:
    """Read rows with prompt, chosen and rejected, as token ids.

    Args:
        source: A file (.jsonl, .json, .csv, .tsv, .parquet), a `datasets.Dataset`, or a list of mappings.
        tokenizer: Of the model.
        context: Most tokens of a prompt with one answer.
        columns: What "prompt", "chosen" and "rejected" are called in the source, where they have other names.
        template: See `tokenized_pairs`.
        too_long: See `tokenized_pairs`.

    Returns:
        One pair per row, in their order.

    Raises:
        NameNotFound: A column is missing.
        UsageError: Rows are empty or unpaired, the file cannot be read, an answer is too long for the context, or the
            tokenizer lacks padding, an end or a chat template; every such row is counted and the first are named.
        MissingExtra: A Parquet file, and pyarrow is not installed.
    """
    texts = text_pairs(source, columns=columns)
    return tokenized_pairs(texts, tokenizer, context=context, template=template, too_long=too_long)


def load_examples(
    source: str | Path | Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    columns: Mapping[str, str] | None = None,
    template: Template | Literal["chat"] = PLAIN,
    too_long: Literal["refuse", "cut"] = "refuse",
) -> list[Example]:
    """Read rows with prompt and response, as token ids.

    Args:
        source: As for `load_pairs`.
        tokenizer: Of the model.
        context: Most tokens of a prompt with its response.
        columns: What "prompt" and "response" are called in the source, where they have other names.
        template: See `tokenized_pairs`.
        too_long: See `tokenized_pairs`.

    Returns:
        One example per row, in their order.

    Raises:
        NameNotFound: As for `load_pairs`.
        UsageError: As for `load_pairs`.
        MissingExtra: As for `load_pairs`.
    """
    texts = text_examples(source, columns=columns)
    return tokenized_examples(texts, tokenizer, context=context, template=template, too_long=too_long)
