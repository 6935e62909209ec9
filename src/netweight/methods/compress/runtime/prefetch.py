"""Decoding the next layers while the current one computes.

After a weight is taken, those that followed it the last time (`order.py`) are decoded: on the CPU by a second thread,
the codec's own; on a GPU on a stream of its own (`side_stream.py`). A changed order costs one decoding. `ops.py` asks
here when a `decode_ahead` block is open.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch

from netweight.codec import DecodeQueue, Decoding
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.side_stream import Loan, SideStream, side_stream_of
from netweight.methods.compress.runtime.storage import Order, blob_of

_open: list[Ahead] = []
_AHEAD = 2  # weights: with one, the wait for a large weight after a small one is not hidden


@dataclass
class _Pending:
    """A weight that is on its way."""

    payload: torch.Tensor  # kept, because its memory is being read
    direction: str
    version: int
    decoding: Decoding


@final
class Ahead:
    """A second thread, or stream, that decodes what will probably be asked for next; made by `decode_ahead`."""

    def __init__(self, decode: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._hits = 0
        self._decode = decode
        self._queue = DecodeQueue()
        self._lock = threading.Lock()
        self._order = Order()
        self._pending: deque[_Pending] = deque()
        self._sides: dict[torch.device, SideStream] = {}

    @property
    def hits(self) -> int:
        """Weights that were ready, or on their way, when asked for."""
        return self._hits + sum(side.hits for side in self._sides.values())

    def lend(self, payload: torch.Tensor, direction: str) -> Loan | None:
        """Lend the weight of a payload on a device, decoded on a stream of its own, and begin with its successor."""
        with self._lock:
            if payload.device not in self._sides:
                self._sides[payload.device] = side_stream_of(payload.device)
            side = self._sides[payload.device]
        return side.lend(payload, direction)

    def take(self, payload: torch.Tensor, direction: str) -> torch.Tensor:
        """Give the weight of a payload, decoded by now or on the spot, and begin with its probable successors."""
        with self._lock:
            weight = self._collect(payload)
            self._order.learn(payload, direction)
            self._look_ahead(payload, direction)
            return self._decode(payload) if weight is None else weight

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
            if following is None:
                return
            payload, direction = following
            self._pending.append(_Pending(payload, direction, payload._version, self._queue.add(blob_of(payload))))

    def _forget_pending(self) -> None:
        for pending in self._pending:
            pending.decoding.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Drop what is pending and end the thread; streams of their own let go of their memory."""
        with self._lock:
            self._forget_pending()
            self._queue.close()
            for side in self._sides.values():
                side.close()


def current() -> Ahead | None:
    """The innermost open block, if there is one."""
    return _open[-1] if _open else None


@contextmanager
def decode_ahead() -> Iterator[Ahead]:
    """Decode the next compressed weights while the current layer computes: on a second thread, or stream of the GPU.

    Results do not change by a bit; memory grows by two decoded weights, on a GPU by twice its largest. On the CPU it
    pays where a core is idle during the layer's own calculation: leave it one with `torch.set_num_threads`, or the two
    threads are in each other's way. On a GPU weights that only kernels read are decoded ahead; it changes nothing where
    netweight's kernels cannot run (see `netweight doctor`) or a CUDA graph is captured. When the block ends without an
    error, `netweight.check_device` has been called.

    Yields:
        The `Ahead` at work; its `hits` counts weights that were asked for as foreseen.

    Examples:
        >>> with netweight.decode_ahead():  # doctest: +SKIP
        ...     model.generate(**inputs)
    """
    from netweight.methods.compress.runtime.ops import decode_now

    ahead = Ahead(decode_now)
    _open.append(ahead)
    try:
        yield ahead
    finally:
        _open.remove(ahead)
        ahead.close()
    device.check_device()
