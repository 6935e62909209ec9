"""Fine-tuning attacks on model folders with files of rows: what `netweight attack finetune` and recipes do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from netweight.attacks.finetuning.calibration import NoThreshold
from netweight.attacks.finetuning.defense_costs import defense_costs
from netweight.attacks.finetuning.folder_checks import check
from netweight.attacks.finetuning.no_verdict import no_verdict_section
from netweight.attacks.finetuning.report import resistance_section
from netweight.attacks.finetuning.resistance_findings import ResistanceConfig
from netweight.attacks.finetuning.settings import DEFENDED, FolderAttack
from netweight.attacks.finetuning.subject import Goal
from netweight.attacks.finetuning.sweep import ATTACKS, sweep
from netweight.attacks.finetuning.sweep_plan import SweepPlan, plan_sweep
from netweight.attacks.finetuning.tested import tested, tested_by_sweep
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.job import Job
from netweight.registry import Result, Target
from netweight.report.finding import Section


def attack_folders(
    settings: FolderAttack,
    model: str | Path,
    *,
    folder: str | Path | Job,
    seed: int,
    progress: Progress = QUIET,
    title: str = "Resistance to fine-tuning",
    planned: Callable[[SweepPlan], object] = lambda plan: None,
    earlier: bool = False,
) -> tuple[SweepPlan, Section]:
    """Attack a model folder and those it is compared with; what an earlier call did is not done again.

    The base is to be what the defense began with, unless it may be from `earlier` steps of a recipe. Where no attack
    breaks the model without a defense, the plan has no attacks, and the section says that there is no verdict.
    """
    if settings.also and settings.base is None:
        raise UsageError(
            "Further defended models are compared with a base, and no base was given.", cure="Give the base."
        )
    check(Path(model), settings, earlier=earlier)
    with settings.running() as engine:
        left_out: list[str] = []
        try:
            plan = plan_sweep(
                settings, Path(model), folder=folder, engine=engine, seed=seed, progress=progress, left_out=left_out
            )
        except NoThreshold as failure:
            names = (DEFENDED, *settings.also) if settings.base else (failure.subject,)
            section = no_verdict_section(failure, names, least=settings.least_resistance, title=title)
            plan = SweepPlan((), (), Goal(None), ResistanceConfig(), left_out=tuple(left_out))
            return plan, replace(section, warnings=left_out, tested=tested(settings))
        planned(plan)
        result = sweep(
            plan.subjects, plan.attacks, plan.goal, folder=folder, engine=engine, progress=progress,
            title="final attacks" if plan.searched else "attacks",
        )  # fmt: skip
        abilities = defense_costs(settings, plan, seed)
    section = resistance_section(
        result, plan.config, seed=seed, abilities=abilities, title=title, searched=plan.searched
    )
    warnings = [*section.warnings, *plan.left_out]
    return plan, replace(section, warnings=warnings, tested=tested_by_sweep(settings, plan, result))


def with_recovery_defined(plan: SweepPlan, section: Section) -> Section:
    """Return a section whose introduction says which score counts as a recovery, where attacks determined one."""
    if not plan.recovered:
        return section
    return replace(section, intro=f"{section.intro}\n\nRecovered means: {plan.recovered}.".strip())


def attack(target: Target, settings: FolderAttack, progress: Progress) -> Result:
    """Attack a model folder, as the command and recipes do."""
    own, settings = settings.base, settings.replace(base=settings.base or target.before)
    how: Any = {"folder": target.output, "seed": target.seed, "progress": progress, "earlier": own is None}
    plan, section = attack_folders(settings, target.model, planned=partial(_announce, progress), **how)
    section = with_recovery_defined(plan, section)
    payload = {
        "threshold": plan.goal.threshold, "recovered": plan.recovered,
        "ledger": str(target.output / f"{ATTACKS}.jsonl"), "left_out": list(plan.left_out),
    }  # fmt: skip
    return Result([f"Recovered means: {plan.recovered}."], [section], payload)


def _announce(progress: Progress, plan: SweepPlan) -> None:
    names = ", ".join(subject.name for subject in plan.subjects)
    each = " each" if len(plan.subjects) > 1 else ""
    progress.note(f"{len(plan.attacks)} {'final ' * bool(plan.searched)}attacks{each} on: {names}.")
