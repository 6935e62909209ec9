"""Keeps model libraries from drawing their own progress bars where ours are shown, or where nothing takes long."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["silent_bars"]


@contextmanager
def silent_bars(*libraries: Literal["transformers", "diffusers"]) -> Iterator[None]:
    """Switch libraries' progress bars off for a block.

    Args:
        libraries: Which; they must be installed. None named is transformers.
    """
    switches = [importlib.import_module(f"{library}.utils.logging") for library in libraries or ("transformers",)]
    shown = [switch for switch in switches if switch.is_progress_bar_enabled()]
    for switch in shown:
        switch.disable_progress_bar()
    try:
        yield
    finally:
        for switch in shown:
            switch.enable_progress_bar()
