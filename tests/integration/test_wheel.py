"""The wheel as users get it: built from the source tree, installed where nothing else of netweight is, no compiler.

Dependencies are those of the tests' own environment. The native codec is compiled once: later runs find it in `build/`.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import torch
from installed_wheel import built, run
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "netweight"
EXPERIMENTS = ROOT / "experiments"
TOYS = ROOT / "toys"
EXAMPLE = ROOT / "examples" / "federate"
NEEDED = ("pip", "scikit_build_core", "nanobind")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
NATIVE = shutil.which("c++") is not None  # else the wheel is built without
pytestmark = [
    pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="outside a source tree"),
    pytest.mark.skipif(bool(MISSING), reason=f"building needs {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    return built(EXPERIMENTS, tmp_path_factory.mktemp("experiments"))


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return built(TOYS, tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """A fresh environment with the wheel; its commands, and what a process in it sees of this one."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    install(python, wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "TMPDIR", "LANG", "OMP_NUM_THREADS")}
    return {"cwd": folder, "env": kept | {"PATH": str(python.parent)}}


def install(python, file):
    how = ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]  # the outer environment may have it too
    run(sys.executable, "-m", "pip", "--python", python, "install", *how, file)


def call(clean, *command):
    return run(Path(clean["env"]["PATH"]) / command[0], *command[1:], **clean)


def files_of(package):
    ours = [file for file in package.rglob("*") if file.is_file() and file.suffix not in (".pyc", ".so")]
    return {f"{package.name}/{file.relative_to(package).as_posix()}" for file in ours}


def test_it_holds_every_file_of_the_package_and_nothing_else(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = files_of(PACKAGE) | {f"netweight/examples/{name}" for name in files_of(EXAMPLE)}
    assert wanted - held == set()
    assert "netweight/py.typed" in held
    assert not any(name.endswith(".safetensors") for name in held)
    assert wheel.stat().st_size < 3e6
    assert "netweight/recipes/quickstart.yaml" in held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    native = {name for name in held if "/_native." in name and name.endswith(".so")}
    assert len(native) == NATIVE
    assert {name for name in held if ".dist-info/" not in name} - wanted == native


def test_its_readme_can_be_read_on_an_index(wheel):
    """Nothing in it needs a file beside it, and a picture that could not be shown is described."""
    markdown = pytest.importorskip("markdown_it", reason="markdown-it-py reads the README")
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True).decode()
    tokens = markdown.MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    every = [each for token in tokens for each in (token, *(token.children or ()))]
    links = [each.attrs.get("href") or each.attrs.get("src") for each in every if each.type in ("link_open", "image")]
    assert len(links) >= 5  # the papers
    assert [link for link in links if not re.match(r"https?://|#", link)] == []
    assert "[[[" not in text
    assert "<!--" not in text
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^#+ .*", text, re.M) == re.findall(r"^#+ .*", readme, re.M)
    assert re.findall(r"```.*?```", text, re.S) == re.findall(
        r"```.*?```", re.sub("<!--.*?-->", "", readme, flags=re.S), re.S
    )
    for words, place in re.findall(r"!\[(.*?)\]\((.*?)\)", readme):
        assert f"Picture: {words}" in text or place in "".join(links)


