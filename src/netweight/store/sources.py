"""Sources of tensors that can be written as one compressed file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, Self, final

from netweight.codec.header import Bytes
from netweight.core.atomic_writes import mode_of
from netweight.errors import UsageError
from netweight.store.reader import StoredFile
from netweight.store.safetensors import Header


class TensorSource(Protocol):
    """Tensors in the order of a plain safetensors file, with that file's header: a file, or a model in memory."""

    header: Header
    """The plain file's header: names, dtypes, shapes and places of all tensors."""
    mode: int | None
    """Permissions of the file that is written; None for those that new files get."""

    def part(self, name: str, start: int, stop: int) -> Bytes:
        """Return bytes `start` to `stop` of a tensor, as the plain file has them; called from several threads.

        Args:
            name: The tensor's name.
            start: Of the tensor's own bytes the first to return.
            stop: After the last one.
        """
        ...

    def is_encoded(self, name: str) -> bool:
        """Return whether the source holds a tensor in the codec's form, so that `blob` gives it.

        Args:
            name: The tensor's name.
        """
        ...

    def blob(self, name: str) -> bytes | memoryview:
        """Return the codec's bytes of a tensor that is encoded.

        Args:
            name: The tensor's name.
        """
        ...

    def refuse_changes(self) -> None:
        """Raise `UsageError` if the source changed since it was opened."""
        ...


@final
class FileSource:
    """The tensors of a plain safetensors file. Close it, or use it in a `with` statement.

    Args:
        path: The file.

    Raises:
        UsageError: The file is compressed already.
        CorruptBlob: The file is damaged.
        UnsafeInput: The file is a pickle.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._state, self._file = path, os.stat(path), StoredFile(path)
        if self._file.description is not None:
            self._file.close()
            raise UsageError(f"{path} is compressed already.", cure="Decompress it first.")
        self.header = self._file.header
        self.mode: int | None = mode_of(path)

    def part(self, name: str, start: int, stop: int) -> Bytes:
        """Return bytes of a tensor; see `TensorSource`.

        Args:
            name: The tensor's name.
            start: The first byte.
            stop: After the last one.
        """
        return self._file.part(name, start, stop)

    def is_encoded(self, name: str) -> bool:
        """Return False: a plain file contains no tensor in the codec's form.

        Args:
            name: The tensor's name.
        """
        return False

    def blob(self, name: str) -> bytes | memoryview:
        """Refuse: no tensor is encoded.

        Args:
            name: The tensor's name.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{self._path} contains {name!r} without compression.", cure="Read its parts.")

    def refuse_changes(self) -> None:
        """Raise `UsageError` if the file's size or time of change is another than when it was opened."""
        now = os.stat(self._path)
        if (now.st_size, now.st_mtime_ns) != (self._state.st_size, self._state.st_mtime_ns):
            raise UsageError(
                f"{self._path} changed while it was read.", cure="Wait until it is complete, then try again."
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the file."""
        self.close()
