"""Writing the tensors of a source, such as a file or a model in memory, as one compressed safetensors file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from netweight import codec
from netweight.codec import ROUNDABLE, Precision
from netweight.core.threads import in_order
from netweight.store.choices import Level, choose_base, finer_chunks
from netweight.store.file_totals import FileTotals, Tally
from netweight.store.reader import BATCH, Base, StoredFile
from netweight.store.safetensors import Span, file_head
from netweight.store.sources import TensorSource
from netweight.store.writer import StoredTensors, StoreWriter


def write_compressed(
    source: TensorSource,
    target: Path,
    *,
    level: Level,
    threads: int,
    overwrite: bool = False,
    precision: Precision | None = None,
    base: Base | None = None,
    stored_tensors: StoredTensors | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> FileTotals:
    """Write the tensors of a source as a compressed file, a few megabytes at a time.

    Args:
        source: Where the tensors come from.
        target: The file to write; it appears whole or not at all.
        level: The codec's level.
        threads: Threads of the encoder.
        overwrite: Whether an existing file may be replaced.
        precision: How weights are rounded; None for not at all. Tensors that the source has encoded stay as they are.
        base: See `StoreWriter`.
        stored_tensors: See `StoreWriter`.
        advance: Called with the bytes of the plain file that were read since the last call.

    Returns:
        Totals of the file.

    Raises:
        UsageError: The source changed meanwhile.
        OutputExists: The target exists.
        OutputFailed: The disk is full or the place cannot be written.
        CorruptBlob: The source is damaged.
    """
    header = source.header
    tally = Tally(file_head(header.raw))
    whole = {span.name for span in header.spans if source.is_encoded(span.name) or _rounds(span, precision)}
    encoding = _Encoding(source, [span for span in header.spans if span.name not in whole], level, base, threads)
    with StoreWriter(
        target, level=level, overwrite=overwrite, threads=threads, original=header, mode=source.mode, base=base,
        stored_tensors=stored_tensors,
    ) as writer:  # fmt: skip
        advance(header.data_start)
        for span in header.spans:
            rounding = None
            if span.name in whole:
                blob = _blob_of(source, span, level, threads, precision)
                lossy = codec.is_lossy(blob)
                rounding = codec.info(blob) if lossy else None
                for piece in codec.pieces(blob, threads=threads):
                    tally.update(piece)
                size = writer.add_blob(span.name, blob)
                del blob
            else:
                size = writer.add_chunks(span.name, *encoding.next(tally.update))
                if writer.withdraw_if_stored(span.name) is not None:
                    size = writer.add_chunks(span.name, *encoding.as_equal(span))
            tally.add(size, rounding)
            advance(span.nbytes)
        source.refuse_changes()
    totals = tally.result(plain=header.data_start + header.data_size, stored=target.stat().st_size)
    return replace(totals, differences=encoding.differences, unlike_base=dict(encoding.unlike))


def _blob_of(
    source: TensorSource, span: Span, level: Level, threads: int, precision: Precision | None
) -> bytes | memoryview:
    """The codec's bytes of a tensor that is encoded as a whole."""
    if source.is_encoded(span.name):
        return source.blob(span.name)
    content = source.part(span.name, 0, span.nbytes)
    return codec.encode_raw(content, span.dtype, span.shape, level=level, threads=threads, precision=precision)


def _rounds(span: Span, precision: Precision | None) -> bool:
    """Return whether a tensor is to be rounded; biases, norms and indices are not."""
    return precision is not None and len(span.shape) >= 2 and span.dtype in ROUNDABLE


@dataclass(frozen=True)
class _ChunkRange:
    """Chunks of one tensor that are encoded together."""

    span: Span
    encoder: codec.ChunkEncoder
    below: tuple[StoredFile, str] | None
    """File and name of the base tensor that this tensor is a difference from; None without a base."""
    first: int
    """Number of the first chunk."""
    last: int
    """Number after the last chunk."""


class _Encoding:
    """The tensors of a source, encoded on several threads, a few megabytes each at a time, in order."""

    def __init__(
        self, source: TensorSource, spans: Sequence[Span], level: Level, base: Base | None, threads: int
    ) -> None:
        self._source, self._level, self._base = source, level, base
        # Number of tensors that are stored as differences from the base.
        self.differences = 0
        # Number of other tensors, by the reason.
        self.unlike: Counter[str] = Counter()
        self._done = chain.from_iterable(in_order(self._encode, self._batches(spans), threads))

    def next(self, update: Callable[[Any], None]) -> tuple[codec.ChunkEncoder, Iterator[bytes]]:
        """The next tensor: its encoder and its chunks; its bytes go to `update` meanwhile."""
        first = next(self._done)
        return first[0].encoder, self._chunks(first, update)

    def _chunks(self, done: tuple[_ChunkRange, Any, list[Any]], update: Callable[[Any], None]) -> Iterator[bytes]:
        while True:
            piece, content, prepared = done
            update(content)
            yield from map(piece.encoder.finish, prepared)
            if piece.last == piece.encoder.chunks:
                return
            done = next(self._done)

    def as_equal(self, span: Span) -> tuple[codec.ChunkEncoder, Iterator[bytes]]:
        """A tensor once more, as a difference from one that equals it."""
        finer = finer_chunks(span.name, span.shape, self._level)
        encoder = codec.ChunkEncoder(span.dtype, span.shape, level=self._level, base=True, chunk_log2=finer)

        def chunks() -> Iterator[bytes]:
            for start in range(0, span.nbytes, encoder.chunk_bytes):
                content = self._source.part(span.name, start, min(start + encoder.chunk_bytes, span.nbytes))
                yield encoder.encode(content, content)

        return encoder, chunks()

    def _batches(self, spans: Iterable[Span]) -> Iterator[list[_ChunkRange]]:
        batch: list[_ChunkRange] = []
        room = BATCH
        for span in spans:
            below = self._below(span)
            finer = finer_chunks(span.name, span.shape, self._level)
            encoder = codec.ChunkEncoder(
                span.dtype, span.shape, level=self._level, base=below is not None, chunk_log2=finer
            )
            step = max(BATCH // encoder.chunk_bytes, 1)
            for first in range(0, encoder.chunks, step) or (0,):
                last = min(first + step, encoder.chunks)
                batch.append(_ChunkRange(span, encoder, below, first, last))
                room -= (last - first) * encoder.chunk_bytes
                if room <= 0:
                    yield batch
                    batch, room = [], BATCH
        yield batch

    def _below(self, span: Span) -> tuple[StoredFile, str] | None:
        """Return the place of the tensor from which this one is stored as a difference; None without a gain."""

        def part(start: int, stop: int) -> Any:
            return self._source.part(span.name, start, stop)

        below, reason = choose_base(self._base, span.name, span.dtype, span.shape, part, self._level)
        if below is not None:
            self.differences += 1
        elif reason:
            self.unlike[reason] += 1
        return below

    def _encode(self, batch: list[_ChunkRange]) -> list[tuple[_ChunkRange, Any, list[Any]]]:
        done = []
        for piece in batch:
            size = piece.encoder.chunk_bytes
            start, stop = piece.first * size, min(piece.last * size, piece.span.nbytes)
            content = self._source.part(piece.span.name, start, stop)
            base = None if piece.below is None else piece.below[0].part(piece.below[1], start, stop)
            cuts = [slice(at, at + size) for at in range(0, stop - start, size)]
            prepared = [piece.encoder.prepare(content[cut], None if base is None else base[cut]) for cut in cuts]
            done.append((piece, content, prepared))
        return done
