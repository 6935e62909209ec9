"""How numbers are written for people."""

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
