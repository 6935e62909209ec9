"""NAME=FOLDER on the command line: a further model, and what reports call it."""

from __future__ import annotations

from pathlib import Path

from netweight.errors import UsageError


def named_folder(text: str) -> tuple[str, Path]:
    """Read NAME=FOLDER, the value of --also."""
    name, _, folder = text.partition("=")
    if not (name and folder and Path(folder).is_dir()):
        raise UsageError(f"--also {text!r} names no folder.", cure="Write it as NAME=FOLDER.")
    return name, Path(folder)
