"""Tensors on an NVIDIA GPU to blobs there, with the bytes that the CPU's encoder writes.

`encode` makes a blob of exactly its size; `encode_into` fills a payload of fixed capacity and never waits for the GPU,
which is what training wants. Chunks are encoded in waves, so that what is needed beside tensor and blob is bounded by
`SCRATCH_BYTES`. kernels/encode.cu does the work; `netweight.codec.cuda` re-exports the functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from netweight import codec
from netweight.codec import fallback
from netweight.codec.cuda import launching
from netweight.codec.cuda.decoding import decode
from netweight.codec.cuda.encode_plan import EncodePlan, Wave
from netweight.codec.cuda.layout import BlobLayout, layout_of
from netweight.codec.reference import FIXED_HEADER
from netweight.errors import OutOfMemory, UsageError

__all__ = ["LENGTH_BYTES", "SCRATCH_BYTES", "encode", "encode_into", "largest_blob", "layout_of_encoded", "with_digest"]

SCRATCH_BYTES = 256 << 20  # working memory of one call, unless a single chunk needs more
LENGTH_BYTES = 8  # before the blob in a payload

_THREADS = 256  # of a block; kThreads in kernels/encode_plane.cuh
_COPIERS = 8  # kCopiers in kernels/encode.cu
_ALIGNMENT = 16  # of a tensor's address


def encode(
    tensor: torch.Tensor, *, level: str = "default", chunk_log2: int | None = None, digest: bool = True
) -> torch.Tensor:
    """Compress a tensor, bit for bit, where it lies.

    The GPU encodes the levels "fast" and "default" of tensors on it. Level "max", tensors without elements and those on
    the CPU, and GPUs for which `unavailable_because` has a reason, are the host's encoder's: the tensor is copied there
    and the blob back. The blob is the same either way.

    Waits for the GPU once, to learn the blob's size. Needs memory for a blob of the tensor's size, `SCRATCH_BYTES` or
    what one chunk takes (about twice its bytes), and a copy of a tensor that is not contiguous or starts at an address
    that 16 does not divide.

    Args:
        tensor: Of any dtype that the codec has, any shape and strides.
        level: "fast", "default" or "max".
        chunk_log2: See `netweight.codec.encode`.
        digest: Whether the blob gets the tensor's digest. Without it the digest's 16 bytes are zero: such a blob is for
            memory only, and `with_digest` is to complete it before it goes anywhere else.

    Returns:
        The blob: U8 of shape (size,), on the tensor's device.

    Raises:
        UsageError: An option is out of its range.
        Unsupported: The codec has no such element type.
        OutOfMemory: The GPU has no room.
    """
    plan = _plan(tensor, level, chunk_log2)
    if plan is None:
        return _on_host(tensor, level, chunk_log2)
    with _named_shortage(tensor, plan):
        payload = _memory(LENGTH_BYTES + plan.bound, tensor.device)
        small = _run(_source(tensor, plan), plan, payload, digest=digest, status=None, fill=False)
        size = int(small.progress[0])
        return _memory(size, tensor.device).copy_(payload[LENGTH_BYTES : LENGTH_BYTES + size])


def encode_into(
    tensor: torch.Tensor,
    payload: torch.Tensor,
    *,
    level: str = "default",
    chunk_log2: int | None = None,
    digest: bool = False,
    status: torch.Tensor | None = None,
) -> None:
    """Compress a tensor into a payload: the blob's length in 8 bytes, little-endian, the blob, and zeros.

    Asynchronous, on the current stream of the tensor's device, if the GPU encodes it (see `encode`) and a `status` is
    given; needs `SCRATCH_BYTES` or what one chunk takes.

    Args:
        tensor: See `encode`.
        payload: Contiguous U8 tensor of shape (capacity,) on the tensor's device; `8 + largest_blob(tensor)` always
            suffices.
        level: See `encode`.
        chunk_log2: See `netweight.codec.encode`.
        digest: See `encode`.
        status: I32 tensor of shape (1,) on the device. A blob that does not fit leaves a length of 0 and ORs 1 into it;
            it is not touched otherwise. Without one the call waits and raises.

    Raises:
        UsageError: An option is out of its range, the payload is of another kind, or, without `status`, too small.
        Unsupported: The codec has no such element type.
        OutOfMemory: The GPU has no room.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise UsageError(f"The payload is {payload.dtype} of shape {tuple(payload.shape)}; it must be contiguous U8.")
    if payload.device != tensor.device or payload.numel() < LENGTH_BYTES:
        raise UsageError(f"The payload, {payload.numel()} bytes on {payload.device}, cannot hold a blob here.")
    plan = _plan(tensor, level, chunk_log2)
    if plan is None:
        _put(_on_host(tensor, level, chunk_log2), payload, status)
        return
    with _named_shortage(tensor, plan):
        small = _run(_source(tensor, plan), plan, payload, digest=digest, status=status, fill=True)
    if status is None and int(small.progress[1]):
        raise _too_small(payload, int(small.progress[0]))


