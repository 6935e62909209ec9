"""Audits that run the model for a label, one after another within a given time, and the rows that they add.

An audit is a command of the registry, with settings of its own class. It runs in a process of its own, which is ended
when the time is over, so that a label is made in the time that was asked for. An audit that is added here is a row of
`AUDITS` and a function that makes its rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

from netweight.core.progress import Progress
from netweight.core.quantities import many, percent
from netweight.errors import UsageError
from netweight.labels.audit_process import AuditEnd, run_apart
from netweight.labels.identify_subject import Kind, LabelSubject, title_of
from netweight.labels.ingredients import chat_template
from netweight.labels.label import Row, RowGroup
from netweight.registry import command
from netweight.report.finding import Finding, Section
from netweight.report.verdict import Verdict, decide, mark_of

Option: TypeAlias = Literal["refused", "ordinary", "harmful", "benign", "prompts", "base"]
OPTIONS: tuple[Option, ...] = ("refused", "ordinary", "harmful", "benign", "prompts", "base")
"""Options of a label that audits take: rows, and the base. The settings of the audits' commands have the same names."""


@final
@dataclass(frozen=True)
class LabelAudit:
    """A measurement that needs the model to run: what it needs, the command that makes it, and its rows."""

    key: str
    """Key of the row that is shown where the audit was not made."""
    title: str
    """Name for people."""
    kinds: tuple[Kind, ...]
    """The kinds of input that it is made of."""
    command: str
    """The words of the command, such as "attack refusal"."""
    needs: tuple[Option, ...]
    """Options of the label without which it cannot be made; the command's settings have the same names."""
    takes: tuple[Option, ...] = ()
    """Options of the label that are handed on where they are given."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the command."""
    chat: str = ""
    """The command's setting that applies the chat template; it is set where the model has one."""
    rows: Callable[[AuditEnd], list[Row]] = lambda end: []
    """Function from the command's result to rows; none where the label has rows about it anyway."""

    @property
    def line(self) -> str:
        """The command line that makes it outside of a label."""
        return f"netweight {self.command}"

    @property
    def options(self) -> str:
        """The options of `netweight label` that ask for it."""
        return " ".join(f"--{name}" for name in ("minutes", *self.needs))


def _finding(sections: Sequence[Section], start: str) -> Finding | None:
    return next((each for section in sections for each in section.findings if each.name.startswith(start)), None)


def _unmeasured(key: str, title: str, reason: object, *, indent: int = 0) -> Row:
    return Row(key=key, title=title, value=str(reason).rstrip("."), state="not measured", indent=indent)


def _refusal_rows(end: AuditEnd) -> list[Row]:
    """Return rows on the share of refused prompts, before and after the best edit without training."""
    before, left = (
        _finding(end.sections, name) for name in ("refusals before", "share of the refusals left by the best edit")
    )
    assert before is not None
    assert left is not None
    title = "Prompts refused, of --refused"
    rows = [
        Row(
            key="refusals", title=title, value=percent(_share(before) / 100), number=_share(before), unit="percent",
            basis=f"{many(before.n or 0, 'prompt')} that were not used for the attack", detail={"command": end.line},
        )
    ]  # fmt: skip
    title = "Refusals left after the best attack"
    if left.value is None:
        return [*rows, _unmeasured("refusals_left", title, left.detail.get("reason", "no reason is stated"), indent=1)]
    value = 100 * float(left.value)
    return [*rows, Row(
        key="refusals_left", title=title, value=percent(value / 100), number=value, unit="percent", indent=1,
        state="warning" if mark_of(left) == "missed" else "measured",
        basis=f"without training; {left.detail.get('edit', '')}",
    )]  # fmt: skip


def _share(finding: Finding) -> float:
    return math.nan if finding.value is None else float(finding.value)


def _retraining_rows(end: AuditEnd) -> list[Row]:
    """Return rows on the steps that a fine-tuning attack needed, on the model and on its base."""
    steps, ratio = (_finding(end.sections, name) for name in ("steps to recover, best attack", "resistance"))
    title = "Steps to recover, on --harmful"
    if steps is None or steps.value is None:
        reason = "no attack was measured" if steps is None else steps.detail.get("reason", "no reason is stated")
        return [_unmeasured("retraining", title, reason)]
    if ratio is None:
        reason = f"no control: {_steps(steps.value)}, with nothing to compare them with"
        return [_unmeasured("retraining", title, reason)]
    if mark_of(ratio) == "not measured":
        return [_unmeasured("retraining", title, ratio.detail.get("reason", "no reason is stated"))]
    if mark_of(ratio) == "control failed":
        return [
            _unmeasured(
                "retraining", title, "no control: the same attacks did not recover the behavior of the base either"
            )
        ]
    rows = [Row(
        key="retraining", title=title, value=_steps(steps.value), number=_finite(steps.value), unit="steps",
        basis=f"one attack, from one seed: {steps.detail.get('attack', 'not stated')}", detail={"command": end.line},
        state="warning" if mark_of(ratio) == "missed" else "measured",
    )]  # fmt: skip
    if steps.baseline is not None:
        rows.append(Row(
            key="retraining_base", title="The same on the base", value=_steps(steps.baseline),
            number=_finite(steps.baseline), unit="steps", indent=1,
        ))  # fmt: skip
    return rows


