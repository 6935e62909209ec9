import json
import math

import pytest

from netweight.errors import MissingExtra, NameNotFound, OutputExists, Unsupported, UsageError
from netweight.report import Finding
from netweight.report.finding import Column as ReportColumn
from netweight.report.finding import Figure, Table
from netweight_experiments.tables import Column, MeasuredTable, Row, registry, run_table, table
from netweight_experiments.tables import compare as catalog
from netweight_experiments.tables.compare import compare
from netweight_experiments.tables.registry import PublishedTable, published_ids

FIGURE = Figure("svg", "<svg></svg>", "nothing")
WIDE = Table(
    "Ratios", ("way", ReportColumn("paper", "×")), (("ours", 1.5), ("none", None), ("broken", math.inf)), ("n",)
)


@pytest.fixture
def register(monkeypatch):
    """An own register, with one table that counts how often it is measured."""
    monkeypatch.setattr(registry, "MODULES", ())
    monkeypatch.setattr(registry, "_REGISTER", {})
    calls = []

    @table("hyperfl-table4")
    def measure(scale, out, *, seconds: float = 1.5):
        assert out.is_dir()
        calls.append(scale)
        return MeasuredTable(
            columns=(Column("round time", "s"), Column("PSNR", "dB")),
            rows=(Row("FedAvg", (seconds, math.inf)), Row("ours", (2, None))),
            differs=("Another machine.",),
            labels={"ours": "HyperFL", "round time": "time per round"},
            findings=(Finding("slower", 2.0, better="lower", target=3.0, seeds=(1,)),),
            figures=(FIGURE,),
            tables=(WIDE,),
            notes=("A note.",),
            inputs={"data": "xxh3-128:00"},
        )

    return calls


def test_a_finished_run_is_reused_and_gives_the_same(tmp_path, register):
    first = run_table("hyperfl-table4", out=tmp_path)
    again = run_table("hyperfl-table4", out=tmp_path)
    assert register == ["small"]
    assert (first.reused, again.reused) == (False, True)
    assert again.measured == first.measured
    assert again.comparisons == first.comparisons
    assert sorted(path.name for path in first.folder.iterdir()) == ["report.html", "report.json", "result.json"]
    run_table("hyperfl-table4", out=tmp_path, overwrite=True)
    run_table("hyperfl-table4", out=tmp_path, scale="paper")
    assert register == ["small", "small", "paper"]


def test_a_run_that_was_killed_starts_again(tmp_path, register):
    result = run_table("hyperfl-table4", out=tmp_path)
    (result.folder / "result.json").unlink()
    assert not run_table("hyperfl-table4", out=tmp_path).reused
    (result.folder / "report.html").unlink()
    assert run_table("hyperfl-table4", out=tmp_path).reused
    assert (result.folder / "report.html").exists()


def test_a_result_of_other_options_is_not_taken(tmp_path, register):
    run_table("hyperfl-table4", out=tmp_path, options={"seconds": 3.0})
    with pytest.raises(OutputExists, match=r"seconds=3\.0.*--overwrite"):
        run_table("hyperfl-table4", out=tmp_path)
    assert run_table("hyperfl-table4", out=tmp_path, options={"seconds": 3.0}).reused


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"netweight_result": 9}'])
def test_a_damaged_result_is_named(tmp_path, register, content):
    folder = tmp_path / "hyperfl-table4-small"
    folder.mkdir()
    (folder / "result.json").write_text(content)
    with pytest.raises(Unsupported, match=r"result\.json.*--overwrite"):
        run_table("hyperfl-table4", out=tmp_path)
    assert not run_table("hyperfl-table4", out=tmp_path, overwrite=True).reused


def test_published_and_measured_meet_by_name_and_label():
    numbers = PublishedTable(
        id="x",
        paper="p",
        arxiv="a",
        table="Table 1",
        title="t",
        setup={},
        columns=(Column("seconds", "s", "lower"), Column("score", "%")),
        rows=(Row("FedAvg", (2.0, None)), Row("HyperFL", (3.0, 80.0))),
        notes=(),
        source="paper text",
    )
    measured = MeasuredTable(
        columns=(Column("time"), Column("extra", "MB")),
        rows=(Row("ours", (1.5, 7)), Row("new", (9.0, None))),
        labels={"ours": "HyperFL", "time": "seconds"},
    )
    found = [(c.row, c.column, c.unit, c.published, c.measured, c.difference) for c in compare(numbers, measured)]
    assert found == [
        ("FedAvg", "seconds", "s", 2.0, None, None),
        ("HyperFL", "seconds", "s", 3.0, 1.5, -1.5),
        ("HyperFL", "score", "%", 80.0, None, None),
        ("HyperFL", "extra", "MB", None, 7, None),
        ("new", "seconds", "s", None, 9.0, None),
    ]

    other = compare(numbers, MeasuredTable(columns=(Column("seconds", "ms"),), rows=(Row("FedAvg", (1,)),)))
    assert [(c.unit, c.published, c.measured, c.difference) for c in other[:1]] == [("s; here ms", 2.0, 1, None)]


