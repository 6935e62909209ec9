"""Chooses what runs the codec: the native module, or plain Python where it could not be built."""

from __future__ import annotations

import os
import warnings
from typing import Any

from netweight.errors import MissingExtra, Unsupported

try:
    from netweight.codec import _native as native
except ImportError:  # no compiler when the package was installed
    native = None  # type: ignore[assignment]

if native is None and os.environ.get("NETWEIGHT_REQUIRE_NATIVE") == "1":
    raise MissingExtra(
        "The native codec is missing and NETWEIGHT_REQUIRE_NATIVE=1 forbids the Python fallback.",
        cure="Install a C++20 compiler and reinstall netweight.",
    )


class _Never(Exception):
    """Stands in for the native module's exceptions where there is no native module."""


CORRUPT: type[Exception] = native.CorruptError if native else _Never
UNSUPPORTED: type[Exception] = native.UnsupportedError if native else _Never


def paths() -> list[str]:
    """Code paths that run here, fastest first."""
    return native.paths() if native else []


def encode(buffer: Any, dtype: str, shape: list[int], level: int, chunk_log2: int, threads: int, path: str) -> bytes:
    return native.encode(buffer, dtype, shape, level, chunk_log2, threads, path)


def read_header(blob: Any) -> tuple[Any, ...]:
    return native.read_header(blob)


def decode(blob: Any, threads: int, check: bool, path: str) -> Any:
    return native.decode(blob, threads, check, path)


def decode_into(blob: Any, out: Any, threads: int, check: bool, path: str) -> None:
    native.decode_into(blob, out, threads, check, path)


def decode_numbers(blob: Any, first: int, last: int, threads: int, path: str) -> Any:
    return native.decode_numbers(blob, first, last, threads, path)


def trim_pool(keep: int) -> None:
    if native:
        native.trim_pool(keep)
