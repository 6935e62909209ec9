"""Keeps model libraries from drawing bars of their own where ours are shown, and from talking when imported."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep out, for a block, what libraries say of GPUs, each other and their own deprecated calls; errors stay."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def silent_bars(*libraries: Literal["transformers", "diffusers"]) -> Iterator[None]:
    """Switch libraries' progress bars off for a block."""
    switches = [importlib.import_module(f"{library}.utils.logging") for library in libraries or ("transformers",)]
    shown = [switch for switch in switches if switch.is_progress_bar_enabled()]
    for switch in shown:
        switch.disable_progress_bar()
    try:
        yield
    finally:
        for switch in shown:
            switch.enable_progress_bar()
