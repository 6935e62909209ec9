"""weights2weights' tables on the miniature, five people and one edit: they run, share runs, say what they are."""

import dataclasses
import hashlib
import json

import pytest
import torch
from small_clip import small_clip

from netweight.errors import UsageError
from netweight_experiments.tables import registry, run_table

pytest.importorskip("diffusers", reason="pipelines come with the diffusion extra")
pytest.importorskip("transformers", reason="pipelines come with the diffusion extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

from netweight_experiments.tables.setups import shared_setup
from netweight_experiments.tables.w2w import edits as space_edits
from netweight_experiments.tables.w2w import openers as space_miniature
from netweight_experiments.tables.w2w import people as space_fits

TABLES = [f"w2w-{name}" for name in ("table1", "table2-4", "table5", "fig8", "components", "histograms", "traversal")]


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


def test_all_of_them_are_registered_as_stand_ins():
    entries = registry.registered()
    assert set(TABLES) <= set(entries)
    assert all(entries[table].stand_in and "recipe" in entries[table].options for table in TABLES)


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


def test_strangers_are_met_in_every_way_and_tables_share_them(out):
    found = rows(tried("w2w-table2-4", out))
    assert found[space_fits.SPACE]["parameters optimised"] == shared_setup("w2w", "small", None).space.components
    many, one = found[space_fits.MANY], found[space_fits.ONE]
    assert many["parameters optimised"] == one["parameters optimised"] > 1000
    assert all(row["time"] > 0 for row in found.values())
    result = tried("w2w-table5", out)
    assert rows(result)["w2w"]["ID score"] == found[space_fits.SPACE]["ID score"]
    assert set(rows(result)["IP-Adapter FaceID"].values()) == {None}
    assert all("cannot be run here" in note for note in result.measured.notes[:2])


def test_fewer_models_and_components(out, monkeypatch):
    from netweight_experiments.tables.w2w import components as space_counts

    monkeypatch.setattr(space_counts, "_SIZES", (40,))
    result = tried("w2w-fig8", out)
    sizes = list(rows(result))
    assert sizes[0] == "40 models"
    tangled = [row["mean |cos|, differences of means"] for row in rows(result).values()]
    assert tangled[0] > tangled[-1]
    assert len(result.measured.figures) == 2
    found = rows(tried("w2w-components", out))
    variance = [row["variance"] for row in found.values()]
    assert variance == sorted(variance)
    assert variance[-1] == pytest.approx(1)


def test_first_components_are_drawn_and_read(out):
    import numpy as np
    from scipy import stats

    result = tried("w2w-histograms", out)
    space = shared_setup("w2w", "small", None).space
    first = np.asarray(space.scores[:, 0], dtype=np.float64)
    row = rows(result)["component 1"]
    assert row["skewness"] == pytest.approx(stats.skew(first), abs=1e-6)
    assert row["Shapiro–Wilk's W"] == pytest.approx(stats.shapiro(first).statistic, abs=1e-6)
    result = tried("w2w-traversal", out)
    assert len(result.measured.rows) == 3
    assert result.measured.figures[0].kind == "svg"


def test_strengths_are_found_between_those_that_are_tried():
    assert space_edits.tuned([1.0, 2.0], [0.2, 0.6], 0.4) == (1.5, True)
    assert space_edits.tuned([1.0, 2.0], [0.2, 0.3], 0.4) == (2.0, False)
    assert space_edits.tuned([1.0], [0.8], 0.4) == (0.5, True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_papers_scale_takes_what_a_recipe_names(tmp_path, out):
    recipe = own_files(tmp_path, out)
    result = run_table("w2w-table5", scale="paper", out=tmp_path / "runs", options={"recipe": recipe, "people": 5})
    found = rows(result)
    assert -1 <= found["w2w"]["ID score"] <= 1
    result = run_table("w2w-table1", scale="paper", out=tmp_path / "runs", options={"recipe": recipe, "people": 5})
    found = rows(result)
    assert any(value is not None for value in found["Gender, prompting"].values())
    assert found["Gender, w2w"]["strength"] == 1
    assert set(found["Gender, Concept Sliders"].values()) == {None}
    text = json.loads(recipe.read_text())
    recipe.write_text(json.dumps({**text, "labels": "nowhere.csv", "held": 3}))
    with pytest.raises(UsageError, match="2 problems"):
        run_table("w2w-table1", scale="paper", out=tmp_path / "again", options={"recipe": recipe})
    with pytest.raises(UsageError, match=r"space-tables\.yaml"):
        run_table("w2w-table1", scale="paper", out=tmp_path / "again")


def own_files(folder, out):
    """A recipe of the miniature's own files, a face network with random weights, and a CLIP of transformers."""
    from netweight.metrics.images import write_png
    from netweight.toys.faces_pipeline import FACES_FOLDER, FACES_LABELS

    ground = shared_setup("w2w", "small", None)
    ground.space.save(folder / "space", standalone=True)
    table = ["person,image,use"]
    for stranger in ground.strangers:
        for use, image in (("learn", stranger.images[0]), ("test", stranger.others[0])):
            name = f"{stranger.name.replace(' ', '-')}-{use}.png"
            write_png(folder / name, image)
            table.append(f"{stranger.name},{name},{use}")
    (folder / "photographs.csv").write_text("\n".join(table) + "\n")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 8)).requires_grad_(False)
    torch.jit.trace(network, torch.zeros(1, 3, 16, 16)).save(str(folder / "face.pt"))
    small_clip(folder / "clip", ["a face"])
    recipe = {
        "model": str(FACES_FOLDER), "space": str(folder / "space"), "labels": str(FACES_LABELS),
        "edits": [{"title": "Gender", "column": "beard", "text": "a face", "prompt": "a face on a white ground"}],
        "photographs": str(folder / "photographs.csv"), "face": str(folder / "face.pt"), "face_side": 16,
        "face_sha256": hashlib.sha256((folder / "face.pt").read_bytes()).hexdigest(), "clip": str(folder / "clip"),
        "prompt": "a face on a gray ground", "device": "cpu", "images": 2, "guidance": 1.0, "steps": 2, "people": 10,
        "held": 64, "adapter_steps": 2, "together": 3,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"
