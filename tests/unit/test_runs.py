import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs_under_test
from runs_under_test import Config, report_twice, unsendable, work

from netweight.core.engines import in_process, local_processes
from netweight.errors import CorruptBlob, UsageError
from netweight.job import Ledger, map_runs

TWO = functools.partial(local_processes, workers=2)


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


def times_run(traces):
    return {int(path.name): len(path.read_text()) for path in traces.iterdir() if path.name.isdigit()}


def test_results_are_remembered_and_nothing_runs_twice(tmp_path, traces):
    configs = [Config(number, str(traces)) for number in (3, 1, 2, 1)]
    first = list(map_runs(work, configs, ledger=tmp_path / "new" / "ledger", engine=in_process, ordered=True))
    assert [(result.config.number, result.value, result.ok, result.from_ledger) for result in first] == [
        (number, {"square": number**2}, True, False) for number in (3, 1, 2, 1)
    ]
    again = list(map_runs(work, configs[:2], ledger=tmp_path / "new" / "ledger", engine=in_process))
    assert [(result.value["square"], result.from_ledger) for result in again] == [(9, True), (1, True)]
    assert times_run(traces) == {1: 1, 2: 1, 3: 1}


def test_worker_processes_survive_failure_exit_and_death_of_single_runs(tmp_path, traces):
    deeds = ["square", "fail", "die", "square", "exit", "square"]
    configs = [Config(number, str(traces), deed) for number, deed in enumerate(deeds)]
    results = list(map_runs(work, configs, ledger=tmp_path / "ledger", engine=TWO, ordered=True))
    assert [result.config.number for result in results] == list(range(6))
    assert [result.ok for result in results] == [deed == "square" for deed in deeds]
    assert "ValueError: number 1 is unwell" in results[1].error
    assert "killed by signal 9" in results[2].error
    assert "exited with code 5" in results[4].error
    (traces / "mended").touch()
    again = list(map_runs(work, configs[:2], ledger=tmp_path / "ledger", engine=TWO))
    assert [result.ok for result in again] == [True, True]
    assert times_run(traces)[0] == 1


def test_messages_of_a_run_arrive_before_its_outcome_and_those_of_a_dead_worker_too():
    events = []
    runs = local_processes(report_twice, [3, -1, 4], workers=2, on_message=lambda *message: events.append(message))
    for index, outcome in runs:
        assert events.count((index, f"{[3, -1, 4][index]}, step 1")) == 1
        assert outcome.value == {0: 3, 2: 4}.get(index)
        assert (outcome.error is None) == (index != 1)
    assert sorted(events) == [(at, f"{n}, step {step}") for at, n in enumerate([3, -1, 4]) for step in range(2)]
    assert report_twice(5) == 5  # outside a worker messages go nowhere


def test_stopping_early_keeps_what_is_done_and_leaves_no_worker(tmp_path, traces):
    results = map_runs(work, [Config(number, str(traces)) for number in range(4)], ledger=tmp_path / "l", engine=TWO)
    next(results)
    results.close()
    with Ledger(tmp_path / "l") as ledger:
        assert len(ledger.records) == 1


