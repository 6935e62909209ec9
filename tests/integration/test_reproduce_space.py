"""weights2weights' tables on the miniature, five people and one edit: they run, share runs, say what they are."""

import dataclasses

import pytest

from netweight_experiments.tables import run_table

pytest.importorskip("diffusers", reason="pipelines come with the diffusion extra")
pytest.importorskip("transformers", reason="pipelines come with the diffusion extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

from netweight_experiments.tables.w2w import edits as space_edits
from netweight_experiments.tables.w2w import openers as space_miniature


@pytest.fixture(scope="module", autouse=True)
def small_ground():
    """Few strangers, one edit, and hardly trained sliders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space_miniature, "_EDITS", {"Gender": "beard"})
        patch.setattr(space_miniature, "_STRANGERS", 5)
        patch.setattr(space_miniature, "_STEPS", 4)
        patch.setattr(space_miniature, "_SLIDER", dataclasses.replace(space_miniature._SLIDER, steps=3))
        patch.setattr(space_edits, "STRENGTHS", (1.0, 2.0))
        space_miniature.miniature.cache_clear()
        yield
    space_miniature.miniature.cache_clear()
    space_miniature._sliders.cache_clear()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("w2w")


def tried(table, out, **more):
    return run_table(table, out=out, options={"people": 5, **more}, overwrite=True)


def rows(result):
    names = [column.name for column in result.measured.columns]
    return {row.name: dict(zip(names, row.values, strict=True)) for row in result.measured.rows}


@pytest.mark.study  # make study makes the whole table
def test_edits_stand_beside_the_published_ones_and_prompts_that_cannot_be_are_said(out):
    result = tried("w2w-table1", out)
    found = rows(result)
    assert set(found["Gender, prompting"].values()) == {None}
    assert any("no word" in note for note in result.measured.notes)
    assert 0 < found["Gender, w2w"]["strength"] <= 2
    beside = {(each.row, each.column): each for each in result.comparisons}
    published = beside["Gender, w2w", "ID score"]
    assert published.published == 0.45
    assert -1 <= published.measured <= 1
    assert any("A miniature" in sentence for sentence in result.measured.differs)
    names = {finding.name: finding for finding in result.measured.findings}
    assert names["Gender, w2w: ID score"].ci95 is not None
    assert "Gender: ID score of w2w less that of Concept Sliders" in names
    before = (out / "w2w-runs-small" / "edits.jsonl").read_text()
    tried("w2w-table1", out)
    assert (out / "w2w-runs-small" / "edits.jsonl").read_text() == before


def test_strengths_are_found_between_those_that_are_tried():
    assert space_edits.tuned([1.0, 2.0], [0.2, 0.6], 0.4) == (1.5, True)
    assert space_edits.tuned([1.0, 2.0], [0.2, 0.3], 0.4) == (2.0, False)
    assert space_edits.tuned([1.0], [0.8], 0.4) == (0.5, True)
