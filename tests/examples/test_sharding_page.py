"""What docs/sharding.md shows is run, in two processes on the CPU, and its figures are those of the results."""

import json
import re
from pathlib import Path

import pytest
import warm

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def test_the_example_runs(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "train.py").write_text(code)
    said = "".join(out for out, _ in warm.run_ranks(tmp_path / "train.py"))  # by torchrun in test_accelerate.py
    assert len(re.findall(r"process [01], step [012]: loss 8\.\d+", said)) == 6
    (sizes, _) = re.findall(r"weights: (\d+) bytes dense, (\d+) in this process", said)
    assert int(sizes[1]) < 0.35 * int(sizes[0])


def test_the_figures_are_those_of_the_results():
    text = PAGE.read_text()
    (name,) = set(re.findall(r"results/(fsdp-bytes-[\d-]+\.json)", text))
    found = json.loads((RESULTS / name).read_text())
    dense, compressed = found["dense"], found["compressed"]
    rows = re.findall(r"^\| (gathered|reduced|both|held)[^|]*\| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", text, re.M)
    said = {what: (int(one.replace(",", "")), int(other.replace(",", "")), ratio) for what, one, other, ratio in rows}
    measured = {
        what: [set(part[key]) for part in (dense, compressed)]
        for what, key in (("gathered", "gathered_bytes_per_step"), ("reduced", "reduced_bytes_per_step"))
    }
    for what, values in measured.items():
        assert [{value} for value in said[what][:2]] == values
    both = [sum(pair) for pair in zip(said["gathered"][:2], said["reduced"][:2], strict=True)]
    assert [*said["both"][:2]] == both
    assert [*said["held"][:2]] == [dense["held_bytes"], compressed["held_bytes"]]
    assert all(float(ratio) == round(other / one, 3) for one, other, ratio in said.values())
    assert said["gathered"][1] <= 0.72 * said["gathered"][0]
    assert found["bit_identical"]
    assert set(compressed["completed_per_step"]) == {0}
    assert f"{found['headroom']:.1%}".replace("%", " %") in text
