"""`--plan`: what it counts is what the command then does, prediction by prediction, and nothing is done before."""

import json

import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")

import diffusers
from click.testing import CliRunner
from small_pipelines import WORDS, stable_diffusion

from netweight.cli import netweight
from netweight.hf.load_pipeline import text_to_image
from netweight.hf.pipeline_costs import Stage, measured_plan
from netweight.nn.text_to_image import most_rows, recomputed

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
PROMPT = "a large blue circle"
SMALL = ("--images", 2, "--steps", 3, "--guidance", 3.0)
SIZES = {"steps": 2, "batch": 6, "images": 1, "generation_steps": 2, "turned": 2, "compared": 2}
SISS = [word for key, value in SIZES.items() for word in ("--set", f"siss.{key}={value}")]
APPLY = ("forget", "apply", "pipeline", "edited", "--targets", "targets.csv", "--ordinary", "ordinary.txt", *SMALL)
COMMANDS = {
    "detect": ("forget", "detect", "pipeline", "--prompts", "memorized.txt", "--ordinary", "ordinary.txt", "--out",
               "out", "--seeds", 3, "--steps", 4),
    "closed form": (*APPLY, "--set", "closed_form.rounds=1", "--set", "closed_form.images=2", "--set",
                    "closed_form.generation_steps=2"),
    "siss": (*APPLY, "--method", "siss", *SISS),
    "neurons": ("forget", "localize", "pipeline", "--prompts", "memorized.txt", "--statistics", "usual.safetensors",
                "--threshold", "0.5", "--out", "neurons", "--seeds", 2, "--steps", 2),
}  # fmt: skip


def run(*words, code=(0, 1)):
    done = CliRunner().invoke(netweight, [*map(str, words), "--json"])
    assert done.exit_code in code, done.output
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    stable_diffusion().save_pretrained(tmp_path / "pipeline")
    (tmp_path / "ordinary.txt").write_text("\n".join(f"a {word} photo" for word in WORDS[1:]))
    (tmp_path / "memorized.txt").write_text(PROMPT)
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n{PROMPT},two.png\n")
    for name, color in (("one", "red"), ("two", "blue")):
        Image.new("RGB", (16, 16), color).save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_plan_counts_what_the_command_does(name, folder, monkeypatch):
    if name == "neurons":
        run("forget", "statistics", "pipeline", "--prompts", "ordinary.txt", "--out", "usual.safetensors")
    there = sorted(path.name for path in folder.iterdir())
    plan = run(*COMMANDS[name], "--plan", code=(0,))["plan"]
    assert sorted(path.name for path in folder.iterdir()) == there
    assert plan["seconds"] > 0
    assert plan["memory"] is None or plan["memory"] > 1e8

    forward, counts = diffusers.UNet2DConditionModel.forward, {True: 0, False: 0}

    def counted(self, sample, *arguments, **named):
        counts[torch.is_grad_enabled()] += len(sample)
        return forward(self, sample, *arguments, **named)

    monkeypatch.setattr(diffusers.UNet2DConditionModel, "forward", counted)
    run(*COMMANDS[name])
    predictions = sum(stage["predictions"] for stage in plan["stages"])
    gradients = sum(stage["gradients"] for stage in plan["stages"])
    assert counts[True] == gradients
    if any(stage["more"] for stage in plan["stages"]):
        assert counts[False] >= predictions
    else:
        assert counts[False] == predictions


def test_the_plan_of_an_audit_counts_scores_errors_images_and_searches(folder, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")
    run(*COMMANDS["closed form"], "--no-check")
    audit = [
        "forget", "audit", "edited", "--base", "pipeline", "--targets", "targets.csv", "--ordinary", "ordinary.txt",
        "--out", "audit", "--per-prompt", 1, "--look-seeds", 2, "--noises", 3,
    ]  # fmt: skip
    for key, value in {
        "steps": 1, "draws": 2, "images": 1, "generation_steps": 2, "starts": "[original,unrelated]", "looks": "[1]",
        "threshold": 2.0, "guidance": 3.0,
    }.items():  # fmt: skip
        audit += ["--set", f"search.search.{key}={value}"]
    stages = {each["name"]: each for each in run(*audit, "--plan", code=(0,))["plan"]["stages"]}
    forward, counts = diffusers.UNet2DConditionModel.forward, {True: 0, False: 0}

    def counted(self, sample, *arguments, **named):
        counts[torch.is_grad_enabled()] += len(sample)
        return forward(self, sample, *arguments, **named)

    monkeypatch.setattr(diffusers.UNet2DConditionModel, "forward", counted)
    run(*audit)
    assert counts[True] == sum(each["gradients"] for each in stages.values())
    assert counts[False] == sum(each["predictions"] for each in stages.values())


def test_undo_is_planned_by_the_bytes_that_it_copies(folder):
    run(*COMMANDS["closed form"])
    plan = run("forget", "undo", "edited", "restored", "--plan", code=(0,))["plan"]
    assert plan["bytes"] == sum(path.stat().st_size for path in (folder / "edited").rglob("*") if path.is_file())
    assert not (folder / "restored").exists()


def test_people_read_times_and_memory(folder):
    done = CliRunner().invoke(netweight, [str(word) for word in (*COMMANDS["siss"], "--plan")])
    assert done.exit_code == 0
    assert "Nothing was done. All steps together take about" in done.output
    assert "The most memory at once is about" in done.output
    assert "check: images before the edit" in done.output


def test_large_latents_are_computed_in_parts_and_small_ones_together():
    class Model:
        def __init__(self, side):
            self.side = side

        def initial_noise(self, seeds):
            return torch.zeros(len(seeds), 4, self.side, self.side)

    assert most_rows(Model(8), 64) == 64
    assert most_rows(Model(64), 64) == 16
    assert most_rows(Model(64), 64, gradients=True) == 4
    assert most_rows(Model(1024), 64) == 1


def test_a_pass_that_is_computed_again_has_the_same_gradients():
    model = text_to_image(stable_diffusion(size=32))
    latents, text, at = model.initial_noise([0]), model.embed([PROMPT]), model.timesteps(2)[0]
    gradients = []
    for again in (False, True):
        moved = latents.clone().requires_grad_()
        if again:
            with recomputed(model):
                assert model.denoiser.is_gradient_checkpointing
                model.predict(moved, at, text).sample.square().sum().backward()
        else:
            model.predict(moved, at, text).sample.square().sum().backward()
        gradients.append(moved.grad)
    assert torch.equal(*gradients)
    assert not model.denoiser.is_gradient_checkpointing


def test_a_plan_multiplies_what_it_measured():
    model = text_to_image(stable_diffusion())
    plan = measured_plan(model, [Stage("one", predictions=10), Stage("two", predictions=30, decoded=2, more=True)])
    assert plan.seconds[0] == pytest.approx(10 * plan.units.prediction)
    assert plan.seconds[1] == pytest.approx(30 * plan.units.prediction + 2 * plan.units.decoding)
    assert "at least" in plan.result().lines[1]
