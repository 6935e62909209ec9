"""Laws of keys: equal ones are one key, whatever their order; a difference is named where it is, and nowhere else."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from netweight.core.digests import canonical_json
from netweight.job import differences

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5)
NAMES = st.text("abc", min_size=1, max_size=3)
KEYS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


@given(KEYS, KEYS)
def test_nothing_differs_exactly_where_the_json_is_the_same(first, second):
    same = canonical_json(first, allow_nan=True) == canonical_json(second, allow_nan=True)
    assert (differences(first, second) == []) == same
    assert [(path, new, old) for path, old, new in differences(first, second)].__repr__() == (
        differences(second, first).__repr__()
    )


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, LEAVES, min_size=1), min_size=1), st.data())
def test_one_change_is_named_by_its_path(key, data):
    outer = data.draw(st.sampled_from(sorted(key)))
    inner = data.draw(st.sampled_from(sorted(key[outer])))
    other = copy.deepcopy(key)
    other[outer][inner] = "another value"
    assert [found[0] for found in differences(key, other)] == [f"{outer}.{inner}"]
    del other[outer][inner]
    (found,) = differences(key, other)
    assert (found[0], found[2]) == (f"{outer}.{inner}", ...)
