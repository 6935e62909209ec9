"""Decoding on the GPU: layouts that are read once, one blob or a plan of many in one launch, and lossy blobs.

docs/format.md is the format, kernels/decode_chunks.cuh the kernel. Of a lossy blob the sections, which are lossless
blobs, are decoded where they are, and the arithmetic of `numpy_codec.py` runs as torch operations with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from netweight.codec import header, lossy
from netweight.codec.api import LEVELS
from netweight.codec.api import decode as decode_on_host
from netweight.codec.backend import in_our_words
from netweight.codec.cuda import launching
from netweight.codec.header import empty_tensor, torch_dtype
from netweight.core import quantities
from netweight.errors import CorruptBlob, OutOfMemory, Unsupported, UsageError

_ENTRY = "decode_chunks"
_ANY_SIZE = "decode.cu"  # kernels for numbers of any size
# The bit of a status for a row that a weight does not have; kNoSuchRow in kernels/types.cuh.
NO_SUCH_ROW = 2048
# This is enough for the header and the index of 16,000 chunks. Longer ones are read in a second step.
_FIRST_BYTES = 1 << 16
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


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """A blob's header, checked, and where its chunks are; whoever decodes the blob again and again keeps it."""

    dtype: torch.dtype
    """Dtype of the tensor."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    nbytes: int
    """Size of the tensor in bytes."""
    numbers: int
    """Count of numbers in the tensor: its elements, or twice as many for complex types."""
    chunk_log2: int
    """Binary logarithm of the numbers in a chunk."""
    chunks: int
    """Number of chunks."""
    index_at: int
    """Offset of the chunk index in the blob, in bytes."""
    payload_at: int
    """Offset of the first chunk in the blob, in bytes."""
    size: int
    """Size of the blob in bytes."""
    level: str
    starts: Tensor = field(repr=False, compare=False)
    """Offsets of the chunks and of the end of the last one: int64, shape `(chunks + 1,)`, on the blob's device."""
    cpu_modes: bool = False
    """True if some chunk has a transform or a mode that the kernels do not decode: the host decodes the blob."""


def layout_of(blob: Tensor) -> BlobLayout:
    """The layout of `blob`, one whole lossless blob: uint8 of shape (size,) on any device, which is waited for."""
    if blob.dtype != torch.uint8 or blob.dim() != 1 or not blob.is_contiguous():
        raise UsageError(
            f"A blob must be a contiguous uint8 tensor of one dimension, not {blob.dtype} of shape {tuple(blob.shape)}."
        )
    size = blob.numel()
    beginning = blob[:_FIRST_BYTES].cpu().numpy()
    if bytes(beginning[:3]) == lossy.MAGIC:
        raise Unsupported("A lossy blob has no layout of its own.", cure="Ask for the layouts of its sections.")
    with in_our_words("a blob"):
        end = header.index_end(beginning, size)
        if end > len(beginning):
            beginning = blob[:end].cpu().numpy()
        fields = header.read_header(beginning, size=size)
    dtype = torch_dtype(fields.element.name)
    if fields.base_digest:
        raise Unsupported(
            "A blob that contains differences can be decoded only on the CPU.", cure="Decode it with its base first."
        )
    if fields.nbytes == 0:
        # This raises an error for a shape that torch refuses.
        empty_tensor(dtype, fields.shape)
    chunks = len(fields.chunk_starts) - 1
    return BlobLayout(
        dtype=dtype,
        shape=fields.shape,
        nbytes=fields.nbytes,
        numbers=fields.numbers,
        chunk_log2=fields.chunk_log2,
        chunks=chunks,
        index_at=fields.chunk_starts[0] - 12 * chunks,
        payload_at=fields.chunk_starts[0],
        size=size,
        level=LEVELS[fields.level],
        starts=torch.from_numpy(np.array(fields.chunk_starts, np.int64)).to(blob.device),
        cpu_modes=fields.cpu_modes,
    )


def decode(blob: Tensor, layout: BlobLayout, *, out: Tensor | None = None, status: Tensor | None = None) -> Tensor:
    """Decode `blob` on torch's current stream of its device, into `out` or a new tensor of the `layout`'s shape.

    Without a `status` the call waits for the GPU and raises `CorruptBlob` for a damaged blob. With one, int32 of shape
    (1,) on the device, it returns at once; a corrupt chunk ORs a reason into it and leaves its part of the output
    undefined (see `raise_if_corrupt`). The digest is not compared.
    """
    _check_blob(blob, layout)
    out = _output(layout, blob.device) if out is None else _checked_output(out, layout, blob.device)
    if layout.cpu_modes:
        return out.copy_(decode_on_host(blob.cpu()))
    own_status = torch.zeros(1, dtype=torch.int32, device=blob.device) if status is None else status
    if layout.chunks:
        number_bytes = layout.nbytes // layout.numbers
        starts = layout.starts.to(blob.device)
        job = (blob, layout.size, starts, out, layout.numbers, number_bytes, layout.chunk_log2)
        # The first two arguments are those of a table of jobs, which one blob does not need.
        arguments = (0, 0, *job, own_status)
        launching.launch(_file(layout, out), _ENTRY, layout.chunks, _threads(layout), arguments, device=blob.device)
    if status is None:
        raise_if_corrupt(own_status)
    return out


