"""Lossy blobs on a device: their sections are decoded where they are, and the arithmetic runs as torch operations.

docs/format.md, "Lossy blobs", is the format, `rounding.py` the arithmetic in numpy; this gives the same bits. Who calls
it (the runtime of compressed models) says how a section, which is a lossless blob, is decoded: by a kernel or by
`torch_path.py`. Nothing here waits for the device but `layout_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from netweight.codec import lossy
from netweight.codec.api import _in_our_words
from netweight.codec.cuda.layout import BlobLayout
from netweight.codec.cuda.layout import layout_of as section_layout_of
from netweight.codec.dtypes import torch_dtype
from netweight.codec.rounding import Rounding

__all__ = ["LossyLayout", "Section", "decode", "layout_of"]


@dataclass(frozen=True, slots=True)
class Section:
    """A lossless blob in a lossy one.

    Attributes:
        start: Where it starts.
        layout: Its own layout.
    """

    start: int
    layout: BlobLayout

    def of(self, blob: torch.Tensor) -> torch.Tensor:
        """Its bytes.

        Args:
            blob: U8 tensor of one dimension: the whole blob.
        """
        return blob[self.start : self.start + self.layout.size]


@dataclass(frozen=True, slots=True)
class LossyLayout:
    """What the header of a lossy blob says, and where its sections are.

    Attributes:
        dtype: The tensor's dtype.
        shape: Its shape.
        nbytes: Its bytes.
        size: Bytes of the blob.
        rounding: How the tensor was rounded.
        words: The section of words.
        normalizers: That of normalizers; None without.
        gaps: That of the places of numbers that are kept exactly; None if there are none.
        kept: That of these numbers; None if there are none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    size: int
    rounding: Rounding
    words: Section
    normalizers: Section | None
    gaps: Section | None
    kept: Section | None


def layout_of(blob: torch.Tensor) -> LossyLayout:
    """Read and check a lossy blob's header and those of its sections; copies the blob to the host once.

    Args:
        blob: U8 tensor of one dimension, on any device: a whole lossy blob.

    Raises:
        CorruptBlob: The bytes are damaged.
        Unsupported: The blob is of a newer format.
    """
    local = blob.cpu()
    with _in_our_words("a blob"):
        header = lossy.read_header(local.numpy())
    start = header.words_start
    sections: list[Section | None] = []
    for part in (header.words, header.normalizers, header.gaps, header.kept):
        if part is None:
            sections.append(None)
        else:
            its = section_layout_of(local[start : start + len(part)])
            sections.append(Section(start, replace(its, starts=its.starts.to(blob.device))))
            start += len(part)
    words, normalizers, gaps, kept = sections
    assert words is not None
    dtype = torch_dtype(header.rounding.element.name)
    return LossyLayout(
        dtype, header.shape, header.nbytes, blob.numel(), header.rounding, words, normalizers, gaps, kept
    )


def decode(
    blob: torch.Tensor, layout: LossyLayout, section: Callable[[torch.Tensor, BlobLayout], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode a lossy blob on the device it is on.

    Args:
        blob: U8 tensor of one dimension: a whole lossy blob.
        layout: Its layout.
        section: Decodes a lossless blob, a U8 tensor of one dimension, with its layout.

    Returns:
        The rounded tensor, and whether the blob is damaged, as a tensor of one bool: the first one is undefined then.

    Raises:
        CorruptBlob: From `section`.
    """
    rounding = layout.rounding
    words = section(layout.words.of(blob), layout.words.layout).view(torch.int16).to(torch.int32)
    code = words & 0x7FFF
    most = rounding.infinite_word - (rounding.fidelity == "corrected")
    damaged = ((code > most) | ((code != 0) & (code < 1 << rounding.mantissa_bits))).any()
    values = (code << (23 - rounding.mantissa_bits) | words & -0x8000_0000).view(torch.float32)  # I16 kept the sign
    if layout.normalizers is not None and rounding.block_size is not None:
        normalizers = section(layout.normalizers.of(blob), layout.normalizers.layout)
        factors = 1 + normalizers.to(torch.float32) / 256
        together = min(rounding.block_size, len(values))
        values = values * factors[:, None].expand(-1, together).reshape(-1)[: len(values)]
    numbers = _narrowed(values, layout.dtype)
    if layout.gaps is not None and layout.kept is not None:
        gaps = section(layout.gaps.of(blob), layout.gaps.layout).view(torch.int64)
        kept = section(layout.kept.of(blob), layout.kept.layout)
        count = len(numbers)
        # A gap below `count`, as an unsigned number; then sums run over only after they have passed `count`.
        sound = (gaps >= 0) & (gaps < count)
        places = torch.where(sound, gaps + 1, count + 1).cumsum(0) - 1
        damaged |= (places >= count).any() | (places < 0).any()
        numbers.index_copy_(0, places.clamp(0, max(0, count - 1)), kept)
    return numbers.reshape(layout.shape), damaged


def _narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """F32 numbers, none of them NaN, in the tensor's own dtype; half to even."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFF_FFFF
    rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16
    return (rounded | bits >> 16 & -0x8000).to(torch.int16).view(torch.bfloat16)
