"""Text of reports: conclusions that follow from findings, and sections as rows, verdicts and Markdown.

A `Conclusion` names the findings that it rests on and which of their values are good; these alone choose the words, so
that no sentence contradicts the numbers beside it. Where a finding is absent or was not measured it says so and
concludes nothing; NaN is never good.

    HELD = Conclusion("attack", [Criterion("attacks that succeeded", "lower", than=0)],
                      lambda held, *, steps: ("holds", f"Withstood {steps} steps.") if held else ("broken", "Broken."))
    outcome, words = HELD(findings, steps="240")

The page (`page.py`), commands, and model cards take their words from here, so that a number is written, an interval is
left out and a target is judged in one way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from netweight.report.finding import Better, Finding, Outcome, Section
from netweight.report.numbers import format_number as format_number
from netweight.report.verdict import decide, mark_of

Words: TypeAlias = tuple[Outcome, str]
_KNOWN: dict[str, Conclusion] = {}


@final
@dataclass(frozen=True)
class Criterion:
    """Criterion for good values of a finding: those on the better side of a number or of its baseline."""

    name: str
    """Name of the finding."""
    better: Better
    """Direction in which values are better."""
    than: float | Literal["baseline"] = "baseline"
    """Number with which the value is compared, or "baseline" for the finding's own."""
    margin: float = 0.0
    """Amount by which a value may be worse and still count as good."""
    strict: bool = False
    """True if an equal value does not count as good."""
    needed: bool = True
    """If False, the sentence gets None for a value that was not measured, and omits it."""

    def judge(self, findings: Sequence[Finding]) -> tuple[bool | None, list[str]]:
        """Return whether the finding is good, and what was not measured."""
        finding = next((each for each in findings if each.name == self.name), None)
        bound = finding.baseline if finding is not None and self.than == "baseline" else self.than
        if finding is None or finding.value is None or bound is None or isinstance(bound, str):
            return None, [self.name] * self.needed
        gain = (finding.value - bound) * (1 if self.better == "higher" else -1) + self.margin
        good = gain > 0 or (gain == 0 and not self.strict)
        if good and finding.control == "held":
            return None, [f"{self.name} (the same attack did not break its control either)"]
        return good, []


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
class HasValue:
    """Good is that a finding has a value; for words that repeat numbers and judge nothing."""

    name: str
    """Name of the finding."""

    def judge(self, findings: Sequence[Finding]) -> tuple[bool, list[str]]:
        """Return whether it has."""
        return any(each.name == self.name and each.value is not None for each in findings), []


@final
class Conclusion:
    """Words that follow from findings.

    `words` gets True or False per criterion, in their order, and facts (formatted texts) by keyword; it returns the
    outcome and the words. `known` has all conclusions by name, for the test that holds their words to their findings.
    """

    def __init__(
        self, name: str, criteria: Sequence[Criterion | AllTargets | HasValue], words: Callable[..., Words]
    ) -> None:
        self.criteria, self.words = tuple(criteria), words
        _KNOWN[name] = self

    def __call__(self, findings: Iterable[Finding], **facts: str) -> Words:
        """Return the outcome and the words."""
        measured = list(findings)
        judged = [criterion.judge(measured) for criterion in self.criteria]
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
    stated = [each for each in outcomes if each is not None]
    return min(stated, key=("broken", "partly", "told", "holds").index) if stated else None


def known() -> Mapping[str, Conclusion]:
    """Return every conclusion of the modules that are imported, by name."""
    return dict(_KNOWN)


# A cell of numbers may be empty, or a dash.
_NUMBER = re.compile(r"[-\u2212]?\d[\d.,\u2009e+-]*[×%]?|[-\u2013]?|inf|nan")


def chapter_verdict(sections: Sequence[Section]) -> tuple[Outcome, str, str]:
    """Return how a chapter of these sections ends, in words, and what its other sections conclude."""
    # A section that fails is broken, whatever its words say. The first of the worst sections gives its first sentence.
    judged: list[tuple[Outcome, str]] = []
    rest = []
    for section in sections:
        verdict = decide(section)
        outcome: Outcome | None = (
            "broken" if verdict.failed else section.outcome or ("holds" if verdict.outcome == "passed" else None)
        )
        if outcome is not None:
            words = verdict.sentence if verdict.failed or not section.conclusion else section.conclusion
            judged.append((outcome, words))
        if conclusion := conclusion_of(section):
            rest.append(conclusion)
    last = worst(outcome for outcome, _ in judged) or "told"
    words = next((words for outcome, words in judged if outcome == last), "Nothing here is judged.")
    return last, words.split(". ")[0].rstrip(".") + ".", " ".join(rest) or words


def finding_row(finding: Finding) -> tuple[str, str, str]:
    """Return a finding as a row for the terminal: name, value, and interval with mark, or why it has no value."""
    mark = {"no target": "", "missed": "MISSED"}.get(mark_of(finding), mark_of(finding))
    if finding.value is None:
        reason = str(finding.detail.get("reason", ""))
        return finding.name, "–", ": ".join(part for part in (mark, reason) if part)
    ends = ""
    if finding.interval is not None:
        low, high = finding.interval
        ends = f"95 %: at least {low:.4g}" if math.isinf(high) else f"95 %: {low:.4g} to {high:.4g}"
    finite = isinstance(finding.value, float) and math.isfinite(finding.value)
    value = f"{finding.value:.4g}" if finite else format_number(finding.value)
    return finding.name, f"{value} {finding.unit}".rstrip(), f"{ends}  {mark}".strip()


def aligned(headers: Sequence[str], rows: Sequence[Sequence[object]], *, indent: int = 0) -> list[str]:
    """Return the lines of a table for the terminal, columns of numbers to the right; no headers, no first line."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return []
    numeric = [all(_NUMBER.fullmatch(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [list(headers), *cells] if headers else cells
    widths = [max(len(line[i]) for line in lines) for i in range(len(cells[0]))]
    return [
        " " * indent
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]


def conclusion_of(section: Section) -> str:
    """Return what a section concludes; nothing where that would praise what an attack without control cannot show."""
    uncontrolled = any(mark_of(finding) == "control failed" for finding in section.findings)
    return "" if uncontrolled and section.outcome != "broken" else section.conclusion


def render_markdown(section: Section) -> list[str]:
    """Return the lines of a section below its heading in a model card; none if it has nothing to say."""
    lines = []
    if section.missing_audits:
        lines += [f"**Audits left out**: {section.treatment} ({', '.join(section.missing_audits)}).", ""]
    if conclusion := conclusion_of(section):
        lines += [conclusion, ""]
    if section.tested:
        lines += ["What was tested, and how strongly:", "", *markdown_table(("", ""), section.tested)]
    lines += [f"- Note: {warning}" for warning in section.warnings] + [""] * bool(section.warnings)
    rows = [_markdown_row(finding) for finding in section.findings]
    return [*lines, *markdown_table(("finding", "value", "95 % interval", "target", ""), rows)]


def _markdown_row(finding: Finding) -> tuple[str, ...]:
    interval = " to ".join(format_number(end) for end in finding.interval or ())
    ends = finding.target if isinstance(finding.target, tuple) else (finding.target,)
    target = "" if finding.target is None else " to ".join(format_number(end) for end in ends)
    verdict = {"no target": "", "met": "met"}.get(mark_of(finding), f"**{mark_of(finding)}**")
    return finding.name, f"{format_number(finding.value)} {finding.unit}".rstrip(), interval, target, verdict


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table and an empty one; none if there are no rows."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    if not cells:
        return []
    return [*("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)), ""]
