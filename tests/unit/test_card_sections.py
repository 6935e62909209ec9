"""Sections of a model card: the worst verdict leads, evidence about other weights goes, the author's text stays."""

import itertools

import pytest

from netweight.errors import UsageError
from netweight.report.card_sections import (
    evidence_of,
    verdict_in,
    with_section,
    with_verdict,
    without_other_weights,
    without_section,
    worst_evidence,
)

AUTHOR = "---\nlicense: mit\n---\n\n# A model\n\nWhat its author writes.\n"
VERDICTS = (
    "This model passed its audits: the target is met.",
    "There is no verdict on this model: x.",
    "This model failed its audits: y. Its author was advised not to publish it.",
)
# As earlier releases wrote them.
EARLIER = ("Publish, because the target is met.", "No verdict, because x.", "Do not publish, because y.")


def card(*entries, text=AUTHOR):
    """A card with evidence: keys, verdicts and weights."""
    for key, sentence, *weights in entries:
        marks = [f"<!-- weights {each} -->" for each in weights]
        text = with_section(text, f"evidence {key}", ["## Evidence", "", f"**{sentence}**", "", *marks, ""])
    return with_verdict(text)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_worst_verdict_leads_in_any_order(order):
    text = card(*((f"k{place}", VERDICTS[place]) for place in order))
    assert verdict_in(text) == VERDICTS[2]
    assert text.index(VERDICTS[2]) < text.index("# A model")
    assert [each.sentence for each in evidence_of(text)] == [VERDICTS[place] for place in order]


@pytest.mark.parametrize(("bad", "good"), [(2, 1), (1, 0), (2, 0)])
def test_verdicts_of_earlier_releases_are_as_bad_as_present_ones(bad, good):
    for worse, better in ((EARLIER[bad], VERDICTS[good]), (VERDICTS[bad], EARLIER[good])):
        assert verdict_in(card(("a", better), ("b", worse))) == worse


def test_a_sentence_that_was_edited_by_hand_is_worse_than_any_verdict():
    edited = "This model is safe."
    for verdict in VERDICTS:
        assert verdict_in(card(("a", verdict), ("b", edited))) == edited


def test_of_verdicts_that_are_as_bad_the_latest_leads():
    text = card(("a", VERDICTS[2]), ("b", VERDICTS[2].replace("y", "z")))
    assert worst_evidence(text, latest="b").key == "b"
    assert worst_evidence(text, latest="a").key == "a"


def test_a_later_section_of_the_same_key_takes_the_place_of_the_earlier_one():
    text = card(("a", VERDICTS[2]), ("b", VERDICTS[0]))
    text = card(("a", VERDICTS[0]), text=text)
    assert [each.key for each in evidence_of(text)] == ["a", "b"]
    assert verdict_in(text) == VERDICTS[0]


def test_evidence_about_other_weights_goes_and_takes_its_verdict_along():
    text = card(("a", VERDICTS[2], "old"), ("b", VERDICTS[0], "new"), ("c", VERDICTS[1]))
    left = without_other_weights(text, "new")
    assert [each.key for each in evidence_of(left)] == ["b", "c"]  # nothing is known of the last one's weights
    assert verdict_in(left) == VERDICTS[1]
    assert without_other_weights(text, None) == AUTHOR


def test_a_card_without_sections_stays_as_it_is():
    assert without_other_weights(AUTHOR, "new") == without_section(AUTHOR, "verdict") == AUTHOR
    assert verdict_in(AUTHOR) is None


def test_half_a_section_is_refused():
    text = card(("a", VERDICTS[0])).replace("<!-- netweight verdict: end -->", "")
    with pytest.raises(UsageError, match="does not have the marks"):
        with_verdict(text)
