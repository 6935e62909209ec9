"""What docs/compress.md and docs/compress-python.md show is run, and the claim about digests is shown to be true."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import netweight
from netweight import cli

PAGE = Path(__file__).parents[2] / "docs" / "compress.md"
PYTHON = PAGE.with_name("compress-python.md")
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-model"
    folder.mkdir()
    save_file({"weight": torch.randn(64, 64).bfloat16()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    shutil.copytree(folder, tmp_path / "my-finetune")
    return folder


def test_the_commands_work_in_their_order(model):
    lines = "".join(re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.S)).splitlines()
    for line in lines:
        done = CliRunner().invoke(cli.netweight, shlex.split(line[2:], comments=True)[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert (model.parent / "restored" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_the_python_works(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text() + PYTHON.read_text(), re.S)
    exec(compile(first, str(PAGE), "exec"), {})
    assert re.match(r"0\.[678]\d of the size before", capsys.readouterr().out)
    for code in others:
        for library in re.findall(r"^from (transformers|diffusers) import", code, re.M):
            pytest.importorskip(library, reason=f"{library} is not installed")
            pytest.importorskip("accelerate", reason="accelerate is not installed")
        exec(compile(code, str(PYTHON), "exec"), {})


def test_a_digest_is_no_signature(model):
    """Other weights, compressed by whoever wanted them there, verify; only a comparison with the original tells."""
    netweight.compress_folder("my-model", "my-model-net")
    save_file({"weight": torch.zeros(64, 64).bfloat16()}, model / "other.safetensors", {"format": "pt"})
    forged = next(Path("my-model-net").glob("*.safetensors"))
    netweight.compress_folder(model / "other.safetensors", "forged.safetensors")
    forged.write_bytes(Path("forged.safetensors").read_bytes())
    with netweight.open_store(forged) as store:
        assert not store.get("weight").any()
    findings = netweight.verify(forged)
    assert not any(finding.passed is False for finding in findings)
    against = netweight.verify(forged, against=model / "model.safetensors")
    assert any(finding.passed is False for finding in against)
