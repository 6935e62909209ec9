"""Conclusions in words that follow from findings, so that no sentence contradicts the numbers beside it.

A `Conclusion` names the findings that it rests on and which of their values are good; these alone choose the words.
Where a finding is absent or was not measured it says so and concludes nothing; NaN is never good.

    HELD = Conclusion("attack", [Criterion("attacks that succeeded", "lower", than=0)],
                      lambda held, *, steps: ("holds", f"Withstood {steps} steps.") if held else ("broken", "Broken."))
    outcome, words = HELD(findings, steps="240")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from netweight.report.finding import Better, Finding, Outcome

Words: TypeAlias = tuple[Outcome, str]
_KNOWN: dict[str, Conclusion] = {}


@final
@dataclass(frozen=True)
class Criterion:
    """Which values of a finding are good: those on the better side of a number or of its baseline."""

    name: str  # of the finding
    better: Better
    than: float | Literal["baseline"] = "baseline"
    margin: float = 0.0  # by which a value may be worse and still be good
    strict: bool = False  # whether an equal value is not good
    needed: bool = True  # otherwise the words get None where it was not measured, and leave it out

    def judge(self, findings: Sequence[Finding]) -> tuple[bool | None, list[str]]:
        """Return whether the finding is good, and what was not measured."""
        finding = next((each for each in findings if each.name == self.name), None)
        bound = finding.baseline if finding is not None and self.than == "baseline" else self.than
        if finding is None or finding.value is None or bound is None or isinstance(bound, str):
            return None, [self.name] * self.needed
        gain = (finding.value - bound) * (1 if self.better == "higher" else -1) + self.margin
        return gain > 0 or (gain == 0 and not self.strict), []


@final
@dataclass(frozen=True)
class AllTargets:
    """Good is that every finding with a target meets it, and that there is one."""

    def judge(self, findings: Sequence[Finding]) -> tuple[bool | None, list[str]]:
        """Return whether all targets are met, and what was not measured."""
        judged = [finding for finding in findings if finding.target is not None]
        unmeasured = [finding.name for finding in judged if finding.passed is None]
        if any(finding.passed is False for finding in judged):
            return False, []
        return (None, unmeasured or ["anything with a target"]) if unmeasured or not judged else (True, [])


@final
@dataclass(frozen=True)
class Measured:
    """Good is that a finding has a value; for words that repeat numbers and judge nothing."""

    name: str

    def judge(self, findings: Sequence[Finding]) -> tuple[bool, list[str]]:
        """Return whether it has."""
        return any(each.name == self.name and each.value is not None for each in findings), []


Rule: TypeAlias = Criterion | AllTargets | Measured


@final
class Conclusion:
    """Words that follow from findings.

    `words` gets True or False per criterion, in their order, and facts (formatted texts) by keyword; it returns the
    outcome and the words. `known` has all conclusions by name, for the test that holds their words to their findings.
    """

    def __init__(
        self, name: str, criteria: Sequence[Criterion | AllTargets | Measured], words: Callable[..., Words]
    ) -> None:
        self.criteria, self.words = tuple(criteria), words
        _KNOWN[name] = self

    def __call__(self, findings: Iterable[Finding], **facts: str) -> Words:
        """Return the outcome and the words."""
        found = list(findings)
        judged = [criterion.judge(found) for criterion in self.criteria]
        unmeasured = [name for _, names in judged for name in names]
        if unmeasured:
            failed = any(isinstance(criterion, AllTargets) for criterion in self.criteria)
            return "broken" if failed else "told", f"Not measured: {'; '.join(unmeasured)}."
        return self.words(*(good for good, _ in judged), **facts)


def by_targets(name: str, *, met: str, missed: str) -> Conclusion:
    """Return the conclusion that says `met` or `missed`, templates of facts, by whether all targets are met."""

    def words(good: bool, **facts: str) -> Words:
        return ("holds", met.format(**facts)) if good else ("broken", missed.format(**facts))

    return Conclusion(name, [AllTargets()], words)


def worst(outcomes: Iterable[Outcome | None]) -> Outcome | None:
    """Return the worst of some outcomes; None if there is none."""
    found = [each for each in outcomes if each is not None]
    return min(found, key=("broken", "partly", "told", "holds").index) if found else None


def known() -> Mapping[str, Conclusion]:
    """Return every conclusion of the modules that are imported, by name."""
    return dict(_KNOWN)
