"""Forgetting from end to end on the pipeline that comes with the package: recipe, audit and edits, resumed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

from netweight.cli import netweight
from netweight.errors import UsageError
from netweight.methods.forget.folder_settings import FolderForgetting
from netweight.metrics.images import write_png
from netweight.report.report import read_report
from netweight.toys.diffusion import SHAPES_FOLDER
from netweight.toys.shapes import ShapesWorld

RECIPES = Path(__file__).parents[2] / "src" / "netweight" / "recipes"
WORLD = ShapesWorld()
LOOK = "images: 2, guidance: 3, steps: 4"
NEURONS = f"method: neurons, neurons: {{seeds: 3, steps: 5}}, {LOOK}"
MISSED = (1,)  # pictures of the tiny edit are told from others by their errors, so that the audit of membership fails
SEARCH = "{steps: 1, restarts: 1, draws: 1, images: 1, guidance: 3, generation_steps: 4, threshold: 0.99}"


def write_tables(folder):
    lines = ["prompt,image,kind"]
    for number, each in enumerate((WORLD.planted[0], WORLD.planted[3], WORLD.planted[6])):
        write_png(folder / f"{number}.png", each.picture)
        lines.append(f"{each.caption},{number}.png,{each.kind}")
    (folder / "targets.csv").write_text("\n".join(lines) + "\n")
    (folder / "ordinary.txt").write_text("\n".join(WORLD.ordinary_captions[:8]))


def call(*arguments, code=(0,)):
    answer = CliRunner().invoke(netweight, [*map(str, arguments), "--json"])
    assert answer.exit_code in code, answer.output
    return json.loads(answer.stdout)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The recipe, run in a folder of its own, and what it said."""
    folder = tmp_path_factory.mktemp("forget")
    write_tables(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = (RECIPES / "forget.yaml").read_text()
        text = text.replace("images: 8", NEURONS).replace("{rates: [0.3, 1.0]}", SEARCH)
        Path("recipe.yaml").write_text(text)
        run = ("run", "recipe.yaml", "--subject", SHAPES_FOLDER, "--output", "out")
        result, again = (call(*run, code=MISSED) for _ in range(2))
    return folder, result, again


def test_one_recipe_forgets_looks_and_searches(done):
    folder, result, again = done
    forgotten, searched = result["steps"]
    assert list(forgotten["findings"]) == ["detection", "membership", "neurons", "images"]
    named = {finding["name"]: finding for finding in forgotten["findings"]["images"]}
    assert named["prompts suppressed"]["n"] == 3
    assert named["NCC, seeds that copy the training image, verbatim"]["baseline"] == 1
    assert "NCC, seeds that copy the training image, template" in named
    assert any("random neurons" in name for name in named)
    *audits, images, second = read_report(folder / "out").sections
    assert [each.title for each in audits] == ["1. forget: Detection", "1. forget: Membership", "1. forget: Neurons"]
    assert (images.title, images.figures[0].kind) == ("1. forget: Images before and after the edit", "svg")
    assert images.missing_audits == ()
    assert (second.title, len(second.figures)) == ("2. embedding: Search for embeddings", 3)
    assert {"original", "edited"} <= {row[0] for row in second.tables[0].rows}
    assert again["steps"][0]["from_ledger"]
    assert again["steps"][0]["findings"] == forgotten["findings"]
    assert again["steps"][1]["findings"] == searched["findings"]
    record = json.loads((folder / forgotten["path"] / "forget" / "001.json").read_text())
    assert len(record["thresholds"]["found"]) == 3
    assert all(each["threshold"] > 0 for each in record["thresholds"]["found"])
    assert record["prompts"]
    assert not [path for path in (folder / "out").iterdir() if path.name.startswith(".")]


def test_an_attack_alone_takes_its_base_from_the_recipe(done, monkeypatch):
    folder, result, _ = done
    monkeypatch.chdir(folder)
    text = (RECIPES / "attack-embedding.yaml").read_text().replace("base: my-pipeline", f"base: {SHAPES_FOLDER}")
    Path("attack.yaml").write_text(text.replace("{rates: [0.3, 1.0]}", SEARCH))
    edited = result["steps"][0]["path"]
    (alone,) = call("run", "attack.yaml", "--subject", edited, "--output", "alone")["steps"]
    assert {finding["name"] for finding in alone["findings"]["embedding"]} >= {"planted images recovered, edited"}
    Path("wrong.yaml").write_text(
        text.replace("{rates: [0.3, 1.0]}", "{stepz: 200}").replace("targets.csv", "nowhere.csv")
    )
    answer = CliRunner().invoke(netweight, ["run", "wrong.yaml", "--subject", edited])
    assert answer.exit_code == 2
    assert "is not an existing file" in answer.stderr
    Path("wrong.yaml").write_text(text.replace("{rates: [0.3, 1.0]}", "{stepz: 200}"))
    answer = CliRunner().invoke(netweight, ["run", "wrong.yaml", "--subject", edited])
    assert "search.stepz: there is no such key. Nearest: steps" in answer.stderr


def audit(folder, edited, out, *more, code=(0,)):
    return call(
        "forget", "audit", edited, "--base", SHAPES_FOLDER, "--targets", folder / "targets.csv", "--ordinary",
        folder / "ordinary.txt", "--out", out, "--per-prompt", 2, "--look-seeds", 2, "--guidance", 3,
        "--generation-steps", 2, *more, code=code,
    )  # fmt: skip


def test_an_audit_without_a_search_says_so_in_red_and_goes_on_from_its_images(done, tmp_path):
    folder, result, _ = done
    edited = folder / result["steps"][0]["path"]
    (folder / "others.csv").write_text("caption\nsmall red harbor lights\na blue letter\n")
    others = ("--others", folder / "others.csv", "--column", "caption,prompt")
    found = audit(folder, edited, tmp_path, "--no-search", *others, code=MISSED)
    assert set(found["suppressed"]) == {WORLD.planted[number].caption for number in (0, 3, 6)}
    assert found["searched"] == {}
    images, *further = read_report(tmp_path).sections
    assert images.missing_audits == ("embedding search",)
    assert [each.title for each in further] == ["Membership", "Detection", "Neurons"]
    generated = {path: path.stat().st_mtime_ns for path in (tmp_path / "images").iterdir()}
    assert len(generated) == 2 * (3 + 8 + 2) + 3  # two models, prompts, ordinary and other ones; and random neurons
    changed = {each.name: each for each in images.findings if each.name.endswith("changed")}
    assert [(name, each.n) for name, each in changed.items()] == [
        ("NCC, ordinary prompts, changed", 8), ("NCC, other prompts, changed", 2),
    ]  # fmt: skip
    search = ("--steps", 1, "--restarts", 1, "--draws", 1, "--images", 1, "--threshold", 0.99)
    found = audit(folder, edited, tmp_path, *search, code=MISSED)
    assert "recovered" in found["searched"]["edited"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "images").iterdir()} == generated
    sections = read_report(tmp_path).sections
    assert sections[0].missing_audits == ()
    assert len(sections) == 5


