"""The table of the papers' systems: every one that the papers' tables compare is in it."""

import re
from pathlib import Path

import pytest

from netweight_experiments.tables.registry import published

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")

# Tables whose rows are systems; in the first of weights2weights' a row is an attribute and a system.
OF_SYSTEMS = (
    "hyperfl-table1", "hyperfl-table3", "hyperfl-table4", "hyperfl-table5", "neuzip-table1", "neuzip-table2",
    "neuzip-table3-decoder", "neuzip-table3-encdec", "repnoise-table1", "repnoise-table2", "w2w-table2-4", "w2w-table5",
)  # fmt: skip


def systems():
    for table in OF_SYSTEMS:
        yield from (row.name for row in published(table).rows)
    yield from (row.name.split(", ", 1)[1] for row in published("w2w-table1").rows)


@pytest.mark.parametrize("system", sorted(set(systems())))
def test_every_system_has_a_row(system):
    section = PAGE.read_text().split("## The papers' systems")[1].split("\n## ")[0]
    words = set(re.findall(r"[\w^-]+", section.lower()))
    assert set(re.findall(r"[\w^-]+", system.lower())) <= words
