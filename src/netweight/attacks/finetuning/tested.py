"""What fine-tuning attacks test and how strongly: for a plan as the settings determine it, for a report as it was."""

from __future__ import annotations

from collections import Counter

from netweight.attacks.finetuning.calibration import SHARE_OF_GAIN
from netweight.attacks.finetuning.search import ROUNDS, first_attacks
from netweight.attacks.finetuning.settings import FolderAttack
from netweight.attacks.finetuning.sweep import Sweep
from netweight.attacks.finetuning.sweep_plan import FINAL_SEEDS, SEARCH_STEPS, SweepPlan


def tested(settings: FolderAttack) -> list[tuple[str, str]]:
    """Return the grid, the number of attacks, their limits and the criteria, as the settings determine them.

    Args:
        settings: Settings of the attack.

    Returns:
        Names and values, for people.
    """
    adaptive = settings.grid == "adaptive"
    if adaptive:
        begin = len(first_attacks(rates=settings.lr))
        seeds = settings.seeds or FINAL_SEEDS
        attacks = (
            f"on each model, two searches that begin with {begin} attacks, some of them also in other "
            f"prompt formats, and change the best in up to "
            f"{ROUNDS} rounds; then the best attacks of all searches again, {_counted(seeds, 'seed')} each"
        )
        steps = (
            f"{settings.max_steps:,}" if settings.max_steps
            else f"{SEARCH_STEPS} on the base, and on other models five times as many as the best attack on it took"
        )  # fmt: skip
        samples = f"{settings.samples:,}" if settings.samples else "all rows that are not held out"
    else:
        grid = settings.attacks()
        attacks = f"{len(grid)} on each model: {_by_seed(len({each.replace(seed=0) for each in grid}), len(grid))}"
        steps = f"{max(each.steps for each in grid):,}"
        samples = f"{max(each.samples for each in grid):,}, or fewer if there are fewer rows"
    threshold = (
        f"token accuracy of at least {settings.threshold:g} on held-out rows" if settings.threshold is not None
        else f"determined by attacks on the model before its defense: {SHARE_OF_GAIN:.0%} of the best gain"
    )  # fmt: skip
    return _rows(settings, attacks=attacks, steps=steps, samples=samples, threshold=threshold)


def tested_by_sweep(settings: FolderAttack, plan: SweepPlan, sweep: Sweep) -> list[tuple[str, str]]:
    """Return the same as it was: attacks that ran, their longest limits, and the threshold that was determined.

    Args:
        settings: Settings of the attack.
        plan: Its plan, with what searches found.
        sweep: Every attack that ran after the searches.
    """
    runs = [run.result.settings for run in sweep.runs if run.result.settings.domain == plan.config.harmful]
    seeds = len({each.seed for each in runs})
    each_model = Counter(run.subject for run in sweep.runs if run.result.settings.domain == plan.config.harmful)
    counts = []
    for name, count in each_model.items():
        search = plan.searched.get(name)
        found = "" if search is None else f"{len(search.runs):,} in searches and "
        counts.append(f"{name}: {found}{count:,}{' from several seeds' if search is not None and seeds > 1 else ''}")
    every = [*runs, *(run.result.settings for search in plan.searched.values() for run in search.runs)]
    stopped = [name for name, search in plan.searched.items() if search.timed_out]
    return _rows(
        settings,
        attacks="; ".join(counts) + (f". The time limit ended the search on {', '.join(stopped)}" if stopped else ""),
        seeds=f"{seeds} of each final attack",
        steps=f"{max((each.steps for each in every), default=0):,}",
        samples=f"{max((each.samples for each in every), default=0):,}",
        threshold=plan.recovered,
    )


def _rows(settings: FolderAttack, *, threshold: str, seeds: str = "", **values: str) -> list[tuple[str, str]]:
    adaptive = settings.grid == "adaptive"
    kind = "a search for the best attack on each model" if adaptive else "fixed attacks, no search"
    rows = [("grid", f"{settings.grid} ({kind})"), ("attacks with harmful rows", values["attacks"])]
    rows += [("seeds", seeds)] if seeds else []
    rows += [("most steps of an attack", values["steps"]), ("harmful rows of an attack", values["samples"])]
    fixed = {name: value for name, value in settings.fixed.items() if name not in ("samples", "max_steps")}
    if fixed:
        rows.append(("given to every attack", ", ".join(f"{name}={_shown(value)}" for name, value in fixed.items())))
    if settings.minutes is not None and adaptive:
        rows.append(("time limit of the search", f"{settings.minutes:g} minutes"))
    rows.append(("an attack has recovered the behavior", threshold))
    rows.append(("target", f"at least {settings.least_resistance:g} times the steps of the best attack on the base"))
    return rows


def _shown(value: object) -> str:
    return ", ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else str(value)


def _by_seed(attacks: int, runs: int) -> str:
    seeds = runs // max(attacks, 1)
    return f"{_counted(attacks, 'attack')}, {_counted(seeds, 'seed')} each"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
