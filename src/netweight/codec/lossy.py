"""Lossy blobs: rounded weights as words in an ordinary blob, normalizers, and weights that are stored exactly.

docs/format.md, "Lossy blobs", is the format; the loops over weights run in the modules of `backend.py`. A lossy blob
decodes to the rounded weights, always the same. The source is NeuZip (arXiv 2410.20650), lossy compression; see
docs/differences.md for what differs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from netweight.codec.backend import best, codec_for
from netweight.codec.header import (
    BY_CODE,
    BY_NAME,
    ByteReader,
    Bytes,
    ElementType,
    as_bytes,
    check_digest,
    check_header,
    checksum,
    corrupt,
    flat_bytes,
    refuse_inflated,
    take_fixed,
    tensor_bytes,
    varint,
)
from netweight.errors import Unsupported, UsageError

FIDELITIES = ("corrected", "reference")
# The number of mantissa bits of bf16. With this many, no dtype is rounded.
LOSSLESS_BITS = 7
ROUNDABLE = {name: BY_NAME[name] for name in ("BF16", "F16", "F32")}
MAGIC = b"NWL"
VERSION = 1
# At most one weight in this many is stored exactly; with more, the tensor is not rounded at all.
MOST_ESCAPES = 16
_STEP = 1 << 20  # weights rounded at a time


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding of weights of one dtype."""

    element: ElementType
    """BF16, F16 or F32."""
    mantissa_bits: int
    """Number of preserved mantissa bits, 0 to 6."""
    block_size: int | None
    """Weights that share a normalizer; None for no normalizers."""
    fidelity: str
    """"corrected" or "reference"."""

    @property
    def arguments(self) -> tuple[str, int, int, bool]:
        """Arguments of the functions of `backend.Codec`: dtype, bits, block (0 for none), reference or not."""
        return self.element.name, self.mantissa_bits, self.block_size or 0, self.fidelity == "reference"

    @property
    def largest_word(self) -> int:
        """The largest word without its sign; the reference's arithmetic may round up to infinity."""
        return (255 << self.mantissa_bits) - (self.fidelity == "corrected")

    @property
    def bound(self) -> Fraction:
        """The largest relative change of a weight; see `relative_bound`."""
        levels = 2 ** (self.mantissa_bits + 1) + 1
        rounding = Fraction(1, levels)
        if self.block_size is None:
            return rounding
        # Nine bits of normalizer times seven at most fit the mantissa of a float32, so that no rounding follows there.
        own = Fraction(1, 2 ** (self.element.mantissa_bits + 1) + 1) if self.element.mantissa_bits < 15 else Fraction(0)
        # The reference also rounds the quotient.
        times = 2 if self.fidelity == "reference" else 1
        return (1 + rounding) * (1 + own) ** times - 1


@dataclass(frozen=True, slots=True)
class Precision:
    """Precision at which weights of any dtype are kept.

    Attributes:
        mantissa_bits: Bits of the mantissa, 0 to 6; 7 keeps everything.
        block_size: Weights that share a normalizer, at least 1; None for no normalizers.
        fidelity: "corrected" or "reference".

    Raises:
        UsageError: A value is out of its range.

    Source: NeuZip (arXiv 2410.20650), lossy compression.
    """

    mantissa_bits: int = LOSSLESS_BITS
    block_size: int | None = 512
    fidelity: str = "corrected"

    def __post_init__(self) -> None:
        """Check the values."""
        if type(self.mantissa_bits) is not int or not 0 <= self.mantissa_bits <= LOSSLESS_BITS:
            raise UsageError(
                f"mantissa_bits must be an integer from 0 to 7, not {self.mantissa_bits!r}.",
                cure="Choose 0 to 6 to round weights, or 7 for no rounding.",
            )
        if self.block_size is not None and (type(self.block_size) is not int or not 1 <= self.block_size < 1 << 62):
            raise UsageError(
                f"block_size must be an integer from 1 on, or None, not {self.block_size!r}.",
                cure="Choose the number of weights in a block, or None for no normalizers.",
            )
        if self.fidelity not in FIDELITIES:
            cure = f"Choose one of {', '.join(FIDELITIES)}."
            raise UsageError(f"There is no fidelity {self.fidelity!r}.", cure=cure)

    @property
    def lossless(self) -> bool:
        """True if nothing is rounded."""
        return self.mantissa_bits == LOSSLESS_BITS

    def rounding(self, dtype: str) -> Rounding | None:
        """Return the rounding of a dtype, given by safetensors' name; None to leave weights unchanged.

        Args:
            dtype: A name such as "BF16".

        Returns:
            The rounding, or None where weights stay as they are.

        Raises:
            Unsupported: Weights of this dtype cannot be rounded, or not with this fidelity.
        """
        if self.lossless:
            return None
        if dtype not in ROUNDABLE:
            raise Unsupported(
                f"Tensors of type {dtype} cannot be rounded to {self.mantissa_bits} mantissa bits.",
                cure=f"Only {', '.join(ROUNDABLE)} can; leave others lossless: mantissa_bits=7.",
            )
        if self.fidelity == "reference" and dtype != "BF16":
            raise Unsupported(
                f"The reference arithmetic is defined for BF16, not for {dtype}.", cure='Use fidelity="corrected".'
            )
        return Rounding(ROUNDABLE[dtype], self.mantissa_bits, self.block_size, self.fidelity)


