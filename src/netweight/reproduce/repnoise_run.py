"""Fine-tuning attacks that RepNoise's tables share, each remembered in one ledger beside the tables' folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.errors import TrainingStopped, UsageError
from netweight.reproduce.repnoise_ground import HARMFUL, Ground, share_of, standing_in
from netweight.reproduce.repnoise_models import Defended, defended_model, taken
from netweight.reproduce.resumed import LEDGER, chosen, finished, run_each

if TYPE_CHECKING:
    from netweight.attacks.finetuning.settings import AttackSettings
    from netweight.attacks.finetuning.subject import Subject

__all__ = ["RECOVERED", "AttackRun", "attacked", "settings_of", "subject_of"]

RECOVERED = 0.9
"""Share of right tokens at which steps to recovery are counted."""


@final
@dataclass(frozen=True)
class AttackRun:
    """One attack on one model.

    Attributes:
        on: The model.
        lr: Learning rate, the paper's.
        samples: The attacker's examples, the paper's number.
        epochs: Passes over them.
        data: What is trained, see `Ground.subject`.
        task_first: Examples of a benign task, the paper's number, that come before.
        whole: Whether the number of samples is the paper's where the ground's share is taken.
        seed: Of examples and order.
        share: The ground's share of the numbers, or another one.
        model: The ground's model.
        measure: The ground's measure of harm.
    """

    on: Defended
    lr: float
    samples: int
    epochs: int = 1
    data: str = HARMFUL
    task_first: int = 0
    whole: bool = False
    seed: int = 0
    share: float = 1.0
    model: str = ""
    measure: str = ""

    @property
    def name(self) -> str:
        """For messages and patterns: `DEFENSE@RATE-SAMPLES-DATA-SEED`."""
        after = "-after-task" if self.task_first else ""
        return f"{self.on.name}@{self.lr:.0e}-{self.samples}-{self.data.replace(' ', '-')}{after}-{self.seed}"

    def at(self, ground: Ground, share: float | None = None) -> AttackRun:
        """Return the run on a ground, with the ground's share of the numbers or another one."""
        return replace(self, share=share_of(ground, share), model=ground.model_name, measure=ground.measure)

    @classmethod
    def of(cls, **config: Any) -> AttackRun:
        """Return the run that a ledger remembers."""
        return cls(**{**config, "on": Defended(**config["on"])})


def attacked(
    runs: Sequence[AttackRun], ground: Ground, folder: Path, *, only: str | None = None, share: float | None = None
) -> dict[AttackRun, dict[str, Any]]:
    """Run what is not yet run, and return all that is finished.

    Args:
        runs: Attacks, without what `AttackRun.at` fills in.
        ground: Where.
        folder: Of `folder_of`.
        only: A pattern of the runs' names; the others are taken only if they are finished. "none" runs none.
        share: Another share of the paper's numbers than the ground's, above 0.

    Returns:
        By run as it was given: what `attack_one` returned.

    Raises:
        UsageError: The pattern fits nothing, or nothing is finished.
        NetweightError: A run failed.
    """
    from netweight.core.progress import Progress

    here = {run.at(ground, share): run for run in runs}
    wanted = chosen(list(here), only)
    left = set(wanted) - set(finished(folder, AttackRun.of))
    with Progress("auto").task("attacks", total=len(left), unit="attacks") as work:
        job = partial(attack_one, ground=ground, folder=folder, tell=work.update)
        run_each(job, wanted, ledger=folder / LEDGER)
    known = finished(folder, AttackRun.of)
    found = {run: known[full] for full, run in here.items() if full in known}
    if not found:
        raise UsageError("No attack of the table is finished.", cure="Leave --only out, or give another pattern.")
    return found


def attack_one(run: AttackRun, *, ground: Ground, folder: Path, tell: Any) -> dict[str, Any]:
    """Attack a model; return what was seen before and after as JSON values.

    Args:
        run: The attack.
        ground: Where.
        folder: Where defended models are kept.
        tell: Called at the end.

    Returns:
        "before" and "after", the measure of harm; "kept before" and "kept after", the utility; "outcome"; "steps" to
        recovery, or None; "last step". Or "stopped": why the defense was not trained to its end.
    """
    from netweight.attacks.finetuning.attack import run_attack
    from netweight.attacks.finetuning.subject import Goal

    try:
        subject = subject_of(run, ground, folder)
    except TrainingStopped as error:
        tell(1)
        return {"stopped": error.reason}
    result = run_attack(subject, settings_of(run, ground), Goal(None))
    tell(1)
    first, last = result.curve[0], result.curve[-1]
    steps = next((look.step for look in result.curve if look.score >= RECOVERED), None)
    return {
        "before": first.score,
        "after": last.score,
        "kept before": first.utility,
        "kept after": last.utility,
        "outcome": result.outcome,
        "steps": steps,
        "last step": last.step,
    }


def subject_of(run: AttackRun, ground: Ground, folder: Path) -> Subject:
    """Return what a run attacks."""
    data = "after task" if run.task_first else run.data
    most = max(_count(run.samples, run, ground), _count(run.task_first, run, ground))
    return ground.subject(defended_model(run.on, ground, folder, run.share), data, most)


def settings_of(run: AttackRun, ground: Ground) -> AttackSettings:
    """Return a run's settings on a ground."""
    from netweight.attacks.finetuning.settings import AttackSettings

    plain = run.data == "task"
    settings = AttackSettings(
        lr=standing_in(run.lr, ground.rate),
        samples=_count(run.samples, run, ground),
        epochs=run.epochs,
        batch_size=ground.attack_batch,
        benign_first=-(-_count(run.task_first, run, ground) // ground.attack_batch),
        benign_share=0.0 if plain else ground.benign_share,
        precision=ground.precision,
        seed=run.seed,
    )
    return settings.replace(check_every=ground.look_every or settings.steps)


def _count(number: int, run: AttackRun, ground: Ground) -> int:
    return taken(number, run.share / ground.share if run.whole else run.share)
