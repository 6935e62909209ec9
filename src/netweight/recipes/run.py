"""Running a checked recipe: a plan of steps, their results, and a report. Finished steps are not run again.

Results are known again by digests of all that they were made from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

from tqdm import tqdm

from netweight.core.atomic_writes import part_of, work_of
from netweight.core.digests import digest_config, digest_file
from netweight.core.engines import local_processes, send_message
from netweight.core.progress import QUIET, Event, Progress
from netweight.core.work_account import WorkAccount, work_account
from netweight.errors import CorruptBlob, NetweightError
from netweight.job import Job, settle_publication
from netweight.recipes.recipe import Choice, Recipe, in_words_of_recipes
from netweight.registry import Attack, Method, Target, conditions_of, with_conditions, with_tested
from netweight.report.audit import of_treatment, run_audits
from netweight.report.finding import Chapter, Finding, Section
from netweight.report.report import Report
from netweight.report.text import chapter_verdict
from netweight.report.verdict import decide
from netweight.settings import Settings
from netweight.store.weights_digest import weights_digest

# The records of finished steps in a recipe's output.
LEDGER = "ledger"
# A key contains everything that decides a result.
Key: TypeAlias = dict[str, Any]


@final
@dataclass(frozen=True)
class Step:
    """One treatment of a plan, with its audits."""

    number: int
    """Place in the recipe, counted from 1."""
    choice: Choice[Method[Any]]
    """The treatment and its settings."""
    audits: tuple[str, ...]
    """Names of the audits that will run."""
    left_out: tuple[str, ...]
    """Names of the treatment's audits that will not run; the plan shows them in red."""
    by_attack: tuple[str, ...] = ()
    """Names of the audits that an attack of the recipe makes."""

    @property
    def verb(self) -> str:
        """The treatment's verb."""
        return self.choice.registration.verb

    @property
    def tested(self) -> dict[str, str]:
        """What its audits test and how strongly: names and values."""
        registration, settings = self.choice.registration, self.choice.settings
        return dict(pair for audit in self.audits for pair in registration.tested_by(audit, settings))


@final
@dataclass(frozen=True)
class AttackStep:
    """One attack of a plan."""

    number: int
    """Place in the recipe, after the treatments."""
    choice: Choice[Attack[Any]]
    """The attack and its settings."""

    @property
    def verb(self) -> str:
        """The attack's verb."""
        return self.choice.registration.verb

    @property
    def tested(self) -> dict[str, str]:
        """What it tests and how strongly: names and values."""
        return dict(self.choice.registration.tested_by(self.choice.settings))


