"""The grammar against an independent matcher, and the algebra of sets of neurons against Python's sets."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netweight import Select, Units
from netweight.errors import NameNotFound

WORDS = st.sampled_from(["a", "b", "ab", "ba", "aab", "0", "1"])
NAME = st.lists(WORDS, min_size=1, max_size=5).map(".".join)
SEGMENT = st.one_of(WORDS, st.just("*"), st.just("**"), st.sampled_from(["a*", "*b", "a*b", "{a,b}", "{ab,0}*"]))
PATTERN = st.lists(SEGMENT, min_size=1, max_size=4).map(".".join)


def segment_matches(pattern: str, segment: str) -> bool:
    """Match inside one segment, character by character."""
    if not pattern:
        return not segment
    if pattern[0] == "*":
        return any(segment_matches(pattern[1:], segment[cut:]) for cut in range(len(segment) + 1))
    return segment[:1] == pattern[0] and segment_matches(pattern[1:], segment[1:])


def path_matches(pattern: list[str], segments: list[str]) -> bool:
    """Match segment by segment."""
    if not pattern:
        return not segments
    if pattern[0] == "**":
        return any(path_matches(pattern[1:], segments[cut:]) for cut in range(len(segments) + 1))
    return bool(segments) and segment_matches(pattern[0], segments[0]) and path_matches(pattern[1:], segments[1:])


def oracle(pattern: str, name: str) -> bool:
    """Match by recursion; braces are expanded first, leftmost first (the generated ones do not nest)."""
    braces = re.search(r"\{(.*?)\}", pattern)
    if braces:
        return any(oracle(pattern.replace(braces[0], choice, 1), name) for choice in braces[1].split(","))
    return path_matches(pattern.split("."), name.split("."))


@given(st.lists(PATTERN, max_size=3), st.lists(PATTERN, max_size=2), st.lists(NAME, max_size=8, unique=True))
def test_select_agrees_with_the_oracle(wanted, unwanted, names):
    if not wanted and not unwanted:
        return
    patterns = [*wanted, *("!" + pattern for pattern in unwanted)]
    if any(not any(oracle(pattern.lstrip("!"), name) for name in names) for pattern in patterns):
        with pytest.raises(NameNotFound):
            Select(*patterns).keys(names)
        return
    expected = [
        name
        for name in names
        if (not wanted or any(oracle(pattern, name) for pattern in wanted))
        and not any(oracle(pattern, name) for pattern in unwanted)
    ]
    assert Select(*patterns).keys(names) == expected


SETS = st.dictionaries(NAME, st.sets(st.integers(0, 9)), max_size=4)


def pairs(sets):
    return {(name, index) for name, found in sets.items() for index in found}


@given(SETS, SETS)
def test_units_are_sets_of_pairs(left, right):
    one, other = (Units({name: sorted(found) for name, found in sets.items()}) for sets in (left, right))
    assert set(one) == pairs(left)
    assert len(one) == len(pairs(left))
    assert set(one | other) == pairs(left) | pairs(right)
    assert set(one & other) == pairs(left) & pairs(right)
    assert set(one - other) == pairs(left) - pairs(right)
    assert (one == other) == (pairs(left) == pairs(right))
    assert (one | other) - other == one - other
    assert hash(one | other) == hash(other | one)


@given(SETS)
def test_units_survive_json_and_tensors(sets):
    units = Units({name: sorted(found) for name, found in sets.items()})
    assert Units.from_json(units.to_json()) == units
    assert Units(dict(units.items())) == units