def test_a_program_may_leave_in_the_middle(tmp_path, traces):
    command = [sys.executable, runs_under_test.__file__, str(tmp_path / "ledger"), str(traces), "leave"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert answer.stderr == ""


def test_runs_may_have_processes_of_their_own(tmp_path, traces):
    (result,) = map_runs(work, [Config(1, str(traces), "parent")], ledger=tmp_path / "ledger")
    assert result.ok, result.error


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_a_killed_study_continues_and_leaves_no_worker_behind(tmp_path, traces):
    ledger = tmp_path / "ledger"
    command = [sys.executable, runs_under_test.__file__, str(ledger), str(traces)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    study = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") >= 2)
    workers = children_of(study.pid)
    study.send_signal(signal.SIGKILL)
    _, complaints = study.communicate()
    assert "Traceback" not in complaints  # semaphores of a killed process are cleaned up, with a warning
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    done = ledger.read_bytes().count(b"\n")
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answers = [line.split() for line in finished.stdout.splitlines()]
    assert sorted(int(number) for number, _ in answers) == list(range(6))
    assert [remembered for _, remembered in answers].count("True") == done
    most_lost = len(workers)
    assert sum(times_run(traces).values()) <= 6 + most_lost


def children_of(process):
    """List the direct children of a process, from /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == process:
            found.append(int(status.parent.name))
    return found


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path, traces):
    path = tmp_path / "ledger"
    configs = [Config(number, str(traces)) for number in range(3)]
    list(map_runs(work, configs, ledger=path, engine=in_process))
    whole = path.read_bytes()
    for cut in (1, len(whole.splitlines(keepends=True)[2]) - 1):
        path.write_bytes(whole[:-cut])
        results = list(map_runs(work, configs, ledger=path, engine=in_process))
        assert [result.from_ledger for result in results] == [True, True, False]
        assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("line", [b"nonsense", b"[]", b"{}", b"3", b"\xff"])
def test_a_damaged_ledger_is_refused_and_left_alone(tmp_path, line):
    path = tmp_path / "ledger"
    path.write_bytes(line + b"\n" + b'{"digest": "x"}\n')
    with pytest.raises(CorruptBlob, match=r"Line 1 of the ledger"):
        list(map_runs(work, [Config(1, "")], ledger=path, engine=in_process))
    assert path.read_bytes().startswith(line)


def test_a_ledger_has_one_user_at_a_time(tmp_path):
    with Ledger(tmp_path / "ledger"), pytest.raises(UsageError, match="Another process"):
        Ledger(tmp_path / "ledger")


def test_a_ledger_belongs_to_one_function(tmp_path, traces):
    list(map_runs(work, [Config(1, str(traces))], ledger=tmp_path / "ledger", engine=in_process))
    bound = functools.partial(work)
    assert next(map_runs(bound, [Config(1, str(traces))], ledger=tmp_path / "ledger", engine=in_process)).from_ledger
    with pytest.raises(UsageError, match=r"contains runs of 'work', not of 'unsendable'"):
        list(map_runs(unsendable, [Config(1, str(traces))], ledger=tmp_path / "ledger", engine=in_process))


def test_values_that_cannot_be_kept_fail_their_run(tmp_path, traces):
    config = Config(1, str(traces))
    (result,) = map_runs(unsendable, [config], ledger=tmp_path / "one", engine=TWO)
    assert "cannot be pickled" in result.error
    (result,) = map_runs(unsendable, [config], ledger=tmp_path / "two", engine=in_process)
    assert "cannot be stored in a ledger" in result.error


def test_a_diverged_result_is_kept(tmp_path):
    def diverge(config):
        return math.nan

    (result,) = map_runs(diverge, [1], ledger=tmp_path / "ledger", engine=in_process)
    assert math.isnan(result.value)
    (result,) = map_runs(diverge, [1], ledger=tmp_path / "ledger", engine=in_process)
    assert math.isnan(result.value)
    assert result.from_ledger


def test_mistakes_are_named_before_anything_runs(tmp_path):
    with pytest.raises(UsageError, match="cannot be sent to worker processes"):
        list(map_runs(lambda config: config, [1], ledger=tmp_path / "ledger"))
    with pytest.raises(UsageError, match="at least 1"):
        list(local_processes(work, [1], workers=0))
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        map_runs(work, [math.nan], ledger=tmp_path / "ledger")
    assert list(map_runs(work, [], ledger=tmp_path / "ledger")) == []


def test_a_record_tells_what_was_run(tmp_path, traces):
    config = Config(4, str(traces))
    list(map_runs(work, [config], ledger=tmp_path / "ledger", engine=in_process))
    record = json.loads((tmp_path / "ledger").read_text())
    assert record["config"] == {"number": 4, "traces": str(traces), "deed": "square"}
    assert record["value"] == {"square": 16}
    assert record["error"] is None
    assert record["seconds"] >= 0


@pytest.mark.parametrize("deed", ["exit with zero", "leave with zero"])
def test_a_run_that_ends_its_worker_with_success_has_failed(tmp_path, deed):
    (tmp_path / "traces").mkdir()
    items = [Config(0, str(tmp_path / "traces"), deed), Config(1, str(tmp_path / "traces"), "square")]
    outcomes = dict(local_processes(work, items, workers=1))
    assert "exited with code 0" in outcomes[0].error
    assert outcomes[1].value == {"square": 1}
