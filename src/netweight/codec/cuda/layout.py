"""What a blob on a device says of itself: read once, kept by whoever decodes it again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from netweight.codec import reference
from netweight.codec.api import LEVELS, empty_tensor, is_lossy
from netweight.codec.dtypes import torch_dtype
from netweight.errors import CorruptBlob, Unsupported, UsageError

__all__ = ["BlobLayout", "layout_of"]

# Enough for the header and the index of 16,000 chunks; more is fetched in a second step.
_FIRST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """A blob's header, checked.

    Attributes:
        dtype: The tensor's dtype.
        shape: Its shape.
        nbytes: Its bytes.
        numbers: Numbers in it: elements, or twice as many for complex types.
        chunk_log2: Binary logarithm of the numbers in a chunk.
        chunks: Number of chunks.
        index_at: Where the index of chunks starts in the blob.
        payload_at: Where the first chunk starts.
        size: Bytes of the blob.
        level: The level it was encoded with.
        starts: Where each chunk starts, and where the last one ends; int64 of shape (chunks + 1,) on the blob's device.
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
    starts: Tensor = field(repr=False, compare=False)


def layout_of(blob: Tensor) -> BlobLayout:
    """Read and check a blob's header and index.

    Waits for the blob's device once, for an index of more than 16,000 chunks twice.

    Args:
        blob: uint8 of one dimension on any device: one plain blob, whole.

    Raises:
        CorruptBlob: The bytes are damaged or not a blob.
        Unsupported: It is of a newer format or lossy (its sections have layouts), or torch lacks the element type or
            cannot have an empty tensor of its shape.
        UsageError: `blob` is not a contiguous tensor of bytes.
    """
    if blob.dtype != torch.uint8 or blob.dim() != 1 or not blob.is_contiguous():
        raise UsageError(
            f"A blob must be a contiguous uint8 tensor of one dimension, not {blob.dtype} of shape {tuple(blob.shape)}."
        )
    size = blob.numel()
    beginning = blob[:_FIRST_BYTES].cpu().numpy()
    if is_lossy(beginning):
        raise Unsupported("A lossy blob has no layout of its own.", cure="Ask for the layouts of its sections.")
    try:
        end = reference.index_end(beginning, size)
        if end > len(beginning):
            beginning = blob[:end].cpu().numpy()
        header = reference.read_header(beginning, size=size)
    except (CorruptBlob, Unsupported) as error:
        raise type(error)(f"Cannot decode a blob: {error.reason}.", cure=error.cure) from error
    dtype = torch_dtype(header.element.name)
    if header.nbytes == 0:
        empty_tensor(dtype, header.shape)
    chunks = len(header.chunk_starts) - 1
    starts = torch.from_numpy(np.array(header.chunk_starts, np.int64)).to(blob.device)
    return BlobLayout(
        dtype=dtype,
        shape=header.shape,
        nbytes=header.nbytes,
        numbers=header.numbers,
        chunk_log2=header.chunk_log2,
        chunks=chunks,
        index_at=header.chunk_starts[0] - 4 * chunks,
        payload_at=header.chunk_starts[0],
        size=size,
        level=LEVELS[header.level],
        starts=starts,
    )
