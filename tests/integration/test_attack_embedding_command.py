"""`netweight attack embedding` end to end: folders of small pipelines and a table of images in, a report out."""

import json

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")
pytest.importorskip("PIL", reason="Pillow is in the federated extra")

import small_pipelines

from netweight.cli import netweight
from netweight.hf.load_pipeline import one_token_words, padding_masks, text_to_image
from netweight.methods.forget.mitigations import AttentionScaling, RandomTokens
from netweight.metrics.images import write_png

PROMPTS = ["a red square", "the large blue circle"]


@pytest.fixture(scope="module")
def model():
    return text_to_image(small_pipelines.stable_diffusion(prediction="v_prediction"), name="small")


@pytest.fixture(scope="module")
def case(model, tmp_path_factory):
    """A pipeline, the same with half its value neurons off, and two of its own images as what is to be found."""
    folder = tmp_path_factory.mktemp("embedding")
    model.save(folder / "base")
    images = model.generate(model.embed(PROMPTS), [1, 2], guidance=1, steps=2)
    for place, image in enumerate(images):
        write_png(folder / f"{place}.png", image)
    (folder / "targets.csv").write_text(f"prompt,image\n{PROMPTS[0]},0.png\n{PROMPTS[1]},1.png\n")
    edited = text_to_image(small_pipelines.stable_diffusion(prediction="v_prediction"))
    with torch.no_grad():
        for name, module in edited.denoiser.named_modules():
            if name.endswith("attn2.to_v"):
                module.weight[::2] = 0
    edited.save(folder / "edited")
    return folder


def call(case, out, *arguments):
    fixed = [
        str(case / "edited"), "--base", str(case / "base"), "--targets", str(case / "targets.csv"), "--steps", "2",
        "--draws", "2", "--restarts", "1", "--images", "2", "--guidance", "1", "--generation-steps", "2",
        "--out", str(out),
    ]  # fmt: skip
    return CliRunner().invoke(netweight, ["attack", "embedding", *fixed, *arguments])


def test_models_and_controls_are_searched_and_a_second_call_remembers(case, tmp_path):
    answer = call(case, tmp_path, "--threshold", "1", "--json", "--also", f"again={case / 'edited'}", "--seeds", "2")
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    assert set(result["verdicts"]) == {"original", "edited", "again"}
    assert "none of 4 recovered in searches of 2 steps" in result["verdicts"]["edited"]
    findings = {finding["name"]: finding for finding in result["findings"]}
    assert findings["never-trained images recovered, edited"]["n"] == 4
    assert findings["planted images recovered, original"]["value"] == 0
    assert "resistance against edited, again" in findings
    report = json.loads((tmp_path / "report.json").read_text())
    section = report["sections"][0]
    assert [figure["kind"] for figure in section["figures"]] == ["svg"] * 3
    assert len(section["tables"][0]["rows"]) == 3 * 2 * 3
    assert set(report["provenance"]["inputs"]) == {"targets.csv"}
    assert (tmp_path / "report.html").stat().st_size > 10_000
    lines = (tmp_path / "embedding" / "searches.jsonl").read_text()
    assert len(lines.splitlines()) == 3 * 4 * 2
    assert len(list((tmp_path / "embedding" / "found").iterdir())) == 24
    again = call(case, tmp_path, "--threshold", "1", "--seeds", "2")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "embedding" / "searches.jsonl").read_text() == lines
    assert "2 memorized images and 2 controls are searched for in: original, edited." in again.output
    assert "edited: Planted images: none of 4 recovered" in again.output


def test_controls_of_ones_own_and_a_threshold_that_everything_meets(case, tmp_path):
    (tmp_path / "controls.jsonl").write_text(json.dumps({"prompt": "a photo", "image": str(case / "1.png")}) + "\n")
    (tmp_path / "plain.jsonl").write_text('{"prompt": "a circle"}\n{"prompt": "a square"}\n')
    more = ["--controls", str(tmp_path / "controls.jsonl"), "--unrelated", str(tmp_path / "plain.jsonl"), "--json"]
    answer = call(case, tmp_path / "out", "--threshold", "-1", *more)
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    assert "does not show that the model stores the memorized images" in result["verdicts"]["edited"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "embedding" / "searches.jsonl").read_text().splitlines()]
    assert {row["config"]["target"] for row in rows} == {*PROMPTS, "control: a photo"}
    assert all(trial["steps"] == 0 for row in rows for trial in row["value"])
    assert rows[0]["config"]["settings"]["error"] == "velocity"
    assert rows[0]["config"]["similarity"] == "NCC"


def test_bad_input_is_named_before_any_search(case, tmp_path):
    def refused(*arguments):
        answer = call(case, tmp_path / "out", *arguments)
        assert answer.exit_code in (2, 3), answer.output
        assert not (tmp_path / "out").exists()
        return answer.output

    table = case / "wrong.csv"
    table.write_text("prompt,picture\na,0.png\n")
    assert "no column 'image'" in refused("--targets", str(table))
    table.write_text("prompt,image\na,none.png\n")
    assert "line 2: there is no file" in refused("--targets", str(table))
    table.write_text("prompt,image\na,targets.csv\n")
    assert "not a picture that Pillow can read" in refused("--targets", str(table))
    assert "model_index.json" in refused("--base", str(tmp_path))
    assert "must be given together" in refused("--sscd", str(table))
    assert "has the SHA-256" in refused("--sscd", str(table), "--sscd-sha256", "0" * 64)
    assert "'frozen' does not name a path" in refused("--also", "frozen")
    assert "Give it another name" in refused("--also", f"edited={case / 'base'}")


def test_attention_scaling_and_random_tokens_work_on_pipelines(model):
    masks = padding_masks(model)(PROMPTS)
    assert masks.sum(1).tolist() == [5, 6]
    assert "square" in one_token_words(model)
    plain = model.generate(model.embed(PROMPTS), [0, 1], guidance=3, steps=2)
    same = AttentionScaling(lambda prompts: torch.ones_like(padding_masks(model)(prompts)), factor=1.0)
    for mitigation in (AttentionScaling(padding_masks(model)), RandomTokens(1, one_token_words(model)), same):
        with mitigation(model, PROMPTS) as mitigated:
            images = mitigated.generate(mitigated.embed(PROMPTS), [0, 1], guidance=3, steps=2)
        assert torch.allclose(images, plain, atol=1e-5) == (mitigation is same)
    masked = text_to_image(small_pipelines.pixart())
    assert torch.equal(padding_masks(masked)(PROMPTS), masked.embed(PROMPTS).mask)
