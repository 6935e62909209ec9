"""What the CUDA encoder has to do for a tensor: everything that follows from dtype, shape and options alone.

Only `encoding.py` calls this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch

from netweight.codec.api import LEVELS
from netweight.codec.dtypes import dtype_name
from netweight.codec.element_types import ELEMENT_TYPES, ElementType
from netweight.codec.reference import FIXED_HEADER, MAGIC, VERSION, varint
from netweight.errors import UsageError

__all__ = ["EncodePlan", "Wave"]

_SHAPE_WORDS = 10  # 64 dimensions whose product is below 2^62 have at most 73 bytes of varints
_DIGEST_BLOCK = 1024  # kDigestBlock in kernels/digest.cuh
_LONG_TEXT = 241  # kLongText there
_SLACK = 4096  # what a plane may write beyond its elements before it is given up


@final
@dataclass(frozen=True, slots=True)
class Wave:
    """Chunks that are encoded together.

    Attributes:
        first: The first one's number.
        chunks: How many there are.
        last: Whether the tensor ends with them.
        digest_from: Where their first block of the digest starts, in bytes.
        digest_blocks: Blocks of the digest that they fill, without the tensor's last one, which may be partial.
    """

    first: int
    chunks: int
    last: bool
    digest_from: int
    digest_blocks: int


@final
@dataclass(frozen=True)
class EncodePlan:
    """The encoding of tensors of one dtype and shape.

    Attributes:
        element: The element type.
        shape: Shape of the tensor.
        nbytes: Bytes of the tensor.
        level: The level, by number: 0 fast, 1 default, 2 max.
        chunk_log2: Binary logarithm of the numbers in a chunk.
    """

    element: ElementType
    shape: tuple[int, ...]
    nbytes: int
    level: int
    chunk_log2: int

    @classmethod
    def of(cls, tensor: torch.Tensor, level: str, chunk_log2: int | None) -> EncodePlan:
        """The plan for a tensor on any device.

        Args:
            tensor: Any shape.
            level: "fast", "default" or "max".
            chunk_log2: 10 to 22; None for the default.

        Raises:
            UsageError: There is no such level, or chunk_log2 is not 10 to 22.
            Unsupported: The codec has no such element type.
        """
        if level not in LEVELS:
            raise UsageError(f"There is no level {level!r}.", cure=f"Choose one of {', '.join(LEVELS)}.")
        if chunk_log2 is not None and not 10 <= chunk_log2 <= 22:
            raise UsageError(f"chunk_log2 is {chunk_log2}.", cure="Choose 10 to 22.")
        name = dtype_name(tensor.dtype)
        element = next(element for element in ELEMENT_TYPES if element.name == name)
        nbytes = tensor.numel() * tensor.element_size()
        default = 18 if element.number_bytes <= 2 else 17
        return cls(element, tuple(tensor.shape), nbytes, LEVELS.index(level), chunk_log2 or default)

    @property
    def numbers(self) -> int:
        """Numbers in the tensor."""
        return self.nbytes // self.element.number_bytes

    @property
    def chunks(self) -> int:
        """Chunks of the tensor."""
        return -(-self.numbers >> self.chunk_log2)

    @property
    def planes(self) -> int:
        """Planes of a chunk."""
        return 1 + self.element.tails

    @cached_property
    def varints(self) -> bytes:
        """The shape as it stands in the header."""
        return b"".join(map(varint, self.shape))

    @property
    def start(self) -> int:
        """Bytes 0 to 7 of the header, as a number."""
        fields = bytes((VERSION, self.element.code, self.level, self.chunk_log2, len(self.shape)))
        return int.from_bytes(MAGIC + fields, "little")

    @property
    def shape_words(self) -> list[int]:
        """The varints, eight bytes to a number with a sign, as finish_blob takes them."""
        padded = self.varints.ljust(8 * _SHAPE_WORDS, b"\0")
        return [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]

    @property
    def index_at(self) -> int:
        """Where the index stands in the blob."""
        return FIXED_HEADER + len(self.varints)

    @property
    def payload_at(self) -> int:
        """Where the first chunk stands in the blob."""
        return self.index_at + 4 * self.chunks

    @property
    def bound(self) -> int:
        """The most bytes of a blob: a plane has a byte more than its elements, when it is raw."""
        return self.payload_at + self.nbytes + self.chunks * self.planes

    @property
    def slot_bytes(self) -> int:
        """For a plane as it is written, with raw bits before it is known whether their table pays."""
        return _rounded_up(self._elements * self.element.head_bytes + _SLACK)

    @property
    def work_bytes(self) -> int:
        """For a plane's streams, a byte an element, and patches, two words for every 64 and 192 for a stream."""
        padded = self._elements + 256
        return _rounded_up(padded + padded // 64 * 8 + 4 * 4 * 192)

    @property
    def _elements(self) -> int:
        """Of a plane of the largest chunk."""
        return min(self.numbers, 1 << self.chunk_log2)

    def waves(self, scratch_bytes: int) -> Iterator[Wave]:
        """All chunks, as many at a time as find room in so many bytes of working memory, but one at least.

        Args:
            scratch_bytes: Most bytes of working memory.
        """
        chunk_bytes = self.element.number_bytes << self.chunk_log2
        each = self.planes * (self.slot_bytes + self.work_bytes) + chunk_bytes // 16
        at_once = max(1, scratch_bytes // each)
        all_blocks = (self.nbytes - 1) // _DIGEST_BLOCK if self.nbytes >= _LONG_TEXT else 0
        for first in range(0, self.chunks, at_once):
            chunks = min(at_once, self.chunks - first)
            start = first * chunk_bytes
            end = min(all_blocks, (start + chunks * chunk_bytes) // _DIGEST_BLOCK)
            yield Wave(first, chunks, first + chunks == self.chunks, start, max(0, end - start // _DIGEST_BLOCK))


def _rounded_up(size: int) -> int:
    return -(-size // 16) * 16
