"""`netweight space direction, edit, sample, neighbors, export, merge, invert` on a space of a small pipeline."""

import copy
import json

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import small_pipelines

from netweight.cli import netweight
from netweight.methods.space import inversion
from netweight.methods.space.points import NamedPoints, read_direction, read_points, write_points
from netweight.methods.space.space import WeightSpace
from netweight.metrics.images import write_png
from netweight.nn import Adapter, LowRank
from netweight.nn.apply_lora import linear_layers, merge_
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.reading import read_adapter
from netweight.store.lora_formats.writing import write_adapter

COUNT = 24


def run(*arguments, code=0):
    done = CliRunner().invoke(netweight, ["space", *map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def error(*arguments, code=2):
    return run(*arguments, code=code)["error"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A pipeline, LoRAs of rank 1 whose `up` factors follow an attribute, their bank and space, and labels."""
    place = tmp_path_factory.mktemp("space")
    pipeline = small_pipelines.stable_diffusion()
    pipeline.save_pretrained(place / "pipeline")
    shapes = linear_layers(pipeline.unet, ("**.attn2.to_q", "**.attn2.to_v"), component="unet")
    noise = torch.Generator().manual_seed(0)
    down = {name: torch.randn(1, columns, generator=noise) for name, (_, columns) in shapes.items()}
    beard_way = {name: torch.randn(rows, 1, generator=noise) for name, (rows, _) in shapes.items()}
    (place / "loras").mkdir()
    rows = ["name,beard,width"]
    for number in range(COUNT):
        beard = number % 2
        factors = {
            name: LowRank(
                down[name], 0.2 * torch.randn(size[0], 1, generator=noise) + 0.3 * beard * beard_way[name], 0.5
            )
            for name, size in shapes.items()
        }
        write_adapter(Adapter(factors), place / "loras" / f"person-{number:02d}.safetensors")
    bank = AdapterBank.ingest(place / "loras", place / "bank")
    for number, name in enumerate(bank.names):
        rows.append(f"{name},{number % 2},{number / 10}")
    (place / "labels.csv").write_text("\n".join(rows) + "\n")
    WeightSpace.fit(bank, components=12).save(place / "space")
    return place


@pytest.fixture(scope="module")
def opened(place):
    return WeightSpace.open(place / "space", AdapterBank.open(place / "bank"))


def on(place, command, *arguments):
    return (command, place / "space", "--bank", place / "bank", *arguments)


@pytest.fixture(scope="module")
def beard(place):
    found = run(*on(place, "direction", "--labels", place / "labels.csv", "--column", "beard", "--resamples", 20,
                    "--out", place / "beard.json"))  # fmt: skip
    return place / "beard.json", found


def test_a_direction_is_found_and_its_held_out_score_told(beard, opened):
    file, found = beard
    auc, cosine = found["findings"]
    assert auc["name"] == "held-out AUC of beard"
    assert auc["value"] > 0.9
    assert cosine["value"] > 0.7
    assert found["known"] == COUNT
    direction = read_direction(file)
    direction.check(opened.scores)
    assert direction.deviation == pytest.approx(found["deviation"])


def test_a_direction_is_corrected_by_what_it_changes_in_images(place, beard, opened, tmp_path):
    arguments = on(place, "direction", "--labels", place / "labels.csv", "--column", "beard", "--corrected",
                   "--out", tmp_path / "corrected.json")  # fmt: skip
    assert "reads them" in error(*arguments)["message"]
    found = run(*arguments, "--pipeline", place / "pipeline", "--reader", "image_readers:colors", "--steps", 2,
                "--rounds", 1, "--at", opened.names[3])  # fmt: skip
    assert found["kind"] == "corrected"
    again = [*map(str, arguments), "--pipeline", str(place / "pipeline"), "--reader", "image_readers:colors", "--steps",
             "1", "--rounds", "1", "--at", opened.names[3], "--overwrite"]  # fmt: skip
    said = CliRunner().invoke(netweight, ["space", *again], catch_exceptions=False).output
    assert f"space edit {place / 'space'} {opened.names[3]} --move {tmp_path / 'corrected.json'}=1 --unit raw" in said
    corrected, plain = read_direction(tmp_path / "corrected.json"), read_direction(beard[0])
    corrected.check(opened.scores)
    assert abs(corrected.cosine(plain)) < 0.999
    assert torch.equal(corrected.step(1, "raw"), corrected.vector)


def test_a_file_of_points_that_is_missing_is_named(place):
    for point in ("gone.json", "gone.json:sample-0-0"):
        assert error(*on(place, "export", point, place / "x"))["message"] == "There is no file gone.json."


def test_an_edit_is_exported_at_its_rank_and_loaded_by_diffusers(place, beard, opened, tmp_path):
    name = opened.names[4]
    run(*on(place, "edit", name, "--move", f"{beard[0]}=2.5", "--out", tmp_path / "edited.json"))
    direction = read_direction(beard[0])
    [edited] = read_points(tmp_path / "edited.json").scores
    assert torch.allclose(edited.double(), opened.scores[4].double() + direction.step(2.5), atol=1e-5)
    pipeline = small_pipelines.stable_diffusion()
    sample, time, text = torch.randn(1, 4, 8, 8), torch.tensor(500), torch.randn(1, 10, 24)
    expected_unet = copy.deepcopy(pipeline.unet)
    merge_(expected_unet, opened.adapter(edited), component="unet")
    with torch.no_grad():
        expected, base = (unet(sample, time, text).sample for unet in (expected_unet, pipeline.unet))
    for layout in ("diffusers", "kohya"):
        found = run(*on(place, "export", f"{tmp_path / 'edited.json'}:{name}", tmp_path / layout, "--layout", layout))
        told = found[name]
        assert told["relative_error"] < 1e-5
        pipeline.load_lora_weights(tmp_path / layout, weight_name="pytorch_lora_weights.safetensors")
        with torch.no_grad():
            got = pipeline.unet(sample, time, text).sample
        pipeline.unload_lora_weights()
        assert (got - expected).abs().max() < 0.01 * (expected - base).abs().max()
    cut = run(*on(place, "export", tmp_path / "edited.json", tmp_path / "cut", "--rank", 1, "--layout", "peft"))[name]
    assert cut["ranks"] == [1, 1]
    whole, kept = opened.adapter(edited), read_adapter(tmp_path / "cut")
    lost = sum(float((whole.factors[m].dense() - kept.factors[m].dense()).square().sum()) for m in whole.modules)
    assert cut["relative_error"] == pytest.approx((lost / whole.norm() ** 2) ** 0.5, abs=1e-4)


def test_samples_are_points_with_an_audit(place, opened, tmp_path):
    for number, (sampler, more) in enumerate(
        [("pairs", []), ("gaussian", []), ("kernel", ["--bandwidth", 0.5]),
         ("conditional", ["--labels", place / "labels.csv", "--given", "beard=1"])]
    ):  # fmt: skip
        found = run(
            *on(place, "sample", "--count", 6, "--sampler", sampler, *more, "--out", tmp_path / f"{number}.json")
        )
        assert len(found["findings"]) == 4
        points = read_points(tmp_path / f"{number}.json")
        assert points.scores.shape == (6, 12)
        points.check(opened.scores)
    assert "labels" in error(*on(place, "sample", "--sampler", "conditional", "--out", tmp_path / "x.json"))["message"]
    assert "conditional" in error(*on(place, "sample", "--given", "a=1", "--out", tmp_path / "x.json"))["message"]
    assert error(*on(place, "sample", "--out", tmp_path / "0.json"))["kind"] == "OutputExists"


def test_neighbors_of_models_and_of_adapters(place, opened):
    name = opened.names[3]
    [first, *_] = run(*on(place, "neighbors", name))[name]
    assert first["name"] == name
    assert first["cosine"] == pytest.approx(1)
    projected = run(*on(place, "neighbors", place / "loras" / "person-03.safetensors", "--count", 1))["person-03"]
    assert projected[0]["name"] == name
    assert projected[0]["distance"] < 0.05
    told = error(*on(place, "neighbors", "person-3"))
    assert told["kind"] == "NameNotFound"
    assert "person-0" in told["cure"]
    assert run(*on(place, "neighbors", "mean"))["mean"][0]["cosine"] is None


def test_merging_is_exact_and_truncation_tells_its_error(place, tmp_path):
    files = [place / "loras" / f"person-0{number}.safetensors" for number in (0, 1)]
    found = run("merge", *files, tmp_path / "both", "--weight", 0.5, "--weight", -2)
    one, two, both = (read_adapter(path) for path in (*files, tmp_path / "both"))
    assert found["ranks"] == [1, 2] or found["ranks"] == [2, 2] or found["ranks"] == [1, 1]
    assert found["relative_error"] < 1e-6
    for name in one.modules:
        expected = 0.5 * one.factors[name].dense() - 2 * two.factors[name].dense()
        assert torch.allclose(both.factors[name].dense(), expected, atol=1e-5)
    assert "weights" in error("merge", *files, tmp_path / "x", "--weight", 1)["message"]


def test_images_become_points_and_a_killed_call_goes_on(place, opened, tmp_path, monkeypatch):
    pictures = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    (tmp_path / "many").mkdir()
    for number, picture in enumerate(pictures):
        write_png(tmp_path / ("many" if number else ".") / f"{number}.png", picture)
    (tmp_path / "masks").mkdir()
    for number in range(3):
        write_png(tmp_path / "masks" / f"{number}.png", torch.ones(1, 16, 16))
    arguments = on(place, "invert", tmp_path / "0.png", tmp_path / "many", "--pipeline", place / "pipeline", "--prompt",
                   "a photo", "--steps", 3, "--out", tmp_path / "found.json")  # fmt: skip
    found = run(*arguments)
    assert set(found["distances"]) == {"0", "many"}
    points = read_points(tmp_path / "found.json")
    assert points.names == ("0", "many")
    assert points.scores.abs().sum(1).min() > 0
    lines = (tmp_path / "found.jsonl").read_text()
    again = run(*arguments, "--overwrite")
    assert again.pop("continued") == ["2 of 2 found"]
    assert again == found
    assert (tmp_path / "found.jsonl").read_text() == lines
    masked = run(*arguments[:-1], tmp_path / "masked.json", "--masks", tmp_path / "masks")
    assert masked["distances"]["0"] == pytest.approx(found["distances"]["0"], rel=1e-4)
    # A picture of another shape is cut in its middle, which is said; hidden files of macOS are not read.
    (tmp_path / "wide").mkdir()
    write_png(tmp_path / "wide" / "0.PNG", torch.nn.functional.pad(pictures[0], (2, 2)))
    (tmp_path / "wide" / "._0.png").write_bytes(b"\0\5\x16\7")
    (tmp_path / "wide" / "Thumbs.db").write_bytes(b"of Windows")
    wide = ("invert", place / "space", "--bank", place / "bank", tmp_path / "wide", *arguments[6:-1])
    cut = run(*wide, tmp_path / "cut.json")
    assert cut["distances"]["wide"] == pytest.approx(found["distances"]["0"], rel=1e-4)
    assert cut["warnings"] == ["Resized and cut in the middle, to 16 × 16 pixels: 1 picture (0.PNG)."]
    (tmp_path / "wide" / "1.jpg").write_bytes(b"")
    assert "1.jpg is not a picture that Pillow can read" in error(*wide, tmp_path / "y.json")["message"]
    began, own = [], inversion._inverted

    def killed(model, space, targets, *rest):
        began.append(targets[0].name)
        if len(began) == 2:
            raise KeyboardInterrupt
        return own(model, space, targets, *rest)

    monkeypatch.setattr(inversion, "_inverted", killed)
    again = (*arguments[:-1], tmp_path / "again.json")
    assert CliRunner().invoke(netweight, ["space", *map(str, again)]).exit_code == 130
    assert run(*again)["distances"] == found["distances"]
    assert began == ["0", "many", "many"]


def test_points_whose_names_are_no_folders_stay_where_they_are_written(place, opened, tmp_path):
    points = NamedPoints(("../beside", "point-0"), opened.scores[:2].clone())
    write_points(points, tmp_path / "points.json")
    found = run(*on(place, "export", tmp_path / "points.json", tmp_path / "out", "--rank", 1))
    assert {name: found[name]["path"] for name in points.names} == {
        "../beside": str(tmp_path / "out" / "point-0-" / "pytorch_lora_weights.safetensors"),
        "point-0": str(tmp_path / "out" / "point-0" / "pytorch_lora_weights.safetensors"),
    }
    assert not (tmp_path / "beside").exists()


def test_mistakes_are_named_before_any_work(place, beard, tmp_path):
    labels = tmp_path / "labels.csv"
    first = WeightSpace.open(place / "space", AdapterBank.open(place / "bank")).names[0]
    labels.write_text(f"name,beard\n{first},1\nnobody,0\n")
    out = ("--out", tmp_path / "x.json")
    told = error(*on(place, "direction", "--labels", labels, "--column", "beard", *out))
    assert "'nobody', which is not in the space" in told["message"]
    labels.write_text(f"name,beard\n{first},1\n")
    assert "one value alone" in error(*on(place, "direction", "--labels", labels, "--column", "beard", *out))["message"]
    told = error(*on(place, "direction", "--labels", place / "labels.csv", "--column", "bread", *out))
    assert "beard" in told["cure"]
    other = json.loads(beard[0].read_text())
    other["direction"]["space"] = "xxh3-128:0"
    (tmp_path / "other.json").write_text(json.dumps(other))
    told = error(*on(place, "edit", first, "--move", f"{tmp_path / 'other.json'}=1", *out))
    assert "another space" in told["message"]
    assert (
        error(*on(place, "edit", first, "--move", f"{place / 'labels.csv'}=1", *out), code=3)["kind"] == "CorruptBlob"
    )
    assert "bank" in error("neighbors", place / "space", first)["cure"]
    assert not (tmp_path / "x.json").exists()
