"""The compressed bytes of one weight: encoding, decoding, moving between devices, replacing.

A *payload* is a U8 tensor on the weight's device: eight bytes of length, the codec's blob, and room for it to grow. One
that lies in a mapped file, where it was loaded from, is the blob alone: it is compared with its checks while it is
decoded, until all of it was once, and what is written goes elsewhere.
`CompressedStorage` is a payload with what is known of its weight; `tensor.py` makes the parameter that stands for it.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar, final

import torch

from netweight import codec
from netweight.codec import Precision, cuda
from netweight.codec.cuda import fixed_products
from netweight.codec.fixed import SummationOrder, encode_fixed, multiply_blob
from netweight.codec.header import dtype_name, memory_at, read_index, torch_dtype
from netweight.codec.tiled import TiledBlob
from netweight.errors import CorruptBlob, LossyWrite, Unsupported, UsageError
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.cuda import LENGTH
from netweight.store.choices import Level

Result = TypeVar("Result")

# From this size on, decoding with several threads is faster in spite of their start.
_MANY = 1 << 20
# The size of a small weight in bytes, and how many of these stay decoded: 4 MB at most.
_SMALL, _MOST_SMALL = 1 << 14, 256
_small: deque[weakref.ref[CompressedStorage]] = deque()


class Form(NamedTuple):
    """Properties of a payload that decoding needs; operators take the three one by one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fixed: bool
    """True if the payload is in the fixed-length form."""


