"""docs/performance.md: made by a script from results that are in the repository, and never edited by hand."""

import re
from pathlib import Path

import pytest

from netweight_experiments.benchmarks.compress import performance_page
from netweight_experiments.benchmarks.compress.codec import TARGETS, read_result

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="outside a source tree")


RESULTS = ROOT / performance_page.RESULTS


def test_the_page_is_what_the_script_makes_of_the_result_that_it_names():
    name = re.search(r"from benchmarks/results/(\S+);", PAGE.read_text())[1]
    assert performance_page.page(read_result(RESULTS / name), name) == PAGE.read_text()


def test_every_target_is_on_the_page_with_its_verdict():
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.read_text().splitlines()}
    for target in TARGETS:
        assert re.search(r"\| (met|missed|not measured) \|$", lines[target.name])


def test_tables_of_the_page_are_whole():
    """Every line of a table has as many cells as the one before it, and no cell breaks the line."""
    columns = None
    for line in PAGE.read_text().splitlines():
        here = line.count("|") if line.startswith("|") else None
        assert columns is None or here is None or here == columns, line
        columns = here


def test_the_newest_result_is_taken(tmp_path, monkeypatch):
    text = (RESULTS / re.search(r"results/(codec\S+?);", PAGE.read_text())[1]).read_text()
    created = re.search(r'"created": "([^"]+)"', text)[1]
    (tmp_path / "codec-1.json").write_text(text.replace(created, "2030-01-01T00:00:00+00:00"))
    (tmp_path / "codec-2.json").write_text(text)
    monkeypatch.setattr(performance_page, "RESULTS", tmp_path)
    assert performance_page.newest().name == "codec-1.json"
