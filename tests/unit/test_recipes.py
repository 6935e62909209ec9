import json

import pytest
import toy_treatment

from netweight.errors import CorruptBlob, UsageError
from netweight.evidence.report import read_report
from netweight.recipes import Plan, read_recipe, register, run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject").write_text("abc")
    toy_treatment.CALLS.clear()
    return tmp_path


def write(text):
    with open("recipe.yaml", "w") as file:
        file.write(text)
    return "recipe.yaml"


GOOD = """
subject: subject
treatments:
  - repeat
  - repeat: {times: 3}
output: out
"""


def test_treatments_run_in_order_with_their_audits_and_end_in_a_report(here):
    done = run(Plan.of(read_recipe(write(GOOD))))
    assert [step.path.read_text() for step in done] == ["abc" * 2, "abc" * 6]
    assert [list(step.findings) for step in done] == [["length", "start"]] * 2
    assert not any(step.failed or step.remembered for step in done)
    report = read_report("out")
    assert [section.title for section in report.sections] == ["1. repeat", "2. repeat"]
    assert [section.missing_audits for section in report.sections] == [(), ()]
    assert (here / "subject").read_text() == "abc"


def test_a_second_run_does_nothing_twice_and_a_changed_setting_only_what_follows():
    first = run(Plan.of(read_recipe(write(GOOD))))
    toy_treatment.CALLS.clear()
    again = run(Plan.of(read_recipe(write(GOOD))))
    assert toy_treatment.CALLS == []
    assert [step.remembered for step in again] == [True, True]
    assert [step.findings for step in again] == [step.findings for step in first]
    changed = run(Plan.of(read_recipe(write(GOOD.replace("times: 3", "times: 4")))))
    assert toy_treatment.CALLS == ["repeat", "length", "start"]
    assert [step.remembered for step in changed] == [True, False]
    assert changed[1].path != first[1].path


def test_a_changed_subject_is_treated_anew(here):
    run(Plan.of(read_recipe(write(GOOD))))
    (here / "subject").write_text("xyz")
    assert run(Plan.of(read_recipe("recipe.yaml")))[0].path.read_text() == "xyzxyz"


def test_a_run_stopped_between_a_result_and_its_record_takes_the_result(here):
    done = run(Plan.of(read_recipe(write(GOOD))))
    (here / "out" / "ledger.jsonl").unlink()
    toy_treatment.CALLS.clear()
    assert run(Plan.of(read_recipe("recipe.yaml")))[1].path == done[1].path
    assert "repeat" not in toy_treatment.CALLS


def test_a_result_changed_by_another_hand_is_refused():
    done = run(Plan.of(read_recipe(write(GOOD))))
    done[0].path.write_text("no longer what was audited")
    with pytest.raises(CorruptBlob, match=r"01-repeat-.* was changed after it was made"):
        run(Plan.of(read_recipe("recipe.yaml")))


def test_a_folder_is_a_subject_and_a_failed_finding_is_told(here):
    plan = Plan.of(read_recipe(write(GOOD.replace("- repeat\n", "- repeat: {letters: z}\n"))))
    done = run(plan)
    assert [finding.name for finding in done[0].failed] == ["length"]
    assert done[1].failed == []


def test_audits_left_out_are_shown(here):
    done = run(Plan.of(read_recipe(write(GOOD + "audits: [start]\n"))))
    assert [step.step.left_out for step in done] == [("length",), ("length",)]
    assert read_report("out").sections[0].missing_audits == ("length",)
    assert "length" in (here / "out" / "report.html").read_text()


def test_the_plan_is_json():
    plan = Plan.of(read_recipe(write(GOOD), output="elsewhere")).to_json()
    assert json.loads(json.dumps(plan))["steps"][1] == {
        "treatment": "repeat",
        "settings": {"times": 3, "letters": ""},
        "audits": ["length", "start"],
        "left_out": [],
    }
    assert plan["output"] == "elsewhere"


def test_all_problems_are_reported_at_once_with_the_nearest_names():
    text = """
subjet: subject
subject: nowhere
treatments:
  - compres: {}
  - repeat: {time: 3}
  - repeat: {times: many}
  - [repeat]
  - compress: {level: maximal}
audits: all
output: recipe.yaml
"""
    with pytest.raises(UsageError) as caught:
        read_recipe(write(text))
    message = str(caught.value)
    assert "8 problems" in message
    for expected in (
        "subjet: there is no such key. Nearest: subject",
        "treatments.0: there is no treatment 'compres'. Nearest: compress",
        "treatments.1.repeat.time: there is no such key. Nearest: times",
        "treatments.2.repeat.times: Input should be a valid integer",
        "treatments.3: write a treatment as",
        "treatments.4.compress.level: Input should be 'fast', 'default' or 'max', not 'maximal'",
        "subject: nowhere does not exist",
        "output: recipe.yaml is a file",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty or no mapping"),
        ("- a", "empty or no mapping"),
        ("a: [", "not valid YAML"),
        ("subject: a\nsubject: b", "given twice"),
        ("? [a]\n: b", "not valid YAML"),
        ("subject: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("subject: subject\noutput: out\ntreatments: []", "treatments: Tuple should have at least 1 item"),
        ("subject: subject\noutput: out\ntreatments: repeat", "treatments: Input should be a valid tuple"),
        ("output: out\ntreatments: [repeat]", "subject: is missing"),
        (GOOD + "seed: x", "seed: Input should be a valid integer"),
        (GOOD + "audits: [lenght]", "no treatment of this recipe has an audit 'lenght'. Nearest: length"),
        (GOOD.replace("out\n", "subject/out\n"), "lies inside the subject"),
    ],
)
def test_what_is_wrong_is_named(text, expected):
    with pytest.raises(UsageError, match=r"recipe\.yaml") as caught:
        read_recipe(write(text))
    assert expected in str(caught.value)


def test_yaml_may_merge_mappings():
    text = GOOD.replace("{times: 3}", "{<<: *often, letters: z}").replace("- repeat\n", "- repeat: &often {times: 5}\n")
    recipe = read_recipe(write(text))
    assert recipe.treatments[1].settings == {"times": 5, "letters": "z"}


def test_a_recipe_that_is_not_there():
    with pytest.raises(UsageError, match=r"none\.yaml cannot be read"):
        read_recipe("none.yaml")


def test_a_verb_is_registered_once():
    treatment = read_recipe(write(GOOD)).treatments[0].what
    with pytest.raises(UsageError, match="registered already"):
        register(treatment)
