"""Decoding the next weights while the current layer computes (`decode_ahead`).

After a weight is taken, those that followed it the last time are decoded; a changed order costs one decoding. On the
CPU a second thread does it, the codec's own. On a GPU it is done on a stream of its own, into memory that layers share.

A device has two streams here: the *computing* one, torch's current stream, and the *side* stream, which decodes. Two
buffers, as large as the largest weight so far, take turns: while a product reads its weight in one, the next weight is
decoded into the other. Who reads what when is kept apart by events only; the host waits for nothing:

- A product begins when its weight is decoded: the computing stream waits for an event of the side stream.
- A buffer is decoded into again when the product that read it is done: the side stream waits for an event of the
  computing stream. So a weight is *lent*, and only kernels borrow (`functional.py`), which keep neither it nor a view
  of it, and give it back; autograd never sees it. Every other reader gets memory of its own.
- A payload is decoded when it is written: for each new version the side stream waits for the computing stream.
- A payload is written, or its memory freed, when it is not read any more: whoever collects or drops what is pending
  has the computing stream wait for it.
- A buffer is freed on the side stream's behalf, after that has waited for the buffer's last reader.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from netweight.codec import DecodeQueue, Decoding
from netweight.errors import OutOfMemory
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.cuda import Decoder, Event
from netweight.methods.compress.runtime.storage import blob_of, decode_payload, is_unchecked

open_blocks: list[Prefetcher] = []  # the innermost last
# Followed by a direction, this is the attribute of a payload that names the next one.
_AFTER = "_netweight_after_"
# With only one weight ahead, a large weight after a small one would be waited for.
_AHEAD = 2


@contextmanager
def decode_ahead() -> Iterator[Prefetcher]:
    """Decode the next compressed weights while the current layer computes: on a second thread, or stream of the GPU.

    Results do not change by a bit; memory grows by two decoded weights, on a GPU by twice its largest. On the CPU it
    pays where a core is idle during the layer's own calculation: leave it one with `torch.set_num_threads`, or the two
    threads are in each other's way. Products of few rows, as in generation, do not use it there: each chunk is decoded
    and multiplied at once. On a GPU weights that only kernels read are decoded ahead; it changes nothing where
    netweight's kernels cannot run (see `netweight doctor`) or a CUDA graph is captured. When the block ends without an
    error, `netweight.check_device` has been called.

    Yields:
        The `Prefetcher` at work; its `hits` counts weights that were asked for as foreseen.

    Examples:
        >>> with netweight.decode_ahead():  # doctest: +SKIP
        ...     model.generate(**inputs)
    """
    prefetcher = Prefetcher()
    open_blocks.append(prefetcher)
    try:
        yield prefetcher
    finally:
        open_blocks.remove(prefetcher)
        prefetcher.close()
    device.check_device()


@final
class Prefetcher:
    """A second thread, and on each device a stream, that decode what will probably be asked for next."""

    def __init__(self) -> None:
        self._hits = 0
        self._queue = DecodeQueue()
        self._lock = threading.Lock()
        self._order = AccessOrder()
        self._pending: deque[_InQueue] = deque()
        self._sides: dict[torch.device, SideStream] = {}

    @property
    def hits(self) -> int:
        """Weights that were ready, or on their way, when asked for."""
        return self._hits + sum(side.hits for side in self._sides.values())

    def lend(self, payload: torch.Tensor, direction: str) -> BorrowedBuffer | None:
        """Lend the weight of a payload on a device, decoded on a stream of its own, and begin with its successor."""
        with self._lock:
            if payload.device not in self._sides:
                self._sides[payload.device] = side_stream_of(payload.device)
            side = self._sides[payload.device]
        return side.lend(payload, direction)

    def take(self, payload: torch.Tensor, shape: Any, dtype: torch.dtype, direction: str) -> torch.Tensor:
        """Give the weight of a payload, decoded by now or on the spot, and begin with its probable successors."""
        with self._lock:
            weight = self._collect(payload)
            self._order.learn(payload, direction)
            self._look_ahead(payload, direction)
            return decode_payload(payload, shape, dtype, False) if weight is None else weight

    def close(self) -> None:
        """Drop what is pending and end the thread; streams of their own let go of their memory."""
        with self._lock:
            self._forget_pending()
            self._queue.close()
            for side in self._sides.values():
                side.close()

    def _collect(self, payload: torch.Tensor) -> torch.Tensor | None:
        """The pending weight if it is the one asked for and not written since; else nothing is pending afterwards."""
        if self._pending:
            pending = self._pending[0]
            if pending.payload is payload and pending.version == payload._version:
                self._pending.popleft()
                self._hits += 1
                return pending.decoding.result()
        self._forget_pending()
        return None

    def _look_ahead(self, payload: torch.Tensor, direction: str) -> None:
        """Have weights decoded that followed the last one that is under way."""
        if self._pending:
            payload, direction = self._pending[-1].payload, self._pending[-1].direction
        while len(self._pending) < _AHEAD:
            following = self._order.after(payload, direction)
            if following is None or is_unchecked(following[0]):
                return
            payload, direction = following
            self._pending.append(_InQueue(payload, direction, payload._version, self._queue.add(blob_of(payload))))

    def _forget_pending(self) -> None:
        for pending in self._pending:
            pending.decoding.cancel()
        self._pending.clear()


@dataclass
class _InQueue:
    """A weight that the second thread decodes."""

    payload: torch.Tensor
    """The payload. The reference keeps its memory alive while it is read."""
    direction: str
    version: int
    decoding: Decoding


@final
class AccessOrder:
    """Order in which payloads are used, learned during passes; forward and backward passes are separate."""

    # What came after a payload in a direction is an attribute of it: a reference to its successor, and its direction.

    def __init__(self) -> None:
        self._last: tuple[Callable[[], torch.Tensor | None], str] | None = None

    def learn(self, payload: torch.Tensor, direction: str) -> None:
        """Record an access."""
        before = None if self._last is None else self._last[0]()
        access = weakref.ref(payload), direction
        if before is not None and self._last is not None:
            setattr(before, _AFTER + self._last[1], access)
        self._last = access

    def after(self, payload: torch.Tensor, direction: str) -> tuple[torch.Tensor, str] | None:
        """The payload that came after this one the last time, and its direction; None if none is known."""
        following, then = getattr(payload, _AFTER + direction, (lambda: None, ""))
        successor = following()
        return None if successor is None else (successor, then)


# ---- a stream of its own ---------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Buffer:
    memory: torch.Tensor | None = None
    in_use: bool = False
    """True while a decoded weight in this buffer is pending or lent."""
    last_read: Event | None = None


@dataclass(slots=True)
class _OnSideStream:
    """A weight that the side stream decodes."""

    payload: torch.Tensor
    """The payload. The reference keeps its memory alive while it is read."""
    direction: str
    version: int
    buffer: _Buffer
    weight: torch.Tensor
    ready: Event


@final
class BorrowedBuffer:
    """A decoded weight that must not be used any more once it is given back, on the stream that was current then."""

    def __init__(self, side: SideStream, buffer: _Buffer, weight: torch.Tensor) -> None:
        self._side, self._buffer = side, buffer
        self.weight = weight

    def give_back(self) -> None:
        """Release the weight, once all that reads it is enqueued on the current stream."""
        self._side._take_back(self._buffer)


@final
class SideStream:
    """Lends the weights of one device and decodes those that will probably be asked for next."""

    # `streams` are `Streams`; tests simulate them, in any order.
    def __init__(self, streams: Any) -> None:
        # Weights that were ready, or being decoded, when they were needed.
        self.hits = 0
        self._streams = streams
        self._order = AccessOrder()
        self._buffers = (_Buffer(), _Buffer())
        self._pending: _OnSideStream | None = None
        # Payload → the version whose writing the side stream has waited for.
        self._written = WeakIdKeyDictionary()
        self._open = True
        self._lock = threading.Lock()
        device.add_reader(self)

    def lend(self, payload: torch.Tensor, direction: str) -> BorrowedBuffer | None:
        """Lend a payload's weight, decoded by now or being decoded, and begin with its probable successor."""
        with self._lock:
            if not self._open or self._streams.captures():
                return None
            pending = self._collect(payload)
            self._order.learn(payload, direction)
            if pending is None:
                pending = self._begin(payload, direction)
            if pending is not None:
                self._streams.wait(pending.ready)
            following = self._order.after(payload, direction)
            try:
                self._pending = None if following is None else self._begin(*following)
            except BaseException:
                if pending is not None:
                    pending.buffer.in_use = False
                raise
        return None if pending is None else BorrowedBuffer(self, pending.buffer, pending.weight)

    def let_go(self, payload: torch.Tensor) -> None:
        """Have the computing stream wait until a payload is not read any more, because it will be written."""
        with self._lock:
            if self._pending is not None and self._pending.payload is payload:
                self._drop()

    def close(self) -> None:
        """Drop what is pending and let go of the buffers."""
        with self._lock:
            self._open = False
            if self._pending is not None:
                self._drop()
            for buffer in self._buffers:
                self._empty(buffer)

    def _collect(self, payload: torch.Tensor) -> _OnSideStream | None:
        """Return the pending weight if it is the requested one and was not written since; otherwise discard it."""
        pending = self._pending
        if pending is None:
            return None
        if pending.payload is not payload or pending.version != payload._version:
            self._drop()
            return None
        self._pending = None
        self.hits += 1
        return pending

    def _drop(self) -> None:
        assert self._pending is not None
        # From here on, its payload may be written or freed.
        self._streams.wait(self._pending.ready)
        self._pending.buffer.in_use = False
        self._pending = None

    def _begin(self, payload: torch.Tensor, direction: str) -> _OnSideStream | None:
        """Decode a payload on the side stream, if there is a buffer for it."""
        nbytes = self._streams.nbytes(payload)
        buffer = next((buffer for buffer in self._buffers if not buffer.in_use), None)
        if nbytes is None or buffer is None or not self._fit(buffer, nbytes):
            return None
        assert buffer.memory is not None
        self._await_last_read(buffer)
        version = payload._version
        if self._written.get(payload) != version:  # type: ignore[no-untyped-call]
            self._streams.wait_aside(self._streams.mark())
            self._written[payload] = version
        try:
            weight = self._streams.decode_aside(payload, buffer.memory)
        except (torch.OutOfMemoryError, OutOfMemory):
            # A rounded weight takes more memory than its buffer.
            return None
        buffer.in_use = True
        return _OnSideStream(payload, direction, version, buffer, weight, self._streams.mark_aside())

    def _fit(self, buffer: _Buffer, nbytes: int) -> bool:
        """Make a buffer large enough; False if the device has no memory for it."""
        if buffer.memory is None or buffer.memory.numel() < nbytes:
            self._empty(buffer)
            try:
                buffer.memory = self._streams.allocate(nbytes)
            except torch.OutOfMemoryError:
                # Decoding when the weight is needed takes less memory.
                return False
        return True

    def _take_back(self, buffer: _Buffer) -> None:
        with self._lock:
            buffer.last_read = self._streams.mark()
            buffer.in_use = False
            if not self._open:
                self._empty(buffer)

    def _empty(self, buffer: _Buffer) -> None:
        """Free a buffer's memory, unless it is lent."""
        if not buffer.in_use:
            self._await_last_read(buffer)
            buffer.memory = None

    def _await_last_read(self, buffer: _Buffer) -> None:
        if buffer.last_read is not None:
            self._streams.wait_aside(buffer.last_read)
            buffer.last_read = None


