"""Locks of files, which distinguish a run that is under way from the files of a killed one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from netweight.errors import OutputFailed, UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

# On Windows, other processes cannot read a locked byte, so this one lies behind all content.
_BEHIND_ALL_CONTENT = 0x7FFF_FFFF


def take_lock(descriptor: int) -> bool:
    """Lock an open file without waiting, until its process ends, however that ends; False if another holds it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            os.lseek(descriptor, _BEHIND_ALL_CONTENT, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
            finally:
                os.lseek(descriptor, position, os.SEEK_SET)
    except (BlockingIOError, PermissionError):
        return False
    return True


OPEN_OWN = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
"""Flags with which a file of our own is opened: to read and write, by this process alone, and never through a link."""


def _planted(path: Path) -> OutputFailed:
    return OutputFailed(
        f"{path} is a link at the place of a temporary file. Writing to it would change the file that it points to.",
        cure="Remove it, and choose a folder that other users cannot write to.",
    )


def refuse_planted(folder: Path) -> None:
    """Refuse a temporary folder that somebody else may have put there.

    Args:
        folder: The path at which work is continued, or begun.

    Raises:
        OutputFailed: It is a link, or a folder of another user.
    """
    if folder.is_symlink():
        raise _planted(folder)
    if hasattr(os, "geteuid") and folder.exists() and folder.stat().st_uid not in (os.geteuid(), 0):
        raise OutputFailed(
            f"{folder} belongs to another user, so that the work in it cannot be continued.",
            cure="Choose a folder that other users cannot write to.",
        )


@contextmanager
def lock(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read and write, made if absent, that no other run may open this way meanwhile."""
    while True:
        try:
            descriptor = os.open(path, OPEN_OWN | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP or path.is_symlink():
                raise _planted(path) from error
            raise
        file = os.fdopen(descriptor, "r+b")
        if not take_lock(file.fileno()):
            file.close()
            raise UsageError(f"Another run is writing {path}.", cure="Wait for it, or choose another name.")
        # The file that was opened may have been renamed or removed by its last owner before the lock was gained.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()
    with file:
        yield file
