"""A plan → results, sections and a report; what an earlier run did is not done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob
from netweight.job import Job
from netweight.recipes.plan import LEDGER, AttackStep, Key, Plan, Step, audit_key, digest_of, keys_of, section_of
from netweight.registry import Target
from netweight.report.audit import of_treatment, run_audits
from netweight.report.finding import Chapter, Finding, Section
from netweight.report.report import Report
from netweight.report.text import chapter_verdict


@final
@dataclass(frozen=True)
class Done:
    """A step that has been run, a treatment or an attack."""

    step: Step | AttackStep
    path: Path  # the treated model, or the one that was attacked
    sections: Mapping[str, Section]  # what each audit returned, by the audit's name; of an attack, by its verb
    remembered: bool  # whether it was found done by an earlier run
    chapter: str = ""  # the name of its chapter

    @property
    def findings(self) -> dict[str, list[Finding]]:
        """The findings by audit."""
        return {name: list(section.findings) for name, section in self.sections.items()}

    @property
    def failed(self) -> list[Finding]:
        """The findings that missed their targets."""
        return [finding for found in self.findings.values() for finding in found if finding.passed is False]


def run(
    plan: Plan,
    *,
    progress: Progress = QUIET,
    command: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> list[Done]:
    """Run a plan: each treatment with its audits, then attacks, then the report; what was done before is kept."""
    recipe, done = plan.recipe, []
    report = Report(recipe.title or f"Recipe for {recipe.subject.name}", summary=recipe.summary, command=command)
    for number, part in enumerate(plan.parts, start=1):
        if part.recipe.name:
            say(f"{number} of {len(plan.parts)}, {part.recipe.title}.")
        found, inputs = _run(part, progress, say)
        sections = [section for each in found for section in _shown(each, part)]
        if part.recipe.name:
            report.chapter(_chapter(part, sections, command))
        for section in sections:
            report.add(section)
        about = report.provenance
        seeds = tuple(sorted({*about.seeds, part.recipe.seed}))
        report.provenance = replace(about, inputs=about.inputs | inputs, seeds=seeds)
        done += found
    report.write(recipe.output)
    return done


def _run(plan: Plan, progress: Progress, say: Callable[[str], object]) -> tuple[list[Done], dict[str, str]]:
    """Run the steps of one recipe or chapter; also the digest of its subject."""
    recipe, source, done = plan.recipe, plan.recipe.subject, []
    subject, keys = keys_of(plan, progress)
    with Job.open(recipe.output) as job:
        for step, key in zip(plan.steps, keys, strict=False):
            path = plan.result(step, key)
            remembered = _treat(step, key, source, path, job, progress)
            sections = {name: _audit(step, name, key, source, path, job, plan, progress) for name in step.audits}
            done.append(Done(step, path, sections, remembered, recipe.name))
            _say(done[-1], say)
            source = path
        for attack, key in zip(plan.attacks, keys[len(plan.steps) :], strict=True):
            target = Target(source, recipe.subject if plan.steps else None, recipe.output, recipe.seed)
            section = section_of(job, key)
            remembered = section is not None
            if section is None:
                section = attack.chosen.what.run(target, attack.chosen.config, progress)
                job.record(
                    LEDGER, {"step": attack.number, "attack": attack.verb, "section": section.to_json()}, key=key
                )
            done.append(Done(attack, source, {attack.verb: section}, remembered, recipe.name))
            _say(done[-1], say)
    return done, {str(recipe.subject): subject}


def _treat(step: Step, key: Key, source: Path, path: Path, job: Job, progress: Progress) -> bool:
    """Make a step's result unless it is there; tell whether it was."""
    record = job.recorded(LEDGER, key)
    if record is not None and path.exists():
        if record["result"] != digest_of(path, progress):
            raise CorruptBlob(f"{path} was changed after it was made.", cure="Delete it to have it made again.")
        return True
    if not path.exists():  # it is there without a record when a kill fell between the two
        step.chosen.what.apply(source, path, step.chosen.config, progress)
    job.record(LEDGER, {"step": step.number, "result": digest_of(path, progress)}, key=key)
    return False


def _audit(
    step: Step, name: str, key: Key, source: Path, path: Path, job: Job, plan: Plan, progress: Progress
) -> Section:
    """Run an audit of a step's result, or read from the ledger what it returned."""
    about = audit_key(key, name, plan)
    section = section_of(job, about)
    if section is None:
        subject, config = step.chosen.what.examine(name, path, source, step.chosen.config, progress)
        section = run_audits(
            step.verb, subject, config, seed=plan.recipe.seed, progress=progress, only=[name]
        )[name]  # fmt: skip
        job.record(LEDGER, {"audit": name, "section": section.to_json()}, key=about)
    return section


def _say(done: Done, say: Callable[[str], object]) -> None:
    known = " (done by an earlier run)" if done.remembered else ""
    told = " ".join(section.conclusion for section in done.sections.values() if section.conclusion)
    say(f"  {done.step.verb}{known}: {told or 'done.'}")


def _shown(done: Done, plan: Plan) -> list[Section]:
    """The sections of a step in the report; the first says what was made, and which audits are missing."""
    number, step = done.step.number, done.step
    heading = f"{plan.recipe.name}, step {number}" if plan.recipe.name else f"{number}. {step.verb}"
    if isinstance(step, AttackStep):
        return [replace(section, title=f"{heading}: {section.title}") for section in done.sections.values()]
    first, *others = [
        replace(section, title=f"{heading}: {section.title}") for section in done.sections.values()
    ] or [Section(heading)]  # fmt: skip
    made = f"{step.verb} made {done.path}."
    first = replace(first, intro=f"{made}\n\n{first.intro}".strip())
    return [of_treatment(first, step.verb, (*step.audits, *step.by_attack)), *others]


def _chapter(plan: Plan, sections: list[Section], command: str | None) -> Chapter:
    recipe = plan.recipe
    outcome, verdict, conclusion = chapter_verdict(sections)
    if command is not None and "--only" not in command:
        command = f"{command} --only {recipe.name}"
    return Chapter(
        title=recipe.title, question=recipe.question, intro=recipe.intro, conclusion=conclusion, verdict=verdict,
        outcome=outcome, command=command,
    )  # fmt: skip
