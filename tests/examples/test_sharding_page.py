"""What docs/sharding.md shows is run, in two processes on the CPU."""

import re
from pathlib import Path

import pytest
import warm

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def test_the_example_runs(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "train.py").write_text(code)
    said = "".join(out for out, _ in warm.run_ranks(tmp_path / "train.py"))  # by torchrun in test_accelerate.py
    assert len(re.findall(r"process [01], step [012]: loss 8\.\d+", said)) == 6
    (sizes, _) = re.findall(r"weights: (\d+) bytes dense, (\d+) in this process", said)
    assert int(sizes[1]) < 0.35 * int(sizes[0])
