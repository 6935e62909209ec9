"""Element types, and the header of a blob, as docs/format.md specifies them.

Of a type: how the format, torch and numpy name it, where its exponent stands, and tensors as plain bytes;
`native/format.cpp` holds the same table. All of a header is checked before anything is allocated. Numbers are
little-endian everywhere. Lossy blobs and the GPU's encoder and decoder share the reader and the checksum. torch is
imported only when a tensor is at hand.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from netweight.core.tensor_bytes import row_major_bytes
from netweight.errors import CorruptBlob, Unsupported, UsageError

if TYPE_CHECKING:
    import torch

    Blob = bytes | bytearray | memoryview | np.ndarray[Any, Any] | torch.Tensor


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type; an element of a complex type is two numbers."""

    code: int
    """Code of the type in a blob's header."""
    name: str
    """Safetensors' where it has one."""
    torch_name: str | None
    """Numpy and ml_dtypes use the same names."""
    bits: int
    """Width of an element in bits. Elements of fewer than 8 bits are coded as opaque bytes."""
    number_bytes: int
    """Width of a number in bytes: 1, 2, 4 or 8."""
    exponent_bits: int = 0
    """Number of exponent bits; 0 for integers and opaque bytes."""
    mantissa_bits: int = 0
    """Number of mantissa bits."""

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
        # Masks take few bits, so that their chunks have more numbers.
        return 20 if self.name == "BOOL" else 18 if self.number_bytes <= 2 else 17


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
    # These are quantized types, and packed types of less than a byte.
    if name is None:
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
        raise UsageError(f"A tensor {kind} has no plain bytes.", cure="Pass a dense tensor with its values.")
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

    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    return row_major_bytes(tensor).numpy()


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
            f"torch cannot create a tensor of shape {shape}, although it would not have elements ({error}).",
            cure="Fetch or compress the file again if this shape is wrong.",
        ) from error


MAGIC = b"NWT"
VERSION = 1
# These flags stand beside the level in its byte.
HAS_BASE, HAS_CPU_MODES = 0x80, 0x40
# The marker, five fields of a byte, the digest (16 bytes) and the checksum (4 bytes).
FIXED_HEADER = 28


def corrupt(reason: str) -> CorruptBlob:
    """The error for damaged bytes."""
    return CorruptBlob(reason, cure="Fetch or compress the file again; its bytes were damaged.")


class ByteReader:
    """Reader of bytes from the front of a one-dimensional array, never past its end."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.at = 0

    def read(self, size: int, what: str) -> Bytes:
        """The next `size` bytes; `what` names them in the error."""
        if size > len(self.data) - self.at:
            raise corrupt(f"the data ends inside {what}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int, what: str) -> int:
        """The next `size` bytes as an unsigned number."""
        return int.from_bytes(self.read(size, what).tobytes(), "little")

    def varint(self) -> int:
        """A number of the header: seven bits a byte, least significant first; the last byte is below 128."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self.number(1, "the header")
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise corrupt("a dimension in the header is too large")


def varint(value: int) -> bytes:
    """A number as `ByteReader.varint` reads it."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def little(value: int, size: int) -> bytes:
    """A number as `size` bytes."""
    return value.to_bytes(size, "little")


def checksum(start: bytes, rest: bytes) -> bytes:
    """The four bytes between the first 24 of a header and the rest of it, which protect both."""
    return little(xxhash.xxh3_64_intdigest(start + rest) & 0xFFFFFFFF, 4)


def check_header(fixed: bytes, reader: ByteReader) -> None:
    """Compare the checksum with a header that ends where the reader stands."""
    if checksum(fixed[:24], reader.data[FIXED_HEADER : reader.at].tobytes()) != fixed[24:28]:
        raise corrupt("the header's checksum does not fit its bytes")


def take_fixed(reader: ByteReader) -> bytes:
    """The part of a header that has one length in all blobs."""
    if len(reader.data) < FIXED_HEADER:
        raise corrupt(f"it is shorter than a header ({len(reader.data)} bytes)")
    return reader.read(FIXED_HEADER, "the header").tobytes()


def refuse_inflated(nbytes: int, stored: int) -> None:
    """Refuse to allocate what few bytes declare, as `bind.cpp` does; with default chunks no encoder goes so far."""
    if nbytes > 1 << 28 and nbytes >> 17 >= stored:
        raise ValueError(
            f"its {stored} bytes declare {nbytes}; decode it chunk by chunk, or to memory of your own (decode_into)"
        )


def check_digest(content: Bytes, digest: bytes) -> None:
    """Compare a decoded tensor's digest with the stored one."""
    if xxhash.xxh3_128_digest(content.data) != digest:
        raise corrupt("the decoded bytes do not have the digest that was stored with them")