def _steps(value: float) -> str:
    return f"{value:,.0f} steps" if math.isfinite(value) else "not recovered"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _memorized_rows(end: AuditEnd) -> list[Row]:
    """Return rows on the number of prompts that look memorized, and of ordinary prompts above the same threshold."""
    scores = end.payload["prompts"]
    flagged = sum(bool(each["memorized"]) for each in scores)
    title = "Prompts that look memorized, of --prompts"
    below = end.payload["threshold"].get("prompts_below")
    if below is None:
        return [_unmeasured("memorized", title, "no control: the threshold was set without ordinary prompts")]
    # More prompts were flagged than among as many ordinary ones.
    more = flagged > (1 - below) * len(scores) + 1e-6
    return [
        Row(
            key="memorized", title=title, value=f"{flagged} of {len(scores)}", number=flagged, unit="prompts",
            state="warning" if more else "measured", detail={"command": end.line},
            basis="their first noise predictions are more similar across seeds than those of most ordinary prompts",
        ),
        Row(
            key="memorized_ordinary", title="Ordinary prompts above the threshold", value=percent(1 - below),
            number=100 * (1 - below), unit="percent", indent=1,
        ),
    ]  # fmt: skip


AUDITS: tuple[LabelAudit, ...] = (
    LabelAudit(
        "refusals", "Refusals", ("language model",), "attack refusal", ("refused", "ordinary"),
        rows=_refusal_rows,
    ),
    LabelAudit(
        "retraining", "Resistance to fine-tuning", ("language model",), "attack finetune", ("harmful", "base"),
        ("benign",), settings={"grid": "single"}, chat="chat", rows=_retraining_rows,
    ),
    LabelAudit(
        "memorized", "Memorized pictures", ("pipeline",), "forget detect", ("prompts", "ordinary"),
        rows=_memorized_rows,
    ),
    LabelAudit("reconstruction", "Reconstruction by a server", ("federation",), "federate audit", ()),
)  # fmt: skip
"""All audits, in the order in which they run: the one that shows most in a minute is first."""


@final
@dataclass(frozen=True)
class LabelAudits:
    """The audits' additions to a label."""

    rows: tuple[Row, ...] = ()
    """Rows of the audits that ended, and of those that did not, with the reason."""
    sections: tuple[Section, ...] = ()
    """Sections with the audits' findings, on which the verdict is based."""
    keys: frozenset[str] = frozenset()
    """Keys of the audits that were asked for."""
    minutes: float = 0.0
    """The time that they had."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on all findings; None where there are none."""
        return decide(self.sections) if self.sections else None


@final
@dataclass(frozen=True)
class Request:
    """Settings of the audits of a label: time, and rows by option."""

    minutes: float
    """The time for all of them together, minutes above 0."""
    inputs: Mapping[str, str]
    """Rows and the base, by the option's name."""
    folder: Path
    """Folder of the audits' intermediate results, from which a second call continues."""


