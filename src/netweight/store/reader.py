"""Reading tensors from safetensors files and folders, compressed or not; only the requested bytes are read."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final
from weakref import finalize

import numpy as np

from netweight import codec
from netweight.codec.backend import best
from netweight.codec.header import Bytes, refuse_inflated, tensor_of, torch_dtype
from netweight.core.bounded_json import MOST_INDEX, read_object
from netweight.core.names import not_found
from netweight.core.regular_files import regular
from netweight.core.threads import in_order
from netweight.errors import CorruptBlob, UnsafeInput, UsageError
from netweight.store.safetensors import (
    KEY,
    MOST_LINKS,
    SUFFIX,
    Description,
    Header,
    Original,
    Span,
    build_header,
    find_base,
    parse_header,
    read_header,
)
from netweight.store.shards import refuse_missing_shards

# Files are compressed and restored without importing torch.
if TYPE_CHECKING:
    from torch import Tensor

INDEX_SUFFIX = ".safetensors.index.json"
# A task decodes or encodes this many bytes, so that the result is still in a cache when it is written.
BATCH = 1 << 20
# Nearly every compressed tensor's header and index end within this many bytes.
_START = 1 << 16


@final
@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor, which is not read."""

    name: str
    """Original name of the tensor."""
    dtype: str
    """Original safetensors dtype, e.g. `"BF16"`."""
    shape: tuple[int, ...]
    """Original shape."""
    nbytes: int
    """Bytes of the original tensor."""
    stored_nbytes: int
    """Size of the stored tensor in bytes."""
    compressed: bool
    """True if it is stored compressed."""
    digest: str | None
    """Digest of the decompressed bytes, as recorded in the file; None if the tensor is not compressed."""
    file: Path
    """File that contains it."""


