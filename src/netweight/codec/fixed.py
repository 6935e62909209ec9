"""The fixed-length form of bf16 matrices in memory, lossless, which a product can read as fast as memory gives it.

Entropy-coded bytes must be decoded before they are used; here every weight has its place, so that a kernel multiplies
what it loads. Exponents of trained weights lie close together: of each weight the sign and the mantissa are kept (8
bits) and a code of 4 bits. Code 0 is zero; codes 1 to 15 are the exponents from a tensor's `base` on. Weights with
other exponents, some 2 in 10 000, stand as +0 in their place and whole in a list of escapes. That is 12.0 to 12.1 bits
per weight instead of 16. It is a form for memory only: files hold the entropy-coded form. docs/gpus.md says
when it pays; kernels/fixed.cu and native/products.h compute with it, for `codec.cuda` and models in compressed memory.

A payload is a U8 tensor of these parts, numbers little-endian:

      0  8 bytes   length of what follows; with it every later part is aligned as loads of 16 bytes need it
      8  "NWF", version 1 (one byte), dtype (one byte: 1 is bf16), base (one byte, 1 to 128), two zeros
     16  rows, columns, escapes (8 bytes each), CRC-32 of bytes 8 to 39, then zeros up to byte 128
    128  tiles of 16 rows and 64 columns, 1536 bytes each, along a row of tiles first
         first[rows + 1] (4 bytes each): where the escapes of each row begin, and the number of all
         escapes (4 bytes each): column, and above 16 bits the weight; by row, then by column
         zeros up to a multiple of 16 bytes

A tile holds what the 32 lanes of a warp need for four products of 16 × 16 weights on tensor cores. Lane 4 g + t holds,
of rows g and g + 8, columns 16 t to 16 t + 15: in product q (0 to 3) and pair p (0 or 1) columns 16 t + 4 q + 2 p and
the next, e = 0 and 1. Rows and columns that fill up the last tiles are zeros.

    byte 512 (q / 2) + 16 lane    16 bytes; words 2 (q % 2) + p of 32 bits: of the 16 bits e, bits 0 to 6 are the
                                  mantissa and bit 15 the sign of row g, bits 8 to 14 and bit 7 those of row g + 8
    byte 1024 + 16 lane           16 bytes; word q: the code of row g + 8 h, pair p, element e is in bits
                                  7 + 4 (h + 2 p + 4 e) and the next three, bit 31 being followed by bit 0

So a register of two bf16 numbers, as tensor cores want them, takes a mask of either word; row g + 8 after the bytes of
each half are exchanged, and codes after a rotation.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, final

import torch
import torch.nn.functional as F

from netweight.codec.api import pooled
from netweight.codec.backend import compiled, in_our_words
from netweight.errors import CorruptBlob, Unsupported

MAGIC = b"NWF"
VERSION = 1
TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 16, 64, 1536
# Byte of the payload where the tiles begin.
TILES_AT = 128
# An escape stores its column in 16 bits.
MOST_COLUMNS = 1 << 16
# With this base the largest exponent is 142, and 2 ** (base - 1) is a bf16 number with which kernels multiply.
MOST_BASE = 128
# At most one of so many weights may escape.
MOST_ESCAPES = 32
# From this many rows of inputs on, torch's product of a decoded weight was faster in a measurement.
MOST_INPUTS_IN_BLOCKS = 32
# The most rows of inputs. For more, decoding takes a small part of the time of a product.
MOST_INPUTS = 256
_BF16 = 1
_CODES = 15
# Weights that are processed at a time. Encoding and decoding need a few times this memory.
_STEP = 1 << 20
# Sign and mantissa of a bf16 number.
_SIGNS = 0x807F
_A_FIXED_WEIGHT = in_our_words("a weight in the fixed-length form")
_A_BLOB = in_our_words("a blob")


@final
@dataclass(frozen=True, slots=True)
class FixedLayout:
    """Offsets of a payload's parts."""

    rows: int
    """Rows of the weight."""
    columns: int
    """Columns of the weight."""
    escapes: int
    """Weights outside the codes."""
    base: int
    """The exponent of code 1, 1 to 128."""

    @property
    def tile_rows(self) -> int:
        """Rows of tiles."""
        return -(-self.rows // TILE_ROWS)

    @property
    def tile_columns(self) -> int:
        """Columns of tiles."""
        return -(-self.columns // TILE_COLUMNS)

    @property
    def first_at(self) -> int:
        """Byte where the rows' first escapes begin."""
        return TILES_AT + self.tile_rows * self.tile_columns * TILE_BYTES

    @property
    def escapes_at(self) -> int:
        """Byte where the escapes begin."""
        return self.first_at + 4 * (self.rows + 1)

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return -(-(self.escapes_at + 4 * self.escapes) // 16) * 16


# ---- writing ---------------------------------------------------------------------------------------------------------


def encode_fixed(weight: torch.Tensor) -> torch.Tensor:
    """Put a bf16 matrix of any bit patterns into the fixed-length form, U8, on its own device."""
    _refuse_others(weight)
    bits = weight.detach().contiguous().view(torch.int16)
    layout = _chosen(bits)
    if bits.is_cpu and compiled is not None:
        return _encoded_natively(bits, layout)
    payload = torch.zeros(layout.size, dtype=torch.uint8, device=weight.device)
    payload[: len(_header(layout))] = torch.tensor(list(_header(layout)), dtype=torch.uint8)
    tiles = payload[TILES_AT : layout.first_at].view(layout.tile_rows, -1, TILE_BYTES)
    rows, escapes = [], []
    for first, last in _steps(layout):
        part = bits[first * TILE_ROWS : last * TILE_ROWS]
        inside, codes = _codes_of(part, layout.base)
        row, column = (~inside).nonzero(as_tuple=True)
        rows.append(row + first * TILE_ROWS)
        escapes.append(column | (part[row, column].to(torch.int64) & 0xFFFF) << 16)
        _write_tiles(part.where(inside, 0), codes, tiles[first:last])
    counts = torch.bincount(torch.cat(rows), minlength=layout.rows)
    payload[layout.first_at + 4 : layout.escapes_at].view(torch.int32).copy_(counts.cumsum(0))
    payload[layout.escapes_at :][: 4 * layout.escapes].view(torch.int32).copy_(_signed(torch.cat(escapes)))
    return payload


def _encoded_natively(bits: torch.Tensor, layout: FixedLayout) -> torch.Tensor:
    """The same by the native module, fifteen times as fast, because optimizers write weights again in every step."""
    payload = torch.empty(layout.size, dtype=torch.uint8)
    payload[:TILES_AT] = torch.tensor(list(_header(layout).ljust(TILES_AT, b"\0")), dtype=torch.uint8)
    with _A_FIXED_WEIGHT:
        compiled.encode_fixed(
            bits.data_ptr(), layout.rows, layout.columns, layout.base, layout.escapes, payload.data_ptr(),
            payload.numel(), torch.get_num_threads(),
        )  # fmt: skip
    return payload


def _refuse_others(weight: torch.Tensor) -> None:
    reason = None
    if weight.dtype != torch.bfloat16:
        reason = f"is of dtype {weight.dtype}, not bf16"
    elif weight.dim() != 2 or not weight.numel():
        reason = "is not a matrix with rows and columns"
    elif weight.shape[1] > MOST_COLUMNS or weight.shape[0] >= 1 << 31:
        reason = f"has more than {MOST_COLUMNS} columns or 2^31 rows"
    if reason is not None:
        raise Unsupported(
            f"A weight of shape {tuple(weight.shape)} {reason}: it has no fixed-length form.",
            cure="Keep it in the entropy-coded form: netweight.codec.encode.",
        )


def _chosen(bits: torch.Tensor) -> FixedLayout:
    """The base with the fewest escapes, the lowest of equal ones."""
    flat = bits.reshape(-1)
    counts, zeros = _exponents(flat)
    sums = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    windows = sums[1 + _CODES : MOST_BASE + 1 + _CODES] - sums[1 : MOST_BASE + 1]
    places = torch.arange(MOST_BASE, device=bits.device)
    base = int((windows * MOST_BASE - places).argmax()) + 1
    escapes = flat.numel() - int(windows[base - 1]) - int(zeros)
    if escapes * MOST_ESCAPES > flat.numel():
        raise Unsupported(
            f"In a weight of shape {tuple(bits.shape)}, {escapes} of {flat.numel()} numbers have exponents outside the "
            f"{_CODES} most frequent ones: it has no fixed-length form.",
            cure="Keep it in the entropy-coded form: netweight.codec.encode.",
        )
    return FixedLayout(bits.shape[0], bits.shape[1], escapes, base)


def _exponents(flat: torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Number of weights with each exponent, and number of zeros."""
    if flat.is_cpu and compiled is not None:
        found, none = compiled.exponents(flat.data_ptr(), flat.numel(), torch.get_num_threads())
        return torch.tensor(found), none
    counts = torch.zeros(256, dtype=torch.int64, device=flat.device)
    zeros = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in torch.split(flat, _STEP):
        # The conversion to uint8 drops the sign.
        counts += torch.bincount((part >> 7).to(torch.uint8), minlength=256)
        zeros += ((part & 0x7FFF) == 0).sum()
    return counts, zeros


def _header(layout: FixedLayout) -> bytes:
    numbers = (layout.rows, layout.columns, layout.escapes)
    said = MAGIC + bytes((VERSION, _BF16, layout.base, 0, 0)) + b"".join(n.to_bytes(8, "little") for n in numbers)
    return (layout.size - 8).to_bytes(8, "little") + said + zlib.crc32(said).to_bytes(4, "little")


def _steps(layout: FixedLayout) -> Iterator[tuple[int, int]]:
    """Ranges of rows of tiles to work on at a time."""
    step = max(1, _STEP // (layout.tile_columns * TILE_ROWS * TILE_COLUMNS))
    for first in range(0, layout.tile_rows, step):
        yield first, min(first + step, layout.tile_rows)


def _codes_of(bits: torch.Tensor, base: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which weights have a code, and the codes, 0 for zeros and escapes."""
    exponents = (bits >> 7) & 0xFF
    coded = (exponents >= base) & (exponents < base + _CODES)
    codes = (exponents - (base - 1)).where(coded, 0).to(torch.uint8)
    return coded | ((bits & 0x7FFF) == 0), codes


def _write_tiles(bits: torch.Tensor, codes: torch.Tensor, tiles: torch.Tensor) -> None:
    """Put whole rows of tiles into their places; `tiles` is of shape (rows of tiles, columns of tiles, 1536)."""
    # The axes are: tile, h, g; tile, t, q / 2, q % 2, p, e.
    places = (tiles.shape[0], 2, 8, tiles.shape[1], 4, 2, 2, 2, 2)
    room = (0, tiles.shape[1] * TILE_COLUMNS - bits.shape[1], 0, tiles.shape[0] * TILE_ROWS - bits.shape[0])
    bits, codes = (torch.nn.functional.pad(values, room).view(places) for values in (bits, codes))
    mantissas = (bits & 0x7F).to(torch.uint8).permute(0, 3, 5, 2, 4, 6, 7, 8, 1)
    signs = (bits < 0).to(torch.uint8).permute(0, 3, 5, 2, 4, 6, 7, 8, 1).flip(-1)
    tiles[..., :1024].view((*mantissas.shape[:2], 2, 8, 4, 2, 2, 2, 2)).copy_(mantissas | signs << 7)
    nibbles = codes.permute(0, 3, 2, 4, 5, 6, 8, 7, 1).reshape(*tiles.shape[:2], 512, 2)
    words = (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32)
    tiles[..., 1024:].copy_((words << 7 | (words >> 25 & 0x7F)).view(torch.uint8))


# ---- reading ---------------------------------------------------------------------------------------------------------


def is_fixed(payload: torch.Tensor) -> bool:
    """Return whether a payload of a compressed weight holds the fixed-length form; waits for the device."""
    return bytes(payload[8:11].tolist()) == MAGIC


def layout_of_shape(rows: int, columns: int) -> FixedLayout:
    """The layout of a matrix without escapes; kernels read the rest themselves."""
    return FixedLayout(rows, columns, 0, 1)


def read_layout(payload: torch.Tensor) -> FixedLayout:
    """Read and check a payload's header; waits for the device. Bytes behind the stated length are ignored."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() < TILES_AT:
        raise _corrupt("it is shorter than a header")
    head = bytes(payload[:TILES_AT].tolist())
    if head[8:11] != MAGIC:
        raise _corrupt("it does not begin as one")
    if head[11] != VERSION or head[12] != _BF16:
        raise Unsupported(
            f"A weight in the fixed-length form is of version {head[11]} and dtype {head[12]}; this release reads "
            f"version {VERSION} and dtype {_BF16}.",
            cure="Convert the stored weight again with this release: this form is for memory, not for files.",
        )
    rows, columns, escapes = (int.from_bytes(head[at : at + 8], "little") for at in (16, 24, 32))
    layout = FixedLayout(rows, columns, escapes, head[13])
    if not (0 < rows < 1 << 31 and 0 < columns <= MOST_COLUMNS and 1 <= layout.base <= MOST_BASE):
        raise _corrupt(f"its header states {rows} rows, {columns} columns and base {layout.base}")
    sound = zlib.crc32(head[8:40]) == int.from_bytes(head[40:44], "little")
    if not sound or escapes * MOST_ESCAPES > rows * columns or any(head[14:16]) or any(head[44:]):
        raise _corrupt("its header has impossible values")
    if int.from_bytes(head[:8], "little") != layout.size - 8 or layout.size > payload.numel():
        raise _corrupt(f"it has {payload.numel()} bytes, but its header needs {layout.size}")
    return layout


def decode_fixed(payload: torch.Tensor) -> torch.Tensor:
    """Decode natively on the CPU, elsewhere with torch's operators; `codec.cuda` has a kernel for it."""
    layout = read_layout(payload)
    if payload.is_cpu and compiled is not None:
        shape, threads = (layout.rows, layout.columns), torch.get_num_threads()
        out = pooled(layout.rows * layout.columns, torch.bfloat16).view(shape)
        with _A_FIXED_WEIGHT:
            compiled.decode_fixed(payload.data_ptr(), payload.numel(), *shape, out.data_ptr(), threads)
        return out
    rows, escapes = _escapes(payload, layout)
    bits = torch.empty(layout.rows, layout.columns, dtype=torch.int16, device=payload.device)
    for first, last in _steps(layout):
        _read_tiles(_tiles(payload, layout, first, last), layout, bits[first * TILE_ROWS : last * TILE_ROWS])
    bits[rows, escapes & 0xFFFF] = (escapes >> 16).to(torch.int16)
    return bits.view(torch.bfloat16)


def decode_fixed_rows(payload: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Decode the rows `ids`, integers of any shape, by torch's operators and from their tiles alone."""
    layout = read_layout(payload)
    if ids.numel() * TILE_ROWS >= layout.rows:
        return torch.nn.functional.embedding(ids, decode_fixed(payload))
    rows = ids.reshape(-1).to(torch.int64)
    if bool(((rows < 0) | (rows >= layout.rows)).any()):
        raise IndexError(f"index out of range in an embedding of {layout.rows} rows")
    tiles = _tiles(payload, layout, 0, layout.tile_rows)[rows // TILE_ROWS]
    bits = torch.empty(len(rows) * TILE_ROWS, layout.columns, dtype=torch.int16, device=payload.device)
    _read_tiles(tiles, layout, bits)
    tile_rows = bits.view(len(rows), TILE_ROWS, layout.columns)[torch.arange(len(rows)), rows % TILE_ROWS]
    first = payload[layout.first_at : layout.escapes_at].view(torch.int32)
    for place, (begin, end) in enumerate(torch.stack([first[rows], first[rows + 1]], 1).tolist()):
        escapes = payload[layout.escapes_at + 4 * begin : layout.escapes_at + 4 * end].view(torch.int16).view(-1, 2)
        tile_rows[place, escapes[:, 0].to(torch.int64) & 0xFFFF] = escapes[:, 1]
    return tile_rows.view(*ids.shape, layout.columns).view(torch.bfloat16)


def check_fixed(payload: torch.Tensor) -> FixedLayout:
    """Check all that can contradict itself in a payload of somebody else; kernels then touch no memory but its own."""
    layout = read_layout(payload)
    rows, escapes = _escapes(payload, layout)
    values = (escapes >> 16).to(torch.int16)
    inside, _ = _codes_of(values, layout.base)
    if bool(inside.any()):
        raise _corrupt("an escape is a weight that has a code")
    bits = torch.empty(layout.rows, layout.columns, dtype=torch.int16, device=payload.device)
    for first, last in _steps(layout):
        part = bits[first * TILE_ROWS : last * TILE_ROWS]
        _read_tiles(_tiles(payload, layout, first, last), layout, part)
        if bool((((part & 0x7F80) == 0) & ((part & 0x7F) != 0)).any()):
            raise _corrupt("a zero has a mantissa")
    if bool((bits[rows, escapes & 0xFFFF] != 0).any()):
        raise _corrupt("the place of an escape is not zero")
    return layout


def _corrupt(reason: str) -> CorruptBlob:
    return CorruptBlob(
        f"The bytes are not a weight in the fixed-length form: {reason}.", cure="Convert the stored weight again."
    )


def _escapes(payload: torch.Tensor, layout: FixedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the escapes, and the escapes as unsigned numbers; checked."""
    first = payload[layout.first_at : layout.escapes_at].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    counts = first.diff()
    if int(first[0]) != 0 or int(first[-1]) != layout.escapes or bool((counts < 0).any()):
        raise _corrupt("its rows' escapes do not add up")
    listed = payload[layout.escapes_at :][: 4 * layout.escapes].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rows = torch.repeat_interleave(torch.arange(layout.rows, device=payload.device), counts)
    columns = listed & 0xFFFF
    if bool((columns >= layout.columns).any()) or bool(((rows << 16 | columns).diff() <= 0).any()):
        raise _corrupt("an escape lies outside its row or out of order")
    return rows, listed


def _tiles(payload: torch.Tensor, layout: FixedLayout, first: int, last: int) -> torch.Tensor:
    """Whole rows of tiles, of shape (rows of tiles, columns of tiles, 1536)."""
    tiles = payload[TILES_AT : layout.first_at].view(layout.tile_rows, layout.tile_columns, TILE_BYTES)
    return tiles[first:last]


def _read_tiles(tiles: torch.Tensor, layout: FixedLayout, out: torch.Tensor) -> None:
    """Decode whole rows of tiles, escapes as zeros, by words of two weights as the kernels do."""
    count, width = tiles.shape[:2]
    # words: tile, tile, q / 2, g, t, q % 2, p -> tile, g, tile, t, q / 2, q % 2, p
    words = tiles[..., :1024].view(torch.int32).view(-1, width, 2, 8, 4, 2, 2).permute(0, 3, 1, 4, 2, 5, 6).contiguous()
    codes = tiles[..., 1024:].view(torch.int32).view(-1, width, 8, 4, 2, 2).permute(0, 2, 1, 3, 4, 5).contiguous()
    swapped = (words >> 8 & 0x00FF00FF) | ((words & 0x00FF00FF) << 8)
    whole = torch.empty(count, 2, 8, width * TILE_COLUMNS, dtype=torch.int16, device=tiles.device)
    for h, source in ((0, words), (1, swapped)):
        pairs = whole[:, h].view(torch.int32).view(words.shape)
        for p in (0, 1):
            turn = 4 * (h + 2 * p)
            turned = (codes >> turn & (1 << 32 - turn) - 1) | (codes << 32 - turn) if turn else codes
            pairs[..., p] = (source[..., p] & _twice(_SIGNS)) | (turned & _twice(0x0780))
    whole += ((whole & 0x0780) != 0).to(torch.int16) * ((layout.base - 1) << 7)
    out.copy_(whole.view(-1, width * TILE_COLUMNS)[: out.shape[0], : layout.columns])


def _twice(mask: int) -> int:
    """A mask of 16 bits for both halves of a signed word."""
    word = mask << 16 | mask
    return word - (1 << 32) if word >> 31 else word


def _signed(words: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits, held in 64, as int32 with the same bits."""
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)


# ---- products with few rows of inputs, plain weights among them ------------------------------------------------------

# torch adds the products of a row in 64 or 128 partial sums, by the width of the processor's vectors; or, where the
# processor has dot products of bf16, pair by pair in blocks of columns. The native module does so, too, with fewer
# instructions, on weights that were just decoded and are still in the cache. Which order torch takes, here and for such
# a shape, is found by trying; where it is none of them, torch multiplies.


@final
@dataclass(frozen=True)
class SummationOrder:
    """Order in which the products of a row are added; as `Order` in native/products.h, which describes the kinds."""

    kind: Literal["sums", "pairs", "tiles"]
    """Order of the additions: in partial sums by column, or in blocks of columns, either pair by pair or with even and
    odd columns apart, as AMX does.
    """
    width: int
    """The number of partial sums, or the columns of a block."""

    @property
    def number(self) -> int:
        """The kind as the native module numbers it."""
        return ("sums", "pairs", "tiles").index(self.kind)


# The most rows of a trial. torch splits larger weights by rows, which does not change the order within a row.
_MOST_ROWS_TRIED = 1 << 14
_BLOCKS = (512, 1024, 2048, 256, 4096)


def _orders(columns: int, inputs: int) -> Iterator[SummationOrder]:
    """The orders that the native module knows for so many columns and inputs, the likeliest first."""
    if compiled is None:
        return
    if compiled.multiplies_in_blocks() and columns % 2 == 0 and inputs <= MOST_INPUTS_IN_BLOCKS:
        yield from (SummationOrder("pairs", block) for block in _BLOCKS if block < columns)
        yield SummationOrder("pairs", columns)
        yield SummationOrder("tiles", 32)
    yield from (SummationOrder("sums", sums) for sums in (64, 128) if columns % sums == 0)


@cache
def order_of(
    rows: int, columns: int, inputs: int, threads: int, biased: bool, *, strided: bool = False
) -> SummationOrder | None:
    """In what order torch adds up such a product; None if the native module does not know it.

    `strided`: the inputs are not contiguous, as the last positions of several sequences are not.
    """
    orders, rows = list(_orders(columns, inputs)), min(rows, _MOST_ROWS_TRIED)
    if not orders:
        return None
    # Terms that cancel leave nothing but the rounding errors of the order in which they were added.
    generator = torch.Generator().manual_seed(0)
    places, half = torch.randperm(columns, generator=generator), columns // 2
    noise = torch.randn(rows + half, generator=generator).bfloat16()
    other = torch.randn(inputs, half, generator=generator).bfloat16()
    window = noise.as_strided((rows, half), (1, 1))
    weight, x = torch.cat([window, -window], 1)[:, places], torch.cat([other, other], 1)[:, places]
    # A bias of usual size would hide these errors, one of their size does not.
    biases = [noise[:rows], noise[:rows] * 2**-20] if biased else [None]
    inputs_of_layer = x[:, None].repeat(1, 2, 1)[:, -1:] if strided else x
    # torch folds inputs that are not contiguous in another way if the weight requires a gradient.
    with torch.no_grad():
        weights = [weight, weight.clone().requires_grad_()] if strided else [weight]
        products = [
            [F.linear(inputs_of_layer, each, bias).reshape(inputs, rows) for each in weights] for bias in biases
        ]
    output = torch.empty(inputs, rows, dtype=torch.bfloat16)
    for order in orders:
        same = []
        for bias, each in zip(biases, products, strict=True):
            multiply(weight, rows, x, bias, order, output, threads)
            same += [torch.equal(output, one) for one in each]
        if all(same):
            return order
    return None


def multiply(
    weight: torch.Tensor, rows: int, x: torch.Tensor, bias: torch.Tensor | None, order: SummationOrder,
    out: torch.Tensor, threads: int, *, fixed: bool = False,
) -> None:  # fmt: skip
    """Fill `out`, of shape (inputs, rows), perhaps columns of another tensor, from plain or fixed-length weights."""
    with _A_FIXED_WEIGHT:
        compiled.multiply(
            weight.data_ptr(), weight.numel() if fixed else 0, rows, x.shape[1], x.data_ptr(), x.shape[0],
            0 if bias is None else bias.data_ptr(), order.number, order.width, out.data_ptr(), out.stride(0), threads,
        )  # fmt: skip


def multiply_blob(
    blob: memoryview, x: torch.Tensor, bias: torch.Tensor | None, order: SummationOrder, out: torch.Tensor,
    threads: int, *, check: bool,
) -> None:  # fmt: skip
    """The same from a lossless blob of bf16; each thread decodes chunks and multiplies them while they are cached."""
    with _A_BLOB:
        compiled.multiply_blob(
            blob, out.shape[1], x.shape[1], x.data_ptr(), x.shape[0], 0 if bias is None else bias.data_ptr(),
            order.number, order.width, out.data_ptr(), out.stride(0), threads, check,
        )  # fmt: skip
