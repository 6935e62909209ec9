"""The recipe for federations: data by name or by folder, trained, attacked, remembered."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("sklearn", reason="scikit-learn is in the evidence extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")

from netweight.cli import netweight
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.metrics.images import write_png
from netweight.report.report import read_report

SHIPPED = Path(__file__).parents[2] / "src" / "netweight" / "recipes" / "federate.yaml"
SMALL = (
    "{method: hyperfl, clients: 3, rounds: 2, epochs: 1, updates: 1, search_steps: 4, workers: 1, "
    'model: "tiny_networks:halves"}'
)


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = SHIPPED.read_text().replace("{method: fedavg, clients: 20, rounds: 20}", SMALL)
    assert SMALL in text

    def called(*arguments, change=("", "")):
        Path("recipe.yaml").write_text(text.replace(*change) if change[0] else text)
        return CliRunner().invoke(netweight, ["run", "recipe.yaml", "--output", "out", *arguments])

    return called


def test_a_federation_is_trained_attacked_and_remembered(call):
    answer = call("--json")
    assert answer.exit_code in (0, 1), answer.output
    (step,) = json.loads(answer.stdout)["steps"]
    assert list(step["findings"]) == ["accuracy", "server attack"]
    assert (Path(step["path"]) / CHECKPOINT).is_file()
    accuracy, seen = read_report("out").sections
    assert (accuracy.missing_audits, len(accuracy.figures)) == ((), 1)
    assert seen.title == "1. federate: Exposure to the server"
    assert "done by an earlier run" in call("--plan").stdout
    (again,) = json.loads(call("--json").stdout)["steps"]
    assert again["from_ledger"] is True
    assert again["findings"] == step["findings"]
    assert not [path for path in Path("out").iterdir() if path.name.startswith(".")]


def test_a_folder_of_pictures_is_data_too(call, tmp_path):
    noise = torch.Generator().manual_seed(0)
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(24):
            write_png(tmp_path / "pets" / name / f"{number}.png", torch.rand(3, 8, 8, generator=noise))
    answer = call("--subject", "pets", "--json", change=("clients: 3, rounds: 2", "clients: 2, rounds: 1"))
    assert answer.exit_code in (0, 1), answer.output
    (step,) = json.loads(answer.stdout)["steps"]
    assert json.loads((Path(step["path"]) / "federation.json").read_text())["data"] == str(tmp_path / "pets")


def test_what_is_wrong_is_said_before_work(call, tmp_path):
    assert "there is no such key. Nearest: rounds" in call(change=("rounds:", "round:")).stderr
    assert "federate.rounds: must be at least 1" in call(change=("rounds: 2", "rounds: 0")).stderr
    wrong = call(change=("rounds: 2", "partition: dirichlett")).stderr
    assert "federate.partition: must be 'dominant-groups', 'dirichlet' or 'by-writer', not 'dirichlett'" in wrong
    assert "There is no method 'hyperfly'. Nearest: hyperfl" in call(change=("hyperfl", "hyperfly")).stderr
    assert "subject: digitz does not exist" in call("--subject", "digitz").stderr
    (tmp_path / "empty").mkdir()
    assert "empty contains no folder of images per class" in call("--subject", "empty").stderr
