"""How far rounded weights are from those they were made of. Used by the audit; it shares no code with the rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["largest_change"]

_BLOCK = 1 << 20  # numbers compared at a time


def largest_change(rounded: Any, original: Any, dtype: str) -> float:
    """Find the largest relative change |rounded - original| / |original|.

    Args:
        rounded: The rounded tensor's bytes: a contiguous buffer.
        original: The original tensor's bytes, as many.
        dtype: safetensors' name of the dtype: "BF16", "F16" or "F32".

    Returns:
        The largest change; infinity if a zero, an infinity or a NaN is not the same bit for bit.
    """
    worst = 0.0
    stored = np.dtype("<u4" if dtype == "F32" else "<u2")
    mine, theirs = np.frombuffer(rounded, stored), np.frombuffer(original, stored)
    for start in range(0, len(mine), _BLOCK):
        left, right = mine[start : start + _BLOCK], theirs[start : start + _BLOCK]
        differ = left != right
        before, after = _values(right[differ], dtype), _values(left[differ], dtype)
        if not np.isfinite(before).all() or not np.isfinite(after).all() or not before.all():
            return math.inf
        worst = max(worst, float((np.abs(after - before) / np.abs(before)).max(initial=0.0)))
    return worst


def _values(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """Numbers as float64, which holds each of them and each difference of two that are close."""
    with np.errstate(invalid="ignore"):  # signaling NaNs
        if dtype == "BF16":
            return (stored.astype("<u4") << 16).view("<f4").astype(np.float64)
        return stored.view("<f4" if dtype == "F32" else "<f2").astype(np.float64)