@final
class Streams:
    """The computing and the side stream of a CUDA device. Every call enqueues work, and waits for nothing."""

    def __init__(self, of: torch.device, decoder: Decoder) -> None:
        self._device, self._decoder = of, decoder
        self._side: Any = torch.cuda.Stream(of)  # type: ignore[no-untyped-call]

    def captures(self) -> bool:
        """Return whether the stream is being captured into a graph, which must not wait for another stream."""
        return torch.cuda.is_current_stream_capturing()

    def mark(self) -> Event:
        """An event that comes when all work enqueued on the computing stream so far is done."""
        return torch.cuda.current_stream(self._device).record_event()

    def mark_aside(self) -> Event:
        """The same of the side stream."""
        return self._side.record_event()

    def wait(self, event: Event) -> None:
        """Make later work of the computing stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def wait_aside(self, event: Event) -> None:
        """Make later work of the side stream wait for an event."""
        self._side.wait_event(event)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """U8 memory of the side stream's: once freed, later work of that stream may use it."""
        with torch.cuda.stream(self._side), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def nbytes(self, payload: torch.Tensor) -> int | None:
        """Bytes of a payload's weight, if it can be decoded without waiting."""
        return self._decoder.nbytes(payload)

    def decode_aside(self, payload: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Decode a payload into memory on the side stream."""
        with torch.cuda.stream(self._side):
            return self._decoder.weight(payload, memory)


def side_stream_of(of: torch.device) -> SideStream:
    """A side stream for a CUDA device on which kernels run."""
    return SideStream(Streams(of, device.decoder_of(of)))