@final
class StoredFile:
    """One safetensors file, compressed or not, with its header parsed once. `Store` joins several."""

    # Bytes are read, never mapped: a file that shrinks meanwhile is an error with a name, and no more is resident than
    # what is asked for.

    def __init__(self, path: Path, *, base: Path | None = None, links: int = MOST_LINKS) -> None:
        # `base`: the file or folder that it holds differences from; looked for by its name if it is not given
        # `links`: how many bases may stand behind each other
        self.path = path
        self._given, self._links = base, links
        self.header: Header = read_header(path)
        self.description: Description | None = None
        if KEY in self.header.metadata:
            self.description = Description.from_json(self.header.metadata[KEY], where=str(path))
        self._spans = self._original_names()
        self._data_start = self.header.data_start
        self._originals: dict[str, Original] = {}
        self._infos: dict[str, codec.BlobInfo] = {}
        self._decoders: dict[str, codec.ChunkDecoder] = {}
        self._siblings: dict[str, StoredFile] = {}
        self._file = regular(path)
        self.close = finalize(self, os.close, self._file)

    @cached_property
    def original_header(self) -> Header | None:
        """Header of the file before compression: its own if it is not compressed, None if there never was one."""
        if self.description is None:
            return self.header
        if self.description.metadata is None:
            return self.description.header
        infos = [self.info(name) for name in self._spans]
        tensors = [(info.name, info.dtype, info.shape, info.nbytes) for info in infos]
        return parse_header(build_header(tensors, self.description.metadata))

    @property
    def metadata(self) -> Mapping[str, str]:
        """The original file's metadata; empty if there is none."""
        description = self.description
        header = self.header if description is None else description.header
        return header.metadata if header is not None else (description and description.metadata) or {}

    def names(self) -> list[str]:
        """Original names of the tensors, in the order of their data in the original file if it is known."""
        order = self.header if self.description is None else self.description.header
        return list(self._spans) if order is None else [span.name for span in order.spans]

    def stored_names(self) -> dict[str, str]:
        """The names in the file by the original names: with `.net` if the file is compressed."""
        return {name: span.name for name, span in self._spans.items()}

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading more than the start of its bytes."""
        span = self._spans[name]
        if self.description is None:
            return TensorInfo(name, span.dtype, span.shape, span.nbytes, span.nbytes, False, None, self.path)
        original = self._original(name)
        return TensorInfo(
            name, original.dtype, original.shape, original.nbytes, span.nbytes, True, original.digest, self.path
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors as they were; refused if a file of this size cannot hold so many."""
        total = sum(self.info(name).nbytes for name in self._spans)
        try:
            _refuse_inflated(total, max(self.header.data_size, 1))
        except CorruptBlob as error:
            raise CorruptBlob(f"{self.path}: {error.reason}", cure=error.cure, file=self.path) from error
        return total

    def __contains__(self, name: str) -> bool:
        """Return whether it holds a tensor of this original name."""
        return name in self._spans

    @cached_property
    def base(self) -> Base:
        """Base from which tensors of this file are stored as differences."""
        note = None if self.description is None else self.description.base
        if note is None:
            raise CorruptBlob(
                f"{self.path} contains a difference but does not name a base.",
                cure="Fetch the file again.",
                file=self.path,
            )
        path = self._given if self._given is not None else find_base(self.path, note)
        return Base(path, note.within, links=self._links)

    def beneath(self, name: str) -> tuple[StoredFile, str] | None:
        """The file and name of the tensor that a stored one is a difference from; None if it stands alone."""
        if self.description is None or self._blob_info(name).base_digest is None:
            return None
        if name not in self.description.same:
            info = self.info(name)
            if (place := self.base.find(name, info.dtype, info.shape)) is None:
                raise UsageError(
                    f"{self.base.path} has no {info.dtype} tensor {name!r} of shape {info.shape}, from which "
                    f"{self.path} contains a difference.",
                    cure="Give the base that it was made from: base=, --base, or the variable NETWEIGHT_BASE.",
                )
            return place
        at, other = self.description.same[name]
        file = self if not at else self._beside(at)
        if other not in file or (file.description is not None and other in file.description.same):
            raise CorruptBlob(
                f"{self.path}: tensor {name!r} is recorded as equal to {other!r} of "
                f"{file.path}, which does not contain it.",
                cure="Fetch both files again.",
                file=self.path,
            )
        return file, other

    def _beside(self, name: str) -> StoredFile:
        if name not in self._siblings:
            if not (path := self.path.parent / name).is_file():
                raise CorruptBlob(
                    f"{self.path} needs {name} beside it, which is missing.", cure="Fetch it again.", file=self.path
                )
            self._siblings[name] = StoredFile(path, base=self._given, links=self._links)
        return self._siblings[name]

    def raw(self, name: str) -> memoryview:
        """The bytes stored for a tensor: the codec's if compressed, else the tensor's own."""
        return self._read(self._spans[name], 0, self._spans[name].nbytes).data.toreadonly()

    def rounding(self, name: str) -> codec.BlobInfo | None:
        """Return what rounding did to a tensor; None if it is not rounded."""
        if self.description is None:
            return None
        info = self._blob_info(name)
        return None if info.mantissa_bits is None else info

    def content(self, name: str, *, threads: int = 1, check: bool = True) -> Any:
        """The tensor's own bytes, decoded if need be: a contiguous buffer, whatever the dtype."""
        if self.description is None:
            return self.raw(name)
        with self._named(name):
            return codec.decode_raw(self.raw(name), threads=threads, check=check, base=self._beneath(name, threads))

    def get(self, name: str, *, threads: int = 1, check: bool = True) -> Tensor:
        """The tensor as it was; what is written to it never reaches the file.

        `threads`: for decoding, at least 1. `check`: whether to compare decoded bytes with their digest.
        """
        span = self._spans[name]
        if self.description is None:
            return tensor_of(self._read(span, 0, span.nbytes), torch_dtype(span.dtype), span.shape)
        with self._named(name):
            return codec.decode(self.raw(name), threads=threads, check=check, base=self._beneath(name, threads))

    def get_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of dimension 0, decoding only what they need.

        Returns:
            Shape `(stop - start, …)`, in the tensor's dtype.
        """
        info = self.info(name)
        dtype, width = torch_dtype(info.dtype), info.nbytes // info.shape[0] if info.shape[0] else 0
        return tensor_of(self.part(name, start * width, stop * width), dtype, (stop - start, *info.shape[1:]))

    def read_into(self, span: Span, start: int, out: Any) -> None:
        """Read bytes of a tensor, from `start` of its own on, until `out` is full."""
        at = self._data_start + span.start + start
        while (count := os.preadv(self._file, [out], at) if out.nbytes else 0) < out.nbytes:
            if not count:
                raise CorruptBlob(
                    f"{self.path} became shorter while it was read.",
                    cure="Wait until it is complete, then try again.",
                    file=self.path,
                )
            out, at = out[count:], at + count

    def _original_names(self) -> dict[str, Span]:
        """Map original names to where the bytes are."""
        if self.description is None:
            return {span.name: span for span in self.header.spans}
        stored = {span.name.removesuffix(SUFFIX): span for span in self.header.spans if span.name.endswith(SUFFIX)}
        header = self.description.header
        names = list(stored) if header is None else [span.name for span in header.spans]
        odd = {span.name for span in self.header.spans} - {span.name for span in stored.values()}
        odd |= set(names) ^ stored.keys()
        if not odd and len(self.description.starts) != len(stored):
            odd = {*names[len(self.description.starts) :], "of which only the digest is known"}
        if odd:
            raise CorruptBlob(
                f"{self.path}: tensor {min(odd)!r} is stored or described, but not both.",
                cure="Fetch the file again.",
                file=self.path,
            )
        return {name: stored[name] for name in names}

    def _original(self, name: str) -> Original:
        """Return the description of a compressed tensor from its bytes; refuse bytes of another tensor."""
        assert self.description is not None
        if name not in self._originals:
            with self._named(name):
                info = self._blob_info(name)
                _refuse_inflated(info.nbytes, self._spans[name].nbytes)
                original = Original(info.dtype, tuple(info.shape), info.digest)
                if not self.description.fits(self._at[name], original.digest):
                    raise CorruptBlob("the payload is that of another tensor.")
                self._originals[name] = original
        return self._originals[name]

    @cached_property
    def _at(self) -> dict[str, int]:
        return {span.name.removesuffix(SUFFIX): at for at, span in enumerate(self.header.spans)}

    def _blob_info(self, name: str) -> codec.BlobInfo:
        if name not in self._infos:
            span = self._spans[name]
            rounded = codec.is_lossy(self._read(span, 0, min(_START, span.nbytes)))
            self._infos[name] = codec.info(self.raw(name)) if rounded else self._coded(name).info
        return self._infos[name]

    def _coded(self, name: str) -> codec.ChunkDecoder:
        """Read the header of a compressed tensor."""
        if name not in self._decoders:
            span = self._spans[name]
            start = self._read(span, 0, min(_START, span.nbytes))
            size = codec.header_size(start, span.nbytes)
            header = start if size <= len(start) else self._read(span, 0, size)
            self._decoders[name] = codec.ChunkDecoder(header, span.nbytes)
        return self._decoders[name]

    def part(self, name: str, start: int, stop: int, *, check: bool = True) -> Bytes:
        """Bytes `start` to `stop` of a tensor as it was, decoding only the chunks that hold them."""
        span = self._spans[name]
        if self.description is None:
            return self._read(span, start, stop)
        with self._named(name):
            nbytes = self._original(name).nbytes
            if self.rounding(name) is not None:
                return np.frombuffer(self.content(name, check=check), np.uint8)[start:stop]
            decoder, below = self._coded(name), self.beneath(name)
            size, offsets = decoder.chunk_bytes, decoder.info.chunk_offsets
            first, last = start // size, -(-stop // size)
            bodies = self._read(span, offsets[first], offsets[last])
            out = _buffer(min(last * size, nbytes) - first * size)
            base = None if below is None else below[0].part(below[1], first * size, first * size + len(out))
            for chunk in range(first, last):
                own = slice((chunk - first) * size, min((chunk - first + 1) * size, len(out)))
                body = bodies[offsets[chunk] - offsets[first] : offsets[chunk + 1] - offsets[first]]
                decoder.decode(chunk, body, base=None if base is None else base[own], check=check, out=out[own])
            return out[start - first * size : stop - first * size]

    def blocks(
        self, names: Iterable[str] | None = None, *, threads: int = 1
    ) -> Iterator[tuple[str, int, Bytes | CorruptBlob]]:
        """Read tensors, all or the named ones, in pieces of a few megabytes: name, where the piece begins, bytes."""
        # A damaged tensor gives its error in place of bytes, after which come only those of other tensors.
        broken: set[str] = set()
        batches = self._batches(self.names() if names is None else names, broken)
        for done in in_order(lambda batch: self._parts(batch, broken), batches, threads):
            for name, start, content in done:
                if name in broken:
                    continue
                if isinstance(content, CorruptBlob):
                    broken.add(name)
                    # A decoder's list of chunks may be long.
                    self._decoders.pop(name, None)
                yield name, start, content

    def _batches(self, names: Iterable[str], broken: Container[str]) -> Iterator[list[tuple[str, int, int]]]:
        """Parts of tensors, together a few megabytes; a part is whole chunks, and an empty one if the header is bad.

        `broken`: tensors of which nothing more is wanted; it grows meanwhile.
        """
        batch: list[tuple[str, int, int]] = []
        room = BATCH
        for name in names:
            try:
                nbytes, step = self.info(name).nbytes, BATCH
                if self.description is not None and self.rounding(name) is not None:
                    step = max(nbytes, 1)
                elif self.description is not None:
                    step = max(BATCH // self._coded(name).chunk_bytes, 1) * self._coded(name).chunk_bytes
            except CorruptBlob:
                nbytes, step = 0, 1
            for start in range(0, nbytes, step) or (0,):
                if name in broken:
                    break
                stop = min(start + step, nbytes)
                batch.append((name, start, stop))
                room -= stop - start
                if room <= 0:
                    yield batch
                    batch, room = [], BATCH
        if batch:
            yield batch

    def _parts(
        self, batch: list[tuple[str, int, int]], broken: Container[str]
    ) -> list[tuple[str, int, Bytes | CorruptBlob]]:
        done: list[tuple[str, int, Bytes | CorruptBlob]] = []
        # The tensor of the batch in which damage was found last.
        bad: str | None = None
        for name, start, stop in batch:
            if name == bad or name in broken:
                continue
            try:
                done.append((name, start, self.part(name, start, stop)))
            except CorruptBlob as error:
                bad = name
                done.append((name, start, _without_frames(error)))
        return done

    def _refuse_other_base(self, name: str) -> None:
        """Say so where it is not damage, but another base, that spoils a tensor."""
        if name not in self._decoders or (below := self.beneath(name)) is None:
            return
        info = self._blob_info(name)
        digest = codec.digest_of(below[0].content(below[1]), info.dtype, chunk_log2=info.chunk_log2)
        if digest != info.base_digest:
            raise UsageError(
                f"{self.path} is not made from {below[0].path}: tensor {name!r} there has "
                f"digest {digest}, here it is a "
                f"difference from {info.base_digest}.",
                cure="Give the base that it was made from: base=, --base, or the variable NETWEIGHT_BASE.",
            )

    def _beneath(self, name: str, threads: int) -> Any:
        """The whole tensor that one is a difference from; None if it stands alone."""
        self._original(name)
        below = self.beneath(name)
        return None if below is None else below[0].content(below[1], threads=threads)

    def _read(self, span: Span, start: int, stop: int) -> Bytes:
        """Read bytes of a tensor, counted from its first."""
        out = _buffer(stop - start)
        self.read_into(span, start, out)
        return out

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Add file and tensor to a `CorruptBlob` that passes."""
        try:
            yield
        except CorruptBlob as error:
            self._refuse_other_base(name)
            if error.file == self.path:
                raise
            cure = "The file is damaged: fetch or compress it again."
            raise CorruptBlob(f"{self.path}, tensor {name!r}: {error.reason}", cure=cure, file=self.path) from error


