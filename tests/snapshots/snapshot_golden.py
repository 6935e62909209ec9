"""What a snapshot keeps of a JSON value, and how another value is held to it.

A leaf that differs between two runs, or belongs to the machine or to prose, is kept as its type alone: "~number",
"~str", "~list", "~dict". Everything else must come back: all keys (there may be more), as many elements, equal text and
integers, and floats up to a relative error that is far above rounding and far below any change of method.
"""

import math
import re

TOLERANCE = 1e-4
SMALLEST = 1e-6  # below it floats are zero for their purpose
MACHINE = {"environment", "created", "command", "load", "installed", "missing", "install", "state", "seconds"}
PROSE = {"message", "cure", "reason", "text", "note", "notes", "differs", "title"}
SENTENCE = re.compile(r".+ .+\.", re.DOTALL)


def kind(value):
    """The placeholder for a value."""
    if value is None:
        return "~any"
    if isinstance(value, bool):
        return "~bool"
    for name, types in (("number", (int, float)), ("str", str), ("list", list), ("dict", dict)):
        if isinstance(value, types):
            return f"~{name}"
    raise TypeError(f"no JSON: {value!r}")


def masked(first, second):
    """What is kept of a value that came out twice."""
    if kind(first) != kind(second):
        return "~any"
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return "~dict"
        return {
            key: kind(value) if key in MACHINE | PROSE or _computed(key, value) else masked(value, second[key])
            for key, value in first.items()
        }
    if isinstance(first, list):
        return [masked(*pair) for pair in zip(first, second, strict=True)] if len(first) == len(second) else "~list"
    prose = isinstance(first, str) and SENTENCE.fullmatch(first)
    return kind(first) if prose or list(differences(first, second)) else first


def _computed(key, value):
    """Whether it is the digest of computed weights, whose last bits are the processor's."""
    return key == "after" and isinstance(value, str)


def differences(kept, found, at="", tolerance=TOLERANCE):
    """Where a value is not what was kept, one sentence each."""
    if isinstance(kept, str) and kept.startswith("~"):
        if kept != "~any" and kind(found) != kept:
            yield f"{at}: {found!r} is no {kept[1:]}"
    elif isinstance(kept, dict) and isinstance(found, dict):
        for key, value in kept.items():
            if key in found:
                yield from differences(value, found[key], f"{at}/{key}", tolerance)
            else:
                yield f"{at}/{key}: is missing"
    elif isinstance(kept, list) and isinstance(found, list):
        if len(kept) != len(found):
            yield f"{at}: {len(found)} elements, not {len(kept)}"
        for place, pair in enumerate(zip(kept, found, strict=False)):
            yield from differences(*pair, f"{at}/{place}", tolerance)
    elif not _same(kept, found, tolerance):
        yield f"{at}: {found!r}, not {kept!r}"


def _same(kept, found, tolerance):
    if isinstance(kept, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        if math.isnan(kept):
            return math.isnan(found)
        return math.isclose(kept, found, rel_tol=tolerance, abs_tol=SMALLEST * min(1, tolerance / TOLERANCE))
    return type(kept) is type(found) and kept == found
