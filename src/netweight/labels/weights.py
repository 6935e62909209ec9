"""One pass over every tensor: size before and after lossless compression, entropies, and irregularities.

Tensors are read in pieces of about a megabyte on several threads, so memory does not grow with the size of a tensor.
The compressed size is that of the codec at its default level, which encodes every piece as `netweight compress` would
and discards the result. The histograms of sign, exponent and mantissa are taken from a part of the pieces, which the
result states; everything else covers every byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from netweight import codec
from netweight.codec.header import BY_NAME, Bytes, ElementType
from netweight.core.progress import QUIET, Progress
from netweight.core.threads import in_order
from netweight.errors import Unsupported, UsageError
from netweight.methods.compress.bits import BitStatistics, count_bits, merge
from netweight.store.reader import StoredFile
from netweight.store.torch_archive import refuse_inflated

# Bytes that are read and encoded at a time.
_PIECE = 1 << 20
# Bits are counted in one piece of this many, and always in the first piece of a tensor.
_SAMPLED_ONE_IN = 16

# Types of 8 bits without infinities: the bits that tell NaN from numbers, and their pattern.
_ONE_NAN = {"F8_E4M3": (0x7F, 0x7F), "F8_E4M3FNUZ": (0xFF, 0x80), "F8_E5M2FNUZ": (0xFF, 0x80), "F8_E8M0": (0xFF, 0xFF)}
# Types that a wider one may hold: the low bits that are zero then, and numpy's type for the exact test (None: none is
# needed, since every such value fits).
_NARROWER = {"F32": (("BF16", 16, None), ("F16", 13, np.float16)), "F64": (("F32", 29, np.float32),)}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class ReadableTensor(Protocol):
    """A tensor whose bytes can be read in parts."""

    name: str
    """Name of the tensor in the file."""
    dtype: str
    """safetensors' name of its element type, such as "BF16"."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    nbytes: int
    """Bytes before compression."""
    stored: int | None
    """Bytes that it takes in a compressed file; None if the file is not compressed."""

    @property
    def file(self) -> Path:
        """The file that holds it."""

    def part(self, start: int, stop: int) -> Bytes:
        """Return bytes `start` to `stop`."""


@final
@dataclass(frozen=True)
class TensorFacts:
    """Facts about one tensor."""

    name: str
    """Name of the tensor in the file."""
    file: Path
    """The file that holds it."""
    dtype: str
    """safetensors' name of its element type."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    nbytes: int
    """Bytes before compression."""
    net: int
    """Bytes after lossless compression."""
    digest: str
    """Digest of its bytes; tensors of equal dtype and shape with equal digests are equal."""
    nans: int = 0
    """Numbers that are NaN; a complex element has two."""
    infinities: int = 0
    """Numbers that are infinite."""
    searched: bool = True
    """True if the tensor was searched for NaN and infinities; False for types that are packed or unknown."""
    narrower: str | None = None
    """A narrower type that holds every value exactly, such as "BF16" for an F32 tensor; None if there is none."""
    rows: int = 0
    """Rows along the first dimension that were compared; 0 for fewer than two dimensions and for complex numbers."""
    zero_rows: int = 0
    """Number of rows whose elements are all zero."""
    constant_rows: int = 0
    """Number of rows whose elements are all equal, those of zeros included."""
    bits: BitStatistics | None = None
    """Histograms of the sampled pieces; None for types without sign, exponent and mantissa."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1


