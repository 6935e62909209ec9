"""Encoding of tensors on an NVIDIA GPU into blobs there, with the same bytes as the encoder on the CPU.

`encode` makes a blob of exactly its size; `encode_into` fills a payload of fixed capacity and never waits for the GPU,
which is what training wants. `EncodePlan` is everything that follows from dtype, shape and options alone. Chunks are
encoded in waves, so that what is needed beside tensor and blob is bounded by `SCRATCH_BYTES`. The kernels are in
kernels/encode.cu, and in kernels/check_chunks.cu for the checks of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch

from netweight.codec import api
from netweight.codec.backend import best
from netweight.codec.cuda import launching
from netweight.codec.cuda.decoding import BlobLayout, decode, layout_of
from netweight.codec.header import (
    BY_NAME,
    FIXED_HEADER,
    MAGIC,
    VERSION,
    ElementType,
    checksum,
    digest_of_checks,
    dtype_name,
    varint,
)
from netweight.codec.numpy_tables import PlaneStatistics, sampling
from netweight.core.tensor_bytes import row_major_bytes
from netweight.errors import OutOfMemory, UsageError

# Working memory of one call. A single chunk may need more.
SCRATCH_BYTES = 256 << 20
# Bytes of the length before the blob in a payload.
LENGTH_BYTES = 8

# Threads and placers of a block; kThreads in kernels/encode_plane.cuh, kPlacers in kernels/encode.cu.
_THREADS, _PLACERS = 128, 1024
# These are kCopiers and kFinishers in kernels/encode.cu.
_COPIERS, _FINISHERS = 8, 256
_CHECKERS = 64  # kColumns in kernels/check_chunks.cu
# The address of a tensor is a multiple of so many bytes.
_ALIGNMENT = 16
# The shape of 64 dimensions whose product is below 2^62 takes at most 73 bytes of varints.
_SHAPE_WORDS = 10
# The number of bytes that a plane may write beyond its elements before its encoding is stopped.
_SLACK = 4096


def encode(
    tensor: torch.Tensor, *, level: str = "default", chunk_log2: int | None = None, checks: bool = True
) -> torch.Tensor:
    """Compress `tensor`, bit for bit, where it lies; `level` and `chunk_log2` as for `netweight.codec.encode`.

    The GPU encodes the levels "fast" and "default" of tensors on it. Higher levels, tensors without elements and those
    on the CPU, and GPUs for which `unavailable_because` has a reason, are the host's encoder's: the tensor is copied
    there and the blob back. The blob, U8 of shape (size,), is the same either way, that of `netweight.codec.encode`
    with `gpu_modes`. Without `checks` those of its chunks are zero on a GPU: such a blob is for memory only, and
    `with_checks` is to complete it before it goes anywhere else.

    Waits for the GPU once, to learn the blob's size. Needs memory for a blob of the tensor's size, `SCRATCH_BYTES` or
    what one chunk takes (about twice its bytes), and a copy of a tensor that is not contiguous or starts at an address
    that 16 does not divide.
    """
    plan = _plan(tensor, level, chunk_log2)
    if plan is None:
        return _on_host(tensor, level, chunk_log2)
    with _named_shortage(tensor, plan):
        payload = _memory(LENGTH_BYTES + plan.bound, tensor.device)
        progress = _run(_source(tensor, plan), plan, payload, checks=checks, status=None, fill=False)
        size = int(progress[0])
        return _memory(size, tensor.device).copy_(payload[LENGTH_BYTES : LENGTH_BYTES + size])


def encode_into(
    tensor: torch.Tensor,
    payload: torch.Tensor,
    *,
    level: str = "default",
    chunk_log2: int | None = None,
    checks: bool = False,
    status: torch.Tensor | None = None,
) -> int:
    """Compress `tensor` into `payload`, U8: the blob's length in 8 bytes, little-endian, the blob, and zeros.

    `level`, `chunk_log2` and `checks` as for `encode`; a capacity of `8 + largest_blob(tensor)` always suffices.
    Without a `status` the call waits for the blob's size, which it returns, and raises if the blob does not fit. With
    one, int32 of shape (1,) on the device, it returns 0 at once if the GPU encodes; a blob that does not fit leaves a
    length of 0 and ORs 1 into it. A GPU without memory is found out before the payload changes.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise UsageError(f"The payload is {payload.dtype} of shape {tuple(payload.shape)}; it must be contiguous U8.")
    if payload.device != tensor.device or payload.numel() < LENGTH_BYTES:
        raise UsageError(
            f"The payload has {payload.numel()} bytes on {payload.device}; it must have at least {LENGTH_BYTES} bytes "
            f"on {tensor.device}."
        )
    plan = _plan(tensor, level, chunk_log2)
    if plan is None:
        return _put(_on_host(tensor, level, chunk_log2), payload, status)
    with _named_shortage(tensor, plan):
        progress = _run(_source(tensor, plan), plan, payload, checks=checks, status=status, fill=True)
    size, beyond = progress.tolist() if status is None else (0, 0)
    if beyond:
        raise _too_small(payload, size)
    return int(size)


