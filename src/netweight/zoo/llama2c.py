"""Tokenizers in the format of llama2.c (`tok*.bin`), which small published Llamas carry instead of a tokenizer.json.

The file holds a sentencepiece vocabulary with scores; its merges follow from them. Used when a model folder is opened.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.errors import Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["find", "pieces", "tokenizer"]

_SPACE = "\u2581"  # sentencepiece writes a space so
_SPECIAL = ("<unk>", "<s>", "</s>")


def find(folder: Path) -> Path | None:
    """Return the one `tok*.bin` of a folder without a tokenizer of its own, or None."""
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    files = sorted(folder.glob("tok*.bin"))
    return files[0] if len(files) == 1 else None


def pieces(file: Path) -> list[tuple[bytes, float]]:
    """Read the vocabulary: each piece with its score, the higher the earlier it is merged.

    Args:
        file: An unsigned 32-bit length of the longest piece, then for each piece its score (32-bit float), its length
            (32-bit integer) and its bytes; little-endian.

    Raises:
        Unsupported: The file is not of this format.
    """
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
    """Make a tokenizer of transformers that splits text as llama2.c does.

    A space is put before the text, characters without a piece fall back to their bytes, and the neighbors whose union
    has the highest score are merged first. No token is added by itself. A special token that the text spells out is
    taken as that token, as transformers does.

    Args:
        file: See `pieces`.

    Raises:
        Unsupported: The file is not of this format.
    """
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
