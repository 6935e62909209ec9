"""Lines below a slider: what was measured in the pictures at its positions, the wanted change and what comes along.

All sliders of a page share one scale, so that a slider that changes little looks like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from netweight.methods.space.view import Traversal

__all__ = ["scale_of", "traces"]

_HIGH, _COLUMN = 48, 20  # of the drawing: its height, and the width of one position
_NAMED = 2  # lines that have a color and a name; the others are thin


def scale_of(traversals: Sequence[Traversal]) -> tuple[float, float]:
    """Return the least and the largest change of any reading, against the position nearest to 0.

    Args:
        traversals: At least one.
    """
    changes = [change for each in traversals for values in _changes(each).values() for change in values]
    return min(changes, default=0.0), max(changes, default=0.0)


def traces(traversal: Traversal, scale: tuple[float, float]) -> dict[str, Any] | None:
    """Return lines for the page, or None where nothing was measured.

    Args:
        traversal: With its readings.
        scale: From `scale_of`.

    Returns:
        `lines`, the thin ones first: `points` of a polyline, its `place` among the named ones (0 is the attribute that
        the slider is called after, or the one that changes most; None for the others) and `name`; `named`, in order;
        the `width` and `height` of the drawing, the height `zero` of no change, and `alt`, all of it in words.
    """
    changes = _changes(traversal)
    if not changes:
        return None
    low, high = scale
    spread = (high - low) or 1.0

    def height(change: float) -> float:
        return round(2 + (_HIGH - 4) * (high - change) / spread, 1)

    order = sorted(changes, key=lambda name: (name != traversal.name, -np.ptp(changes[name])))
    lines = [
        {
            "points": " ".join(f"{_COLUMN * (i + 0.5):g},{height(value)}" for i, value in enumerate(changes[name])),
            "place": place if place < _NAMED else None,
            "name": name,
        }
        for place, name in enumerate(order)
    ]
    told = "; ".join(f"{name} {changes[name][0]:+.2f} to {changes[name][-1]:+.2f}" for name in order)
    return {
        "lines": lines[::-1],
        "named": order[:_NAMED],
        "width": _COLUMN * len(traversal.strengths),
        "height": _HIGH,
        "zero": height(0.0),
        "alt": f"Measured in the pictures, first to last position, against 0: {told}.".replace("-", "\u2212"),
    }


def _changes(traversal: Traversal) -> dict[str, list[float]]:
    start = int(np.abs(np.array(traversal.strengths)).argmin())
    return {name: [value - values[start] for value in values] for name, values in traversal.readings.items()}