@final
@dataclass(eq=False, repr=False)
class CompressedStorage:
    """The bytes of one weight, shared by all tensors of it, so that a write through one is seen by all."""

    payload: torch.Tensor
    """U8 tensor of shape (capacity,), on the device of the weight."""
    shape: tuple[int, ...]
    """Shape of the weight as encoded."""
    dtype: torch.dtype
    """Dtype of the weight."""
    level: Level = "default"
    """Level of the codec for every encoding of the weight."""
    chunk_log2: int | None = None
    """Binary logarithm of the number of elements per chunk; None for the codec's own choice."""
    stride: tuple[int, ...] | None = None
    """Strides of the weight when decoded, such as those of torch.channels_last; None if it is contiguous. Kernels
    differ by layout, in their last bits, too.
    """
    fixed: bool = False
    """True if the payload is in the fixed-length form."""
    name: str | None = None
    """Name of the weight in its model, for error messages; None if it is unknown."""
    wire: Any = None
    """State of the transfer of FSDP's shards, which belongs to `fsdp.py`; None for a weight that is not a shard."""
    decoded: tuple[torch.Tensor, int, torch.Tensor] | None = field(default=None, init=False)
    """The payload, its version and its decoded weight, of a small weight that was read lately; see `small`."""

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        *,
        level: Level = "default",
        chunk_log2: int | None = None,
        precision: Precision | None = None,
        fixed: bool = False,
        lasting: bool = True,
    ) -> CompressedStorage:
        """Encode a dense weight; `lasting` takes time, and keeps no scratch memory from the driver of a GPU."""
        precision, stride = precision or Precision(), layout_of(weight)
        empty = torch.empty(0, dtype=torch.uint8, device=weight.device)
        stored = cls(empty, tuple(weight.shape), weight.dtype, level, chunk_log2, stride)
        payload = _fixed_form(weight) if fixed and precision.lossless and stride is None else None
        if payload is not None:
            stored.fixed = True
            stored._put(payload, lasting=lasting)
            return stored
        if chunk_log2 is None and device.handles(weight):
            stored.chunk_log2 = device.chunk_log2_of(weight.numel())
        stored._encode(weight, precision, lasting=lasting)
        return stored

    @property
    def form(self) -> Form:
        """Properties of the payload that decoding needs."""
        return Form(self.shape, self.dtype, self.fixed)

    def like(self, payload: torch.Tensor) -> CompressedStorage:
        """The same description with another payload."""
        return replace(self, payload=payload, name=None)

    def dense(self) -> torch.Tensor:
        """The decoded weight, contiguous, on the payload's device."""
        return decode_payload(self.payload, *self.form)

    def taken(self) -> torch.Tensor:
        """The decoded weight, for the caller to change; a backward pass has mostly just decoded it."""
        decoded = recent(self.payload.device).take(self.payload)
        return self.dense() if decoded is None else decoded

    def small(self) -> torch.Tensor | None:
        """The decoded weight for kernels that only read it, if it is so small that asking for it takes longest."""
        entry, payload = self.decoded, self.payload
        if entry is not None and entry[0] is payload and entry[1] == payload._version:
            return entry[2]
        if payload.numel() > _SMALL or self.fixed or not device.is_here(payload):
            return None
        if math.prod(self.shape) * self.dtype.itemsize > _SMALL:
            return None
        if payload.is_inference() or payload.is_shared():  # type: ignore[no-untyped-call]
            # Torch does not count all writes.
            return None
        weight = decode_here(payload, self.shape, self.dtype)
        self.decoded = payload, payload._version, weight
        _small.append(weakref.ref(self))
        if len(_small) > _MOST_SMALL:
            oldest = _small.popleft()()
            if oldest is not None:
                oldest.decoded = None
        return weight

    def own(self) -> None:
        """Copy a payload that lies in a mapped file to memory of its own, after comparing it with its checks."""
        if lies_in_file(self.payload):
            self.payload = owned(self.payload)

    def write(self, weight: torch.Tensor) -> None:
        """Encode a dense weight of the same shape and dtype in place of what was here, in the same form."""
        self.write_later(weight)()

    def write_later(self, weight: torch.Tensor) -> Callable[[], None]:
        """Begin to `write`, and return the function that ends it; until then neither may be used or changed."""
        # New values that have no fixed-length form bring the weight back to the codec's for good.
        if self.lossy:
            raise LossyWrite(
                f"{self.name or 'A weight'} of shape {self.shape} is stored rounded: nothing can be written into it.",
                cure="Call decompress_ for the layer first, or train adapters instead.",
            )
        same = weight.device == self.payload.device
        fits = device.encode_into(weight, self.payload, self.level, self.chunk_log2, fixed=self.fixed) if same else None
        if fits is None:
            self._write_elsewhere(weight)
            return _nothing
        if self.fixed:
            torch.autograd.graph.increment_version(self.payload)
        else:
            # The blob and zeros fill the payload after its length.
            self._wrote_there(self.payload.numel() - LENGTH)
        return lambda: None if fits() else self._write_elsewhere(weight)

    def _write_elsewhere(self, weight: torch.Tensor) -> None:
        """`write` into other memory first, since the payload may be too small."""
        payload = _fixed_form(weight) if self.fixed else None
        if payload is not None:
            self._put(payload)
        elif self.fixed:
            self.fixed = False
            self.write(weight)
        else:
            self._encode(weight, Precision())

    def _encode(self, weight: torch.Tensor, precision: Precision, *, lasting: bool = False) -> None:
        """Put the codec's blob of a weight in place of what was here, encoded on the weight's device if that can."""
        same = weight.device == self.payload.device
        there = device.encode(weight, self.level, self.chunk_log2) if same and precision.lossless else None
        if there is None:
            self._put_blob(_encoded(weight, self.level, self.chunk_log2, precision), lasting=lasting)
            return
        used = LENGTH + there.numel()
        payload = self._room(used, lasting=lasting)
        payload[:LENGTH].view(torch.int64).fill_(there.numel())
        payload[LENGTH:used].copy_(there)
        payload[used:].zero_()
        self._wrote_there(there.numel())

    def adopt(self, blob: bytes | memoryview) -> None:
        """Put another blob of the same shape and dtype in place of what was here; see `write`."""
        if self.fixed and not codec.is_lossy(blob):
            self.write(codec.decode(blob, threads=threads_for(len(blob))).to(self.payload.device))
            return
        self.fixed = False
        self._put_blob(blob)

    def begin_tiles(self, *, threads: int) -> TiledBlob:
        """Begin to encode new values by tiles, in the memory of the lossless blob on the CPU that is here.

        The caller keeps the payload until `put_tiles`, which may replace it by a larger one.
        """
        memory = memory_at(self.payload.data_ptr() + LENGTH, self.payload.numel() - LENGTH)
        size = len(blob_of(self.payload))
        name = dtype_name(self.dtype)
        return TiledBlob(name, self.shape, level=self.level, threads=threads, older=memory, size=size)

    def put_tiles(self, blob: TiledBlob) -> None:
        """Replace the payload with the blob of all tiles; it may not be read since `begin_tiles`."""
        size = blob.size
        payload = self._room(LENGTH + size, lasting=False)
        blob.finish(memory_at(payload.data_ptr() + LENGTH, payload.numel() - LENGTH))
        _memory(payload.data_ptr(), LENGTH)[:] = size.to_bytes(LENGTH, "little")
        payload[LENGTH + size :].zero_()
        torch.autograd.graph.increment_version(payload)

    @classmethod
    def of_tiles(cls, blob: TiledBlob, shape: tuple[int, ...], dtype: torch.dtype, level: Level) -> CompressedStorage:
        """The storage of a new tensor on the CPU that was encoded by tiles."""
        stored = cls(torch.empty(0, dtype=torch.uint8), shape, dtype, level)
        stored.put_tiles(blob)
        return stored

    def _put_blob(self, blob: bytes | memoryview, *, lasting: bool = False) -> None:
        payload = self._room(LENGTH + len(blob), lasting=lasting)
        if payload.is_cpu:
            _fill(payload, blob)
        else:
            payload.copy_(pack(blob, payload.numel()))
        # Inside an operator torch counts no writes; a payload saved for a backward pass must be known to have changed.
        torch.autograd.graph.increment_version(payload)

    def _put(self, fixed: torch.Tensor, *, lasting: bool = False) -> None:
        """Put a payload in the fixed-length form in place of what was here."""
        used = fixed.numel()
        payload = self._room(used, lasting=lasting)
        payload[:used].copy_(fixed)
        payload[used:].zero_()
        torch.autograd.graph.increment_version(payload)

    def _room(self, used: int, *, lasting: bool) -> torch.Tensor:
        """The payload, which will be written, or a larger one in its place."""
        if used > self.payload.numel():
            self._refuse_to_move()
            self.payload = _memory_on(self.payload.device, _capacity(used), lasting=lasting)
        elif lies_in_file(self.payload):
            self.payload = _memory_on(self.payload.device, _capacity(used), lasting=lasting)
        device.about_to_write(self.payload)
        return self.payload

    def _wrote_there(self, size: int) -> None:
        torch.autograd.graph.increment_version(self.payload)
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        device.wrote(self.payload, size, like, self.chunk_log2, self.level)

    def transcode(self, *, fixed: bool) -> None:
        """Put the weight into the fixed-length form, if it has one and gets smaller by it, or into the codec's."""
        has_form = self.dtype == torch.bfloat16 and self.stride is None and not self.lossy
        recut = not fixed and not self.lossy and device.wants_other_chunks(self.payload, self.level, self.chunk_log2)
        if (fixed == self.fixed and not recut) or (fixed and not has_form):
            return
        chunk_log2 = None if recut else self.chunk_log2
        again = CompressedStorage.of(self.dense(), level=self.level, chunk_log2=chunk_log2, fixed=fixed)
        if again.fixed == fixed:
            self._refuse_to_move()
            self.payload, self.fixed, self.chunk_log2 = again.payload, fixed, again.chunk_log2

    def _refuse_to_move(self) -> None:
        if self.payload.is_cpu and self.payload.is_shared():  # type: ignore[no-untyped-call]
            raise UsageError(
                f"A compressed weight of shape {self.shape} became larger than the memory that "
                "it shares with other processes.",
                cure="Change shared models in one process before sharing, or share a dense model.",
            )

    @property
    def lossy(self) -> bool:
        """True if the weight was rounded."""
        if self.fixed:
            return False
        lossy = device.lossy(self.payload)
        if lossy is not None:
            return lossy
        return codec.is_lossy(blob_of(self.payload) if self.payload.is_cpu else self.payload[LENGTH : LENGTH + 3].cpu())

    @property
    def blob(self) -> memoryview:
        """A copy of the codec's bytes, without length and padding; made anew of the fixed-length form."""
        if self.fixed:
            return memoryview(_encoded(self.dense(), self.level, self.chunk_log2, Precision()))
        there = device.handles(self.payload)
        local = _with_checks(self.payload.to("cpu", copy=True)) if there else self.payload.cpu()
        return memoryview(blob_of(local).tobytes())

    # Pickles hold always the codec's blob with its checks; the fixed-length form stays out of files.

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"wire": None, "decoded": None}
        made = pack(self.blob).to(self.payload.device) if self.fixed or device.handles(self.payload) else self.payload
        # The pickle contains nothing that autograd noted of the payload.
        state["payload"] = made.detach()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.fixed = False
        self.transcode(fixed=state.get("fixed", False))


