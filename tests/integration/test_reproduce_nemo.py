"""NeMo's table 1 on the miniature, two prompts and two images of each: it runs and resumes."""

import pytest

from netweight.errors import UsageError
from netweight_experiments.tables import run_table

pytest.importorskip("diffusers", reason="pipelines come with the diffusion extra")
pytest.importorskip("transformers", reason="pipelines come with the diffusion extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

TINY = {"prompts": 2, "images": 2}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("nemo")


def tried(table, out, **more):
    return run_table(table, out=out, options={**TINY, **more}, overwrite=True)


def rows(result):
    names = [column.name for column in result.measured.columns]
    return {row.name: dict(zip(names, row.values, strict=True)) for row in result.measured.rows}


def ledgers(out):
    return {path.name: len(path.read_text().splitlines()) for path in (out / "nemo-runs-small").glob("*.jsonl")}


@pytest.mark.study  # make study makes the whole table
def test_mitigations_are_measured_by_kind_and_searched_and_a_killed_call_goes_on(out):
    result = tried("nemo-table1", out)
    found = rows(result)
    for title in ("no mitigation", "all neurons off", "NeMo's neurons off", "embedding adjustment", "attention scaling",
                  "1 random token", "10 random tokens", "weight pruning"):  # fmt: skip
        assert {f"{title}, verbatim", f"{title}, template"} <= set(found)
    plain = found["no mitigation, verbatim"]
    assert plain["NCC to the unedited generation, median"] == pytest.approx(1)
    assert plain["images that copy their own"] == 100
    assert plain["neurons off or scaled, median"] == 0
    everything = found["all neurons off, verbatim"]
    assert everything["NCC to the training image, median"] < plain["NCC to the training image, median"]
    assert all(0 <= row["images that copy any memorized"] <= 100 for row in found.values())
    names = {finding.name for finding in result.measured.findings}
    assert {f"neurons off, then searched: {what} images brought back" for what in ("planted", "never trained")} <= names
    assert result.published is None
    assert result.measured.figures[0].kind == "svg"
    assert any("A miniature" in sentence for sentence in result.measured.differs)
    (seeds,) = result.measured.tables
    assert [row[1] for row in seeds.rows] == ["verbatim", "template"]
    before = ledgers(out)
    file = out / "nemo-runs-small" / "images.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:-2]) + whole[-2][:40])  # killed in the middle of a line
    resumed = tried("nemo-table1", out)
    assert ledgers(out) == before
    assert rows(resumed) == found


def test_a_try_needs_two_of_everything(tmp_path):
    with pytest.raises(UsageError, match="too few"):
        run_table("nemo-table1", out=tmp_path, options={"images": 1})
    with pytest.raises(UsageError, match="cannot be tried"):
        run_table("nemo-table1", out=tmp_path, options={"prompts": 99})
