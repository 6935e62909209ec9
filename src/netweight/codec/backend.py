"""Choice of the codec's backend: the native module, or numpy where that was not built or `path="python"` asks for it.

Both are modules with the functions of `Codec`, so that a call reads `codec_for(path).encode(…)`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Any, Protocol

from netweight.codec.header import Bytes
from netweight.errors import CorruptBlob, MissingExtra, Unsupported, UsageError

try:
    import netweight.codec._native as native
except ImportError:
    # No compiler was available when the package was installed.
    native = None  # type: ignore[assignment]

_COMPILER = "Install a C++20 compiler (g++ or clang) and install netweight again."

if native is None and os.environ.get("NETWEIGHT_REQUIRE_NATIVE") == "1":
    raise MissingExtra(
        "The native codec is missing and NETWEIGHT_REQUIRE_NATIVE=1 forbids the Python fallback.", cure=_COMPILER
    )

_CORRUPT: tuple[type[Exception], ...] = (CorruptBlob, native.CorruptError) if native else (CorruptBlob,)
_UNSUPPORTED: tuple[type[Exception], ...] = (Unsupported, native.UnsupportedError) if native else (Unsupported,)


class Codec(Protocol):
    """The functions of either module; `numpy_codec` says what each does."""

    def paths(self) -> list[str]: ...
    def trim_pool(self, keep: int, /) -> None: ...
    def pooled_array(self, size: int, /) -> Bytes: ...
    def check_of(self, buffer: Any, /) -> int: ...
    def encode(
        self, buffer: Any, dtype: str, shape: Sequence[int], level: int, chunk_log2: int, threads: int, path: str,
        base: Any = ..., gpu_modes: bool = ..., /,
    ) -> bytes: ...  # fmt: skip
    def encode_chunk(
        self, numbers: Any, dtype: str, level: int, path: str, base: Any = ..., /
    ) -> tuple[bytes, int, int, bool]: ...
    def encode_words(
        self, words: Any, mantissa_bits: int, level: int, chunk_log2: int, threads: int, path: str,
        gpu_modes: bool = ..., /,
    ) -> bytes: ...  # fmt: skip
    def read_header(
        self, blob: Any, size: int | None = ..., /
    ) -> tuple[str, tuple[int, ...], int, int, int, bytes, tuple[int, ...], int, bytes]: ...
    def decode(
        self, blob: Any, threads: int, check: bool, path: str, base: Any = ..., /
    ) -> tuple[Bytes, str, tuple[int, ...]]: ...
    def decode_to_address(
        self, blob: Any, address: int, nbytes: int, threads: int, check: bool, path: str, base: Any = ...,
        first: int = ..., last: int | None = ..., /,
    ) -> None: ...  # fmt: skip
    def decode_numbers(
        self, blob: Any, first: int, last: int, threads: int, check: bool, path: str, base: Any = ..., /
    ) -> Bytes: ...
    def decode_chunk(
        self, header: Any, size: int, number: int, chunk: Any, out: Any, check: bool, path: str, base: Any = ..., /
    ) -> None: ...
    def round_weights(
        self, data: Any, dtype: str, mantissa_bits: int, block: int, reference: bool, numerator: float,
        denominator: float, words: Any, normalizers: Any, out: Any, path: str, /,
    ) -> tuple[float, list[int]]: ...  # fmt: skip
    def decode_words(
        self, blob: Any, normalizers: Any, dtype: str, mantissa_bits: int, block: int, reference: bool, first: int,
        last: int, address: int, nbytes: int, threads: int, path: str, /,
    ) -> None: ...  # fmt: skip


def _in_python() -> Codec:
    # The module is seldom needed, and importing the codec is faster without it.
    from netweight.codec import numpy_codec

    return numpy_codec


best: Codec = native if native else _in_python()
# The native module with its further functions; None if it could not be built.
compiled: Any = native


@cache
def _warn_once() -> None:
    warnings.warn(
        f"netweight's codec runs in pure Python, a hundred times slower: the native module is missing. {_COMPILER}",
        RuntimeWarning,
        stacklevel=4,
    )


def codec_for(path: str) -> Codec:
    """The module that runs a code path; warns once if that is Python and was not asked for."""
    if path == "python":
        return _in_python()
    if path != "auto" and path not in best.paths():
        available = ", ".join(dict.fromkeys((*best.paths(), "python")))
        raise UsageError(f"This processor or build has no codec path {path!r}.", cure=f"Choose auto, {available}.")
    if native is None:
        _warn_once()
    return best


def new_queue() -> Any:
    """A thread of the native module that decodes what is added, or None without that module."""
    return native.DecodeQueue() if native else None


class in_our_words:
    """Turns the modules' errors into the library's. A class, because a generator costs as much as a small tensor."""

    def __init__(self, what: str, *parts: object) -> None:
        self.what, self.parts = what, parts

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        reason, what = getattr(error, "reason", error), self.what % self.parts
        if isinstance(error, _CORRUPT):
            cure = "Fetch or compress the file again; its bytes were damaged."
            raise CorruptBlob(f"Cannot decode {what}: {reason}.", cure=cure) from error
        if isinstance(error, _UNSUPPORTED):
            cure = "Update netweight, or use another element type."
            raise Unsupported(f"Cannot handle {what}: {reason}.", cure=cure) from error
        if isinstance(error, ValueError):
            raise UsageError(f"Cannot handle {what}: {reason}.") from error