# ---- weights that a backward pass needs several times ----------------------------------------------------------------

# A block of Llama-3 8B has 436 MB.
_RECENT_BYTES = {"cpu": 0, "cuda": 1 << 29}


@final
class Recent:
    """The weights that a backward pass decoded last, until it ends: the newest, and more as far as there is room."""

    # A checkpoint decodes a weight for its second forward pass; then its input's gradient asks for it, and its update.

    def __init__(self) -> None:
        self._weights: OrderedDict[int, tuple[torch.Tensor, int | None, torch.Tensor]] = OrderedDict()
        self._nbytes = 0
        # Torch's number of the pass.
        self._pass = -1

    def of(self, payload: torch.Tensor, decode: Callable[[], torch.Tensor], nbytes: int) -> torch.Tensor:
        """The weight of a payload, decoded if it is not here, and kept instead of the oldest ones."""
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._drop()
            self._pass = number
            torch.autograd.Variable._execution_engine.queue_callback(self._drop)
        decoded = self.take(payload)
        self.make_room(nbytes, payload.device)
        if decoded is None:
            decoded = decode()
        self._weights[id(payload)] = payload, device.version_of(payload), decoded
        self._nbytes += decoded.nbytes
        return decoded

    def make_room(self, nbytes: int, place: torch.device) -> None:
        """Let the oldest weights go, so that another of so many bytes may be decoded."""
        while self._weights and self._nbytes + nbytes > _RECENT_BYTES.get(place.type, 0):
            self._nbytes -= self._weights.popitem(last=False)[1][2].nbytes

    def take(self, payload: torch.Tensor) -> torch.Tensor | None:
        """The weight, if it is here and the payload was not written since, for the caller to change."""
        _, version, weight = self._weights.pop(id(payload), (None, None, None))
        self._nbytes -= 0 if weight is None else weight.nbytes
        return weight if version is not None and version == device.version_of(payload) else None

    def _drop(self) -> None:
        self._weights.clear()
        self._nbytes = 0


