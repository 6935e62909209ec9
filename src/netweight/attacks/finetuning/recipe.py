"""`netweight attack finetune` in recipes: how many steps of harmful fine-tuning the recipe's model resists."""

from __future__ import annotations

from pathlib import Path

from netweight.attacks.finetuning.folder import attack_folders, goal_words, plan
from netweight.attacks.finetuning.settings import FolderAttack
from netweight.core.progress import Progress
from netweight.data.rows import read_rows
from netweight.evidence.finding import Finding
from netweight.evidence.report import Report
from netweight.hf.load_language_model import check_folder
from netweight.registry import Attack, Target


def _check(model: Path | None, settings: FolderAttack) -> None:
    for folder in (model, settings.base, *settings.also.values()):
        if folder is not None:
            check_folder(folder)
    for file in settings.files:
        read_rows(file)


def _finetune(target: Target, settings: FolderAttack, report: Report, progress: Progress) -> list[Finding]:
    from netweight.attacks.finetuning.report import add_section

    attack = settings.replace(base=settings.base or target.before)
    ledger = target.output / "attacks.jsonl"
    with attack.running() as engine:
        planned = plan(attack, target.model, ledger=ledger, engine=engine, seed=target.seed, progress=progress)
        found = attack_folders(attack, planned, ledger=ledger, engine=engine, seed=target.seed, progress=progress)
    report.summary = f"{report.summary} Recovered means: {goal_words(planned.goal)}.".strip()
    return add_section(
        report, found.sweep, planned.config, seed=target.seed, stability=found.stability, title=target.title
    )


FINETUNE = Attack("finetune", FolderAttack, _finetune, check=_check)
