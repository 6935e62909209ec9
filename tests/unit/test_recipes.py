import json
import pickle
from pathlib import Path

import pytest
import toy_treatment
import warm

from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.recipes import Plan, StepState, read_recipe, run
from netweight.registry import register
from netweight.report.report import read_report

KILLED = Path(toy_treatment.__file__).with_name("killed_recipe.py")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject").write_text("abc")
    toy_treatment.CALLS.clear()
    with toy_treatment.registered():
        yield tmp_path


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


TITLES = ["1. repeat: Length", "1. repeat: Start", "2. repeat: Length", "2. repeat: Start"]


def test_treatments_run_in_order_with_their_audits_and_end_in_a_report(here):
    done = run(Plan.of(read_recipe(write(GOOD))))
    assert [step.path.read_text() for step in done] == ["abc" * 2, "abc" * 6]
    assert [list(step.findings) for step in done] == [["length", "start"]] * 2
    assert not any(step.failed or step.from_ledger for step in done)
    report = read_report("out")
    assert [section.title for section in report.sections] == TITLES
    assert [section.missing_audits for section in report.sections] == [()] * 4
    assert report.sections[0].intro.startswith("repeat wrote out/01-repeat-")
    assert [section.tables[0].rows for section in report.sections[::2]] == [((3, 6),), ((6, 18),)]
    assert (here / "subject").read_text() == "abc"


def test_a_second_run_does_nothing_twice_and_a_changed_setting_only_what_follows():
    first = run(Plan.of(read_recipe(write(GOOD))))
    toy_treatment.CALLS.clear()
    again = run(Plan.of(read_recipe(write(GOOD))))
    assert toy_treatment.CALLS == []
    assert [step.from_ledger for step in again] == [True, True]
    assert [step.sections for step in again] == [step.sections for step in first]  # with their tables
    changed = run(Plan.of(read_recipe(write(GOOD.replace("times: 3", "times: 4")))))
    assert toy_treatment.CALLS == ["repeat", "length", "start"]
    assert [step.from_ledger for step in changed] == [True, False]
    assert changed[1].path != first[1].path


def test_the_plan_tells_what_an_earlier_run_did_and_writes_nothing(here):
    plan = Plan.of(read_recipe(write(GOOD)))
    assert plan.states() == [StepState(False, ("length", "start"))] * 2
    assert not (here / "out").exists()
    run(plan)
    assert plan.states() == [StepState(True, ())] * 2
    ledger = here / "out" / "ledger.jsonl"
    torn = ledger.read_bytes() + b'{"digest": "cut o'  # as a kill leaves it
    ledger.write_bytes(torn)
    assert plan.states() == [StepState(True, ())] * 2
    assert ledger.read_bytes() == torn
    changed = Plan.of(read_recipe(write(GOOD.replace("times: 3", "times: 4"))))
    assert changed.states() == [StepState(True, ()), StepState(False, ("length", "start"))]
    reseeded = Plan.of(read_recipe(write(GOOD + "seed: 1\n")))
    assert reseeded.states() == [StepState(True, ("length", "start"))] * 2
    run(plan)[0].path.unlink()
    assert [each.finished for each in plan.states()] == [False, True]


def test_the_content_of_what_settings_lead_to_makes_another_step(here):
    (here / "more").write_text("x")
    for name in ("rows", "inner"):
        (here / name).write_text("x")
    recipe = write(
        GOOD.replace("{times: 3}", "{times: 3, more: more, rows: ['hub:a:train', rows], inner: {file: inner}}")
    )
    (here / "beside").write_text("1")  # the toy's settings lead to it without naming it
    run(Plan.of(read_recipe(recipe)))
    assert [each.finished for each in Plan.of(read_recipe(recipe)).states()] == [True, True]
    for name in ("more", "beside", "rows", "inner"):
        before = (here / name).read_text()
        (here / name).write_text("y")
        assert [each.finished for each in Plan.of(read_recipe(recipe)).states()] == [True, False]
        (here / name).write_text(before)


def test_what_a_treatment_finds_wrong_is_said_before_any_work(here):
    with pytest.raises(UsageError, match=r"treatments\.1\.repeat: Nothing is repeated 13 times"):
        read_recipe(write(GOOD.replace("times: 3", "times: 13")))
    (here / "subject").write_text("")
    with pytest.raises(UsageError, match=r"treatments\.0\.repeat: There is nothing in subject"):
        read_recipe(write(GOOD))


