"""Where the parts of a blob lie, found once on the host, so that a device can decode it without asking again.

`torch_path.py`, the kernels' launchers and the runtime for compressed models start from this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from netweight.codec.api import LEVELS, _in_our_words
from netweight.codec.dtypes import torch_dtype
from netweight.codec.reference import read_header
from netweight.errors import CorruptBlob

if TYPE_CHECKING:
    import torch

__all__ = ["BlobLayout", "layout_of"]

_BEGINNING = 1 << 16  # bytes that hold the header and index of any blob but very large ones


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """What the header of a lossless blob says, and where its index and chunks begin.

    Attributes:
        dtype: The tensor's dtype.
        shape: Its shape.
        nbytes: Its bytes.
        numbers: Its numbers: elements, or twice as many for complex types.
        chunk_log2: Binary logarithm of the numbers in a chunk.
        chunks: Number of chunks.
        index_at: Where in the blob the index of chunks starts, four bytes for each.
        payload_at: Where the first chunk starts.
        size: Bytes of the blob.
        level: The level it was encoded with.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    numbers: int
    chunk_log2: int
    chunks: int
    index_at: int
    payload_at: int
    size: int
    level: str


def layout_of(blob: torch.Tensor) -> BlobLayout:
    """Read and check a blob's header and index; one synchronization if it is on a device.

    Args:
        blob: U8 tensor of one dimension, on any device: a whole lossless blob.

    Raises:
        CorruptBlob: The bytes are damaged or not a lossless blob.
        Unsupported: The blob is of a newer format, or torch lacks its element type.
    """
    with _in_our_words("a blob"):
        try:
            header = read_header(blob[:_BEGINNING].cpu().numpy(), size=blob.numel())
        except CorruptBlob:
            if blob.numel() <= _BEGINNING:
                raise
            header = read_header(blob.cpu().numpy())
    chunks = len(header.chunk_starts) - 1
    payload_at = header.chunk_starts[0]
    return BlobLayout(
        torch_dtype(header.element.name),
        header.shape,
        header.nbytes,
        header.numbers,
        header.chunk_log2,
        chunks,
        payload_at - 4 * chunks,
        payload_at,
        blob.numel(),
        LEVELS[header.level],
    )
