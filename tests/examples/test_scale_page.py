"""docs/scale.md: its arithmetic comes to what it says, from figures that are tied to results (scripts/claims.py)."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")
CONSTANTS = "2.33 2.20 3.66 465 722 421 640 738 339 0.634 8.18 11.9".split()


def test_the_arithmetic_comes_to_what_it_says(capsys):
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, str(PAGE), "exec"), {})
        said = re.findall(r"^# (.*)$", code, re.M)
        assert capsys.readouterr().out.splitlines() == said
        assert said or "assert" in code


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_constant_of_the_arithmetic_is_tied_to_a_result(constant):
    text = PAGE.read_text()
    assert re.search(rf"(?<![\d.]){re.escape(constant)}(?!\d)", "".join(re.findall(r"```python\n(.*?)```", text, re.S)))
    assert re.search(rf"^{re.escape(constant)} = `", text, re.M)
    assert re.search(rf"^\| .* \| {re.escape(constant)} \w+ \|$", text, re.M)


def test_every_row_of_the_table_is_tied():
    text = PAGE.read_text()
    rows = re.findall(r"^\| .* \| ([\d.]+) \w+ \|$", text, re.M)
    assert len(rows) == 13
    assert set(rows) <= set(re.findall(r"^([\d.]+) = `", text, re.M))
