"""Functions of the codec: checks of arguments, conversion between tensors and buffers, errors of the library.

The queue at the end decodes on a thread of the codec's own, for callers that know what they will need next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from netweight.codec import lossy
from netweight.codec.backend import best, codec_for, in_our_words, new_queue
from netweight.codec.header import (
    VERSION,
    Bytes,
    HeaderWriter,
    as_bytes,
    bytes_of,
    content_of,
    digest_of_checks,
    element_type,
    index_end,
    memory_at,
    named_digest,
    tensor_bytes,
    tensor_of,
    torch_dtype,
    varint,
)
from netweight.codec.lossy import Precision
from netweight.errors import Unsupported, UsageError

if TYPE_CHECKING:
    import torch

    from netweight.codec.header import Blob

LEVELS = ("fast", "default", "high", "max")


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """Content of a blob's header.

    Attributes:
        dtype: safetensors' name of the element type, such as "BF16".
        shape: The tensor's shape.
        nbytes: Bytes of the tensor when decoded.
        level: The level it was encoded with: "fast", "default", "high" or "max".
        digest: Digest of the tensor: "xxh3-chunks:" and 32 hexadecimal digits, which `digest_of` makes of its bytes;
            of lossy blobs "xxh3-128:" and XXH3-128 of the bytes.
        version: Version of the format, 1.
        chunk_log2: Binary logarithm of the numbers in a chunk (two per element for complex types).
        chunk_offsets: Where each chunk starts in the blob, and where the last one ends.
        mantissa_bits: Bits of the mantissa that a lossy blob keeps, 0 to 6; None for lossless ones. `digest` is that of
            the rounded tensor.
        block_size: Weights that share a normalizer in a lossy blob; None for no normalizers.
        fidelity: The arithmetic of a lossy blob, "corrected" or "reference"; None for lossless ones.
        bound: How much rounding may have changed a weight at most, relative to it (see `relative_bound`); 0 for
            lossless blobs.
        worst_change: How much it did change one at most; 0 for lossless blobs.
        base_digest: What `digest_of` makes of the tensor that the blob holds differences from, with the same
            `chunk_log2`; None if it stands alone.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    level: str
    digest: str
    version: int
    chunk_log2: int
    chunk_offsets: tuple[int, ...] = field(repr=False)
    mantissa_bits: int | None = None
    block_size: int | None = None
    fidelity: str | None = None
    bound: float = 0.0
    worst_change: float = 0.0
    base_digest: str | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks, each of which can be decoded alone."""
        return len(self.chunk_offsets) - 1


def available_paths() -> list[str]:
    """Return the code paths that run here, fastest first: of "avx512", "avx2", "neon", "portable", or only "python".

    "python" stands here only where the native module is missing; by name it can be asked for everywhere.
    """
    return best.paths()


def active_path() -> str:
    """The code path that `path="auto"` takes."""
    return best.paths()[0]


def trim_pool(keep: int = 0) -> None:
    """Return idle output buffers to the system until at most `keep` bytes are held (never more than 256 MiB are).

    The working memory of threads that decoded or encoded is returned, too.
    """
    best.trim_pool(keep)


def encode_raw(
    buffer: Any,
    dtype: str,
    shape: Sequence[int],
    *,
    level: str = "default",
    threads: int = 1,
    chunk_log2: int | None = None,
    precision: Precision | None = None,
    path: str = "auto",
    base: Any = None,
    gpu_modes: bool = False,
) -> bytes:
    """`encode` of contiguous little-endian bytes and safetensors' name of a dtype; or, with a precision, rounded."""
    number = checked_level(level, chunk_log2)
    dims = [int(d) for d in shape]
    if len(dims) > 64 or min(dims, default=0) < 0:
        raise UsageError(f"A tensor cannot have the shape {tuple(dims)}.")
    rounding = None if precision is None else precision.rounding(dtype)
    threads, log2 = _checked_threads(threads), chunk_log2 or 0
    if base is not None and rounding is not None:
        raise UsageError(
            "A rounded tensor cannot be stored as a difference from a base.", cure="Leave out one of the two."
        )
    if base is not None and gpu_modes:
        raise UsageError(
            "GPU kernels do not decode differences from a base.", cure="Leave out one of base and gpu_modes."
        )
    with in_our_words("a tensor of type %s and shape %s", dtype, dims):
        source, other = bytes_of(buffer), _bytes_or_none(base)
        if rounding is not None:
            rounded = lossy.encode(
                source, dims, rounding, level=number, chunk_log2=log2, threads=threads, path=path, gpu_modes=gpu_modes
            )
            if rounded is not None:
                return rounded
        return codec_for(path).encode(source, dtype, dims, number, log2, threads, path, other, gpu_modes)


