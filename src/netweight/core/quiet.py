"""Suppress the output of other libraries during import and use, to keep it out of the output of commands."""

from __future__ import annotations

import logging
import os
import sys
import warnings

# This variable is in the environment of workers of a quiet process.
_MARK = "_NETWEIGHT_QUIET"
_LOUD = ("torch", "torchao", "bitsandbytes", "huggingface_hub", "kernels")
# Settings of libraries that are read when they are imported.
_VARIABLES = {"TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error", "TORCH_LOGS": "-all"}


def quiet_libraries() -> None:
    """Keep other libraries' warnings and reports out of this process's output; their errors stay.

    What a user has set in the environment is kept. `netweight -v` does not call this. Worker processes that this
    process starts import this module first, and are as quiet.
    """
    os.environ[_MARK] = "1"
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    # In a log, a progress bar would write a line for each step.
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # This handler serves loggers without a handler of their own.
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.ERROR)
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(?!netweight)")
    # The warning is shown without a line of source code.
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"


if _MARK in os.environ:
    quiet_libraries()