@final
@dataclass(frozen=True)
class WeightFacts:
    """Facts about all tensors."""

    tensors: tuple[TensorFacts, ...]
    """Every tensor, in the order of the files."""
    overhead: int = 0
    """Bytes of the files beside the tensors: headers."""

    @property
    def gross(self) -> int:
        """Bytes of all tensors before compression."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def net(self) -> int:
        """Bytes of all tensors after lossless compression, where equal tensors are stored once."""
        copies = {id(tensor) for group in self.duplicates for tensor in group[1:]}
        return sum(tensor.net for tensor in self.tensors if id(tensor) not in copies)

    @property
    def duplicates(self) -> list[list[TensorFacts]]:
        """Groups of tensors of at least 4 kB that are equal in dtype, shape and every byte."""
        groups: dict[tuple[str, str, tuple[int, ...]], list[TensorFacts]] = {}
        for tensor in self.tensors:
            if tensor.nbytes >= 1 << 12:
                groups.setdefault((tensor.digest, tensor.dtype, tensor.shape), []).append(tensor)
        return [group for group in groups.values() if len(group) > 1]

    @property
    def digest(self) -> str:
        """Digest over names, types, shapes and contents of all tensors."""
        whole = xxhash.xxh3_128()
        for tensor in sorted(self.tensors, key=lambda each: (each.name, str(each.file))):
            whole.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.digest}\n".encode())
        return f"xxh3-128:{whole.hexdigest()}"

    def by_dtype(self) -> dict[str, list[TensorFacts]]:
        """Return the tensors by element type, the type with most bytes first."""
        groups: dict[str, list[TensorFacts]] = {}
        for tensor in self.tensors:
            groups.setdefault(tensor.dtype, []).append(tensor)
        return dict(sorted(groups.items(), key=lambda item: -sum(each.nbytes for each in item[1])))


@final
@dataclass
class _StoredTensor:
    """A tensor of a safetensors file, compressed or not."""

    stored_file: StoredFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored: int | None

    @property
    def file(self) -> Path:
        return self.stored_file.path

    def part(self, start: int, stop: int) -> Bytes:
        return self.stored_file.part(self.name, start, stop)


@final
@dataclass
class _PickledTensor:
    """A tensor of a PyTorch checkpoint, which was opened without running any of its code."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: Bytes
    stored: int | None = None

    def part(self, start: int, stop: int) -> Bytes:
        return self.content[start:stop]


def measure_weights(
    files: Sequence[Path],
    pickles: Sequence[Path] = (),
    *,
    base: Path | None = None,
    threads: int = 2,
    progress: Progress = QUIET,
) -> WeightFacts:
    """Read every tensor once and return what its bytes show.

    Args:
        files: safetensors files, compressed or not.
        pickles: PyTorch checkpoints, which are opened with `weights_only=True`, so that no code of theirs runs.
        base: The base of files that hold differences, where it cannot be found beside them.
        threads: Threads that read and encode, at least 1.
        progress: Where progress is shown.

    Returns:
        The facts of every tensor.

    Raises:
        CorruptBlob: A file is damaged.
        UnsafeInput: A checkpoint holds more than tensors and plain values.
        UsageError: There are no tensors.
    """
    with ExitStack() as stack:
        sources: list[ReadableTensor] = []
        overhead = 0
        for file in files:
            opened = stack.enter_context(closing(StoredFile(file, base=base)))
            overhead += opened.header.data_start
            sources += _stored_tensors(opened)
        for file in pickles:
            sources += _pickled_tensors(file)
        if not sources:
            raise UsageError(f"{_listed([*files, *pickles])}: the files contain no tensors.", cure="Check the path.")
        total = sum(source.nbytes for source in sources)
        with progress.task("read tensors", total) as task:
            facts = []
            for tensor in _measured(sources, threads, task.update):
                facts.append(tensor)
        return WeightFacts(tuple(facts), overhead)


def _listed(files: Sequence[Path]) -> str:
    return ", ".join(str(file) for file in files) or "The path"


def _stored_tensors(opened: StoredFile) -> Iterator[ReadableTensor]:
    for name in opened.names():
        info = opened.info(name)
        yield _StoredTensor(
            opened, name, info.dtype, info.shape, info.nbytes, info.stored_nbytes if info.compressed else None
        )


def _pickled_tensors(file: Path) -> Iterator[ReadableTensor]:
    import torch

    from netweight.codec.header import content_of
    from netweight.errors import UnsafeInput, Unsupported

    refuse_inflated(file)
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_archive(file))
    except Exception as error:
        # torch may refuse a file by any exception.
        raise UnsafeInput(
            f"{file} cannot be opened without running its code, or is damaged ({_reason(error)}).",
            cure="Save the weights as safetensors, and give that file.",
        ) from None
    for name, tensor in _tensors_in(loaded, ""):
        if not isinstance(tensor, torch.Tensor):
            continue
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)[6:]
        if kind != "strided":
            raise Unsupported(
                f"{file}: the tensor {name} is {kind.replace('_', ' ')}, and a label measures only dense tensors.",
                cure="Save the weights as dense tensors in safetensors files, and give those.",
            )
        content, dtype, shape = content_of(tensor.detach())
        yield _PickledTensor(file, name, dtype, tuple(shape), content.nbytes, content)


