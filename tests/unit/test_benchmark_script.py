"""What benchmark scripts share: their options, a file of results filled cell by cell, and tables in pages."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
from click.testing import CliRunner

from netweight.cli import netweight
from netweight_experiments.benchmarks import script


@pytest.fixture
def tries(monkeypatch):
    """Makes a function the `main` of a script named space.tries."""

    def as_main(main):
        module = ModuleType("netweight_experiments.benchmarks.space.tries", "A measurement.\n\nMore of it.")
        module.main = main
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return "space.tries"

    return as_main


def test_cells_of_a_file_are_measured_once(tmp_path, tries, capsys):
    output, asked = tmp_path / "results" / "one.json", []

    def cell(name):
        return name, lambda: asked.append(name) or {"of": name}

    def main(names: tuple[str, ...], /, *, output: Path):
        yield from script.fill(output, "cells", map(cell, names))

    for names in ("ab", "bc"):
        script.run(tries(main), [*names, "--output", str(output)])
    assert asked == ["a", "b", "c"]
    written = json.loads(output.read_text())
    assert written["cells"] == {name: {"of": name} for name in "abc"}
    assert written["options"] == {"names": ["b", "c"]}
    assert capsys.readouterr().out.count("{'of':") == 3


def test_what_a_stopped_script_has_measured_is_kept(tmp_path, tries):
    output = tmp_path / "one.json"

    def stopped():
        raise KeyboardInterrupt

    def main(*, output: Path):
        yield from script.fill(output, "arms", [("first", lambda: 1), ("second", stopped)])

    with pytest.raises(KeyboardInterrupt):
        script.run(tries(main), ["--output", str(output)])
    assert json.loads(output.read_text())["arms"] == {"first": 1}


def test_a_file_says_where_it_comes_from(tmp_path, tries, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def main(*, count: Annotated[int, "how many", (1, 3)] = 3, place: Path | None = None, quick: bool = False):
        return {"found": count}

    found = script.run(tries(main), ["--place", "a/b", "--quick"])
    assert (found["what"], found["found"]) == ("A measurement.", 3)
    assert found["options"] == {"count": 3, "place": "b", "quick": True}
    assert found["date"].startswith(script.today()[:4])
    assert "python" in found["environment"]
    (file,) = Path("benchmarks/results/space").iterdir()
    assert file.name == f"tries-quick-{script.today()}.json"
    with pytest.raises(SystemExit):
        script.run(tries(main), ["--count", "2"])


@pytest.mark.parametrize("name", script.scripts())
def test_every_script_has_options_that_a_command_line_can_give(name):
    module = pytest.importorskip(f"netweight_experiments.benchmarks.{name}")
    parser = script.parser_of(module.main, name, module.__doc__)
    assert "--output" in parser.format_help()


def test_the_most_memory_is_more_than_what_is_held():
    from netweight_experiments.memory import private_bytes

    assert script.peak_bytes() >= private_bytes()


def test_a_script_that_is_called_as_a_module_says_how_it_is_called():
    command = [sys.executable, "-m", "netweight_experiments.benchmarks.compress.memory"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr == "Write it as: python -m netweight_experiments.benchmarks compress.memory\n"


def test_scripts_and_commands_are_one_suite():
    shown = CliRunner().invoke(netweight, ["benchmark", "--help"]).output
    assert all(name in shown for name in ("codec", "memory", *script.scripts()))
    answer = CliRunner().invoke(netweight, ["benchmark", "compress.generation", "--help"])
    assert answer.exit_code == 0, answer.output
    assert "--tokens" in answer.output
    assert CliRunner().invoke(netweight, ["benchmark", "compress.nothing"]).exit_code == 2


def test_results_name_no_folder_of_the_machine(tmp_path):
    options = {"model": str(tmp_path / "my-model"), "work": tmp_path / "work", "banks": [str(tmp_path / "bank")]}
    told = script.about("space.tries", "A measurement.", options | {"id": "owner/name", "level": "high"})["options"]
    assert told == {"model": "my-model", "work": "work", "banks": ["bank"], "id": "owner/name", "level": "high"}