@final
@dataclass(frozen=True)
class StepState:
    """Results of an earlier run of a step."""

    finished: bool
    """True if the result of the step exists and was made from the same input with the same settings."""
    to_audit: tuple[str, ...]
    """Names of the step's audits that have not been made."""

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON values."""
        return {"finished": self.finished, "to_audit": list(self.to_audit)}


@final
@dataclass(frozen=True)
class Plan:
    """The steps of a recipe, in order; of a recipe of chapters, their plans."""

    recipe: Recipe
    """The recipe."""
    steps: tuple[Step, ...]
    """Its treatments."""
    attacks: tuple[AttackStep, ...] = ()
    """Attacks on the result of the last treatment."""
    chapters: tuple[Plan, ...] = ()
    """Plans of its chapters; empty for a recipe without chapters."""

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The plans that have steps: those of chapters, or this one alone."""
        return self.chapters or (self,)

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """Plan a recipe; nothing is read or written."""
        verbs = {chosen.registration.verb for chosen in recipe.attacks}
        steps = []
        for number, chosen in enumerate(recipe.treatments, start=1):
            held = tuple(
                name for name in chosen.registration.audits if chosen.registration.by_attack.get(name) in verbs
            )
            ran = tuple(
                name
                for name in chosen.registration.runnable
                if name not in held and (recipe.audits == "all" or name in recipe.audits)
            )
            left_out = tuple(name for name in chosen.registration.audits if name not in (*ran, *held))
            steps.append(Step(number, chosen, ran, left_out, held))
        attacks = enumerate(recipe.attacks, start=len(steps) + 1)
        return cls(
            recipe, tuple(steps), tuple(AttackStep(number, chosen) for number, chosen in attacks),
            tuple(cls.of(chapter) for chapter in recipe.chapters),
        )  # fmt: skip

    def states(self, *, progress: Progress = QUIET) -> list[StepState]:
        """Tell what of this plan an earlier run did: one entry per treatment, then one per attack."""
        # The subject and the files that settings name are read, and the ledger is; nothing is written.
        keys = keys_of(self, progress)[1]
        with Job.open(self.recipe.output, reading=True) as job:
            states = [
                StepState(
                    job.recorded(LEDGER, key) is not None and self.result(step, key).exists(),
                    tuple(name for name in step.audits if section_of(job, audit_key(key, name, self)) is None),
                )
                for step, key in zip(self.steps, keys, strict=False)
            ]
            return states + [StepState(sections_of(job, key) is not None, ()) for key in keys[len(self.steps) :]]

    def previews(self) -> list[list[str]]:
        """Return sentences about the files of each treatment, then of each attack, read as for the subject.

        Treatments keep the tokenizer of the subject, so that what it does with rows is known before the first of them.
        """
        if not self.recipe.subject.exists():
            return [[] for _ in (*self.steps, *self.attacks)]
        every: tuple[Step | AttackStep, ...] = (*self.steps, *self.attacks)
        hooks = [step.choice.registration.preview for step in every]
        return [
            [] if hook is None else list(hook(self.recipe.subject, step.choice.settings))
            for hook, step in zip(hooks, every, strict=True)
        ]

    def result(self, step: Step, key: Key) -> Path:
        """Return the folder of a treatment's result; another input or setting has another folder."""
        return self.recipe.output / f"{step.number:02d}-{step.verb}-{digest_config(key).rsplit(':')[-1][:8]}"

    def to_json(self, *, states: bool = False, progress: Progress = QUIET) -> dict[str, Any]:
        """Describe the plan as JSON values; `states` adds what an earlier run did."""
        if self.chapters:
            chapters = {plan.recipe.name: plan.to_json(states=states, progress=progress) for plan in self.chapters}
            return {"output": str(self.recipe.output), "chapters": chapters}
        count = len(self.steps)
        marks: list[dict[str, Any]] = [{}] * (count + len(self.attacks))
        if states:
            marks = [each.to_json() for each in self.states(progress=progress)]
        attacks = [
            {"attack": step.verb, "settings": step.choice.values, "tested": step.tested, **mark}
            for step, mark in zip(self.attacks, marks[count:], strict=True)
        ]
        return {
            "subject": str(self.recipe.subject),
            "output": str(self.recipe.output),
            "seed": self.recipe.seed,
            "steps": [
                {
                    "treatment": step.verb,
                    "settings": step.choice.values,
                    "audits": list(step.audits),
                    "left_out": list(step.left_out),
                    "tested": step.tested,
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
        settings = {**step.choice.values, **_contents(step.choice.settings, step.choice.registration.reads, progress)}
        keys.append({"input": made, "treatment": step.verb, "settings": settings})
        made = digest_config(keys[-1])
    for attack in plan.attacks:
        settings = {
            **attack.choice.values,
            **_contents(attack.choice.settings, attack.choice.registration.reads, progress),
        }
        about = {"subject": subject, "input": made, "attack": attack.verb, "seed": plan.recipe.seed}
        keys.append({**about, "settings": settings})
    return subject, keys


def audit_key(treated: Key, audit: str, plan: Plan) -> Key:
    """The key of an audit of a treatment's result."""
    return {"treated": digest_config(treated), "audit": audit, "seed": plan.recipe.seed}


def section_of(job: Job, key: Key) -> Section | None:
    """The section that an audit of this key returned; None where it has not ended."""
    held = (job.recorded(LEDGER, key) or {}).get("section")
    return None if held is None else Section.from_json(held)


def sections_of(job: Job, key: Key) -> list[Section] | None:
    """The sections that an attack of this key returned; None where it has not ended."""
    held = job.recorded(LEDGER, key)
    return None if held is None else [Section.from_json(each) for each in held["sections"]]


def digest_of(path: Path, progress: Progress = QUIET) -> str:
    """Digest a file, or the names and contents of all files in a folder; of what is not a path here, its name."""
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
    digests: dict[str, Any] = _digests(config, progress) or {}
    further = [] if reads is None else [digest_of(file, progress) for file in reads(config)]
    return {**digests, "reads": further} if further else digests


def _digests(value: Any, progress: Progress) -> Any:
    """Digests of the paths within settings, mappings and sequences, at any depth; None where there are none."""
    if isinstance(value, Path):
        return digest_of(value, progress)
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Settings):
        parts = vars(value)
    elif isinstance(value, Mapping):
        parts = value
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    digests = {str(key): _digests(each, progress) for key, each in parts.items()}
    return {key: each for key, each in digests.items() if each is not None} or None


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else []
    return sum(file.stat().st_size for file in files if file.is_file())


@final
@dataclass(frozen=True)
class Estimate:
    """Estimate of a step's time, from the same treatment or attack in an earlier run of the recipe."""

    seconds: float | None
    """Seconds on this machine; None where no earlier run recorded any."""
    reason: str
    """Basis of the estimate, or the reason why there is none."""


def estimates(plan: Plan) -> list[Estimate]:
    """Return an estimate for each treatment, then for each attack; nothing is run."""
    with Job.open(plan.recipe.output, reading=True) as job:
        rows = job.records(LEDGER)
    size, results = size_of(plan.recipe.subject), []
    steps: tuple[Step | AttackStep, ...] = (*plan.steps, *plan.attacks)
    for step in steps:
        key = "treatment" if isinstance(step, Step) else "attack"
        earlier = [row for row in rows if row.get(key) == step.verb and row.get("seconds")]
        if not earlier:
            results.append(Estimate(None, f"unknown: no earlier run of this recipe recorded it for {step.verb}"))
            continue
        row, settings = earlier[-1], step.choice.values
        same = [each for each in earlier if each.get("settings") == settings]
        if not same:
            others = [name for name, value in settings.items() if row.get("settings", {}).get(name) != value]
            reason = f"unknown: an earlier run took {row['seconds']:.0f} s with another value of {', '.join(others)}"
            results.append(Estimate(None, reason))
            continue
        row = same[-1]
        scale = size / row["bytes"] if row.get("bytes") else 1.0
        results.append(Estimate(row["seconds"] * scale, f"an earlier run took {row['seconds']:.0f} s"))
    return results


@final
@dataclass(frozen=True)
class StepResult:
    """A step that has been run, a treatment or an attack."""

    step: Step | AttackStep
    path: Path
    """The treated or attacked model."""
    sections: Mapping[str, Section]
    """Name of an audit, or of the attack → section of its result."""
    from_ledger: bool
    """True if an earlier run had finished the step."""
    chapter: str = ""
    """Name of the step's chapter; empty without chapters."""
    subject: str = ""
    """Digest of the chapter's or recipe's subject."""
    weights: str | None = None
    """Digest of the weights of the treated or attacked model; None where it has no safetensors files."""
    conditions: tuple[str, ...] = ()
    """Conditions of publishing this model."""
    continued: tuple[str, ...] = ()
    """Parts of an earlier run that it used, such as "the model", "the audit length", "3 of 8 runs"; or empty."""

    @property
    def findings(self) -> dict[str, list[Finding]]:
        """The findings by audit."""
        return {name: list(section.findings) for name, section in self.sections.items()}

    @property
    def failed(self) -> bool:
        """True if a target of the step was missed or could not be measured."""
        return decide(self.sections.values()).failed


def run(
    plan: Plan,
    *,
    progress: Progress = QUIET,
    command: str | None = None,
    say: Callable[[str], object] = lambda text: None,
    jobs: int = 1,
) -> list[StepResult]:
    """Run a plan: each treatment with its audits, then attacks; what was done before is kept.

    The report is written again after every step, so that a run that is stopped leaves a page of what is known.

    Args:
        plan: What to run.
        progress: Where progress is shown.
        command: The command line, for the report.
        say: Takes a line for each chapter and step.
        jobs: Chapters that run at once, in processes that share the cores; one after the other in this one by default.
    """
    jobs = min(jobs, len(plan.parts))
    ended: list[tuple[Plan, list[StepResult]]] = [(part, []) for part in plan.parts]

    def record(number: int, entry: StepResult) -> None:
        ended[number][1].append(entry)
        with tqdm.external_write_mode():
            _say(entry, say, f"{plan.parts[number].recipe.name}, " if jobs > 1 else "  ")
        if not entry.from_ledger:
            _report(plan, ended, command).write(plan.recipe.output)

    try:
        if jobs > 1:
            _at_once(plan, jobs, record, progress)
        else:
            for number, part in enumerate(plan.parts):
                if part.recipe.name:
                    say(f"{number + 1} of {len(plan.parts)}, {part.recipe.title}.")
                for entry in _run(part, progress):
                    record(number, entry)
    finally:
        # Also where a step fails after others that an earlier run did: the page of that run has another verdict.
        if any(entries for _, entries in ended):
            _report(plan, ended, command).write(plan.recipe.output)
    return [entry for _, entries in ended for entry in entries]


# What chapters import one after the other, and would each of those that run at once.
_IMPORTED = (
    "transformers.models.llama.modeling_llama", "transformers.models.clip.modeling_clip", "peft",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion", "sklearn.linear_model",
)  # fmt: skip


def _at_once(plan: Plan, jobs: int, record: Callable[[int, StepResult], None], progress: Progress) -> None:
    """Run chapters in processes that share the cores, begun in the recipe's order."""
    under_way: dict[int, str] = {}
    with progress.task(plan.recipe.title, len(plan.parts), unit="chapters") as task:

        def report(number: int, value: StepResult | Event) -> None:
            if isinstance(value, StepResult):
                record(number, value)
            elif progress.mode == "bar" and value.unit:
                under_way[number] = f"{plan.parts[number].recipe.name}: {value}"
                task.describe("; ".join(under_way.values()))
            else:
                progress.note(f"{plan.parts[number].recipe.name}: {value}")

        work = partial(_run_in_worker, every=2.0 if progress.mode == "bar" else 60.0)
        for number, outcome in local_processes(work, plan.parts, workers=jobs, on_message=report, preload=_IMPORTED):
            if isinstance(outcome.value, NetweightError):
                raise outcome.value
            if outcome.error is not None:
                raise RuntimeError(f"The chapter {plan.parts[number].recipe.name} failed.\n{outcome.error}")
            under_way.pop(number, None)
            task.update()


def _run_in_worker(plan: Plan, *, every: float) -> NetweightError | None:
    """Run a chapter in a worker, whose events and results go to the process that started it; return a refusal."""
    try:
        for entry in _run(plan, Progress(every=every, listener=send_message)):
            send_message(entry)
    except NetweightError as error:
        return error
    return None


def _report(plan: Plan, ended: list[tuple[Plan, list[StepResult]]], command: str | None) -> Report:
    """The report of the steps that ended; those that did not are named, so that no verdict is without them."""
    title = plan.recipe.title or f"Recipe for {plan.recipe.subject.name}"
    seeds = [part.recipe.seed for part, _ in ended]
    inputs = {str(part.recipe.subject): entries[0].subject for part, entries in ended if entries}
    tested = [entry for _, entries in ended for entry in entries]
    weights = {
        f"{entry.chapter}/{entry.path.name}".lstrip("/"): entry.weights for entry in tested if entry.weights is not None
    }
    report = Report(title, summary=plan.recipe.summary, command=command, seeds=seeds, inputs=inputs, weights=weights)
    for part, entries in ended:
        # Conditions are those of the last model, which is published; the models before it are steps on the way.
        conditions = entries[-1].conditions if entries else ()
        sections = with_conditions(
            [section for entry in entries for section in _step_sections(entry, part)], conditions
        )
        sections += _pending(part, len(entries))
        if part.recipe.name and sections:
            report.chapter(_chapter(part, sections, command))
        for section in sections:
            report.add(section)
    if plan.recipe.left_out:
        condition = f"run the chapters that --only left out: {', '.join(plan.recipe.left_out)}"
        report.sections = tuple(with_conditions(report.sections, [condition]))
    return report


def _pending(plan: Plan, ended: int) -> list[Section]:
    """The sections of the steps after the first ones, which ended: each was asked for and could not be measured."""
    sections = []
    steps: tuple[Step | AttackStep, ...] = (*plan.steps, *plan.attacks)
    for step in steps[ended:]:
        name = f"{plan.recipe.name}, step {step.number}" if plan.recipe.name else f"step {step.number}"
        finding = Finding(
            f"{name}, {step.verb}", None, target=True, detail={"reason": "the run ended before this step"}
        )
        sections.append(Section(f"{_heading(step, plan)}: not done", [finding]))
    return sections


def _heading(step: Step | AttackStep, plan: Plan) -> str:
    return f"{plan.recipe.name}, step {step.number}" if plan.recipe.name else f"{step.number}. {step.verb}"


def _run(plan: Plan, progress: Progress) -> Iterator[StepResult]:
    """Run the steps of one recipe or chapter."""
    recipe, source = plan.recipe, plan.recipe.subject
    subject, keys = keys_of(plan, progress)
    with Job.open(recipe.output) as job:
        if known := _known(plan, keys, job):
            progress.note(f"Continuing an earlier run: {'; '.join(known)}.")
        weights, conditions = None, conditions_of(source)
        if plan.attacks and not plan.steps:
            weights = weights_digest(source, progress)
        for step, key in zip(plan.steps, keys, strict=False):
            path = plan.result(step, key)
            sections: dict[str, Section] = {}
            earlier: list[str] = []
            with work_account(progress.note, unannounced=(LEDGER,)) as account, _for_recipes(step):
                # If the process was killed between the two, the path exists without a record.
                if path.exists():
                    earlier.append("the model")
                remembered = _treat(step, key, source, path, job, progress)
                weights, conditions = weights_digest(path, progress), conditions_of(path)
                for name in step.audits:
                    sections[name], audited = _audit(step, name, key, source, path, job, plan, progress)
                    earlier += [f"the audit {name}"] if audited else []
            continued = _continued(earlier, account)
            yield StepResult(step, path, sections, remembered, recipe.name, subject, weights, conditions, continued)
            source = path
        for attack, key in zip(plan.attacks, keys[len(plan.steps) :], strict=True):
            target = Target(source, recipe.subject if plan.steps else None, recipe.output, recipe.seed)
            attacked: Sequence[Section] | None = sections_of(job, key)
            remembered = attacked is not None
            continued = ("the result",) if remembered else ()
            if attacked is None:
                began = time.monotonic()
                with work_account(progress.note, unannounced=(LEDGER,)) as account, _for_recipes(attack):
                    attacked = attack.choice.registration.on(target, attack.choice.settings, progress).sections
                continued = _continued([], account)
                row = {"step": attack.number, "attack": attack.verb, "seconds": time.monotonic() - began,
                       "settings": attack.choice.values}  # fmt: skip
                job.record(LEDGER, {**row, "sections": [each.to_json() for each in attacked]}, key=key)
            named = {attack.verb if not n else f"{attack.verb} {n + 1}": each for n, each in enumerate(attacked)}
            yield StepResult(attack, source, named, remembered, recipe.name, subject, weights, conditions, continued)


@contextmanager
def _for_recipes(step: Step | AttackStep) -> Iterator[None]:
    """Add to errors that name options of commands which settings of the step these are."""
    try:
        yield
    except NetweightError as error:
        if also := in_words_of_recipes(str(error), type(step.choice.settings)):
            error.cure = f"{error.cure or ''} {also}".strip()
            error.args = (f"{error} {also}",)
        raise


def _known(plan: Plan, keys: Sequence[Key], job: Job) -> list[str]:
    """Return what the ledger of an earlier run has of each step, in words; nothing of steps that it does not have."""
    known = []
    for step, key in zip(plan.steps, keys, strict=False):
        parts = ["the model"] * plan.result(step, key).exists()
        parts += [
            f"the audit {name}" for name in step.audits if section_of(job, audit_key(key, name, plan)) is not None
        ]
        known += [describe_continued(plan.recipe.name, step, parts)] if parts else []
    for attack, key in zip(plan.attacks, keys[len(plan.steps) :], strict=True):
        known += [describe_continued(plan.recipe.name, attack, ["the result"])] * (sections_of(job, key) is not None)
    return known


def describe_continued(chapter: str, step: Step | AttackStep, parts: Sequence[str]) -> str:
    """Return what a step uses of an earlier run, such as "step 1, immunize (the model, the audit depth)".

    Args:
        chapter: Name of the step's chapter; empty without chapters.
        step: The treatment or attack.
        parts: What it uses.
    """
    kind = "" if isinstance(step, Step) else "attack "
    return f"{f'{chapter}, ' if chapter else ''}step {step.number}, {kind}{step.verb} ({', '.join(parts)})"


def _continued(earlier: Sequence[str], account: WorkAccount) -> tuple[str, ...]:
    """Return what a step used of an earlier run; records of the recipe itself are in `earlier` by their names."""
    account.used.pop(LEDGER, None)
    return (*earlier, *account.sentences())


def _treat(step: Step, key: Key, source: Path, path: Path, job: Job, progress: Progress) -> bool:
    """Make a step's result unless it exists; return whether it existed."""
    record = job.recorded(LEDGER, key)
    if record is not None and path.exists():
        if record["result"] != digest_of(path, progress):
            raise CorruptBlob(
                f"{path} was changed after the run had written it.", cure="Delete it, and the step runs again."
            )
        return True
    began = time.monotonic()
    # If the process was killed between the two, the path exists without a record, and perhaps beside its job.
    if path.exists():
        for work in (work_of(path), part_of(path)):
            settle_publication(path, work)
    else:
        step.choice.registration.apply(source, path, step.choice.settings, progress)
    row = {"step": step.number, "treatment": step.verb, "seconds": time.monotonic() - began, "bytes": size_of(source),
           "settings": step.choice.values}  # fmt: skip
    job.record(LEDGER, {**row, "result": digest_of(path, progress)}, key=key)
    return False


def _audit(
    step: Step, name: str, key: Key, source: Path, path: Path, job: Job, plan: Plan, progress: Progress
) -> tuple[Section, bool]:
    """Run an audit of a step's result, or read from the ledger what it returned; True if it was read."""
    about = audit_key(key, name, plan)
    section = section_of(job, about)
    remembered = section is not None
    if section is None:
        subject, config = step.choice.registration.examine(name, path, source, step.choice.settings, progress)
        section = run_audits(
            step.verb, subject, config, seed=plan.recipe.seed, progress=progress, only=[name]
        )[name]  # fmt: skip
        job.record(LEDGER, {"audit": name, "section": section.to_json()}, key=about)
    return with_tested(section, step.choice.registration.tested_by(name, step.choice.settings)), remembered


def _say(done: StepResult, say: Callable[[str], object], before: str) -> None:
    earlier = " (done by an earlier run)" if done.from_ledger else ""
    conclusions = " ".join(section.conclusion for section in done.sections.values() if section.conclusion)
    say(f"{before}{done.step.verb}{earlier}: {conclusions or 'done.'}")


def _step_sections(done: StepResult, plan: Plan) -> list[Section]:
    """The sections of a step in the report; the first says what was made, and which audits are missing."""
    step, heading = done.step, _heading(done.step, plan)
    if isinstance(step, AttackStep):
        return [replace(section, title=f"{heading}: {section.title}") for section in done.sections.values()]
    first, *others = [
        replace(section, title=f"{heading}: {section.title}") for section in done.sections.values()
    ] or [Section(heading)]  # fmt: skip
    made = f"{step.verb} wrote {done.path}."
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
