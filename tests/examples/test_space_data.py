"""What docs/miniatures.md shows of drawn faces and adapters is run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "miniatures.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")
pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    first, second = (code for code in codes if "faces_pipeline()" in code)
    shown: dict = {}
    exec(compile(first, str(PAGE), "exec"), shown)
    assert shown["picture"].shape == (1, 3, 32, 32)
    exec(compile(second.replace("steps=20", "steps=2"), str(PAGE), "exec"), shown)
    shown["model"].pipeline.load_lora_weights(tmp_path / "person-0")
    assert shown["model"].pipeline.get_active_adapters() == ["default_0"]
