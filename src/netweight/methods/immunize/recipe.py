"""`netweight immunize` in recipes: a defense trained into a model folder."""

from __future__ import annotations

from pathlib import Path

from netweight.core.progress import Progress
from netweight.data.text import text_examples, text_pairs
from netweight.evidence.report import Report, read_report
from netweight.hf.load_language_model import check_folder
from netweight.methods.immunize.folder import FolderDefense, immunize_folder
from netweight.methods.immunize.report import ATTACKED, REPORT, TITLE, TREATMENT
from netweight.registry import Method


def _immunize(source: Path, destination: Path, settings: FolderDefense, progress: Progress) -> None:
    immunize_folder(source, destination, settings, progress=progress)


def _examine(
    audit: str, destination: Path, source: Path, settings: FolderDefense, progress: Progress
) -> tuple[Path, FolderDefense]:
    return destination, settings


def _check(source: Path | None, settings: FolderDefense) -> None:
    if source is not None:
        check_folder(source)
    text_pairs(settings.pairs)
    if settings.retain is not None:
        text_examples(settings.retain)


def _illustrate(destination: Path, number: int, report: Report) -> None:
    """Show what the folder's own report shows of the depth; its findings stand in the step's section."""
    for section in read_report(destination / REPORT).sections:
        if section.title == TITLE:
            report.include(section.model_copy(update={"title": f"{number}. {TITLE}", "findings": ()}))


IMMUNIZE = Method(
    TREATMENT, FolderDefense, home="netweight.methods.immunize.report", apply=_immunize, examine=_examine,
    by_attack={ATTACKED: "finetune"}, illustrate=_illustrate, check=_check,
)  # fmt: skip