def test_problems_of_files_are_told_beside_others():
    text = GOOD.replace("times: 3", "times: 13").replace("subject: subject", "subject: nowhere") + "audits: [lenght]\n"
    with pytest.raises(UsageError, match="3 problems") as caught:
        read_recipe(write(text))
    assert "Nothing is repeated 13 times" in str(caught.value)


def test_treatments_follow_what_they_take():
    with pytest.raises(UsageError, match=r"treatments\.1\.space-sample: needs a space, .* before it produces a model"):
        read_recipe(write(GOOD.replace("repeat: {times: 3}", "space-sample")))


def test_a_run_that_is_killed_goes_on_where_it_was(here):
    """Killed in each treatment and each audit in turn; what was finished before is not done again."""
    answer = warm.run(KILLED, write(GOOD), "out")
    assert answer.returncode == 0, answer.stderr
    calls = toy_treatment.ALL_MOMENTS
    assert [line.split() for line in answer.stdout.splitlines()] == [calls[moment:] for moment in range(len(calls))]
    assert [section.title for section in read_report("out").sections] == TITLES


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


@pytest.mark.parametrize("suffix", ["part", "work"])
def test_a_run_killed_while_a_result_was_put_in_its_place_leaves_nothing_beside_it(here, suffix):
    """The result is there and without a record, and the job that made it had not removed itself."""
    made = run(Plan.of(read_recipe(write(GOOD))))[0].path
    (here / "out" / "ledger.jsonl").unlink()
    job = made.with_name(f".{made.name}.netweight-{suffix}")
    job.mkdir()
    (job / "job.lock").touch()
    (job / "repeat.json").write_text("{}")
    (job / "publishing.json").write_text(json.dumps({"version": 1, "tree": 1, "target": f"../{made.name}"}))
    run(Plan.of(read_recipe("recipe.yaml")))
    assert not job.exists()
    assert made.read_text() == "abcabc"


def test_a_result_changed_by_another_hand_is_refused():
    done = run(Plan.of(read_recipe(write(GOOD))))
    done[0].path.write_text("no longer what was audited")
    with pytest.raises(CorruptBlob, match=r"01-repeat-.* was changed after the run had written it"):
        run(Plan.of(read_recipe("recipe.yaml")))


def test_a_folder_is_a_subject_and_a_failed_finding_is_told(here):
    plan = Plan.of(read_recipe(write(GOOD.replace("- repeat\n", "- repeat: {letters: z}\n"))))
    done = run(plan)
    assert done[0].failed
    assert not done[1].failed


def test_audits_left_out_are_shown(here):
    done = run(Plan.of(read_recipe(write(GOOD + "audits: [start]\n"))))
    assert [step.step.left_out for step in done] == [("length",), ("length",)]
    assert read_report("out").sections[0].missing_audits == ("length",)
    assert "length" in (here / "out" / "report.html").read_text()


def test_the_plan_is_json():
    plan = Plan.of(read_recipe(write(GOOD), output="elsewhere")).to_json()
    assert json.loads(json.dumps(plan))["steps"][1] == {
        "treatment": "repeat",
        "settings": {"times": 3, "letters": "", "more": None, "rows": [], "inner": {"file": None}},
        "audits": ["length", "start"],
        "left_out": [],
        "tested": {},
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
        "treatments.2.repeat.times: must be an integer",
        "treatments.3: write a treatment as",
        "treatments.4.compress.level: must be 'fast', 'default', 'high' or 'max', not 'maximal'",
        "subject: nowhere does not exist",
        "output: recipe.yaml is a file",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty or not a mapping"),
        ("- a", "empty or not a mapping"),
        ("a: [", "not valid YAML"),
        ("subject: a\nsubject: b", "given twice"),
        ("? [a]\n: b", "not valid YAML"),
        ("subject: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("subject: subject\noutput: out\ntreatments: []", "treatments: must have at least 1 entry, not []"),
        ("subject: subject\noutput: out\ntreatments: repeat", "treatments: must be a list"),
        ("output: out\ntreatments: [repeat]", "subject: is missing"),
        (GOOD + "seed: x", "seed: must be an integer"),
        (GOOD + "audits: [lenght]", "no treatment of this recipe has an audit 'lenght'. Nearest: length"),
        (GOOD.replace("out\n", "subject/out\n"), "is inside the subject"),
    ],
)
def test_what_is_wrong_is_named(text, expected):
    with pytest.raises(UsageError, match=r"recipe\.yaml") as caught:
        read_recipe(write(text))
    assert expected in str(caught.value)


