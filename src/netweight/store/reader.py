"""Reading tensors from safetensors files and folders, compressed or not, without reading what is not asked for."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from netweight import codec
from netweight.codec.dtypes import torch_dtype
from netweight.core.names import nearest_names
from netweight.errors import CorruptBlob, NameNotFound, UnsafeInput, UsageError
from netweight.store.safetensors import KEY, SUFFIX, Description, Header, Original, Span, read_header

if TYPE_CHECKING:  # files are compressed and restored without torch
    from torch import Tensor

INDEX_SUFFIX = ".safetensors.index.json"


@final
@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    name: str  # its original name
    dtype: str  # its original safetensors dtype, e.g. `"BF16"`
    shape: tuple[int, ...]  # its original shape
    nbytes: int  # bytes of the original tensor
    stored_nbytes: int  # bytes that it takes in the file
    compressed: bool  # whether it is stored compressed
    digest: str | None  # digest of the bytes that come back, as recorded in the file; None if it is not compressed
    file: Path  # the file that holds it


@final
class StoredFile:
    """One safetensors file, compressed or not, mapped into memory. `Store` joins several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header = read_header(path)
        self.description: Description | None = None
        if KEY in self.header.metadata:
            self.description = Description.from_json(self.header.metadata[KEY], where=str(path))
        self._spans = self._original_names()
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @property
    def original_header(self) -> Header | None:
        """Header of the file before compression: its own if it is not compressed, None if there never was one."""
        return self.header if self.description is None else self.description.header

    @property
    def metadata(self) -> Mapping[str, str]:
        """The original file's metadata; empty if there is none."""
        return self.original_header.metadata if self.original_header is not None else {}

    def names(self) -> list[str]:
        """Original names of the tensors, in the order of their data in the original file if it is known."""
        order = self.original_header
        return list(self._spans) if order is None else [span.name for span in order.spans]

    def stored_names(self) -> dict[str, str]:
        """The names in the file by the original names: with `.net` if the file is compressed."""
        return {name: span.name for name, span in self._spans.items()}

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor without reading it."""
        span, original = self._spans[name], self._original(name)
        if original is None:
            return TensorInfo(name, span.dtype, span.shape, span.nbytes, span.nbytes, False, None, self.path)
        return TensorInfo(
            name, original.dtype, original.shape, original.nbytes, span.nbytes, True, original.digest, self.path
        )

    def raw(self, name: str) -> memoryview:
        """The bytes stored for a tensor: the codec's if compressed, else the tensor's own. Read-only, not copied."""
        span, start = self._spans[name], self.header.data_start
        return memoryview(self._map)[start + span.start : start + span.stop]

    def rounding(self, name: str) -> codec.BlobInfo | None:
        """What rounding did to a tensor; None if it is not rounded."""
        if self.description is None or not self.description.rounded:
            return None
        with self._named(name):
            found = codec.info(self.raw(name))
        return None if found.mantissa_bits is None else found

    def content(self, name: str, *, threads: int = 1, check: bool = False) -> Any:
        """The tensor's own bytes, decoded if need be: a contiguous buffer, whatever the dtype."""
        original = self._original(name)
        if original is None:
            return self.raw(name)
        with self._named(name):
            self._compare(name, original)
            return codec.decode_raw(self.raw(name), threads=threads, check=check)

    def get(self, name: str, *, threads: int = 1, check: bool = False) -> Tensor:
        """The tensor as it was; what is written to it never reaches the file."""
        # `threads`: for decoding, at least 1
        # `check`: whether to compare decoded bytes with their digest
        original = self._original(name)
        if original is None:
            return self._library_get(name, None)
        with self._named(name):
            self._compare(name, original)
            return codec.decode(self.raw(name), threads=threads, check=check)

    def get_rows(self, name: str, start: int, stop: int, *, threads: int = 1) -> Tensor:
        """Rows `start` to `stop` of dimension 0, decoding only what they need."""
        # `threads`: for decoding, at least 1
        # Returns: Shape `(stop - start, …)`, in the tensor's dtype.
        original = self._original(name)
        if original is None:
            return self._library_get(name, slice(start, stop))
        with self._named(name):
            self._compare(name, original)
            return codec.decode_rows(self.raw(name), start, stop, threads=threads)

    def release(self, name: str) -> None:
        """Let the system forget the mapped pages of a tensor, so that resident memory stays small."""
        span, begin = self._spans[name], self.header.data_start
        first = (begin + span.start) // mmap.PAGESIZE * mmap.PAGESIZE
        if span.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, begin + span.stop - first)

    def close(self) -> None:
        """Unmap the file; if views of it are still in use, it is unmapped when the last one goes."""
        with suppress(BufferError):  # raised while views exist
            self._map.close()

    def _original_names(self) -> dict[str, Span]:
        """Map original names to where the bytes are."""
        stored = {span.name: span for span in self.header.spans}
        if self.description is None:
            return stored
        names = {name: name + SUFFIX for name in self.description.tensors}
        if set(names.values()) != set(stored):
            odd = sorted(set(names.values()) ^ set(stored))
            raise CorruptBlob(
                f"{self.path}: tensor {odd[0]!r} is stored or described, but not both.", cure="Fetch the file again."
            )
        return {name: stored[key] for name, key in names.items()}

    def _original(self, name: str) -> Original | None:
        return None if self.description is None else self.description.tensors[name]

    def _compare(self, name: str, original: Original) -> None:
        """Refuse a payload that does not hold what the description says."""
        info = codec.info(self.raw(name))
        if (info.dtype, tuple(info.shape)) != (original.dtype, original.shape):
            raise CorruptBlob(
                f"the payload holds {info.dtype} {tuple(info.shape)}, described is {original.dtype} {original.shape}."
            )
        if info.digest != original.digest:
            raise CorruptBlob(f"the payload carries digest {info.digest}, described is {original.digest}.")

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Add file and tensor to a `CorruptBlob` that passes."""
        try:
            yield
        except CorruptBlob as error:
            cure = "The file is damaged: fetch or compress it again."
            raise CorruptBlob(f"{self.path}, tensor {name!r}: {error.reason}", cure=cure) from error

    def _library_get(self, name: str, rows: slice | None) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return tensor


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

    def get(self, name: str, *, threads: int = 1, check: bool = False) -> Tensor:
        """Read a tensor, bit for bit as it was, or as it was rounded (see `rounding`).

        Args:
            name: Its original name.
            threads: Threads of the decoder.
            check: Whether to compare the digest of a compressed tensor.

        Returns:
            The tensor on the CPU, in the dtype and shape it had. What is written to it never reaches the file.

        Raises:
            NameNotFound: There is no such tensor.
            CorruptBlob: The bytes are damaged; file and tensor are named.
        """
        return self._place(name).get(name, threads=threads, check=check)

    def get_slice(self, name: str, rows: slice, *, threads: int = 1) -> Tensor:
        """Read some rows of a tensor, decoding only the chunks that hold them.

        Args:
            name: Its original name.
            rows: Which rows of dimension 0; the step must be 1.
            threads: Threads of the decoder.

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
            raise UsageError(f"Rows with step {step} cannot be read.", cure="Read with step 1, then index.")
        return place.get_rows(name, start, max(start, stop), threads=threads)

    def content(self, name: str, *, threads: int = 1, check: bool = False) -> Any:
        """Read a tensor's own bytes, decoded if need be; works for dtypes that torch lacks.

        Args:
            name: Its original name.
            threads: Threads of the decoder.
            check: Whether to compare the digest of a compressed tensor.

        Returns:
            A contiguous buffer.

        Raises:
            NameNotFound: There is no such tensor.
            CorruptBlob: The bytes are damaged.
        """
        return self._place(name).content(name, threads=threads, check=check)

    def rounding(self, name: str) -> codec.BlobInfo | None:
        """What rounding did to a tensor: its kept bits, bound and largest change; None if it is not rounded.

        Args:
            name: The tensor's name.

        Raises:
            NameNotFound: There is no such tensor.
            CorruptBlob: The bytes are damaged.
        """
        return self._place(name).rounding(name)

    def raw(self, name: str) -> memoryview:
        """The bytes stored for a tensor, read-only and not copied: the codec's if compressed, else its own.

        Args:
            name: The tensor's name.

        Raises:
            NameNotFound: There is no such tensor.
        """
        return self._place(name).raw(name)

    def release(self, name: str) -> None:
        """Let the system forget the mapped pages of a tensor that is done with.

        Args:
            name: The tensor's name.

        Raises:
            NameNotFound: There is no such tensor.
        """
        self._place(name).release(name)

    def close(self) -> None:
        """Unmap the files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unmap the files."""
        self.close()

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._places

    def _place(self, name: str) -> StoredFile:
        if name not in self._places:
            near = ", ".join(nearest_names(name, self._places)) or "none, the store is empty"
            raise NameNotFound(f"There is no tensor {name!r} in this store.", cure=f"The nearest names are {near}.")
        return self._places[name]


