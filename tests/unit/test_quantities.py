import pytest

from netweight.core.quantities import count, duration, many, percent, size


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1_000, "1.00 kB"),
        (999_600, "1.00 MB"),
        (1_260_000_000, "1.26 GB"),
    ],
)
def test_sizes(nbytes, words):
    assert size(nbytes) == words


@pytest.mark.parametrize(("number", "words"), [(9_999, "9,999"), (22_700_000, "22.7 million"), (494e6, "494 million")])
def test_counts(number, words):
    assert count(number) == words


@pytest.mark.parametrize(("seconds", "words"), [(0.004, "0.004 s"), (59, "59 s"), (754, "13 min"), (13_000, "3.6 h")])
def test_durations(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(("share", "words"), [(0.0001, "< 0.1 %"), (0.066, "6.6 %"), (0.354, "35 %"), (1.0, "100 %")])
def test_percents(share, words):
    assert percent(share) == words


def test_a_count_and_its_noun():
    assert [many(1, "file"), many(2, "file"), many(1_200, "copy", "copies")] == ["1 file", "2 files", "1,200 copies"]
