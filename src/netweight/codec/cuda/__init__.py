"""The codec on NVIDIA's GPUs: netweight's own kernels, compiled for the GPU at hand when they are first used.

Importing this needs neither a GPU nor the extra `cuda`; `unavailable_because` tells whether the kernels can run.
"""

from netweight.codec.cuda.compiling import compile_all
from netweight.codec.cuda.decoding import (
    BlobLayout,
    DecodePlan,
    LossyLayout,
    decode,
    decode_lossy,
    layout_of,
    lossy_layout_of,
    raise_if_corrupt,
)
from netweight.codec.cuda.encoding import encode, encode_into, largest_blob, layout_of_encoded, with_digest
from netweight.codec.cuda.launching import launch, unavailable_because

__all__ = [
    "BlobLayout",
    "DecodePlan",
    "LossyLayout",
    "compile_all",
    "decode",
    "decode_lossy",
    "encode",
    "encode_into",
    "largest_blob",
    "launch",
    "layout_of",
    "layout_of_encoded",
    "lossy_layout_of",
    "raise_if_corrupt",
    "unavailable_because",
    "with_digest",
]