def digest_of_checks(checks: Sequence[int]) -> bytes:
    """The digest of a tensor, from the checks of its chunks."""
    return xxhash.xxh3_128_digest(np.array(checks, "<u8").tobytes())


def named_digest(digest: bytes) -> str:
    """A digest of checks with the name of its algorithm."""
    return f"xxh3-chunks:{digest.hex()}"


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """Content of a blob before its chunks."""

    element: ElementType
    """Type of the elements."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    level: int
    """0 fast, 1 default, 2 high, 3 max; decoders need not know."""
    chunk_log2: int
    """Binary logarithm of the numbers in a chunk."""
    digest: bytes
    """XXH3-128 of the checks, most significant byte first."""
    nbytes: int
    """Size of the tensor in bytes."""
    chunk_starts: tuple[int, ...]
    """Offsets of the chunks in the blob; the last entry is the blob's size."""
    checks: tuple[int, ...]
    """The check of every chunk's numbers, made of rounds of AES."""
    cpu_modes: bool = False
    """True if some chunk has a transform or a mode that the GPU kernels do not decode."""
    base_digest: bytes = b""
    """Digest of the base tensor that the blob stores differences from; empty if there is none."""

    @property
    def numbers(self) -> int:
        """Numbers in the tensor: elements, or twice as many for complex types."""
        return self.nbytes // self.element.number_bytes


@dataclass(frozen=True, slots=True)
class Index:
    """The chunks of a blob."""

    lengths: npt.NDArray[np.uint32]
    """Bytes of each chunk."""
    checks: npt.NDArray[np.uint64]
    """Check of each chunk's numbers."""
    cpu_modes: bool
    """True if some chunk has a transform or a mode that the GPU kernels do not decode."""
    start: int
    """Offset of the first chunk in the blob."""


def tensor_bytes(element: ElementType, shape: tuple[int, ...]) -> int:
    """The size of a tensor in bytes."""
    bits = math.prod(shape) * element.bits
    if bits >= 1 << 62:
        raise Unsupported("a tensor of this shape is too large")
    if bits % 8:
        raise Unsupported(f"a tensor of type {element.name} must fill whole bytes")
    return bits // 8


def read_header(blob: Any, *, size: int | None = None) -> BlobHeader:
    """Read and check header and index; with the whole blob's `size`, `blob` may end at `index_end`."""
    reader = ByteReader(as_bytes(blob))
    size = len(reader.data) if size is None else size
    fixed, element, shape, nbytes, base_digest, chunks = _read_start(reader, size)
    flags = fixed[5]
    lengths = reader.read(4 * chunks, "the index of chunks").view("<u4")
    checks = reader.read(8 * chunks, "the index of chunks").view("<u8").tolist()
    check_header(fixed, reader)
    if digest_of_checks(checks) != fixed[8:24]:
        raise corrupt("the header's digest does not fit its checks")
    starts = (reader.at, *(reader.at + np.cumsum(lengths, dtype=np.int64)).tolist())
    if starts[-1] != size:
        raise corrupt(f"it has {size} bytes where its index adds up to {starts[-1]}")
    cpu_modes = bool(flags & HAS_CPU_MODES)
    return BlobHeader(
        element, shape, flags & 3, fixed[6], fixed[8:24], nbytes, starts, tuple(checks), cpu_modes, base_digest
    )


