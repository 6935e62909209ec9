"""docs/performance.md: made by a script from results that are in the repository, and never edited by hand."""

import importlib.util
import re
from pathlib import Path

import pytest

from netweight_experiments.benchmarks.codec import read_result

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "performance_page.py"
PAGE = ROOT / "docs" / "performance.md"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="outside a source tree")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("performance_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_makes_of_the_result_that_it_names(script):
    name = re.search(r"from benchmarks/results/(\S+);", PAGE.read_text())[1]
    assert script.page(read_result(script.RESULTS / name), name) == PAGE.read_text()


def test_every_target_is_on_the_page_with_its_verdict(script):
    from netweight_experiments.benchmarks.codec import TARGETS

    lines = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.read_text().splitlines()}
    for target in TARGETS:
        assert re.search(r"\| (met|missed|not measured) \|$", lines[target.name])


def test_tables_of_the_page_are_whole(script):
    """Every line of a table has as many cells as the one before it, and no cell breaks the line."""
    columns = None
    for line in PAGE.read_text().splitlines():
        here = line.count("|") if line.startswith("|") else None
        assert columns is None or here is None or here == columns, line
        columns = here


def test_the_newest_result_is_taken(script, tmp_path, monkeypatch):
    text = (script.RESULTS / re.search(r"results/(codec\S+?);", PAGE.read_text())[1]).read_text()
    created = re.search(r'"created": "([^"]+)"', text)[1]
    (tmp_path / "codec-1.json").write_text(text.replace(created, "2030-01-01T00:00:00+00:00"))
    (tmp_path / "codec-2.json").write_text(text)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert script.newest().name == "codec-1.json"
