"""`netweight immunize` in recipes: a defense trained into a model folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from netweight.core.progress import Progress
from netweight.data.text import text_examples, text_pairs
from netweight.hf.load_language_model import check_folder
from netweight.methods.immunize.folder import FolderDefense, immunize_folder
from netweight.methods.immunize.report import ATTACKED, REPORT, TITLE, TREATMENT
from netweight.methods.immunize.train import RECORD, Record
from netweight.registry import CardEntry, Method
from netweight.report.report import Report, read_report


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
            report.add(dataclasses.replace(section, title=f"{number}. {TITLE}", findings=()))


def _card(folder: Path) -> CardEntry | None:
    if not (folder / RECORD).exists():
        return None
    record = Record.read(folder / RECORD)
    text = (
        "A defense against harmful fine-tuning was trained into the weights. That is delay, not prevention: how many "
        "steps of an attack it holds is for attacks to say, and only those that were tried."
    )
    facts = (
        ("defense", record.defense),
        ("steps", str(len(record.steps))),
        ("weights trained", f"{record.trained:,}"),
        *((f"settings: {name}", str(record.settings[name])) for name in ("lr", "epochs", "batch_size", "seed")
          if name in record.settings),
    )  # fmt: skip
    return CardEntry("Immunized", text, facts, ("immunized",))


IMMUNIZE = Method(
    TREATMENT, FolderDefense, home="netweight.methods.immunize.report", apply=_immunize, examine=_examine,
    by_attack={ATTACKED: "finetune"}, illustrate=_illustrate, check=_check, card=_card,
)  # fmt: skip
