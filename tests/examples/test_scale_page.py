"""docs/scale.md: its code runs."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def test_groups_of_updates_have_the_average_of_all():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert "assert" in code
    exec(compile(code, str(PAGE), "exec"), {})
