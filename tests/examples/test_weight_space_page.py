"""What docs/weight-space.md shows is run."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "weight-space.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the page is not here: outside a source tree")


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    shown: dict = {}
    torch.manual_seed(0)
    exec(compile(code, str(PAGE), "exec"), shown)
    assert shown["written"].relative_error > 0
    assert shown["written"].path.is_file()