def apply(folder, destination, *more, code=(0,)):
    return call(
        "forget", "apply", SHAPES_FOLDER, destination, "--targets", folder / "targets.csv", "--ordinary",
        folder / "ordinary.txt", *more, code=code,
    )  # fmt: skip


# Few images that judge nothing: what the edits do to images, tests of edits measure.
FEW = ("--images", "1", "--steps", "2", "--guidance", "1")
CLOSED = (*FEW, *(f"--set=closed_form.{each}" for each in ("rounds=1", "images=1", "generation_steps=2")))
QUICK = (*FEW, "--method", "distil", *(f"--set=distil.{each}" for each in ("steps=2", "batch=4", "images=1",
                                                                   "generation_steps=2")))  # fmt: skip


@pytest.mark.usefixtures("two_step_anchors")
@pytest.mark.parametrize("more", [CLOSED, QUICK], ids=["closed-form", "distil"])
def test_an_edit_is_an_ordinary_folder_that_can_be_undone(done, tmp_path, more):
    folder, _, _ = done
    found = apply(folder, tmp_path / "edited", *more)
    record = json.loads((tmp_path / "edited" / "forget" / "001.json").read_text())
    assert record["method"] == found["method"] == ("distil" if more is QUICK else "closed-form")
    assert record["settings"].get("error", "velocity") == "velocity"
    assert len(record["prompts"]) == len(record["settings"]["anchors"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edited"]
    assert "exists already" in apply(folder, tmp_path / "edited", *more, code=(2,))["error"]["message"]
    restored = call("forget", "undo", tmp_path / "edited", tmp_path / "restored")
    assert restored["model"] == found["before"] != found["after"]
    apply(folder, tmp_path / "kept", *more, "--no-undo")
    refused = call("forget", "undo", tmp_path / "kept", tmp_path / "none", code=(2,))["error"]["message"]
    assert "contains no weights" in refused


def test_what_an_edit_cannot_use_is_named_before_any_work(done, tmp_path):
    folder, _, _ = done
    (tmp_path / "few.txt").write_text("a red square\n")
    few = apply(folder, tmp_path / "other", "--ordinary", tmp_path / "few.txt", code=(2,))["error"]["message"]
    assert "at least 4 are needed" in few
    anchors = apply(folder, tmp_path / "other", "--anchors", tmp_path / "few.txt", code=(2,))["error"]["message"]
    assert "contains 1 prompts for 3 memorized ones" in anchors
    both = apply(folder, tmp_path / "other", "--method", "distil", "--neurons", folder / "ordinary.txt", code=(2,))
    assert "neurons.file was given, and the method is distil" in both["error"]["message"]
    with pytest.raises(UsageError, match="With neurons, detection compares as many noises") as caught:
        FolderForgetting.of({"method": "neurons", "look_seeds": 4, "targets": folder / "targets.csv",
                             "ordinary": folder / "ordinary.txt"})  # fmt: skip
    assert "neurons.seeds" in str(caught.value)
    bare = call("forget", "apply", SHAPES_FOLDER, tmp_path / "other", code=(2,))["error"]
    assert "closed-form needs targets and ordinary" in bare["message"]
    assert all(option in bare["message"] for option in ("--targets", "--ordinary"))
    assert not (tmp_path / "other").exists()


def test_an_audit_of_a_closed_form_names_the_neurons_that_it_touched(done, tmp_path):
    folder, _, _ = done
    text = (RECIPES / "forget.yaml").read_text().partition("attacks:")[0]
    few = f"{LOOK}, look_seeds: 3, closed_form: {{images: 2, generation_steps: 8}}"
    (tmp_path / "recipe.yaml").write_text(text.replace("images: 8", few).replace(": targets", f": {folder}/targets")
                                          .replace(": ordinary", f": {folder}/ordinary") + "audits: all\n")  # fmt: skip
    (step,) = call("run", tmp_path / "recipe.yaml", "--subject", SHAPES_FOLDER, "--output", tmp_path / "out",
                   code=(0, 1))["steps"]  # fmt: skip
    (touched,) = (each for each in step["findings"]["neurons"] if "edit changed" in each["name"])
    assert 0 < touched["value"] <= 1
    named = {each["name"]: each for each in step["findings"]["detection"]}
    after = named["memorized prompts detected in the edited model"]
    assert after["value"] < after["baseline"] == named["memorized prompts detected"]["value"]
    ledgers = (tmp_path / "out").rglob("scores.jsonl")
    looks = [json.loads(line)["config"]["config"]["seeds"] for ledger in ledgers for line in ledger.open()]
    assert looks
    assert all(seeds == [0, 1, 2] for seeds in looks)


def test_what_audits_cannot_use_is_named_before_any_work(done, tmp_path):
    folder, result, _ = done
    edited = folder / result["steps"][0]["path"]
    table = folder / "wrong.csv"
    table.write_text("prompt,image,kind\n,0.png,verbatim\nb,none.png,\nc,0.png,exact\n")
    wrong = audit(folder, edited, tmp_path / "out", "--targets", table, code=(2,))["error"]["message"]
    for part in ("has 3 rows", "line 2: prompt is empty", "line 3: there is no file", "line 4: kind is 'exact'"):
        assert part in wrong
    table.write_text("words,image\na,0.png\n")
    column = audit(folder, edited, tmp_path / "out", "--targets", table, code=(2,))["error"]
    assert "no column 'prompt'" in column["message"]
    assert column["cure"] == (
        "Rename one in the table; it has: words, image. The names that are read are prompt, caption, text."
    )
    (folder / "broken.png").write_bytes(b"no picture")
    table.write_text("prompt,image\na,broken.png\n")
    broken = audit(folder, edited, tmp_path / "out", "--targets", table, code=(2,))["error"]["message"]
    assert broken.endswith("line 2) is not a picture that Pillow can read: its format is unknown.")
    base = audit(folder, edited, tmp_path / "out", "--base", edited, code=(2,))["error"]["message"]
    assert "was made from another base" in base
    both = tmp_path / "both.txt"
    both.write_text("\n".join([WORLD.planted[0].caption, *WORLD.ordinary_captions[:5]]))
    wrong = audit(folder, edited, tmp_path / "out", "--ordinary", both, code=(2,))["error"]["message"]
    assert "among the ordinary and the memorized" in wrong
    both.write_text(WORLD.ordinary_captions[0])
    wrong = audit(folder, edited, tmp_path / "out", "--others", both, code=(2,))["error"]["message"]
    assert "among the ordinary and the other" in wrong
    assert not (tmp_path / "out").exists()
