"""The codec in numpy: the whole of docs/format.md as a program, and the place to start reading.

The functions at the top are those of the native module (`backend.Codec`), with the same bytes and the same refusals, a
hundred times slower and on one thread, whatever `threads` and `path` say. From the outside in, reading and writing:

    decode, encode              a blob: header, index of chunks, checks, digest
    read_chunk, write_chunk     up to 2**chunk_log2 numbers: a plane of their top bytes, then one for every lower byte
    read_plane, write_plane     one plane, in one of nine modes
    decode_words, round_weights the arithmetic of lossy blobs

Chunks and planes are in `numpy_planes.py`, their entropy coding in `numpy_rans.py`, the choice between modes and tables
in `numpy_tables.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from netweight.codec.header import (
    BY_NAME,
    BlobHeader,
    ByteReader,
    Bytes,
    ElementType,
    HeaderWriter,
    as_bytes,
    corrupt,
    element_type,
    memory_at,
    refuse_inflated,
    tensor_bytes,
)
from netweight.codec.header import read_header as header_of
from netweight.codec.numpy_planes import FLAT, read_chunk, write_chunk, write_planes
from netweight.codec.numpy_rans import Words
from netweight.codec.numpy_tables import Counts, Integers

Floats = npt.NDArray[np.float32]

_INFINITE = 0x7F800000  # bits of a float32
_LEAST_NORMAL = 0x00800000


def paths() -> list[str]:
    """The only code path."""
    return ["python"]


def trim_pool(keep: int) -> None:
    """There is no pool of buffers."""


def pooled_array(size: int) -> Bytes:
    """A new array."""
    return np.empty(size, np.uint8)


def encode(
    buffer: Any, dtype: str, shape: Sequence[int], level: int, chunk_log2: int, threads: int = 1, path: str = "python",
    base: Any = None, gpu_modes: bool = False,
) -> bytes:  # fmt: skip
    """Encode a tensor's bytes; level by number, chunk_log2 0 for the default."""
    return _encode(buffer, element_type(dtype), shape, level, chunk_log2, base, gpu_modes)


