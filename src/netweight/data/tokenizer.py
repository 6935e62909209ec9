"""Tokenizers made on the spot, so that small language models need nothing but text.

Used by the tables that train a model of their own and by the small worlds. The same texts give the same tokenizer, in
any order and process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.errors import MissingExtra, Unsupported, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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


_SPACE = "\u2581"  # sentencepiece writes a space so
_SPECIAL = ("<unk>", "<s>", "</s>")


def find(folder: Path) -> Path | None:
    """Return the one `tok*.bin` of a folder without a tokenizer of its own, or None."""
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    files = sorted(folder.glob("tok*.bin"))
    return files[0] if len(files) == 1 else None


def pieces(file: Path) -> list[tuple[bytes, float]]:
    """Read the vocabulary: each piece with its score, the higher the earlier it is merged."""
    data = file.read_bytes()
    found: list[tuple[bytes, float]] = []
    at = 4
    try:
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            if length < 0 or at + 8 + length > len(data):
                raise ValueError(f"a piece of {length} bytes at {at}")
            found.append((data[at + 8 : at + 8 + length], score))
            at += 8 + length
        for piece, _ in found:
            piece.decode("utf-8")
    except (struct.error, ValueError) as error:
        raise Unsupported(f"{file} is not a tokenizer of llama2.c: {error}.", cure="Restore the file.") from error
    if len(found) < 259:
        raise Unsupported(f"{file} holds {len(found)} tokens; three special ones and 256 bytes are the least.")
    return found


def tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Make a tokenizer of transformers that splits text as llama2.c does."""
    # A space is put before the text, characters without a piece fall back to their bytes, and the neighbors whose union
    # has the highest score are merged first. No token is added by itself. A special token that the text spells out is
    # taken as that token, as transformers does.
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    read = pieces(file)
    names = list(_SPECIAL) + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [piece.decode("utf-8").replace(" ", _SPACE) for piece, _ in read[len(names) :]]
    ids = {name: number for number, name in enumerate(names)}
    scores = {name: score for name, (_, score) in zip(names, read, strict=True)}
    merges = [
        (scores[name], number, (name[:cut], name[cut:]))
        for number, name in enumerate(names[259:], start=259)
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1]))
    made = Tokenizer(models.BPE(ids, [pair for *_, pair in merges], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
