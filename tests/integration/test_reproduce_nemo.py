"""NeMo's tables on the miniature, two prompts and two images of each: they run, share runs, say what they are."""

import json

import pytest
import torch
from click.testing import CliRunner

from netweight.cli import netweight
from netweight.errors import UsageError
from netweight_experiments.tables import registry, run_table
from netweight_experiments.tables.registry import published

pytest.importorskip("diffusers", reason="pipelines come with the diffusion extra")
pytest.importorskip("transformers", reason="pipelines come with the diffusion extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

TINY = {"prompts": 2, "images": 2}
TABLES = [
    *(f"nemo-{name}" for name in ("table1", "runtime", "fig3", "fig5", "fig6", "fig7", "thresholds", "ablation")),
    *(f"nemo-{name}" for name in ("ssim-by-type", "shared-neurons")),
    *(f"nemo-rerun-{name}" for name in ("neurons", "layers", "shared-sets")),
]


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


def test_all_of_them_are_registered_as_stand_ins():
    entries = registry.registered()
    assert set(TABLES) <= set(entries)
    assert all(entries[table].stand_in and "diffusion" in entries[table].needs for table in TABLES)
    assert all("recipe" in entries[table].options for table in TABLES)


def test_mitigations_are_measured_by_kind_and_searched(out):
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


def test_a_second_call_takes_what_is_remembered_and_a_killed_one_goes_on(out):
    tried("nemo-table1", out)
    before = ledgers(out)
    again = tried("nemo-table1", out)
    assert ledgers(out) == before
    file = out / "nemo-runs-small" / "images.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:-2]) + whole[-2][:40])  # killed in the middle of a line
    resumed = tried("nemo-table1", out)
    assert ledgers(out) == before
    assert rows(resumed) == rows(again)


def test_detection_is_drawn_by_kind(out):
    found = rows(tried("nemo-fig3", out))
    assert list(found) == ["verbatim", "template", "ordinary, held out"]
    assert found["ordinary, held out"]["AUC against ordinary prompts"] is None
    assert all(row["similarity of noise differences, least"] <= row["similarity of noise differences, most"]
               for row in found.values())  # fmt: skip
    kinds = rows(tried("nemo-ssim-by-type", out))
    assert kinds["verbatim"]["greatest SSIM to the training image, median"] > 0.5
    assert kinds["ordinary, held out"]["greatest SSIM to the training image, median"] is None


def test_neurons_are_counted_beside_the_re_run_which_is_not_the_papers(out):
    counted = tried("nemo-rerun-neurons", out)
    numbers = published("nemo-rerun-neurons")
    assert [column.name for column in counted.measured.columns] == [column.name for column in numbers.columns]
    both = [c for c in counted.comparisons if c.measured is not None and c.published is not None]
    assert {c.row for c in both} == {"verbatim", "template"}
    page = (counted.folder / "report.html").read_text()
    assert "Third-party re-run beside measured" in page
    assert "not the paper" in page
    drawn = tried("nemo-fig5", out)
    assert rows(drawn) == rows(counted)
    assert [own.title.partition(":")[0] for own in drawn.measured.tables][:2] == [
        "Third-party re-run, not the paper's"
    ] * 2
    layers = rows(tried("nemo-rerun-layers", out))
    assert [row["width"] for row in layers.values()] == [32, 64, 64]
    mean = sum(row["refined neurons per prompt, mean"] for row in layers.values())
    assert mean == pytest.approx(rows(counted)["verbatim"]["refined neurons, mean"])
    sets = rows(tried("nemo-rerun-shared-sets", out))
    assert sets["the commonest set, whichever it is"]["prompts with exactly this set"] in (0, 1)


def test_shared_neurons_are_switched_off_by_themselves(out):
    result = tried("nemo-shared-neurons", out)
    found = rows(result)
    titles = ("shared neurons off", "neurons of one prompt alone off", "all neurons found off")
    shared, single, every = (found[f"{title}, verbatim"]["neurons off or scaled, median"] for title in titles)
    assert shared + single == every
    assert result.measured.tables[0].rows[-1][0] == "all"


def test_edits_add_up_and_factors_are_told_apart(out):
    added = tried("nemo-fig6", out)
    counts = [row["neurons off"] for name, row in rows(added).items() if name.startswith("NeMo")]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert any(column.name == "kernel distance of pixels" for column in added.measured.columns)
    scaled = rows(tried("nemo-fig7", out))
    assert scaled["factor 1, verbatim"]["NCC to the unedited generation, median"] == pytest.approx(1)
    assert scaled["factor 0, verbatim"]["neurons off or scaled, median"] > 0


def test_thresholds_decide_on_neurons(out):
    result = tried("nemo-thresholds", out)
    assert len({row.name.rpartition(", ")[0] for row in result.measured.rows}) <= 11
    for row in rows(result).values():
        assert row["refined neurons, median"] <= row["initial neurons, median"]
    assert len(result.measured.figures) == 2


def test_parts_of_the_method_are_left_out(out):
    found = rows(tried("nemo-ablation", out))
    assert "all neurons of layer 2 off, verbatim" in found
    initial = found["initial selection off, not refined, verbatim"]["neurons off or scaled, median"]
    assert initial >= found["NeMo's neurons off, verbatim"]["neurons off or scaled, median"]
    assert "found at the second timestep, template" in found


def test_every_step_has_its_cost(out):
    found = rows(tried("nemo-runtime", out))
    parts = [found[f"{step}, verbatim"]["images through the denoiser, most"]
             for step in ("detection", "initial selection", "refinement")]  # fmt: skip
    assert found["all steps, verbatim"]["images through the denoiser, most"] == sum(parts)  # there is one such prompt
    assert found["all steps, verbatim"]["time, longest"] > 0


def call(*arguments):
    return CliRunner().invoke(netweight, ["reproduce", *[str(part) for part in arguments]])


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    """A pipeline of random weights, prompts, images, a network in the place of SSCD, and a recipe that names them."""
    import hashlib

    from PIL import Image
    from small_pipelines import stable_diffusion

    folder = tmp_path_factory.mktemp("own")
    stable_diffusion().save_pretrained(folder / "pipeline")
    for number in range(3):
        pixels = torch.rand(16, 16, 3, generator=torch.Generator().manual_seed(number))
        Image.fromarray((pixels * 255).byte().numpy()).save(folder / f"{number}.png")
    (folder / "memorized.csv").write_text(
        "prompt,image\na red circle,0.png\nthe large blue square,1.png\nphoto of a green square,2.png\n"
    )
    for name, color in (("calibration", "red"), ("held_out", "green"), ("quality", "blue"), ("usual", "small")):
        (folder / f"{name}.txt").write_text(
            "".join(f"a {color} {noun} {name[0]}\n" for noun in ("circle", "square", "photo"))
        )
    network = torch.nn.Sequential(torch.nn.AvgPool2d(80), torch.nn.Flatten())
    torch.jit.trace(network, torch.zeros(1, 3, 320, 320)).save(str(folder / "sscd.pt"))
    recipe = {key: str(folder / f"{key}.txt") for key in ("calibration", "held_out", "quality", "usual")}
    recipe |= {
        "model": str(folder / "pipeline"), "memorized": str(folder / "memorized.csv"), "sscd": str(folder / "sscd.pt"),
        "sscd_sha256": hashlib.sha256((folder / "sscd.pt").read_bytes()).hexdigest(),
        "steps": 2, "search_steps": 2, "images": 2, "rows": 16,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def test_the_papers_scale_takes_a_recipe(own_model, tmp_path):
    result = run_table(
        "nemo-table1", scale="paper", out=tmp_path, options={"recipe": own_model / "recipe.yaml", **TINY}
    )
    found = rows(result)
    assert any(name.startswith("NeMo's neurons off") for name in found)
    assert "SSCD to the training image, median" in next(iter(found.values()))
    assert not any("A miniature" in sentence for sentence in result.measured.differs)
    counted = run_table(
        "nemo-rerun-neurons", scale="paper", out=tmp_path, options={"recipe": own_model / "recipe.yaml"}
    )
    assert sum(row["prompts"] for row in rows(counted).values()) == 3


def test_a_recipe_is_refused_before_work_with_all_its_problems(own_model, tmp_path):
    recipe = json.loads((own_model / "recipe.yaml").read_text())
    recipe |= {"held_out": "nowhere.txt", "inception": str(own_model / "sscd.pt"), "guidence": 3}
    recipe.pop("usual")
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = call("nemo-fig5", "--scale", "paper", "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path)
    assert result.exit_code == 2
    assert "Nearest: guidance" in result.output
    recipe.pop("guidence")
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = call("nemo-fig5", "--scale", "paper", "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path)
    for said in ("held_out: there is no file", "usual, statistics", "inception_sha256", "references:", "4 problems"):
        assert said in result.output
    recipe = json.loads((own_model / "recipe.yaml").read_text()) | {"sscd_sha256": "0" * 64}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    result = call("nemo-fig5", "--scale", "paper", "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path)
    assert result.exit_code == 3
    assert "it was not opened" in result.output
    result = call("nemo-table1", "--scale", "paper", "--out", tmp_path)
    assert result.exit_code == 2
    assert "netweight_experiments/tables/nemo/nemo-tables.yaml" in result.output
    assert call("nemo-table1", "--recipe", own_model / "recipe.yaml", "--out", tmp_path).exit_code == 2
    assert not list(tmp_path.glob("*/result.json"))


def test_a_try_needs_two_of_everything(tmp_path):
    with pytest.raises(UsageError, match="too few"):
        run_table("nemo-fig5", out=tmp_path, options={"images": 1})
    with pytest.raises(UsageError, match="cannot be tried"):
        run_table("nemo-fig5", out=tmp_path, options={"prompts": 99})
