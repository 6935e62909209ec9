"""The example of Flower copied elsewhere, with a user's own model and data, as its README says, word for word."""

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

pytest.importorskip("flwr")
with warnings.catch_warnings():  # typer, which Flower imports, asks click for names that click is going to drop
    warnings.filterwarnings("ignore", "'click.utils", DeprecationWarning)
    from flwr.app import Context, RecordDict

import torch
from flower_under_test import NODES, GridHere, same, state_in

from netweight.methods.federate import Task, train
from netweight.plugins.flower import HISTORY

EXAMPLE = Path(__file__).parents[2] / "examples" / "federate"
TOLERANCE = 1e-6


def blocks(language):
    text = (EXAMPLE / "README.md").read_text().split("## Your own model and data")[1]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The copy, made by the README's commands, with its task.py; and each site's table."""
    place = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(EXAMPLE, place / "examples" / "federate", ignore=shutil.ignore_patterns("__pycache__"))
    (commands,), (task,) = blocks("sh"), blocks("python")
    subprocess.run(["bash", "-ec", commands], cwd=place, check=True)
    (place / "mine" / "mine" / "task.py").write_text(task)
    draw = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(3, 8, generator=draw)
    (place / "tables").mkdir()
    for site in NODES.values():
        classes = torch.randint(3, (60 + 10 * site,), generator=draw)
        rows = centers[classes] + torch.randn(len(classes), 8, generator=draw)
        lines = [",".join([*(f"{value:.4f}" for value in row), str(int(own))])
                 for row, own in zip(rows, classes, strict=True)]  # fmt: skip
        (place / "tables" / f"site-{site}.csv").write_text("\n".join(["a,b,c,d,e,f,g,h,class", *lines]) + "\n")
    return place


@pytest.fixture
def app(copied, monkeypatch):
    monkeypatch.syspath_prepend(str(copied / "mine"))
    yield {name: importlib.import_module(f"mine.{name}") for name in ("task", "client_app", "server_app")}
    for name in [name for name in sys.modules if name == "mine" or name.startswith("mine.")]:
        del sys.modules[name]


def test_nothing_of_the_example_is_left_in_the_copy_but_its_defaults(copied):
    project = tomllib.loads((copied / "mine" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "mine"
    flower = project["tool"]["flwr"]["app"]
    assert flower["components"] == {"serverapp": "mine.server_app:app", "clientapp": "mine.client_app:app"}
    assert flower["fab-include"] == ["mine/**/*.py"]
    for file in (copied / "mine" / "mine").glob("*.py"):
        assert "import digits" not in file.read_text()
        assert "from digits" not in file.read_text()


def test_the_copy_trains_the_users_model_on_the_users_data(copied, app, tmp_path):
    config = tomllib.loads((copied / "mine" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {
        "data": str(copied / "tables"), "folder": str(tmp_path / "server"), "private-folder": str(tmp_path / "private"),
        "timeout": 0.0, "patience": 0.0, "rounds": 3,
    }  # fmt: skip
    grid = GridHere(dict.fromkeys(NODES, app["client_app"].app), NODES, run_config=config)
    for context in grid.contexts.values():  # else each client draws its own start, which no training here can repeat
        context.node_config["rehearsal-seed"] = config["seed"]
    app["server_app"].app(grid, Context(1, 1, {}, RecordDict(), config, 0))
    rounds = json.loads((tmp_path / "server" / HISTORY).read_text())["rounds"]
    assert len(rounds) == 3
    task = app["task"]
    data = [task.client_data(config, site) for site in NODES.values()]
    run = train(Task(*task.model(config), data), task.method(config), task.settings(config), workers=1)
    assert same(state_in(tmp_path / "server"), run.state, TOLERANCE)
    assert run.rounds[-1].mean_after > 0.8


def test_flower_builds_the_copy(copied):
    flwr = Path(sys.executable).with_name("flwr")
    answer = subprocess.run(
        [flwr, "build", "--app", copied / "mine"], cwd=copied, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert list(copied.glob("*.fab"))
