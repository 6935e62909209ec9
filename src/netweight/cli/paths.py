"""The kinds of paths that commands take."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["FILE", "FOLDER", "NEW", "OUTPUT_FOLDER"]

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
"""A file that is there."""
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
"""A folder that is there."""
NEW = click.Path(path_type=Path)
"""What is written."""
OUTPUT_FOLDER = click.Path(path_type=Path, file_okay=False)
"""A folder that results go to; it may be there."""
