"""Tensors on an NVIDIA GPU to blobs there, with the bytes that the CPU's encoder writes.

`encode` makes a blob of exactly its size; `encode_into` fills a payload of fixed capacity and never waits for the GPU,
which is what training wants. Chunks are encoded in waves, so that what is needed beside tensor and blob is bounded by
`SCRATCH_BYTES`. kernels/encode.cu does the work; `netweight.codec.cuda` re-exports the functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from netweight import codec
from netweight.codec import fallback
from netweight.codec.cuda.launching import launch, unavailable_because
from netweight.codec.dtypes import dtype_name
from netweight.codec.element_types import ELEMENT_TYPES, ElementType
from netweight.codec.reference import MAGIC, VERSION, Split
from netweight.errors import OutOfMemory, UsageError

__all__ = ["LENGTH_BYTES", "SCRATCH_BYTES", "encode", "encode_into", "largest_blob", "with_digest"]

SCRATCH_BYTES = 256 << 20  # working memory of one call, unless a single chunk needs more
LENGTH_BYTES = 8  # before the blob in a payload

_FIXED_HEADER = 28
_SHAPE_WORDS = 10  # 64 dimensions whose product is below 2^62 have at most 73 bytes of varints
_THREADS = 256  # of a block; kThreads in kernels/encode_plane.cuh
_COPIERS = 8  # kCopiers in kernels/encode.cu
_DIGEST_BLOCK = 1024
_LONG_TEXT = 241  # kLongText in kernels/digest.cuh
_SLACK = 4096  # what a plane may write beyond its elements before it is given up


def encode(
    tensor: torch.Tensor, *, level: str = "default", chunk_log2: int | None = None, digest: bool = True
) -> torch.Tensor:
    """Compress a tensor, bit for bit, where it lies.

    The GPU encodes the levels "fast" and "default" of tensors on it. Level "max", tensors without elements and those on
    the CPU, and GPUs for which `unavailable_because` has a reason, are the host's encoder's: the tensor is copied there
    and the blob back. The blob is the same either way.

    Waits for the GPU once, to learn the blob's size. Needs memory for a blob of the tensor's size, and `SCRATCH_BYTES`
    or what one chunk takes (about twice its bytes).

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
    source = _source(tensor, plan)
    payload = _memory(LENGTH_BYTES + plan.bound, source, plan.what)
    progress = _run(source, plan, payload, digest, None)
    size = int(progress[0])
    blob = _memory(size, source, plan.what)
    return blob.copy_(payload[LENGTH_BYTES : LENGTH_BYTES + size])


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
    progress = _run(_source(tensor, plan), plan, payload, digest, status, fill=True)
    if status is None and int(progress[1]):
        raise _too_small(payload, int(progress[0]))


def largest_blob(tensor: torch.Tensor, *, chunk_log2: int | None = None) -> int:
    """The most bytes that a blob of any tensor of this dtype and shape has, by `encode` at any level.

    Raises:
        Unsupported: The codec has no such element type.
    """
    return _description(tensor, "default", chunk_log2).bound