def encode(
    tensor: torch.Tensor | np.ndarray[Any, Any],
    *,
    level: str = "default",
    threads: int = 1,
    chunk_log2: int | None = None,
    path: str = "auto",
    base: torch.Tensor | np.ndarray[Any, Any] | None = None,
    gpu_modes: bool = False,
) -> bytes:
    """Compress a tensor of any dtype and shape, bit for bit.

    Args:
        tensor: A torch tensor of any dtype and shape (moved to the CPU if elsewhere) or numpy array; copied only if it
            is not contiguous.
        level: "fast", "default", "high" or "max": denser in this order, slower in this order.
        threads: Threads to encode with, at least 1. The bytes do not depend on it.
        chunk_log2: Binary logarithm of the numbers per chunk, 10 to 22; None for 18 (17 for types of four bytes and
            more).
        path: Code path, one of `available_paths()`, "python", or "auto". The bytes do not depend on it.
        base: A tensor of the same dtype and shape of which this one is a later state, such as the model that was
            fine-tuned: differences from it are stored where they are smaller, and `decode` needs it again.
        gpu_modes: Use only what the GPU kernels decode: no transforms and no modes above 4 (docs/format.md). Without,
            a blob of zeros, few values or counts is smaller, and may have to be decoded on the CPU.

    Returns:
        The blob; `decode` gives the tensor back.

    Raises:
        UsageError: An option is out of its range, the base has another dtype or shape, or there are both a base and
            `gpu_modes`.
        Unsupported: The codec has no such element type.
    """
    data, name, shape = content_of(tensor)
    other = None
    if base is not None:
        other, *kind = content_of(base)
        if kind != [name, shape]:
            raise UsageError(
                f"The base is {kind[0]} of shape {kind[1]}, but the tensor is {name} of shape {shape}.",
                cure="Encode tensors without a counterpart without a base.",
            )
    return encode_raw(
        data,
        name,
        shape,
        level=level,
        threads=threads,
        chunk_log2=chunk_log2,
        path=path,
        base=other,
        gpu_modes=gpu_modes,
    )


def encode_lossy(
    tensor: torch.Tensor | np.ndarray[Any, Any],
    *,
    mantissa_bits: int,
    block_size: int | None = 512,
    fidelity: str = "corrected",
    level: str = "default",
    threads: int = 1,
    chunk_log2: int | None = None,
    path: str = "auto",
) -> bytes:
    """Round a tensor of floats and compress the result; each weight changes by at most `relative_bound` of itself.

    Kept are sign, exponent and the top `mantissa_bits` bits of the mantissa. With blocks each weight is divided by the
    normalizer of its block before it is rounded, so that the block's largest weight is kept best, to 8 bits of its
    mantissa. Zeros keep their signs. NaN, infinity, subnormal numbers and whatever else could not keep the bound are
    stored exactly; a tensor in which more than one number in 16 is such is not rounded at all: its blob is lossless.

    Args:
        tensor: A torch tensor (moved to the CPU if elsewhere) or numpy array of dtype bfloat16, float16 or float32.
        mantissa_bits: 0 to 6; or 7, which changes nothing and is the same as `encode`, for every dtype.
        block_size: Weights, in the order of memory, that share a normalizer; any positive number. None for none.
        fidelity: "corrected": weights are divided by the stored normalizer, and halves round to even. "reference": the
            arithmetic of the paper's code, for bfloat16 only: quotients are rounded to bfloat16 first, halves round up,
            and the largest numbers may become infinite.
        level: "fast", "default", "high" or "max".
        threads: Threads to encode with, at least 1. The bytes do not depend on it.
        chunk_log2: See `encode`.
        path: See `encode`.

    Returns:
        The blob; `decode` gives the rounded tensor, always the same.

    Raises:
        UsageError: A setting is out of its range.
        Unsupported: Tensors of this dtype cannot be rounded, or not with this fidelity.

    Source: NeuZip (arXiv 2410.20650), lossy compression for inference.
    """
    data, name, shape = content_of(tensor)
    precision = Precision(mantissa_bits, block_size, fidelity)
    return encode_raw(
        data, name, shape, level=level, threads=threads, chunk_log2=chunk_log2, precision=precision, path=path
    )


