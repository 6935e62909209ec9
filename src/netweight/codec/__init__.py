"""The codec: lossless compression of tensors, bit for bit, as docs/format.md specifies.

`encode` and `decode` take and return tensors; `encode_raw` and `decode_raw` work on plain buffers with a dtype name,
for element types that torch lacks and for programs that should not import torch. `encode_lossy` rounds before it
encodes, by no more than `relative_bound` says. `info` reads a blob's header only.
"""

from netweight.codec.api import LEVELS as LEVELS
from netweight.codec.api import BlobInfo, available_paths, decode, decode_into, encode, encode_lossy, info
from netweight.codec.api import ChunkDecoder as ChunkDecoder
from netweight.codec.api import ChunkEncoder as ChunkEncoder
from netweight.codec.api import DecodeQueue as DecodeQueue
from netweight.codec.api import Decoding as Decoding
from netweight.codec.api import active_path as active_path
from netweight.codec.api import decode_numbers as decode_numbers
from netweight.codec.api import decode_raw as decode_raw
from netweight.codec.api import decode_rows as decode_rows
from netweight.codec.api import digest_of as digest_of
from netweight.codec.api import encode_raw as encode_raw
from netweight.codec.api import fill as fill
from netweight.codec.api import header_size as header_size
from netweight.codec.api import is_lossy as is_lossy
from netweight.codec.api import pieces as pieces
from netweight.codec.api import pooled as pooled
from netweight.codec.api import trim_pool as trim_pool
from netweight.codec.lossy import ROUNDABLE as ROUNDABLE
from netweight.codec.lossy import Precision
from netweight.codec.lossy import relative_bound as relative_bound

__all__ = ["BlobInfo", "Precision", "available_paths", "decode", "decode_into", "encode", "encode_lossy", "info"]
