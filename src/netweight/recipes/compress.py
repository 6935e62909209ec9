"""`compress` in recipes: what is done, and the audit that proves it. Registered with `netweight.recipes`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from netweight.core.progress import Progress
from netweight.evidence.audit import register_audit, register_treatment
from netweight.evidence.finding import Finding
from netweight.methods.compress.config import CompressConfig
from netweight.recipes.treatments import Treatment, register

__all__ = ["COMPRESS", "Compressed"]


@final
@dataclass(frozen=True)
class Compressed:
    """What the audit looks at: the compressed model, and the model that it was made from."""

    path: Path
    source: Path


def _compress(source: Path, destination: Path, settings: CompressConfig, progress: Progress) -> None:
    from netweight.methods.compress.folder import compress_folder

    compress_folder(
        source,
        destination,
        level=settings.level,
        threads=settings.threads,
        variant=settings.variant,
        exclude=settings.exclude,
        progress=progress,
    )


def _examine(destination: Path, source: Path, settings: CompressConfig) -> tuple[Compressed, CompressConfig]:
    return Compressed(destination, source), settings


register_treatment("compress", audits=("identity",))


@register_audit("compress", "identity")
def _identity(subject: Compressed, config: CompressConfig, *, seed: int, progress: Progress) -> list[Finding]:
    """Compare bit by bit; nothing is left to chance, so the seed is not used."""
    from netweight.methods.compress.audit import verify

    return verify(subject.path, subject.source, threads=config.threads, progress=progress)


COMPRESS = Treatment("compress", CompressConfig, home=__name__, apply=_compress, examine=_examine)
register(COMPRESS)
