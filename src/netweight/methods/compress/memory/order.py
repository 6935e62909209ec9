"""The order in which weights are needed, learned as it happens: after weight A came weight B.

A changed order is learned anew. What decodes ahead of time asks here: `ahead.py` on the CPU, `side_stream.py` on GPUs.
"""

from __future__ import annotations

from typing import final

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

__all__ = ["Order"]


@final
class Order:
    """Which payload was asked for after which; forward and backward passes are learned apart."""

    def __init__(self) -> None:
        self._after: dict[str, WeakIdKeyDictionary] = {
            "forward": WeakIdKeyDictionary(),
            "backward": WeakIdKeyDictionary(),
        }
        self._last: tuple[str, WeakIdRef] | None = None

    def learn(self, payload: torch.Tensor, direction: str) -> None:
        """Note that a payload is asked for now.

        Args:
            payload: The payload, U8 of shape `(bytes,)`.
            direction: "forward" or "backward".
        """
        if self._last is not None:
            before = self._last[1]()
            if before is not None:
                self._after[self._last[0]][before] = (direction, WeakIdRef(payload))
        self._last = (direction, WeakIdRef(payload))

    def after(self, payload: torch.Tensor, direction: str) -> tuple[torch.Tensor, str] | None:
        """The payload that came after this one the last time, and its direction; None if nobody knows.

        Args:
            payload: U8, shape `(bytes,)`.
            direction: "forward" or "backward".
        """
        following = self._after[direction].get(payload)  # type: ignore[no-untyped-call]
        successor = following[1]() if following is not None else None
        return None if successor is None else (successor, following[0])