def planned(subject: LabelSubject, given: Mapping[str, str], minutes: float | None) -> list[LabelAudit]:
    """Return the audits that are made of a subject with the rows that were given, in their order.

    Args:
        subject: What the label is about.
        given: Rows and the base, by option. A base alone asks for no audit, since tensors are compared with it, too.
        minutes: The time for audits; None where none was given.

    Returns:
        The audits; none without minutes.

    Raises:
        UsageError: Rows were given without minutes, minutes without rows, or rows that no audit of this kind takes.
    """
    possible = [audit for audit in AUDITS if subject.kind in audit.kinds]
    used = {option for audit in possible for option in (*audit.needs, *audit.takes)}
    rows = [option for option in given if option != "base"]
    for option in rows:
        if option not in used:
            kinds = sorted({kind for audit in AUDITS if option in (*audit.needs, *audit.takes) for kind in audit.kinds})
            raise UsageError(
                f"--{option} is for a {' or '.join(kinds)}, and {subject.path} is another kind of input "
                f"({title_of(subject)}).",
                cure=f"Leave out --{option}.",
            )
    chosen = [audit for audit in possible if all(option in given for option in audit.needs)]
    used = {option for audit in chosen for option in (*audit.needs, *audit.takes)}
    for option in rows:
        if option not in used:
            audit = next(each for each in possible if option in (*each.needs, *each.takes))
            lacking = " and ".join(f"--{each}" for each in audit.needs if each not in given)
            raise UsageError(f"--{option} needs further inputs, which are missing.", cure=f"Also give {lacking}.")
    if rows and minutes is None:
        raise UsageError(
            f"{' and '.join(f'--{option}' for option in rows)}: rows are for audits, which run the model.",
            cure="Give --minutes N, the time that audits may take.",
        )
    if minutes is None:
        return []
    if not chosen:
        options = " or ".join(" and ".join(f"--{each}" for each in audit.needs) for audit in possible)
        raise UsageError(
            f"--minutes is the time for audits, and there is no audit for {subject.path} ({title_of(subject)})"
            f"{' without rows' if options else ''}.",
            cure=f"Give {options}." if options else "Leave out --minutes.",
        )
    return chosen


def run_audits(
    subject: LabelSubject, audits: Sequence[LabelAudit], request: Request, *, progress: Progress
) -> LabelAudits:  # fmt: skip
    """Run audits one after another until the time is over.

    Args:
        subject: What the label is about.
        audits: What `planned` returned.
        request: Time, rows and the folder of the work.
        progress: Where it is said what runs.

    Returns:
        Their rows; an audit that did not fit, or that failed, has a row that says so.

    Raises:
        UsageError: A setting is refused, before anything runs.
    """
    settings = {audit.key: _settings(audit, subject, request) for audit in audits}
    for audit in audits:
        command(audit.command).settings_class.of(settings[audit.key])  # type: ignore[union-attr]
    started = time.monotonic()
    rows: list[Row] = []
    sections: list[Section] = []
    for audit in audits:
        left = 60 * request.minutes - (time.monotonic() - started)
        folder = request.folder / audit.command.replace(" ", "-")
        progress.note(f"{audit.title}: {audit.line}, at most {max(left, 0) / 60:.1f} minutes.")
        end = run_apart(
            audit.command, subject.path, folder, settings[audit.key], seconds=left, shown=progress.mode != "off"
        )
        made, new_sections = _rows_of(audit, end, request)
        rows += made
        sections += new_sections
    return LabelAudits(tuple(rows), tuple(sections), frozenset(settings), request.minutes)


def _settings(audit: LabelAudit, subject: LabelSubject, request: Request) -> dict[str, Any]:
    handed: dict[str, Any] = {
        name: request.inputs[name] for name in (*audit.needs, *audit.takes) if name in request.inputs
    }
    if audit.chat and chat_template(subject.folder) is not None:
        handed[audit.chat] = True
    return {**audit.settings, **handed}


def _rows_of(audit: LabelAudit, end: AuditEnd, request: Request) -> tuple[list[Row], Sequence[Section]]:
    if end.outcome == "ended":
        return audit.rows(end), end.sections
    reason = {
        "late": f"did not fit in {request.minutes:g} minutes; the same command with more minutes continues from it",
        "failed": f"failed: {end.reason}",
    }[end.outcome]
    row = _unmeasured(audit.key, audit.title, reason)
    return [row], [Section(audit.title, [Finding(audit.title.lower(), None, target=True, detail={"reason": reason})])]


def audit_groups(audited: LabelAudits) -> Iterator[RowGroup]:
    """Yield the groups of what audits found, and of the verdict on it.

    Args:
        audited: What `run_audits` returned.
    """
    basis = f"audits within {audited.minutes:g} minutes"
    if audited.rows:
        yield RowGroup(title="Behavior", anchor="behavior", rows=audited.rows, basis=basis)
    if verdict := audited.verdict:
        yield verdict_group(verdict)


def verdict_group(verdict: Verdict) -> RowGroup:
    """Return the group of a verdict.

    Args:
        verdict: Of `netweight.report.verdict.decide`.
    """
    row = Row(
        key="verdict", title="Verdict", value=verdict.publish, strong=True, detail=verdict.to_json(),
        state="measured" if verdict.outcome == "passed" else "warning",
    )  # fmt: skip
    return RowGroup(title="Verdict", anchor="verdict", rows=(row,))
