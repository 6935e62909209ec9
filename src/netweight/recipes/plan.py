"""A checked recipe → a plan of steps, with the digests that an earlier run's results are known again by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from netweight.core.files import digest_config, digest_file
from netweight.core.progress import QUIET, Progress
from netweight.job import Job
from netweight.recipes.recipe import Chosen, Recipe
from netweight.registry import Attack, Method
from netweight.report.finding import Section

LEDGER = "ledger"  # the records in a recipe's output that remember what was done
Key: TypeAlias = dict[str, Any]  # all that decides a result


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
    """The steps of a recipe, in order; of a recipe of chapters, their plans."""

    recipe: Recipe
    steps: tuple[Step, ...]
    attacks: tuple[AttackStep, ...] = ()
    chapters: tuple[Plan, ...] = ()

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The plans that have steps: those of chapters, or this one alone."""
        return self.chapters or (self,)

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """Plan a recipe; nothing is read or written."""
        verbs = {chosen.what.verb for chosen in recipe.attacks}
        steps = []
        for number, chosen in enumerate(recipe.treatments, start=1):
            held = tuple(name for name in chosen.what.audits if chosen.what.by_attack.get(name) in verbs)
            ran = tuple(
                name
                for name in chosen.what.runnable
                if name not in held and (recipe.audits == "all" or name in recipe.audits)
            )
            left_out = tuple(name for name in chosen.what.audits if name not in (*ran, *held))
            steps.append(Step(number, chosen, ran, left_out, held))
        attacks = enumerate(recipe.attacks, start=len(steps) + 1)
        return cls(
            recipe, tuple(steps), tuple(AttackStep(number, chosen) for number, chosen in attacks),
            tuple(cls.of(chapter) for chapter in recipe.chapters),
        )  # fmt: skip

    def known(self, *, progress: Progress = QUIET) -> list[Known]:
        """Tell what of this plan an earlier run did: one entry per treatment, then one per attack."""
        # The subject and the files that settings name are read, and the ledger is; nothing is written.
        keys = keys_of(self, progress)[1]
        with Job.open(self.recipe.output, reading=True) as job:
            found = [
                Known(
                    job.recorded(LEDGER, key) is not None and self.result(step, key).exists(),
                    tuple(name for name in step.audits if section_of(job, audit_key(key, name, self)) is None),
                )
                for step, key in zip(self.steps, keys, strict=False)
            ]
            return found + [Known(section_of(job, key) is not None, ()) for key in keys[len(self.steps) :]]

    def result(self, step: Step, key: Key) -> Path:
        """Where a treatment's result lies: another input or setting has another place."""
        return self.recipe.output / f"{step.number:02d}-{step.verb}-{digest_config(key).rsplit(':')[-1][:8]}"

    def to_json(self, *, known: bool = False, progress: Progress = QUIET) -> dict[str, Any]:
        """Describe the plan as JSON values; `known` adds what an earlier run did."""
        if self.chapters:
            chapters = {plan.recipe.name: plan.to_json(known=known, progress=progress) for plan in self.chapters}
            return {"output": str(self.recipe.output), "chapters": chapters}
        count = len(self.steps)
        marks: list[dict[str, Any]] = [{}] * (count + len(self.attacks))
        if known:
            marks = [each.to_json() for each in self.known(progress=progress)]
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


def keys_of(plan: Plan, progress: Progress) -> tuple[str, list[Key]]:
    """Digest the subject; return it, and the key of each treatment with all before it, then of each attack."""
    made = subject = digest_of(plan.recipe.subject, progress)
    keys: list[Key] = []
    for step in plan.steps:
        settings = {**step.chosen.settings, **_contents(step.chosen.config, step.chosen.what.reads, progress)}
        keys.append({"input": made, "treatment": step.verb, "settings": settings})
        made = digest_config(keys[-1])
    for attack in plan.attacks:
        settings = {**attack.chosen.settings, **_contents(attack.chosen.config, attack.chosen.what.reads, progress)}
        about = {"subject": subject, "input": made, "attack": attack.verb, "seed": plan.recipe.seed}
        keys.append({**about, "settings": settings})
    return subject, keys


def audit_key(treated: Key, audit: str, plan: Plan) -> Key:
    """The key of an audit of a treatment's result."""
    return {"treated": digest_config(treated), "audit": audit, "seed": plan.recipe.seed}


def section_of(job: Job, key: Key) -> Section | None:
    """The section that an audit or an attack of this key returned; earlier releases kept none."""
    held = (job.recorded(LEDGER, key) or {}).get("section")
    return None if held is None else Section.from_json(held)


def digest_of(path: Path, progress: Progress = QUIET) -> str:
    """Digest a file, or the names and contents of all files in a folder; of what is no path here, its name."""
    if path.is_file():
        return digest_file(path)
    if not path.exists():
        return digest_config({"named": str(path)})
    files = sorted(file for file in path.rglob("*") if file.is_file())
    with progress.task(f"reading {path.name}", sum(file.stat().st_size for file in files)) as task:
        digests = {}
        for file in files:
            digests[file.relative_to(path).as_posix()] = digest_file(file)
            task.update(file.stat().st_size)
    return digest_config(digests)


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
