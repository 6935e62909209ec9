"""One verdict: exit code, terminal, page and card agree over every combination of findings."""

import itertools
import json
import sys

import pytest
from click.testing import CliRunner

from netweight import cli, registry
from netweight.plugins.model_card import add_evidence
from netweight.registry import Command, Result, lazy
from netweight.report.card_sections import verdict_in
from netweight.report.finding import Finding, Section
from netweight.report.report import Report
from netweight.report.text import Conclusion, Criterion, finding_row
from netweight.report.verdict import decide, mark_of, stated_outcome

# Every state of a finding: what was measured, whether there is a target, and whether the control was broken.
VALUES = {"met": 1.0, "missed": 3.0, "unmeasured": None}
STATES = [
    *itertools.product(VALUES, ("target",), ("broken", "held", None)),
    *itertools.product(VALUES, ("no target",), (None,)),
]
HELD = Conclusion(
    "test: held", [Criterion("recovered", "lower", than=2.0)],
    lambda good: ("holds", "The defense withstood all attacks.") if good else ("broken", "The defense was broken."),
)  # fmt: skip
PRAISE = ("withstood", "resists", "Publish, because", "passed its audits")
# Words that address the author of a model, who does not read its card to learn whether to publish it.
ADVICE = ("Publish, because", "Do not publish", "No verdict, because")


def finding(state, name="recovered"):
    value, target, control = state
    return Finding(
        name, VALUES[value], better="lower", target=2.0 if target == "target" else None, control=control,
        detail={"reason": "no rows"} if VALUES[value] is None else {},
    )  # fmt: skip


def wanted(states):
    """The outcome by the rule: failed if a target failed, was not measured, or had no control that broke.

    Nothing passes beside an attack that succeeded and has no target.
    """
    aimed = [state for state in states if state[1] == "target"]
    bad = [state for state in aimed if state[0] != "met" or state[2] == "held"]
    broken = ("missed", "no target", None) in states
    return "failed" if bad else "passed" if aimed and not broken else "none"


def sections(states, missing):
    made = []
    for number, state in enumerate(states):
        outcome, words = HELD([finding(state)])
        made.append(
            Section(
                f"Section {number}",
                [finding(state)],
                conclusion=words,
                outcome=outcome,
                **({"treatment": "shrink", "missing_audits": ["speed"]} if missing and not number else {}),
            )
        )
    return made


COMBINATIONS = [
    (states, missing)
    for count in (0, 1, 2)
    for states in itertools.product(STATES, repeat=count)
    for missing in ((False, True) if count else (False,))
]
# Every state alone, and every pair of marks: what is printed and written takes its words from the verdict.
MARKS = {mark_of(finding(state)): state for state in STATES}
PRINTED = [
    *((states, missing) for states, missing in COMBINATIONS if len(states) < 2),
    *((states, False) for states in itertools.combinations(MARKS.values(), 2)),
]


@pytest.fixture
def call(monkeypatch):
    """Call a command whose sections a test sets, with text and with JSON."""
    held = type(sys)("netweight_verdicts")
    monkeypatch.setitem(sys.modules, "netweight_verdicts", held)
    trial = Command("trial", run=lazy("netweight_verdicts:run"), summary="Only for this test.")
    monkeypatch.setitem(registry._REGISTERED, "trial", trial)

    def invoke(made, *arguments):
        held.run = lambda context: Result(["done"], made)
        return CliRunner().invoke(cli.netweight, ["trial", *arguments])

    return invoke


def outcome_of(states, missing):
    outcome = wanted(states)
    return "none" if outcome == "passed" and missing else outcome


def test_the_outcome_is_that_of_the_rule_over_all_combinations():
    outcomes = {case: decide(sections(*case)).outcome for case in COMBINATIONS}
    assert {case: outcome for case, outcome in outcomes.items() if outcome != outcome_of(*case)} == {}
    assert set(outcomes.values()) == {"passed", "failed", "none"}


