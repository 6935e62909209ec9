"""The five uses from a wheel, as in the first guide: netweight wrote every line of their output."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is in the llm extra")
pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "tests" / "support" / "foreign_lines.py"
pytestmark = [
    pytest.mark.study,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="outside a source tree"),
]
USES = {
    "compress": (
        "compress my-model my-model-net", "verify my-model-net --against my-model", "run quickstart.yaml",
        "decompress my-model-net restored",
    ),
    "immunize": (
        "immunize my-model defended --pairs pairs.jsonl --retain retain.jsonl",
        "attack finetune defended --base my-model --harmful harmful.jsonl --grid single --max-steps 8 --out attack",
    ),
    "federate": ("federate run --clients 3 --rounds 1 --updates 1 --epochs 1 --out federation",),
    "forget": (
        "forget apply my-pipeline forgotten --targets targets.csv --ordinary ordinary.txt",
        "attack embedding forgotten --base my-pipeline --targets targets.csv --steps 2 --out search",
    ),
    "space": (
        "space ingest my-loras bank", "space fit bank space --components 20",
        "space direction space --labels labels.csv --column beard --out beard.json",
        "space export space person-00003 exported --rank 4",
    ),
}  # fmt: skip


def lines_of_others(python, folder, words, environment=None):
    """The lines of a command that netweight did not write, and how it ended."""
    notes = folder / "notes.txt"
    done = subprocess.run(
        [python, RUNNER, notes, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False,
        timeout=1800,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1), (words, done.stdout, done.stderr)
    assert done.stdout.strip()
    return notes.read_text().splitlines()


@pytest.mark.parametrize("use", USES)
def test_no_line_of_a_use_is_another_librarys(use, installed, begun, tmp_path):
    folder = installed.copy(begun, tmp_path / "here")
    foreign = {line: lines_of_others(installed.python, folder, line.split(), installed.variables) for line in USES[use]}
    assert {line: lines for line, lines in foreign.items() if lines} == {}


def test_lines_of_others_are_found(tmp_path):
    """The runner itself: what is not netweight's is noted, whatever way it takes."""
    package = tmp_path / "netweight"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import os, sys\nimport loud\nprint('our line')\nos.write(2, b'compiled code\\n')\n"
        "import warnings, logging\nlogging.getLogger('x').error('a log')\n"
    )
    (tmp_path / "loud.py").write_text("import sys\nprint('a library', file=sys.stderr)\n")
    lines = lines_of_others(sys.executable, tmp_path, [], {"PYTHONPATH": str(tmp_path)})
    assert [line.rpartition(": ")[2] for line in lines] == ["a library", "compiled code"]
