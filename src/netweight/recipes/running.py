"""A checked recipe → a plan of steps → results, findings and a report; what an earlier run did is not done again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from netweight.core import digest
from netweight.core.ledger import Ledger
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob
from netweight.evidence.audit import run_audits
from netweight.evidence.finding import Finding
from netweight.evidence.report import Report
from netweight.recipes.attacks import Attack, Target
from netweight.recipes.entries import Chosen
from netweight.recipes.reading import Recipe
from netweight.recipes.treatments import Treatment

__all__ = ["AttackStep", "Done", "Plan", "Step", "run"]


@final
@dataclass(frozen=True)
class Step:
    """One treatment of a plan, with its audits.

    Attributes:
        number: Place in the recipe, from 1.
        chosen: The treatment and its settings.
        audits: Names of the audits that will run.
        left_out: Names of the treatment's audits that will not run; shown in red.
        by_attack: Names of those that an attack of the recipe holds.
    """

    number: int
    chosen: Chosen[Treatment[Any]]
    audits: tuple[str, ...]
    left_out: tuple[str, ...]
    by_attack: tuple[str, ...] = ()

    @property
    def verb(self) -> str:
        """The treatment's verb."""
        return self.chosen.what.verb


@final
@dataclass(frozen=True)
class AttackStep:
    """One attack of a plan.

    Attributes:
        number: Place in the recipe, after the treatments.
        chosen: The attack and its settings.
    """

    number: int
    chosen: Chosen[Attack[Any]]

    @property
    def verb(self) -> str:
        """The attack's verb."""
        return self.chosen.what.verb


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
            names, by_attack = chosen.what.audits, chosen.what.by_attack
            held = tuple(name for name in names if by_attack.get(name) in verbs)
            ran = tuple(
                name for name in names if name not in by_attack and (recipe.audits == "all" or name in recipe.audits)
            )
            left_out = tuple(name for name in names if name not in (*ran, *held))
            steps.append(Step(number, chosen, ran, left_out, held))
        attacks = enumerate(recipe.attacks, start=len(steps) + 1)
        return cls(recipe, tuple(steps), tuple(AttackStep(number, chosen) for number, chosen in attacks))

    def to_json(self) -> dict[str, Any]:
        """Describe the plan as JSON values."""
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
                }
                for step in self.steps
            ],
            **({"attacks": [self._attack(step) for step in self.attacks]} if self.attacks else {}),
        }

    @staticmethod
    def _attack(step: AttackStep) -> dict[str, Any]:
        return {"attack": step.verb, "settings": step.chosen.settings}


@final
@dataclass(frozen=True)
class Done:
    """A step that has been run, a treatment or an attack.

    Attributes:
        step: The step.
        path: The treated model, or the one that was attacked.
        findings: What each audit found, by the audit's name; of an attack, by its verb.
        remembered: Whether the treatment was found done by an earlier run.
    """

    step: Step | AttackStep
    path: Path
    findings: Mapping[str, list[Finding]]
    remembered: bool

    @property
    def failed(self) -> list[Finding]:
        """The findings that missed their targets."""
        return [finding for found in self.findings.values() for finding in found if finding.passed is False]


def run(plan: Plan, *, progress: Progress = QUIET, command: str | None = None) -> list[Done]:
    """Run a plan: each treatment with its audits, then attacks, then the report; what was done before is kept.

    Args:
        plan: What to do.
        progress: Where progress is shown.
        command: The command line to name in the report.

    Returns:
        One entry per treatment, then one per attack. `report.json` and `report.html` lie in the output folder.

    Raises:
        UsageError: The output folder is in use by another process.
        CorruptBlob: The ledger is damaged, or a result was changed after it was made.
    """
    recipe = plan.recipe
    source, key = recipe.subject, _digest_of(recipe.subject, progress)
    report = Report(
        f"Recipe for {recipe.subject.name}",
        command=command,
        seeds=(recipe.seed,),
        inputs={str(recipe.subject): key},
    )
    done = []
    with Ledger(recipe.output / "ledger.jsonl") as ledger:
        for step in plan.steps:
            settings = {**step.chosen.settings, **_files_of(step.chosen.config)}
            key = digest.of_config({"input": key, "treatment": step.verb, "settings": settings})
            path = recipe.output / f"{step.number:02d}-{step.verb}-{key.rsplit(':')[-1][:8]}"
            remembered = _treat(step, key, source, path, ledger, progress)
            findings = _audit(step, key, source, path, ledger, recipe.seed, progress)
            done.append(Done(step, path, findings, remembered))
            report.section(
                f"{step.number}. {step.verb}",
                [finding for found in findings.values() for finding in found],
                intro=f"{source} became {path}.",
                treatment=step.verb,
                audits=(*step.audits, *step.by_attack),
            )
            if step.chosen.what.illustrate is not None:
                step.chosen.what.illustrate(path, step.number, report)
            source = path
    done += [_attack(step, source, plan, report, progress) for step in plan.attacks]
    report.write(recipe.output)
    return done


def _attack(step: AttackStep, model: Path, plan: Plan, report: Report, progress: Progress) -> Done:
    """Run an attack on the last model; it keeps a ledger of its own."""
    recipe, title = plan.recipe, f"{step.number}. attack: {step.verb}"
    before = recipe.subject if plan.steps else None
    target = Target(model, before, recipe.output, recipe.seed, title)
    findings = step.chosen.what.run(target, step.chosen.config, report, progress)
    return Done(step, model, {step.verb: findings}, remembered=False)


def _files_of(config: Any) -> dict[str, str]:
    """Digests of the files that settings name: another content makes another step."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: digest.of_file(value) for name, value in values.items() if isinstance(value, Path)}


def _digest_of(path: Path, progress: Progress) -> str:
    """Digest a file, or the names and contents of all files in a folder."""
    if path.is_file():
        return digest.of_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    with progress.task(f"reading {path.name}", sum(file.stat().st_size for file in files)) as task:
        digests = {}
        for file in files:
            digests[file.relative_to(path).as_posix()] = digest.of_file(file)
            task.update(file.stat().st_size)
    return digest.of_config(digests)


def _treat(step: Step, key: str, source: Path, path: Path, ledger: Ledger, progress: Progress) -> bool:
    """Make a step's result unless it is there; tell whether it was."""
    record = ledger.records.get(key)
    if record is not None and path.exists():
        if record["result"] != _digest_of(path, progress):
            raise CorruptBlob(f"{path} was changed after it was made.", cure="Delete it to have it made again.")
        return True
    if not path.exists():  # it is there without a record when a kill fell between the two
        step.chosen.what.apply(source, path, step.chosen.config, progress)
    ledger.append({"digest": key, "step": step.number, "result": _digest_of(path, progress)})
    return False


def _audit(
    step: Step, key: str, source: Path, path: Path, ledger: Ledger, seed: int, progress: Progress
) -> dict[str, list[Finding]]:
    """Run a step's audits, or read from the ledger what they found."""
    findings = {}
    for name in step.audits:
        audit_key = digest.of_config({"treated": key, "audit": name, "seed": seed})
        if audit_key not in ledger.records:
            subject, config = step.chosen.what.examine(name, path, source, step.chosen.config, progress)
            found = run_audits(step.verb, subject, config, seed=seed, progress=progress, only=[name])[name]
            ledger.append({"digest": audit_key, "audit": name, "findings": [finding.to_json() for finding in found]})
        findings[name] = [Finding.from_json(finding) for finding in ledger.records[audit_key]["findings"]]
    return findings