def largest_blob(tensor: torch.Tensor, *, chunk_log2: int | None = None) -> int:
    """The most bytes that a blob of any tensor of this dtype and shape has, by `encode` at any level.

    Args:
        tensor: Any shape, on any device; only dtype and shape count.
        chunk_log2: Binary logarithm of the numbers in a chunk; None for the default.

    Raises:
        Unsupported: The codec has no such element type.
    """
    return EncodePlan.of(tensor, "default", chunk_log2).bound


def layout_of_encoded(
    blob: torch.Tensor, like: torch.Tensor, *, level: str = "default", chunk_log2: int | None = None
) -> BlobLayout:
    """The layout of a blob that was encoded from a tensor; unlike `layout_of` it does not wait for the device.

    Args:
        blob: U8 of shape (size,), as `encode` or netweight's encoder on the host wrote it.
        like: Tensor of the dtype and shape that was encoded; its values and device do not matter.
        level: As given to the encoder.
        chunk_log2: As given to the encoder.

    Raises:
        UsageError: There is no such level, or chunk_log2 is not 10 to 22.
        Unsupported: The codec has no such element type.
    """
    plan = EncodePlan.of(like, level, chunk_log2)
    index = blob[plan.index_at : plan.payload_at].view(plan.chunks, 4).to(torch.int64)
    lengths = index[:, 0] | index[:, 1] << 8 | index[:, 2] << 16 | index[:, 3] << 24
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
        starts=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) + plan.payload_at,
    )


