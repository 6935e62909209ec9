"""Words that a tokenizer does not know: it replaces each of them by one token, so that a model cannot tell them apart.

Tokenizers of bytes know every text. Those with a fixed list of words, and some of sentence pieces, do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from netweight.data.row_layouts import Text

_SHOWN = 3  # words that a sentence names


def note_on_unknown_words(
    tokenizer: Any, texts: Sequence[Sequence[Text]], places: Sequence[str], *, source: str, rows: str = "rows"
) -> str:
    """Return a sentence that counts the rows with words that a tokenizer does not know; empty if it knows all.

    Args:
        tokenizer: A tokenizer of transformers.
        texts: For each row, its texts or conversations.
        places: Where each row stands in its source, such as "line 3".
        source: Name of the file or set.
        rows: What the rows are, as a plural noun.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return ""
    plain = [" ".join(part for text in row for part in _parts(text)) for row in texts]
    token_ids = tokenizer(plain, add_special_tokens=False, verbose=False)["input_ids"] if plain else []
    found: dict[int, list[str]] = {}
    for number, (text, ids) in enumerate(zip(plain, token_ids, strict=True)):
        # Whoever writes the unknown token itself means it.
        if unknown in ids and (words := _unknown_in(text.replace(str(tokenizer.unk_token), " "), tokenizer, unknown)):
            found[number] = words
    if not found:
        return ""
    named = {word: places[number] for number, words in reversed(found.items()) for word in words}
    shown = ", ".join(f"{word!r} ({named[word]})" for word in list(named)[::-1][:_SHOWN])
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    verb = "contains" if len(found) == 1 else "contain"
    return (
        f"{len(found)} of {len(plain)} {rows} of {source} {verb} words that the model's tokenizer does not know: "
        f"{shown}{more}. The model reads {tokenizer.unk_token!r} in their place."
    )


def _parts(text: Text) -> list[str]:
    return [text] if isinstance(text, str) else [str(turn["content"]) for turn in text]


def _unknown_in(text: str, tokenizer: Any, unknown: int) -> list[str]:
    """Return the words of a text of which a tokenizer does not know some part, each once."""
    words = list(dict.fromkeys(text.split()))
    token_ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"] if words else []
    return [word for word, ids in zip(words, token_ids, strict=True) if unknown in ids]
