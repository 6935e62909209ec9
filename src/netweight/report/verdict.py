"""The verdict: one function decides whether a model may be published, for terminal, report, card and exit code.

A target is met, missed, not measured, or its control failed. The control failed if the value meets the target and the
same attack did not break what it must break, such as the undefended model: then the attack shows nothing. The verdict
is "failed" if any target is not met, whatever the reason, and the commands that print it end with exit code 1.

The same verdict has two sentences: advice for the author of a model, and a statement for those who read its card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from netweight.report.finding import Finding, Section, Target
from netweight.report.numbers import format_beside, format_target

Mark: TypeAlias = Literal["met", "missed", "not measured", "control failed", "no target"]
Outcome: TypeAlias = Literal["passed", "failed", "none"]
_NAMED_FINDINGS = 3  # findings that a sentence names
# How sentences of cards begin. Cards that were written by earlier releases begin as the advice to the author does.
_PASSED, _MISSED = "This model passed its audits", "This model failed its audits"
_UNDECIDED, _NONE = "The audits of this model came to no verdict", "There is no verdict on this model"
_STATED: dict[str, Outcome] = {
    _PASSED: "passed", _MISSED: "failed", _UNDECIDED: "failed", _NONE: "none",
    "Publish, because ": "passed", "Do not publish": "failed", "No verdict, because ": "none",
}  # fmt: skip


def mark_of(finding: Finding) -> Mark:
    """Return how a finding stands to its target."""
    if finding.value is None:
        return "not measured"
    if finding.target is None:
        return "no target"
    if finding.passed is None:
        return "control failed"
    return "met" if finding.passed else "missed"


@final
@dataclass(frozen=True)
class Verdict:
    """Verdict on whether a model may be published, and why, in one sentence."""

    outcome: Outcome
    """Passed: all targets are met. Failed: some are not, or could not be measured. None: nothing was judged."""
    sentence: str
    """The reason, such as "1 of 4 targets is missed: …"; without the advice."""
    publish: str
    """The advice to the author, with the reason: "Publish, because …", "Do not publish, because …" or "No verdict,
    because …"."""
    card: str
    """The same for those who download the model: "This model failed its audits: …"."""

    @property
    def failed(self) -> bool:
        """True if a command ends with exit code 1."""
        return self.outcome == "failed"

    def to_json(self) -> dict[str, str]:
        """Return the verdict as a JSON value."""
        return {"outcome": self.outcome, "sentence": self.publish}


def decide(sections: Section | Iterable[Section]) -> Verdict:
    """Return the verdict on a section, or on all sections of a report.

    Args:
        sections: What audits and attacks returned.
    """
    parts = [sections] if isinstance(sections, Section) else list(sections)
    findings = [finding for section in parts for finding in section.findings]
    judged = [finding for finding in findings if finding.target is not None]
    by_mark = {
        mark: [each for each in judged if mark_of(each) == mark]
        for mark in ("missed", "not measured", "control failed")
    }
    reasons = []
    if missed := by_mark["missed"]:
        count = f"{len(missed)} of {len(judged)} targets {'is' if len(missed) == 1 else 'are'} missed"
        count = "the target is missed" if len(judged) == 1 else count
        reasons.append(f"{count}: {_listed([_missed(each) for each in missed])}")
    if unmeasured := by_mark["not measured"]:
        reasons.append(f"{_listed([_unmeasured(each) for each in unmeasured])}")
    if uncontrolled := by_mark["control failed"]:
        names = _listed([each.name for each in uncontrolled])
        reasons.append(f"the same attack did not break its control either, and therefore shows nothing about {names}")
    if reasons:
        sentence = "; ".join(reasons)
        start = "Do not publish, because " if missed else "Do not publish: there is no verdict, because "
        card = f"{_MISSED if missed else _UNDECIDED}: {sentence}. Its author was advised not to publish it."
        return Verdict("failed", _sentence(sentence), f"{start}{sentence}.", card)
    unaudited = [
        f"{section.treatment} ({', '.join(section.missing_audits)})" for section in parts if section.missing_audits
    ]
    broken = [section.title for section in parts if section.outcome == "broken"]
    if unaudited:
        sentence = f"audits were left out: {_listed(unaudited)}"
    elif broken:
        sentence = f"an attack without a target succeeded: {_listed(broken)}"
    elif not judged:
        sentence = "no finding has a target; the report only states what was measured"
    else:
        sentence = "the target is met" if len(judged) == 1 else f"all {len(judged)} targets are met"
        card = f"{_PASSED}: {sentence}."
        conditions = list(dict.fromkeys(each for section in parts for each in section.conditions))
        if conditions:
            first = " and ".join(conditions)
            sentence += f", but first {first}"
            card += f" Before publishing it, its author was advised to {first}."
        return Verdict("passed", _sentence(sentence), f"Publish, because {sentence}.", card)
    return Verdict("none", _sentence(sentence), f"No verdict, because {sentence}.", f"{_NONE}: {sentence}.")


def stated_outcome(sentence: str) -> Outcome | None:
    """Return the outcome that the sentence of a card states; None if it is not such a sentence."""
    return next((outcome for start, outcome in _STATED.items() if sentence.startswith(start)), None)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _missed(finding: Finding) -> str:
    assert finding.target is not None
    if finding.value is False and finding.target is True:
        return f"the check '{finding.name}' did not pass"
    bound = {"higher": "at least ", "lower": "at most ", None: ""}[finding.better]
    return f"{finding.name} is {_valued(finding)} (target: {_target(finding.target, bound)})"


def _valued(finding: Finding) -> str:
    return f"{format_beside(finding.value, finding.target)} {finding.unit}".rstrip()


def _target(target: Target, bound: str) -> str:
    if isinstance(target, tuple):
        return f"{format_target(target[0])} to {format_target(target[1])}"
    return bound + format_target(target)


def _unmeasured(finding: Finding) -> str:
    reason = str(finding.detail.get("reason", "")).rstrip(".")
    return f"{finding.name} could not be measured" + (f" ({reason})" if reason else "")


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names[:_NAMED_FINDINGS]) + (
        f"; and {len(names) - _NAMED_FINDINGS} more" if len(names) > _NAMED_FINDINGS else ""
    )