def info(blob: Blob, *, size: int | None = None) -> BlobInfo:
    """Read a blob's header and index, without its payload.

    Args:
        blob: The blob: bytes, a memoryview (also of a mapped file), or a one-dimensional uint8 array or tensor.
        size: Bytes of the whole blob, if only its first `header_size` are given (lossless blobs only).

    Raises:
        CorruptBlob: The bytes are damaged or not a blob.
        Unsupported: The blob is of a newer format.
    """
    source = bytes_of(blob)
    with in_our_words("a blob"):
        if _is_lossy(source):
            return _lossy_info(lossy.read_header(source))
        dtype, shape, nbytes, level, chunk_log2, digest, starts, _, base = best.read_header(source, size)
    named, base_digest = named_digest(digest), named_digest(base) if base else None
    return BlobInfo(
        dtype, tuple(shape), nbytes, LEVELS[level], named, VERSION, chunk_log2, tuple(starts), base_digest=base_digest
    )


def header_size(beginning: Blob, size: int) -> int:
    """Bytes of the header and index of a lossless blob of `size` bytes, from its first 1,024, or all."""
    with in_our_words("a blob"):
        return index_end(bytes_of(beginning), size)


def digest_of(buffer: Any, dtype: str, *, chunk_log2: int | None = None) -> str:
    """The digest that a blob of these bytes and this chunk size has (`BlobInfo.digest`), without encoding them."""
    checked_level("default", chunk_log2)
    element, data = element_type(dtype), as_bytes(bytes_of(buffer))
    step = element.number_bytes << (chunk_log2 or element.default_chunk_log2)
    checks = [best.check_of(data[start : start + step]) for start in range(0, len(data), step)]
    return named_digest(digest_of_checks(checks))


def is_lossy(blob: Blob) -> bool:
    """Return whether a `blob` was made by `encode_lossy` and rounded; only its first bytes are read."""
    return _is_lossy(bytes_of(blob))


def _is_lossy(source: Any) -> bool:
    return bytes(source[:3]) == lossy.MAGIC


def _lossy_info(header: lossy.LossyHeader) -> BlobInfo:
    _, _, _, level, chunk_log2, _, starts, *_ = best.read_header(header.words)
    rounding = header.rounding
    return BlobInfo(
        rounding.element.name,
        header.shape,
        header.nbytes,
        LEVELS[level],
        f"xxh3-128:{header.digest.hex()}",
        VERSION,
        chunk_log2,
        tuple(header.words_start + start for start in starts),
        rounding.mantissa_bits,
        rounding.block_size,
        rounding.fidelity,
        float(rounding.bound),
        header.worst,
    )


def decode_raw(blob: Blob, *, threads: int = 1, check: bool = False, path: str = "auto", base: Any = None) -> Bytes:
    """`decode` to a one-dimensional uint8 array, whose memory returns to a pool when it is freed."""
    source = bytes_of(blob)
    with in_our_words("a blob"):
        return _decoded(source, _checked_threads(threads), check, path, base)[0]


def decode(blob: Blob, *, threads: int = 1, check: bool = False, path: str = "auto", base: Any = None) -> torch.Tensor:
    """Decode a blob to a CPU tensor with the dtype and shape that were encoded.

    Args:
        blob: See `info`.
        threads: Threads to decode with, at least 1.
        check: Also compare what was decoded with the stored checks, or with the digest of a lossy blob.
        path: See `encode`.
        base: The tensor that the blob was encoded against, or its bytes; ignored by blobs that stand alone.

    Raises:
        CorruptBlob: The blob is damaged, or the base is another one (which shows only with `check`).
        UsageError: The base is missing or has another size.
        Unsupported: The blob is of a newer format, or torch lacks the element type, or an empty tensor's shape.
    """
    source = bytes_of(blob)
    with in_our_words("a blob"):
        raw, name, shape = _decoded(source, _checked_threads(threads), check, path, base)
    return tensor_of(raw, torch_dtype(name), shape)


