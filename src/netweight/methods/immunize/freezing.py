"""Which layers an attack or a defense may change: blocks by their numbers, the head, the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from netweight.errors import UsageError
from netweight.methods.immunize.structure import structure_of

__all__ = ["block_numbers", "frozen"]

_CURE = 'Write numbers from 0, ranges such as "10-20" with both ends, "last" or "head", with commas between.'


def block_numbers(layers: str, blocks: int) -> tuple[list[int], bool]:
    """Read which layers are meant.

    Numbers are read as numbers. The code of RepNoise looks for the digits "0" to "9" in a parameter's name where
    layers 0 to 10 are meant, and so finds every block of a model with 32: the paper's row "0-10" of table 6 is that of
    a model all of whose blocks were frozen, if it came from this code.

    Args:
        layers: Numbers and ranges such as `"0-10"`, both ends meant, `"last"` for the last block, `"head"` for the
            unembedding, with commas between.
        blocks: How many blocks there are.

    Returns:
        The numbers of the blocks in ascending order, and whether the head is meant.

    Raises:
        UsageError: A part is none of these, or there is no such block.

    Examples:
        >>> block_numbers("0-2,last,head", 8)
        ([0, 1, 2, 7], True)
    """
    numbers: set[int] = set()
    head = False
    for part in (text.strip() for text in layers.split(",")):
        span = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if part == "head":
            head = True
        elif part == "last":
            numbers.add(blocks - 1)
        elif span is None:
            raise UsageError(f"{part!r} names no layers.", cure=_CURE)
        else:
            first = int(span[1])
            last = int(span[2] or first)
            if not first <= last < blocks:
                raise UsageError(f"There are no layers {part!r}: the model has blocks 0 to {blocks - 1}.", cure=_CURE)
            numbers.update(range(first, last + 1))
    return sorted(numbers), head


@contextmanager
def frozen(model: nn.Module, layers: str) -> Iterator[list[str]]:
    """Keep layers from being trained within a block of code.

    Args:
        model: A decoder.
        layers: Which, see `block_numbers`. A head that is tied to the embedding freezes both.

    Yields:
        The names of the parameters that were trainable and are not now.

    Raises:
        UsageError: The layers cannot be read or are not there.
        Unsupported: The model is no decoder.
    """
    parts = structure_of(model)
    numbers, head = block_numbers(layers, len(parts.blocks))
    modules = [list(parts.blocks.values())[number] for number in numbers] + [parts.unembedding] * head
    chosen = {id(value) for module in modules for value in module.parameters()}
    held = {name: value for name, value in model.named_parameters() if id(value) in chosen and value.requires_grad}
    try:
        for value in held.values():
            value.requires_grad_(False)
        yield list(held)
    finally:
        for value in held.values():
            value.requires_grad_(True)