def with_digest(blob: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Complete a blob that `encode` or `encode_into` made without a digest.

    Args:
        blob: U8 of shape (size,), on a GPU.
        tensor: What it holds, if that is at hand; the blob is decoded otherwise.

    Returns:
        A copy with digest and header check.

    Raises:
        CorruptBlob: The blob is damaged.
        OutOfMemory: The GPU has no room.
    """
    from netweight.codec.cuda.decoding import decode
    from netweight.codec.cuda.layout import layout_of

    layout = layout_of(blob)
    plan = _description(torch.empty(layout.shape, dtype=layout.dtype, device="meta"), "default", layout.chunk_log2)
    if plan.numbers == 0:
        return _on_host(
            torch.empty(layout.shape, dtype=layout.dtype, device=blob.device), layout.level, plan.chunk_log2
        )
    source = _source(decode(blob, layout) if tensor is None else tensor, plan)
    small = _Small.on(source, plan.what)
    for wave in plan.waves():
        sums = _sums(source, plan, wave)
        arguments = [
            source,
            plan.nbytes,
            sums,
            wave.digest_blocks,
            small.state,
            wave.first == 0,
            wave.last,
            small.digest,
        ]
        launch("digest.cu", "chain_digest", 1, 32, [_plain(a) for a in arguments], device=source.device)
    sealed = _memory(blob.numel(), source, plan.what).copy_(blob)
    launch("encode.cu", "seal_blob", 1, 32, [sealed, layout.payload_at, small.digest], device=source.device)
    return sealed


# ---- what is to be done ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wave:
    """Chunks that are encoded together.

    Attributes:
        first: The first one's number.
        chunks: How many there are.
        last: Whether the tensor ends with them.
        digest_from: Where their first block of the digest starts, in bytes.
        digest_blocks: Blocks of the digest that they fill and that are not the tensor's last.
    """

    first: int
    chunks: int
    last: bool
    digest_from: int
    digest_blocks: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about an encoding that follows from dtype, shape and options."""

    element: ElementType
    shape: tuple[int, ...]
    nbytes: int
    level: int
    chunk_log2: int

    @property
    def what(self) -> str:
        return f"a tensor of type {self.element.name} and shape {self.shape}"

    @property
    def numbers(self) -> int:
        return self.nbytes // self.element.number_bytes

    @property
    def chunks(self) -> int:
        return -(-self.numbers >> self.chunk_log2)

    @property
    def planes(self) -> int:
        return 1 + self.element.tails

    @property
    def varints(self) -> bytes:
        return b"".join(map(fallback.varint, self.shape))

    @property
    def start(self) -> int:
        """Bytes 0 to 7 of the header, as a number."""
        return int.from_bytes(
            MAGIC + bytes((VERSION, self.element.code, self.level, self.chunk_log2, len(self.shape))), "little"
        )

    @property
    def index_at(self) -> int:
        return _FIXED_HEADER + len(self.varints)

    @property
    def payload_at(self) -> int:
        return self.index_at + 4 * self.chunks

    @property
    def bound(self) -> int:
        """A plane has a byte more than its elements at most: when it is raw."""
        return self.payload_at + self.nbytes + self.chunks * self.planes

    @property
    def _elements(self) -> int:
        """Of a plane of the largest chunk."""
        return min(self.numbers, 1 << self.chunk_log2)

    @property
    def slot_bytes(self) -> int:
        """For a plane as it is written, with raw bits before it is known whether their table pays."""
        return -(-(self._elements * self.element.head_bytes + _SLACK) // 16) * 16

    @property
    def work_bytes(self) -> int:
        """For a plane's streams, a byte an element, and patches, two words for every 64 and 192 for a stream."""
        padded = self._elements + 256
        return -(-(padded + padded // 64 * 8 + 4 * 4 * 192) // 16) * 16

    def waves(self) -> Iterator[_Wave]:
        """All chunks, as many at a time as working memory allows."""
        chunk_bytes = self.element.number_bytes << self.chunk_log2
        each = self.planes * (self.slot_bytes + self.work_bytes) + chunk_bytes // 16
        at_once = max(1, SCRATCH_BYTES // each)
        all_blocks = (self.nbytes - 1) // _DIGEST_BLOCK if self.nbytes >= _LONG_TEXT else 0
        for first in range(0, self.chunks, at_once):
            chunks = min(at_once, self.chunks - first)
            start = first * chunk_bytes
            end = min(all_blocks, (start + chunks * chunk_bytes) // _DIGEST_BLOCK)
            yield _Wave(first, chunks, first + chunks == self.chunks, start, max(0, end - start // _DIGEST_BLOCK))


def _description(tensor: torch.Tensor, level: str, chunk_log2: int | None) -> _Plan:
    if level not in codec.LEVELS:
        raise UsageError(f"There is no level {level!r}.", cure=f"Choose one of {', '.join(codec.LEVELS)}.")
    if chunk_log2 is not None and not 10 <= chunk_log2 <= 22:
        raise UsageError(f"chunk_log2 is {chunk_log2}.", cure="Choose 10 to 22.")
    name = dtype_name(tensor.dtype)
    element = next(element for element in ELEMENT_TYPES if element.name == name)
    return _Plan(
        element,
        tuple(tensor.shape),
        tensor.numel() * tensor.element_size(),
        codec.LEVELS.index(level),
        chunk_log2 or (18 if element.number_bytes <= 2 else 17),
    )


def _plan(tensor: torch.Tensor, level: str, chunk_log2: int | None) -> _Plan | None:
    """What the GPU is to do; None if the host's encoder is to do it."""
    plan = _description(tensor, level, chunk_log2)
    return plan if level != "max" and plan.numbers > 0 and _has_kernels(tensor.device) else None


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and unavailable_because() is None


# ---- on the GPU ------------------------------------------------------------------------------------------------------


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
    def on(cls, source: torch.Tensor, what: str) -> _Small:
        words = _memory(8 * 12, source, what).view(torch.int64)
        return cls(words[:2], words[2:10], words[10:])


def _memory(size: int, beside: torch.Tensor, what: str) -> torch.Tensor:
    """Memory on a tensor's device, not initialized: U8 of shape (size,)."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=beside.device)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{beside.device} has no {size} bytes left to encode {what}.",
            cure="Free memory there, or encode the tensor on the CPU.",
        ) from error


def _source(tensor: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """The tensor's memory, in order and at an address that its numbers divide."""
    source = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return source.clone() if source.data_ptr() % plan.element.number_bytes else source


def _plain(argument: torch.Tensor | int) -> torch.Tensor | int:
    return argument if isinstance(argument, torch.Tensor) else int(argument)


def _signed(word: int) -> int:
    """A 64-bit word as an argument of a kernel: with a sign."""
    return word - (1 << 64) if word >> 63 else word


def _sums(source: torch.Tensor, plan: _Plan, wave: _Wave) -> torch.Tensor:
    """What the digest's blocks of a wave add to it, eight words for each."""
    sums = _memory(64 * max(1, wave.digest_blocks), source, plan.what)
    if wave.digest_blocks:
        data = source.view(-1).view(torch.uint8)[wave.digest_from :]
        grid = -(-wave.digest_blocks // 32)  # four blocks a warp
        launch("digest.cu", "sum_digest_blocks", grid, _THREADS, [data, wave.digest_blocks, sums], device=source.device)
    return sums


def _run(
    source: torch.Tensor,
    plan: _Plan,
    payload: torch.Tensor,
    digest: bool,
    status: torch.Tensor | None,
    *,
    fill: bool = False,
) -> torch.Tensor:
    """Launch everything; returns `_Small.progress`. With `fill`, zeros follow the blob."""
    small = _Small.on(source, plan.what)
    blob, capacity = payload[LENGTH_BYTES:], payload.numel() - LENGTH_BYTES
    splits = fallback.head_splits(plan.element, plan.level)
    for wave in plan.waves():
        _run_wave(source, plan, wave, blob, splits, small, digest)
    words = plan.varints.ljust(8 * _SHAPE_WORDS, b"\0")
    shape = [_signed(int.from_bytes(words[i : i + 8], "little")) for i in range(0, len(words), 8)]
    if status is None:
        status = torch.zeros(1, dtype=torch.int32, device=source.device)
    grid = 1 + (min(256, -(-capacity // (1 << 16))) if fill else 0)
    arguments = [payload, blob, capacity, small.progress, status, int(digest), small.digest, plan.start]
    arguments += [len(plan.varints), 4 * plan.chunks, *shape]
    launch("encode.cu", "finish_blob", grid, _THREADS, arguments, device=source.device)
    return small.progress


def _run_wave(
    source: torch.Tensor,
    plan: _Plan,
    wave: _Wave,
    blob: torch.Tensor,
    splits: list[Split],
    small: _Small,
    digest: bool,
) -> None:
    """Encode a wave of chunks, give them their places, and copy them there."""
    items = wave.chunks * plan.planes
    slots = _memory(items * plan.slot_bytes, source, plan.what)
    work = _memory(items * plan.work_bytes, source, plan.what)
    places = _memory(8 * items, source, plan.what)
    sizes = _memory(4 * items, source, plan.what)
    sums = _sums(source, plan, wave) if digest else small.state
    what = [source, plan.numbers, plan.element.number_bytes, plan.chunk_log2]
    how = [splits[0].raw_bits, splits[-1].raw_bits, int(splits[0].signed), fallback.sampling(plan.level), wave.first]
    room = [slots, plan.slot_bytes, work, plan.work_bytes, sizes]
    chain = [int(digest), sums, wave.digest_blocks, small.state, int(wave.last), small.digest]
    device, capacity = source.device, blob.numel()
    launch("encode.cu", "encode_planes", items + digest, _THREADS, [*what, *how, *room, *chain], device=device)
    where = [blob, plan.index_at, plan.payload_at, capacity, small.progress, places]
    launch("encode.cu", "place_planes", 1, _THREADS, [sizes, items, plan.planes, wave.first, *where], device=device)
    pieces = [*what, wave.first, slots, plan.slot_bytes, sizes, places, blob, capacity]
    launch("encode.cu", "copy_planes", items * _COPIERS, _THREADS, pieces, device=device)


# ---- on the host -----------------------------------------------------------------------------------------------------


def _on_host(tensor: torch.Tensor, level: str, chunk_log2: int | None) -> torch.Tensor:
    """The host's encoder's blob, on the tensor's device."""
    threads = torch.get_num_threads()
    blob = codec.encode(tensor, level=level, chunk_log2=chunk_log2, threads=threads)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(tensor.device)


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
