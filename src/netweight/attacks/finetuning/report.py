"""The section of a report about a sweep: findings, figures, tables and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from netweight.attacks.finetuning.costs import cost_findings, front_table
from netweight.attacks.finetuning.figures import score_figure, steps_figure, survival_figure
from netweight.attacks.finetuning.no_verdict import resistance_unknown
from netweight.attacks.finetuning.resistance import (
    best_attack_ratio,
    by_attack,
)
from netweight.attacks.finetuning.resistance_findings import (
    AbilityFindings,
    ResistanceConfig,
    attack_findings,
    resistance_findings,
)
from netweight.attacks.finetuning.resistance_verdict import control_of, resistance_verdict
from netweight.attacks.finetuning.search import SearchResult
from netweight.attacks.finetuning.sweep import Sweep
from netweight.attacks.finetuning.tables import attack_table, search_tables
from netweight.report.finding import Section
from netweight.report.text import worst

INTRO = (
    "Anyone who has the weights of a model can fine-tune it on harmful examples. Each attack here trains a copy of a "
    "model in this way and evaluates the copy every few steps. The attack has recovered the behavior when the copy "
    "shows the harmful behavior again and is still useful. The number of steps until then is what the attack costs.\n\n"
    "A run is called censored if it ended without a recovery: it shows that a recovery takes more steps, but not how "
    "many. A run is called collapsed if the training destroyed the model's other abilities or its fluency. Collapsed "
    "runs never count as resistance.\n\n"
    "Resistance is the number of steps of the best attack on the defended model, divided by that of the best attack "
    "on the undefended model. The best attacks are compared because an attacker would use them. A resistance of 3 "
    "means that an attacker needs three times as many steps. So resistance is a delay and not a protection, and "
    "attacks that were not tried may be faster.\n\n"
    "Up to four criteria are tested. Resistance is the first. Kept ability is the share of the model's ordinary "
    "abilities that the defense left, before any attack. Generalization is the resistance to harmful rows of a kind "
    "on which the defense was not trained. Trainability is the number of steps in which the defended model learns a "
    "harmless task, divided by that of the undefended model. A criterion without rows of its own is left out.\n\n"
    "Survival curves show the share of runs that have not recovered the behavior yet. Their bands are 95 % intervals "
    "for each number of steps, which treat the runs on one defense as independent."
)

_UNBROKEN = "no attack recovered the behavior, and no undefended model shows that these attacks can (--base)"


def resistance_section(
    sweep: Sweep,
    config: ResistanceConfig,
    *,
    seed: int,
    abilities: AbilityFindings = MappingProxyType({}),
    title: str = "Resistance to fine-tuning",
    searched: Mapping[str, SearchResult] = MappingProxyType({}),
) -> Section:
    """Return what a sweep found.

    Args:
        sweep: All runs.
        config: What its subjects are, and what is asked of a defense.
        seed: Seed of the intervals.
        abilities: What each defense cost before any attack.
        title: The section's title.
        searched: What searches found on each subject; empty without searches.
    """
    defended = config.defended(sweep)
    present = {run.subject for run in sweep.runs if run.result.settings.domain == config.harmful}
    subjects = [config.undefended, *defended, *(name for name in config.controls if name in present)]
    base = by_attack(sweep.of(config.undefended, domain=config.harmful))
    if defended:
        findings = resistance_findings(sweep, config, seed=seed, abilities=abilities)
        attacks = {name: by_attack(sweep.of(name, domain=config.harmful)) for name in defended}
        verdicts = {
            name: resistance_verdict(
                own, best_attack_ratio(own, base, seed=seed), least=config.least_resistance, base=base
            )
            for name, own in attacks.items()
        }
        words = [f"{name}: {each}" for name, (_, each) in verdicts.items()]
    else:
        findings = attack_findings(sweep, config.undefended, config.harmful)
        verdicts = {config.undefended: resistance_verdict(base)}
        words = [verdicts[config.undefended][1]]
        # These attacks were never observed to succeed, so they show nothing about the defense.
        if control_of(base) == "held":
            findings.append(resistance_unknown(config.undefended, config.least_resistance, _UNBROKEN))
    findings += cost_findings(sweep, subjects, config.undefended, domain=config.harmful, searched=searched)
    stopped = [name for name, result in searched.items() if result.timed_out]
    warnings = [f"{subject}, {attack}, could not be run: {reason}" for subject, attack, reason in sweep.failures]
    if stopped:
        warnings.append(f"The time limit ended the search on: {', '.join(stopped)}. Their costs are upper bounds.")
    # Fixed attacks can refute a defense, but a searching attacker usually needs fewer steps than they do.
    conditions = (
        [f"search for attacks with grid adaptive: the {len(base)} fixed attacks of this run are only a first look"]
        if defended and not searched
        else []
    )
    figures = [draw(sweep, subjects, config.harmful) for draw in (survival_figure, steps_figure, score_figure)]
    return Section(
        title,
        findings,
        figures=[figure for figure in figures if figure is not None],
        tables=[
            front_table(sweep, subjects, domain=config.harmful, searched=searched),
            *(
                attack_table(sweep, [name for name in subjects if sweep.of(name, domain=domain)], domain)
                for domain in (config.harmful, *config.withheld, *config.benign)
            ),
            *search_tables(searched),
        ],
        intro=INTRO,
        question="How long does the model resist harmful fine-tuning?",
        conclusion=" ".join(words),
        outcome=worst(outcome for outcome, _ in verdicts.values()),
        warnings=warnings,
        conditions=conditions,
    )
