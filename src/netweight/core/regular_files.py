"""Regular files are opened; pipes and devices, which may never come to an end, are refused."""

from __future__ import annotations

import functools
import operator
import os
import stat
from pathlib import Path

from netweight.errors import Unsupported


def regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file: `open(path, "rb", opener=regular)`. A pipe or a device may never come to an end.

    Args:
        path: The file.
        flags: As in `os.open`.

    Returns:
        The file descriptor.

    Raises:
        Unsupported: It is a pipe, a device, a socket or a folder. None of them is waited for.
        OSError: The system refuses.
    """
    # The last flag has no effect on a regular file.
    more = ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK")
    descriptor = os.open(path, flags | functools.reduce(operator.or_, (getattr(os, name, 0) for name in more)))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unsupported(f"{path} is not a regular file.", cure="Replace it by the file itself, or remove it.")
    return descriptor
