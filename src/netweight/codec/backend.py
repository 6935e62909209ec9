"""Chooses what runs the codec: the native module, or plain Python where it could not be built.

The Python path gives the same bytes and makes the same checks, a hundred times slower and on one thread. It runs when
the native module is missing, and says so once; or when it is asked for as `path="python"`.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from netweight.errors import CorruptBlob, MissingExtra, Unsupported, UsageError

if TYPE_CHECKING:
    from netweight.codec.rounding import Rounded, Rounding

try:
    from netweight.codec import _native as native
except ImportError:  # no compiler when the package was installed
    native = None  # type: ignore[assignment]

_COMPILER = "Install a C++20 compiler (g++ or clang) and install netweight again."

if native is None and os.environ.get("NETWEIGHT_REQUIRE_NATIVE") == "1":
    raise MissingExtra(
        "The native codec is missing and NETWEIGHT_REQUIRE_NATIVE=1 forbids the Python fallback.", cure=_COMPILER
    )

CORRUPT: tuple[type[Exception], ...] = (CorruptBlob, native.CorruptError) if native else (CorruptBlob,)
UNSUPPORTED: tuple[type[Exception], ...] = (Unsupported, native.UnsupportedError) if native else (Unsupported,)


def paths() -> list[str]:
    """Code paths that `path="auto"` may take, fastest first: those of the native module, or "python" without it."""
    return list(native.paths()) if native else ["python"]


@cache
def _warn_once() -> None:
    warnings.warn(
        f"netweight's codec runs in pure Python, a hundred times slower: the native module is missing. {_COMPILER}",
        RuntimeWarning,
        stacklevel=5,
    )


def _in_python(path: str) -> bool:
    """Whether the Python path is to run; warns once if that is nobody's wish."""
    if path == "python":
        return True
    if path != "auto" and path not in paths():
        available = ", ".join(dict.fromkeys((*paths(), "python")))
        raise UsageError(f"This processor or build has no codec path {path!r}.", cure=f"Choose auto, {available}.")
    if native is None:
        _warn_once()
    return native is None


def encode(buffer: Any, dtype: str, shape: list[int], level: int, chunk_log2: int, threads: int, path: str) -> bytes:
    """Encode a contiguous buffer; level by number, chunk_log2 0 for the default."""
    if _in_python(path):
        from netweight.codec import fallback

        return fallback.encode(buffer, dtype, shape, level, chunk_log2)
    return native.encode(buffer, dtype, shape, level, chunk_log2, threads, path)


def read_header(blob: Any) -> tuple[str, tuple[int, ...], int, int, int, bytes, tuple[int, ...], int]:
    """Read a blob's header.

    Returns:
        Element type, shape, bytes of the tensor, level, chunk_log2, digest, starts of the chunks and the blob's size,
        numbers.
    """
    if native:
        return native.read_header(blob)
    from netweight.codec import reference

    h = reference.read_header(blob)
    return h.element.name, h.shape, h.nbytes, h.level, h.chunk_log2, h.digest, h.chunk_starts, h.numbers


def decode(
    blob: Any, threads: int, check: bool, path: str
) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], str, tuple[int, ...]]:
    """Decode to a new array of bytes; also the name of the element type and the shape."""
    if _in_python(path):
        from netweight.codec import reference

        header = reference.read_header(blob)
        return reference.decode(blob, check=check), header.element.name, header.shape
    return native.decode(blob, threads, check, path)


def decode_into(blob: Any, out: np.ndarray[Any, Any], threads: int, check: bool, path: str) -> None:
    """Decode into an array of bytes.

    Raises:
        ValueError: The array has another size than the tensor.
    """
    if not _in_python(path):
        return native.decode_into(blob, out, threads, check, path)
    from netweight.codec import reference

    expected = reference.read_header(blob).nbytes
    if expected != out.nbytes:
        raise ValueError(f"the output has {out.nbytes} bytes where the tensor has {expected}")
    reference.decode(blob, check=check, out=out)