def decode_into(
    blob: Blob,
    out: torch.Tensor | np.ndarray[Any, Any],
    *,
    threads: int = 1,
    check: bool = False,
    path: str = "auto",
    base: Any = None,
) -> None:
    """Decode a blob into memory that the caller provides.

    Args:
        blob: See `info`.
        out: A contiguous CPU tensor or writable array of exactly the tensor's bytes, of any dtype. If the blob turns
            out to be damaged, its contents are undefined.
        threads: Threads to decode with, at least 1.
        check: See `decode`.
        path: See `encode`.
        base: See `decode`.

    Raises:
        UsageError: `out` has another size, is not contiguous, or is not writable.
        CorruptBlob: The blob is damaged.
        Unsupported: The blob is of a newer format.
    """
    source, threads = bytes_of(blob), _checked_threads(threads)
    if isinstance(out, np.ndarray):
        fits, address = out.flags.c_contiguous and out.flags.writeable, out.ctypes.data
    else:
        fits, address = out.is_contiguous() and out.is_cpu and not (out.is_conj() or out.is_neg()), out.data_ptr()
    if not fits:
        raise UsageError("The output must be contiguous, writable, on the CPU, and not a conjugate or negative view.")
    with in_our_words("a blob"):
        if _is_lossy(source):
            lossy.decode(lossy.read_header(source), threads, check, path, memory_at(address, out.nbytes))
        else:
            codec_for(path).decode_to_address(source, address, out.nbytes, threads, check, path, _bytes_or_none(base))


def decode_rows(
    blob: Blob,
    start: int,
    stop: int,
    *,
    threads: int = 1,
    check: bool = False,
    path: str = "auto",
    base: Any = None,
) -> torch.Tensor:
    """Decode rows `start` to `stop` (exclusive) of dimension 0; only the chunks that they touch are read."""
    source = bytes_of(blob)
    with in_our_words("a blob"):
        name, shape, numbers, _ = _about(source)
    dtype = torch_dtype(name)
    if not shape or not 0 <= start <= stop <= shape[0]:
        raise UsageError(f"Rows {start} to {stop} lie outside a tensor of shape {tuple(shape)}.")
    per_row = numbers // shape[0] if shape[0] else 0
    whole = (stop - start, *shape[1:])
    return decode_numbers(
        blob, start * per_row, stop * per_row, dtype, whole, threads=threads, check=check, path=path, base=base
    )


def decode_numbers(
    blob: Blob,
    first: int,
    last: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    threads: int = 1,
    check: bool = False,
    path: str = "auto",
    base: Any = None,
) -> torch.Tensor:
    """Numbers `first` to `last` (exclusive) as a tensor of a shape, for callers who know what the blob holds."""
    source, threads = bytes_of(blob), _checked_threads(threads)
    with in_our_words("a blob"):
        raw = _numbers(source, first, last, threads, check, path, base)
    return tensor_of(raw, dtype, shape)


_A_BLOB = in_our_words("a blob")


def fill(
    out: torch.Tensor, blob: Blob, first: int = 0, last: int | None = None, *, threads: int = 1, check: bool = False
) -> torch.Tensor:
    """Decode numbers `first` to `last` (exclusive), all by default, into a contiguous CPU tensor of just these."""
    source = blob if type(blob) is memoryview and blob.c_contiguous else bytes_of(blob)
    with _A_BLOB:
        if _is_lossy(source):
            end = _about(source)[2] if last is None else last
            memory_at(out.data_ptr(), out.nbytes)[:] = _numbers(source, first, end, threads, check)
        else:
            best.decode_to_address(source, out.data_ptr(), out.nbytes, threads, check, "auto", None, first, last)
    return out


def pieces(blob: Blob, *, threads: int = 1) -> Iterator[memoryview]:
    """A tensor's bytes, a chunk per thread at a time, for callers who need not hold them all."""
    source = bytes_of(blob)
    with _A_BLOB:
        _, _, numbers, chunk_log2 = _about(source)
        for first in range(0, numbers, threads << chunk_log2):
            yield _numbers(source, first, min(first + (threads << chunk_log2), numbers), threads).data


