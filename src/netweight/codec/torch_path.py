"""The decoder in plain torch operations, for devices on which the kernels cannot run.

All of docs/format.md on whatever device the blob is on, with every check of `reference.py`, chunk by chunk what that
does but for many chunks at a time: a loop over the rows of a stream, and everything else as whole tensors. It launches
some ten small operations for each row and waits for the device at each check, so it is slow; it says so once. The
runtime of compressed models calls it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from netweight.codec import cuda
from netweight.codec.api import _in_our_words
from netweight.codec.dtypes import dtype_name
from netweight.codec.element_types import ELEMENT_TYPES
from netweight.codec.reference import CONSTANT, LANE_ORDER, LITERAL, PACKED, RANS, RAW, SKIP, WIDE_RANS
from netweight.errors import CorruptBlob

if TYPE_CHECKING:
    from netweight.codec.cuda import BlobLayout

__all__ = ["decode"]

_AT_ONCE = 1 << 22  # numbers decoded at a time: each takes some fifty bytes of working memory


def decode(blob: torch.Tensor, layout: BlobLayout) -> torch.Tensor:
    """Decode a blob on the device it is on.

    Args:
        blob: U8 tensor of one dimension: a whole lossless blob.
        layout: Its layout, from `netweight.codec.cuda.layout_of`.

    Returns:
        The tensor that was encoded, on the same device.

    Raises:
        CorruptBlob: The blob is damaged.

    Warns:
        RuntimeWarning: Once for each reason why this runs and no kernel.
    """
    _warn_once(_reason(blob.device))
    with _in_our_words("a blob"), torch.no_grad():
        return _numbers(blob, layout).reshape(-1).view(layout.dtype).reshape(layout.shape)


def _reason(device: torch.device) -> str:
    because = cuda.unavailable_because() if device.type == "cuda" else None
    return because or f"netweight has no kernels for devices of type {device.type!r}."


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"Compressed weights are decoded by plain torch operations, many times slower than by kernels. {reason}",
        RuntimeWarning,
        stacklevel=3,
    )


def _require(sound: torch.Tensor, reason: str) -> None:
    """Refuse the blob unless all of a tensor is true. Waits for the device."""
    if not bool(sound.all()):
        raise CorruptBlob(reason)


# ---- reading many chunks at once -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Readers:
    """A place in each of some chunks.

    Attributes:
        blob: U8, the whole blob.
        at: I64 of shape (chunks,): the next byte of each.
        end: I64 of shape (chunks,): where each ends.
    """

    blob: torch.Tensor
    at: torch.Tensor
    end: torch.Tensor

    def take(self, sizes: torch.Tensor | int, what: str) -> torch.Tensor:
        """Where the next `sizes` bytes start; `what` names them in the error."""
        start = self.at
        self.at = start + sizes
        _require(self.at <= self.end, f"the data ends inside {what}")
        return start

    def number(self, size: int, what: str) -> torch.Tensor:
        """The next `size` bytes as unsigned numbers, one of each chunk."""
        return _number(self.blob, self.take(size, what), size)

    def of(self, which: torch.Tensor) -> _Readers:
        """The places in some of the chunks."""
        return _Readers(self.blob, self.at[which], self.end[which])


def _number(blob: torch.Tensor, at: torch.Tensor, size: int) -> torch.Tensor:
    """Little-endian numbers of `size` bytes; places beyond the blob give anything."""
    value = torch.zeros_like(at)
    for byte in range(size):
        value |= blob[(at + byte).clamp_(max=blob.numel() - 1)].to(torch.int64) << (8 * byte)
    return value


def _fields(data: torch.Tensor, starts: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """Field blocks.

    Args:
        data: U8, one-dimensional.
        starts: I64: where each block starts.
        widths: I64, broadcastable to `starts`: bits of its fields, 0 to 8.

    Returns:
        I32 of shape (*starts.shape, 64).
    """
    widths = widths[..., None]
    bit = torch.arange(64, device=data.device) * widths
    first = starts[..., None] + (bit >> 3)
    last = data.numel() - 1
    pair = data[first.clamp(max=last)].to(torch.int32) | data[(first + 1).clamp_(max=last)].to(torch.int32) << 8
    return pair >> (bit & 7).to(torch.int32) & ((1 << widths) - 1).to(torch.int32)


def _is_second(opens: torch.Tensor, ordinal: torch.Tensor) -> torch.Tensor:
    """Which items of sequences belong to the item before them.

    An item that `opens`, unless it belongs to the one before, takes the next one with it. So of items that open in an
    unbroken row every other one is taken, and so is the item after such a row if the row's length is odd.

    Args:
        opens: Bool of shape (items,), several sequences one after the other.
        ordinal: I64 of the same shape: each item's place in its sequence.
    """
    index = torch.arange(len(opens), device=opens.device)
    starts = index - ordinal
    last_other = torch.where(opens, torch.full_like(index, -1), index)
    if len(index):
        last_other = torch.maximum(last_other.cummax(0).values, starts - 1)
    before = torch.where(ordinal > 0, last_other.roll(1), index - 1)
    return (index - 1 - before) & 1 == 1


def _ragged(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For sequences of these lengths, one after the other: each item's sequence, and its place in it."""
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return owner, torch.arange(len(owner), device=lengths.device) - (lengths.cumsum(0) - lengths)[owner]