def open_store(path: str | Path, *, variant: str | None = None) -> Store:
    """Open a safetensors file, or the safetensors files of a folder, compressed or not.

    Args:
        path: A file; or a folder with one set of weights: an index (`*.safetensors.index.json`) and its shards, or just
            `*.safetensors` files. Sub-folders are not opened.
        variant: Take the files of this variant, e.g. `"fp16"` for `model.fp16.safetensors`.

    Returns:
        The store. Files are mapped; a tensor is read when it is asked for.

    Raises:
        UsageError: There is no such file, no weights in the folder, or more than one set.
        CorruptBlob: A file is damaged; it is named.
        UnsafeInput: An index points outside its folder, or a file is a pickle.
        Unsupported: A newer release of netweight wrote it.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, variant)
    if not path.is_file():
        raise UsageError(f"There is no file or folder {path}.", cure="Check the path.")
    return _join([StoredFile(path)])


def weight_map(index: Path) -> dict[str, str]:
    """Read which file holds which tensor from an index."""
    try:
        entries = json.loads(index.read_bytes())["weight_map"]
        names = {str(key): PurePosixPath(value) for key, value in entries.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptBlob(f"{index} is no index of weights ({error!r}).", cure="Fetch the file again.") from error
    for name, file in names.items():
        if file.is_absolute() or ".." in file.parts or not file.parts:
            raise UnsafeInput(
                f"{index} places tensor {name!r} in {str(file)!r}, outside its folder.", cure="Do not use this model."
            )
    return {name: str(file) for name, file in names.items()}


def _open_folder(folder: Path, variant: str | None) -> Store:
    indexes = _of_variant(sorted(folder.glob(f"*{INDEX_SUFFIX}")), variant)
    if len(indexes) == 1:
        return _open_index(indexes[0])
    files = _of_variant(sorted(folder.glob("*.safetensors")), variant)
    if len(indexes) > 1:
        raise UsageError(
            f"{folder} holds several indexes: {', '.join(index.name for index in indexes)}.",
            cure="Name a variant, or open a file.",
        )
    if not files:
        raise UsageError(f"{folder} holds no safetensors weights.", cure="Open the sub-folder or file that does.")
    return _join([StoredFile(file) for file in files])


def _of_variant(files: list[Path], variant: str | None) -> list[Path]:
    if variant is None:
        return files
    return [file for file in files if f".{variant}." in file.name or f".{variant}-" in file.name]


def _open_index(index: Path) -> Store:
    places = weight_map(index)
    files = {name: StoredFile(_existing(index, name)) for name in dict.fromkeys(places.values())}
    held = {(stored, name) for name, file in files.items() for stored in file.stored_names().values()}
    for stored, name in places.items():
        if (stored, name) not in held:
            raise CorruptBlob(
                f"{index} places tensor {stored!r} in {name}, which does not hold it.", cure="Fetch both files again."
            )
    listed = {
        file.path: {original for original, stored in file.stored_names().items() if places.get(stored) == name}
        for name, file in files.items()
    }
    return _join(list(files.values()), listed)


def _existing(index: Path, name: str) -> Path:
    if not (file := index.parent / name).is_file():
        raise CorruptBlob(f"{index} names the file {name}, which is missing.", cure="Fetch it again.")
    return file


def _join(files: list[StoredFile], listed: Mapping[Path, set[str]] | None = None) -> Store:
    """Join files into a store; of each file all tensors, or only those listed for it."""
    places: dict[str, StoredFile] = {}
    for file in files:
        for name in file.names():
            if listed is not None and name not in listed[file.path]:
                continue
            if name in places:
                raise UsageError(
                    f"Both {places[name].path} and {file.path} hold a tensor {name!r}.",
                    cure="Open one file, or name a variant.",
                )
            places[name] = file
    return Store(files, places)


def read_rows(store: Store, name: str, rows: slice | None = None) -> Tensor:
    """Read rows of a tensor, as `Store.get_slice` does, or all of it, checked if it is compressed."""
    # `rows`: which ones, step 1; all by default
    import torch

    info = store.info(name)
    if info.compressed or not info.shape:
        return store.get(name, check=True) if rows is None else store.get_slice(name, rows)
    start, stop, _ = (rows or slice(None)).indices(info.shape[0])
    width = info.nbytes // info.shape[0]
    content = bytearray(store.raw(name)[start * width : stop * width])
    return torch.frombuffer(content, dtype=torch_dtype(info.dtype)).view(stop - start, *info.shape[1:])
