"""What docs/ecosystem.md shows is run, and what it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ecosystem.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def test_every_test_and_file_that_is_named_is_there():
    text = PAGE.read_text()
    tests = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert len(tests) > 8
    named = [ROOT / test for test in tests] + [PAGE.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    named += [ROOT / path for path in re.findall(r"examples/[\w/]+\.py", text)]
    assert [path for path in named if not path.exists()] == []


def test_the_code_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is in the llm extra")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    assert 0 < names["report"].share < 1
    assert not any("adapter" in name for name in names["report"].compressed)
