"""Timing: every case once per round, inputs made and results freed outside the clock, the heap given back."""

import ctypes
import subprocess
import sys
import time

import pytest

from netweight_experiments.timing import Case, in_turns, interleave, median_ratio, ratios


def test_every_case_runs_once_per_round_in_changing_order():
    log = []
    cases = [Case(name, lambda given, name=name: log.append((name, given)), lambda: "input") for name in "abcd"]
    samples = interleave(cases, repeats=6, seed=1, warmup=2, again_below=0, steady=0)
    rounds = [log[i : i + 4] for i in range(0, len(log), 4)]
    assert len(rounds) == 8
    assert all(sorted(part) == [(name, "input") for name in "abcd"] for part in rounds)
    assert len({tuple(part) for part in rounds}) > 1
    assert set(samples) == set("abcd")
    assert all(len(sample.wall) == len(sample.cpu) == 6 for sample in samples.values())
    again = []
    interleave(
        [Case(n, lambda _, n=n: again.append((n, "input"))) for n in "abcd"],
        repeats=6,
        seed=1,
        warmup=2,
        again_below=0,
        steady=0,
    )
    assert again == log


def test_only_the_run_is_timed():
    class Slow:
        def __del__(self):
            time.sleep(0.01)

    cases = [Case("free", lambda _: Slow(), lambda: time.sleep(0.01)), Case("wait", lambda _: time.sleep(0.02))]
    samples = interleave(cases, repeats=3, seed=0, steady=0)
    assert min(samples["free"].wall) < 0.01  # the others may have waited for the processor
    assert min(samples["wait"].wall) >= 0.02
    assert max(samples["wait"].cpu) < 0.02


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told to keep memory")
def test_a_kept_heap_keeps_pages_and_is_given_back():
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library is not glibc")

    # In a program of its own: a heap with freed room in it need not grow.
    program = subprocess.run([sys.executable, "-c", KEPT_HEAP], capture_output=True, text=True, timeout=100)
    assert program.returncode == 0, program.stderr


KEPT_HEAP = """
from netweight_experiments.timing import kept_heap

def heap_bytes():
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("[heap]")]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)

with kept_heap() as kept:
    assert kept
    heap = heap_bytes()
    bytearray(256 << 20)
    assert heap_bytes() >= heap + (200 << 20)
before = heap_bytes()
large = bytearray(256 << 20)
assert heap_bytes() < before + (200 << 20)
assert len(large) == 256 << 20
"""


def test_a_short_run_is_preceded_by_one_that_is_not_timed():
    log = []

    def work(_):
        log.append("long")
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    cases = [Case("short", lambda _: log.append("short")), Case("long", work)]
    samples = interleave(cases, repeats=4, seed=0, again_below=0.01, steady=0)
    assert log.count("short") == 1 + 4 * 2
    assert log.count("long") == 1 + 4
    assert {len(sample.wall) for sample in samples.values()} == {4}


def test_a_short_run_is_repeated_until_it_is_steady():
    log = []

    def work(_):
        log.append("long")
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass

    cases = [Case("short", lambda _: log.append("short")), Case("long", work)]
    samples = interleave(cases, repeats=3, seed=0, warmup=1, again_below=0, steady=0.02)
    assert log.count("short") == 1 + 3 * 200
    assert log.count("long") == 1 + 3
    assert {len(sample.wall) for sample in samples.values()} == {3}


def test_work_takes_turns_after_a_round_to_warm_up():
    done = []
    times = in_turns({name: lambda name=name: done.append(name) for name in "ab"}, 2)
    assert sorted("".join(done[:2])) == sorted("".join(done[2:4])) == ["a", "b"]
    assert len(done) == 6
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2}
    assert ratios({"a": [4.0, 9.0], "b": [2.0, 3.0]}, "a", "b") == [2.0, 3.0]
    assert median_ratio({"a": [4.0, 9.0], "b": [2.0, 3.0]}, "a", "b") == 2.5
