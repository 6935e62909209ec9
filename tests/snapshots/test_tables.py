"""Small runs of the papers' tables measure what they measured; results that are committed are still read."""

import json
import shutil
from pathlib import Path

import pytest
import snapshot_tables as tables
from click.testing import CliRunner
from snapshot_golden import differences

from netweight.cli import netweight
from netweight.errors import MissingExtra
from netweight_experiments.tables.compare import run_table

for extra in ("transformers", "diffusers", "sklearn", "scipy", "matplotlib", "opacus"):
    pytest.importorskip(extra, reason="tables need the extras llm, diffusion, evidence and dp")

HERE = Path(__file__).parent
KEPT = json.loads((HERE / "tables.json").read_text())
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "reproduce"
# Written by hand, or by an early version, in a form that was never a result's.
NO_RESULTS = {"neuzip-fig2", "neuzip-table1", "neuzip-table2", "hyperfl-table1-stand-ins"}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NETWEIGHT_DATA", raising=False)
        yield tmp_path_factory.mktemp("tables")


@pytest.mark.parametrize(
    "table", [name if name in tables.QUICK else pytest.param(name, marks=pytest.mark.study) for name in KEPT]
)
def test_a_table_is_the_same_to_its_digits(table, out):
    try:
        found = tables.measure(table, out)
    except MissingExtra as missing:
        pytest.skip(str(missing))
    assert not list(
        differences(headed(KEPT[table]), headed(found), tolerance=1e-5)
    )  # single precision differs between machines


def headed(measured):
    """A text that heads a column of a further table stands for a column without a unit."""
    tables = [
        {**one, "columns": [{"name": each, "unit": "", "better": None} if isinstance(each, str) else each
                            for each in one["columns"]]}
        for one in measured.get("tables", ())
    ]  # fmt: skip
    return {**measured, **({"tables": tables} if "tables" in measured else {})}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_committed_result_is_read_and_shown(file, tmp_path):
    if file.stem in NO_RESULTS:
        pytest.skip("no result in the form of this command")
    written = json.loads(file.read_text())
    table, scale, options = written["id"], written["scale"], written["options"]
    folder = tmp_path / f"{table}-{scale}"
    folder.mkdir()
    shutil.copy(file, folder / "result.json")
    if options.keys() <= {"only", "model", "judge", "recipe"}:
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        words = ["reproduce", table, "--scale", scale, "--out", str(tmp_path), *given, "--json"]
        done = CliRunner().invoke(netweight, words)
        assert done.exit_code in (0, 1), done.output
        found = json.loads(done.stdout)
    else:  # smaller than the table is, which Python alone can ask for
        found = run_table(table, scale=scale, out=tmp_path, options=options).to_json()
    assert found["reused"] is True
    measured = {(row["row"], row["column"]): row["measured"] for row in found["rows"] if row["measured"] is not None}
    labels = written["labels"]
    columns = [labels.get(column["name"], column["name"]) for column in written["columns"]]
    expected = {
        (labels.get(row["name"], row["name"]), column): value
        for row in written["rows"]
        for column, value in zip(columns, row["values"], strict=True)
        if value is not None
    }
    assert measured == expected
    assert [finding["name"] for finding in found["findings"]] == [each["name"] for each in written["findings"]]
