"""Element types by their safetensors names, and what torch calls them. Imports torch only when a tensor is at hand."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from netweight.errors import Unsupported

if TYPE_CHECKING:
    import torch

# safetensors' name -> torch's name; None where torch has no such type.
TORCH_NAMES: dict[str, str | None] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
    "C128": "complex128",
    "C32": "complex32",
    "F4": None,
    "F6_E2M3": None,
    "F6_E3M2": None,
}


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name.

    Raises:
        Unsupported: torch has no such type; read the bytes with `decode_raw`.
    """
    import torch

    dtype = getattr(torch, TORCH_NAMES.get(name) or "", None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(
            f"torch {torch.__version__} has no element type {name}.",
            cure="Read its bytes with netweight.codec.decode_raw.",
        )
    return dtype


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype.

    Raises:
        Unsupported: the codec has no such element type (quantized types, packed sub-byte types).
    """
    wanted = str(dtype).removeprefix("torch.")
    for name, torch_name in TORCH_NAMES.items():
        if torch_name == wanted:
            return name
    raise Unsupported(f"The codec has no element type {dtype}.", cure="View the tensor as torch.uint8 first.")