def _reason(error: Exception) -> str:
    """Return torch's reason for refusing a file, without its advice and its colors."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    named = re.search(r"unsupported global:? (?:GLOBAL )?(\S+)", text, re.IGNORECASE)
    if named is not None:
        return f"it refers to {named[1]}"
    if "TorchScript" in text:
        return "it is a TorchScript archive"
    return (text.strip().splitlines() or [type(error).__name__])[0].split(". ")[0][:160]


def _is_archive(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def _tensors_in(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The tensors in nested mappings and lists, by their places."""
    if hasattr(value, "detach"):
        yield place or "tensor", value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors_in(each, f"{place}.{key}" if place else str(key))
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _tensors_in(each, f"{place}.{number}" if place else str(number))


@dataclass
class _PieceFacts:
    """Facts about one piece of a tensor."""

    nbytes: int
    prepared: list[Any]
    """Encoded chunks of the piece; empty if the file is already compressed."""
    check: bytes
    """Digest of the piece, if it is not encoded."""
    nans: int = 0
    infinities: int = 0
    bits_set: int = 0
    """Every bit that is set in any element."""
    fits: dict[str, bool] = field(default_factory=dict)
    """Narrower types that represent every value of the piece exactly."""
    zero_rows: int = 0
    constant_rows: int = 0
    head: tuple[int, int | None] | None = None
    """The parts of rows that begin before or end after the piece: the one value of all their elements, or None."""
    tail: tuple[int, int | None] | None = None
    bits: BitStatistics | None = None


@dataclass
class _MeasuredPiece:
    source: ReadableTensor
    encoder: codec.ChunkEncoder | None
    start: int
    stop: int
    sampled: bool


def _measured(sources: Sequence[ReadableTensor], threads: int, advance: Any) -> Iterator[TensorFacts]:
    done = in_order(_look, _pieces(sources), threads)
    for source in sources:
        yield _gathered(source, done, advance)


