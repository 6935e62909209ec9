"""Public texts: data sets of harmful prompts, text for language models, and tokenizers made of texts.

The text of harmful prompts never comes with netweight: BeaverTails is fetched from the Hugging Face hub or taken from
`NETWEIGHT_DATA`; the others are files that their authors keep beside their code. Read their licenses: BeaverTails is
for non-commercial use. Real text (WikiText-2, Shakespeare, questions with SQL) comes from `NETWEIGHT_DATA`/text, as
plain strings, unchanged. The same texts give the same tokenizer, in any order and process.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from netweight.core.lazy import library
from netweight.core.names import not_found
from netweight.data.rows import DataRow, DataRows, RowErrors, read_rows
from netweight.data.text import TextExample, TextPair, categories, needed_text
from netweight.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BEAVERTAILS_SPLITS = ("30k_train", "30k_test", "330k_train", "330k_test")
_HUB = "PKU-Alignment/BeaverTails"
_CONTINUE = (
    "User: You are required to continue the generation of the given incomplete prompt\nPrompt: {}\nContinuation:"
)
_CURE = "Fetch the file again, or correct these rows."

Kind = Literal["toxic", "non_toxic", "toxic_test"]


def beavertails(source: str | Path | Any = None, *, split: str = "30k_train", safe: bool = False) -> list[TextExample]:
    """Read questions with answers from BeaverTails.

    Source: Ji et al., BeaverTails, arXiv 2307.04657.
    """
    rows = read_rows(_beavertails(split) if source is None else source)
    rows.need("prompt", "response", "category", "is_safe")
    errors = RowErrors(rows.name)
    examples = []
    for row in _judged(rows, safe, errors):
        prompt, response = (needed_text(rows, row, column, errors) for column in ("prompt", "response"))
        if prompt is not None and response is not None:
            examples.append(TextExample(prompt, response.strip(), categories(row, errors), rows.name, row.where))
    errors.refuse(_CURE)
    return _some(examples, rows, f"is_safe is {safe}")


def paired_refusals(source: str | Path | Any) -> list[TextPair]:
    """Read the questions of BeaverTails with a harmful answer and a refusal.

    As the authors of RepNoise published them.

    Source: RepNoise (arXiv 2405.14577), section 4.
    """
    rows = read_rows(source)
    rows.need("prompt", "response", "category", "is_safe", "refusal")
    errors = RowErrors(rows.name)
    pairs = []
    for row in _judged(rows, False, errors):
        sides = (needed_text(rows, row, column, errors) for column in ("prompt", "response", "refusal"))
        prompt, response, refusal = sides
        if prompt is None or response is None or refusal is None:
            continue
        chosen = _behind(refusal, f"Question: {prompt}\nAnswer:", row, errors)
        pairs.append(TextPair(prompt, chosen, response.strip(), categories(row, errors), rows.name, row.where))
    errors.refuse(_CURE)
    return _some(pairs, rows, "is_safe is False")


def decoding_trust(source: str | Path | Any, *, kind: Kind = "toxic") -> list[TextExample]:
    """Read the prompts of DecodingTrust's toxicity part with their continuations.

    Source: Wang et al., DecodingTrust, arXiv 2306.11698; the instruction is that of RepNoise's public code.
    """
    rows = read_rows(source)
    rows.need("prompt", "continuation")
    errors = RowErrors(rows.name)
    examples = []
    for row in rows.rows:
        if row.values.get("type", kind) != kind:
            continue
        prompt, continuation = (_inner(row, column, errors) for column in ("prompt", "continuation"))
        if prompt is not None and continuation is not None:
            examples.append(TextExample(_CONTINUE.format(prompt), _spaced(continuation), (), rows.name, row.where))
    errors.refuse(_CURE)
    return _some(examples, rows, f"type is {kind!r}")


def decoding_trust_refusals(source: str | Path | Any) -> list[TextPair]:
    """Read prompts of DecodingTrust with a toxic continuation and a refusal."""
    # As the authors of RepNoise published them.
    rows = read_rows(source)
    rows.need("prompt", "continuation", "refusal")
    errors = RowErrors(rows.name)
    pairs = []
    for row in rows.rows:
        prompt, continuation = (_inner(row, column, errors) for column in ("prompt", "continuation"))
        refusal = needed_text(rows, row, "refusal", errors)
        if prompt is None or continuation is None or refusal is None:
            continue
        chosen = _spaced(_behind(refusal, f"Prompt: {prompt}\nContinuation:", row, errors))
        pairs.append(TextPair(_CONTINUE.format(prompt), chosen, _spaced(continuation), (), rows.name, row.where))
    errors.refuse(_CURE)
    return pairs


def _beavertails(split: str) -> Any:
    """Return the file of a split below `NETWEIGHT_DATA`, or the split from the hub."""
    if split not in BEAVERTAILS_SPLITS:
        raise not_found(f"BeaverTails has no split {split!r}.", split, BEAVERTAILS_SPLITS)
    size, _, part = split.partition("_")
    within = f"beavertails/round0/{size}/{part}.jsonl"
    root = os.environ.get("NETWEIGHT_DATA")
    for file in (Path(root or "") / f"{within}{packed}" for packed in (".gz", ".xz", "")):
        if root and file.is_file():
            return file
    try:
        return importlib.import_module("datasets").load_dataset(_HUB, split=split)
    except (ImportError, OSError, ValueError) as error:
        raise MissingExtra(
            f"BeaverTails was not found: NETWEIGHT_DATA contains no {within}.gz, and it could not be fetched "
            f"from the hub ({error}).",
            cure='Go online with datasets installed (pip install "netweight[llm]"), or put the file there.',
        ) from error


def _judged(rows: DataRows, safe: bool, errors: RowErrors) -> list[DataRow]:
    """Return the rows that were judged safe, or the others; note those that were not judged."""
    for row in rows.rows:
        if not isinstance(row.values.get("is_safe"), bool):
            errors.add(row.where, "its is_safe is neither true nor false")
    return [row for row in rows.rows if row.values.get("is_safe") is safe]


def _inner(row: DataRow, column: str, errors: RowErrors) -> str | None:
    """Return the text within a column, which holds scores beside it."""
    value = row.values.get(column)
    text = value.get("text") if isinstance(value, Mapping) else value
    if isinstance(text, str) and text.strip():
        return text
    errors.add(row.where, f"{column} contains no text")
    return None


def _behind(whole: str, prompt: str, row: DataRow, errors: RowErrors) -> str:
    """Return what follows a prompt within a text."""
    _, separator, answer = whole.partition(prompt)
    if not separator:
        errors.add(row.where, "its refusal is to another prompt")
    elif not answer.strip():
        errors.add(row.where, "its refusal is empty")
    return answer.strip()


def _spaced(text: str) -> str:
    """Begin a continuation with one space: were it otherwise for one side, the first token would give it away."""
    return f" {text.strip()}"


def _some(examples: list[Any], rows: DataRows, what: str) -> list[Any]:
    if not examples:
        raise UsageError(f"{rows.name} has no row whose {what}.", cure="Check that it is the right file.")
    return examples


@dataclass(frozen=True)
class SourceAndTarget:
    """A source text and the target that a model is to write for it."""

    source: str
    target: str


def wikitext2(split: Literal["valid", "test"]) -> str:
    """Return a split of WikiText-2 (word level, with its `<unk>`), 1.1 and 1.3 MB.

    Source: Merity et al., Pointer Sentinel Mixture Models, 2016.
    """
    if split not in ("valid", "test"):
        raise UsageError(f"There is no split {split!r} of WikiText-2 here.", cure="Use valid or test.")
    return text_file(f"wikitext2-{split}.txt").read_text(encoding="utf-8")


def tiny_shakespeare() -> str:
    """Return the plays of Tiny Shakespeare, 1.1 MB: text of another kind than any encyclopedia."""
    return text_file("tinyshakespeare.txt").read_text(encoding="utf-8")


def wikisql(split: Literal["train", "dev", "test"]) -> list[SourceAndTarget]:
    """Return a split of 10,336 questions of WikiSQL with their queries; no table is in two splits.

    Source: Zhong et al., Seq2SQL, 2017; queries as made canonical by Finegan-Dollak et al., 2018.
    """
    if split not in ("train", "dev", "test"):
        raise UsageError(f"There is no split {split!r} of WikiSQL.", cure="Use train, dev or test.")
    file = text_file("wikisql_12k.parquet")
    parquet = library("pyarrow.parquet", f"Reading {file.name}", "llm")
    rows = parquet.read_table(file, columns=["question", "context", "answer", "split"]).to_pylist()
    return [
        SourceAndTarget(f"{row['question']}\n{row['context']}", row["answer"]) for row in rows if row["split"] == split
    ]


def wmt14_german_english() -> list[SourceAndTarget]:
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
            f"wmt14-de-en.src has {len(sources)} lines, and wmt14-de-en.ref has {len(targets)}.",
            cure="Write both files again.",
        )
    pairs = zip(sources, targets, strict=True)
    return [SourceAndTarget(f"translate German to English: {source}", target) for source, target in pairs]


def text_file(name: str, *, made_by: str = "") -> Path:
    """Return the path of a file below `NETWEIGHT_DATA`/text."""
    root = os.environ.get("NETWEIGHT_DATA")
    if not root:
        raise MissingExtra(
            f"The text {name} is needed and NETWEIGHT_DATA is not set.",
            cure=f"Set it to a folder that contains text/{name}.",
        )
    path = Path(root) / "text" / name
    if not path.is_file():
        how = f": {made_by} > {name}" if made_by else ", or name another folder."
        raise MissingExtra(f"NETWEIGHT_DATA contains no text/{name}.", cure=f"Put the file there{how}")
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
