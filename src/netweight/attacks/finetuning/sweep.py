"""Many attacks on many subjects: every setting on every model, in worker processes, resumable, each run remembered.

Subjects are named by a function that makes them, so that workers can make them again; a digest shows that they made
the same. A run is known by that digest, its settings and its goal: a changed model, file or setting runs anew,
everything else is remembered.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from netweight.attacks.finetuning.attack import AttackResult, check_attack, run_attack
from netweight.attacks.finetuning.changes import telling_tokens
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Goal, Subject
from netweight.core.digests import canonical_json, digest_config
from netweight.core.engines import Engine, in_process, local_processes
from netweight.core.lazy import import_named
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.job import Job, RunResult


@final
@dataclass(frozen=True)
class SubjectName:
    """Function that makes a subject, and its name."""

    name: str
    """Name in reports, such as "undefended", "RepNoise", "random weights" or "relearn ceiling"."""
    factory: str
    """The function that makes it, as "module:function". It returns a `Subject`, the same for the same arguments in
    every process. It runs once per worker, so it should load what took long to train.
    """
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function; JSON values."""
    defense_seed: int | None = None
    """The seed of the defense, if it has one."""


# Name of the rows in a folder.
ATTACKS = "attacks"


@final
@dataclass(frozen=True)
class AttackJob:
    """One run of a sweep, as a ledger knows it."""

    factory: str
    """Function that makes the subject, as MODULE:NAME."""
    arguments: Mapping[str, Any]
    """Keyword arguments of the function that makes the subject; JSON values."""
    digest: str
    """Digest of the subject."""
    settings: AttackSettings
    """The attack's settings."""
    goal: Goal
    """The goal: when the attack has succeeded."""


@final
@dataclass(frozen=True)
class AttackOutcome:
    """One attack of a sweep, done."""

    subject: str
    """Name of the subject."""
    defense_seed: int | None
    """Seed of the subject's defense; None where it has none."""
    digest: str
    """Digest of the subject."""
    result: AttackResult
    """The attack's result."""


@final
@dataclass(frozen=True)
class Sweep:
    """Every attack of a sweep."""

    runs: tuple[AttackOutcome, ...]
    """All runs, in the order of subjects, then settings."""
    goal: Goal
    """The goal: when an attack has succeeded."""
    failures: tuple[tuple[str, str, str], ...] = ()
    """Subject, attack and the last line of the traceback of every run that could not be run to its end."""
    seconds: float = 0.0
    """Sum of the wall-clock times of all runs in seconds, however many ran at once."""

    def of(self, subject: str, *, domain: str | None = None) -> tuple[AttackOutcome, ...]:
        """Return the runs on a subject."""
        runs = tuple(run for run in self.runs if run.subject == subject)
        if not runs:
            names = ", ".join(sorted({run.subject for run in self.runs})) or "none"
            raise UsageError(f"The sweep has no runs on {subject!r}.", cure=f"It has runs on: {names}.")
        return tuple(run for run in runs if domain in (None, run.result.settings.domain))


def make_subject(factory: str, arguments: Mapping[str, Any]) -> Subject:
    """Make a subject; one that was made a moment ago in this process is taken again."""
    return _made(factory, canonical_json(dict(arguments)))


# The cache holds one model, because a second one might not fit into memory.
@functools.lru_cache(maxsize=1)
def _made(factory: str, arguments: str) -> Subject:
    made = import_named(factory, "The subject's factory")(**json.loads(arguments))
    if not isinstance(made, Subject):
        raise UsageError(f"The factory {factory!r} returns a {type(made).__name__}, not a Subject.")
    return made


def attack_job(job: AttackJob) -> AttackResult:
    """Run one job of a sweep: what worker processes call."""
    subject = make_subject(job.factory, job.arguments)
    digest = _digest_of(job.factory, canonical_json(dict(job.arguments)))
    if digest != job.digest:
        raise UsageError(
            f"The factory {job.factory!r} made another subject in this process ({digest}) than before ({job.digest}).",
            cure="Let it depend on its arguments alone, with a seed for everything random.",
        )
    return run_attack(subject, job.settings, job.goal)


@functools.lru_cache(maxsize=256)
def _digest_of(factory: str, arguments: str) -> str:
    return _made(factory, arguments).digest()


def sweep(
    subjects: Sequence[SubjectName],
    settings: Sequence[AttackSettings],
    goal: Goal,
    *,
    folder: str | Path | Job,
    engine: Engine = local_processes,
    progress: Progress = QUIET,
    title: str = "attacks",
) -> Sweep:
    """Attack every subject with every setting.

    Everything is checked before the first attack. A run that fails is kept among `failures` and tried again by the
    next call.

    Args:
        subjects: What is attacked; controls among them.
        settings: The attacks, seeds included. Those are left out for a subject that lacks their domain, their prompt
            format, or tokens that tell harmful prompts.
        goal: When an attack has won.
        folder: A folder, or the job in it, that remembers runs in `attacks.jsonl`.
        engine: Where runs happen.
        progress: Told of every attack.
        title: What the attacks are for, for the display of progress.

    Raises:
        UsageError: There is no subject or setting, a factory makes no subject, a subject has too few examples, or the
            ledger belongs to something else.
        CorruptBlob: The ledger is damaged.
    """
    planned = _plan(subjects, settings, goal)
    if engine is not in_process:
        # Worker processes make models of their own.
        _made.cache_clear()
    runs: list[AttackOutcome] = []
    failures: list[tuple[str, str, str]] = []
    jobs = [job for _, job in planned]
    by_digest: dict[str, RunResult[AttackJob]] = {}
    with Job.open(folder, shared=True) as ledger, progress.task(title, total=len(jobs), unit="attacks") as work:
        for result in ledger.map(attack_job, jobs, name=ATTACKS, engine=engine):
            by_digest[result.digest] = result
            work.update()
    for name, job in planned:
        result = by_digest[digest_config(job)]
        if result.ok:
            attacked = AttackResult.from_json(result.value)
            runs.append(AttackOutcome(name.name, name.defense_seed, job.digest, attacked))
        else:
            failures.append((name.name, job.settings.label, result.reason))
    seconds = sum(result.seconds for result in by_digest.values())
    return Sweep(tuple(runs), goal, tuple(failures), seconds)


def _plan(
    subjects: Sequence[SubjectName], settings: Sequence[AttackSettings], goal: Goal
) -> list[tuple[SubjectName, AttackJob]]:
    """List the jobs, subject by subject, after each subject was made."""
    if not subjects or not settings:
        raise UsageError("A sweep needs at least one subject and one attack.")
    planned = []
    for name in subjects:
        subject = make_subject(name.factory, name.arguments)
        digest = _digest_of(name.factory, canonical_json(dict(name.arguments)))
        fitting = [one for one in settings if subject.has(one.data) and _has_rows(subject, one)]
        if not fitting:
            domains = ", ".join(sorted({one.data for one in settings}))
            raise UsageError(
                f"The subject {name.name!r} does not have the data on which the attacks train: {domains}.",
                cure=f"It has: {', '.join(subject.domains)}.",
            )
        for one in fitting:
            check_attack(subject, one)
            planned.append((name, AttackJob(name.factory, dict(name.arguments), digest, one, goal)))
    return planned


def _has_rows(subject: Subject, settings: AttackSettings) -> bool:
    """Return whether there are tokens whose embedding rows an attack can change, if that is what it does."""
    return settings.rows == "kept" or bool(telling_tokens(subject.domain(settings.data).train, subject.benign)[0])
