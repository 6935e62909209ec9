"""Figures of README and docs are those of the results that their comments name; one that is not, is found."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "claims.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="outside a source tree")
RATIO = "`families-2026-11-27.json|rows|#`"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("claims", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_claim_holds(script):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [fault for page in pages for fault in script.faults(page, script.ties(page))[0]] == []
    assert [figure for page in pages for figure in script.untied(page, script.ties(page))] == []


def test_pages_are_clean():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    assert [page.name for page in pages if "<!-- figures" in page.read_text()] == []


@pytest.mark.parametrize(
    ("text", "rule", "words"),
    [
        ("68 of them.", f"68 = {RATIO}", None),
        ("34.0 pairs.", f"34.0 = {RATIO} / 2", None),
        ("67 of them.", f"67 = {RATIO}", "67 is 68 in the results"),
        ("All of them.", f"68 = {RATIO}", "not in its block"),
        ("68 of them.", "68 = `families-2026-11-27.json|lines|#`", "KeyError"),
        ("68 of them.", "68 = __import__('os')", "no sum of results"),
        ("0.56 beside 0.79 and 7.1234.", "all = training-memory-2026-11-23.json", "7.1234 is in none of"),
        ("0.56 of it.", "all = codec-2026-11-21-5.json", "name keys"),
    ],
)
def test_a_figure_that_differs_is_found(script, tmp_path, text, rule, words):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n")
    wrong, _ = script.faults(page, {text[:6]: rule})
    assert (wrong == []) if words is None else words in "; ".join(wrong)


def test_words_that_tie_belong_to_one_block(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("68 of\nthem.\n\n68 of others.\n")
    rule = f"68 = {RATIO}\n"
    assert script.faults(page, {"68 of them": rule}) == ([], 1)
    assert script.faults(page, {"68 of": rule})[0] == ["page.md: 2 blocks have the words '68 of'"]
    assert script.faults(page, {"Gone": rule})[0] == ["page.md: 0 blocks have the words 'Gone'"]


def test_settings_and_published_numbers_are_said_to_be_given(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Stops below 0.98 or 12 %.\n\n0.98 again.\n")
    tied = {"Stops": "given = 0.98, 12\n"}
    assert script.faults(page, tied)[0] == []
    assert script.untied(page, tied) == ["0.98"]
    page.write_text("Stops below 0.98.\n")
    assert script.faults(page, tied)[0] == ["page.md: 12 is not in its block"]


def test_what_is_not_tied_is_listed(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Keeps 0.66 of it, `0.5` in code, 12 %.\n\n68 of 1.5.\n")
    assert script.untied(page, {"68 of": "1.5 = 1 + 0.5\n"}) == ["0.66", "12"]
    page.write_text("torch 2.13 and arXiv 2412.07097, 2502.05209.\n\n```python\nx = 0.5\n\ny = 2.5\n```\n\n0.25.\n")
    assert script.untied(page, {"0.25.": "0.25 = 1 / 4\n"}) == []