def decode_rows(blob: Tensor, layout: BlobLayout, ids: Tensor, status: Tensor) -> Tensor | None:
    """Rows of a matrix, of shape (*ids.shape, columns), from the chunks that hold them; None if that is no less work.

    `ids`, integers on the blob's device, are not looked at here: a row that is not there sets `NO_SUCH_ROW` in the
    `status`, which is as for `decode`, and leaves its part of the result undefined.
    """
    _check_blob(blob, layout)
    if layout.cpu_modes or not layout.chunks:
        return None
    width = layout.numbers // layout.shape[0]
    across = 1 if (1 << layout.chunk_log2) % width == 0 else (width - 2 >> layout.chunk_log2) + 2
    blocks, number_bytes = ids.numel() * across, layout.nbytes // layout.numbers
    if 2 * blocks >= layout.chunks:
        return None
    rows = torch.empty((*ids.shape, *layout.shape[1:]), dtype=layout.dtype, device=blob.device)
    if blocks:
        slots = torch.empty((blocks << layout.chunk_log2) * number_bytes, dtype=torch.uint8, device=blob.device)
        places = ids.to(torch.int64).contiguous()
        job = (places, across, blob, layout.size, layout.starts, slots, rows, layout.shape[0], width)
        arguments = (*job, number_bytes, layout.chunk_log2, status)
        launching.launch(_file(layout, slots), "decode_rows", blocks, _threads(layout), arguments, device=blob.device)
    return rows


def raise_if_corrupt(status: Tensor) -> None:
    """Wait for a `status` that `decode` was given, int32 of shape (1,), and raise `CorruptBlob` if it is not zero."""
    code = int(status.item())
    if code:
        reasons = [reason for bit, reason in enumerate(_REASONS) if code >> bit & 1]
        raise CorruptBlob(
            f"Cannot decode a blob: {', and '.join(reasons)}.",
            cure="Fetch or compress the file again; its bytes were damaged.",
        )


@final
class DecodePlan:
    """Decodes many blobs in one launch: those of a transformer's block, each too small to fill a GPU.

    `blobs`, their `layouts` and `outs` (None for new tensors) are fixed when the plan is made, and kept alive by it;
    their contents may change as long as the layouts still hold.
    """

    def __init__(
        self, blobs: Sequence[Tensor], layouts: Sequence[BlobLayout], outs: Sequence[Tensor] | None = None
    ) -> None:
        if not blobs or len(blobs) != len(layouts) or (outs is not None and len(outs) != len(blobs)):
            raise UsageError("A plan needs one layout, and one output if any are given, for each of its blobs.")
        self._device = blobs[0].device
        for blob, layout in zip(blobs, layouts, strict=True):
            _check_blob(blob, layout)
            if layout.cpu_modes:
                raise Unsupported(
                    "A plan cannot contain blobs with modes or transforms that the GPU kernels do not decode.",
                    cure="Decode them one by one, or encode them with gpu_modes=True.",
                )
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
        files = {_file(layout, out) for layout, out in zip(layouts, self.outs, strict=True)}
        self._file = files.pop() if len(files) == 1 else _ANY_SIZE
        self._jobs = torch.tensor(rows, dtype=torch.int64).reshape(-1, 8).to(self._device)

    def decode(self, status: Tensor | None = None) -> list[Tensor]:
        """Decode all blobs into `outs`, which are returned; `status` as for `decode`."""
        own_status = torch.zeros(1, dtype=torch.int32, device=self._device) if status is None else status
        if self._blocks:
            arguments = (self._jobs, len(self._jobs), *(0,) * 7, own_status)
            launching.launch(self._file, _ENTRY, self._blocks, self._threads, arguments, device=self._device)
        if status is None:
            raise_if_corrupt(own_status)
        return self.outs


def _threads(layout: BlobLayout) -> int:
    """Threads of a block: a warp for each stream that the encoder makes of a chunk. A decoder copes with any number."""
    numbers = min(layout.numbers, 1 << layout.chunk_log2)
    return 32 * (1 if numbers < 1 << 14 else 2 if numbers < 1 << 18 else 4)


def _file(layout: BlobLayout, out: Tensor) -> str:
    """The file of the kernels for a blob: one is for numbers of two bytes alone, and faster."""
    two_bytes = layout.numbers > 0 and layout.nbytes == 2 * layout.numbers
    return "decode_two_bytes.cu" if two_bytes and out.data_ptr() % 4 == 0 else _ANY_SIZE


