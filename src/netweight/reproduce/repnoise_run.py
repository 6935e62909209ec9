"""Runs that RepNoise's tables share: a defended model, trained once and kept, and one fine-tuning attack on it.

Both are known by the paper's rates and counts, so that a run has one name at every scale. Everything lies in one folder
beside those of the tables: `runs.jsonl` and a folder for each defended model, from which a stopped training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.core.digest import of_config
from netweight.errors import TrainingStopped, UsageError
from netweight.reproduce.registry import Scale
from netweight.reproduce.repnoise_ground import HARMFUL, Ground, share_of, standing_in
from netweight.reproduce.resumed import LEDGER, chosen, finished, run_each
from netweight.store.atomic import whole_file

if TYPE_CHECKING:
    from torch import nn

    from netweight.attacks.finetuning.settings import AttackSettings
    from netweight.attacks.finetuning.subject import Subject
    from netweight.methods.immunize.defense import Defense
    from netweight.methods.immunize.pairs import Pair

__all__ = [
    "NONE", "RECOVERED", "AttackRun", "Defended", "attacked", "defended_model", "folder_of", "settings_of",
    "subject_of",
]  # fmt: skip

NONE = "base"
"""In place of a defense's name: the model as it is."""
STOPPED = "stopped.txt"
"""Says why a defense could not be trained to its end, so that it is not tried for each of its attacks."""
RECOVERED = 0.9
"""Share of right tokens at which steps to recovery are counted."""


@final
@dataclass(frozen=True)
class Defended:
    """A model and its defense. Rates and counts are the paper's; the ground says what they are here.

    Attributes:
        defense: A name of `methods.immunize.catalog`, or `NONE`.
        lr: Learning rate.
        pairs: Number of pairs.
        epochs: Passes over them.
        alpha: Weight of RepNoise's ascent.
        beta: Weight of its noise; None for what is usual in its fidelity.
        data: What the pairs are of, see `Ground.pairs`.
        frozen: The part that is not trained, by its name in the paper's table 6.
        loss: "" for the whole loss, "no mask" for prompts that count as answers do, "no lens" for the ascent at the
            last layer alone.
        start: "aligned" or "unaligned".
        batch: Pairs per step; None for what is usual on the ground.
        whole: Whether the number of pairs is the paper's where the ground's share is taken.
        seed: Of pairs, noise and order.
    """

    defense: str = NONE
    lr: float = 2e-5
    pairs: int = 10_000
    epochs: int = 1
    alpha: float = 1.0
    beta: float | None = None
    data: str = HARMFUL
    frozen: str = ""
    loss: str = ""
    start: str = "aligned"
    batch: int | None = None
    whole: bool = False
    seed: int = 42

    @property
    def name(self) -> str:
        """The defense, and whatever is not usual."""
        parts = [self.defense]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                parts.append(f"{field.name}={shown}".replace(" ", "-"))
        return "+".join(parts)


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


def folder_of(out: Path, scale: Scale) -> Path:
    """Return the folder that all tables of a scale share, beside a table's own."""
    return out.parent / f"repnoise-runs-{scale}"


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
    from netweight.attacks.finetuning.run import run_attack
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
    return replace(settings, check_every=ground.look_every or settings.steps)


def _count(number: int, run: AttackRun, ground: Ground) -> int:
    return _part(number, run.share / ground.share if run.whole else run.share)


def _part(number: int, share: float) -> int:
    return max(1, round(share * number)) if number else 0


def defended_model(defended: Defended, ground: Ground, folder: Path, share: float) -> nn.Module:
    """Return a defended model: trained once, then kept in the folder; the one asked for last is at hand.

    Args:
        defended: The model and its defense.
        ground: Where.
        folder: Where defended models are kept.
        share: Share of the paper's number of pairs.

    Raises:
        TrainingStopped: The defense diverged.
    """
    return _defended(defended, ground, folder, share)


@lru_cache(maxsize=1)  # a second model might not fit beside the first
def _defended(defended: Defended, ground: Ground, folder: Path, share: float) -> nn.Module:
    from netweight.methods.immunize.security_vectors import hold_security_vectors
    from netweight.methods.immunize.training import CHECKPOINT

    model = ground.model(defended.start)
    if defended.defense == NONE:
        return model
    defense, pairs, kept = _parts(defended, ground, share)
    place = folder / "defended" / f"{defended.name}-{of_config([defended, share, ground.model_name])[-8:]}"
    file = place / "weights.safetensors"
    if file.exists():
        with defense.prepared(model, seed=0):
            pass
        _read(model, file)
    else:
        _train(model, defended, ground, defense, pairs, kept, place)
        _write(model, file)
        (place / CHECKPOINT).unlink(missing_ok=True)
    hold_security_vectors(model)
    model.train(False)
    return model


def _parts(defended: Defended, ground: Ground, share: float) -> tuple[Defense, list[Pair], list[Any]]:
    """The defense, its pairs, and what it keeps besides."""
    from netweight.methods.immunize.catalog import named_defense
    from netweight.methods.immunize.config import RepNoiseConfig
    from netweight.methods.immunize.method import RepNoise
    from netweight.methods.immunize.pairs import Pair

    count = _part(defended.pairs, share / ground.share if defended.whole else share)
    pairs = ground.pairs(defended.data, count, defended.seed)
    if defended.loss == "no mask":
        pairs = [Pair((), pair.prompt + pair.chosen, pair.prompt + pair.rejected) for pair in pairs]
    defense: Defense = named_defense(defended.defense).defense
    if isinstance(defense, RepNoise):
        changes: dict[str, Any] = {"alpha": defended.alpha}
        changes |= {} if defended.beta is None else {"beta": defended.beta}
        changes |= {"lens_layers": 0} if defended.loss == "no lens" else {}
        config: RepNoiseConfig = replace(defense.config, **changes)
        defense = RepNoise(config)
    return defense, pairs, ground.retain(count, defended.seed)


def _train(
    model: nn.Module,
    defended: Defended,
    ground: Ground,
    defense: Defense,
    pairs: list[Pair],
    kept: list[Any],
    place: Path,
) -> None:
    from netweight.methods.immunize.freezing import frozen
    from netweight.methods.immunize.settings import Settings
    from netweight.methods.immunize.training import immunize

    settings = Settings(
        lr=standing_in(defended.lr, ground.rate),
        epochs=defended.epochs,
        batch_size=defended.batch or ground.defense_batch,
        seed=defended.seed,
    )
    part = frozen(model, ground.layers(defended.frozen)) if defended.frozen else nullcontext()
    stopped = place / STOPPED
    if stopped.exists():
        raise TrainingStopped(stopped.read_text(encoding="utf-8"))
    with part:
        try:
            immunize(model, pairs, kept, defense=defense, settings=settings, folder=place, pad_id=ground.pad_id)
        except TrainingStopped as error:
            with whole_file(stopped) as stream:
                stream.write(error.reason.encode())
            raise


def _write(model: nn.Module, file: Path) -> None:
    from netweight.store import StoreWriter

    with StoreWriter(file, overwrite=True) as store:
        for name, value in model.named_parameters():
            store.add(name, value.detach().cpu())


def _read(model: nn.Module, file: Path) -> None:
    import torch

    from netweight.store import open_store

    with open_store(file) as store, torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(store.get(name))
