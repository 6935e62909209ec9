"""Costs of each defense of a plan before any attack: loss of ordinary abilities, and scores of tasks of lm-eval."""

from __future__ import annotations

from netweight.attacks.finetuning.resistance import ability_findings, measure_ability
from netweight.attacks.finetuning.resistance_findings import AbilityFindings
from netweight.attacks.finetuning.settings import FolderAttack
from netweight.attacks.finetuning.sweep import make_subject
from netweight.attacks.finetuning.sweep_plan import SweepPlan
from netweight.hf.load_language_model import (
    measure_tasks,
    task_findings,
)


def defense_costs(settings: FolderAttack, plan: SweepPlan, seed: int) -> AbilityFindings:
    """Measure the cost of every defense, with one model in memory at a time.

    Args:
        settings: Settings of the attack, with the rows of ordinary abilities and the tasks to measure on.
        plan: The plan, whose first subject is the undefended model.
        seed: Seed of the intervals.

    Returns:
        Defended subject → findings; none without rows or tasks to measure on.
    """
    base, *defended = (each for each in plan.subjects if each.name not in plan.config.controls)
    abilities, scores = {}, {}
    for each in (base, *defended) if defended else ():
        if settings.benign:
            subject = make_subject(each.factory, each.arguments)
            abilities[each.name] = measure_ability(subject.model, subject.ordinary, pad_id=subject.pad_id)
        if settings.lm_eval:
            tasks, limit = settings.lm_eval, settings.lm_eval_limit
            scores[each.name] = measure_tasks(each.arguments["model"], tasks, limit=limit, device=settings.device)
    return {
        each.name: [
            *(ability_findings(each.name, abilities[base.name], abilities[each.name], seed=seed) if abilities else ()),
            *(task_findings(each.name, scores[base.name], scores[each.name]) if scores else ()),
        ]
        for each in defended
    }
