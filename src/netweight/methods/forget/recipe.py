"""`netweight forget` in recipes: memorization neurons switched off in a pipeline, and images before and after."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from netweight.core.progress import Progress
from netweight.data.memorized_pairs import check_pairs, image_files
from netweight.errors import UsageError
from netweight.hf.load_pipeline import check_pipeline
from netweight.methods.forget.edit import FOLDER, read_records
from netweight.methods.forget.folder import FolderForgetting, forget_folder, ordinary_prompts
from netweight.methods.forget.report import DETECTION, NEURONS, SEARCH, TREATMENT
from netweight.registry import CardEntry, Method
from netweight.report.report import Report, read_report

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
            title = f"{number}. {section.title}"
            report.add(dataclasses.replace(section, title=title, findings=(), treatment=None, missing_audits=()))


def _beside(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}-images")


def _check(source: Path | None, settings: FolderForgetting) -> None:
    if source is not None:
        check_pipeline(source)
    prompts = [str(row.values["prompt"]) for row in check_pairs(settings.targets).rows]
    ordinary_prompts(settings.ordinary, settings.column, prompts)


def _card(folder: Path) -> CardEntry | None:
    if not (folder / FOLDER).exists():
        return None
    records = read_records(folder)
    text = (
        "Neurons on which memorized training images hang were switched off in the weights. That suppresses these "
        "images under their prompts; other text embeddings may still bring them back. "
        "`netweight forget undo FOLDER NEW` takes the last edit back to the last bit."
    )
    facts = (
        ("edits", str(len(records))),
        ("neurons", str(sum(len(record.units) for record in records))),
        ("layers", str(len({module for record in records for module in record.units.modules}))),
        ("prompts", str(sum(len(record.prompts) for record in records))),
    )
    return CardEntry("Memorization switched off", text, facts, ("unlearning",))


FORGET = Method(
    TREATMENT, FolderForgetting, home="netweight.methods.forget.report", apply=_forget, examine=_examine,
    by_attack={SEARCH: "embedding"}, illustrate=_illustrate, check=_check,
    reads=lambda settings: image_files(settings.targets), card=_card,
)  # fmt: skip
