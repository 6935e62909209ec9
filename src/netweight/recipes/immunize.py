"""`immunize` and the attack `finetune` in recipes: a defense trained into a folder, and what attackers make of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from netweight.attacks.finetuning.folder import FolderAttack, attack_folders, goal_words, plan
from netweight.core.progress import Progress
from netweight.data.rows import read_rows
from netweight.data.text import text_examples, text_pairs
from netweight.evidence.finding import Finding
from netweight.evidence.report import Report, read_report
from netweight.hf.load_language_model import check_folder
from netweight.methods.immunize.folder import FolderDefense, immunize_folder
from netweight.methods.immunize.report import ATTACKED, REPORT, TITLE, TREATMENT
from netweight.recipes.attacks import Attack, Target, register_attack
from netweight.recipes.treatments import Treatment, register


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


def _check_attack(model: Path | None, settings: FolderAttack) -> None:
    for folder in (model, settings.base, *settings.also.values()):
        if folder is not None:
            check_folder(folder)
    for file in settings.files:
        read_rows(file)


def _illustrate(destination: Path, number: int, report: Report) -> None:
    """Show what the folder's own report shows of the depth; its findings stand in the step's section."""
    for section in read_report(destination / REPORT).sections:
        if section.title == TITLE:
            report.include(section.model_copy(update={"title": f"{number}. {TITLE}", "findings": ()}))


def _finetune(target: Target, settings: FolderAttack, report: Report, progress: Progress) -> list[Finding]:
    from netweight.attacks.finetuning.report import add_section

    base = settings.base or target.before
    attack = dataclasses.replace(settings, base=base)
    ledger = target.output / "attacks.jsonl"
    with attack.running() as engine:
        planned = plan(attack, target.model, ledger=ledger, engine=engine, seed=target.seed, progress=progress)
        found = attack_folders(attack, planned, ledger=ledger, engine=engine, seed=target.seed, progress=progress)
    report.summary = f"{report.summary} Recovered means: {goal_words(planned.goal)}.".strip()
    return add_section(
        report, found.sweep, planned.config, seed=target.seed, stability=found.stability, title=target.title
    )


IMMUNIZE = Treatment(
    TREATMENT, FolderDefense, home="netweight.methods.immunize.report", apply=_immunize, examine=_examine,
    by_attack={ATTACKED: "finetune"}, illustrate=_illustrate, check=_check,
)  # fmt: skip
register(IMMUNIZE)
FINETUNE = Attack("finetune", FolderAttack, _finetune, check=_check_attack)
register_attack(FINETUNE)