@final
class Base:
    """The tensors of a file, or of the files of one folder, opened when the first is asked for."""

    def __init__(self, path: Path, within: str = ".", *, links: int = MOST_LINKS) -> None:
        self.path, self.within = path, within
        self._links = links
        self._files: list[StoredFile] | None = None

    @property
    def files(self) -> list[StoredFile]:
        """The files that hold weights."""
        if self._files is None:
            if self._links < 1:
                raise UsageError(
                    f"{self.path} is the end of a chain of more than {MOST_LINKS} models, each stored as differences "
                    "from the one before.",
                    cure="Store one of them whole: decompress it, and compress it without --base.",
                )
            folder = self.path / self.within
            paths = [self.path] if self.path.is_file() else sorted(folder.glob("*.safetensors"))
            if not paths:
                raise UsageError(f"The base {folder} contains no safetensors weights.", cure="Check its path.")
            self._files = [StoredFile(path, links=self._links - 1) for path in paths]
        return self._files

    @property
    def links(self) -> int:
        """Length of the chain of bases, this one included."""
        notes = (file.description.base for file in self.files if file.description is not None)
        return 1 + max((note.links for note in notes if note is not None), default=0)

    def find(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[StoredFile, str] | None:
        """The file that holds a tensor of this name, dtype and shape; None if there is none."""
        for file in self.files:
            if name in file:
                info = file.info(name)
                if (info.dtype, info.shape) == (dtype, shape):
                    return file, name
        return None

    def lack(self, name: str, dtype: str, shape: tuple[int, ...]) -> str:
        """Say why there is no tensor of this name, dtype and shape, as what follows the number of tensors."""
        info = next((file.info(name) for file in self.files if name in file), None)
        if info is None:
            return "with names that the base lacks"
        if info.dtype != dtype:
            return f"in {dtype} where the base has {info.dtype}"
        return "with other shapes than in the base"


def _refuse_inflated(nbytes: int, stored: int) -> None:
    """Refuse a tensor that declares far more bytes than its stored ones can hold, before any is decoded."""
    try:
        refuse_inflated(nbytes, stored)
    except ValueError as error:
        raise CorruptBlob(f"{error}.", cure="Do not use this file.") from error


def _without_frames(error: CorruptBlob) -> CorruptBlob:
    """The error without the frames that it passed, which hold on to the pieces of tensors that they worked on."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def _buffer(size: int) -> Bytes:
    """Memory for a piece: of the codec's pool, so that the system need not clear it anew for every piece."""
    return best.pooled_array(size) if 1 << 16 <= size <= 2 * BATCH else np.empty(size, np.uint8)


@final
class Store:
    """Tensors of one or several files under their original names, made by `open_store`. A context manager."""

    def __init__(self, files: Sequence[StoredFile], places: Mapping[str, StoredFile]) -> None:
        self.files = tuple(files)
        self._places = dict(places)

    def names(self) -> list[str]:
        """Original names of all tensors, file by file, in the order of the data."""
        return list(self._places)

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it.

        Args:
            name: The tensor's name.

        Returns:
            Its dtype, shape and how it is stored.

        Raises:
            NameNotFound: There is no such tensor; the nearest names are given.
        """
        return self._place(name).info(name)

    def get(self, name: str, *, threads: int = 1, check: bool = True) -> Tensor:
        """Read a tensor, bit for bit as it was, or as it was rounded (see `rounding`).

        Args:
            name: Its original name.
            threads: Threads of the decoder.
            check: Whether to compare a compressed tensor with its digest.

        Returns:
            The tensor on the CPU, in the dtype and shape it had. What is written to it never reaches the file.

        Raises:
            NameNotFound: There is no such tensor.
            CorruptBlob: The bytes are damaged; file and tensor are named.
        """
        return self._place(name).get(name, threads=threads, check=check)

    def get_slice(self, name: str, rows: slice) -> Tensor:
        """Read some rows of a tensor, decoding only the chunks that hold them.

        Args:
            name: Its original name.
            rows: Which rows of dimension 0; the step must be 1.

        Returns:
            The same as `get(name)[rows]`.

        Raises:
            NameNotFound: There is no such tensor.
            UsageError: The step is not 1, or the tensor has no rows.
            CorruptBlob: The bytes are damaged.
        """
        place = self._place(name)
        shape = place.info(name).shape
        if not shape:
            raise UsageError(f"The tensor {name!r} is a scalar and has no rows.", cure="Use get(name).")
        start, stop, step = rows.indices(shape[0])
        if step != 1:
            raise UsageError(
                f"Rows with step {step} cannot be read.", cure="Read with step 1, then select rows from the result."
            )
        return place.get_rows(name, start, max(start, stop))

    def content(self, name: str, *, threads: int = 1, check: bool = True) -> Any:
        """Read a tensor's own bytes, decoded if need be; works for dtypes that torch lacks.

        Args:
            name: Its original name.
            threads: Threads of the decoder.
            check: Whether to compare a compressed tensor with its digest.

        Returns:
            A contiguous buffer.

        Raises:
            NameNotFound: There is no such tensor.
            CorruptBlob: The bytes are damaged.
        """
        return self._place(name).content(name, threads=threads, check=check)

    def blocks(self, name: str, *, threads: int = 1) -> Iterator[Bytes]:
        """Read a tensor's own bytes in pieces of a few megabytes, decoded and checked.

        Args:
            name: Its original name.
            threads: Threads of the decoder.

        Yields:
            Its bytes, in order; pieces end between two elements.

        Raises:
            NameNotFound: There is no such tensor.
            CorruptBlob: The bytes are damaged.
        """
        for _, _, content in self._place(name).blocks([name], threads=threads):
            if isinstance(content, CorruptBlob):
                raise content
            yield content

    def rounding(self, name: str) -> codec.BlobInfo | None:
        """Return what rounding did to a tensor: its kept bits, bound and largest change; None if it is not rounded.

        Args:
            name: The tensor's name.

        Raises:
            NameNotFound: There is no such tensor.
            CorruptBlob: The bytes are damaged.
        """
        return self._place(name).rounding(name)

    def raw(self, name: str) -> memoryview:
        """Read the bytes stored for a tensor: the codec's if compressed, else its own.

        Args:
            name: The tensor's name.

        Raises:
            NameNotFound: There is no such tensor.
        """
        return self._place(name).raw(name)

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self.close()

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a tensor of this name."""
        return name in self._places

    def _place(self, name: str) -> StoredFile:
        if name not in self._places:
            raise not_found(f"There is no tensor {name!r} in this store.", name, self._places)
        return self._places[name]


def open_store(path: str | Path, *, variant: str | None = None, base: str | Path | None = None) -> Store:
    """Open a safetensors file, or the safetensors files of a folder, compressed or not.

    Args:
        path: A file; an index (`*.safetensors.index.json`) of shards beside it; or a folder with one set of weights: an
            index and its shards, or just `*.safetensors` files. Sub-folders are not opened.
        variant: Take the files of this variant, e.g. `"fp16"` for `model.fp16.safetensors`.
        base: The file or folder that it holds differences from, if it does. None looks for one of the recorded name
            beside it, in the hub's cache, and where the variable NETWEIGHT_BASE says, once it is needed.

    Returns:
        The store. A tensor is read when it is asked for.

    Raises:
        UsageError: There is no such file, no weights in the folder, or more than one set.
        CorruptBlob: A file is damaged; it is named.
        UnsafeInput: An index points outside its folder, or a file is a pickle.
        Unsupported: A newer release of netweight wrote it.
    """
    path, base = Path(path), None if base is None else Path(base)
    if path.is_dir():
        return _open_folder(path, variant, base)
    if not path.is_file():
        raise UsageError(f"There is no file or folder {path}.", cure="Check the path.")
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path, base)
    return _join([StoredFile(path, base=base)])


