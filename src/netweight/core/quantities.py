"""Numbers as people write them: bytes in kB, MB and GB, counts in thousands and millions, times, percent."""

from __future__ import annotations

_BYTES = ("bytes", "kB", "MB", "GB", "TB")
_COUNTS = ("", "thousand", "million", "billion", "trillion")


def size(nbytes: float) -> str:
    """Return a number of bytes with three significant digits, such as "1.26 GB" (1 GB is 10^9 bytes).

    Args:
        nbytes: Bytes, at least 0.
    """
    if nbytes == 1:
        return "1 byte"
    return _scaled(nbytes, _BYTES)


def count(number: float) -> str:
    """Return a count with three significant digits, such as "494 million"; below 10,000 exactly.

    Args:
        number: The count, at least 0.
    """
    return f"{int(number):,}" if number < 10_000 else _scaled(number, _COUNTS)


def duration(seconds: float) -> str:
    """Return a time with two significant digits: "40 s", "12 min", "3.5 h".

    Args:
        seconds: The time, at least 0.
    """
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length * 0.995:
            return f"{float(f'{seconds / length:.2g}'):g} {unit}"
    return f"{float(f'{seconds:.2g}'):g} s"


def percent(share: float) -> str:
    """Return a share as percent, such as "35 %"; below 10 % with one digit more.

    Args:
        share: The share, usually between 0 and 1.
    """
    value = 100 * share
    if 0 < abs(value) < 0.05:
        return "< 0.1 %" if value > 0 else "> -0.1 %"
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def many(number: int, singular: str, plural: str = "") -> str:
    """Return a count and its noun, such as "1 file" and "2 files".

    Args:
        number: The count.
        singular: The noun for one.
        plural: The noun for several; `singular` and an s by default.
    """
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def _scaled(number: float, units: tuple[str, ...]) -> str:
    step = 0
    while number >= 999.5 and step < len(units) - 1:
        number, step = number / 1000, step + 1
    digits = 0 if step == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {units[step]}".rstrip()
