"""The check right after an edit: pictures that are still reproduced are counted, named, and end the command with 1."""

import json

import pytest
import torch

from netweight.data.images.pairs import MemorizedPair
from netweight.methods.forget.check import EditCheck, check_edit

PICTURES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
OTHER = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def pair(name, prompt, picture):
    return MemorizedPair(name, prompt, PICTURES[picture])


PAIRS = [pair("first", "harbor", 0), pair("second", "harbor", 1), pair("third", "market", 2)]


def images(*chosen):
    """One image for each number of a picture; None stands for another one."""
    return torch.stack([OTHER[0] if each is None else PICTURES[each] for each in chosen])


def test_each_picture_of_a_caption_is_counted_for_itself():
    before = {"harbor": images(0, 0, 1), "market": images(2, 2, 2)}
    check = check_edit(PAIRS, before, {"harbor": images(None, 1, 1), "market": images(None, None, None)})
    assert dict(check.before) == {"first": 2, "second": 1, "third": 3}
    assert dict(check.after) == {"first": 0, "second": 2, "third": 0}
    assert not check.passed
    assert check.returning == ["second"]
    assert check.verdict.startswith("1 of 3 pictures are still reproduced: second.")
    assert EditCheck.from_json(json.loads(json.dumps(check.to_json()))) == check


def test_a_prompt_that_brings_another_memorized_picture_is_named():
    before = {"harbor": images(0, 1, 0), "market": images(2, 2, 2)}
    check = check_edit(PAIRS, before, {"harbor": images(None, None, None), "market": images(0, None, None)})
    assert (check.returning, check.diverted, check.passed) == ([], ["third"], False)
    assert "1 prompts generate another memorized picture instead: third." in check.verdict


def test_what_did_not_come_back_before_says_nothing():
    before = {"harbor": images(0, 0, 0), "market": images(None, None, None)}
    check = check_edit(PAIRS, before, {prompt: images(None, None, None) for prompt in before})
    assert check.passed
    words = "2 of 3 were not reproduced before the edit either, so the check does not show anything about them"
    assert words in check.verdict


def test_an_edit_that_changes_nothing_fails_its_check_and_the_command(tmp_path):
    pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    pytest.importorskip("transformers", reason="transformers is in the diffusion extra")
    from click.testing import CliRunner
    from small_pipelines import stable_diffusion

    from netweight.cli import netweight
    from netweight.hf.load_pipeline import load_text_to_image
    from netweight.metrics.images import write_png

    stable_diffusion().save_pretrained(tmp_path / "pipeline")
    prompt, other = "a large blue circle", "the small red square"
    model = load_text_to_image(tmp_path / "pipeline")
    for name, text in (("one", prompt), ("two", other)):
        # What the random pipeline answers stands for a picture that it memorized.
        write_png(tmp_path / f"{name}.png", model.generate(model.embed([text]), [0], guidance=1.0, steps=2)[0])
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{prompt},one.png\n{prompt},two.png\n")
    (tmp_path / "ordinary.txt").write_text("\n".join(f"a {word} photo" for word in ("red", "green", "small", "on")))
    arguments = [
        "forget", "apply", tmp_path / "pipeline", tmp_path / "edited", "--targets", tmp_path / "targets.csv",
        "--ordinary", tmp_path / "ordinary.txt", "--images", 1, "--guidance", 1.0, "--steps", 2, "--json",
        "--set", "closed_form.ridge=1e12", "--set", "closed_form.rounds=1", "--set", "closed_form.images=1",
        "--set", "closed_form.generation_steps=2",
    ]  # fmt: skip
    done = CliRunner().invoke(netweight, [str(each) for each in arguments])
    assert done.exit_code == 1, done.output
    said = json.loads(done.stdout)
    assert said["check"]["after"] == said["check"]["before"]
    assert "still reproduced" in said["check"]["verdict"]
    assert not said["check"]["passed"]
    assert any("4 ordinary prompts are few" in remark for remark in said["remarks"])
    assert "4 ordinary prompts are few" in " ".join(done.stderr.split())
    assert [each["name"] for each in said["findings"] if each["value"]] == ["pictures that are still reproduced"]
