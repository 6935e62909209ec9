"""A ledger cut anywhere, as a kill may do it, keeps every record whose line is whole, and goes on."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from netweight.job import Ledger

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(VALUE, max_size=5), st.data())
def test_a_cut_loses_at_most_the_lines_that_it_touches(values, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        records = [{"digest": str(place), "value": value} for place, value in enumerate(values)]
        with Ledger(path) as ledger:
            for record in records:
                ledger.append(record)
            assert list(ledger.records.values()) == records
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        left = whole[:cut].count(b"\n")
        with Ledger(path) as ledger:
            assert list(ledger.records.values()) == records[:left]
            ledger.append({"digest": "new", "value": None})
        with Ledger(path) as ledger:
            assert list(ledger.records.values()) == [*records[:left], {"digest": "new", "value": None}]


@given(st.lists(VALUE, min_size=1, max_size=4))
def test_the_last_record_of_a_digest_counts(values):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        with Ledger(path) as ledger:
            for value in values:
                ledger.append({"digest": "same", "value": value})
        with Ledger(path) as ledger:
            assert ledger.records == {"same": {"digest": "same", "value": values[-1]}}