def recent(place: torch.device) -> Recent:
    """Those of a device, whose backward passes run in a thread of its own; on the CPU those of the thread that asks."""
    return _recent(place, threading.get_ident() if place.type == "cpu" else 0)


@cache
def _recent(place: torch.device, thread: int) -> Recent:
    return Recent()


# ---- payloads --------------------------------------------------------------------------------------------------------


def decode_payload(payload: torch.Tensor, shape: Any, dtype: torch.dtype, fixed: bool) -> torch.Tensor:
    """The weight of a payload, contiguous, on the payload's device."""
    if fixed:
        return fixed_products.decode(payload, *shape)
    if device.handles(payload):
        return device.decoder_of(payload.device).weight(payload)
    if payload.is_cpu:
        return decode_here(payload, shape, dtype)
    return decode_here(payload.cpu(), shape, dtype).to(payload.device)


def decode_here(payload: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """The same of a payload on the CPU."""
    # The pool is for large weights, for which new memory pages would cost more time than decoding.
    if payload.numel() < _MANY:
        dense = fill(torch.empty(shape, dtype=dtype), payload)
    else:
        dense = fill(codec.pooled(math.prod(shape), dtype).view(shape), payload, threads=torch.get_num_threads())
    note_checked(payload)
    return dense


def fill(
    out: torch.Tensor, payload: torch.Tensor, first: int = 0, last: int | None = None, *, threads: int = 1
) -> torch.Tensor:
    """Decode numbers of a payload on the CPU into a tensor of just these; a file's are compared with their checks."""
    return _read(payload, lambda check: codec.fill(out, blob_of(payload), first, last, threads=threads, check=check))


def multiply_payload(
    payload: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    order: SummationOrder,
    out: torch.Tensor,
    threads: int,
) -> None:
    """Fill `out` with the products of inputs and a lossless bf16 payload on the CPU, which is decoded meanwhile."""
    _read(payload, lambda check: multiply_blob(blob_of(payload), x, bias, order, out, threads, check=check))
    note_checked(payload)


def _read(payload: torch.Tensor, read: Callable[[bool], Result]) -> Result:
    """Read a payload on the CPU; whether chunks are to be compared with their checks is the argument of `read`."""
    if not is_unchecked(payload):
        return read(False)
    try:
        return read(True)
    except CorruptBlob as error:
        name = getattr(payload, _NAME, None)
        what = "A weight in a file" if name is None else f"The stored tensor {name!r}"
        raise damaged(what, error) from error


def damaged(what: str, error: CorruptBlob) -> CorruptBlob:
    """The error of stored bytes that are damaged, with what they are."""
    return CorruptBlob(f"{what} is damaged: {error.reason}", cure="Fetch or compress the folder again.")


# ---- payloads that lie in a mapped file ------------------------------------------------------------------------------

# The attribute of such a payload that states whether all of it was compared with its checks.
_CHECKED = "_netweight_checked"
# The attribute of such a payload with the name of its tensor in the file.
_NAME = "_netweight_name"


def in_file(blob: torch.Tensor, name: str) -> torch.Tensor:
    """Make a payload of a lossless blob that lies in a mapped file, without reading it."""
    setattr(blob, _NAME, name)
    return blob


def lies_in_file(payload: torch.Tensor) -> bool:
    """Return whether a payload is a blob alone, which lies in a mapped file or is a copy of such a one."""
    if not payload.is_cpu or payload.numel() < 3 * LENGTH or type(payload) is not torch.Tensor:
        return False
    return _length(_memory(payload.data_ptr(), payload.numel())) > payload.numel()


def is_unchecked(payload: torch.Tensor) -> bool:
    """Return whether a payload on the CPU is still to be compared with its checks while it is decoded."""
    return not getattr(payload, _CHECKED, False) and lies_in_file(payload)


def note_checked(payload: torch.Tensor) -> None:
    """Note that all of a payload was decoded, and so compared with its checks if it was to be."""
    if is_unchecked(payload):
        setattr(payload, _CHECKED, True)


def check_whole(payload: torch.Tensor) -> None:
    """Compare a payload with its checks if it still is to be, in memory of a chunk for each thread."""
    if not is_unchecked(payload):
        return
    info = codec.info(blob_of(payload))
    width, step = torch_dtype(info.dtype).itemsize, torch.get_num_threads() << info.chunk_log2
    numbers = math.prod(info.shape)
    scratch = torch.empty(min(step, numbers) * width, dtype=torch.uint8)
    for first in range(0, numbers, step):
        last = min(first + step, numbers)
        fill(scratch[: (last - first) * width], payload, first, last, threads=torch.get_num_threads())
    note_checked(payload)


def owned(payload: torch.Tensor) -> torch.Tensor:
    """A copy of such a payload in memory of its own, compared with its checks."""
    check_whole(payload)
    return pack(blob_of(payload))


def _nothing() -> None:
    pass


def _memory_on(place: torch.device, nbytes: int, *, lasting: bool) -> torch.Tensor:
    """Memory for a payload."""
    # Torch would cut it from a block that scratch memory left, and the driver would never get the rest.
    if lasting and place.type == "cuda":
        torch.cuda.empty_cache()
    return torch.empty(nbytes, dtype=torch.uint8, device=place)


def threads_for(nbytes: int) -> int:
    """Threads to encode or decode so many bytes with: torch's own number, or one when there is little to do."""
    return torch.get_num_threads() if nbytes >= _MANY else 1


def pack(blob: bytes | memoryview, capacity: int | None = None) -> torch.Tensor:
    """Put a blob into a payload of its own."""
    size = capacity if capacity is not None else _capacity(LENGTH + len(blob))
    payload = torch.empty(size, dtype=torch.uint8)
    _fill(payload, blob)
    return payload


def blob_of(payload: torch.Tensor) -> memoryview:
    """The blob in a payload on the CPU, without a copy; the payload must outlive it."""
    memory = _memory(payload.data_ptr(), payload.numel())
    length = _length(memory)
    return memory if length > len(memory) else memory[LENGTH : LENGTH + length]


def _length(memory: memoryview) -> int:
    """The length before a blob; beyond any memory's if there is none, since a header's seventh byte is never 0."""
    return int.from_bytes(memory[:LENGTH], "little")


def moved(payload: torch.Tensor, to: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
    """Copy a payload, to another device or the same one; what comes to the CPU has its checks."""
    leaves = device.handles(payload) and to.type == "cpu"
    if lies_in_file(payload):
        payload = owned(payload)
    # torch does not count writes of a copy that was made in inference mode.
    with torch.inference_mode(False):
        copy = payload.to(to, non_blocking=non_blocking and to.type != "cpu", copy=True)
    if type(payload) is not torch.Tensor:
        # A compiler's or tracer's tensor does not contain bytes.
        return copy
    if leaves:
        _with_checks(copy)
    if device.handles(payload) or device.handles(copy):
        device.copied(copy, payload)
    return copy


def layout_of(
    weight: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format
) -> tuple[int, ...] | None:
    """The strides that a copy of a dense weight gets, or None if they are those of a contiguous tensor."""
    copy = torch.empty_like(weight, device="meta", memory_format=memory_format)
    return copy.stride() if copy.stride() != torch.empty(copy.shape, device="meta").stride() else None


@lru_cache(4096)
def _memory(address: int, nbytes: int) -> memoryview:
    """Memory of a tensor; unlike `.numpy()` this leaves the tensor's storage resizable."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def _capacity(used: int) -> int:
    return -(-(used + (used >> 8)) // 64) * 64


def _fill(payload: torch.Tensor, blob: bytes | memoryview) -> None:
    memory, used = _memory(payload.data_ptr(), payload.numel()), LENGTH + len(blob)
    memory[:LENGTH] = len(blob).to_bytes(LENGTH, "little")
    memory[LENGTH:used] = blob
    payload[used:].zero_()


def _with_checks(payload: torch.Tensor) -> torch.Tensor:
    """Complete the blob in a payload that came from a device, where weights are encoded without their checks."""
    blob = blob_of(payload)
    try:
        index = read_index(blob)
    except (CorruptBlob, Unsupported):
        # A rounded blob does not have such an index; decoding reports a damaged one.
        return payload
    if len(index.checks) and not index.checks.any():
        whole = cuda.with_checks(payload[LENGTH : LENGTH + len(blob)])
        payload[LENGTH : LENGTH + index.start] = whole[: index.start]  # nothing else changes
    return payload


def _fixed_form(weight: torch.Tensor) -> torch.Tensor | None:
    """A payload in the fixed-length form; None if there is none, or it would not be smaller with room for changes."""
    try:
        payload = encode_fixed(weight)
    except Unsupported:
        return None
    return payload if _capacity(payload.numel()) < weight.nbytes else None


def _encoded(weight: torch.Tensor, level: Level, chunk_log2: int | None, precision: Precision) -> bytes:
    return codec.encode_lossy(
        weight.detach(),
        mantissa_bits=precision.mantissa_bits,
        block_size=precision.block_size,
        fidelity=precision.fidelity,
        level=level,
        chunk_log2=chunk_log2,
        threads=threads_for(weight.nbytes),
    )
