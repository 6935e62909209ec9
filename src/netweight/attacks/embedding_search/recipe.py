"""`netweight attack embedding` in recipes: whether a search over embeddings brings memorized images back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from netweight.attacks.embedding_search.folder import FolderSearch
from netweight.core.progress import Progress
from netweight.data.memorized_pairs import check_pairs, image_files
from netweight.errors import UsageError
from netweight.hf.load_pipeline import check_pipeline
from netweight.registry import Attack, Target
from netweight.report.finding import Finding
from netweight.report.report import Report


def _search(target: Target, settings: FolderSearch, report: Report, progress: Progress) -> list[Finding]:
    from netweight.attacks.embedding_search.compare import compare
    from netweight.attacks.embedding_search.folder import prepare
    from netweight.attacks.embedding_search.report import add_section

    prepared = prepare(dataclasses.replace(settings, base=settings.base or target.before), target.model)
    folder = target.output / "embedding"
    found = compare(
        prepared.subjects, prepared.targets, prepared.unrelated, prepared.settings, seeds=[target.seed],
        similarity=prepared.similarity, measure=prepared.measure, folder=folder, progress=progress,
    )  # fmt: skip
    report.summary = f"{report.summary} Brought back means: {prepared.goal}.".strip()
    return add_section(
        report, found, prepared.targets, prepared.wanted, folder=folder, seed=target.seed, title=target.title
    )


def _check(model: Path | None, settings: FolderSearch) -> None:
    if model is not None:
        check_pipeline(model)
        if settings.base is None:
            raise UsageError("There is nothing to compare with.", cure="Name the pipeline before its edit as base.")
    for table in _tables(settings):
        check_pairs(table)


def _tables(settings: FolderSearch) -> list[Path]:
    return [table for table in (settings.targets, settings.controls) if table is not None]


EMBEDDING = Attack(
    "embedding", FolderSearch, _search, check=_check, reads=lambda settings: image_files(*_tables(settings))
)
