"""Derived seeds: different paths, different seeds; and always in range."""

from hypothesis import given
from hypothesis import strategies as st

from netweight.core.seeds import derive

PATH = st.lists(st.text(max_size=4) | st.integers(), max_size=4)


@given(st.integers(), PATH, st.integers(), PATH)
def test_seeds_are_in_range_and_equal_only_for_equal_paths(seed, path, other_seed, other_path):
    derived = derive(seed, *path)
    assert 0 <= derived < 2**63
    same = (seed, path) == (other_seed, other_path)
    assert (derived == derive(other_seed, *other_path)) == same


@given(st.integers(), PATH, st.text(max_size=4) | st.integers())
def test_a_longer_path_is_another_path(seed, path, part):
    assert derive(seed, *path) != derive(seed, *path, part)
