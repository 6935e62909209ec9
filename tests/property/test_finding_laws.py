import json

from hypothesis import given
from hypothesis import strategies as st

from netweight.report import Finding

numbers = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(width=64))
values = st.recursive(
    st.one_of(st.none(), st.text(max_size=5), numbers),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
bounds = st.floats(allow_nan=False)
ranges = st.tuples(bounds, bounds).map(sorted).map(tuple)


@given(
    value=st.none() | numbers,
    ci95=st.none() | ranges,
    target=st.none() | bounds | ranges,
    baseline=st.none() | numbers,
    better=st.sampled_from([None, "higher", "lower"]),
    seeds=st.lists(st.integers(0, 2**63)),
    detail=st.dictionaries(st.text(max_size=5), values, max_size=3),
)
def test_json_both_ways_loses_nothing(value, ci95, target, baseline, better, seeds, detail):
    finding = Finding(
        "x", value, ci95=ci95, target=target, baseline=baseline, better=better, seeds=tuple(seeds), detail=detail
    )
    text = json.dumps(finding.to_json(), allow_nan=False)
    again = Finding.from_json(json.loads(text))
    assert repr(again) == repr(finding)  # repr, since NaN equals nothing
    assert again.passed is finding.passed