def read_index(blob: Any) -> Index:
    """The index of a blob that was just encoded here, which is not checked again."""
    reader = ByteReader(as_bytes(blob))
    fixed, *_, chunks = _read_start(reader, len(reader.data))
    lengths = reader.read(4 * chunks, "the index of chunks").view("<u4")
    checks = reader.read(8 * chunks, "the index of chunks").view("<u8")
    return Index(lengths, checks, bool(fixed[5] & HAS_CPU_MODES), reader.at)


def index_end(beginning: Any, size: int) -> int:
    """Return the end of the index of a blob of `size` bytes, of which at least the first 1,024 are at hand."""
    reader = ByteReader(as_bytes(beginning))
    *_, chunks = _read_start(reader, size)
    return reader.at + 12 * chunks


def _read_start(reader: ByteReader, size: int) -> tuple[bytes, ElementType, tuple[int, ...], int, bytes, int]:
    """Read what precedes the index: fixed part, element type, shape, bytes of the tensor, base's digest, chunks."""
    fixed = take_fixed(reader)
    version, code, level, chunk_log2, dimensions = fixed[3:8]
    if fixed[:3] != MAGIC:
        raise corrupt("it does not start with the marker NWT")
    if version != VERSION:
        raise Unsupported(f"format version {version} is not known to this release, which reads version {VERSION}")
    element = BY_CODE.get(code)
    if element is None:
        raise Unsupported(f"element type number {code} is not known to this release")
    flags = HAS_BASE | HAS_CPU_MODES
    if level & ~flags > 3:
        raise Unsupported(f"level number {level & ~flags} is not known to this release")
    if not 10 <= chunk_log2 <= 22:
        raise corrupt("the header states an impossible chunk size")
    if dimensions > 64:
        raise corrupt("the header states an impossible number of dimensions")
    shape = tuple(reader.varint() for _ in range(dimensions))
    nbytes = tensor_bytes(element, shape)
    base_digest = reader.read(16, "the header").tobytes() if level & HAS_BASE else b""
    chunks = -(-nbytes // element.number_bytes >> chunk_log2)
    if chunks > (size - reader.at) // 12:
        raise corrupt("the data ends inside the index of chunks")
    return fixed, element, shape, nbytes, base_digest, chunks


@dataclass
class HeaderWriter:
    """The header and index of a blob whose chunks are encoded one by one."""

    element: ElementType
    """Type of the elements."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    level: int
    """0 fast, 1 default, 2 high, 3 max."""
    chunk_log2: int
    """Binary logarithm of the numbers in a chunk."""
    has_base: bool = False
    """True if the chunks are differences from a base."""
    cpu_modes: bool = False
    """True if some chunk has a transform or a mode that the GPU kernels do not decode."""
    lengths: list[int] = field(default_factory=list)
    """Length of each chunk so far, in bytes."""
    checks: list[int] = field(default_factory=list)
    """Check of each chunk so far."""
    base_checks: list[int] = field(default_factory=list)
    """Check of each chunk's base so far."""

    def add(self, encoded: tuple[bytes, int, int, bool]) -> bytes:
        """Take down and return the next chunk, as `backend.Codec.encode_chunk` returns it."""
        chunk, check, base_check, cpu_modes = encoded
        self.lengths.append(len(chunk))
        self.checks.append(check)
        self.base_checks.append(base_check)
        self.cpu_modes |= cpu_modes
        return chunk

    def header(self) -> bytes:
        """The bytes before the chunks."""
        flags = (HAS_BASE if self.has_base else 0) | (HAS_CPU_MODES if self.cpu_modes else 0)
        fields = (VERSION, self.element.code, self.level | flags, self.chunk_log2, len(self.shape))
        start = MAGIC + bytes(fields) + digest_of_checks(self.checks)
        rest = b"".join(map(varint, self.shape)) + (digest_of_checks(self.base_checks) if self.has_base else b"")
        rest += np.array(self.lengths, "<u4").tobytes() + np.array(self.checks, "<u8").tobytes()
        return start + checksum(start, rest) + rest


def as_bytes(buffer: Any) -> Bytes:
    """Anything with the buffer protocol as an array."""
    return np.frombuffer(buffer, np.uint8) if memoryview(buffer).nbytes else np.empty(0, np.uint8)
