"""The options of commands that search for embeddings, and how they become a `FolderSearch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from netweight.cli.named_folder import named_folder
from netweight.cli.paths import FILE, FOLDER

if TYPE_CHECKING:
    from netweight.attacks.embedding_search.folder import FolderSearch

F = TypeVar("F", bound=Callable[..., Any])
_SEARCH = ("steps", "lr", "draws", "restarts", "radius", "images", "guidance", "generation_steps", "threshold", "share")
_FOLDERS = (
    "base", "targets", "controls", "unrelated", "also", "sscd", "sscd_sha256", "device", "least_resistance",
)  # fmt: skip
_OPTIONS = (
    click.option("--base", required=True, type=FOLDER, help="The pipeline before its edit."),
    click.option("--targets", required=True, type=FILE, help="Rows with prompt and image (a file): memorized pairs."),
    click.option(
        "--controls", type=FILE,
        help="Rows likewise, of images never trained on; by default targets upside down, colors exchanged.",
    ),
    click.option("--unrelated", type=FILE, help="Prompts to start from; by default some that are not memorized."),
    click.option("--also", multiple=True, metavar="NAME=FOLDER",
                 help="A further edited pipeline, such as a hardened one."),
    click.option("--steps", type=click.IntRange(1), help="Most steps of a search; 200 by default."),
    click.option("--lr", type=click.FloatRange(0, min_open=True),
                 help="Learning rate as a share of the embedding's size; 0.1 by default."),
    click.option("--draws", type=click.IntRange(1), help="Timesteps and noises per step; 8 by default."),
    click.option("--restarts", type=click.IntRange(1), help="Searches from each of the three starts; 2 by default."),
    click.option("--radius", type=click.FloatRange(0, min_open=True),
                 help="Largest change, as a share of the embedding."),
    click.option("--images", type=click.IntRange(1), help="Images per look of a search; 4 by default."),
    click.option("--guidance", type=float, help="Of their generation; 7 by default."),
    click.option("--generation-steps", type=click.IntRange(1), help="Of their scheduler; 50 by default."),
    click.option("--threshold", type=float, help="Similarity that counts as brought back; 0.7 by default."),
    click.option("--share", type=click.FloatRange(0, 1), help="Share of a look's images that must reach it; 0.5."),
    click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Seeds of every search."),
    click.option("--sscd", type=FILE, help="SSCD's TorchScript file; without it centered pixels are compared."),
    click.option("--sscd-sha256", metavar="HEX", help="Its digest."),
    click.option(
        "--least-resistance", type=click.FloatRange(0),
        help="Steps that --also models are to need, as a multiple of MODEL's; the finding fails below it.",
    ),
    click.option("--device", default="cpu", show_default=True, help="Where models go, such as cuda."),
)  # fmt: skip


def search_options(command: F) -> F:
    """Give a command all options of `folder_search`, and `--seeds`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def folder_search(options: dict[str, Any]) -> FolderSearch:
    """Take the options of a search out of a command's and return what they ask for."""
    from netweight.attacks.embedding_search.folder import FolderSearch

    search = {name: value for name in _SEARCH if (value := options.pop(name)) is not None}
    named = {name: options.pop(name) for name in _FOLDERS}
    return FolderSearch(**{**named, "also": dict(named_folder(text) for text in named["also"])}, search=search)
