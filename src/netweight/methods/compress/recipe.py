"""`compress` in recipes: what is done, and what the method's audit looks at."""

from __future__ import annotations

from pathlib import Path

from netweight.core.progress import Progress
from netweight.methods.compress.folder import compress_folder
from netweight.methods.compress.plan import make_plan
from netweight.methods.compress.settings import CompressSettings
from netweight.methods.compress.verify import TREATMENT, Compressed
from netweight.registry import Method


def _compress(source: Path, destination: Path, settings: CompressSettings, progress: Progress) -> None:
    compress_folder(source, destination, settings, progress=progress)


def _examine(
    audit: str, destination: Path, source: Path, settings: CompressSettings, progress: Progress
) -> tuple[Compressed, CompressSettings]:
    return Compressed(destination, source), settings


def _check(source: Path | None, settings: CompressSettings) -> None:
    if source is not None and source.is_dir():
        make_plan(source, settings)


COMPRESS = Method(
    TREATMENT, CompressSettings, home=Compressed.__module__, apply=_compress, examine=_examine, check=_check,
    takes=("model", "adapters"),
)  # fmt: skip