def largest_blob(tensor: torch.Tensor, *, chunk_log2: int | None = None) -> int:
    """The most bytes of a blob of any tensor of `tensor`'s dtype and shape, at any level, with this `chunk_log2`."""
    return EncodePlan.of(tensor, "default", chunk_log2).bound


def layout_of_encoded(
    blob: torch.Tensor, like: torch.Tensor, *, level: str = "default", chunk_log2: int | None = None
) -> BlobLayout:
    """The layout of `blob`, U8, encoded with `level` and `chunk_log2` from a tensor `like` this; waits for nothing."""
    plan = EncodePlan.of(like, level, chunk_log2)
    # The bytes may lie at any address; the copy is aligned.
    lengths = blob[plan.index_at : plan.checks_at].clone().view(torch.int32)
    starts = torch.full((plan.chunks + 1,), plan.payload_at, device=blob.device)
    starts[1:] += lengths.cumsum(0)
    return BlobLayout(
        dtype=like.dtype,
        shape=plan.shape,
        nbytes=plan.nbytes,
        numbers=plan.numbers,
        chunk_log2=plan.chunk_log2,
        chunks=plan.chunks,
        index_at=plan.index_at,
        payload_at=plan.payload_at,
        size=blob.numel(),
        level=level,
        starts=starts,
    )


