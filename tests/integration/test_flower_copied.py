"""The app that `netweight init` writes, with a user's own model and data, as its README says, word for word."""

import json
import re
import runpy
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
from click.testing import CliRunner
from flower_under_test import NODES, GridHere, same, state_in

from netweight.cli import netweight
from netweight.methods.federate import Task, train
from netweight.plugins.flower import HISTORY
from netweight.plugins.flower.server import halves_of, method_of, settings_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "federate"
TOLERANCE = 1e-6


def blocks(language):
    text = (EXAMPLE / "README.md").read_text().split("## Your own model and data")[1]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The folder that the README's commands make, with its app.py; and each site's table."""
    place = tmp_path_factory.mktemp("elsewhere")
    (commands,), (app,) = blocks("sh"), blocks("python")
    command = f'netweight() {{ "{sys.executable}" -m netweight "$@"; }}'
    subprocess.run(["bash", "-ec", f"{command}\n{commands}"], cwd=place, check=True)
    (place / "mine" / "app.py").write_text(app)
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


@pytest.fixture(scope="module")
def app(copied):
    return runpy.run_path(str(copied / "mine" / "app.py"))


def test_a_model_and_data_take_ten_lines():
    (app,) = blocks("python")
    own = [line for line in app.splitlines() if line and not line.startswith(("import ", "from "))]
    assert len(own) <= 10


def test_the_folder_has_its_own_name_and_is_not_written_over(copied):
    project = tomllib.loads((copied / "mine" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "mine"
    assert project["tool"]["flwr"]["app"]["components"] == {"serverapp": "app:server", "clientapp": "app:client"}
    answer = CliRunner().invoke(netweight, ["init", str(copied / "mine"), "--federation"])
    assert answer.exit_code == 2
    assert "exists already" in answer.output


def test_the_copy_trains_the_users_model_on_the_users_data(copied, app, tmp_path):
    config = tomllib.loads((copied / "mine" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {
        "data": str(copied / "tables"), "folder": str(tmp_path / "server"), "private-folder": str(tmp_path / "private"),
        "timeout": 0.0, "patience": 0.0, "rounds": 3, "aggregator": "mean",  # by rows, here too
    }  # fmt: skip
    grid = GridHere(dict.fromkeys(NODES, app["client"]), NODES, run_config=config)
    for context in grid.contexts.values():  # else each client draws its own start, which no training here can repeat
        context.node_config["rehearsal-seed"] = config["seed"]
    app["server"](grid, Context(1, 1, {}, RecordDict(), config, 0))
    rounds = json.loads((tmp_path / "server" / HISTORY).read_text())["rounds"]
    assert len(rounds) == 3
    task = Task(*halves_of(app["model"], config), [app["data"](config, site) for site in NODES.values()])
    run = train(task, method_of(config), settings_of(config), workers=1)
    assert same(state_in(tmp_path / "server"), run.state, TOLERANCE)
    assert run.rounds[-1].mean_after > 0.8


def test_flower_builds_the_copy(copied):
    flwr = Path(sys.executable).with_name("flwr")
    answer = subprocess.run(
        [flwr, "build", "--app", copied / "mine"], cwd=copied, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert list(copied.glob("*.fab"))
