"""What docs/add-a-method.md writes is a method that works, and whose audits notice when it does not."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from netweight.report import run_audits

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The page's package and a small model, in the current folder; nothing of it stays registered."""
    from netweight import registry
    from netweight.report import audit

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(audit, "_NAMED", dict(audit._NAMED))
    monkeypatch.setattr(audit, "_AUDITS", dict(audit._AUDITS))
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    for name, code in re.findall(r'```python title="(.*?)"\n(.*?)```', PAGE.read_text(), re.S):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(code)
    torch.manual_seed(0)
    Path("my-model").mkdir()
    save_file({"weight": torch.randn(40, 50), "bias": torch.randn(50)}, "my-model/model.safetensors", {"format": "pt"})
    Path("my-model/config.json").write_text("{}")
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "prune"]:
        del sys.modules[name]


def test_the_method_runs_in_a_recipe(here, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    shown = {}
    exec(compile(code, str(PAGE), "exec"), shown)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["zeros", "untouched", "identity"]
    assert not any("False" in line for line in lines)
    step = shown["step"]
    assert step.path.is_dir()
    findings = json.loads(Path("runs/pruned/report.json").read_text())
    assert "least share of zeros in a matrix" in json.dumps(findings)


def test_its_audits_notice_what_is_wrong(here):
    importlib.import_module("prune.audit")
    from prune.config import PruneConfig
    from prune.method import prune_folder

    prune_folder(Path("my-model"), Path("made"), PruneConfig(0.6))
    tensors = load_file("made/model.safetensors")
    tensors["weight"][tensors["weight"] != 0] *= 1.01
    tensors["weight"][0] = 0
    save_file(tensors, "made/model.safetensors")
    subject = (Path("made"), Path("my-model"))
    found = run_audits("prune", subject, PruneConfig(0.6), seed=0)
    assert [finding.passed for finding in found["untouched"].findings] == [False, False]
    zeros = run_audits("prune", subject, PruneConfig(0.9), seed=0)["zeros"]
    assert [finding.passed for finding in zeros.findings] == [False]


def test_settings_are_checked(here):
    from prune.config import PruneConfig

    from netweight.errors import UsageError

    with pytest.raises(UsageError, match="cannot be pruned"):
        PruneConfig(1.5)
