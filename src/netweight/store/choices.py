"""Choices made for each tensor that is written: the level, the size of chunks, and whether a base makes it smaller."""

from __future__ import annotations

import re
from typing import Any, Literal

from netweight import codec
from netweight.store.safetensors import nbytes_of

Level = Literal["fast", "default", "high", "max"]
LEAST = 1 << 12
"""Bytes of a tensor from which equal tensors are stored once."""

# Heads, too: where they equal the embedding they are stored once, which is noticed of tensors cut alike.
_EMBEDDING = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|shared|lm_head)\.weight$")
_ROW_CHUNKS = 14  # binary logarithm of the numbers in a chunk of an embedding


def finer_chunks(name: str, shape: tuple[int, ...], level: Level) -> int | None:
    """Choose the chunks of a tensor: small ones for embeddings, of which a loaded model reads few rows at a time.

    Args:
        name: The tensor's name, by which embeddings are recognized.
        shape: Its shape.
        level: The codec's level; `"high"` and `"max"` keep the largest chunks.

    Returns:
        The binary logarithm of the numbers per chunk; None for the codec's own choice.
    """
    small = len(shape) != 2 or shape[0] * shape[1] <= 1 << _ROW_CHUNKS
    return None if small or level in ("high", "max") or not _EMBEDDING.search(name) else _ROW_CHUNKS


SAMPLE = 1 << 15
"""Numbers in each sample by which it is decided whether a base pays."""


def pays(content: Any, base: Any, dtype: str, level: Level) -> bool:
    """Decide whether a tensor gets smaller as a difference from a base, by three samples of it.

    Args:
        content: The tensor's bytes, contiguous.
        base: The base's bytes, as many.
        dtype: The safetensors dtype of both.
        level: The codec's level.
    """
    width = nbytes_of(dtype, (8,)) // 8
    if not width or not len(content):
        return True  # several numbers share a byte, or there are none
    mine, theirs = (memoryview(each).cast("B") for each in (content, base))
    numbers, alone, beside = len(mine) // width, 0, 0
    for start in {0, max((numbers - SAMPLE) // 2, 0), max(numbers - SAMPLE, 0)}:
        cut = slice(start * width, (start + SAMPLE) * width)
        own, below = bytes(mine[cut]), bytes(theirs[cut])
        shape = (len(own) // width,)
        alone += len(codec.encode_raw(own, dtype, shape, level=level))
        beside += len(codec.encode_raw(own, dtype, shape, level=level, base=below))
    return beside < alone