@pytest.mark.parametrize("source", ["https://example.org/o/n", "https://example.org/o/n/"])
def test_links_of_the_index_lead_to_the_repository_where_there_is_one(source):
    spec = importlib.util.spec_from_file_location("index_readme", ROOT / "scripts" / "index_readme.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = "![A bar](docs/a.svg) [page](docs/b.md#c) [paper](https://x.org) [below](#d)\n```\n[x](y)\n```\n<!-- z -->\n"
    assert script.index_readme(text, source) == (
        "![A bar](https://example.org/o/n/raw/HEAD/docs/a.svg) [page](https://example.org/o/n/blob/HEAD/docs/b.md#c) "
        "[paper](https://x.org) [below](#d)\n```\n[x](y)\n```\n"
    )
    assert script.index_readme(text) == (
        "*(Picture: A bar.)* page [paper](https://x.org) [below](#d)\n```\n[x](y)\n```\n"
    )


def test_the_experiments_wheel_holds_every_file_and_the_published_numbers(experiments):
    held = set(zipfile.ZipFile(experiments).namelist())
    wanted = files_of(EXPERIMENTS / "netweight_experiments")
    assert {name for name in held if ".dist-info/" not in name} == wanted
    assert "netweight_experiments/published/hyperfl-table1.json" in held


def test_the_small_models_are_a_package_of_their_own(clean, toys):
    """The command that needs it names it; the environment of the tests may have it, too."""
    python = Path(clean["env"]["PATH"]) / "python"
    probe = "import importlib.util; print(importlib.util.find_spec('netweight_toys') is None)"
    if run(python, "-c", probe, **clean).strip() == "True":
        command = Path(clean["env"]["PATH"]) / "netweight"
        answer = subprocess.run([command, "init", "try"], capture_output=True, text=True, check=False, **clean)
        assert answer.returncode == 2
        assert "pip install netweight-toys" in answer.stderr
    install(python, toys)


@pytest.mark.study
def test_every_command_of_the_readme_works_in_an_empty_folder(clean, toys):
    install(Path(clean["env"]["PATH"]) / "python", toys)
    folder = clean["cwd"] / "Größe zwei"
    folder.mkdir()
    shown = re.findall(r"```(?:console|sh)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    commands = [line.removeprefix("$ ") for line in "".join(shown).splitlines()]
    for words in (shlex.split(line, comments=True) for line in commands):
        if words[0] == "netweight":
            command = [Path(clean["env"]["PATH"]) / words[0], *words[1:]]
            answer = subprocess.run(command, **clean | {"cwd": folder}, capture_output=True, text=True, check=False)
            # Findings of so small runs miss targets, and exit with 1 for it.
            may_miss = bool({"attack", "federate", "doctor"} & set(words))
            assert answer.returncode in (0, may_miss), answer.stderr


def test_it_is_imported_alone(clean):
    said = json.loads(call(clean, "python", "-c", """
import json, pathlib, shutil, netweight
from netweight.codec import active_path
print(json.dumps({
    "home": str(pathlib.Path(netweight.__file__)), "version": netweight.__version__, "path": active_path(),
    "compiler": shutil.which("c++")
}))
"""))  # fmt: skip
    assert said["home"].startswith(str(clean["cwd"]))
    assert said["compiler"] is None
    assert (said["path"] != "python") == NATIVE


def test_its_commands_work(clean):
    folder = clean["cwd"]
    weights = {"layer.weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    call(clean, "netweight", "compress", "model.safetensors", "net.safetensors")
    call(clean, "netweight", "verify", "net.safetensors", "--against", "model.safetensors")
    call(clean, "netweight", "decompress", "net.safetensors", "back.safetensors")
    assert (folder / "back.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads(call(clean, "netweight", "doctor", "--json"))
    assert "treatments" in call(clean, "netweight", "run", "--schema")


def test_a_federation_is_written_in_an_empty_folder_and_runs(clean):
    pytest.importorskip("flwr")
    pytest.importorskip("sklearn")
    call(clean, "netweight", "init", "hospitals", "--federation")
    said = call(clean, "python", "-c", f"""
import runpy, sys, tomllib
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from flower_under_test import NODES, Context, GridHere, RecordDict, history_in
from pathlib import Path
app = runpy.run_path("hospitals/app.py")
config = tomllib.loads(Path("hospitals/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
here = str(Path("server").resolve())
config |= {{"folder": here, "private-folder": here + "-nodes", "timeout": 0.0, "patience": 0.0, "rounds": 1}}
app["server"](GridHere(dict.fromkeys(NODES, app["client"]), NODES, run_config=config),
              Context(1, 1, {{}}, RecordDict(), config, 0))
print(sorted(history_in(Path(here))[0].after))
""")  # fmt: skip
    assert said.splitlines()[-1] == "[0, 1, 2]"


def test_tables_are_measured_where_the_experiments_are_installed_too(clean, experiments):
    python = Path(clean["env"]["PATH"]) / "python"
    probe = "import importlib.util; print(importlib.util.find_spec('netweight_experiments') is None)"
    if run(python, "-c", probe, **clean).strip() == "True":  # else the environment of the tests has them installed
        command = Path(clean["env"]["PATH"]) / "netweight"
        answer = subprocess.run([command, "reproduce", "--list"], capture_output=True, text=True, check=False, **clean)
        assert answer.returncode == 2
        assert "netweight-experiments" in answer.stderr
        assert "pip install ./experiments" in answer.stderr
    install(python, experiments)
    assert "hyperfl-table1" in call(clean, "netweight", "reproduce", "--list")
    place = run(python, "-c", "import netweight_experiments; print(netweight_experiments.__file__)", **clean)
    assert place.startswith(str(clean["cwd"]))
