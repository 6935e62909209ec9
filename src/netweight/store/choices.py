"""Choices made for each tensor that is written: the level, the size of chunks, and whether a base makes it smaller."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from netweight import codec
from netweight.store.safetensors import nbytes_of

if TYPE_CHECKING:
    from netweight.store.reader import Base, StoredFile

Level = Literal["fast", "default", "high", "max"]
LEAST = 1 << 12
"""Bytes of a tensor from which equal tensors are stored once."""

# Heads, too: where they equal the embedding they are stored once, which is noticed of tensors cut alike.
_EMBEDDING = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|shared|lm_head)\.weight$")
# Binary logarithm of the numbers in a chunk of an embedding.
_ROW_CHUNKS = 14


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


# Numbers in each sample by which it is decided whether a base makes a tensor smaller.
_SAMPLE = 1 << 15


def choose_base(
    base: Base | None, name: str, dtype: str, shape: tuple[int, ...], part: Callable[[int, int], Any], level: Level
) -> tuple[tuple[StoredFile, str] | None, str]:
    """Choose whether a tensor is stored as a difference from the tensor of its name in a base, or alone.

    Args:
        base: The base; None without one.
        name: The tensor's name.
        dtype: Its safetensors dtype.
        shape: Its shape.
        part: Returns its bytes from one offset to another, contiguous.
        level: The codec's level.

    Returns:
        The file of the base and the name of the tensor in it, or None if the tensor is stored alone. Then the reason
        why it is, which is empty without a base.
    """
    if base is None:
        return None, ""
    place = base.find(name, dtype, shape)
    if place is None:
        return None, base.lack(name, dtype, shape)
    file, other = place
    if _is_smaller(part, lambda start, stop: file.part(other, start, stop), dtype, shape, level):
        return place, ""
    return None, "not smaller as differences"


def _is_smaller(
    own: Callable[[int, int], Any], below: Callable[[int, int], Any], dtype: str, shape: tuple[int, ...], level: Level
) -> bool:
    """Return whether a tensor is smaller as a difference from another one, by three samples of it."""
    width, nbytes = nbytes_of(dtype, (8,)) // 8, nbytes_of(dtype, shape)
    if not width or not nbytes:
        # Several numbers share a byte, or there are none.
        return True
    numbers, alone, beside = nbytes // width, 0, 0
    for start in {0, max((numbers - _SAMPLE) // 2, 0), max(numbers - _SAMPLE, 0)}:
        cut = start * width, min(start + _SAMPLE, numbers) * width
        mine, theirs = bytes(own(*cut)), bytes(below(*cut))
        sampled = (len(mine) // width,)
        alone += len(codec.encode_raw(mine, dtype, sampled, level=level))
        beside += len(codec.encode_raw(mine, dtype, sampled, level=level, base=theirs))
    return beside < alone