def _pieces(sources: Sequence[ReadableTensor]) -> Iterator[_MeasuredPiece]:
    number = 0
    for source in sources:
        encoder = _encoder(source)
        step = _PIECE if encoder is None else max(_PIECE // encoder.chunk_bytes, 1) * encoder.chunk_bytes
        for start in range(0, source.nbytes, step) or (0,):
            sampled = start == 0 or number % _SAMPLED_ONE_IN == 0
            number += 1
            yield _MeasuredPiece(source, encoder, start, min(start + step, source.nbytes), sampled)


def _encoder(source: ReadableTensor) -> codec.ChunkEncoder | None:
    if source.stored is not None or not source.nbytes:
        return None
    try:
        return codec.ChunkEncoder(source.dtype, source.shape)
    except Unsupported:
        return None


def _look(piece: _MeasuredPiece) -> tuple[_MeasuredPiece, _PieceFacts]:
    source = piece.source
    data = source.part(piece.start, piece.stop) if piece.stop > piece.start else np.empty(0, np.uint8)
    prepared = []
    if piece.encoder is not None:
        size = piece.encoder.chunk_bytes
        prepared = [piece.encoder.prepare(data[at : at + size]) for at in range(0, len(data), size)]
    facts = _PieceFacts(len(data), prepared, xxhash.xxh3_128_digest(data.data) if not prepared else b"")
    element = BY_NAME.get(source.dtype)
    if element is None or element.torch_name is None or not len(data):
        # The type is unknown, or packs several numbers into a byte.
        return piece, facts
    # Complex numbers have two parts.
    width, parts = element.number_bytes, element.bits // (8 * element.number_bytes)
    values: NDArray[Any] = np.frombuffer(data, np.dtype(_UNSIGNED[width]).newbyteorder("<"))
    _count_not_finite(element, values, facts)
    _test_narrower(source.dtype, values, facts)
    if len(source.shape) >= 2 and parts == 1:
        _count_rows(values, piece.start // width, int(np.prod(source.shape[1:], dtype=np.int64)), facts)
    if piece.sampled and parts == 1:
        facts.bits = count_bits(element.torch_name, (len(values),), [data.reshape(-1, width)])
    return piece, facts


def _count_not_finite(element: ElementType, values: NDArray[Any], facts: _PieceFacts) -> None:
    if element.name in _ONE_NAN:
        mask_of_nan, pattern = _ONE_NAN[element.name]
        facts.nans = int(np.count_nonzero((values & mask_of_nan) == pattern))
        return
    if not element.exponent_bits:
        return
    # An exponent of ones means NaN or infinity.
    ones = ((1 << element.exponent_bits) - 1) << element.mantissa_bits
    mask = values.dtype.type(ones)
    exponents = values & mask
    if exponents.max() == mask:
        extreme = values[exponents == mask]
        below = extreme & values.dtype.type((ones & -ones) - 1)  # the mantissa
        facts.infinities = int(np.count_nonzero(below == 0))
        facts.nans = len(extreme) - facts.infinities


def _test_narrower(dtype: str, values: NDArray[Any], facts: _PieceFacts) -> None:
    if dtype not in _NARROWER:
        return
    facts.bits_set = int(np.bitwise_or.reduce(values))
    for name, low, exact in _NARROWER[dtype]:
        fits = facts.bits_set & ((1 << low) - 1) == 0
        if fits and exact is not None:
            numbers = values.view(np.float32 if values.dtype.itemsize == 4 else np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                again = numbers.astype(exact).astype(numbers.dtype)
            fits = bool(np.array_equal(again.view(values.dtype), values))
        facts.fits[name] = fits


def _count_rows(values: NDArray[Any], first: int, width: int, facts: _PieceFacts) -> None:
    """Count the rows whose elements are all equal, and keep what the rows at both ends show so far."""
    if width < 2:
        return
    begin = min(-first % width, len(values))
    if begin:
        facts.head = (begin, _only(values[:begin]))
    whole = (len(values) - begin) // width
    rows = values[begin : begin + whole * width].reshape(whole, width)
    if whole:
        # Most rows differ in their first two elements, so only the others are compared to the end.
        alike = np.flatnonzero(rows[:, 0] == rows[:, 1])
        for at in alike:
            row = rows[at]
            if (row == row[0]).all():
                facts.constant_rows += 1
                facts.zero_rows += int(row[0]) == 0
    rest = begin + whole * width
    if rest < len(values):
        facts.tail = (len(values) - rest, _only(values[rest:]))


def _only(values: NDArray[Any]) -> int | None:
    """The value that all elements have; None if they differ."""
    return int(values[0]) if (values == values[0]).all() else None


def _gathered(source: ReadableTensor, done: Iterator[tuple[_MeasuredPiece, _PieceFacts]], advance: Any) -> TensorFacts:
    """Add up the pieces of one tensor, which come in order."""
    net = nans = infinities = zero_rows = constant_rows = 0
    fits: dict[str, bool] = {}
    bits: list[BitStatistics] = []
    whole = xxhash.xxh3_128()
    open_row: tuple[int, int | None] | None = None
    """Elements of the row that continues in the next piece, and their common value."""
    element = BY_NAME.get(source.dtype)
    parts = 1 if element is None else max(element.bits // (8 * element.number_bytes), 1)
    width = int(np.prod(source.shape[1:], dtype=np.int64)) if len(source.shape) >= 2 and parts == 1 else 0
    while True:
        piece, facts = next(done)
        assert piece.source is source
        if piece.encoder is not None:
            net += sum(len(piece.encoder.finish(chunk)) for chunk in facts.prepared)
        whole.update(facts.check)
        nans, infinities = nans + facts.nans, infinities + facts.infinities
        for name, fit in facts.fits.items():
            fits[name] = fits.get(name, True) and fit
        zero_rows, constant_rows = zero_rows + facts.zero_rows, constant_rows + facts.constant_rows
        if facts.head is not None:
            if open_row is not None:
                length, value = open_row
                value = value if value == facts.head[1] else None
                open_row = (length + facts.head[0], value)
            if open_row is not None and open_row[0] == width:
                constant_rows += open_row[1] is not None
                zero_rows += open_row[1] == 0
                open_row = None
        if facts.tail is not None:
            open_row = facts.tail
        if facts.bits is not None:
            bits.append(facts.bits)
        advance(facts.nbytes)
        if piece.stop == source.nbytes:
            break
    if piece.encoder is not None:
        net, digest = net + piece.encoder.header_size, piece.encoder.digest
    else:
        net = source.nbytes if source.stored is None else source.stored
        digest = f"pieces:{whole.hexdigest()}"
    narrower = next((name for name in ("BF16", "F16", "F32") if fits.get(name)), None)
    return TensorFacts(
        source.name, source.file, source.dtype, source.shape, source.nbytes, net, digest, nans, infinities,
        element is not None and element.torch_name is not None, narrower,
        source.shape[0] if width > 1 else 0, zero_rows, constant_rows, merge(bits) if bits else None,
    )  # fmt: skip