def test_without_published_numbers_what_was_measured_stands_alone():
    measured = MeasuredTable(columns=(Column("a"),), rows=(Row("r", (1,)),))
    (only,) = compare(None, measured)
    assert (only.published, only.measured, only.difference) == (None, 1, None)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda out: run_table("hyperfl-table5", out=out), NameNotFound, "hyperfl-table4"),
        (lambda out: run_table("hyperfl-table4", out=out, scale="huge"), UsageError, "small or paper"),
        (lambda out: run_table("hyperfl-table4", out=out, options={"model": "x"}), UsageError, "It takes: seconds"),
        (lambda out: run_table("hyperfl-table4", out=out / "file" / "x"), UsageError, "could not be created"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_measured(tmp_path, register, call, error, says):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(error, match=says):
        call(tmp_path)
    assert register == []


def test_tables_that_cannot_be_are_refused(register):
    with pytest.raises(UsageError, match="'llms'"):
        table("x", needs=("llms",))
    with pytest.raises(UsageError, match="twice"):
        table("hyperfl-table4")(lambda scale, out: None)
    with pytest.raises(UsageError, match="1 values for 2 columns"):
        MeasuredTable(columns=(Column("a"), Column("b")), rows=(Row("r", (1,)),))
    with pytest.raises(UsageError, match="'b' names no"):
        MeasuredTable(columns=(Column("a"),), rows=(), labels={"b": "c"})


def test_what_a_table_needs_is_named_with_the_cure(tmp_path, register, monkeypatch):
    monkeypatch.delenv("NETWEIGHT_DATA", raising=False)
    table("hyperfl-fig4", needs=("data:fashion", "dp"))(lambda scale, out: None)
    monkeypatch.setitem(registry._EXTRAS, "dp", "a_package_that_is_not_installed")
    with pytest.raises(MissingExtra, match=r"NETWEIGHT_DATA.*fashion.*netweight\[dp\]"):
        run_table("hyperfl-fig4", out=tmp_path)
    state = {item.id: (item.state, item.reason) for item in catalog.items()}
    assert state["hyperfl-fig4"][0] == "needs data, GPU or package"
    assert "pip install" in state["hyperfl-fig4"][1]
    (tmp_path / "fashion").mkdir()
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    assert registry.unmet(("data:fashion",)) == ()


def test_the_catalog_lists_everything_once_with_a_state():
    items = catalog.items()
    ids = [item.id for item in items]
    assert len(ids) == len(set(ids))
    assert set(published_ids()) <= set(ids)
    assert {item.paper for item in items} == set(catalog.PAPERS.values())
    for item in items:
        assert item.title
        assert item.state
    assert set(registry.registered()) <= set(ids)


def test_the_report_lays_both_side_by_side(tmp_path, register):
    result = run_table("hyperfl-table4", out=tmp_path, command="netweight reproduce hyperfl-table4 --seconds 1.5")
    data = json.loads((result.folder / "report.json").read_text())
    (section,) = data["sections"]
    wide, shown = section["tables"]
    assert (wide["title"], wide["rows"][0]) == ("Ratios", ["ours", 1.5])
    assert [column["name"] for column in shown["columns"]][-3:] == ["published", "measured", "difference"]
    assert "Differs from the paper: Another machine." in shown["notes"]
    assert data["provenance"]["command"].endswith("--seconds 1.5")
    assert data["provenance"]["inputs"] == {"data": "xxh3-128:00"}
    assert data["provenance"]["seeds"] == [1]


def test_the_result_is_what_json_prints(tmp_path, register):
    printed = json.loads(json.dumps(run_table("hyperfl-table4", out=tmp_path).to_json(), allow_nan=False))
    assert printed["differs"] == ["Another machine."]
    assert {"nonfinite": "Infinity"} in [row["measured"] for row in printed["rows"]]
