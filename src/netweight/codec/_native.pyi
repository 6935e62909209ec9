from collections.abc import Sequence
from typing import Any

import numpy as np

class CorruptError(ValueError): ...
class UnsupportedError(ValueError): ...

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

def encode(
    tensor: Any,
    dtype: str,
    shape: Sequence[int],
    level: int,
    chunk_log2: int,
    threads: int,
    path: str,
    base: Any = None,
    gpu_modes: bool = False,
) -> bytes: ...
def encode_chunk(numbers: Any, dtype: str, level: int, path: str, base: Any = None) -> tuple[bytes, int, int, bool]: ...
def read_header(
    blob: Any, size: int | None = None
) -> tuple[str, tuple[int, ...], int, int, int, bytes, tuple[int, ...], int, bytes]: ...
def decode(
    blob: Any, threads: int, check: bool, path: str, base: Any = None
) -> tuple[_Bytes, str, tuple[int, ...]]: ...
def decode_to_address(
    blob: Any,
    address: int,
    nbytes: int,
    threads: int,
    check: bool,
    path: str,
    base: Any = None,
    first: int = 0,
    last: int | None = None,
) -> None: ...
def decode_numbers(
    blob: Any, first: int, last: int, threads: int, check: bool, path: str, base: Any = None
) -> _Bytes: ...
def decode_chunk(
    header: Any, size: int, number: int, chunk: Any, out: Any, check: bool, path: str, base: Any = None
) -> None: ...
def encode_words(
    words: Any, mantissa_bits: int, level: int, chunk_log2: int, threads: int, path: str, gpu_modes: bool = False
) -> bytes: ...
def round_weights(
    weights: Any,
    dtype: str,
    mantissa_bits: int,
    block: int,
    reference: bool,
    numerator: float,
    denominator: float,
    words: Any,
    normalizers: Any,
    values: Any,
    path: str,
) -> tuple[float, list[int]]: ...
def decode_words(
    words: Any,
    normalizers: Any,
    dtype: str,
    mantissa_bits: int,
    block: int,
    reference: bool,
    first: int,
    last: int,
    address: int,
    nbytes: int,
    threads: int,
    path: str,
) -> None: ...
def decode_fixed(
    payload: int, size: int, rows: int, columns: int, out: int, threads: int, path: str = "auto"
) -> None: ...
def exponents(weights: int, count: int, threads: int) -> tuple[list[int], int]: ...
def encode_fixed(
    weights: int,
    rows: int,
    columns: int,
    base: int,
    escapes: int,
    payload: int,
    size: int,
    threads: int,
    path: str = "auto",
) -> None: ...
def multiply(
    weights: int,
    size: int,
    rows: int,
    columns: int,
    x: int,
    inputs: int,
    bias: int,
    kind: int,
    width: int,
    y: int,
    stride: int,
    threads: int,
    path: str = "auto",
) -> None: ...
def multiply_blob(
    blob: Any,
    rows: int,
    columns: int,
    x: int,
    inputs: int,
    bias: int,
    kind: int,
    width: int,
    y: int,
    stride: int,
    threads: int,
    check: bool,
    path: str = "auto",
) -> None: ...
def multiplies_in_blocks(path: str = "auto") -> bool: ...
def check_of(buffer: Any) -> int: ...
def pooled_array(size: int) -> _Bytes: ...
def product_paths() -> list[str]: ...
def paths() -> list[str]: ...
def trim_pool(keep: int) -> None: ...
def idle_bytes() -> int: ...

class Decoding:
    def result(self) -> tuple[_Bytes, str, tuple[int, ...]]: ...
    def cancel(self) -> None: ...

class DecodeQueue:
    def __init__(self) -> None: ...
    def add(self, blob: Any) -> Decoding: ...
    def add_words(
        self, words: Any, normalizers: Any, dtype: str, mantissa_bits: int, block: int, reference: bool
    ) -> Decoding: ...
    def close(self) -> None: ...