@pytest.mark.parametrize(("states", "missing"), PRINTED)
def test_exit_code_terminal_json_page_and_card_agree_with_the_verdict(states, missing, call, tmp_path):
    made = sections(states, missing)
    verdict, outcome = decide(made), outcome_of(states, missing)
    answer, machine = call(made), json.loads(call(made, "--json").stdout)
    report = Report("t", environment={})
    for section in made:
        report.add(section)
    page = report.write(tmp_path).read_text()
    card = add_evidence(tmp_path, tmp_path).read_text()
    publishing = json.loads(CliRunner().invoke(cli.netweight, ["publish", str(tmp_path), "--json"]).stdout)
    said = next(each for each in publishing["findings"] if each["name"].startswith("the card states"))
    assert answer.exit_code == (1 if outcome == "failed" else 0)
    assert outcome == verdict.outcome == stated_outcome(verdict.publish) == stated_outcome(verdict.card)
    assert said["passed"] == (outcome == "passed")
    assert said["detail"]["verdict"] == verdict_in(card) == verdict.card
    assert not [word for word in ADVICE if word in card]
    if made:
        assert answer.stdout.rstrip().endswith(verdict.publish)
        assert machine["verdict"]["sentence"] == verdict.publish
        assert page.index(verdict.publish) < page.index("<main")
        assert card.split("\n## Evidence\n\n")[1].startswith(f"**{verdict.card}**")
        # The reason is the same in both, and only one of the two says what the author should do.
        reason = verdict.sentence[1:].rstrip(".")
        assert reason in verdict.publish
        assert reason in verdict.card
    if outcome != "passed" and all(state[2] == "held" or state[0] != "met" for state in states):
        assert not [word for word in PRAISE for text in (answer.stdout, page, card) if word in text]


def test_a_card_says_the_verdict_to_those_who_download_the_model():
    found = [Finding("steps to recover", 1, better="higher", target=4), Finding("ratio", None, target=2.0)]
    met = Finding("copies", 0, better="lower", target=2)
    assert decide(Section("s", found)).card == (
        "This model failed its audits: 1 of 2 targets is missed: steps to recover is 1 (target: at least 4); "
        "ratio could not be measured. Its author was advised not to publish it."
    )
    assert decide(Section("s", found[1:])).card == (
        "The audits of this model came to no verdict: ratio could not be measured. Its author was advised not to "
        "publish it."
    )
    assert decide(Section("s", [met])).card == "This model passed its audits: the target is met."
    assert decide(Section("s", [met], conditions=["remove a", "remove b"])).card == (
        "This model passed its audits: the target is met. Before publishing it, its author was advised to remove a and "
        "remove b."
    )
    assert decide(Section("s", [Finding("copies", 0)])).card.startswith("There is no verdict on this model: no finding")


@pytest.mark.parametrize("command", [("report",), ("report", "--json")])
def test_the_report_of_a_failed_run_fails_again(command, tmp_path):
    for state, code in ((("missed", "target", None), 1), (("met", "target", "held"), 1), (("met", "target", None), 0)):
        Report("t", environment={}).add(Section("s", [finding(state)])).write(tmp_path)
        answer = CliRunner().invoke(cli.netweight, [command[0], str(tmp_path), *command[1:]])
        assert answer.exit_code == code, answer.output


def test_marks():
    assert mark_of(finding(("met", "target", "held"))) == "control failed"
    assert mark_of(finding(("missed", "target", "held"))) == "missed"
    assert finding(("met", "target", "held")).passed is None
    assert finding(("met", "target", "broken")).passed is True
    assert finding_row(finding(("unmeasured", "target", None)))[2] == "not measured: no rows"


def test_a_sentence_names_what_was_wanted():
    found = [Finding("steps to recover", 1, better="higher", target=4), Finding("ratio", None, target=2.0)]
    assert decide(Section("s", found)).publish == (
        "Do not publish, because 1 of 2 targets is missed: steps to recover is 1 (target: at least 4); "
        "ratio could not be measured."
    )


def test_the_control_survives_json():
    one = finding(("met", "target", "held"))
    assert Finding.from_json(one.to_json()) == one


@pytest.mark.parametrize("value", [1.0, 3.0, None])
def test_what_must_be_done_first_is_in_the_sentence_that_says_to_publish(value, call):
    judged = Section("s", [Finding("copies", value, better="lower", target=2.0)], conditions=["remove a", "remove b"])
    verdict = decide([judged, Section("t", conditions=["remove a"])])
    assert ("Publish, because the target is met, but first remove a and remove b." == verdict.publish) == (value == 1.0)
    assert verdict.publish.startswith("Do not publish") == (value != 1.0)
    answer = call([judged])
    assert answer.stdout.rstrip().endswith(verdict.publish)
    assert answer.exit_code == (value != 1.0)
    assert Section.from_json(judged.to_json()) == judged
