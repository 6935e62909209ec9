"""Keeps model libraries from drawing their own progress bars where ours are shown, or where nothing takes long."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["silent_bars"]


@contextmanager
def silent_bars() -> Iterator[None]:
    """Switch transformers' progress bars off for a block; transformers must be installed."""
    logging = importlib.import_module("transformers.utils.logging")

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