def _check_blob(blob: Tensor, layout: BlobLayout) -> None:
    if blob.dtype != torch.uint8 or not blob.is_contiguous() or blob.numel() != layout.size:
        raise UsageError(f"The blob must be a contiguous uint8 tensor of {layout.size} bytes, the size of its layout.")


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
            f"There is no room on {device} for a tensor of shape {layout.shape}, "
            f"{quantities.size(layout.nbytes)} decoded.",
            cure="Use smaller batches or shorter inputs, or spread the model over more GPUs.",
        ) from error


# ---- lossy blobs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossySection:
    """A lossless blob in a lossy one."""

    start: int
    """Offset of the section in the lossy blob, in bytes."""
    layout: BlobLayout
    """Layout of the lossless blob."""

    def of(self, blob: Tensor) -> Tensor:
        """Its bytes, from the whole blob's."""
        return blob[self.start : self.start + self.layout.size]


@dataclass(frozen=True, slots=True)
class LossyLayout:
    """Content of a lossy blob's header, and positions of its sections."""

    dtype: torch.dtype
    """Dtype of the tensor."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    nbytes: int
    """Size of the tensor in bytes."""
    size: int
    """Size of the blob in bytes."""
    rounding: lossy.Rounding
    """Settings of the rounding of the weights."""
    words: LossySection
    """Signs, exponents and kept mantissa bits."""
    normalizers: LossySection | None
    """Normalizers of the blocks; None for rounding without them."""
    gaps: LossySection | None
    """Places of the numbers that are kept exactly."""
    exact: LossySection | None
    """These numbers."""


def lossy_layout_of(blob: Tensor) -> LossyLayout:
    """The layout of `blob`, one whole lossy blob: uint8 of shape (size,) on any device; copied to the host once."""
    local = blob.cpu()
    with in_our_words("a blob"):
        fields = lossy.read_header(local.numpy())
    start = fields.words_start
    sections: list[LossySection | None] = []
    for part in (fields.words, fields.normalizers, fields.gaps, fields.exact):
        if part is None:
            sections.append(None)
        else:
            its = layout_of(local[start : start + len(part)])
            sections.append(LossySection(start, replace(its, starts=its.starts.to(blob.device))))
            start += len(part)
    words, normalizers, gaps, kept = sections
    assert words is not None
    dtype = torch_dtype(fields.rounding.element.name)
    return LossyLayout(
        dtype, fields.shape, fields.nbytes, blob.numel(), fields.rounding, words, normalizers, gaps, kept
    )


def decode_lossy(
    blob: Tensor, layout: LossyLayout, section: Callable[[Tensor, BlobLayout], Tensor] = decode
) -> tuple[Tensor, Tensor]:
    """Decode `blob` where it is, by `section` for each blob in it; nothing else here waits for the device.

    Returned are the rounded tensor of the `layout`'s shape, and one bool: whether the blob is damaged, and the
    tensor so undefined.
    """
    rounding = layout.rounding
    words = section(layout.words.of(blob), layout.words.layout).view(torch.int16).to(torch.int32)
    code = words & 0x7FFF
    damaged = ((code > rounding.largest_word) | ((code != 0) & (code < 1 << rounding.mantissa_bits))).any()
    # The conversion from int16 kept the sign.
    values = (code << (23 - rounding.mantissa_bits) | words & -0x8000_0000).view(torch.float32)
    if layout.normalizers is not None and rounding.block_size is not None:
        normalizers = section(layout.normalizers.of(blob), layout.normalizers.layout)
        factors = 1 + normalizers.to(torch.float32) / 256
        together = min(rounding.block_size, len(values))
        values = values * factors[:, None].expand(-1, together).reshape(-1)[: len(values)]
    numbers = _narrowed(values, layout.dtype)
    if layout.gaps is not None and layout.exact is not None:
        gaps = section(layout.gaps.of(blob), layout.gaps.layout).view(torch.int64)
        kept = section(layout.exact.of(blob), layout.exact.layout)
        count = len(numbers)
        # A gap below `count`, as an unsigned number; then sums run over only after they have passed `count`.
        sound = (gaps >= 0) & (gaps < count)
        places = torch.where(sound, gaps + 1, count + 1).cumsum(0) - 1
        damaged |= (places >= count).any() | (places < 0).any()
        numbers.index_copy_(0, places.clamp(0, max(0, count - 1)), kept)
    return numbers.reshape(layout.shape), damaged


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """F32 numbers, none of them NaN, in the tensor's own dtype; half to even."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFF_FFFF
    rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16
    return (rounded | bits >> 16 & -0x8000).to(torch.int16).view(torch.bfloat16)
