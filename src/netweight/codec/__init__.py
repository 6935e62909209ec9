"""A tensor's bytes and back: lossless compression of weights, bit for bit, as docs/format.md specifies.

`encode` and `decode` take and return tensors; `encode_raw` and `decode_raw` work on plain buffers with a dtype name,
for element types that torch lacks and for programs that should not import torch. `info` reads a blob's header only.
"""

from netweight.codec.api import (
    LEVELS,
    BlobInfo,
    active_path,
    available_paths,
    decode,
    decode_into,
    decode_raw,
    decode_rows,
    encode,
    encode_raw,
    info,
    trim_pool,
)
from netweight.codec.queue import DecodeQueue, Decoding

__all__ = [
    "LEVELS",
    "BlobInfo",
    "DecodeQueue",
    "Decoding",
    "active_path",
    "available_paths",
    "decode",
    "decode_into",
    "decode_raw",
    "decode_rows",
    "encode",
    "encode_raw",
    "info",
    "trim_pool",
]
