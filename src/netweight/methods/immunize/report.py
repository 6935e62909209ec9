"""Report and card of a defended folder: the training, its depth, and the audits that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from netweight.core.digests import digest_file
from netweight.core.progress import Progress
from netweight.data.rows import read_rows
from netweight.methods.immunize.defenses import DEFENSES
from netweight.methods.immunize.depth_section import TITLE
from netweight.methods.immunize.layers import LEAST_PAIRS
from netweight.methods.immunize.record import RECORD, Record
from netweight.methods.immunize.settings import ImmunizeSettings
from netweight.registry import CardEntry
from netweight.report.audit import of_treatment
from netweight.report.finding import Column, Finding, Section, Table
from netweight.report.plots import missing_for_figures
from netweight.report.report import Report, read_report

TREATMENT = "immunize"
DEPTH = "depth"
"""Name of the audit that reads the depth of a defense from the folder's report."""
REPORT = "immunize-report"
"""Name of the folder, in a defended model's folder, that holds the report of the training."""


def depth_audit(run: tuple[Path, Path], settings: object, *, seed: int, progress: Progress) -> Section:
    """Return what was found inside of a defended model, as its folder keeps it."""
    for section in read_report(run[0] / REPORT).sections:
        if section.title == TITLE:
            return section
    return Section(TITLE, [Finding(DEPTH, None, detail={"reason": "the layers were not analyzed when it was made"})])


def why_not_analyzed(pairs: int) -> str:
    """Return the reason why the depth of a defense cannot be shown with this many pairs; an empty text if it can."""
    if missing := missing_for_figures():
        return f'figures need {missing}: pip install "netweight[evidence]"'
    return f"{pairs} pairs are fewer than {LEAST_PAIRS}" if pairs < LEAST_PAIRS else ""


def training_report(
    source: Path,
    destination: Path,
    settings: ImmunizeSettings,
    record: Record,
    command: str | None,
    left_out: Sequence[str],
    *,
    analyzed: bool,
) -> Report:
    """Return the report of a defended folder, with the section on its training and the rows that were left out."""
    rows = [each for each in (settings.pairs, settings.retain) if each is not None]
    report = Report(
        f"{destination.name}: {source.name} with {DEFENSES.name_of(settings.defense)}",
        summary="How the defense was trained, and what the training changed inside the model. A defense delays an "
        "attack and does not prevent it; attacks measure how long it lasts.",
        command=command,
        seeds=(settings.seed,),
        inputs={str(each): digest_file(each) if isinstance(each, Path) else read_rows(each).digest() for each in rows},
    )
    held = f" Layers {settings.frozen} were not trained." if settings.frozen else ""
    away = f" Pairs of {', '.join(settings.withhold)} were left out." if settings.withhold else ""
    table = Table("Terms of the loss", ("term", Column("first step"), Column("last step")), record.ends)
    section = Section(
        "Training",
        tables=[table] if record.steps else [],
        intro=f"{DEFENSES.name_of(settings.defense)}: "
        f"{len(record.steps)} steps on {record.trained:,} weights.{held}{away}",
        warnings=left_out,
    )
    return report.add(of_treatment(section, TREATMENT, (DEPTH,) if analyzed else ()))


def card(folder: Path) -> CardEntry | None:
    """Return the entry of a model card for a defended folder; None for any other folder."""
    if not (folder / RECORD).exists():
        return None
    record = Record.read(folder / RECORD)
    text = (
        "A defense against harmful fine-tuning was trained into the weights. It delays an attack and does not prevent "
        "it. How many steps it lasts is measured by attacks, and only for the attacks that were tried."
    )
    facts = (
        ("defense", record.defense),
        ("steps", str(len(record.steps))),
        ("weights trained", f"{record.trained:,}"),
        *((f"settings: {name}", str(record.settings[name])) for name in ("lr", "epochs", "batch_size", "seed")
          if name in record.settings),
    )  # fmt: skip
    return CardEntry("Immunized", text, facts, ("immunized",))
