"""Tokenizers of llama2.c: a vocabulary with scores in a `tok*.bin`, read as a tokenizer of transformers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.errors import Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Sentencepiece writes a space in this way.
_SPACE = "\u2581"
_SPECIAL = ("<unk>", "<s>", "</s>")


def llama2c_pieces(file: Path) -> list[tuple[bytes, float]]:
    """Read the vocabulary: each piece with its score, the higher the earlier it is merged."""
    data = file.read_bytes()
    pieces: list[tuple[bytes, float]] = []
    at = 4
    try:
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            if length < 0 or at + 8 + length > len(data):
                raise ValueError(f"a piece of {length} bytes at {at}")
            pieces.append((data[at + 8 : at + 8 + length], score))
            at += 8 + length
        for piece, _ in pieces:
            piece.decode("utf-8")
    except (struct.error, ValueError) as error:
        raise Unsupported(f"{file} is not a tokenizer of llama2.c: {error}.", cure="Restore the file.") from error
    if len(pieces) < 259:
        raise Unsupported(
            f"{file} contains {len(pieces)} tokens; at least three special ones and 256 bytes are needed."
        )
    return pieces


def llama2c_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Make a tokenizer of transformers that splits text as llama2.c does."""
    # A space is put before the text, characters without a piece fall back to their bytes, and the neighbors whose union
    # has the highest score are merged first. No token is added by itself. A special token that the text spells out is
    # taken as that token, as transformers does.
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    read = llama2c_pieces(file)
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
