"""What the pages on forgetting show is run, on a small pipeline with random weights; tables are those of files."""

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "forget.md"
EDITS = PAGE.with_name("forget-edits.md")
NEURONS = PAGE.with_name("forget-neurons.md")
RESULTS = PAGE.with_name("forget-results.md")
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")
pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import small_pipelines  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from netweight.cli import netweight  # noqa: E402
from netweight_experiments.benchmarks.forget.edits import page  # noqa: E402


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_pipelines.stable_diffusion().save_pretrained("my-pipeline")
    Path("ordinary.txt").write_text("a red square\nthe green circle\na small photo\n")
    Path("memorized.txt").write_text("a large blue circle\n")
    return tmp_path


def test_the_code_runs(place, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", EDITS.read_text(), re.S)
    exec(compile(code, str(EDITS), "exec"), {})
    assert "a large blue circle" in capsys.readouterr().out


def test_the_commands_take_these_options():
    commands = re.findall(r"^netweight (forget .*)$", PAGE.read_text() + NEURONS.read_text(), re.M)
    assert len(commands) == 8
    for command in commands:
        _, name, *arguments = command.split()
        done = CliRunner().invoke(netweight, ["forget", name, "--help"])
        assert all(option in done.output for option in arguments if option.startswith("--"))


def test_the_tables_are_made_of_the_result_that_they_name():
    text = RESULTS.read_text()
    file = re.search(r'forget.edits:page", "([\w./-]+\.json)"', text)[1]
    result = json.loads((PAGE.parents[1] / "benchmarks" / "results" / file).read_text())
    assert page(result) in text
    assert "raised errors" in page(result)