def test_yaml_may_merge_mappings():
    text = GOOD.replace("{times: 3}", "{<<: *often, letters: z}").replace("- repeat\n", "- repeat: &often {times: 5}\n")
    recipe = read_recipe(write(text))
    assert recipe.treatments[1].values == {
        "times": 5,
        "letters": "z",
        "more": None,
        "rows": [],
        "inner": {"file": None},
    }


def test_a_recipe_that_is_not_there():
    with pytest.raises(UsageError, match=r"none\.yaml could not be read"):
        read_recipe("none.yaml")


def test_a_verb_is_registered_once():
    treatment = read_recipe(write(GOOD)).treatments[0].registration
    with pytest.raises(UsageError, match="registered already"):
        register(treatment)


CHAPTERS = """
title: Both
output: out
chapters:
  once:
    title: Once
    question: How long is it?
    subject: subject
    treatments: [repeat]
  thrice:
    title: Three times
    question: How long is it?
    intro: Thrice.
    subject: subject
    seed: 4
    treatments:
      - repeat: {times: 3, letters: z}
"""


def test_chapters_are_recipes_of_one_report(here):
    plan = Plan.of(read_recipe(write(CHAPTERS)))
    said = []
    done = run(plan, command="netweight run recipe.yaml", say=said.append)
    assert [(step.chapter, step.path.parent.name, step.path.read_text()) for step in done] == [
        ("once", "once", "abcabc"), ("thrice", "thrice", "abcabcabcz")
    ]  # fmt: skip
    assert said == [
        "1 of 2, Once.", "  repeat: It has 6 letters.", "2 of 2, Three times.", "  repeat: It has 10 letters."
    ]  # fmt: skip
    report = read_report("out")
    assert report.title == "Both"
    assert [chapter.command for chapter in report.chapters] == [
        "netweight run recipe.yaml --only once", "netweight run recipe.yaml --only thrice"
    ]  # fmt: skip
    assert [chapter.outcome for chapter in report.chapters] == ["holds", "broken"]
    assert report.chapters[1].verdict == "The target is missed: length is 10 letters (target: 9)."
    assert [section.title for section in report.sections[2:]] == ["thrice, step 1: Length", "thrice, step 1: Start"]
    assert report.provenance.seeds == (0, 4)
    assert all(step.from_ledger for step in run(plan))
    assert list(plan.to_json(states=True)["chapters"]) == ["once", "thrice"]


def test_chapters_at_once_make_the_report_that_they_make_in_turn(here):
    in_turn = run(Plan.of(read_recipe(write(CHAPTERS))))
    plan = Plan.of(read_recipe(write(CHAPTERS.replace("output: out", "output: there"))))
    said = []
    at_once = run(plan, jobs=2, say=said.append)
    assert toy_treatment.CALLS == ["repeat", "length", "start"] * 2  # all in turn
    assert sorted(said) == ["once, repeat: It has 6 letters.", "thrice, repeat: It has 10 letters."]
    assert [(step.chapter, step.subject, step.sections) for step in at_once] == [
        (step.chapter, step.subject, step.sections) for step in in_turn
    ]
    assert read_report("there").chapters == read_report("out").chapters
    (chosen,) = plan.chapters[0].recipe.treatments
    again = pickle.loads(pickle.dumps(chosen))
    assert (again, again.settings.model_fields_set) == (chosen, chosen.settings.model_fields_set)
    assert all(step.from_ledger for step in run(plan, jobs=2))
    at_once[0].path.write_text("other")
    with pytest.raises(CorruptBlob, match="was changed after the run had written it"):
        run(plan, jobs=2)


def test_some_chapters_and_what_is_wrong_with_them():
    (only,) = read_recipe(write(CHAPTERS), only=["thrice"]).chapters
    assert only.seed == 4
    with pytest.raises(NameNotFound, match=r"no chapter 'trice'. Nearest: thrice"):
        read_recipe("recipe.yaml", only=["trice"])
    with pytest.raises(UsageError, match=r"chapters\.thrice\.treatments\.0\.repeat\.times: must be"):
        read_recipe(write(CHAPTERS.replace("times: 3", "times: many")))
    with pytest.raises(UsageError, match=r"chapters\.once\.question: is missing"):
        read_recipe(write(CHAPTERS.replace("    question: How long is it?\n", "", 1)))
    with pytest.raises(UsageError, match=r"chapters\.once: a chapter must be a mapping"):
        read_recipe(write("title: Both\noutput: out\nchapters: {once: 3}"))
