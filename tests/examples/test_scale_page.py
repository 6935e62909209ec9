"""docs/scale.md: its measured figures are those of the results, and its arithmetic comes to what it says."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")

UNITS = {"GB": 1e9, "MB": 1e6, "s": 1.0, "ms": 1e-3}


def measured():
    rows = re.findall(r"^\| (.*?) \| ([\d.]+) (\w+) \| `(.*?)` \| `(.*?)` \|$", PAGE.read_text(), re.M)
    assert len(rows) == sum(line.startswith("|") for line in PAGE.read_text().splitlines()) - 2
    return rows


@pytest.mark.parametrize(("what", "shown", "unit", "file", "where"), measured() if PAGE.is_file() else [])
def test_a_measured_figure_is_that_of_its_result(what, shown, unit, file, where):
    value = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    for step in where.split("/"):
        value = value[int(step) if isinstance(value, list) else step]
    half_a_digit = 0.5 * 10 ** -len(shown.partition(".")[2])
    assert abs(value / UNITS[unit] - float(shown)) <= half_a_digit * 1.001, (what, value)


def test_the_arithmetic_comes_to_what_it_says(capsys):
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, str(PAGE), "exec"), {})
        said = re.findall(r"^# (.*)$", code, re.M)
        assert capsys.readouterr().out.splitlines() == said
        assert said or "assert" in code


def test_constants_of_the_arithmetic_are_in_the_table():
    table = {float(shown) for _, shown, *_ in measured()}
    text = PAGE.read_text()
    for constant in (
        "2.33",
        "2.20",
        "3.66",
        "465",
        "722",
        "421",
        "640",
        "738",
        "339",
        "0.634",
        "8.18",
        "11.9",
        "88.1",
        "1.10",
    ):
        assert float(constant) in table
        assert constant in "".join(re.findall(r"```python\n(.*?)```", text, re.S))