def relative_bound(
    mantissa_bits: int, normalized: bool = True, fidelity: str = "corrected", dtype: str = "BF16"
) -> float:
    """Return the largest relative change of a weight w by lossy coding: |rounded - w| / |w|.

    Rounding a number to k mantissa bits changes it by at most 1 / (2^(k+1) + 1) of itself, which a number halfway
    between a power of two and its successor attains. Without normalizers that is all. With them the quotient is rounded
    so, and its product with the normalizer, which is the same number on both sides, once more to the p mantissa bits of
    the dtype: (1 + 1/(2^(k+1) + 1)) (1 + 1/(2^(p+1) + 1)) - 1. For F32 the product is exact and the second factor 1.
    The reference rounds the quotient to p bits, too, before it is rounded to k: the second factor is squared. Its bound
    does not hold for numbers that it rounds up to infinity.

    Args:
        mantissa_bits: Bits of the mantissa that are kept, 0 to 7; with 7 nothing changes.
        normalized: Whether blocks have normalizers.
        fidelity: "corrected" or "reference".
        dtype: safetensors' name of the dtype: "BF16", "F16" or "F32".

    Returns:
        The bound; 0 for 7 bits. What would change more is kept exactly (weights that are not finite or subnormal).

    Raises:
        UsageError: A setting is out of its range.
        Unsupported: Weights of this dtype cannot be rounded.
    """
    rounding = Precision(mantissa_bits, 1 if normalized else None, fidelity).rounding(dtype)
    return 0.0 if rounding is None else float(rounding.bound)


