"""Where netweight keeps what it can make again: decoded pictures, compiled kernels. Anybody may ask."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`NETWEIGHT_CACHE`, else `netweight` in the user's cache folder; it need not exist.

    Raises:
        RuntimeError: There is no home directory to look for the user's cache folder in.
    """
    named = os.environ.get("NETWEIGHT_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "netweight"