def pooled(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor from the pool of decoded tensors, whose memory is warm."""
    return tensor_of(best.pooled_array(numbers * dtype.itemsize), dtype, (numbers,))


def _bytes_or_none(base: Any) -> Any:
    """A base's bytes: given so, or as a tensor."""
    return None if base is None else bytes_of(base)


def _about(source: Any) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's dtype by name, its shape, its numbers, and log2 of how many of them a chunk has."""
    if _is_lossy(source):
        header = lossy.read_header(source)
        return header.rounding.element.name, header.shape, header.count, 18
    name, shape, _, _, chunk_log2, _, _, numbers, *_ = best.read_header(source)
    return name, shape, numbers, chunk_log2


def _numbers(
    source: Any, first: int, last: int, threads: int, check: bool = False, path: str = "auto", base: Any = None
) -> Bytes:
    if _is_lossy(source):
        return lossy.decode_numbers(lossy.read_header(source), first, last, threads, path)
    return codec_for(path).decode_numbers(source, first, last, threads, check, path, _bytes_or_none(base))


def _decoded(source: Any, threads: int, check: bool, path: str, base: Any) -> tuple[Bytes, str, tuple[int, ...]]:
    """A tensor's bytes, the name of its dtype and its shape."""
    if not _is_lossy(source):
        return codec_for(path).decode(source, threads, check, path, _bytes_or_none(base))
    header = lossy.read_header(source)
    return lossy.decode(header, threads, check, path), header.rounding.element.name, header.shape


def checked_level(level: str, chunk_log2: int | None) -> int:
    """The level's number; chunk_log2 is checked, too."""
    if level not in LEVELS:
        raise UsageError(f"There is no level {level!r}.", cure=f"Choose one of {', '.join(LEVELS)}.")
    if chunk_log2 is not None and not 10 <= chunk_log2 <= 22:
        raise UsageError(f"chunk_log2 is {chunk_log2}.", cure="Choose 10 to 22.")
    return LEVELS.index(level)


def _checked_threads(threads: int) -> int:
    if threads < 1:
        raise UsageError(f"threads is {threads}.", cure="Choose 1 or more.")
    return min(threads, 256)


# ---- chunk by chunk --------------------------------------------------------------------------------------------------
# For tensors that are larger than the memory: a few hundred kilobytes are at hand at a time.


@final
class ChunkEncoder:
    """Encodes a tensor chunk by chunk, bit for bit: leave header_size bytes free, write the chunks, then header().

    With `base` differences from a base are stored, of which every chunk needs its part.
    """

    def __init__(
        self,
        dtype: str,
        shape: Sequence[int],
        *,
        level: str = "default",
        chunk_log2: int | None = None,
        path: str = "auto",
        base: bool = False,
    ) -> None:
        number, dims = checked_level(level, chunk_log2), tuple(int(d) for d in shape)
        if len(dims) > 64 or min(dims, default=0) < 0:
            raise UsageError(f"A tensor cannot have the shape {dims}.")
        with in_our_words("a tensor of type %s and shape %s", dtype, dims):
            element = element_type(dtype)
            self.nbytes = tensor_bytes(element, dims)
        self._writer = HeaderWriter(element, dims, number, chunk_log2 or element.default_chunk_log2, has_base=base)
        self._codec, self._path = codec_for(path), path
        self.chunk_bytes = element.number_bytes << self._writer.chunk_log2
        self.chunks = -(-self.nbytes // self.chunk_bytes)
        self.header_size = 28 + sum(len(varint(d)) for d in dims) + 16 * base + 12 * self.chunks

    def encode(self, data: Any, base: Any = None) -> bytes:
        """The next chunk: of the next `chunk_bytes` bytes, or those that are left, and the same bytes of the base."""
        return self.finish(self.prepare(data, base))

    def prepare(self, data: Any, base: Any = None) -> tuple[int, Any]:
        """Encode a chunk on any thread, for `finish`; arguments and errors as `encode`."""
        source = bytes_of(data)
        if (base is not None) != self._writer.has_base:
            raise UsageError("The chunk's base is missing, or the tensor has none.")
        with in_our_words("a chunk of type %s", self._writer.element.name):
            name, other = self._writer.element.name, _bytes_or_none(base)
            return memoryview(source).nbytes, self._codec.encode_chunk(
                source, name, self._writer.level, self._path, other
            )

    def finish(self, prepared: tuple[int, Any]) -> bytes:
        """The next chunk, of what `prepare` returned for it."""
        expected = min(self.chunk_bytes, self.nbytes - len(self._writer.lengths) * self.chunk_bytes)
        if prepared[0] != expected or not expected:
            raise UsageError(f"The next chunk has {expected} bytes, {prepared[0]} were given.")
        return self._writer.add(prepared[1])

    def header(self) -> bytes:
        """The blob's first `header_size` bytes, when all chunks were encoded."""
        if len(self._writer.lengths) != self.chunks:
            raise UsageError(f"{len(self._writer.lengths)} of {self.chunks} chunks were encoded.")
        return self._writer.header()

    @property
    def digest(self) -> str:
        """The tensor's digest, as in `BlobInfo`, when all chunks were encoded."""
        return named_digest(digest_of_checks(self._writer.checks))


@final
class ChunkDecoder:
    """Decodes a lossless blob of `size` bytes chunk by chunk, from its first `header_size` bytes or more."""

    def __init__(self, header: Blob, size: int, *, path: str = "auto") -> None:
        self._header, self._size = bytes_of(header), size
        if _is_lossy(self._header):
            raise Unsupported("A lossy blob cannot be decoded chunk by chunk.", cure="Decode it as a whole.")
        self.info = info(self._header, size=size)
        self.chunk_bytes = element_type(self.info.dtype).number_bytes << self.info.chunk_log2
        self._codec, self._path = codec_for(path), path

    def decode(
        self, number: int, chunk: Blob, *, base: Any = None, check: bool = True, out: Bytes | None = None
    ) -> Bytes:
        """The bytes of one chunk's numbers, into `out` if given, compared with the chunk's check.

        `chunk` is the blob's bytes info.chunk_offsets[number] to [number + 1], `base` the same bytes of the base as of
        the tensor, whose are those from number * chunk_bytes on.
        """
        left = min(self.chunk_bytes, self.info.nbytes - number * self.chunk_bytes)
        result = self._codec.pooled_array(max(left, 0)) if out is None else out
        with in_our_words("chunk %s of a blob", number):
            self._codec.decode_chunk(
                self._header, self._size, number, bytes_of(chunk), result, check, self._path, _bytes_or_none(base)
            )
        return result


# ---- decoding on another thread --------------------------------------------------------------------------------------
# What was not begun when its result is asked for is decoded by whoever asks, so that nobody waits for work that could
# be under way. Without the native module everything is decoded so.


@final
class Decoding:
    """A blob that is being decoded, or will be; made by `DecodeQueue.add`."""

    def __init__(self, blob: Any, pending: Any, header: lossy.LossyHeader | None = None) -> None:
        self._blob = blob
        self._pending = pending
        self._header = header
        self._cancelled = False

    def result(self) -> torch.Tensor:
        """The tensor, waiting for it if need be; errors as of `decode`."""
        if self._cancelled:
            raise UsageError("A decoding that was cancelled has no result.", cure="Add the blob again.")
        if self._pending is None:
            return decode(self._blob)
        with in_our_words("a blob"):
            raw, name, shape = self._pending.result()
            if self._header is not None:
                lossy.put_kept(self._header, 0, self._header.count, "auto", raw)
                name, shape = self._header.rounding.element.name, self._header.shape
        return tensor_of(raw, torch_dtype(name), shape)

    def cancel(self) -> None:
        """Do not begin, or wait until what was begun is over; afterwards the blob's memory is not read any more."""
        self._cancelled = True
        if self._pending is not None:
            self._pending.cancel()


@final
class DecodeQueue:
    """One thread that decodes blobs in the order in which they were added."""

    def __init__(self) -> None:
        self._native = new_queue()

    def add(self, blob: Blob) -> Decoding:
        """Have a blob decoded, whose memory must stay where it is until `result` or `cancel` returned."""
        with in_our_words("a blob"):
            source = bytes_of(blob)
            if not self._native:
                return Decoding(blob, None)
            if not _is_lossy(source):
                return Decoding(blob, self._native.add(source))
            header = lossy.read_header(source)
            normalizers = lossy.normalizers_of(header, 0, header.count, "auto")
            return Decoding(blob, self._native.add_words(header.words, normalizers, *header.rounding.arguments), header)

    def close(self) -> None:
        """End the thread; results of what was added can still be asked for."""
        if self._native:
            self._native.close()
