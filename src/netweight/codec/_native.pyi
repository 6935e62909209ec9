from collections.abc import Sequence
from typing import Any

import numpy as np

class CorruptError(ValueError): ...
class UnsupportedError(ValueError): ...

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

def encode(
    tensor: Any, dtype: str, shape: Sequence[int], level: int, chunk_log2: int, threads: int, path: str
) -> bytes: ...
def read_header(blob: Any) -> tuple[str, tuple[int, ...], int, int, int, bytes, tuple[int, ...], int]: ...
def decode(blob: Any, threads: int, check: bool, path: str) -> tuple[_Bytes, str, tuple[int, ...]]: ...
def decode_into(blob: Any, out: Any, threads: int, check: bool, path: str) -> None: ...
def decode_to_address(blob: Any, address: int, nbytes: int, threads: int, check: bool, path: str) -> None: ...
def decode_numbers(blob: Any, first: int, last: int, threads: int, path: str) -> _Bytes: ...
def encode_words(words: Any, mantissa_bits: int, level: int, chunk_log2: int, threads: int, path: str) -> bytes: ...
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
def pooled_array(size: int) -> _Bytes: ...
def paths() -> list[str]: ...
def trim_pool(keep: int) -> None: ...
def idle_bytes() -> int: ...