def decode_to_address(blob: Any, address: int, nbytes: int, threads: int, check: bool, path: str) -> None:
    """Decode to `nbytes` writable bytes at an address; torch tells a tensor's address sooner than it makes an array.

    Raises:
        ValueError: There are not as many bytes as the tensor has.
    """
    if not _in_python(path):
        return native.decode_to_address(blob, address, nbytes, threads, check, path)
    decode_into(blob, memory_at(address, nbytes), threads, check, path)


def memory_at(address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory of the caller's as an array."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def decode_numbers(blob: Any, first: int, last: int, threads: int, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode numbers `first` to `last` (exclusive) to a new array of bytes."""
    if _in_python(path):
        from netweight.codec import reference

        return reference.decode_numbers(blob, first, last)
    return native.decode_numbers(blob, first, last, threads, path)


def encode_words(
    words: np.ndarray[Any, Any], mantissa_bits: int, level: int, chunk_log2: int, threads: int, path: str
) -> bytes:
    """Encode the words of a lossy blob, given as bytes: a U16 blob whose splits are those of floats."""
    if _in_python(path):
        from netweight.codec import fallback

        return fallback.encode(words, "U16", [len(words) // 2], level, chunk_log2, mantissa_bits=mantissa_bits)
    return native.encode_words(words, mantissa_bits, level, chunk_log2, threads, path)


def round_weights(data: np.ndarray[Any, np.dtype[np.uint8]], rounding: Rounding, path: str) -> Rounded:
    """Round weights, given as bytes; the first begins a block."""
    from netweight.codec import rounding as python

    if _in_python(path):
        return python.round_weights(data, rounding)
    element, block = rounding.element, rounding.block_size
    if data.ctypes.data % element.number_bytes:
        data = data.copy()  # numbers lie at odd addresses in some files
    count = len(data) // element.number_bytes
    words, values = np.empty(count, np.uint16), np.empty(len(data), np.uint8)
    normalizers = np.empty(0 if block is None else -(-count // block), np.uint8)
    bound = rounding.bound
    worst, places = native.round_weights(
        data, element.name, rounding.mantissa_bits, block or 0, rounding.fidelity == "reference",
        float(bound.numerator), float(bound.denominator), words, normalizers, values, path,
    )  # fmt: skip
    escapes = np.array(places, np.int64)
    return python.Rounded(words, None if block is None else normalizers, escapes, values, worst)


def decode_words(
    blob: np.ndarray[Any, np.dtype[np.uint8]],
    normalizers: np.ndarray[Any, np.dtype[np.uint8]] | None,
    rounding: Rounding,
    first: int,
    last: int,
    threads: int,
    path: str,
    out: np.ndarray[Any, np.dtype[np.uint8]] | None,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode words `first` to `last` (exclusive) to weights: bytes in `out`, or in a new array.

    `normalizers` are those of the blocks that these weights touch.
    """
    nbytes = (last - first) * rounding.element.number_bytes
    if _in_python(path):
        from netweight.codec import reference
        from netweight.codec import rounding as python

        words = reference.decode_numbers(blob, first, last).view("<u2")
        weights = python.weights_of(words, normalizers, first % (rounding.block_size or 1), rounding)
        if out is None:
            return weights
        out[:] = weights
        return out
    if out is None:
        out = native.pooled_array(nbytes)
    native.decode_words(
        blob, b"" if normalizers is None else normalizers, rounding.element.name, rounding.mantissa_bits,
        rounding.block_size or 0, rounding.fidelity == "reference", first, last, out.ctypes.data, nbytes, threads, path,
    )  # fmt: skip
    return out


def new_queue() -> Any:
    """A thread of the native module that decodes what is added, or None without that module."""
    return native.DecodeQueue() if native else None


def queue_words(
    queue: Any,
    blob: np.ndarray[Any, np.dtype[np.uint8]],
    normalizers: np.ndarray[Any, np.dtype[np.uint8]] | None,
    rounding: Rounding,
) -> Any:
    """Add the words of a whole lossy blob to a queue of `new_queue`; the result are weights."""
    return queue.add_words(
        blob, b"" if normalizers is None else normalizers, rounding.element.name, rounding.mantissa_bits,
        rounding.block_size or 0, rounding.fidelity == "reference",
    )  # fmt: skip


def trim_pool(keep: int) -> None:
    """Return idle output buffers to the system; there are none in Python."""
    if native:
        native.trim_pool(keep)
