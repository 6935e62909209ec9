"""pyproject.toml gives lower bounds, constraints.txt pins what is known to work; the wheel carries what code needs."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from netweight.codec.cuda import launching
from netweight_experiments.tables.registry import published_folder

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "constraints.txt").is_file(), reason="outside a source tree")


def version(text):
    return tuple(int(part) for part in text.split("."))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def pins():
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {canonical(name): pin for name, pin in (line.split("==") for line in lines if line)}


def requirements(project):
    extras = project["optional-dependencies"].values()
    everything = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    return [requirement for requirement in everything if not requirement.startswith("netweight[")]


def test_every_requirement_has_a_lower_bound_and_a_pin_within_its_bounds(project, pins):
    for requirement in requirements(project):
        name, bounds = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(>=[\d.]+(?:,<[\d.]+)?)", requirement).groups()
        if name in ("cuda-bindings", "nvidia-cuda-nvrtc"):  # their versions are chosen by the CUDA build of torch
            continue
        assert canonical(name) in pins, f"{name} is not pinned in constraints.txt"
        pin = version(pins[canonical(name)])
        low, _, high = bounds[2:].partition(",<")
        assert version(low) <= pin, f"{name} is pinned below its lower bound"
        assert not high or pin < version(high), f"{name} is pinned above its upper bound"


def test_torchvision_is_never_asked_for(project, pins):
    assert "torchvision" not in pins
    assert not any(canonical(requirement).startswith("torchvision") for requirement in requirements(project))


def test_all_is_made_of_extras_that_exist(project):
    (everything,) = project["optional-dependencies"]["all"]
    named = re.fullmatch(r"netweight\[(.*)\]", everything)[1].split(",")
    assert set(named) <= project["optional-dependencies"].keys()


def test_the_wheel_carries_the_package_and_the_experiments_have_their_own():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert build["wheel"]["packages"] == {
        "netweight": "src/netweight",
        "netweight/examples/federate": "examples/federate",
    }
    experiments = tomllib.loads((ROOT / "experiments" / "pyproject.toml").read_text())
    assert experiments["tool"]["scikit-build"]["wheel"] == {"cmake": False, "packages": ["netweight_experiments"]}


def test_what_the_experiments_ask_for_is_what_netweight_s_extras_ask_for(project):
    """So that bounds and pins are kept in one place."""
    experiments = tomllib.loads((ROOT / "experiments" / "pyproject.toml").read_text())["project"]
    known = {*requirements(project), "netweight"}
    assert set(experiments["dependencies"]) <= known
    for (extras,) in experiments["optional-dependencies"].values():
        named = re.fullmatch(r"netweight\[(.*)\]", extras)[1].split(",")
        assert set(named) <= project["optional-dependencies"].keys()


def test_kernels_lie_where_the_package_looks_for_them():
    """The .cu files and headers, which are data of the package, in the source tree or in an installed wheel."""
    source = ROOT / "src" / "netweight" / "codec" / "cuda" / "kernels"
    here = {path.name: path.read_bytes() for path in source.iterdir()}
    assert {Path(name).suffix for name in here} == {".cu", ".cuh"}
    assert {path.name: path.read_bytes() for path in launching.KERNELS.iterdir()} == here


def test_the_published_numbers_lie_where_the_experiments_look_for_them():
    """In the source tree or in an installed wheel: no file is missing."""
    here = sorted(path.name for path in (ROOT / "experiments" / "netweight_experiments" / "published").glob("*.json"))
    assert here
    assert sorted(path.name for path in published_folder().glob("*.json")) == here


def test_files_name_the_projects_address_and_no_package_to_install(project):
    from netweight import autoload
    from netweight.store import safetensors

    assert project.get("urls", {}).get("Homepage", "") == autoload.HOME
    written = [autoload.HINT, *map(str, vars(safetensors).values())]
    assert not [text for text in written if "pip install netweight" in text]


def test_the_citation_names_this_version_and_the_papers_of_all_methods(project):
    """The keys that the Citation File Format 1.2.0 requires, and each paper that README's first table links."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", project["version"])
    assert citation["license"] == project["license"]
    papers = citation["references"]
    assert all({"type", "title", "authors", "year", "url"} <= paper.keys() for paper in papers)
    table = (ROOT / "README.md").read_text().split("## What you can do")[1].split("## ")[0]
    linked = set(re.findall(r"https://arxiv\.org/abs/[\d.]+", table))
    assert len(linked) == 5
    assert {paper["url"] for paper in papers} == linked
