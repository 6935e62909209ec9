"""Work on threads in the order of its tasks."""

import threading

import pytest

from netweight.core.threads import in_order


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_the_order_of_the_tasks(threads):
    assert list(in_order(lambda number: number * number, range(50), threads)) == [number**2 for number in range(50)]


def test_few_tasks_are_taken_ahead():
    taken = []
    results = in_order(lambda number: number, (taken.append(number) or number for number in range(100)), 2)
    assert next(results) == 0
    assert len(taken) == 5
    results.close()


def test_a_failed_task_is_raised_in_its_turn():
    results = in_order(lambda number: 6 // number, [3, 2, 0, 1], 2)
    assert [next(results), next(results)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_leaving_in_the_middle_does_not_wait_for_what_runs():
    running, may_end = threading.Event(), threading.Event()

    def work(number):
        if number:
            running.set()
            assert may_end.wait(60)
        return number

    results = in_order(work, range(20), 2)
    assert next(results) == 0
    assert running.wait(60)
    leaving = threading.Thread(target=results.close)
    leaving.start()
    leaving.join(30)
    left = not leaving.is_alive()
    may_end.set()
    leaving.join()
    assert left
