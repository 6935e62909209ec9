"""The kinds of paths that commands take."""

from __future__ import annotations

from pathlib import Path

import click

# A file that is there.
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
# A folder that is there.
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
# What is written.
NEW = click.Path(path_type=Path)
# A folder that results go to; it may be there.
OUTPUT_FOLDER = click.Path(path_type=Path, file_okay=False)