def weight_map(index: Path) -> dict[str, str]:
    """Read which file holds which tensor from an index."""
    try:
        entries = read_object(index, limit=MOST_INDEX)["weight_map"]
        names = {str(key): PurePosixPath(value) for key, value in entries.items()}
        if any("\0" in value for value in entries.values()):
            raise ValueError("a name of a file contains NUL")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptBlob(f"{index} is not an index of weights ({error!r}).", cure="Fetch the file again.") from error
    for name, file in names.items():
        if file.is_absolute() or ".." in file.parts or not file.parts:
            raise UnsafeInput(
                f"{index} places tensor {name!r} in {str(file)!r}, outside its folder.", cure="Do not use this model."
            )
    return {name: str(file) for name, file in names.items()}


def _open_folder(folder: Path, variant: str | None, base: Path | None) -> Store:
    indexes = _of_variant(sorted(folder.glob(f"*{INDEX_SUFFIX}")), variant)
    if len(indexes) == 1:
        return _open_index(indexes[0], base)
    files = _of_variant(sorted(folder.glob("*.safetensors")), variant)
    if len(indexes) > 1:
        raise UsageError(
            f"{folder} contains several indexes: {', '.join(index.name for index in indexes)}.",
            cure="Give the name of a variant, or open one of the files.",
        )
    if not files:
        raise UsageError(
            f"{folder} contains no safetensors weights.", cure="Open the subfolder or file that contains them."
        )
    refuse_missing_shards(folder, [file.name for file in files])
    return _join([StoredFile(file, base=base) for file in files])


