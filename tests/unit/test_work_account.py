"""The account of a command's stored work: what an earlier call had stored, and what this one stores."""

import pytest
import torch

from netweight.core.engines import in_process
from netweight.core.work_account import work_account
from netweight.job import Job


def square(number):
    return number * number


def worked(folder, numbers):
    with Job.open(folder) as job:
        values = [result.value for result in job.map(square, numbers, name="squares", engine=in_process)]
        if job.recorded("notes", "first") is None:
            job.record("notes", {"text": "kept"}, key="first")
        assert job.recorded("notes", "first") == {"text": "kept"}
        job.load()
        job.save({}, {"weights": torch.ones(2)})
        job.load()
    return values


def test_results_of_an_earlier_call_are_counted_and_own_ones_are_not(tmp_path):
    with work_account() as account:
        assert worked(tmp_path / "job", [1, 2]) == [1, 4]
    assert account.sentences() == []
    assert account.folders == [tmp_path / "job"]
    with work_account() as account:
        assert worked(tmp_path / "job", [1, 2, 3]) == [1, 4, 9]
    assert account.sentences() == ["2 of 3 squares", "1 note", "a checkpoint"]


def test_failures_are_tried_again_and_reading_is_no_continuation(tmp_path):
    def picky(number):
        if number == 2:
            raise ValueError(number)
        return number

    for left in ([], ["1 of 2 runs"]):
        with work_account() as account, Job.open(tmp_path / "job") as job:
            list(job.map(picky, [1, 2], engine=in_process))
        assert account.sentences() == left
    with work_account() as account, Job.open(tmp_path / "job", reading=True) as job:
        assert job.recorded("runs", 1)["value"] == 1
        assert job.load() is None
    assert account.sentences() == []


def test_an_account_ends_with_its_block(tmp_path):
    with pytest.raises(KeyboardInterrupt), work_account() as account:
        raise KeyboardInterrupt
    worked(tmp_path / "job", [1])
    assert account.folders == []
