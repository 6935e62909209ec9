"""Element types: how the format, torch and numpy name them, where their exponent stands, and tensors as plain bytes.

`native/format.cpp` holds the same table. torch is imported only when a tensor is at hand.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from netweight.errors import Unsupported, UsageError

if TYPE_CHECKING:
    import torch

    Blob = bytes | bytearray | memoryview | np.ndarray[Any, Any] | torch.Tensor

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type; an element of a complex type is two numbers."""

    code: int  # in a blob's header
    name: str  # safetensors' where it has one
    torch_name: str | None  # numpy and ml_dtypes use the same names
    bits: int  # of an element; below 8 the bytes are opaque
    number_bytes: int  # 1, 2, 4 or 8
    exponent_bits: int = 0  # of a number; 0 for integers and opaque bytes
    mantissa_bits: int = 0  # of a number

    @property
    def head_bytes(self) -> int:
        """Bytes of a number that its first plane holds: the top two, or the only one."""
        return min(self.number_bytes, 2)

    @property
    def tails(self) -> int:
        """Planes of lower bytes after the first plane, one byte each."""
        return self.number_bytes - self.head_bytes

    @property
    def default_chunk_log2(self) -> int:
        """Binary logarithm of the numbers in a chunk unless the caller chooses."""
        return 20 if self.name == "BOOL" else 18 if self.number_bytes <= 2 else 17  # masks take few bits


ELEMENT_TYPES = (
    ElementType(1, "BOOL", "bool", 8, 1),
    ElementType(2, "U8", "uint8", 8, 1),
    ElementType(3, "I8", "int8", 8, 1),
    ElementType(4, "F8_E5M2", "float8_e5m2", 8, 1, 5, 2),
    ElementType(5, "F8_E4M3", "float8_e4m3fn", 8, 1, 4, 3),
    ElementType(6, "F8_E8M0", "float8_e8m0fnu", 8, 1),
    ElementType(7, "F8_E4M3FNUZ", "float8_e4m3fnuz", 8, 1, 4, 3),
    ElementType(8, "F8_E5M2FNUZ", "float8_e5m2fnuz", 8, 1, 5, 2),
    ElementType(9, "I16", "int16", 16, 2),
    ElementType(10, "U16", "uint16", 16, 2),
    ElementType(11, "F16", "float16", 16, 2, 5, 10),
    ElementType(12, "BF16", "bfloat16", 16, 2, 8, 7),
    ElementType(13, "I32", "int32", 32, 4),
    ElementType(14, "U32", "uint32", 32, 4),
    ElementType(15, "F32", "float32", 32, 4, 8, 23),
    ElementType(16, "F64", "float64", 64, 8, 11, 52),
    ElementType(17, "I64", "int64", 64, 8),
    ElementType(18, "U64", "uint64", 64, 8),
    ElementType(19, "C64", "complex64", 64, 4, 8, 23),
    ElementType(20, "C128", "complex128", 128, 8, 11, 52),
    ElementType(21, "C32", "complex32", 32, 2, 5, 10),
    ElementType(22, "F4", None, 4, 1),
    ElementType(23, "F6_E2M3", None, 6, 1),
    ElementType(24, "F6_E3M2", None, 6, 1),
)
BY_NAME = {element.name: element for element in ELEMENT_TYPES}
BY_CODE = {element.code: element for element in ELEMENT_TYPES}
TORCH_NAMES = {element.name: element.torch_name for element in ELEMENT_TYPES}
_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items() if torch_name}


def element_type(name: str) -> ElementType:
    """The element type of a safetensors name."""
    if name not in BY_NAME:
        raise Unsupported(f"element type {name} is not known to this release")
    return BY_NAME[name]


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
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
    """The safetensors name of a torch dtype."""
    name = _NAMES.get(str(dtype).removeprefix("torch."))
    if name is None:  # quantized types, packed types of less than a byte
        raise Unsupported(f"The codec has no element type {dtype}.", cure="View the tensor as torch.uint8 first.")
    return name


# ---- tensors as bytes ------------------------------------------------------------------------------------------------


def content_of(tensor: torch.Tensor | np.ndarray[Any, Any]) -> tuple[Bytes, str, tuple[int, ...]]:
    """A tensor's little-endian bytes, the name of its dtype and its shape."""
    if isinstance(tensor, np.ndarray):
        name = _NAMES.get(tensor.dtype.name)
        if name is None:
            raise Unsupported(
                f"The codec has no element type for numpy's {tensor.dtype}.", cure="View the array as uint8 first."
            )
        array = np.ascontiguousarray(tensor.astype(tensor.dtype.newbyteorder("<"), copy=False))
        return flat_bytes(array), name, tensor.shape
    import torch

    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise UsageError(f"A tensor {kind} has no plain bytes.", cure="Pass a dense tensor that holds its values.")
    name = dtype_name(tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return _tensor_bytes(tensor), name, tuple(tensor.shape)


def bytes_of(blob: Any) -> Any:
    """Whatever holds bytes, as something with the buffer protocol."""
    if isinstance(blob, memoryview):
        return blob if blob.c_contiguous else blob.tobytes()
    if isinstance(blob, bytes | bytearray):
        return blob
    if isinstance(blob, np.ndarray):
        return flat_bytes(np.ascontiguousarray(blob))
    if hasattr(blob, "detach"):
        return _tensor_bytes(blob)
    return memoryview(blob)


def flat_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    """A contiguous array's memory as bytes."""
    return array.reshape(-1).view(np.uint8)


def _tensor_bytes(tensor: torch.Tensor) -> Bytes:
    import torch

    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def memory_at(address: int, nbytes: int) -> Bytes:
    """The caller's memory as an array."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def tensor_of(raw: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes as a CPU tensor, without a copy."""
    import torch

    return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else empty_tensor(dtype, shape)


def empty_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor without elements; a damaged shape may be one that torch refuses: a 0 next to enormous dimensions."""
    import torch

    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        raise Unsupported(
            f"torch has no tensor of shape {shape}, though it has no elements ({error}).",
            cure="Fetch or compress the file again if this shape is not meant.",
        ) from error
