"""Sweeps: every setting on every subject, in worker processes or here, remembered, checked before anything runs."""

import functools
import json

import pytest

from netweight.attacks.finetuning.attack import run_attack
from netweight.attacks.finetuning.settings import grid
from netweight.attacks.finetuning.subject import Goal
from netweight.attacks.finetuning.sweep import SubjectName, make_subject, sweep
from netweight.core.engines import in_process, local_processes
from netweight.errors import UsageError

BASE = SubjectName("undefended", "attacked_models:subject")
HARDER = [SubjectName("harder", "attacked_models:subject", {"weight_scale": 0.05, "seed": s}, s) for s in (1, 2)]
SETTINGS = grid(lr=(3e-3, 1e-2), samples=60, epochs=6, batch_size=12, check_every=5, seed=(0, 1))
GOAL = Goal(0.9)
here = functools.partial(sweep, engine=in_process)


def test_every_setting_meets_every_subject_and_nothing_runs_twice(tmp_path):
    ledger = tmp_path / "attacks.jsonl"
    first = here([BASE, *HARDER], SETTINGS, GOAL, folder=tmp_path)
    assert len(first.runs) == 12
    assert not first.failures
    assert [run.defense_seed for run in first.of("harder")] == [1] * 4 + [2] * 4
    assert [run.result.settings for run in first.of("undefended")] == SETTINGS
    direct = run_attack(make_subject(BASE.factory, {}), SETTINGS[2], GOAL)
    assert first.of("undefended")[2].result == direct
    size = ledger.stat().st_size
    again = here([BASE, *HARDER], SETTINGS, GOAL, folder=tmp_path)
    assert again.runs == first.runs
    assert ledger.stat().st_size == size
    more = here([BASE], [*SETTINGS, *grid(lr=1e-2, samples=30, batch_size=12)], GOAL, folder=tmp_path)
    assert len(more.runs) == 5
    assert len(ledger.read_text().splitlines()) == 13
    assert "digest" in json.loads(ledger.read_text().splitlines()[0])["config"]
    with pytest.raises(UsageError, match=r"no runs on 'nobody'.*harder, undefended"):
        first.of("nobody")


def test_worker_processes_give_the_same_and_a_fickle_factory_is_found_out(tmp_path):
    fickle = SubjectName("fickle", "attacked_models:different_every_time")
    one = functools.partial(local_processes, workers=1)
    apart = sweep([BASE, fickle], SETTINGS[:1], GOAL, folder=tmp_path / "a", engine=one)
    same = here([BASE], SETTINGS[:1], GOAL, folder=tmp_path / "b")
    assert apart.runs[0].result.steps == same.runs[0].result.steps
    assert apart.runs[0].digest == same.runs[0].digest
    assert len(apart.runs) == 1
    assert "made another subject" in apart.failures[0][2]


def test_domains_that_a_subject_lacks_are_left_out_for_it(tmp_path):
    settings = grid(lr=1e-2, samples=12, batch_size=12, domain=("harmful", "new", "other"))
    found = here([BASE], settings, GOAL, folder=tmp_path)
    assert [run.result.settings.domain for run in found.runs] == ["harmful", "new"]
    assert len(found.of("undefended", domain="new")) == 1
    with pytest.raises(
        UsageError, match=r"'undefended' does not have the data on which the attacks train: other.*harmful, new"
    ):
        here([BASE], grid(domain="other"), GOAL, folder=tmp_path)
    other = [settings[0].replace(template="question"), settings[0].replace(rows="copied")]  # no such format, no mark
    assert here([BASE], [*other, *settings[:1]], GOAL, folder=tmp_path).runs == found.runs[:1]


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path):
    broken = SubjectName("broken", "attacked_models:broken_subject")
    found = here([broken, BASE], SETTINGS[:1], GOAL, folder=tmp_path)
    assert len(found.runs) == 1
    assert found.failures == (("broken", SETTINGS[0].label, "ValueError: the judge is asleep"),)


def test_bad_plans_are_refused_before_any_attack(tmp_path):
    ledger = tmp_path / "attacks.jsonl"
    with pytest.raises(UsageError, match="at least one subject and one attack"):
        here([], SETTINGS, GOAL, folder=tmp_path)
    with pytest.raises(UsageError, match=r"'attacked_models:nothing' cannot be imported.*has no 'nothing'"):
        here([SubjectName("x", "attacked_models:nothing")], SETTINGS, GOAL, folder=tmp_path)
    with pytest.raises(UsageError, match="returns a list, not a Subject"):
        here(
            [SubjectName("x", "attacked_models:cipher", {"shift": 1, "first": 1, "last": 5})],
            SETTINGS,
            GOAL,
            folder=tmp_path,
        )
    with pytest.raises(UsageError, match="asks for 1,000 samples"):
        here([BASE], grid(), GOAL, folder=tmp_path)
    assert not ledger.exists()