# ---- blobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LossyHeader:
    """Content of a lossy blob: its header, and its sections, which are blobs of their own."""

    rounding: Rounding
    """Settings of the rounding of the weights."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    digest: bytes
    """Xxh3-128 of the rounded tensor's bytes, most significant byte first."""
    worst: float
    """The largest relative change of a weight that rounding made."""
    words_start: int
    """Offset of the words' blob, in bytes."""
    words: Bytes = field(repr=False)
    """Blob of signs, exponents and kept mantissa bits."""
    normalizers: Bytes | None = field(repr=False)
    """Normalizers of the blocks; None for rounding without normalization."""
    gaps: Bytes | None = field(repr=False)
    """Numbers of weights between those kept exactly; None if none are."""
    exact: Bytes | None = field(repr=False)
    """These weights."""

    @property
    def count(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.count * self.rounding.element.number_bytes


def encode(
    buffer: Any,
    shape: Sequence[int],
    rounding: Rounding,
    *,
    level: int,
    chunk_log2: int,
    threads: int,
    path: str,
    gpu_modes: bool,
) -> bytes | None:
    """Round a tensor's bytes and encode them; None if there are none, or too many weights must be kept exactly."""
    number, nbytes = rounding.element.number_bytes, tensor_bytes(rounding.element, tuple(shape))
    if memoryview(buffer).nbytes != nbytes:
        raise ValueError("the buffer's size does not fit dtype and shape")
    if not nbytes:
        return None
    codec = codec_for(path)
    data, count, block = np.frombuffer(buffer, np.uint8), nbytes // number, rounding.block_size
    words = np.empty(count, np.uint16)
    normalizers = np.empty(0 if block is None else -(-count // block), np.uint8)
    step = (block or 1) * max(1, _STEP // (block or 1))
    values = np.empty(min(step, count) * number, np.uint8)
    bound = (float(rounding.bound.numerator), float(rounding.bound.denominator))
    escapes: list[npt.NDArray[np.int64]] = []
    digest, worst = xxhash.xxh3_128(), 0.0
    for start in range(0, count, step):
        stop = min(start + step, count)
        part, rounded = data[start * number : stop * number], values[: (stop - start) * number]
        if part.ctypes.data % number:
            # In some files, numbers are at odd addresses.
            part = part.copy()
        factors = normalizers if block is None else normalizers[start // block : -(-stop // block)]
        change, places = codec.round_weights(
            part, *rounding.arguments, *bound, words[start:stop], factors, rounded, path
        )
        escapes.append(np.array(places, np.int64) + start)
        digest.update(rounded.data)
        worst = max(worst, change)
    exact = np.concatenate(escapes)
    if len(exact) * MOST_ESCAPES > count:
        return None

    def blob(array: npt.NDArray[Any], dtype: str) -> bytes:
        return codec.encode(flat_bytes(array), dtype, [len(array)], level, 0, threads, path, None, gpu_modes)

    sections = [
        codec.encode_words(flat_bytes(words), rounding.mantissa_bits, level, chunk_log2, threads, path, gpu_modes),
        b"" if block is None else blob(normalizers, "U8"),
        blob(np.diff(exact, prepend=-1) - 1, "U64") if len(exact) else b"",
        blob(data.reshape(-1, number)[exact], rounding.element.name) if len(exact) else b"",
    ]
    fields = (VERSION, rounding.element.code, rounding.mantissa_bits, FIDELITIES.index(rounding.fidelity), len(shape))
    fixed = MAGIC + bytes(fields) + digest.digest()
    rest = struct.pack("<d", worst) + b"".join(map(varint, (*shape, block or 0, *map(len, sections))))
    return b"".join((fixed, checksum(fixed, rest), rest, *sections))


def read_header(blob: Any) -> LossyHeader:
    """Read and check a lossy blob's header, and the headers of the blobs in it; no payload is touched."""
    reader = ByteReader(as_bytes(blob))
    fixed = take_fixed(reader)
    version, code, mantissa_bits, fidelity, dimensions = fixed[3:8]
    if version != VERSION:
        raise Unsupported(
            f"version {version} of lossy blobs is not known to this release, which reads version {VERSION}"
        )
    element = BY_CODE.get(code)
    if element is None or fidelity >= len(FIDELITIES):
        raise Unsupported("its element type or arithmetic is not known to this release")
    if dimensions > 64:
        raise corrupt("the header states an impossible number of dimensions")
    (worst,) = struct.unpack("<d", reader.read(8, "the header").tobytes())
    shape = tuple(reader.varint() for _ in range(dimensions))
    block_size, *sizes = (reader.varint() for _ in range(5))
    check_header(fixed, reader)
    rounding = _rounding(element.name, mantissa_bits, block_size or None, FIDELITIES[fidelity])
    count = tensor_bytes(element, shape) // element.number_bytes
    if not 0 <= worst:
        raise corrupt("the header states an impossible change")
    left = len(reader.data) - reader.at
    if sum(sizes) != left:
        raise corrupt(f"it has {left} bytes of sections where they add up to {sum(sizes)}")
    words_start = reader.at
    words, *others = (reader.read(size, "a section") for size in sizes)
    normalizers, gaps, kept = (section if len(section) else None for section in others)
    if (normalizers is None) != (rounding.block_size is None or count == 0) or (gaps is None) != (kept is None):
        raise corrupt("a section is missing or too many")
    _check_section(words, "U16", count)
    if normalizers is not None:
        _check_section(normalizers, "U8", -(-count // (rounding.block_size or 1)))
    if gaps is not None and kept is not None:
        size = _check_section(kept, element.name, None)
        if not 1 <= size * MOST_ESCAPES <= count:
            raise corrupt("a section has the wrong size")
        _check_section(gaps, "U64", size)
    return LossyHeader(rounding, shape, fixed[8:24], worst, words_start, words, normalizers, gaps, kept)


def _rounding(dtype: str, mantissa_bits: int, block_size: int | None, fidelity: str) -> Rounding:
    try:
        rounding = Precision(mantissa_bits, block_size, fidelity).rounding(dtype)
    except (Unsupported, UsageError) as error:
        raise corrupt("the header states an impossible rounding") from error
    if rounding is None:
        raise corrupt("the header states an impossible rounding")
    return rounding


def _check_section(section: Bytes, dtype: str, count: int | None) -> int:
    """Check that a section is a blob of one dimension with elements of this type; return their number."""
    name, shape, *_ = best.read_header(section)
    if name != dtype or len(shape) != 1 or count not in (None, shape[0]):
        raise corrupt("a section has unexpected content")
    return shape[0]


def decode(header: LossyHeader, threads: int, check: bool, path: str, out: Bytes | None = None) -> Bytes:
    """Decode a lossy blob to the rounded tensor's bytes, in `out` or a new array."""
    if out is not None and out.nbytes != header.nbytes:
        raise ValueError(f"the output has {out.nbytes} bytes where the tensor has {header.nbytes}")
    result = decode_numbers(header, 0, header.count, threads, path, out)
    if check:
        check_digest(result, header.digest)
    return result


def decode_numbers(
    header: LossyHeader, first: int, last: int, threads: int, path: str, out: Bytes | None = None
) -> Bytes:
    """The bytes of weights `first` to `last` (exclusive); only the chunks that they touch are read."""
    codec, normalizers = codec_for(path), normalizers_of(header, first, last, path)
    nbytes = (last - first) * header.rounding.element.number_bytes
    if out is None:
        refuse_inflated(nbytes, header.words.nbytes)
        out = codec.pooled_array(nbytes)
    codec.decode_words(
        header.words, normalizers, *header.rounding.arguments, first, last, out.ctypes.data, nbytes, threads, path
    )
    put_kept(header, first, last, path, out)
    return out


def normalizers_of(header: LossyHeader, first: int, last: int, path: str) -> Any:
    """The normalizers of the blocks that weights `first` to `last` (exclusive) touch; empty without."""
    block = header.rounding.block_size
    if header.normalizers is None or block is None:
        return b""
    blocks = (first // block, (last - 1) // block + 1) if first < last else (0, 0)
    return codec_for(path).decode_numbers(header.normalizers, *blocks, 1, False, path)


def put_kept(header: LossyHeader, first: int, last: int, path: str, weights: Bytes) -> None:
    """Put the weights that are kept exactly in their places among weights `first` to `last` (exclusive)."""
    if header.gaps is None or header.exact is None:
        return
    codec, number = codec_for(path), header.rounding.element.number_bytes
    places = _places(codec.decode(header.gaps, 1, False, path)[0], header.count)
    kept = codec.decode(header.exact, 1, False, path)[0].reshape(-1, number)
    inside = (places >= first) & (places < last)
    weights.reshape(-1, number)[places[inside] - first] = kept[inside]


def _places(gaps: Bytes, count: int) -> npt.NDArray[np.int64]:
    """Places of the weights that are kept exactly, from the numbers of weights between them."""
    steps = gaps.view("<u8")
    if (steps >= count).any():
        raise corrupt("a weight that is kept exactly lies outside the tensor")
    places = np.cumsum(steps.astype(np.int64) + 1) - 1
    # The sum of the gaps may overflow.
    if (np.diff(places, prepend=-1) <= 0).any() or places[-1] >= count:
        raise corrupt("a weight that is kept exactly lies outside the tensor")
    return places