# ---- chunks and planes -----------------------------------------------------------------------------------------------


def _numbers(blob: torch.Tensor, layout: BlobLayout) -> torch.Tensor:
    """The tensor's bytes: U8 of shape (numbers, bytes of a number)."""
    name = dtype_name(layout.dtype)
    element = next(e for e in ELEMENT_TYPES if e.name == name)
    numbers = torch.empty((layout.numbers, element.number_bytes), dtype=torch.uint8, device=blob.device)
    if not layout.chunks:
        return numbers
    starts = layout.starts.to(blob.device)
    step = 1 << layout.chunk_log2
    together = max(1, _AT_ONCE >> layout.chunk_log2)
    for first in range(0, layout.chunks, together):
        some = slice(first, min(first + together, layout.chunks))
        out = numbers[some.start * step : some.stop * step]
        counts = torch.full((some.stop - first,), step, dtype=torch.int64, device=blob.device)
        if some.stop == layout.chunks:
            counts[-1] = layout.numbers - (layout.chunks - 1) * step
        readers = _Readers(blob, starts[:-1][some], starts[1:][some])
        head = _plane(readers, element.head_bytes, counts, min(step, len(out))).view(-1)[: len(out)]
        for byte in range(element.head_bytes):
            out[:, element.tails + byte] = (head >> 8 * byte & 255).to(torch.uint8)
        del head
        for tail in reversed(range(element.tails)):
            out[:, tail] = _plane(readers, 1, counts, min(step, len(out))).view(-1)[: len(out)].to(torch.uint8)
        _require(readers.at == readers.end, "a chunk holds more bytes than its planes")
    return numbers


def _plane(readers: _Readers, width: int, counts: torch.Tensor, longest: int) -> torch.Tensor:
    """The next plane of each chunk; moves the readers on.

    Args:
        readers: Where the planes start.
        width: Bytes of an element, 1 or 2.
        counts: I64: elements of each plane.
        longest: The largest of them.

    Returns:
        I32 of shape (chunks, longest); what lies beyond a chunk's count is anything.
    """
    mode = readers.number(1, "a plane")
    elements = torch.empty((len(counts), longest), dtype=torch.int32, device=counts.device)
    _require(mode <= WIDE_RANS, "a plane has an unknown mode")
    for one in sorted(set(mode.tolist())):
        which = (mode == one).nonzero().reshape(-1)
        some, count = readers.of(which), counts[which]
        most = int(count.max())
        elements[which, :most] = _OF_MODE[one](some, width, count, most)[:, :most]
        readers.at[which] = some.at
    return elements


def _raw(readers: _Readers, width: int, counts: torch.Tensor, longest: int) -> torch.Tensor:
    start = readers.take(counts * width, "a raw plane")
    places = start[:, None] + width * torch.arange(longest, device=start.device)
    return _number(readers.blob, places, width).to(torch.int32)


