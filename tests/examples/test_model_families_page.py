"""Every claim of docs/model-families.md names a test, and pytest finds that test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "model-families.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def rows(heading):
    table = PAGE.read_text().split(heading)[1]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture(scope="module")
def claims():
    """(family, method) of every cell that says something."""
    methods, _, *families = [row for row in rows("# Which method") if len(row) == 6]
    found = {}
    for family, *cells in families:
        for method, cell in zip(methods[1:], cells, strict=True):
            assert cell in ("yes", "refused", "–"), cell
            if cell != "–":
                found[re.sub(r" \(.*", "", family), method] = cell
    return found


@pytest.fixture(scope="module")
def tests():
    _, _, *lines = rows("## What says so")
    assert all(re.fullmatch(r"`tests/[\w/]+\.py::test_\w+(\[.*\])?`", test) for _, _, test in lines)
    return {(family, method): test.strip("`") for family, method, test in lines}


def test_every_claim_has_a_test_and_every_test_a_claim(claims, tests):
    assert claims.keys() == tests.keys()


def test_refusals_are_tests_of_refusals(claims, tests):
    for place, claim in claims.items():
        name = tests[place].split("::")[1]
        assert (claim == "refused") == ("refused" in name or "_not_" in name or "only_" in name), name


def test_the_tests_are_there(tests):
    files = sorted({test.split("::")[0] for test in tests.values()})
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run([*command, "--import-mode=importlib", "--collect-only", "-q", *files],
                          cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    found = done.stdout.splitlines()
    assert found, done.stderr
    lost = [test for test in tests.values() if not any(line == test or line.startswith(test + "[") for line in found)]
    assert not lost, done.stdout[-2000:]
