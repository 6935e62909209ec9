import importlib.metadata
import json

import pytest
from click.testing import CliRunner

from netweight import cli, codec
from netweight.codec import cuda
from netweight.core import environment


@pytest.fixture
def diagnose(monkeypatch):
    monkeypatch.delenv("NETWEIGHT_DATA", raising=False)

    def invoke(*arguments):
        return CliRunner().invoke(cli.netweight, ["doctor", *arguments])

    return invoke


def pretend(monkeypatch, versions=(), requirements=()):
    """Make other versions and requirements appear installed; a version of None means not installed."""
    versions, requirements = dict(versions), dict(requirements)
    real_version, real_requires = environment.installed_version, importlib.metadata.requires
    monkeypatch.setattr(
        environment, "installed_version", lambda name: versions[name] if name in versions else real_version(name)
    )
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda name: requirements[name] if name in requirements else real_requires(name),
    )


def test_a_machine_in_order(diagnose, monkeypatch):
    monkeypatch.setattr(codec, "active_path", lambda: "avx2")
    pretend(monkeypatch, {"torchvision": None})
    answer = diagnose("--json")
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["environment"]["codec_path"] == "avx2"
    assert found["problems"] == []
    assert found["data"]["folder"] is None
    text = diagnose().stdout
    assert "codec           avx2 (available: " in text
    assert "No problems." in text


def test_the_slow_fallback_is_a_problem(diagnose, monkeypatch):
    monkeypatch.setattr(codec, "active_path", lambda: "python")
    answer = diagnose()
    assert answer.exit_code == 1
    assert "Problem: The codec runs in pure Python" in answer.stdout


def test_missing_extras_come_with_the_command_that_gets_them(diagnose, monkeypatch):
    wanted = {
        "netweight": [
            "numpy>=2.0",
            "no-such-thing>=1; extra == 'dp'",
            "click>=8; extra == 'dp'",
            "numpy>=2.0; extra == 'llm'",
            "netweight[dp,llm]; extra == 'all'",
        ]
    }
    pretend(monkeypatch, {"torchvision": None}, wanted)
    extras = json.loads(diagnose("--json").stdout)["extras"]
    assert extras.keys() == {"dp", "llm"}
    assert extras["dp"]["missing"] == ["no-such-thing"]
    assert extras["dp"]["installed"].keys() == {"click"}
    assert extras["dp"]["install"] == 'pip install "netweight[dp]"'
    assert extras["llm"]["install"] is None
    assert 'lacks no-such-thing  pip install "netweight[dp]"' in diagnose().stdout


@pytest.mark.parametrize(
    ("torch", "vision", "requires", "trouble"),
    [
        ("2.13.0", "0.28.0", ["numpy", "torch==2.13.0"], False),
        ("2.13.0+cpu", "0.28.0+cpu", ["torch==2.13.0"], False),
        ("2.13.0+cpu", "0.28.0", ["torch==2.13.0"], True),
        ("2.13.0", "0.27.0", ["numpy", "torch (==2.12.0)"], True),
        ("2.13.0", "0.28.0", ["torch"], False),
    ],
)
def test_a_torchvision_for_another_torch_is_a_problem(diagnose, monkeypatch, torch, vision, requires, trouble):
    pretend(monkeypatch, {"torch": torch, "torchvision": vision}, {"torchvision": requires})
    answer = diagnose()
    assert ("pip uninstall torchvision" in answer.stdout) is trouble
    assert answer.exit_code == int(trouble)


def test_the_folder_of_data_sets(diagnose, monkeypatch, tmp_path):
    (tmp_path / "digits").mkdir()
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    assert json.loads(diagnose("--json").stdout)["data"] == {
        "folder": str(tmp_path),
        "holds": ["digits"],
        "problems": [],
    }
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path / "elsewhere"))
    answer = diagnose()
    assert answer.exit_code == 1
    assert "elsewhere, which is not a folder" in answer.stdout


def test_what_would_decode_on_a_gpu(diagnose, monkeypatch):
    monkeypatch.setattr(cuda, "unavailable_because", lambda: None)
    assert json.loads(diagnose("--json").stdout)["environment"]["gpu_decoding"] == "netweight's kernels"
    monkeypatch.setattr(cuda, "unavailable_because", lambda: "NVRTC is missing. Install it.")
    assert (
        "no kernels: NVRTC is missing. Install it. Weights on a CUDA device would be decoded on the CPU"
        in diagnose().stdout
    )


def test_which_programs_open_compressed_models(diagnose, monkeypatch):
    def found():
        return json.loads(diagnose("--json").stdout)["environment"]["compressed_models"]

    for switch in ("NETWEIGHT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(switch, raising=False)
    installed = [importlib.metadata.EntryPoint("netweight", "netweight:_autoload", "torch.backends")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: installed)
    assert found() == "every program; NETWEIGHT_AUTOLOAD=0 disables it"
    monkeypatch.setenv("NETWEIGHT_AUTOLOAD", "0")
    assert found().endswith("since NETWEIGHT_AUTOLOAD=0")
    installed.clear()
    assert "once netweight is installed again" in found()