def _constant(readers: _Readers, width: int, counts: torch.Tensor, longest: int) -> torch.Tensor:
    return readers.number(width, "a constant plane").to(torch.int32)[:, None].expand(-1, longest)


def _packed(readers: _Readers, width: int, counts: torch.Tensor, longest: int) -> torch.Tensor:
    """Blocks of 64 bytes of which only the upper bits are stored; all widths, four bits each, come first."""
    if width != 1:
        raise CorruptBlob("a packed plane must have one-byte elements")
    blocks = (counts + 63) // 64
    at = readers.take((blocks + 1) // 2, "packed widths")
    block = torch.arange(-(-longest // 64), device=at.device)
    widths = _number(readers.blob, at[:, None] + block // 2, 1) >> (block % 2 * 4) & 15
    widths = torch.where(block < blocks[:, None], widths, 0)
    _require(widths <= 8, "a packed block is wider than a byte")
    ends = 8 * widths.cumsum(1)
    start = readers.take(ends[:, -1], "a packed block")
    fields = _fields(readers.blob, start[:, None] + ends - 8 * widths, widths)
    return (fields << (8 - widths[..., None]).to(torch.int32)).view(len(counts), -1)


# ---- entropy coding --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Splits:
    """How the elements of each chunk fall into symbols and raw bits; see `reference.Split`.

    Attributes:
        width: Bytes of an element, 1 or 2.
        raw_bits: I64 of shape (chunks,).
        shift: I64: where a symbol stands in its element.
    """

    width: int
    raw_bits: torch.Tensor
    shift: torch.Tensor

    @property
    def symbol_bits(self) -> torch.Tensor:
        """Bits of a symbol."""
        return 8 * self.width - self.raw_bits

    @property
    def low_bits(self) -> torch.Tensor:
        """Raw bits in the low region."""
        return self.raw_bits.clamp(max=8)

    def of(self, which: torch.Tensor) -> _Splits:
        """Those of some of the chunks."""
        return _Splits(self.width, self.raw_bits[which], self.shift[which])

    def element(self, placed: torch.Tensor, low: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """Elements from placed symbols, low and other raw bits: I32 with chunks as the first dimension."""
        shift = self.shift.to(torch.int32).view(-1, *(1,) * (placed.dim() - 1))
        raw = low | rest << 8
        # Without a sign no raw bit stands above the symbol, and the last term is zero.
        return placed | raw & ((1 << shift) - 1) | raw >> shift << (8 * self.width - 1)


def _read_splits(readers: _Readers, width: int) -> _Splits:
    byte = readers.number(1, "a plane's header")
    raw_bits, signed = byte & 127, byte >> 7
    sound = (raw_bits < 8 * width) & (raw_bits >= signed)
    _require(sound, "a plane's header asks for impossible raw bits")
    return _Splits(width, raw_bits, raw_bits - signed)


def _read_symbols(
    readers: _Readers, what: str, count_bytes: int, length_bytes: int, most: int, symbol_bits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of consecutive symbols, ascending: a 16-bit base and a length each.

    Returns:
        I64 of shape (chunks, most of any): symbols. I64 of shape (chunks,): how many each chunk has.
    """
    wrong = f"{what} lists symbols that cannot be"
    runs = readers.number(count_bytes, what)
    _require(runs <= most, wrong)
    size = 2 + length_bytes
    start = readers.take(size * runs, what)
    run = torch.arange(max(1, int(runs.max())), device=runs.device)
    here = run < runs[:, None]
    base = _number(readers.blob, start[:, None] + size * run, 2)
    length = torch.where(here, _number(readers.blob, start[:, None] + size * run + 2, length_bytes), 0)
    past = base + length
    following = torch.nn.functional.pad(past[:, :-1], (1, 0))
    ends = length.cumsum(1)
    sound = (base >= following) & (length > 0) & (past <= 1 << symbol_bits[:, None])
    _require((sound | ~here) & (ends <= most), wrong)
    counts = ends[:, -1]
    index = torch.arange(max(1, int(counts.max())), device=runs.device).expand(len(runs), -1).contiguous()
    of_run = torch.searchsorted(ends, index, right=True).clamp_(max=len(run) - 1)
    first = ends - length
    return base.gather(1, of_run) + index - first.gather(1, of_run), counts


@dataclass(frozen=True, slots=True)
class _Slots:
    """Frequency tables by slot, those of all chunks one after the other; see `reference`."""

    placed: torch.Tensor  # I32: the slot's symbol where it stands in an element
    frequency: torch.Tensor  # I64
    rank: torch.Tensor  # I64
    base: torch.Tensor  # I64 of shape (chunks,): where each chunk's table starts


def _slots(symbols: torch.Tensor, frequencies: torch.Tensor, shift: torch.Tensor, size: int) -> _Slots:
    """Give out slots in the order of the symbols; frequencies of symbols that are not there are 0."""
    ends = frequencies.cumsum(1)
    chunks = len(symbols)
    slot = torch.arange(size, device=symbols.device).expand(chunks, -1).contiguous()
    owner = torch.searchsorted(ends, slot, right=True).clamp_(max=symbols.shape[1] - 1)
    frequency = frequencies.gather(1, owner)
    placed = symbols.gather(1, owner) << shift[:, None]
    rank = slot - (ends.gather(1, owner) - frequency)
    base = size * torch.arange(chunks, device=symbols.device)
    return _Slots(placed.to(torch.int32).view(-1), frequency.view(-1), rank.view(-1), base)


def _rans(readers: _Readers, width: int, counts: torch.Tensor, longest: int) -> torch.Tensor:
    """Up to four streams, each of 64 lanes with states of 16 bits that give away and take in bytes."""
    splits = _read_splits(readers, width)
    streams = readers.number(1, "a plane's header")
    _require(
        (streams == 1) | (streams == 2) | (streams == 4), "a plane's header asks for an impossible number of streams"
    )
    elements = torch.empty((len(counts), longest), dtype=torch.int32, device=counts.device)
    for number in sorted(set(streams.tolist())):
        which = (streams == number).nonzero().reshape(-1)
        some, count = readers.of(which), counts[which]
        most = int(count.max())
        elements[which, :most] = _streams(some, splits.of(which), number, count, most)[:, :most]
        readers.at[which] = some.at
    return elements


def _table(readers: _Readers, splits: _Splits) -> _Slots:
    what = "a frequency table"
    symbols, known = _read_symbols(readers, what, 1, 1, 63, splits.symbol_bits)
    index = torch.arange(symbols.shape[1], device=symbols.device)
    here = index < known[:, None]
    entries = _number(readers.blob, readers.take(known, what)[:, None] + index, 1)
    order = torch.where(here, entries >> 7, 2).argsort(dim=1, stable=True)  # class 0, class 1, what is not there
    frequencies = torch.where(here, entries & 127, 0)
    sound = (frequencies.sum(1) == 256) & ((frequencies > 0) | ~here).all(1)
    _require(sound, "a frequency table does not add up to 256")
    return _slots(symbols.gather(1, order), frequencies.gather(1, order), splits.shift, 256)


def _streams(readers: _Readers, splits: _Splits, streams: int, counts: torch.Tensor, longest: int) -> torch.Tensor:
    """Planes with the same number of streams: I32 of shape (chunks, at least `longest`)."""
    blob, device, chunks = readers.blob, counts.device, len(counts)
    rows = (counts + 64 * streams - 1) // (64 * streams)
    most_rows = -(-longest // (64 * streams))
    table = _table(readers, splits)
    stream, lane = torch.arange(streams, device=device), torch.arange(64, device=device)

    at = readers.take(6 * streams, "a plane's header")[:, None] + 6 * stream
    sizes, words = _number(blob, at, 3), _number(blob, at + 3, 3)
    at = readers.take(128 * streams, "a plane's states")[:, None, None] + 128 * stream[:, None] + lane
    state = _number(blob, at, 1) | _number(blob, at + 64, 1) << 8  # 64 low bytes, then 64 high bytes
    _require(state >= 256, "a plane's states are out of range")

    low_row, rest_row = 8 * splits.low_bits, 8 * (splits.raw_bits - splits.low_bits)
    folded = torch.where(rows > 1, torch.minimum(low_row, 64 - low_row), 0)
    raw_low = readers.take((low_row * (rows - 1) - folded) * streams, "raw bits")
    raw_rest = readers.take(rest_row * rows * streams, "raw bits")

    ends = sizes.cumsum(1)
    body = readers.take(ends[:, -1], "an entropy-coded stream")[:, None]
    slots, state, at = _bytes_in(blob, table, state, body + ends - sizes, rows, most_rows)
    final = state & 255
    unused = lane >= (low_row + folded)[:, None, None]
    sound = (at == body + ends) & ((state >> 8 == 1) & ((final == 0) | ~unused)).all(2)
    _require(sound, "an entropy-coded stream does not end where it should")

    row = torch.arange(most_rows, device=device)[:, None] * streams + stream  # among the rows of all streams
    low = _fields(blob, raw_low[:, None, None] + row * low_row[:, None, None], splits.low_bits[:, None, None])
    _unfold(low, blob, raw_low, final, splits.low_bits, folded, rows)
    rest = _fields(
        blob,
        raw_rest[:, None, None] + row * rest_row[:, None, None],
        (splits.raw_bits - splits.low_bits)[:, None, None],
    )
    places = table.base[:, None, None, None] + slots
    elements = splits.element(table.placed[places], low, rest)
    order = torch.from_numpy(LANE_ORDER[splits.width]).to(device)
    elements = elements[..., order.argsort()].view(chunks, -1)

    def place(position: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return (position // 64 * streams + stream) * 64 + order[position % 64]

    _patches(readers, words, splits, elements, counts, place)
    return elements


def _bytes_in(
    blob: torch.Tensor, table: _Slots, state: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, most_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step all lanes of all streams once for each row, taking in bytes.

    Args:
        blob: All bytes.
        table: Tables of 256 slots.
        state: I64 of shape (chunks, streams, 64).
        at: I64 of shape (chunks, streams): each stream's first byte.
        rows: I64 of shape (chunks,): how many rows each chunk has.
        most_rows: The largest of them.

    Returns:
        U8 of shape (chunks, rows, streams, 64): slots. The last states. Where each stream would go on.
    """
    chunks, streams, _ = state.shape
    slots = torch.empty((chunks, most_rows, streams, 64), dtype=torch.uint8, device=blob.device)
    base, last = table.base[:, None, None], blob.numel() - 1
    least_rows = int(rows.min())
    for row in range(most_rows):
        slot = state & 255
        slots[:, row] = slot
        place = base + slot
        stepped = table.frequency[place] * (state >> 8) + table.rank[place]
        hungry = stepped < 256
        if row >= least_rows:  # the last chunk is shorter
            goes_on = (row < rows)[:, None, None]
            hungry &= goes_on
            stepped = torch.where(goes_on, stepped, state)
        taken = hungry.cumsum(2)
        fresh = blob[(at[:, :, None] + taken - 1).clamp_(max=last)]  # past the stream's end only in damaged ones
        state = torch.where(hungry, stepped << 8 | fresh, stepped)
        at = at + taken[:, :, -1]
    return slots, state, at


def _unfold(
    low: torch.Tensor,
    blob: torch.Tensor,
    raw_low: torch.Tensor,
    final: torch.Tensor,
    low_bits: torch.Tensor,
    folded: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Put the raw bits of the last two rows, whose bytes stand in the final states, in place.

    Args:
        low: I32 of shape (chunks, rows, streams, 64): low raw bits; written.
        blob: All bytes.
        raw_low: I64 of shape (chunks,): where the low region starts.
        final: I64 of shape (chunks, streams, 64): low bytes of the final states.
        low_bits: I64 of shape (chunks,): bits of a field.
        folded: I64 of shape (chunks,): bytes of the last but one row that stand there, too.
        rows: I64 of shape (chunks,): rows of each chunk.
    """
    chunks, streams, _ = final.shape
    device = final.device
    byte, chunk = torch.arange(64, device=device), torch.arange(chunks, device=device)
    low_row = 8 * low_bits[:, None, None]
    stored = low_row - folded[:, None, None]
    before = raw_low[:, None, None] + (rows - 2).clamp(min=0)[:, None, None] * streams * low_row
    at = before + torch.arange(streams, device=device)[:, None] * stored + byte
    in_state = final.gather(2, (low_row + byte - stored).clamp(0, 63).expand_as(final))
    last_but_one = torch.where(byte < stored, _number(blob, at, 1), in_state)
    widths = low_bits[:, None].expand(chunks, streams)
    starts = 64 * torch.arange(chunks * streams, device=device).view(chunks, streams)
    several = rows > 1
    low[chunk[several], rows[several] - 2] = _fields(last_but_one.to(torch.uint8).view(-1), starts, widths)[several]
    low[chunk, rows - 1] = _fields(final.to(torch.uint8).view(-1), starts, widths)


def _wide_table(readers: _Readers, splits: _Splits) -> _Slots:
    what = "a wide table"
    symbols, known = _read_symbols(readers, what, 2, 2, 1024, splits.symbol_bits)
    chunks, most = symbols.shape
    index = torch.arange(2 * most, device=symbols.device)  # an entry has one byte or two
    entries = _number(readers.blob, readers.at[:, None] + index, 1)
    first = ~_is_second((entries >= 128).view(-1), index.repeat(chunks)).view(chunks, -1)
    number = first.cumsum(1) - 1  # of the entry that a byte belongs to
    mine = first & (number < known[:, None])
    following = entries.roll(-1, 1)
    values = torch.where(entries < 128, entries, (entries & 127) << 8 | following)
    frequencies = torch.zeros((chunks, 2 * most + 1), dtype=torch.int64, device=symbols.device)
    frequencies.scatter_(1, torch.where(mine, number, 2 * most), values)
    frequencies = frequencies[:, :most].contiguous()
    readers.take((number < known[:, None]).sum(1), what)
    here = index[:most] < known[:, None]
    frequencies = torch.where(here, frequencies, 0)
    sound = (frequencies.sum(1) == 4096) & (((frequencies > 0) & (frequencies < 4096)) | ~here).all(1)
    _require(sound, "a wide table does not add up to 4,096")
    return _slots(symbols, frequencies, splits.shift, 4096)


def _wide_rans(readers: _Readers, width: int, counts: torch.Tensor, longest: int) -> torch.Tensor:
    """One stream of 32 lanes with states of 32 bits that give away and take in 16 bits; 4,096 slots."""
    blob, device, chunks = readers.blob, counts.device, len(counts)
    splits = _read_splits(readers, width)
    table = _wide_table(readers, splits)
    length, words = readers.number(3, "a plane's header"), readers.number(3, "a plane's header")
    lane = torch.arange(32, device=device)
    state = _number(blob, readers.take(128, "a plane's states")[:, None] + 4 * lane, 4)
    _require(state >= 1 << 16, "a plane's states are out of range")
    blocks, most_blocks = (counts + 63) // 64, -(-longest // 64)
    low_bits, rest_bits = splits.low_bits, splits.raw_bits - splits.low_bits
    raw_low = readers.take(8 * low_bits * blocks, "raw bits")
    raw_rest = readers.take(8 * rest_bits * blocks, "raw bits")
    body = readers.take(2 * length, "an entropy-coded stream")

    slots = torch.empty((chunks, 2 * most_blocks, 32), dtype=torch.int16, device=device)
    at, base, least = body, table.base[:, None], 2 * int(blocks.min())
    for row in range(2 * most_blocks):
        slot = state & 4095
        slots[:, row] = slot
        place = base + slot
        stepped = table.frequency[place] * (state >> 12) + table.rank[place]
        hungry = stepped < 1 << 16
        if row >= least:
            goes_on = (row < 2 * blocks)[:, None]
            hungry &= goes_on
            stepped = torch.where(goes_on, stepped, state)
        taken = hungry.cumsum(1)
        fresh = _number(blob, at[:, None] + 2 * (taken - 1), 2)  # past the stream's end only in damaged ones
        state = torch.where(hungry, stepped << 16 | fresh, stepped)
        at = at + 2 * taken[:, -1]
    sound = (at == body + 2 * length) & (state == 1 << 16).all(1)
    _require(sound, "an entropy-coded stream does not end where it should")

    block = torch.arange(most_blocks, device=device)
    low = _fields(blob, raw_low[:, None] + 8 * low_bits[:, None] * block, low_bits[:, None])
    rest = _fields(blob, raw_rest[:, None] + 8 * rest_bits[:, None] * block, rest_bits[:, None])
    places = table.base[:, None, None] + slots.view(chunks, most_blocks, 64)
    elements = splits.element(table.placed[places], low, rest).view(chunks, -1)
    _patches(readers, words[:, None], splits, elements, counts, lambda position, _: position)
    return elements


_OF_MODE = {RAW: _raw, CONSTANT: _constant, PACKED: _packed, RANS: _rans, WIDE_RANS: _wide_rans}

# ---- patches ---------------------------------------------------------------------------------------------------------


def _read_rare(readers: _Readers, symbol_bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The symbols that patches name by number, at most 14: I64 of shape (chunks, 14), and how many there are."""
    what = "the list of rare symbols"
    count = readers.number(1, what)
    _require(count <= LITERAL, f"{what} is too long")
    index = torch.arange(LITERAL, device=count.device)
    symbols = _number(readers.blob, readers.take(2 * count, what)[:, None] + 2 * index, 2)
    sound = (symbols >> symbol_bits[:, None] == 0) | (index >= count[:, None])
    _require(sound, f"{what} holds one that cannot be")
    return symbols, count


def _patches(
    readers: _Readers,
    words: torch.Tensor,
    splits: _Splits,
    elements: torch.Tensor,
    counts: torch.Tensor,
    place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the symbols of some elements, in place.

    Args:
        readers: Where the lists of rare symbols are; the patch words follow.
        words: I64 of shape (chunks, streams): their numbers.
        splits: How elements fall into symbols and raw bits.
        elements: I32 of shape (chunks, at least the largest count); written.
        counts: I64 of shape (chunks,): elements of each chunk.
        place: Indices of elements in their chunk from positions in a stream and the stream's number.
    """
    rare, listed = _read_rare(readers, splits.symbol_bits)
    ends = 2 * words.cumsum(1)
    starts = readers.take(ends[:, -1], "patches")[:, None] + ends - 2 * words
    owner, ordinal = _ragged(words.reshape(-1))
    if not len(owner):
        return
    word = _number(readers.blob, starts.reshape(-1)[owner] + 2 * ordinal, 2)
    code = word >> 12
    literal = _is_second(code == LITERAL, ordinal)  # a symbol, and no patch word
    step = torch.where(literal, 0, (word & 4095) + 1).cumsum(0)
    before = torch.nn.functional.pad(step, (1, 0))[torch.arange(len(owner), device=step.device) - ordinal]
    which = (~literal & (code != SKIP)).nonzero().reshape(-1)
    owner, ordinal, code, position = owner[which], ordinal[which], code[which], (step - before)[which] - 1
    chunk, stream = owner // words.shape[1], owner % words.shape[1]

    spelled = code == LITERAL
    _require(~spelled | (ordinal + 1 < words.reshape(-1)[owner]), "a patch lacks its symbol")
    _require(spelled | (code < listed[chunk]), "a patch names a rare symbol that is not listed")
    next_word = word[(which + 1).clamp_(max=len(word) - 1)]
    symbol = torch.where(spelled, next_word, rare[chunk, code.clamp(max=LITERAL - 1)])
    _require(symbol >> splits.symbol_bits[chunk] == 0, "a patch holds a symbol that cannot be")
    at = place(position, stream)
    _require(at < counts[chunk], "a patch lies outside its chunk")
    shift = splits.shift[chunk]
    mask = ((1 << splits.symbol_bits[chunk]) - 1) << shift
    elements[chunk, at] = elements[chunk, at] & ~mask.to(torch.int32) | (symbol << shift).to(torch.int32)
