"""Decoding the next layers while the current one computes.

The order is learned as it happens: after weight A came weight B, so the next time A is taken, B is decoded by a
second thread, the codec's own. A changed order costs one decoding and is learned anew. `ops.py` asks here when a
`decode_ahead` block is open.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from netweight.codec import DecodeQueue, Decoding
from netweight.methods.compress.memory.box import blob_of

__all__ = ["Ahead", "current", "decode_ahead"]

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
    """A second thread that decodes what will probably be asked for next; made by `decode_ahead`."""

    def __init__(self, decode: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.hits = 0  # weights that were ready, or on their way, when asked for
        self._decode = decode
        self._queue = DecodeQueue()
        self._lock = threading.Lock()
        self._after: dict[str, WeakIdKeyDictionary] = {
            "forward": WeakIdKeyDictionary(),
            "backward": WeakIdKeyDictionary(),
        }
        self._last: tuple[str, WeakIdRef] | None = None
        self._pending: deque[_Pending] = deque()

    def take(self, payload: torch.Tensor, direction: str) -> torch.Tensor:
        """Give the weight of a payload, decoded by now or on the spot, and begin with its probable successors.

        Args:
            payload: U8 payload on the CPU, shape `(bytes,)`.
            direction: "forward" or "backward": the two orders are learned apart.

        Returns:
            The dense weight, in memory that nobody else uses.

        Raises:
            CorruptBlob: The payload is damaged.
        """
        with self._lock:
            weight = self._collect(payload)
            self._learn(payload, direction)
            self._look_ahead(payload, direction)
            return self._decode(payload) if weight is None else weight

    def _collect(self, payload: torch.Tensor) -> torch.Tensor | None:
        """The pending weight if it is the one asked for and not written since; else nothing is pending afterwards."""
        if self._pending:
            pending = self._pending[0]
            if pending.payload is payload and pending.version == payload._version:
                self._pending.popleft()
                self.hits += 1
                return pending.decoding.result()
        self._forget_pending()
        return None

    def _learn(self, payload: torch.Tensor, direction: str) -> None:
        if self._last is not None:
            before = self._last[1]()
            if before is not None:
                self._after[self._last[0]][before] = (direction, WeakIdRef(payload))
        self._last = (direction, WeakIdRef(payload))

    def _look_ahead(self, payload: torch.Tensor, direction: str) -> None:
        """Have weights decoded that followed the last one that is under way."""
        if self._pending:
            payload, direction = self._pending[-1].payload, self._pending[-1].direction
        while len(self._pending) < _AHEAD:
            following = self._after[direction].get(payload)  # type: ignore[no-untyped-call]
            successor = following[1]() if following is not None else None
            if successor is None:
                return
            payload, direction = successor, following[0]
            self._pending.append(_Pending(payload, direction, payload._version, self._queue.add(blob_of(payload))))

    def _forget_pending(self) -> None:
        for pending in self._pending:
            pending.decoding.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Drop what is pending and end the thread."""
        with self._lock:
            self._forget_pending()
            self._queue.close()


def current() -> Ahead | None:
    """The innermost open block, if there is one."""
    return _open[-1] if _open else None


@contextmanager
def decode_ahead() -> Iterator[Ahead]:
    """Decode the next compressed weights on a second CPU thread while the current layer computes.

    For weights on the CPU. Results do not change by a bit; memory grows by two decoded weights. It pays where a
    processor core is idle during the layer's own calculation: leave it one with `torch.set_num_threads`, or the two
    threads are in each other's way.

    Yields:
        The `Ahead` at work; its `hits` counts weights that were asked for as foreseen.

    Examples:
        >>> with netweight.decode_ahead():  # doctest: +SKIP
        ...     model.generate(**inputs)
    """
    from netweight.methods.compress.memory.ops import decode_now

    ahead = Ahead(decode_now)
    _open.append(ahead)
    try:
        yield ahead
    finally:
        _open.remove(ahead)
        ahead.close()
