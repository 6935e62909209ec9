"""A file that remembers finished work, one JSON object per line, safe against kills. Any layer may use it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from netweight.core.locking import take_lock
from netweight.errors import CorruptBlob, UsageError

__all__ = ["Ledger", "read_ledger"]


@final
class Ledger:
    """A file of finished runs, one JSON object per line, each with a `digest`; a context manager.

    Opening takes a lock, so that two processes cannot work on one ledger, and drops a last line that a kill left
    unfinished.

    Args:
        path: The file; made, with its folders, if it does not exist.

    Raises:
        UsageError: Another process has the ledger open.
        CorruptBlob: A line other than the last is not a JSON object with a digest.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        try:
            self._lock()
            self.records = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        if not take_lock(self._file):
            raise UsageError(
                f"Another process is working on the ledger {self.path}.", cure="Wait for it, or name another ledger."
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        content = self.path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            os.ftruncate(self._file, complete)
            os.fsync(self._file)
        return _parsed(content[:complete], self.path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record and return when it is on the disk; a later record replaces an earlier one of its digest.

        Args:
            record: JSON values, among them `digest`.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=True).encode() + b"\n"
        view, size = memoryview(line), os.fstat(self._file).st_size
        try:
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError:  # a full disk: half a line must not stand before the next one
            os.ftruncate(self._file, size)
            raise
        self.records[record["digest"]] = dict(record)

    def close(self) -> None:
        """Close the file and release the lock."""
        os.close(self._file)

    def __enter__(self) -> Self:
        """Use the ledger in a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close at the end of the block."""
        self.close()


def read_ledger(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read the records of a ledger by their digests, without taking it; another process may be adding to it.

    Args:
        path: The file; where there is none, there are no records.

    Raises:
        CorruptBlob: A line other than the last is not a JSON object with a digest.
    """
    path = Path(path)
    content = path.read_bytes() if path.is_file() else b""
    return _parsed(content[: content.rfind(b"\n") + 1], path)


def _parsed(content: bytes, path: Path) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            record = json.loads(line)
            records[record["digest"]] = record
        except (ValueError, KeyError, TypeError):
            raise CorruptBlob(
                f"Line {number} of the ledger {path} is not a record of a run.",
                cure="Delete that line to run its configuration again, or name another ledger.",
            ) from None
    return records
