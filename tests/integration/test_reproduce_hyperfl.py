"""HyperFL's tables and figures at a small size: they run, fit the published ones and share their runs."""

import base64
import json
import re

import pytest
from click.testing import CliRunner

from netweight.cli import netweight
from netweight.errors import UsageError
from netweight_experiments.tables import run_table
from netweight_experiments.tables.hyperfl import attacks as of_attacks
from netweight_experiments.tables.hyperfl import federations

pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("sklearn", reason="scikit-learn is in the evidence extra")

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("attacks")


@pytest.fixture
def attacks(shared, monkeypatch):
    """Where tables and figures share their attacks, shorter ones than usual; on scikit-learn's digits."""
    pytest.importorskip("opacus", reason="opacus is in the dp extra")
    monkeypatch.delenv("NETWEIGHT_DATA", raising=False)
    monkeypatch.setattr(of_attacks, "_SMALL_STEPS", {"ig": 60, "rog": 30, "tailored": 8, "analytic": 3})
    return shared


def measured(result):
    return {(c.row, c.column): c.measured for c in result.comparisons if c.measured is not None}


def runs(folder):
    return (folder / "hyperfl-attacks-small" / "runs.jsonl").read_text().splitlines()


@pytest.mark.study  # make study makes the whole table
def test_table_3_refutes_that_the_hypernetwork_hides_images(attacks):
    result = run_table("hyperfl-table3", out=attacks)
    values = measured(result)
    rows = {row for row, _ in values}
    assert rows == {row.name for row in result.published.rows} | {"HyperFL, analytic attack"}
    psnr = {row: values[row, "digits PSNR"] for row in rows}
    hidden = ("DP-FedAvg", "CENTAUR", "PPSGD", "HyperFL")
    assert min(psnr["FedAvg"], psnr["HyperFL, analytic attack"]) > max(psnr[row] for row in hidden) + 2
    findings = {finding.name: finding for finding in result.measured.findings}
    cosine = findings["cosine of the recovered gradient, HyperFL, analytic attack, digits"]
    assert cosine.passed is True
    assert cosine.value > 0.999999
    assert all("LPIPS" not in column for _, column in values)
    assert any("LPIPS is not measured" in note for note in result.measured.notes)


@pytest.mark.study
def test_figures_5_to_7_draw_the_runs_of_the_tables(attacks):
    run_table("hyperfl-table3", out=attacks)
    before = runs(attacks)
    figure = run_table("hyperfl-fig5", out=attacks)
    assert runs(attacks) == before
    assert measured(figure) == measured(run_table("hyperfl-table3", out=attacks))
    run_table("hyperfl-table5", out=attacks)
    before = runs(attacks)
    drawn = run_table("hyperfl-fig6", out=attacks)
    assert runs(attacks) == before
    assert any("without post-processing" in sentence for sentence in drawn.measured.differs)
    tailored = run_table("hyperfl-fig7", out=attacks)
    assert len(runs(attacks)) == len(before) + 2  # the analytic ones are known
    psnr = {row: value for (row, column), value in measured(tailored).items() if column == "digits PSNR"}
    assert psnr["HyperFL, tailored attack"] < psnr["HyperFL, analytic attack"]
    for result in (figure, drawn, tailored):
        (image,) = result.measured.figures
        pngs = re.findall(r"data:image/png;base64,([^\"]+)", image.data)
        assert pngs
        assert all(base64.b64decode(png).startswith(PNG) for png in pngs)


@pytest.mark.study
def test_table_2_trains_on_a_frozen_backbone_and_keeps_its_runs(tmp_path, data_folder):
    pytest.importorskip("PIL", reason="Pillow is in the federated extra")
    pytest.importorskip("flwr", reason="flwr is in the federated extra")
    with pytest.raises(UsageError, match="fits no run"):
        run_table("hyperfl-table2", out=tmp_path, options={"only": "nothing"})
    run_table("hyperfl-table2", out=tmp_path, options={"only": "emnist-letters-3-*-fixed-*"})
    result = run_table("hyperfl-table2", out=tmp_path, options={"only": "emnist-letters-3-hyperfl-5*"}, overwrite=True)
    values = measured(result)
    row = {column: value for (name, column), value in values.items() if name == "EMNIST, ResNet"}
    assert set(row) == {"Local-only, extractor fixed", "FedAvg, extractor fixed", "HyperFL-LPM"}
    after = {column: value for (name, column), value in values.items() if name == "EMNIST, after local training"}
    assert row["HyperFL-LPM"] == after["HyperFL-LPM"]
    assert row["FedAvg, extractor fixed"] == values["EMNIST, before local training", "FedAvg, extractor fixed"]
    assert {finding.name.partition(" less")[0] for finding in result.measured.findings} == {"HyperFL-LPM"}


@pytest.mark.study  # the same rounds as the command below
def test_table_4_times_rounds_side_by_side(tmp_path):
    result = run_table("hyperfl-table4", out=tmp_path)
    times = {c.row: c.measured for c in result.comparisons if c.column == "time per round" and c.measured is not None}
    assert {row.name for row in result.published.rows} <= set(times)
    assert all(value > 0 for value in times.values())
    assert all(finding.target is None and finding.ci95 for finding in result.measured.findings)
    assert any("random images" in sentence for sentence in result.measured.differs)


def test_the_command_times_rounds_side_by_side(tmp_path):
    out = tmp_path / "speed.json"
    arguments = ["benchmark", "federate", "--quick", "--out", str(out), "--json"]
    answer = CliRunner().invoke(netweight, arguments)
    assert answer.exit_code == 0, answer.output
    written = json.loads(out.read_text())
    assert {row["method"] for row in written["rounds"]} >= {"fedavg", "dp-fedavg", "ppsgd", "centaur", "hyperfl"}
    assert all(row["wall"] and min(row["wall"]) > 0 for row in written["rounds"])
    assert any(finding["name"].startswith("time of a round, hyperfl over fedavg") for finding in written["findings"])
    assert all(finding["target"] is None and finding["ci95"] for finding in written["findings"])


def test_table_1_measures_the_runs_asked_for_at_the_rate_found_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(federations, "SEEDS", (520,))
    monkeypatch.setattr(federations, "FACTORS", (1e-6, 0.25))
    monkeypatch.setattr(federations, "STEP", 4.0)
    monkeypatch.setattr(federations, "WIDEST", 1.0)
    result = run_table("hyperfl-table1", out=tmp_path, options={"only": "digits-20-local-*", "rounds": 2})
    values = measured(result)
    column = "digits (20 clients)"
    assert set(values) == {("Local-only", column), ("Local-only, before local training", column)}
    assert values["Local-only", column] > 50
    assert "digits local 1." in " ".join(result.measured.notes)
