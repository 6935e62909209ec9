"""Decoding the next layer while the current one computes.

The order is learned as it happens: after weight A came weight B, so the next time A is taken, B is decoded by a
second thread (the codec lets go of the interpreter). A changed order costs one decoding and is learned anew. At most
two decoded weights are alive: the one in use and the next. `ops.py` asks here when a `decode_ahead` block is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import final

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

__all__ = ["Ahead", "current", "decode_ahead"]

_open: list[Ahead] = []


@final
class Ahead:
    """A second thread that decodes what will probably be asked for next; made by `decode_ahead`."""

    def __init__(self, decode: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.hits = 0  # weights that were ready, or on their way, when asked for
        self._decode = decode
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="netweight-decode")
        self._lock = threading.Lock()
        self._after: dict[str, WeakIdKeyDictionary] = {
            "forward": WeakIdKeyDictionary(),
            "backward": WeakIdKeyDictionary(),
        }
        self._last: tuple[str, WeakIdRef] | None = None
        self._pending: tuple[torch.Tensor, int, Future[torch.Tensor]] | None = None

    def take(self, payload: torch.Tensor, direction: str) -> torch.Tensor:
        """Give the weight of a payload, decoded by now or on the spot, and begin with its probable successor.

        Args:
            payload: U8 payload on the CPU.
            direction: "forward" or "backward": the two orders are learned apart.

        Returns:
            The dense weight, in memory that nobody else uses.
        """
        with self._lock:
            weight = self._collect(payload)
            if weight is None:
                weight = self._decode(payload)
            if self._last is not None:
                before = self._last[1]()
                if before is not None:
                    self._after[self._last[0]][before] = (direction, WeakIdRef(payload))
            self._last = (direction, WeakIdRef(payload))
            following = self._after[direction].get(payload)  # type: ignore[no-untyped-call]
            successor = following[1]() if following is not None else None
            if successor is not None:
                version = successor._version
                self._pending = (successor, version, self._worker.submit(self._decode, successor))
            return weight

    def _collect(self, payload: torch.Tensor) -> torch.Tensor | None:
        """The pending weight if it is the one asked for and not written since; afterwards nothing is pending."""
        if self._pending is None:
            return None
        (expected, version, future), self._pending = self._pending, None
        if expected is payload and payload._version == version:
            self.hits += 1
            return future.result()
        if not future.cancel():  # wait for it, so that there are never three decoded weights
            future.exception()
        return None

    def close(self) -> None:
        """Drop what is pending and end the thread."""
        with self._lock:
            self._pending = None
        self._worker.shutdown(wait=True, cancel_futures=True)


def current() -> Ahead | None:
    """The innermost open block, if there is one."""
    return _open[-1] if _open else None


@contextmanager
def decode_ahead() -> Iterator[Ahead]:
    """Decode the next compressed weight on a second CPU thread while the current layer computes.

    For weights on the CPU. Results do not change by a bit; memory grows by one decoded weight. It pays where a
    processor core is idle during the layer's own calculation.

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
