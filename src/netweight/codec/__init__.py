"""A tensor's bytes and back: lossless compression of weights, bit for bit, as docs/format.md specifies.

`encode` and `decode` take and return tensors; `encode_raw` and `decode_raw` work on plain buffers with a dtype name,
for element types that torch lacks and for programs that should not import torch. `encode_lossy` rounds before it
encodes, by no more than `relative_bound` says. `info` reads a blob's header only.
"""

from netweight.codec.api import (
    LEVELS,
    BlobInfo,
    DecodeQueue,
    Decoding,
    active_path,
    available_paths,
    decode,
    decode_into,
    decode_raw,
    decode_rows,
    encode,
    encode_lossy,
    encode_raw,
    info,
    is_lossy,
    trim_pool,
)
from netweight.codec.lossy import ROUNDABLE, Precision, relative_bound

__all__ = [
    "LEVELS",
    "ROUNDABLE",
    "BlobInfo",
    "DecodeQueue",
    "Decoding",
    "Precision",
    "active_path",
    "available_paths",
    "decode",
    "decode_into",
    "decode_raw",
    "decode_rows",
    "encode",
    "encode_lossy",
    "encode_raw",
    "info",
    "is_lossy",
    "relative_bound",
    "trim_pool",
]
