"""Conclusions in words: every one that the library knows follows from its findings and never contradicts them."""

import importlib
import itertools
import math
import re

import pytest

from netweight.report.finding import Finding
from netweight.report.text import AllTargets, Conclusion, Criterion, HasValue, by_targets, known

for home in ("attacks.finetuning", "attacks.embedding_search", "attacks.gradient_inversion", "methods.federate",
             "methods.forget"):  # fmt: skip
    importlib.import_module(f"netweight.{home}.report")
importlib.import_module("netweight.attacks.refusal.attack_folder")
for home in ("compress.recipe", "federate.recipe", "immunize.report", "space.images"):
    importlib.import_module(f"netweight.methods.{home}")

RANK = {"broken": 0, "partly": 1, "told": 2, "holds": 3}
BAD_WORDS = re.compile(
    r"\b(differs?|not|too large|less than|broken|hides no|no better|bring|yes|recovers|exactly|reveals more|"
    r"leak|falls|can be read|images copy|no better|better than a guess|be reconstructed)\b", re.IGNORECASE,
)  # fmt: skip
GOOD_WORDS = re.compile(r"\b(nothing is lost|every bit is there|equal to|as they were)\b", re.IGNORECASE)
STATES = ("good", "bad", "none", "nan", "absent")


def finding(criterion, state):
    """A finding that a criterion judges as the state says; None if it is absent."""
    if state == "absent":
        return None
    bound = 0.5 if criterion.than == "baseline" else criterion.than
    toward = (criterion.margin + 1) * (1 if criterion.better == "higher" else -1)
    value = {"good": bound + toward, "bad": bound - toward, "none": None, "nan": math.nan}[state]
    return Finding(criterion.name, value, better=criterion.better, baseline=0.5)


def conclude(conclusion, states):
    found = [finding(*pair) for pair in zip(conclusion.criteria, states, strict=True)]
    return conclusion([each for each in found if each is not None], **facts_of(conclusion))


def facts_of(conclusion):
    code = conclusion.words.__code__
    return dict.fromkeys(code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount], "7")


def by_kind(kind):
    chosen = {name: each for name, each in known().items() if not name.startswith("test")}
    assert len(chosen) >= 11
    return [
        pytest.param(each, id=name)
        for name, each in chosen.items()
        if all(isinstance(criterion, kind) for criterion in each.criteria)
    ]


@pytest.mark.parametrize("conclusion", by_kind(Criterion))
def test_words_follow_from_what_the_criteria_say(conclusion):
    cases = list(itertools.product(STATES, repeat=len(conclusion.criteria)))
    told = {states: conclude(conclusion, states) for states in cases}
    for states, (outcome, words) in told.items():
        assert words[0].isupper()
        assert words.endswith(".")
        unmeasured = [
            criterion.name
            for criterion, state in zip(conclusion.criteria, states, strict=True)
            if state in ("none", "absent") and criterion.needed
        ]
        if unmeasured:
            assert (outcome, words) == ("told", f"Not measured: {'; '.join(unmeasured)}.")
            continue
        assert told[tuple("bad" if state == "nan" else state for state in states)] == (outcome, words)
        for place, state in enumerate(states):  # nothing sounds worse for a better number
            better = told[(*states[:place], "good", *states[place + 1 :])]
            assert state in ("none", "absent") or RANK[better[0]] >= RANK[outcome]
        if outcome in ("broken", "partly"):
            assert BAD_WORDS.search(words)
    best, worst = (told[(state,) * len(conclusion.criteria)] for state in ("good", "bad"))
    assert RANK[worst[0]] < RANK[best[0]]
    assert worst[1] != best[1]
    assert best[0] != "holds" or not BAD_WORDS.search(best[1])


@pytest.mark.parametrize("conclusion", by_kind(HasValue))
def test_words_that_repeat_numbers_judge_nothing(conclusion):
    told = set()
    for states in itertools.product((1.0, math.nan, None, "absent"), repeat=len(conclusion.criteria)):
        pairs = zip(conclusion.criteria, states, strict=True)
        outcome, words = conclusion(
            [Finding(one.name, value) for one, value in pairs if value != "absent"], **facts_of(conclusion)
        )
        assert outcome == "told"
        assert (words[0].isupper(), words[-1]) == (True, ".")
        told.add(words)
    assert len(told) >= 2


def judged(state):
    value = {"good": 0, "bad": 1, "none": None, "nan": math.nan, "free": 5}[state]
    return Finding(f"count, {state}", value, better="lower", target=None if state == "free" else 0)


@pytest.mark.parametrize("conclusion", by_kind(AllTargets))
def test_words_follow_from_the_targets(conclusion):
    facts = facts_of(conclusion) or {"saved": "30 %", "others": "8", "missed": "count"}
    for states in itertools.product(("good", "bad", "none", "nan", "free"), repeat=3):
        outcome, words = conclusion([judged(state) for state in states], **facts)
        if {"bad", "nan"} & set(states):
            assert outcome == "broken"
            assert BAD_WORDS.search(words)
            assert not GOOD_WORDS.search(words)
        elif "none" in states or set(states) == {"free"}:
            assert outcome == "broken"
            assert words.startswith("Not measured: ")
        else:  # findings without a target contradict nothing
            assert (outcome, words) == conclusion([judged("good")], **facts)
            assert outcome == "holds"
            assert not BAD_WORDS.search(words)


def test_a_number_and_a_baseline_as_bounds():
    at_most = Criterion("x", "lower", than=2.0)
    good = [at_most.judge([Finding("x", value)])[0] for value in (1, 2.0, 3, math.inf, math.nan)]
    assert good == [True, True, False, False, False]
    above = Criterion("x", "higher", margin=1.0, strict=True)
    assert [above.judge([Finding("x", value, baseline=5)])[0] for value in (4.0, 4.5, 6)] == [False, True, True]
    assert above.judge([Finding("x", 6)]) == (None, ["x"])  # without a baseline nothing can be said
    assert Criterion("x", "lower", needed=False).judge([]) == (None, [])


def test_equal_outputs_are_never_called_different():
    said = by_targets("test: outputs", met="Equal.", missed="They differ.")
    found = [Finding("numbers that differ", 0, better="lower", target=0), Finding("memory", 5.0, unit="MB")]
    assert said(found) == ("holds", "Equal.")
    assert said([Finding("numbers that differ", 2, better="lower", target=0), *found]) == ("broken", "They differ.")
    assert said(found[1:]) == ("broken", "Not measured: anything with a target.")


def test_facts_are_told_and_conclusions_are_known_by_name():
    held = Conclusion("test: held", [Criterion("attacks", "lower", than=0)], lambda held, *, n: ("told", f"{held} {n}"))
    assert held([Finding("attacks", 0)], n="5") == ("told", "True 5")
    assert known()["test: held"] is held
