"""What docs/immunize-python.md shows is run."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is in the llm extra")

PAGE = Path(__file__).parents[2] / "docs" / "immunize-python.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def test_the_page_s_example_unlearns_step_by_step():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    record = names["record"]
    assert [len(step.terms) for step in record.steps] == [4, 4]