def encode_words(
    words: Any, mantissa_bits: int, level: int, chunk_log2: int, threads: int, path: str, gpu_modes: bool = False
) -> bytes:
    """Encode the words of a lossy blob: a U16 blob whose splits are those of floats."""
    element = replace(BY_NAME["U16"], exponent_bits=15 - mantissa_bits, mantissa_bits=mantissa_bits)
    return _encode(words, element, [len(words) // 2], level, chunk_log2, None, gpu_modes)


def _encode(
    buffer: Any, element: ElementType, shape: Sequence[int], level: int, chunk_log2: int, base: Any, gpu_modes: bool
) -> bytes:
    data, other = as_bytes(buffer), None if base is None else as_bytes(base)
    if tensor_bytes(element, tuple(shape)) != len(data):
        raise ValueError("the buffer's size does not fit dtype and shape")
    if gpu_modes and base is not None:
        raise ValueError("GPU kernels do not decode differences from a base")
    if other is not None and len(other) != len(data):
        raise ValueError("the base has another size than the tensor")
    chunk_log2 = chunk_log2 or element.default_chunk_log2
    writer = HeaderWriter(element, tuple(shape), level, chunk_log2, other is not None)
    step, chunks = element.number_bytes << chunk_log2, []
    for start in range(0, len(data), step):
        numbers = data[start : start + step]
        if gpu_modes:
            encoded = (write_planes(numbers, element, level, FLAT), check_of(numbers), 0, False)
        else:
            encoded = _chunk(numbers, element, level, None if other is None else other[start : start + step])
        chunks.append(writer.add(encoded))
    return b"".join((writer.header(), *chunks))


def encode_chunk(
    numbers: Any, dtype: str, level: int, path: str = "python", base: Any = None
) -> tuple[bytes, int, int, bool]:
    """Encode one chunk: its bytes, its check, that of the base's numbers, whether GPU kernels cannot decode it."""
    return _chunk(as_bytes(numbers), element_type(dtype), level, None if base is None else as_bytes(base))


def _chunk(data: Bytes, element: ElementType, level: int, base: Bytes | None) -> tuple[bytes, int, int, bool]:
    chunk, cpu_modes = write_chunk(data, element, level, base)
    base_check = 0 if base is None else check_of(base)
    return chunk, check_of(data), base_check, cpu_modes


def read_header(
    blob: Any, size: int | None = None
) -> tuple[str, tuple[int, ...], int, int, int, bytes, tuple[int, ...], int, bytes]:
    """Type, shape, bytes, level, chunk_log2, digest, starts of chunks and the size, numbers, base's digest."""
    h = header_of(blob, size=size)
    about = (h.nbytes, h.level, h.chunk_log2, h.digest, h.chunk_starts, h.numbers, h.base_digest)
    return h.element.name, h.shape, *about


def decode(
    blob: Any, threads: int = 1, check: bool = False, path: str = "python", base: Any = None
) -> tuple[Bytes, str, tuple[int, ...]]:
    """A tensor's bytes, the name of its element type, its shape."""
    header = header_of(blob)
    out = decode_numbers(blob, 0, header.numbers, check=check, base=base)
    return out, header.element.name, header.shape


def decode_to_address(
    blob: Any, address: int, nbytes: int, threads: int = 1, check: bool = False, path: str = "python", base: Any = None,
    first: int = 0, last: int | None = None,
) -> None:  # fmt: skip
    """Decode numbers `first` to `last` (exclusive), all by default, into memory that is known by its address."""
    header = header_of(blob)
    end = header.numbers if last is None else last
    expected = (end - first) * header.element.number_bytes
    if expected != nbytes:
        raise ValueError(f"the output has {nbytes} bytes where the tensor has {expected}")
    whole = first == 0 and last is None
    decoded = (
        decode(blob, check=check, base=base)[0] if whole else decode_numbers(blob, first, end, check=check, base=base)
    )
    memory_at(address, nbytes)[:] = decoded


def decode_numbers(
    blob: Any, first: int, last: int, threads: int = 1, check: bool = False, path: str = "python", base: Any = None
) -> Bytes:
    """The bytes of numbers `first` to `last` (exclusive); only the chunks that they touch are read."""
    header, data = header_of(blob), as_bytes(blob)
    other = _base_of(header, base, header.nbytes)
    size = header.element.number_bytes
    refuse_inflated((last - first) * size, len(data))
    out = np.empty((last - first) * size, np.uint8)
    step = 1 << header.chunk_log2
    for chunk in range(first // step, -(-last // step) if last > first else 0):
        start = chunk * step
        end = min(start + step, header.numbers)
        body = data[header.chunk_starts[chunk] : header.chunk_starts[chunk + 1]]
        numbers = _decode(header, chunk, body, None if other is None else other[start * size : end * size], check)
        begin, end = max(first, start), min(last, end)
        out[(begin - first) * size : (end - first) * size] = numbers[(begin - start) * size : (end - start) * size]
    return out


def decode_chunk(
    header: Any, size: int, number: int, chunk: Any, out: Bytes, check: bool, path: str = "python", base: Any = None
) -> None:
    """Decode chunk `number` of a blob of `size` bytes whose header and index are at hand."""
    fields, body = header_of(header, size=size), as_bytes(chunk)
    starts, step = fields.chunk_starts, fields.element.number_bytes << fields.chunk_log2
    expected = min(step, fields.nbytes - number * step)
    if not 0 <= number < len(starts) - 1 or len(body) != starts[number + 1] - starts[number] or out.nbytes != expected:
        raise ValueError("the chunk, or the output for it, has another size")
    out[:] = _decode(fields, number, body, _base_of(fields, base, expected), check)


def _base_of(header: BlobHeader, base: Any, nbytes: int) -> Bytes | None:
    """The base's bytes for so many of the tensor; None if the blob stands alone."""
    if not header.base_digest:
        return None
    if base is None:
        raise ValueError("it contains differences from a base, and the base is missing")
    data = as_bytes(base)
    if len(data) != nbytes:
        raise ValueError("the base has another size than the tensor")
    return data


def _decode(header: BlobHeader, number: int, body: Bytes, base: Bytes | None, check: bool) -> Bytes:
    """The bytes of one chunk's numbers."""
    count = min(1 << header.chunk_log2, header.numbers - (number << header.chunk_log2))
    numbers = read_chunk(ByteReader(body), header.element, count, header.cpu_modes, base)
    if check and check_of(numbers) != header.checks[number]:
        reason = "the decoded bytes do not have the digest that was stored with them"
        raise corrupt(reason + (", or the base is another tensor" if header.base_digest else ""))
    return numbers


# ---- the check of a chunk --------------------------------------------------------------------------------------------


@cache
def _aes_tables() -> tuple[Integers, Counts]:
    """By row and byte, what a byte adds to its column in a round of AES; and which bytes 16 states' columns take."""
    powers, columns = [1], np.zeros((4, 256), "<u4")
    for _ in range(254):
        powers.append(powers[-1] ^ powers[-1] << 1 ^ (powers[-1] >> 7) * 0x11B)  # times 3
    inverse = {0: 0} | {powers[i]: powers[-i % 255] for i in range(255)}
    for byte, inverted in inverse.items():
        turned = [inverted << turn | inverted >> (8 - turn) for turn in range(5)]
        substitute = (0x63 ^ turned[0] ^ turned[1] ^ turned[2] ^ turned[3] ^ turned[4]) & 0xFF
        twice = substitute << 1 ^ (substitute >> 7) * 0x11B
        rows = bytes((twice, substitute, substitute, twice ^ substitute))
        columns[:, byte] = [int.from_bytes((rows * 2)[4 - turn : 8 - turn], "little") for turn in range(4)]
    places = np.arange(64)[:, None]
    return columns, 16 * (places // 4) + 4 * ((places + np.arange(4)) % 4) + np.arange(4)


def _aes_round(states: Integers) -> Integers:
    """A round of AES without key, of as many states of four columns as there are."""
    columns, places = _aes_tables()
    parts = columns[np.arange(4), states.view(np.uint8)[places[: len(states)]]]
    return parts[:, 0] ^ parts[:, 1] ^ parts[:, 2] ^ parts[:, 3]


def check_of(buffer: Any) -> int:
    """The check of a chunk's bytes."""
    data = as_bytes(buffer)
    blocks = np.zeros((-(-len(data) // 256), 64), "<u4")
    blocks.view(np.uint8).reshape(-1)[: len(data)] = data
    states = np.arange(256, dtype=np.uint8).view("<u4")
    for block in blocks:
        states = _aes_round(states) ^ block
    folded = np.array([len(data), 0], "<u8").view("<u4")
    for state in (*states.reshape(16, 4), *np.zeros((3, 4), "<u4")):
        folded = _aes_round(folded) ^ state
    return int(folded.view("<u8")[0])


# ---- the arithmetic of lossy blobs -----------------------------------------------------------------------------------
# A word is what is kept of a weight: its sign in bit 15; below, right-aligned, the 8 exponent bits of a float32 and the
# top k bits of its mantissa, rounded. With blocks, weights are divided by their block's normalizer before, and what is
# read is multiplied by it: 1 + n / 256, of which n is stored. `native/rounding.h` does the same.


def round_weights(
    data: Bytes, dtype: str, mantissa_bits: int, block: int, reference: bool, numerator: float, denominator: float,
    words: Words, normalizers: Bytes, out: Bytes, path: str = "python",
) -> tuple[float, list[int]]:  # fmt: skip
    """Round weights, of which the first begins a block (0 for no blocks), into words, normalizers and rounded bytes.

    Returned are the largest relative change, and the weights that change by more than numerator / denominator or cannot
    be rounded: they are kept exactly, and their words are 0.
    """
    weights = _widened(data, dtype)
    bits = weights.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    finite = magnitude < _INFINITE
    quotient = weights
    if block:
        sound = np.where(finite & (magnitude >= _LEAST_NORMAL), magnitude, 0)
        largest = np.maximum.reduceat(sound, np.arange(0, len(weights), block))
        normalizers[:] = (largest >> 15).astype(np.uint8)
        with np.errstate(invalid="ignore", under="ignore"):
            quotient = weights / _factors(normalizers, block, 0, len(weights))
        if reference:
            quotient = _widened(_narrowed(quotient, dtype), dtype)
    code = _codes(quotient, mantissa_bits, reference)
    code[~finite] = 0
    words[:] = bits >> 16 & np.uint32(0x8000) | code
    out[:] = _weights_of(words, normalizers, dtype, mantissa_bits, block, reference, 0)
    rounded = _widened(out, dtype)

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        size = np.abs(weights.astype(np.float64))
        change = np.abs(rounded.astype(np.float64) - weights.astype(np.float64))
        # The comparison is exact, because both sides have fewer than 53 bits.
        within = change * denominator <= size * numerator
        if reference:
            within |= np.isinf(rounded)
        exact = finite & within & ((code != 0) | (magnitude == 0))
        changes = (change / size)[exact & (magnitude != 0)]
    escapes = np.flatnonzero(~exact)
    words[escapes] = 0
    number = BY_NAME[dtype].number_bytes
    out.reshape(-1, number)[escapes] = data.reshape(-1, number)[escapes]
    return float(changes.max(initial=0.0)), escapes.tolist()


def decode_words(
    blob: Any, normalizers: Any, dtype: str, mantissa_bits: int, block: int, reference: bool, first: int, last: int,
    address: int, nbytes: int, threads: int = 1, path: str = "python",
) -> None:  # fmt: skip
    """Decode words `first` to `last` to weights at an address, with the normalizers of the blocks that they touch."""
    words = decode_numbers(blob, first, last).view("<u2")
    place = first % block if block else 0
    memory_at(address, nbytes)[:] = _weights_of(
        words, as_bytes(normalizers), dtype, mantissa_bits, block, reference, place
    )


def _weights_of(
    words: Words, normalizers: Bytes, dtype: str, mantissa_bits: int, block: int, reference: bool, first: int
) -> Bytes:
    """The bytes of weights, without those kept exactly; `first` is the first word's place in its block."""
    code = (words & np.uint16(0x7FFF)).astype(np.uint32)
    # Infinity has the largest word.
    most = (255 << mantissa_bits) - (not reference)
    if ((code > most) | ((code != 0) & (code < 1 << mantissa_bits))).any():
        raise corrupt("a word stands for no number")
    bits = code << np.uint32(23 - mantissa_bits) | (words & np.uint16(0x8000)).astype(np.uint32) << 16
    values = bits.view(np.float32)
    if block:
        with np.errstate(over="ignore"):
            values = values * _factors(normalizers, block, first, len(words))
    return _narrowed(values, dtype)


def _codes(quotient: Floats, mantissa_bits: int, reference: bool) -> npt.NDArray[np.uint32]:
    """Words without signs; 0 for what cannot be rounded."""
    magnitude = quotient.view(np.uint32) & np.uint32(0x7FFFFFFF)
    shift, infinite = 23 - mantissa_bits, 255 << mantissa_bits
    half = np.uint32(1 << (shift - 1))
    if reference:  # half up
        code = (magnitude + half) >> np.uint32(shift)
        code[code > infinite] = 0
    else:  # half to even
        code = (magnitude + (half - np.uint32(1)) + (magnitude >> np.uint32(shift) & np.uint32(1))) >> np.uint32(shift)
        code[code >= infinite] = 0
    code[magnitude < _LEAST_NORMAL] = 0
    return code


def _factors(normalizers: Bytes, block: int, first: int, count: int) -> Floats:
    """The number that each weight was divided by: of nine bits, so exact."""
    blocks = np.arange(first, first + count) // block
    factors: Floats = (np.float32(1) + normalizers.astype(np.float32) / np.float32(256))[blocks]
    return factors


def _widened(data: Bytes, dtype: str) -> Floats:
    """Weights as float32, exactly."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        with np.errstate(invalid="ignore"):  # signaling NaNs
            return data.view("<f2").astype(np.float32)
    floats: Any = data.view("<f4")
    return floats  # type: ignore[no-any-return]


def _narrowed(values: Floats, dtype: str) -> Bytes:
    """The bytes of float32 numbers, none of them NaN, in the weights' own type; half to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return rounded.astype("<u2").view(np.uint8)
    if dtype == "F16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype("<f2").view(np.uint8)
    return values.astype("<f4").view(np.uint8)