def _of_variant(files: list[Path], variant: str | None) -> list[Path]:
    if variant is None:
        return files
    return [file for file in files if f".{variant}." in file.name or f".{variant}-" in file.name]


def _open_index(index: Path, base: Path | None) -> Store:
    places = weight_map(index)
    named = list(dict.fromkeys(places.values()))
    refuse_missing_shards(index.parent, [name for name in named if (index.parent / name).is_file()], indexed=named)
    files = {name: StoredFile(index.parent / name, base=base) for name in named}
    held = {(stored, name) for name, file in files.items() for stored in file.stored_names().values()}
    for stored, name in places.items():
        if (stored, name) not in held:
            raise CorruptBlob(
                f"{index} places tensor {stored!r} in {name}, which does not contain it.",
                cure="Fetch both files again.",
            )
    listed = {
        file.path: {original for original, stored in file.stored_names().items() if places.get(stored) == name}
        for name, file in files.items()
    }
    return _join(list(files.values()), listed)


def _join(files: list[StoredFile], listed: Mapping[Path, set[str]] | None = None) -> Store:
    """Join files into a store; of each file all tensors, or only those listed for it."""
    places: dict[str, StoredFile] = {}
    for file in files:
        for name in file.names():
            if listed is not None and name not in listed[file.path]:
                continue
            if name in places:
                raise UsageError(
                    f"Both {places[name].path} and {file.path} contain a tensor {name!r}.",
                    cure="Open one file, or give the name of a variant.",
                )
            places[name] = file
    return Store(files, places)
