"""What docs/weight-space-python.md shows is run."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "weight-space-python.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the page is not here: outside a source tree")


@pytest.mark.filterwarnings("ignore")  # what peft and transformers say of each other
def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    shown: dict = {}
    torch.manual_seed(0)
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, str(PAGE), "exec"), shown)
    assert shown["written"].relative_error > 0
    assert shown["written"].path.is_file()
    assert shown["model"].active_adapters == ["default"]
