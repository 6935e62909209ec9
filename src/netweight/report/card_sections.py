"""Sections of a model card that netweight writes, each between two marks; all else is its author's and stays.

The card of a model has one section of evidence for each report, and above all others the worst verdict of these
reports. Evidence names the weights that were tested, since it says nothing about other weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from netweight.errors import UsageError
from netweight.report.verdict import stated_outcome

CARD = "README.md"
"""Name of the file of a model card."""
VERDICT = "verdict"
"""Key of the section with the verdict, the first of the card."""
HEAD = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
"""Metadata in the first lines of a card."""
_EVIDENCE = re.compile(
    r"<!-- netweight evidence (\w+): begin -->\n(.*?)\n<!-- netweight evidence \1: end -->", re.DOTALL
)
_WEIGHTS = re.compile(r"^<!-- weights (\S+) -->$", re.MULTILINE)
_SENTENCE = re.compile(r"^\*\*(.*)\*\*$", re.MULTILINE)
# A sentence that is not a verdict's was edited by hand, and nothing can be concluded from it.
_WORST_FIRST = (None, "failed", "none", "passed")


@final
@dataclass(frozen=True)
class CardEvidence:
    """Evidence that stands in a card."""

    key: str
    """Key of its section, the same for reports of the same folder."""
    sentence: str
    """The verdict of its report."""
    source: str
    """The line that names the report."""
    weights: tuple[str, ...]
    """Digests of the weights that were tested; none where the report does not have them."""

    @property
    def rank(self) -> int:
        """Place of its verdict, the worst first."""
        return _WORST_FIRST.index(stated_outcome(self.sentence))


def evidence_of(text: str) -> list[CardEvidence]:
    """Return the evidence in a card, in its order."""
    entries = []
    for key, body in _EVIDENCE.findall(text):
        stated = _SENTENCE.search(body)
        source = next((line for line in body.split("\n") if line.startswith("From the report ")), "")
        entries.append(CardEvidence(key, stated[1] if stated else "", source, tuple(_WEIGHTS.findall(body))))
    return entries


def worst_evidence(text: str, *, latest: str = "") -> CardEvidence | None:
    """Return the evidence with the worst verdict; None where a card has none.

    Args:
        text: The card.
        latest: The key that comes before others whose verdict is as bad.
    """
    return min(evidence_of(text), key=lambda each: (each.rank, each.key != latest), default=None)


def verdict_in(text: str) -> str | None:
    """Return the verdict that a card states; None where it states none.

    Raises:
        UsageError: The card has one of the marks of its section, or one of them twice.
    """
    begin, end = marks(VERDICT)
    if begin not in text and end not in text:
        return None
    start, stop = _span(text, begin, end)
    return text[start + len(begin) : stop - len(end)].strip().strip("*") or None


def with_verdict(text: str, *, latest: str = "") -> str:
    """Return a card whose first section states the worst verdict of its evidence; without evidence it has none."""
    worst = worst_evidence(text, latest=latest)
    if worst is None:
        return without_section(text, VERDICT)
    return with_section(text, VERDICT, [f"**{worst.sentence}**"], first=True)


def without_other_weights(text: str, weights: str | None, *, latest: str = "") -> str:
    """Return a card without evidence about other weights than these; None keeps no evidence.

    Args:
        text: The card.
        weights: The digest of the weights that the card is for; None where a treatment has changed them.
        latest: As of `worst_evidence`.
    """
    for each in evidence_of(text):
        if weights is None or (each.weights and weights not in each.weights):
            text = without_section(text, f"evidence {each.key}")
    return with_verdict(text, latest=latest)


def with_section(text: str, key: str, lines: Sequence[str], *, first: bool = False) -> str:
    """Put a section between its marks: in the place of an earlier one, else at the end, or below the metadata.

    Args:
        text: The card.
        key: Name of the section, which is in its marks.
        lines: Its lines, in Markdown.
        first: Whether a new section comes above all others.

    Raises:
        UsageError: The card has not both marks once.
    """
    begin, end = marks(key)
    section = "\n".join([begin, *lines, end])
    if (text.count(begin), text.count(end)) == (0, 0) and first:
        head = HEAD.match(text)
        start = head.end() if head else 0
        return f"{text[:start]}{'' if not start else chr(10)}{section}\n\n{text[start:].lstrip()}"
    if (text.count(begin), text.count(end)) == (0, 0):
        return f"{text.rstrip()}\n\n{section}\n"
    start, stop = _span(text, begin, end)
    return text[:start] + section + text[stop:]


def without_section(text: str, key: str) -> str:
    """Return a card without a section; the card itself where it has none.

    Raises:
        UsageError: The card has one of the marks, or one of them twice.
    """
    begin, end = marks(key)
    if begin not in text and end not in text:
        return text
    start, stop = _span(text, begin, end)
    before, after = text[:start].rstrip(), text[stop:].lstrip()
    return f"{before}\n\n{after}".lstrip() if after else f"{before}\n"


def marks(key: str) -> tuple[str, str]:
    """Return the lines between which a section stands."""
    return f"<!-- netweight {key}: begin -->", f"<!-- netweight {key}: end -->"


def _span(text: str, begin: str, end: str) -> tuple[int, int]:
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise UsageError(
            f"{CARD} does not have the marks {begin!r} and {end!r} once each, in this order.",
            cure="Remove the rest of the section.",
        )
    return text.index(begin), text.index(end) + len(end)
