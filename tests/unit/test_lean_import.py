"""What `import netweight` and `netweight --help` load, looked up in a fresh process."""

import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

import netweight

HEAVY = {"torch", "numpy", "transformers", "diffusers", "peft", "flwr", "opacus", "scipy", "matplotlib", "pydantic"}


def modules_after(code):
    """Run code in a fresh interpreter and return the top-level packages it has loaded, and netweight's modules."""
    report = "import sys, json; print('\\n' + json.dumps(sorted(sys.modules)))"
    program = f"import contextlib\nwith contextlib.suppress(SystemExit):\n    {code}\n{report}"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = json.loads(answer.stdout.splitlines()[-1])
    return {name.partition(".")[0] for name in loaded}, {name for name in loaded if name.startswith("netweight.")}


def test_import_loads_nothing_but_itself():
    packages, own = modules_after("import netweight; dir(netweight)")
    assert not packages & HEAVY
    assert own == {"netweight.core", "netweight.core.lazy"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_loads_no_command_and_nothing_heavy(arguments):
    packages, own = modules_after(f"from netweight.cli import main; main({arguments})")
    assert not packages & HEAVY
    assert not {name for name in own if name.startswith("netweight.cli.")}


def test_names_that_need_no_torch_load_none():
    packages, _ = modules_after("from netweight import Select, Units; Units({'a': [1]}) | Units()")
    assert "torch" not in packages
    packages, _ = modules_after("import netweight.job, netweight.core.environment as e; e.describe()")
    assert "torch" not in packages


def test_every_public_name_exists_and_says_what_it_is():
    for name in netweight.__all__:
        value = getattr(netweight, name)
        assert name == "__version__" or value.__doc__, name
    assert set(netweight.__all__) <= set(dir(netweight))


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match=r"module 'netweight' has no attribute 'compres_folder'"):
        netweight.compres_folder  # noqa: B018


def test_nothing_that_netweight_asks_for_asks_for_torchvision():
    """A torchvision beside the CPU build of torch breaks the import of transformers, so nothing may pull it in."""
    waiting, seen = ["netweight"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted = requirements if name == "netweight" else [r for r in requirements if "extra ==" not in r]
        waiting += [re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted]
    assert "torchvision" not in seen
