"""docs/add-a-method.md: its package is installed into a fresh environment, and netweight knows the method there."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
import warm
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-a-method.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """An environment of its own that sees the libraries of this one, with the page's package installed; and a model."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("the package is built by setuptools")
    here = tmp_path_factory.mktemp("fresh")
    for name, code in re.findall(r'```\w+ title="(.*?)"\n(.*?)```', PAGE.read_text(), re.S):
        file = here / ("netweight-prune" if name != "recipe.yaml" else ".") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    venv.create(here / "environment", with_pip=False)
    (site,) = (here / "environment").glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    own = {**os.environ, "SETUPTOOLS_USE_DISTUTILS": "local"}  # other tests' libraries may have asked for another
    subprocess.run([sys.executable, "-m", *install, f"--target={site}", here / "netweight-prune"], check=True, env=own)
    torch.manual_seed(0)
    (here / "my-model").mkdir()
    save_file(
        {"weight": torch.randn(40, 50), "bias": torch.randn(50)}, here / "my-model/model.safetensors", {"format": "pt"}
    )
    (here / "my-model/config.json").write_text("{}")
    return here


def python(here, *words):
    """A program with the environment's packages, forked from one that has imported torch."""
    (site,) = (here / "environment").glob("lib/python*/site-packages")
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return warm.run(*words, cwd=here, env={**os.environ, "PYTHONPATH": paths}, libraries=("torch",))


def netweight(here, *arguments):
    done = python(here, "-m", "netweight", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_a_command_with_its_options_audits_and_card(here):
    own = [here / "environment/bin/python", "-m", "netweight", "--help"]
    said = subprocess.run(own, capture_output=True, text=True, check=True).stdout
    assert re.search(r"prune +Set the smallest weights of every matrix to zero\.", said)
    assert re.search(
        r"--share FLOAT RANGE +Share of each matrix that becomes zero\.\s+\[default: 0\.5",
        netweight(here, "prune", "--help"),
    )
    answer = json.loads(netweight(here, "prune", "my-model", "pruned", "--share", "0.6", "--card", "--json"))
    assert answer["settings"] == {"share": 0.6}
    assert [finding["passed"] for finding in answer["findings"]] == [True, True, True]
    zeros = (load_file(here / "pruned/model.safetensors")["weight"] == 0).double().mean()
    assert zeros == pytest.approx(0.6, abs=1e-3)
    assert "### Pruned" in (here / "pruned/README.md").read_text()
    assert "--share" in python(here, "-m", "netweight", "prune", "my-model", "other", "--share", "1.5").stderr


def test_it_is_a_verb_of_recipes_with_a_section_in_the_report(here):
    netweight(here, "run", "recipe.yaml")
    sections = json.loads((here / "runs/pruned/report.json").read_text())["sections"]
    assert sections[0]["audits"] == ["zeros", "untouched"]
    assert not sections[0]["missing_audits"]
    assert "least share of zeros in a matrix" in json.dumps(sections)
    assert json.loads(netweight(here, "run", "--schema"))["$defs"]["prune"]["properties"]["share"]["default"] == 0.5


def test_its_audits_notice_what_is_wrong(here):
    netweight(here, "prune", "my-model", "half", "--share", "0.5")
    program = (
        "import json, pathlib\nfrom netweight.report.audit import run_audits\n"
        "from prune.settings import PruneSettings\n"
        "folders = (pathlib.Path('half'), pathlib.Path('my-model'))\n"
        "found = run_audits('prune', folders, PruneSettings(share=0.9), seed=0)\n"
        "print(json.dumps([finding.passed for section in found.values() for finding in section.findings]))"
    )
    done = python(here, "-c", program)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, True, True]
