"""`compress` in recipes: what is done, and what the method's audit looks at."""

from __future__ import annotations

from pathlib import Path

from netweight.core.progress import Progress
from netweight.methods.compress.settings import CompressConfig
from netweight.methods.compress.shard import make_plan
from netweight.methods.compress.verify import TREATMENT, Compressed
from netweight.registry import Method


def _compress(source: Path, destination: Path, settings: CompressConfig, progress: Progress) -> None:
    from netweight.methods.compress.folder import compress_folder

    compress_folder(
        source,
        destination,
        level=settings.level,
        threads=settings.threads,
        variant=settings.variant,
        exclude=settings.exclude,
        mantissa_bits=settings.mantissa_bits,
        block_size=settings.block_size,
        fidelity=settings.fidelity,
        progress=progress,
    )


def _examine(
    audit: str, destination: Path, source: Path, settings: CompressConfig, progress: Progress
) -> tuple[Compressed, CompressConfig]:
    return Compressed(destination, source), settings


def _check(source: Path | None, settings: CompressConfig) -> None:
    if source is not None and source.is_dir():
        make_plan(source, settings)


COMPRESS = Method(
    TREATMENT, CompressConfig, home=Compressed.__module__, apply=_compress, examine=_examine, check=_check,
    takes=("model", "adapters"),
)  # fmt: skip