def with_checks(blob: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of `blob`, U8, with the checks that its encoder left out; of `tensor` if that is at hand, else decoded."""
    layout = layout_of(blob)
    if layout.numbers == 0 or not _has_kernels(blob.device):
        return _sealed_on_host(blob, layout)
    if tensor is None:
        tensor = decode(blob, layout)
    plan = EncodePlan.of(tensor, layout.level, layout.chunk_log2)
    with _named_shortage(tensor, plan):
        checks = _checks_of(_source(tensor, plan), plan)
        sealed = _memory(blob.numel(), blob.device).copy_(blob)
        where = (layout.payload_at - 8 * layout.chunks, layout.payload_at)
        _launch("seal_blob", 1, [sealed, *where, checks], threads=_FINISHERS)
    return sealed


# ---- what there is to do ---------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Wave:
    """Chunks that are encoded together."""

    first: int
    """The first one's number."""
    chunks: int
    """Number of chunks."""


@final
@dataclass(frozen=True)
class EncodePlan:
    """The encoding of tensors of one dtype and shape."""

    element: ElementType
    """Type of the elements."""
    shape: tuple[int, ...]
    """Shape of the tensors."""
    nbytes: int
    """Size of the tensor in bytes."""
    level: int
    """Number of the level: 0 fast, 1 default, 2 high, 3 max."""
    chunk_log2: int
    """Binary logarithm of the numbers in a chunk."""

    @classmethod
    def of(cls, tensor: torch.Tensor, level: str, chunk_log2: int | None) -> EncodePlan:
        """The plan for a tensor on any device."""
        number, element = api.checked_level(level, chunk_log2), BY_NAME[dtype_name(tensor.dtype)]
        nbytes = tensor.numel() * tensor.element_size()
        return cls(element, tuple(tensor.shape), nbytes, number, chunk_log2 or element.default_chunk_log2)

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
        """Offset of the index in the blob."""
        return FIXED_HEADER + len(self.varints)

    @property
    def checks_at(self) -> int:
        """Offset of the chunks' checks in the blob."""
        return self.index_at + 4 * self.chunks

    @property
    def payload_at(self) -> int:
        """Offset of the first chunk in the blob."""
        return self.checks_at + 8 * self.chunks

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
        """Size of a plane of the largest chunk."""
        return min(self.numbers, 1 << self.chunk_log2)

    def waves(self, scratch_bytes: int) -> Iterator[Wave]:
        """All chunks, as many at a time as find room in so many bytes of working memory, but one at least."""
        at_once = max(1, scratch_bytes // (self.planes * (self.slot_bytes + self.work_bytes)))
        for first in range(0, self.chunks, at_once):
            yield Wave(first, min(at_once, self.chunks - first))


def _rounded_up(size: int) -> int:
    return -(-size // 16) * 16


# ---- on the GPU ------------------------------------------------------------------------------------------------------


def _plan(tensor: torch.Tensor, level: str, chunk_log2: int | None) -> EncodePlan | None:
    """Return the plan of the GPU's encoding; None if the host's encoder must do it."""
    plan = EncodePlan.of(tensor, level, chunk_log2)
    return plan if level in ("fast", "default") and plan.numbers > 0 and _has_kernels(tensor.device) else None


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and launching.unavailable_because() is None


def _memory(size: int, device: torch.device) -> torch.Tensor:
    """Memory that is not initialized: U8 of shape (size,)."""
    return torch.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def _named_shortage(tensor: torch.Tensor, plan: EncodePlan) -> Iterator[None]:
    """Turn torch's error for a full GPU into the library's."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{tensor.device} has no room to encode a tensor of type {plan.element.name} and shape {plan.shape}.",
            cure="Free memory there, or encode the tensor on the CPU.",
        ) from error


def _source(tensor: torch.Tensor, plan: EncodePlan) -> torch.Tensor:
    """The tensor's bytes, in order and at an address that 16 divides; a copy of some views."""
    source = row_major_bytes(tensor.detach().resolve_conj().resolve_neg())
    if source.data_ptr() % _ALIGNMENT == 0:
        return source
    return _memory(plan.nbytes, source.device).copy_(source)


def _launch(entry: str, grid: int, arguments: Sequence[torch.Tensor | int], *, threads: int = _THREADS) -> None:
    """Start a kernel where its first tensor is."""
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    file = "check_chunks.cu" if entry == "check_chunks" else "encode.cu"
    launching.launch(file, entry, grid, threads, arguments, device=device)


def _checks_of(source: torch.Tensor, plan: EncodePlan) -> torch.Tensor:
    """The checks of all chunks: eight bytes each."""
    checks = _memory(8 * plan.chunks, source.device)
    chunk_bytes = plan.element.number_bytes << plan.chunk_log2
    _launch("check_chunks", plan.chunks, [source, plan.nbytes, chunk_bytes, checks], threads=_CHECKERS)
    return checks


def _run(
    source: torch.Tensor,
    plan: EncodePlan,
    payload: torch.Tensor,
    *,
    checks: bool,
    status: torch.Tensor | None,
    fill: bool,
) -> torch.Tensor:
    """Launch everything. With `fill`, zeros follow the blob.

    Returned are the bytes of the blob, and whether they exceed the payload's capacity: I64 of shape (2,).
    """
    progress = _memory(16, source.device).view(torch.int64)
    blob, capacity = payload[LENGTH_BYTES:], payload.numel() - LENGTH_BYTES
    if status is None:
        status = torch.zeros(1, dtype=torch.int32, device=source.device)
    found = _checks_of(source, plan) if checks else None
    room = None
    for wave in plan.waves(SCRATCH_BYTES):
        # The first wave is the largest, so its memory is enough for all.
        room = room or _Room.of(plan, wave.chunks * plan.planes, source.device)
        _run_wave(source, plan, wave, blob, progress, room, found)
    grid = 1 + (min(256, -(-capacity // (1 << 16))) if fill else 0)
    header = (plan.start, len(plan.varints), plan.checks_at, plan.payload_at, *plan.shape_words)
    _launch("finish_blob", grid, [payload, blob, capacity, progress, status, *header], threads=_FINISHERS)
    return progress


@dataclass(frozen=True, slots=True)
class _Room:
    """Working memory of a wave."""

    slots: torch.Tensor
    work: torch.Tensor
    places: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, plan: EncodePlan, items: int, device: torch.device) -> _Room:
        return cls(*(_memory(items * nbytes, device) for nbytes in (plan.slot_bytes, plan.work_bytes, 8, 4)))


def _run_wave(
    source: torch.Tensor,
    plan: EncodePlan,
    wave: Wave,
    blob: torch.Tensor,
    progress: torch.Tensor,
    room: _Room,
    checks: torch.Tensor | None,
) -> None:
    """Encode a wave of chunks, give them their places, and copy them there."""
    items, capacity = wave.chunks * plan.planes, blob.numel()
    what = (source, plan.numbers, plan.element.number_bytes, plan.chunk_log2)
    splits = list(PlaneStatistics.head(plan.element).splits(plan.level))
    how = (splits[0].raw_bits, splits[-1].raw_bits, int(splits[0].signed), sampling(plan.level))
    given = (room.slots, plan.slot_bytes, room.work, plan.work_bytes, room.sizes)
    _launch("encode_planes", items, [*what, *how, wave.first, *given])
    # Without checks, the kernel does not read their memory.
    index = (progress if checks is None else checks, int(checks is not None))
    where = (blob, plan.index_at, plan.checks_at, plan.payload_at, capacity, progress, room.places)
    _launch("place_planes", 1, [room.sizes, items, plan.planes, wave.first, *index, *where], threads=_PLACERS)
    pieces = (room.slots, plan.slot_bytes, room.sizes, room.places, blob, capacity)
    _launch("copy_planes", items * _COPIERS, [*what, wave.first, *pieces])


# ---- on the host -----------------------------------------------------------------------------------------------------


def _on_host(tensor: torch.Tensor, level: str, chunk_log2: int | None) -> torch.Tensor:
    """The host's encoder's blob, on the tensor's device."""
    threads = torch.get_num_threads()
    blob = api.encode(tensor, level=level, chunk_log2=chunk_log2, threads=threads, gpu_modes=True)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(tensor.device)


def _sealed_on_host(blob: torch.Tensor, layout: BlobLayout) -> torch.Tensor:
    sealed = blob.cpu().clone()
    data, numbers, end = sealed.numpy(), api.decode_raw(sealed), layout.payload_at
    step = -(-layout.nbytes // max(layout.numbers, 1)) << layout.chunk_log2
    checks = [best.check_of(numbers[at : at + step]) for at in range(0, len(numbers), step or 1)]
    data[end - 8 * layout.chunks : end].view("<u8")[:] = checks
    data[8:24] = np.frombuffer(digest_of_checks(checks), np.uint8)
    check = checksum(data[:24].tobytes(), data[FIXED_HEADER:end].tobytes())
    data[24:28] = np.frombuffer(check, np.uint8)
    return sealed.to(blob.device)


def _put(blob: torch.Tensor, payload: torch.Tensor, status: torch.Tensor | None) -> int:
    """Put a blob of the host's encoder into a payload, as finish_blob does it; gives its size."""
    used = LENGTH_BYTES + blob.numel()
    if used > payload.numel():
        if status is None:
            raise _too_small(payload, blob.numel())
        payload.zero_()
        status |= 1
        return 0
    length = torch.tensor(list(blob.numel().to_bytes(LENGTH_BYTES, "little")), dtype=torch.uint8)
    payload[:LENGTH_BYTES] = length.to(payload.device)
    payload[LENGTH_BYTES:used] = blob
    payload[used:] = 0
    return blob.numel()


def _too_small(payload: torch.Tensor, size: int) -> UsageError:
    return UsageError(
        f"The payload has {payload.numel()} bytes, and a blob of {size} needs {LENGTH_BYTES + size}.",
        cure="Give it 8 + largest_blob(tensor) bytes, which always suffice.",
    )
