"""docs/scale.md: its code runs; its arithmetic is that of results (scripts/figures.py)."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def test_groups_of_updates_have_the_average_of_all():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert "assert" in code
    exec(compile(code, str(PAGE), "exec"), {})


@pytest.mark.parametrize("section", ["405 billion", "70 billion", "10,000 sites", "A million adapters"])
def test_every_estimate_is_tied_to_a_result(section):
    (part,) = (each for each in PAGE.read_text().split("\n## ")[1:] if section in each.splitlines()[0])
    assert len(re.findall(r"^ *\w+=.*value\(.+[.]json", part, re.M)) >= 3
