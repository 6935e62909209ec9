import json
from pathlib import Path

import pytest
import toy_treatment
from click.testing import CliRunner

from netweight import cli
from netweight.core.engines import in_process
from netweight.errors import UsageError
from netweight.job import Job
from netweight.registry import Attack, Result, register, unregister
from netweight.report.finding import Finding, Section
from netweight.settings import Settings

RECIPE = """
subject: subject
treatments:
  - repeat
output: out
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject").write_text("abc")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    toy_treatment.CALLS.clear()

    def invoke(*arguments):
        return CliRunner().invoke(cli.netweight, ["run", "recipe.yaml", *arguments])

    with toy_treatment.registered():
        yield invoke


def test_a_plan_does_nothing(call, tmp_path):
    answer = call("--plan")
    assert answer.exit_code == 0
    assert answer.stdout == (
        "subject → out\n1. repeat: all by default\n   audits: length, start\n"
        "   time: unknown: no earlier run of this recipe recorded it for repeat\n"
        "Disk: at most 3 bytes for models (the subject has 3 bytes), plus the files of audits and attacks.\n"
    )
    assert toy_treatment.CALLS == []
    assert not (tmp_path / "out").exists()
    assert json.loads(call("--plan", "--json", "--output", "there").stdout)["plan"]["output"] == "there"


def test_a_run_shows_findings_and_is_resumed(call, tmp_path):
    answer = call()
    assert answer.exit_code == 0
    assert "length                  6 letters  met" in answer.stdout
    assert (tmp_path / "out" / "report.html").is_file()
    assert "Continued" not in answer.stdout
    used = "step 1, repeat (the model, the audit length, the audit start)"
    again = call().stdout
    assert f"Continued an earlier run: {used}." in again
    assert "done by an earlier run" in again
    assert f"Continuing an earlier run: {used}." in call().stderr
    data = json.loads(call("--json").stdout)
    assert data["continued"] == [used]
    assert data["steps"][0]["from_ledger"] is True
    assert data["steps"][0]["findings"]["length"][0]["value"] == 6


def test_a_plan_says_what_an_earlier_run_did(call):
    call()
    assert "   done by an earlier run\n" in call("--plan").stdout
    assert (
        json.loads(call("--plan", "--json").stdout)["plan"]["steps"][0] | {"finished": True, "to_audit": []}
        == (json.loads(call("--plan", "--json").stdout)["plan"]["steps"][0])
    )


def test_the_schema_is_printed_without_a_recipe():
    with toy_treatment.registered():
        answer = CliRunner().invoke(cli.netweight, ["run", "--schema"])
    assert answer.exit_code == 0
    assert {"compress", "repeat"} <= json.loads(answer.stdout)["$defs"].keys()


def test_a_failed_finding_gives_exit_code_1(call, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("- repeat", "- repeat: {letters: z}"))
    answer = call()
    assert answer.exit_code == 1
    assert "MISSED" in answer.stdout
    assert call("--json").exit_code == 1


def test_a_treatment_without_its_audits_is_called_out(call, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE + "audits: []\n")
    for arguments in (["--plan"], []):
        assert "audits left out: length, start" in call(*arguments).stdout


def failing(target, settings, progress):
    raise UsageError("This attack cannot be made.")


@pytest.mark.parametrize("again", [False, True])
def test_the_report_of_a_run_that_failed_is_not_to_publish(call, tmp_path, again):
    """The attack that was asked for could not be made, so the targets that were met before are no verdict."""
    if again:  # a complete run of another recipe wrote a page before
        assert call().exit_code == 0
    (tmp_path / "recipe.yaml").write_text(RECIPE + "attacks:\n  - harm\n")
    harm = Attack("harm", Settings, attack=failing, summary="Fail.", title="Harm")
    register(harm)
    try:
        assert call().exit_code == 2
        answer = CliRunner().invoke(cli.netweight, ["report", "out"])
    finally:
        unregister(harm.name)
    assert answer.exit_code == 1
    assert answer.stdout.rstrip().endswith(
        "Do not publish: there is no verdict, because step 2, harm could not be measured "
        "(the run ended before this step)."
    )


def stopped_once(target, settings, progress):
    """An attack of three runs; the first call ends before the third, as one that is killed."""
    first = not (target.output / "harm").exists()
    with Job.open(target.output / "harm") as job:
        for done in job.map(str, [1, 2, 3], engine=in_process):
            if first and done.config == 2:
                raise KeyboardInterrupt
    return Result(sections=[Section("Harm", [Finding("runs", 3)])])


def test_a_run_says_what_it_used_of_an_attack_that_was_stopped(call, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE + "attacks:\n  - harm\n")
    harm = Attack("harm", Settings, attack=stopped_once, summary="Stop.", title="Harm")
    register(harm)
    try:
        assert "Continuing" not in call().stderr
        step = "step 1, repeat (the model, the audit length, the audit start)"
        for used in ("2 of 3 runs", "the result"):
            answer = call("--json")
            assert answer.exit_code == 0, answer.output
            assert json.loads(answer.stdout)["continued"] == [step, f"step 2, attack harm ({used})"]
            ledger = f"Continuing an earlier run with the runs in {Path('out', 'harm', 'runs.jsonl')}."
            assert (ledger in answer.stderr) == (used != "the result")
            known = f"{step}; step 2, attack harm (the result)" if used == "the result" else step
            assert answer.stderr.startswith(f"Continuing an earlier run: {known}.")
    finally:
        unregister(harm.name)


def test_problems_are_usage_errors(call):
    answer = call("--subject", "elsewhere")
    assert answer.exit_code == 2
    assert "subject: elsewhere does not exist" in answer.stderr
