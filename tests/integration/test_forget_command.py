"""`netweight forget` on a small pipeline's folder: every step of it, resumed work, exact undoing, clear refusals."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import diffusers
import small_pipelines

from netweight.cli import netweight

ORDINARY = ["a red square", "the green circle", "a small photo", "the blue square", "a circle on a square"]
PROMPTS = ["a large blue circle", "the red photo of a square"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("forget")
    small_pipelines.stable_diffusion().save_pretrained(place / "pipeline")
    (place / "pipeline" / "LICENSE").write_text("MIT License")
    (place / "pipeline" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nBy its author.\n")
    (place / "ordinary.txt").write_text("\n".join(ORDINARY))
    (place / "prompts.csv").write_text("caption\n" + "\n".join(PROMPTS) + "\n")
    run("statistics", place / "pipeline", "--prompts", place / "ordinary.txt", "--out", place / "usual.safetensors")
    return place


def run(*arguments, code=0):
    done = CliRunner().invoke(netweight, ["forget", *map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def weights(folder):
    return load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")


def localized(folder, out, *more, threshold="-0.5"):
    """A threshold that every prompt lies above and none comes below: all is refined, and nothing resolved."""
    return run("localize", folder / "pipeline", "--prompts", folder / "prompts.csv", "--column", "caption",
               "--statistics", folder / "usual.safetensors", "--threshold", threshold, "--out", out, "--seeds", 2,
               "--steps", 5, *more, code=1)  # fmt: skip


def test_statistics_name_model_and_layers(folder, tmp_path):
    found = run("statistics", folder / "pipeline", "--prompts", folder / "ordinary.txt", "--scope", "all",
                "--out", tmp_path / "usual.safetensors")  # fmt: skip
    assert found["prompts"] == 5
    assert found["neurons"] == sum(found["layers"].values())
    assert len(found["layers"]) > 3
    assert run("statistics", folder / "pipeline", "--prompts", folder / "ordinary.txt",
               "--out", tmp_path / "usual.safetensors", code=2)["error"]["kind"] == "OutputExists"  # fmt: skip


def test_detection_calibrates_and_tells_apart(folder, tmp_path):
    arguments = ("detect", folder / "pipeline", "--prompts", folder / "prompts.csv", "--column", "caption",
                 "--seeds", 3, "--steps", 5, "--out", tmp_path)  # fmt: skip
    (tmp_path / "ordinary.csv").write_text("caption\n" + "\n".join(ORDINARY[:3]) + "\n")
    (tmp_path / "held.csv").write_text("caption\n" + "\n".join(ORDINARY[3:]) + "\n")
    found = run(*arguments, "--ordinary", tmp_path / "ordinary.csv", "--held-out", tmp_path / "held.csv")
    assert [row["prompt"] for row in found["prompts"]] == PROMPTS
    assert found["threshold"]["prompts"] == 3
    assert [finding["name"] for finding in found["findings"]][:2] == ["AUC of noise differences", "AUC of Wen's norm"]
    assert json.loads((tmp_path / "threshold.json").read_text()) == found["threshold"]
    kept = json.loads((tmp_path / "detection.json").read_text())
    assert kept == {key: value for key, value in found.items() if key in kept}
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 7
    again = run(*arguments, "--threshold", "0.5")
    assert again["threshold"]["rule"] == "given"
    assert again["prompts"][0]["similarity"] == found["prompts"][0]["similarity"]
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 7  # all remembered
    assert "exactly one source" in run(*arguments, code=2)["error"]["message"]


def test_a_threshold_holds_for_the_look_it_was_calibrated_with(folder, tmp_path):
    run("detect", folder / "pipeline", "--prompts", folder / "ordinary.txt", "--ordinary", folder / "ordinary.txt",
        "--seeds", 3, "--steps", 5, "--out", tmp_path)  # fmt: skip
    detection = json.loads((tmp_path / "threshold.json").read_text())["detection"]
    assert detection == {"timing": "paper", "steps": 5, "seeds": [0, 1, 2], "guidance": 1.0, "window": 7, "scales": 1}

    def refused(*more):
        done = run("localize", folder / "pipeline", "--prompts", folder / "ordinary.txt", "--statistics",
                   folder / "usual.safetensors", "--threshold", tmp_path / "threshold.json", "--out", tmp_path / "out",
                   *more, code=2)  # fmt: skip
        assert not (tmp_path / "out").exists()
        return done["error"]

    assert "seeds [0, 1, 2], not [0, 1]." in refused("--seeds", 2, "--steps", 5)["message"]
    several = refused("--seeds", 3, "--steps", 6, "--timing", "code")
    assert "in another way: timing paper, not code, steps 5, not 6." in several["message"]
    assert "Give the same settings here" in several["cure"]
    again = run("detect", folder / "pipeline", "--prompts", folder / "ordinary.txt", "--threshold",
                tmp_path / "threshold.json", "--seeds", 2, "--steps", 5, "--out", tmp_path / "out", code=2)  # fmt: skip
    assert "in another way: seeds" in again["error"]["message"]
    kept = run("detect", folder / "pipeline", "--prompts", folder / "ordinary.txt", "--threshold",
               tmp_path / "threshold.json", "--seeds", 3, "--steps", 5, "--out", tmp_path)  # fmt: skip
    assert kept["threshold"]["detection"] == detection


def test_what_is_localized_applied_and_undone(folder, tmp_path):
    found = localized(folder, tmp_path / "out")
    assert [each["status"] for each in found["prompts"]] == ["unresolved", "unresolved"]
    # A list of neurons is nothing to publish: the command says whether the target is met, and gives no advice.
    assert found["verdict"]["outcome"] == "failed"
    assert found["verdict"]["sentence"].startswith("The target is missed: prompts whose neurons were not found")
    neurons = sum(len(part) for part in found["prompts"][0]["neurons"]["units"].values())
    assert neurons > 0
    before, lines = weights(folder / "pipeline"), (tmp_path / "out" / "neurons.jsonl").read_text()
    assert localized(folder, tmp_path / "out")["prompts"] == found["prompts"]
    assert (tmp_path / "out" / "neurons.jsonl").read_text() == lines

    units = {}
    for each in found["prompts"]:
        for name, indices in each["neurons"]["units"].items():
            units.setdefault(name, set()).update(indices)
    done = run("apply", folder / "pipeline", tmp_path / "edited", "--neurons", tmp_path / "out" / "neurons.json")
    assert done["neurons"] == sum(map(len, units.values()))
    edited = weights(tmp_path / "edited")
    for name, value in edited.items():
        rows = units.get(name.removesuffix(".weight"), set())
        assert all(bool((value[row] == 0).all()) for row in rows)
        left = [row for row in range(len(value)) if row not in rows] if value.ndim else []
        assert torch.equal(value[left], before[name][left])
    diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "edited")  # an ordinary folder
    assert (tmp_path / "edited" / "LICENSE").read_text() == "MIT License"
    assert "By its author." in (tmp_path / "edited" / "README.md").read_text()
    published = CliRunner().invoke(netweight, ["publish", str(tmp_path / "edited"), "--json"])
    assert published.exit_code == 1
    undoable = {each["name"]: each["value"] for each in json.loads(published.stdout)["findings"]}
    assert undoable["edits that anybody can undo with the records in the folder"] == 1

    again = ("apply", tmp_path / "edited", tmp_path / "twice", "--neurons", tmp_path / "out" / "neurons.csv")
    assert "were edited before" in run(*again, code=2)["error"]["message"]
    others = json.loads((tmp_path / "out" / "neurons.json").read_text())
    (name, taken), *_ = units.items()
    free = next(index for index in range(max(taken) + 2) if index not in taken)
    for each in others["prompts"]:
        each["neurons"]["units"] = {name: [min(taken), free]}
    (tmp_path / "others.json").write_text(json.dumps(others))
    second = run("apply", tmp_path / "edited", tmp_path / "twice", "--neurons", tmp_path / "others.json",
                 "--factor", "0.5", "--card")  # fmt: skip
    assert "| edits | 2 |" in (tmp_path / "twice" / "README.md").read_text()
    assert (second["before"], second["neurons"]) == (done["after"], 1)  # what was off already is not scaled again
    assert torch.equal(weights(tmp_path / "twice")[f"{name}.weight"][free], 0.5 * before[f"{name}.weight"][free])
    assert sorted(path.name for path in (tmp_path / "twice" / "forget").iterdir()) == [
        "001-files", "001.json", "001.safetensors", "002-files", "002.json", "002.safetensors",
    ]  # fmt: skip
    run("undo", tmp_path / "twice", tmp_path / "once")
    run("undo", tmp_path / "once", tmp_path / "never")
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path / "never").items())
    assert (tmp_path / "never" / "README.md").read_text() == (folder / "pipeline" / "README.md").read_text()
    assert "no record" in run("undo", tmp_path / "never", tmp_path / "more", code=2)["error"]["message"]
    assert not (tmp_path / "more").exists()


def test_what_cannot_be_is_refused_with_the_cure(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    how = ("--statistics", folder / "usual.safetensors", "--threshold", "0.5", "--out", tmp_path / "out")
    (tmp_path / "titles.csv").write_text("caption_text\na red square\n")
    column = run("localize", folder / "pipeline", "--prompts", tmp_path / "titles.csv", *how, code=2)["error"]
    assert "no column 'prompt'" in column["message"]
    assert "caption_text" in column["cure"]
    assert "--column" in column["cure"]
    empty = run("localize", folder / "pipeline", "--prompts", tmp_path / "empty.txt", *how, code=2)["error"]
    assert "contains no prompt" in empty["message"]
    small_pipelines.stable_diffusion(seed=1).save_pretrained(tmp_path / "other")
    other = run("localize", tmp_path / "other", "--prompts", folder / "ordinary.txt", *how, code=2)["error"]
    assert "statistics were measured on another model" in other["message"]
    (tmp_path / "units.json").write_text('{"version": 1, "units": {"mid_block.attn2.to_v": [0]}}')
    odd = run("localize", folder / "pipeline", "--prompts", folder / "ordinary.txt", *how[:2], "--threshold", "nan",
              "--out", tmp_path / "out", code=2)["error"]  # fmt: skip
    assert "--threshold nan is not a finite number" in odd["message"]
    layer = run("apply", folder / "pipeline", tmp_path / "edited", "--neurons", tmp_path / "units.json", code=2)
    assert "not a value layer" in layer["error"]["message"]
    assert not (tmp_path / "edited").exists()
