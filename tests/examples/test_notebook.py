"""The notebook runs from top to bottom without a network, and is stored without results of somebody's machine."""

import ast
import json
import socket
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "first-steps.ipynb"
pytestmark = pytest.mark.skipif(not NOTEBOOK.is_file(), reason="examples are not here: outside a source tree")
pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the llm extra")


@pytest.fixture(scope="module")
def cells():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    return notebook["cells"]


def test_it_runs_from_top_to_bottom_offline(cells, tmp_path, monkeypatch, capsys):
    def refused(*arguments):
        raise AssertionError(f"the notebook opened a connection: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    text = capsys.readouterr().out
    assert "Gross weight" in text
    assert "Do not publish, because" in text  # of a miniature whose refusals an edit removes
    lines = [line for line in text.splitlines() if line.startswith(("memorized", "ordinary "))]
    assert [line.split()[0] for line in lines] == ["memorized", "memorized", "ordinary", "ordinary"], lines
    assert (tmp_path / "new-person").exists()


def test_it_is_stored_without_results(cells):
    for cell in cells:
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
