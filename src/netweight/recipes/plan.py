"""A checked recipe → a plan of steps, with the digests that an earlier run's results are known again by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from netweight.core import digest
from netweight.core.progress import QUIET, Progress
from netweight.core.runs import read_ledger
from netweight.recipes.recipe import Chosen, Recipe
from netweight.registry import Attack, Method

# The file in a recipe's output that remembers what was done.
LEDGER = "ledger.jsonl"


@final
@dataclass(frozen=True)
class Step:
    """One treatment of a plan, with its audits."""

    number: int  # place in the recipe, from 1
    chosen: Chosen[Method[Any]]  # the treatment and its settings
    audits: tuple[str, ...]  # names of the audits that will run
    left_out: tuple[str, ...]  # names of the treatment's audits that will not run; shown in red
    by_attack: tuple[str, ...] = ()  # names of those that an attack of the recipe holds

    @property
    def verb(self) -> str:
        """The treatment's verb."""
        return self.chosen.what.verb


@final
@dataclass(frozen=True)
class AttackStep:
    """One attack of a plan."""

    number: int  # place in the recipe, after the treatments
    chosen: Chosen[Attack[Any]]  # the attack and its settings

    @property
    def verb(self) -> str:
        """The attack's verb."""
        return self.chosen.what.verb


@final
@dataclass(frozen=True)
class Known:
    """What an earlier run did of a step."""

    done: bool  # whether the step's result is there, made of the same input by the same settings
    to_audit: tuple[str, ...]  # names of the step's audits that have not been run on it

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON values."""
        return {"done": self.done, "to_audit": list(self.to_audit)}


@final
@dataclass(frozen=True)
class Plan:
    """The steps of a recipe, in order."""

    recipe: Recipe
    steps: tuple[Step, ...]
    attacks: tuple[AttackStep, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """Plan a recipe; nothing is read or written."""
        verbs = {chosen.what.verb for chosen in recipe.attacks}
        steps = []
        for number, chosen in enumerate(recipe.treatments, start=1):
            names, by_attack = chosen.what.runnable, chosen.what.by_attack
            held = tuple(name for name in chosen.what.audits if by_attack.get(name) in verbs)
            ran = tuple(
                name for name in names if name not in by_attack and (recipe.audits == "all" or name in recipe.audits)
            )
            left_out = tuple(name for name in chosen.what.audits if name not in (*ran, *held))
            steps.append(Step(number, chosen, ran, left_out, held))
        attacks = enumerate(recipe.attacks, start=len(steps) + 1)
        return cls(recipe, tuple(steps), tuple(AttackStep(number, chosen) for number, chosen in attacks))

    def known(self, *, progress: Progress = QUIET) -> list[Known]:
        """Tell what of this plan an earlier run did: one entry per treatment, then one per attack."""
        # The subject and the files that settings name are read, and the ledger is; nothing is written.
        keys = keys_of(self, progress)[1:]
        records = read_ledger(self.recipe.output / LEDGER)
        found = [
            Known(
                key in records and self.result(step, key).exists(),
                tuple(name for name in step.audits if audit_key(key, name, self.recipe.seed) not in records),
            )
            for step, key in zip(self.steps, keys, strict=False)
        ]
        return found + [Known(key in records, ()) for key in keys[len(self.steps) :]]

    def result(self, step: Step, key: str) -> Path:
        """Where a treatment's result lies: another input or setting has another place."""
        return self.recipe.output / f"{step.number:02d}-{step.verb}-{key.rsplit(':')[-1][:8]}"

    def to_json(self, known: list[Known] | None = None) -> dict[str, Any]:
        """Describe the plan as JSON values."""
        count = len(self.steps)
        marks = [{}] * (count + len(self.attacks)) if known is None else [each.to_json() for each in known]
        attacks = [
            {"attack": step.verb, "settings": step.chosen.settings, **mark}
            for step, mark in zip(self.attacks, marks[count:], strict=True)
        ]
        return {
            "subject": str(self.recipe.subject),
            "output": str(self.recipe.output),
            "seed": self.recipe.seed,
            "steps": [
                {
                    "treatment": step.verb,
                    "settings": step.chosen.settings,
                    "audits": list(step.audits),
                    "left_out": list(step.left_out),
                    **mark,
                }
                for step, mark in zip(self.steps, marks, strict=False)
            ],
            **({"attacks": attacks} if attacks else {}),
        }


def keys_of(plan: Plan, progress: Progress) -> list[str]:
    """Digest the subject, then each treatment with all that went before it, then each attack on the last result."""
    subject = digest_of(plan.recipe.subject, progress)
    keys = [subject]
    for step in plan.steps:
        settings = {**step.chosen.settings, **_contents(step.chosen.config, step.chosen.what.reads, progress)}
        keys.append(digest.of_config({"input": keys[-1], "treatment": step.verb, "settings": settings}))
    made = keys[-1]
    for attack in plan.attacks:
        settings = {**attack.chosen.settings, **_contents(attack.chosen.config, attack.chosen.what.reads, progress)}
        about = {"subject": subject, "input": made, "attack": attack.verb, "seed": plan.recipe.seed}
        keys.append(digest.of_config({**about, "settings": settings}))
    return keys


def audit_key(treated: str, audit: str, seed: int) -> str:
    """Digest an audit of a treatment's result."""
    return digest.of_config({"treated": treated, "audit": audit, "seed": seed})


def digest_of(path: Path, progress: Progress = QUIET) -> str:
    """Digest a file, or the names and contents of all files in a folder; of what is no path here, its name."""
    if path.is_file():
        return digest.of_file(path)
    if not path.exists():
        return digest.of_config({"named": str(path)})
    files = sorted(file for file in path.rglob("*") if file.is_file())
    with progress.task(f"reading {path.name}", sum(file.stat().st_size for file in files)) as task:
        digests = {}
        for file in files:
            digests[file.relative_to(path).as_posix()] = digest.of_file(file)
            task.update(file.stat().st_size)
    return digest.of_config(digests)


def _contents(config: Any, reads: Callable[[Any], Iterable[Path]] | None, progress: Progress) -> dict[str, Any]:
    """Digests of what settings name, and of the files that these lead to: another content makes another step."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, Path):
            found[name] = digest_of(value, progress)
        elif isinstance(value, Mapping) and any(isinstance(each, Path) for each in value.values()):
            found[name] = {key: digest_of(each, progress) for key, each in value.items()}
    further = [] if reads is None else [digest_of(file, progress) for file in reads(config)]
    return {**found, "reads": further} if further else found
