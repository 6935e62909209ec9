"""JSON of strangers, read within bounds: bytes, depth and the number of values are checked before it is parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_DEPTH = 100
_BLOCK = 1 << 20  # bytes looked at at a time
_FREE = 400_000  # values that any text may hold; a parsed value takes up to 64 bytes


def parse_json(text: str | bytes, *, most: int | None = None) -> Any:
    """Parse JSON; every refusal is a `ValueError`: too deep, too many values, names given twice, text without UTF-8."""
    # `most`: values it may hold beyond 400,000; None for as many as its own length allows
    data = text.encode() if isinstance(text, str) else text
    values, depth = _structure(data)
    if depth > _DEPTH:
        raise ValueError(f"it is nested {depth:,} deep, more than {_DEPTH}")
    if most is not None and values > _FREE + most:
        raise ValueError(f"it holds {values:,} values, more than {_FREE + most:,}")
    parsed = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    if b"\\u" in data:  # an escaped half of a surrogate pair is no text: nothing could be named or written so
        json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


def read_json(path: Path, *, limit: int) -> Any:
    """Read a JSON file of at most `limit` bytes; refusals as `parse_json`."""
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it holds more than {limit:,} bytes")
    return parse_json(data)


def read_object(path: Path, *, limit: int) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    parsed = read_json(path, limit=limit)
    if not isinstance(parsed, dict):
        raise ValueError(f"it holds a {type(parsed).__name__} where an object belongs")
    return parsed


def is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _structure(data: bytes) -> tuple[int, int]:
    """Bound the number of values, and find the greatest depth, by brackets and commas outside of strings."""
    if b"\\" in data:  # pairs from the left; what is left of a run stands before a quote, or before a letter
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    values, depth, deepest, inside = 1, 0, 0, 0
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        # The bytes that matter, few of many: " , [ ] { }
        marks = block[_MARKS[block]]
        quotes = np.cumsum(marks == ord('"'), dtype=np.int32) + inside
        inside = int(quotes[-1]) & 1 if len(quotes) else inside
        marks = marks[quotes & 1 == 0]
        steps = _STEPS[marks]
        values += int(np.count_nonzero(steps > 0)) + int(np.count_nonzero(marks == ord(",")))
        levels = np.cumsum(steps, dtype=np.int32) + depth
        if len(levels):
            deepest, depth = max(deepest, int(levels.max())), int(levels[-1])
    return values, deepest


_MARKS = np.isin(np.arange(256), np.frombuffer(b'",[]{}', np.uint8))
_STEPS = np.zeros(256, np.int8)
_STEPS[np.frombuffer(b"[{", np.uint8)] = 1
_STEPS[np.frombuffer(b"]}", np.uint8)] = -1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return fields
