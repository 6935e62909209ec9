"""Locks on open files that the operating system releases when a process ends, however it ends: POSIX and Windows."""

from __future__ import annotations

import os

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

_FAR = 0x7FFF_FFFF  # Windows forbids others to read a locked byte: this one lies behind all content


def take_lock(descriptor: int) -> bool:
    """Lock an open file without waiting; False if another process holds it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            os.lseek(descriptor, _FAR, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
            finally:
                os.lseek(descriptor, position, os.SEEK_SET)
    except (BlockingIOError, PermissionError):
        return False
    return True
