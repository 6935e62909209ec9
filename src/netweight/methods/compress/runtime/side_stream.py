"""Decoding the next weight on a stream of its own while the current layer computes, into memory that layers share.

A device has two streams here: the *computing* one, torch's current stream, and the *side* stream, which decodes. Two
rooms, as large as the largest weight so far, take turns: while a product reads its weight in one, the next weight is
decoded into the other. Who reads what when is kept apart by events only; the host waits for nothing:

- A product begins when its weight is decoded: the computing stream waits for an event of the side stream.
- A room is decoded into again when the product that read it is done: the side stream waits for an event of the
  computing stream. So a weight is *lent*, and only products borrow (`compute.py`), which keep neither it nor a view of
  it, and give it back; autograd never sees it. Every other reader gets memory of its own.
- A payload is decoded when it is written: for each new version the side stream waits for the computing stream.
- A payload is written, or its memory freed, when it is not read any more: whoever collects or drops what is pending
  has the computing stream wait for it.
- A room is freed on the side stream's behalf, after that has waited for the room's last reader.
"""

# `Machine` is what a device must do for this; tests put a simulated one in its place that runs its streams in any
# order. `ahead.py` makes a `SideStream` for each device while a `decode_ahead` block is open.

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from netweight.errors import OutOfMemory
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.cuda import Decoder, Event
from netweight.methods.compress.runtime.storage import Order


class Machine(Protocol):
    """A device with a computing and a side stream. All of it asks, and waits for nothing."""

    def captures(self) -> bool:
        """Whether the computing stream is being captured into a graph, so that no other stream may be waited for."""

    def mark(self) -> Event:
        """An event that comes when all is done that the computing stream was asked so far."""

    def mark_aside(self) -> Event:
        """The same of the side stream."""

    def wait(self, event: Any) -> None:
        """Have what the computing stream is asked from now on wait for an event."""

    def wait_aside(self, event: Any) -> None:
        """Have what the side stream is asked from now on wait for an event."""

    def room(self, nbytes: int) -> torch.Tensor:
        """U8 memory of the side stream's: once freed, it may be used for what that stream is asked afterwards."""

    def nbytes(self, payload: torch.Tensor) -> int | None:
        """Bytes of a payload's weight, if it can be decoded without waiting."""

    def decode_aside(self, payload: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Decode a payload into a room on the side stream."""


@dataclass(eq=False, slots=True)
class _Room:
    memory: torch.Tensor | None = None
    taken: bool = False  # a weight is pending or lent in it
    last_read: Event | None = None


@dataclass(slots=True)
class _Pending:
    """A weight that is on its way."""

    payload: torch.Tensor  # kept, because its memory is being read
    direction: str
    version: int
    room: _Room
    weight: torch.Tensor
    ready: Event


@final
class Loan:
    """A decoded weight that must not be used any more once it is given back, on the stream that was current then."""

    def __init__(self, side: SideStream, room: _Room, weight: torch.Tensor) -> None:
        self._side, self._room = side, room
        self.weight = weight

    def give_back(self) -> None:
        """Say that all that reads the weight has been asked of the current stream."""
        self._side._take_back(self._room)


@final
class SideStream:
    """Lends the weights of one device and decodes those that will probably be asked for next."""

    def __init__(self, machine: Machine) -> None:
        self.hits = 0  # weights that were ready, or on their way, when asked for
        self._machine = machine
        self._order = Order()
        self._rooms = (_Room(), _Room())
        self._pending: _Pending | None = None
        self._written = WeakIdKeyDictionary()  # payload -> version whose writing the side stream has waited for
        self._open = True
        self._lock = threading.Lock()
        device.reads(self)

    def lend(self, payload: torch.Tensor, direction: str) -> Loan | None:
        """Lend a payload's weight, decoded by now or being decoded, and begin with its probable successor."""
        with self._lock:
            if not self._open or self._machine.captures():
                return None
            pending = self._collect(payload)
            self._order.learn(payload, direction)
            if pending is None:
                pending = self._begin(payload, direction)
            if pending is not None:
                self._machine.wait(pending.ready)
            following = self._order.after(payload, direction)
            try:
                self._pending = None if following is None else self._begin(*following)
            except BaseException:
                if pending is not None:
                    pending.room.taken = False
                raise
        return None if pending is None else Loan(self, pending.room, pending.weight)

    def let_go(self, payload: torch.Tensor) -> None:
        """Have the computing stream wait until a payload is not read any more, because it will be written."""
        with self._lock:
            if self._pending is not None and self._pending.payload is payload:
                self._drop()

    def close(self) -> None:
        """Drop what is pending and let go of the rooms."""
        with self._lock:
            self._open = False
            if self._pending is not None:
                self._drop()
            for room in self._rooms:
                self._empty(room)

    def _collect(self, payload: torch.Tensor) -> _Pending | None:
        """What is pending if it is what is asked for and was not written since; else nothing is pending afterwards."""
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
        self._machine.wait(self._pending.ready)  # its payload may be written or freed from now on
        self._pending.room.taken = False
        self._pending = None

    def _begin(self, payload: torch.Tensor, direction: str) -> _Pending | None:
        """Decode a payload on the side stream, if there is a room for it."""
        nbytes = self._machine.nbytes(payload)
        room = next((room for room in self._rooms if not room.taken), None)
        if nbytes is None or room is None or not self._fit(room, nbytes):
            return None
        assert room.memory is not None
        if room.last_read is not None:
            self._machine.wait_aside(room.last_read)
            room.last_read = None
        version = payload._version
        if self._written.get(payload) != version:  # type: ignore[no-untyped-call]
            self._machine.wait_aside(self._machine.mark())
            self._written[payload] = version
        try:
            weight = self._machine.decode_aside(payload, room.memory)
        except (torch.OutOfMemoryError, OutOfMemory):
            return None  # a rounded weight takes more memory than its room
        room.taken = True
        return _Pending(payload, direction, version, room, weight, self._machine.mark_aside())

    def _fit(self, room: _Room, nbytes: int) -> bool:
        """Make a room large enough; False if the device has no memory for it."""
        if room.memory is None or room.memory.numel() < nbytes:
            self._empty(room)
            try:
                room.memory = self._machine.room(nbytes)
            except torch.OutOfMemoryError:
                return False  # decoded when it is needed, which takes less memory
        return True

    def _take_back(self, room: _Room) -> None:
        with self._lock:
            room.last_read = self._machine.mark()
            room.taken = False
            if not self._open:
                self._empty(room)

    def _empty(self, room: _Room) -> None:
        """Free a room's memory, unless it is lent."""
        if room.taken:
            return
        if room.last_read is not None:
            self._machine.wait_aside(room.last_read)
            room.last_read = None
        room.memory = None


@final
class _Cuda:
    """A CUDA device."""

    def __init__(self, of: torch.device, decoder: Decoder) -> None:
        self._device, self._decoder = of, decoder
        self._side: Any = torch.cuda.Stream(of)  # type: ignore[no-untyped-call]

    def captures(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def mark(self) -> Event:
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def mark_aside(self) -> Event:
        event: Event = self._side.record_event()
        return event

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def wait_aside(self, event: Any) -> None:
        self._side.wait_event(event)

    def room(self, nbytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._side), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def nbytes(self, payload: torch.Tensor) -> int | None:
        return self._decoder.nbytes(payload)

    def decode_aside(self, payload: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._side):
            return self._decoder.weight(payload, room)


def side_stream_of(of: torch.device) -> SideStream:
    """A side stream for a CUDA device on which kernels run."""
    return SideStream(_Cuda(of, device.decoder_of(of)))
