"""A plan → results, findings and a report; what an earlier run did is not done again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from netweight.core.progress import QUIET, Progress
from netweight.core.runs import Ledger
from netweight.errors import CorruptBlob
from netweight.recipes.plan import LEDGER, AttackStep, Plan, Step, audit_key, digest_of, keys_of
from netweight.registry import Target
from netweight.report.audit import run_audits
from netweight.report.finding import Finding
from netweight.report.report import Report


@final
@dataclass(frozen=True)
class Done:
    """A step that has been run, a treatment or an attack."""

    step: Step | AttackStep
    path: Path  # the treated model, or the one that was attacked
    findings: Mapping[str, list[Finding]]  # what each audit found, by the audit's name; of an attack, by its verb
    remembered: bool  # whether it was found done by an earlier run

    @property
    def failed(self) -> list[Finding]:
        """The findings that missed their targets."""
        return [finding for found in self.findings.values() for finding in found if finding.passed is False]


def run(plan: Plan, *, progress: Progress = QUIET, command: str | None = None) -> list[Done]:
    """Run a plan: each treatment with its audits, then attacks, then the report; what was done before is kept."""
    recipe, source = plan.recipe, plan.recipe.subject
    subject, *keys = keys_of(plan, progress)
    report = Report(
        f"Recipe for {recipe.subject.name}",
        command=command,
        seeds=(recipe.seed,),
        inputs={str(recipe.subject): subject},
    )
    done = []
    with Ledger(recipe.output / LEDGER) as ledger:
        for step, key in zip(plan.steps, keys, strict=False):
            path = plan.result(step, key)
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
        for attack, key in zip(plan.attacks, keys[len(plan.steps) :], strict=True):
            done.append(_attack(attack, key, source, plan, ledger, report, progress))
    report.write(recipe.output)
    return done


def _attack(
    step: AttackStep, key: str, model: Path, plan: Plan, ledger: Ledger, report: Report, progress: Progress
) -> Done:
    """Run an attack on the last model; its own ledger remembers its parts, and the report is made of them again."""
    recipe, title = plan.recipe, f"{step.number}. attack: {step.verb}"
    before = recipe.subject if plan.steps else None
    target = Target(model, before, recipe.output, recipe.seed, title)
    remembered = key in ledger.records
    findings = step.chosen.what.run(target, step.chosen.config, report, progress)
    if not remembered:
        ledger.append({"digest": key, "step": step.number, "attack": step.verb})
    return Done(step, model, {step.verb: findings}, remembered)


def _treat(step: Step, key: str, source: Path, path: Path, ledger: Ledger, progress: Progress) -> bool:
    """Make a step's result unless it is there; tell whether it was."""
    record = ledger.records.get(key)
    if record is not None and path.exists():
        if record["result"] != digest_of(path, progress):
            raise CorruptBlob(f"{path} was changed after it was made.", cure="Delete it to have it made again.")
        return True
    if not path.exists():  # it is there without a record when a kill fell between the two
        step.chosen.what.apply(source, path, step.chosen.config, progress)
    ledger.append({"digest": key, "step": step.number, "result": digest_of(path, progress)})
    return False


def _audit(
    step: Step, key: str, source: Path, path: Path, ledger: Ledger, seed: int, progress: Progress
) -> dict[str, list[Finding]]:
    """Run a step's audits, or read from the ledger what they found."""
    findings = {}
    for name in step.audits:
        about = audit_key(key, name, seed)
        if about not in ledger.records:
            subject, config = step.chosen.what.examine(name, path, source, step.chosen.config, progress)
            found = run_audits(step.verb, subject, config, seed=seed, progress=progress, only=[name])[name].findings
            ledger.append({"digest": about, "audit": name, "findings": [finding.to_json() for finding in found]})
        findings[name] = [Finding.from_json(finding) for finding in ledger.records[about]["findings"]]
    return findings
