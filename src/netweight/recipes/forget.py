"""`forget` and the attack `embedding` in recipes: neurons switched off, images looked at, and a search for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from netweight.attacks.embedding_search.folder import FolderSearch
from netweight.core.progress import Progress
from netweight.data.memorized_pairs import check_pairs
from netweight.errors import UsageError
from netweight.evidence.finding import Finding
from netweight.evidence.report import Report, read_report
from netweight.methods.forget.folder import FolderForgetting, forget_folder, ordinary_prompts
from netweight.methods.forget.report import DETECTION, NEURONS, SEARCH, TREATMENT
from netweight.recipes.attacks import Attack, Target, register_attack
from netweight.recipes.treatments import Treatment, register

_SEED = 0


def _forget(source: Path, destination: Path, settings: FolderForgetting, progress: Progress) -> None:
    forget_folder(source, destination, settings, progress=progress)


def _examine(
    audit: str, destination: Path, source: Path, settings: FolderForgetting, progress: Progress
) -> tuple[Any, Any]:
    """Gather what an audit looks at; painted images and their section of the report stay beside the folder."""
    from netweight.methods.forget.folder import localized, scored, shown

    beside = _beside(destination)
    if audit == DETECTION:
        return scored(source, settings, folder=beside, progress=progress), None
    if audit == NEURONS:
        found = localized(destination)
        if found is None:
            raise UsageError(f"{destination} holds no record of what was localized.", cure="Make it again.")
        return found, None
    return shown(source, destination, settings, folder=beside, seed=_SEED, progress=progress)


def _illustrate(destination: Path, number: int, report: Report) -> None:
    """Show the images that the audit painted; its findings stand in the step's section."""
    folder = _beside(destination)
    if (folder / "report.json").is_file():
        for section in read_report(folder).sections:
            titled = {"title": f"{number}. {section.title}", "findings": (), "treatment": None, "missing_audits": ()}
            report.include(section.model_copy(update=titled))


def _beside(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}-images")


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


def _check(source: Path | None, settings: FolderForgetting) -> None:
    if source is not None:
        _check_pipeline(source)
    prompts = [str(row.values["prompt"]) for row in check_pairs(settings.targets).rows]
    ordinary_prompts(settings.ordinary, settings.column, prompts)


def _check_search(model: Path | None, settings: FolderSearch) -> None:
    if model is not None:
        _check_pipeline(model)
        if settings.base is None:
            raise UsageError("There is nothing to compare with.", cure="Name the pipeline before its edit as base.")
    for table in _tables(settings):
        check_pairs(table)


def _check_pipeline(folder: Path) -> None:
    if not (folder / "model_index.json").is_file():
        raise UsageError(f"{folder} is no pipeline: it holds no model_index.json.", cure="Name a folder of diffusers.")


def _tables(settings: FolderSearch) -> list[Path]:
    return [table for table in (settings.targets, settings.controls) if table is not None]


def _images(*tables: Path) -> list[Path]:
    """The images that tables name: another content of them is another step."""
    return [table.parent / str(row.values["image"]) for table in tables for row in check_pairs(table).rows]


FORGET = Treatment(
    TREATMENT, FolderForgetting, home="netweight.methods.forget.report", apply=_forget, examine=_examine,
    by_attack={SEARCH: "embedding"}, illustrate=_illustrate, check=_check,
    reads=lambda settings: _images(settings.targets),
)  # fmt: skip
register(FORGET)
EMBEDDING = Attack(
    "embedding", FolderSearch, _search, check=_check_search, reads=lambda settings: _images(*_tables(settings))
)
register_attack(EMBEDDING)
