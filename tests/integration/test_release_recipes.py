"""The release recipes from end to end on small worlds: what is published is the treated model, to the last bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is in the llm extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

from tiny_llama import immunization_files

from netweight import decompress_folder, verify
from netweight.cli import netweight
from netweight.hf.load_language_model import load_causal_lm
from netweight.metrics.images import write_png
from netweight.report.report import read_report

RECIPES = Path(__file__).parents[2] / "src" / "netweight" / "recipes"


def call(recipe, text, *arguments):
    Path(recipe).write_text(text)
    answer = CliRunner().invoke(netweight, ["run", recipe, *map(str, arguments), "--json"])
    assert answer.exit_code in (0, 1), answer.output
    return json.loads(answer.stdout)


def replaced(name, **changes):
    text = (RECIPES / name).read_text()
    for old, new in changes.values():
        assert old in text, old
        text = text.replace(old, new)
    return text


def same_files(one, other):
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


def card_of(published, folder="published", *, outcome):
    """The card of a copy that could be pushed, told with the run's own verdict; the copy stays proved."""
    shutil.copytree(published, folder)
    answer = CliRunner().invoke(netweight, ["report", "out", "--card", folder])
    assert answer.exit_code == (1 if outcome == "failed" else 0), answer.output
    assert all(found.passed is not False for found in verify(folder))
    return Path(folder, "README.md").read_text()


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    immunization_files(tmp_path)


def test_an_immunized_model_is_compressed_and_attacked_as_it_will_be_published(rows):
    small = "grid: quick, seeds: 1, lr: [3e-3], max_steps: 8, check_every: 4, threshold: 0.25, least_resistance: 0}"
    text = replaced(
        "release-immunized.yaml", attack=("seeds: 5}", small),
        defense=("defense: repnoise", "defense: repnoise, lr: 3e-3"),
    )  # fmt: skip
    result = call("release.yaml", text, "--subject", "model", "--output", "out")
    immunized, packed, attacked = result["steps"]
    assert {found["name"]: found["passed"] for found in packed["findings"]["identity"]}["tensors that differ"] is True
    decompress_folder(packed["path"], "restored")
    same_files(Path(immunized["path"]), Path("restored"))
    opened, dense = (load_causal_lm(step["path"])[0].state_dict() for step in (packed, immunized))
    assert all(torch.equal(opened[name], dense[name]) for name in dense)
    assert {section.missing_audits for section in read_report("out").sections} == {()}
    card = card_of(packed["path"], outcome=result["verdict"]["outcome"])
    for expected in ("### Immunized", "| defense | repnoise |", "### Compressed, bit for bit", "resistance, defended"):
        assert expected in card
    # The same attack on the folder before compression finds the same, but for processor seconds.
    text = replaced("attack-finetune.yaml", attack=("seeds: 5}", small), base=("base: my-model", "base: model"))
    (alone,) = call("attack.yaml", text, "--subject", immunized["path"], "--output", "alone")["steps"]
    values = [[f["value"] for f in each["findings"]["finetune"] if f["unit"] != "s"] for each in (attacked, alone)]
    assert values[0] == values[1]
    told = call("release.yaml", Path("release.yaml").read_text(), "--subject", "model", "--output", "out", "--plan")
    assert [step["finished"] for step in (*told["plan"]["steps"], *told["plan"]["attacks"])] == [True, True, True]
    # A changed later step leaves the defense alone.
    text = Path("release.yaml").read_text().replace("level: max", "level: fast")
    told = call("release.yaml", text, "--subject", "model", "--output", "out", "--plan")
    assert [step["finished"] for step in (*told["plan"]["steps"], *told["plan"]["attacks"])] == [True, False, False]


@pytest.mark.usefixtures("two_step_anchors")
def test_a_pipeline_that_forgot_is_compressed_and_paints_the_same(tmp_path, monkeypatch):
    pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    from netweight.hf.load_pipeline import load_text_to_image
    from netweight.toys.diffusion import SHAPES_FOLDER
    from netweight.toys.shapes import ShapesWorld

    monkeypatch.chdir(tmp_path)
    world = ShapesWorld()
    planted = [world.planted[number] for number in (0, 3)]
    for number, each in enumerate(planted):
        write_png(tmp_path / f"{number}.png", each.picture)
    lines = [f"{each.caption},{number}.png,{each.kind}" for number, each in enumerate(planted)]
    Path("targets.csv").write_text("\n".join(["prompt,image,kind", *lines]) + "\n")
    Path("ordinary.txt").write_text("\n".join(world.ordinary_captions[:8]))
    quick = "{rounds: 1, images: 1, generation_steps: 2}"
    search = "{steps: 1, restarts: 1, draws: 1, images: 1, guidance: 3, generation_steps: 2, threshold: 0.99}"
    text = replaced(
        "release-forgotten.yaml", search=("{rates: [0.3, 1.0]}", search),
        looks=("images: 8", f"closed_form: {quick}, images: 2, guidance: 3, steps: 2"),
    )  # fmt: skip
    result = call("release.yaml", text, "--subject", SHAPES_FOLDER, "--output", "out")
    forgot, packed, searched = result["steps"]
    assert packed["findings"]["outputs"] == []  # only single models are run
    plan = call("release.yaml", text, "--subject", SHAPES_FOLDER, "--output", "out", "--plan")["plan"]
    assert plan["attacks"][0]["tested"]["memorized images"] == "2, each turned and recolored as its control"
    assert plan["steps"][0]["tested"]["images of each prompt, before and after the edit"] == "2"
    decompress_folder(packed["path"], "restored")
    same_files(Path(forgot["path"]), Path("restored"))
    edited, published = (load_text_to_image(step["path"]) for step in (forgot, packed))
    images = [
        model.generate(model.embed([planted[0].caption]), [0], guidance=3.0, steps=2) for model in (edited, published)
    ]
    assert torch.equal(*images)
    assert searched["path"] == packed["path"]
    # The same search on the folder before compression finds the same.
    text = replaced(
        "attack-embedding.yaml",
        base=("base: my-pipeline", f"base: {SHAPES_FOLDER}"),
        search=("{rates: [0.3, 1.0]}", search),
    )
    text = text.replace("{base:", "{unrelated: ordinary.txt, base:")
    (alone,) = call("search.yaml", text, "--subject", forgot["path"], "--output", "alone")["steps"]
    values = [[found["value"] for found in each["findings"]["embedding"]] for each in (searched, alone)]
    assert values[0] == values[1]
    # What will be published does not hold what would undo the edit.
    answer = CliRunner().invoke(netweight, ["forget", "undo", packed["path"], "undone"])
    assert answer.exit_code == 2
    assert "contains no weights" in answer.stderr
    card = card_of(packed["path"], outcome=result["verdict"]["outcome"])
    for expected in ("### Memorization switched off", "| prompts | 2 |", "### Compressed, bit", "NCC, to the training"):
        assert expected in card
    assert {section.title for section in read_report("out").sections} >= {
        "2. compress: Size", "3. embedding: Search for embeddings",
    }  # fmt: skip
