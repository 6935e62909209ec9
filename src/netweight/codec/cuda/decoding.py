"""Decoding on the GPU: one blob, or a plan of many whose addresses stay, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from netweight.codec.cuda import launching
from netweight.codec.cuda.layout import BlobLayout
from netweight.errors import CorruptBlob, OutOfMemory, UsageError

__all__ = ["DecodePlan", "decode", "raise_if_corrupt"]

_FILE, _ENTRY = "decode.cu", "decode_chunks"
# In the order of the bits that kernels/chunk.cuh gives them.
_REASONS = (
    "its index does not fit its size",
    "the data ends inside a plane",
    "a plane has an unknown mode",
    "a plane's header asks for impossible raw bits",
    "a plane's header asks for an impossible number of streams",
    "a frequency table cannot be",
    "a plane's states are out of range",
    "an entropy-coded stream does not end where it should",
    "a packed plane cannot be",
    "a patch cannot be",
    "a chunk holds more bytes than its planes",
)


def decode(blob: Tensor, layout: BlobLayout, *, out: Tensor | None = None, status: Tensor | None = None) -> Tensor:
    """Decode a blob on its device, on torch's current stream. The digest is not compared.

    Args:
        blob: uint8 of shape (layout.size,), contiguous, on a CUDA device.
        layout: What `layout_of` gave for this blob.
        out: Where to write: contiguous, of the layout's dtype and shape, on the same device; None for a new tensor.
        status: int32 of shape (1,) on the same device. Then the call returns at once, and a chunk that is corrupt ORs a
            nonzero reason into it (see `raise_if_corrupt`) and leaves its part of the output undefined. None: wait for
            the GPU and raise.

    Returns:
        `out`, or the new tensor.

    Raises:
        CorruptBlob: Without `status`: the blob is damaged.
        CudaUnavailable, CudaFailed: The kernel cannot run.
        OutOfMemory: The device has no room for the tensor.
        UsageError: An argument does not fit the layout.
    """
    _check_blob(blob, layout)
    out = _output(layout, blob.device) if out is None else _checked_output(out, layout, blob.device)
    own_status = torch.zeros(1, dtype=torch.int32, device=blob.device) if status is None else status
    if layout.chunks:
        number_bytes = layout.nbytes // layout.numbers
        starts = layout.starts.to(blob.device)
        job = (blob, layout.size, starts, out, layout.numbers, number_bytes, layout.chunk_log2)
        arguments = (0, 0, *job, own_status)  # no table of jobs
        launching.launch(_FILE, _ENTRY, layout.chunks, _threads(layout), arguments, device=blob.device)
    if status is None:
        raise_if_corrupt(own_status)
    return out


def raise_if_corrupt(status: Tensor) -> None:
    """Wait for a status and raise if a decoder ORed a reason into it.

    Args:
        status: int32 of shape (1,), zeroed before it was given to `decode`.

    Raises:
        CorruptBlob: The status is not zero; the message holds the reasons.
    """
    found = int(status.item())
    if found:
        reasons = [reason for bit, reason in enumerate(_REASONS) if found >> bit & 1]
        raise CorruptBlob(
            f"Cannot decode a blob: {', and '.join(reasons)}.",
            cure="Fetch or compress the file again; its bytes were damaged.",
        )


@final
class DecodePlan:
    """Decodes many blobs in one launch: those of a transformer's block, each too small to fill a GPU.

    Blobs, layouts and outputs are fixed when the plan is made, and kept alive by it; their contents may change as long
    as the layouts still hold.

    Args:
        blobs: Blobs on one CUDA device, see `decode`.
        layouts: Theirs, one each.
        outs: Their outputs, see `decode`; None for new tensors.

    Attributes:
        outs: The outputs, in the order of the blobs.

    Raises:
        OutOfMemory: The device has no room for the outputs.
        UsageError: There are no blobs, they lie on different devices, or an argument does not fit its layout.
    """

    def __init__(
        self, blobs: Sequence[Tensor], layouts: Sequence[BlobLayout], outs: Sequence[Tensor] | None = None
    ) -> None:
        if not blobs or len(blobs) != len(layouts) or (outs is not None and len(outs) != len(blobs)):
            raise UsageError("A plan needs one layout, and one output if any are given, for each of its blobs.")
        self._device = blobs[0].device
        for blob, layout in zip(blobs, layouts, strict=True):
            _check_blob(blob, layout)
            if blob.device != self._device:
                raise UsageError(f"A plan's blobs must lie on one device, not on {self._device} and {blob.device}.")
        if outs is None:
            self.outs = [_output(layout, self._device) for layout in layouts]
        else:
            self.outs = [_checked_output(out, layout, self._device) for out, layout in zip(outs, layouts, strict=True)]
        starts = [layout.starts.to(self._device) for layout in layouts]
        self._kept = (list(blobs), starts)
        self._blocks, rows = 0, []
        for blob, layout, place, out in zip(blobs, layouts, starts, self.outs, strict=True):
            if not layout.chunks:
                continue
            number_bytes = layout.nbytes // layout.numbers
            addresses = (blob.data_ptr(), layout.size, place.data_ptr(), out.data_ptr())
            rows.append((*addresses, layout.numbers, number_bytes, layout.chunk_log2, self._blocks))
            self._blocks += layout.chunks
        self._threads = max(map(_threads, layouts))
        self._jobs = torch.tensor(rows, dtype=torch.int64).reshape(-1, 8).to(self._device)

    def decode(self, status: Tensor | None = None) -> list[Tensor]:
        """Decode all blobs into `outs`, which are returned.

        Args and errors: see `decode`.
        """
        own_status = torch.zeros(1, dtype=torch.int32, device=self._device) if status is None else status
        if self._blocks:
            arguments = (self._jobs, len(self._jobs), *(0,) * 7, own_status)
            launching.launch(_FILE, _ENTRY, self._blocks, self._threads, arguments, device=self._device)
        if status is None:
            raise_if_corrupt(own_status)
        return self.outs


def _threads(layout: BlobLayout) -> int:
    """Threads of a block: a warp for each stream that the encoder makes of a chunk. A decoder copes with any number."""
    numbers = min(layout.numbers, 1 << layout.chunk_log2)
    return 32 * (1 if numbers < 1 << 14 else 2 if numbers < 1 << 18 else 4)


def _check_blob(blob: Tensor, layout: BlobLayout) -> None:
    if blob.dtype != torch.uint8 or not blob.is_contiguous() or blob.numel() != layout.size:
        raise UsageError(
            f"The blob must be a contiguous uint8 tensor of the {layout.size} bytes that its layout tells."
        )


def _checked_output(out: Tensor, layout: BlobLayout, device: torch.device) -> Tensor:
    if out.dtype != layout.dtype or tuple(out.shape) != layout.shape or out.device != device or not out.is_contiguous():
        raise UsageError(
            f"The output must be a contiguous tensor of {layout.dtype} and shape {layout.shape} on {device}, not of "
            f"{out.dtype} and shape {tuple(out.shape)} on {out.device}."
        )
    return out


def _output(layout: BlobLayout, device: torch.device) -> Tensor:
    try:
        return torch.empty(layout.shape, dtype=layout.dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"There is no room on {device} for a tensor of shape {layout.shape}, {layout.nbytes / 1e9:.3g} GB decoded.",
            cure="Use smaller batches or shorter inputs, or spread the model over more GPUs.",
        ) from error
