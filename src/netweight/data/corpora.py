"""Real text that is at hand offline (WikiText-2, Shakespeare, questions with SQL), and tokenizers made of texts.

Texts come from `NETWEIGHT_DATA`/text, as plain strings, unchanged. The same texts give the same tokenizer, in any order
and process. Used by tables and small worlds that train language models of their own.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from netweight.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Pair:
    """A source text and the target that a model is to write for it."""

    source: str
    target: str


def wikitext2(split: Literal["valid", "test"]) -> str:
    """Return a split of WikiText-2 (word level, with its `<unk>`), 1.1 and 1.3 MB."""
    # Source: Merity et al., Pointer Sentinel Mixture Models, 2016.
    if split not in ("valid", "test"):
        raise UsageError(f"There is no split {split!r} of WikiText-2 here.", cure="Use valid or test.")
    return text_file(f"wikitext2-{split}.txt").read_text(encoding="utf-8")


def tiny_shakespeare() -> str:
    """Return the plays of Tiny Shakespeare, 1.1 MB: text of another kind than any encyclopedia."""
    return text_file("tinyshakespeare.txt").read_text(encoding="utf-8")


def wikisql(split: Literal["train", "dev", "test"]) -> list[Pair]:
    """Return a split of 10,336 questions of WikiSQL with their queries; no table is in two splits."""
    # Source: Zhong et al., Seq2SQL, 2017; queries as made canonical by Finegan-Dollak et al., 2018.
    if split not in ("train", "dev", "test"):
        raise UsageError(f"There is no split {split!r} of WikiSQL.", cure="Use train, dev or test.")
    file = text_file("wikisql_12k.parquet")
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra(
            f"{file.name} is read by pyarrow, which is not installed.", cure='Run: pip install "netweight[llm]"'
        ) from error
    rows = parquet.read_table(file, columns=["question", "context", "answer", "split"]).to_pylist()
    return [Pair(f"{row['question']}\n{row['context']}", row["answer"]) for row in rows if row["split"] == split]


def wmt14_german_english() -> list[Pair]:
    """Return the 3,003 sentences of WMT14's German to English test, each source with T5's prefix for the task."""
    # They are not among the local data: `sacrebleu -t wmt14 -l de-en --echo src` (and `ref`) prints them.
    sources, targets = (
        text_file(f"wmt14-de-en.{side}", made_by=f"sacrebleu -t wmt14 -l de-en --echo {side}")
        .read_text(encoding="utf-8")
        .splitlines()
        for side in ("src", "ref")
    )
    if len(sources) != len(targets):
        raise UsageError(
            f"wmt14-de-en.src has {len(sources)} lines and wmt14-de-en.ref {len(targets)}.", cure="Print both again."
        )
    pairs = zip(sources, targets, strict=True)
    return [Pair(f"translate German to English: {source}", target) for source, target in pairs]


def text_file(name: str, *, made_by: str = "") -> Path:
    """Return the path of a file below `NETWEIGHT_DATA`/text."""
    root = os.environ.get("NETWEIGHT_DATA")
    if not root:
        raise MissingExtra(
            f"The text {name} is needed and NETWEIGHT_DATA is not set.",
            cure=f"Set it to a folder that holds text/{name}.",
        )
    path = Path(root) / "text" / name
    if not path.is_file():
        how = f": {made_by} > {name}" if made_by else ", or name another folder."
        raise MissingExtra(f"NETWEIGHT_DATA holds no text/{name}.", cure=f"Put the file there{how}")
    return path


def count_words(text: str) -> int:
    """Count words: what lies between white space, as perplexity per word counts them."""
    return len(text.split())


# Padding, end of text, unknown; their ids are 0, 1 and 2. No text needs the third: every byte has a token.
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
_SMALLEST = 256 + len(SPECIAL_TOKENS)


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level byte-pair encoding, in the manner of GPT-2."""
    # Nothing is normalized and no token is added by itself, so decoding gives every text back as it was.
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
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, unk_token=unknown, clean_up_tokenization_spaces=False
    )


def word_tokenizer(words: Sequence[str], *, pad: str, end: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of given words, parted by white space; decoding puts one space between them."""
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
