"""JSON from unknown sources: its bytes, its depth and the number of its values are checked before it is parsed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from netweight.core.regular_files import regular

_DEPTH = 100
_BLOCK = 1 << 20  # bytes looked at at a time
# Any text may contain this many values. A parsed value takes up to 64 bytes.
_VALUES_OF_ANY_TEXT = 400_000


def parse_json(text: str | bytes, *, most_values: int | None = None, allowance: int = _VALUES_OF_ANY_TEXT) -> Any:
    """Parse JSON; every refusal is a `ValueError`: too deep, too many values, names given twice, text without UTF-8.

    `most_values`: number of values that it may contain beyond `allowance`; None for as many as its length allows.
    """
    data = text.encode() if isinstance(text, str) else text
    values, depth = _structure(data)
    if depth > _DEPTH:
        raise ValueError(f"it is nested {depth:,} deep, more than {_DEPTH}")
    if most_values is not None and values > allowance + most_values:
        raise ValueError(f"it contains {values:,} values, more than {allowance + most_values:,}")
    escapes = b"\\u" in data
    if isinstance(text, str):
        # This copy of the text may be long.
        del data
    parsed = json.loads(text if isinstance(text, str) else data.decode("utf-8-sig"), object_pairs_hook=unique_fields)
    # An escaped half of a surrogate pair is not text, and cannot be written to a file or be part of a name.
    if escapes:
        json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


MOST_CONFIG = 1 << 24
"""The most bytes of a configuration."""
MOST_INDEX = 1 << 25
"""The most bytes of an index of weights, or of a folder's manifest; that of a model of 140,000 tensors has 15 MB."""


def read_json(path: Path, *, limit: int = MOST_CONFIG, most_values: int | None = 0) -> Any:
    """Read a JSON file of at most `limit` bytes; `most_values` and refusals as in `parse_json`, and `regular`."""
    with open(path, "rb", opener=regular) as file:
        if os.fstat(file.fileno()).st_size > limit or len(data := file.read(limit + 1)) > limit:
            raise ValueError(f"it contains more than {limit:,} bytes")
    return parse_json(data, most_values=most_values)


def read_object(path: Path, *, limit: int = MOST_CONFIG, most_values: int | None = 0) -> dict[str, Any]:
    """Read a JSON file that holds an object, as `read_json` does."""
    parsed = read_json(path, limit=limit, most_values=most_values)
    if not isinstance(parsed, dict):
        raise ValueError(f"it contains a {type(parsed).__name__} instead of an object")
    return parsed


def is_text(name: str) -> bool:
    """Return whether a name can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _structure(data: bytes) -> tuple[int, int]:
    """Bound the number of values, and find the greatest depth, by brackets and commas outside of strings."""
    # Backslashes are removed in pairs from the left. What remains of a run escapes a quote or a letter.
    if b"\\" in data:
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


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, and refuse one that has a name twice, of which one value would be lost."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} was given twice")
    return fields
