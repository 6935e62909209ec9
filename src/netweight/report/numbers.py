"""Formatting of numbers for people."""

from __future__ import annotations

import math
from typing import Any


def format_number(value: Any, digits: int = 4) -> str:
    """Write a cell of a table for people: integers in full, other numbers with at least `digits` significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u2009").replace("-", "\u2212")
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return {"nan": "not a number", "inf": "∞", "-inf": "\u2212∞"}[str(value)]
    if value and not 1e-4 <= abs(value) < 1e7:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa} × 10^{int(exponent)}".replace("-", "\u2212")
    # Digits before the point; for 0.05 it is -2, so that digits are counted from the first that is not 0.
    whole = len(f"{abs(value):.0f}") - 1 if abs(value) >= 1 else int(f"{value:e}".split("e")[1]) if value else 0
    return f"{value:,.{max(0, digits - 1 - whole)}f}".replace(",", "\u2009").replace("-", "\u2212")


def format_target(bound: Any) -> str:
    """Write a target with as many digits as it was set with."""
    plain = f"{bound:.10g}" if isinstance(bound, float) and (bound == 0 or 1e-4 <= abs(bound) < 1e7) else None
    return plain.replace("-", "\u2212") if plain else format_number(bound)


def format_beside(value: Any, target: Any) -> str:
    """Write a value with enough digits to differ from its target: 1.5128 misses 1.513, and is not written as 1.513."""
    bounds = target if isinstance(target, tuple) else (target,)
    if not isinstance(value, float):
        return format_number(value)
    for digits in range(4, 10):
        text = format_number(value, digits)
        if all(bound is None or value == bound or text != format_number(float(bound), digits) for bound in bounds):
            return text
    return repr(value)