def with_digest(blob: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Complete a blob that `encode` or `encode_into` made without a digest.

    Args:
        blob: U8 of shape (size,), contiguous. On a GPU whose kernels can run it stays there.
        tensor: What it holds, if that is at hand; the blob is decoded otherwise. Any shape and dtype.

    Returns:
        A copy with digest and header check, on the same device.

    Raises:
        CorruptBlob: The blob is damaged.
        OutOfMemory: The GPU has no room.
    """
    layout = layout_of(blob)
    if layout.numbers == 0 or not _has_kernels(blob.device):
        return _sealed_on_host(blob, layout.payload_at)
    if tensor is None:
        tensor = decode(blob, layout)
    plan = EncodePlan.of(tensor, layout.level, layout.chunk_log2)
    with _named_shortage(tensor, plan):
        source, small = _source(tensor, plan), _Small.on(tensor.device)
        for wave in plan.waves(SCRATCH_BYTES):
            _launch("chain_digest", 1, [source, plan.nbytes, *_digest_arguments(source, wave, small)], threads=32)
        sealed = _memory(blob.numel(), blob.device).copy_(blob)
        _launch("seal_blob", 1, [sealed, layout.payload_at, small.digest], threads=32)
    return sealed


# ---- on the GPU ------------------------------------------------------------------------------------------------------


def _plan(tensor: torch.Tensor, level: str, chunk_log2: int | None) -> EncodePlan | None:
    """What the GPU is to do; None if the host's encoder is to do it."""
    plan = EncodePlan.of(tensor, level, chunk_log2)
    return plan if level != "max" and plan.numbers > 0 and _has_kernels(tensor.device) else None


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and launching.unavailable_because() is None


@dataclass(frozen=True, slots=True)
class _Small:
    """State that goes from kernel to kernel.

    Attributes:
        progress: Bytes of the blob so far, and whether it passed the payload's capacity: I64 of shape (2,).
        state: Accumulators of the digest: I64 of shape (8,).
        digest: The digest: I64 of shape (2,).
    """

    progress: torch.Tensor
    state: torch.Tensor
    digest: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> _Small:
        words = _memory(8 * 12, device).view(torch.int64)
        return cls(words[:2], words[2:10], words[10:])


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
    source = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if source.data_ptr() % _ALIGNMENT == 0:
        return source
    return _memory(plan.nbytes, source.device).copy_(source)


def _launch(entry: str, grid: int, arguments: Sequence[torch.Tensor | int], *, threads: int = _THREADS) -> None:
    """Start a kernel where its first tensor is."""
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    file = "digest.cu" if entry in ("sum_digest_blocks", "chain_digest") else "encode.cu"
    launching.launch(file, entry, grid, threads, arguments, device=device)


def _digest_arguments(source: torch.Tensor, wave: Wave, small: _Small) -> list[torch.Tensor | int]:
    """What advance_digest takes for a wave: the sums of its blocks, which are found first, and where to go on."""
    sums = small.state  # of no block
    if wave.digest_blocks:
        sums = _memory(64 * wave.digest_blocks, source.device)
        grid = -(-wave.digest_blocks // 32)  # four blocks a warp
        _launch("sum_digest_blocks", grid, [source[wave.digest_from :], wave.digest_blocks, sums])
    return [sums, wave.digest_blocks, small.state, int(wave.first == 0), int(wave.last), small.digest]


def _run(
    source: torch.Tensor,
    plan: EncodePlan,
    payload: torch.Tensor,
    *,
    digest: bool,
    status: torch.Tensor | None,
    fill: bool,
) -> _Small:
    """Launch everything. With `fill`, zeros follow the blob."""
    small = _Small.on(source.device)
    blob, capacity = payload[LENGTH_BYTES:], payload.numel() - LENGTH_BYTES
    for wave in plan.waves(SCRATCH_BYTES):
        _run_wave(source, plan, wave, blob, small, digest=digest)
    if status is None:
        status = torch.zeros(1, dtype=torch.int32, device=source.device)
    grid = 1 + (min(256, -(-capacity // (1 << 16))) if fill else 0)
    header = (plan.start, len(plan.varints), 4 * plan.chunks, *plan.shape_words)
    what = (payload, blob, capacity, small.progress, status, int(digest), small.digest)
    _launch("finish_blob", grid, [*what, *header])
    return small


def _run_wave(
    source: torch.Tensor, plan: EncodePlan, wave: Wave, blob: torch.Tensor, small: _Small, *, digest: bool
) -> None:
    """Encode a wave of chunks, give them their places, and copy them there."""
    items, device, capacity = wave.chunks * plan.planes, source.device, blob.numel()
    slots, work = _memory(items * plan.slot_bytes, device), _memory(items * plan.work_bytes, device)
    places, sizes = _memory(8 * items, device), _memory(4 * items, device)
    what = (source, plan.numbers, plan.element.number_bytes, plan.chunk_log2)
    splits = fallback.head_splits(plan.element, plan.level)
    how = (splits[0].raw_bits, splits[-1].raw_bits, int(splits[0].signed), fallback.sampling(plan.level))
    chain: list[torch.Tensor | int] = [small.state, 0, small.state, 0, 0, small.digest]  # is not looked at
    if digest:
        chain = _digest_arguments(source, wave, small)
    room = (slots, plan.slot_bytes, work, plan.work_bytes, sizes)
    _launch("encode_planes", items + digest, [*what, *how, wave.first, *room, int(digest), *chain])
    where = (blob, plan.index_at, plan.payload_at, capacity, small.progress, places)
    _launch("place_planes", 1, [sizes, items, plan.planes, wave.first, *where])
    pieces = (slots, plan.slot_bytes, sizes, places, blob, capacity)
    _launch("copy_planes", items * _COPIERS, [*what, wave.first, *pieces])


# ---- on the host -----------------------------------------------------------------------------------------------------


def _on_host(tensor: torch.Tensor, level: str, chunk_log2: int | None) -> torch.Tensor:
    """The host's encoder's blob, on the tensor's device."""
    threads = torch.get_num_threads()
    blob = codec.encode(tensor, level=level, chunk_log2=chunk_log2, threads=threads)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(tensor.device)


def _sealed_on_host(blob: torch.Tensor, payload_at: int) -> torch.Tensor:
    sealed = blob.cpu().clone()
    data = sealed.numpy()
    data[8:24] = np.frombuffer(xxhash.xxh3_128_digest(codec.decode_raw(data).data), np.uint8)
    check = xxhash.xxh3_64_intdigest(data[:24].tobytes() + data[FIXED_HEADER:payload_at].tobytes()) & 0xFFFFFFFF
    data[24:28] = np.frombuffer(check.to_bytes(4, "little"), np.uint8)
    return sealed.to(blob.device)


def _put(blob: torch.Tensor, payload: torch.Tensor, status: torch.Tensor | None) -> None:
    """Put a blob of the host's encoder into a payload, as finish_blob does it."""
    used = LENGTH_BYTES + blob.numel()
    if used > payload.numel():
        if status is None:
            raise _too_small(payload, blob.numel())
        payload.zero_()
        status |= 1
        return
    length = torch.tensor(list(blob.numel().to_bytes(LENGTH_BYTES, "little")), dtype=torch.uint8)
    payload[:LENGTH_BYTES] = length.to(payload.device)
    payload[LENGTH_BYTES:used] = blob
    payload[used:] = 0


def _too_small(payload: torch.Tensor, size: int) -> UsageError:
    return UsageError(
        f"The payload has {payload.numel()} bytes, and a blob of {size} needs {LENGTH_BYTES + size}.",
        cure="Give it 8 + largest_blob(tensor) bytes, which always suffice.",
    )
