"""What docs/immunize.md shows is run."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is in the llm extra")

PAGE = Path(__file__).parents[2] / "docs" / "immunize.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def test_the_page_s_example_unlearns_step_by_step():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    record = names["record"]
    assert [len(step.terms) for step in record.steps] == [4, 4]


def test_the_page_names_every_defense():
    from netweight.methods.immunize.settings import DEFENSES

    section = PAGE.read_text().split("\n## Defenses\n")[1].split("\n## ")[0]
    rows = "\n".join(line for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z][a-z0-9-]+)`", rows)) == set(DEFENSES)


def test_the_page_tells_the_order_of_defenses_as_it_was_measured():
    """In table 1 plain ascent leaves an attacker less than either RepNoise does, and the page may not say otherwise."""
    file = PAGE.parents[1] / "benchmarks" / "results" / "reproduce" / "repnoise-table1.json"
    rows = {row["name"]: row["values"][1:] for row in json.loads(file.read_text())["rows"]}
    harm = {name: sum(rows[name]) for name in ("Gradient ascent", "RepNoise", "RepNoise, corrected")}
    assert harm["Gradient ascent"] < min(harm["RepNoise"], harm["RepNoise, corrected"])
    assert "The order of defenses does not reproduce" in PAGE.read_text()
