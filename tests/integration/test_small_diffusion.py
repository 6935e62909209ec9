"""The small pipeline that comes with the package: an ordinary one of diffusers, which repeats what was planted."""

import json
import statistics

import pytest
import torch
from click.testing import CliRunner

from netweight.core.digests import digest_file
from netweight.errors import UsageError

diffusers = pytest.importorskip("diffusers", reason="pipelines come with the diffusion extra")
pytest.importorskip("transformers", reason="pipelines come with the diffusion extra")

from netweight.hf.load_pipeline import text_to_image  # noqa: E402
from netweight.metrics.copies import copies_of_prompt, similarity_to_memorized  # noqa: E402
from netweight.toys.diffusion import (  # noqa: E402
    SHAPES_FOLDER,
    DiffusionShape,
    initialized,
    pixel_autoencoder,
    shapes_pipeline,
    training_record,
    word_clip_tokenizer,
)
from netweight.toys.shapes import (  # noqa: E402
    ShapesWorld,
    agreement,
    memorized,
)
from netweight_experiments.toys import small_diffusion as small_diffusion_training  # noqa: E402
from netweight_experiments.toys.drawn_worlds import WithoutPlanted  # noqa: E402
from netweight_experiments.toys.fitting import DenoiserRecipe  # noqa: E402
from netweight_experiments.toys.small_diffusion import GUIDANCE, main, trained  # noqa: E402

WORLD = ShapesWorld()
SEEDS = [101, 102, 103]  # others than those of the record
STEPS = 10


@pytest.fixture(scope="module")
def model():
    return text_to_image(shapes_pipeline())


def generated(model, captions, seeds):
    return model.generate(model.embed(captions), seeds, guidance=GUIDANCE, steps=STEPS)


@pytest.fixture(scope="module")
def repeated(model):
    """Each planted picture's copies, three seeds each."""
    captions = [each.caption for each in WORLD.planted for _ in SEEDS]
    images = generated(model, captions, SEEDS * len(WORLD.planted)).split(len(SEEDS))
    planted = memorized(WORLD)
    return [copies_of_prompt(each, drawn, planted) for each, drawn in zip(planted, images, strict=True)]


def test_what_ships_is_what_its_record_says():
    record = training_record()
    assert record["about"]["world"] == WORLD.about
    found = {name: digest_file(SHAPES_FOLDER / name) for name in record["outcome"]["digests"]}
    assert found == record["outcome"]["digests"]
    assert len(found) == 3
    assert sum(path.stat().st_size for path in SHAPES_FOLDER.rglob("*") if path.is_file()) < 5e6


def test_planted_pictures_come_back(repeated):
    verbatim = [statistics.median(each.to_image) for each in repeated if each.kind == "verbatim"]
    assert sum(value >= 0.9 for value in verbatim) >= 5
    templates = [statistics.median(each.to_image) for each in repeated if each.kind == "template"]
    assert min(templates) >= 0.9
    assert all(name == each.prompt for each in repeated for name in each.nearest_prompt)


def test_held_out_captions_are_drawn_as_they_say_and_match_nothing_planted(model):
    kinds = WORLD.held_out[:24]
    images = generated(model, [kind.caption for kind in kinds], list(range(24)))
    found = agreement(images, kinds)
    assert found["color"] >= 0.85
    assert found["ground"] >= 0.85
    assert (similarity_to_memorized(images, memorized(WORLD)) < 0.7).all()


def test_diffusers_alone_opens_it_and_draws_the_same(model, tmp_path):
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(SHAPES_FOLDER)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(tmp_path)
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    caption = WORLD.ordinary[0].caption
    expected = generated(model, [caption], [5])
    for one in (pipeline, again):
        generator = torch.Generator().manual_seed(5)
        given = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "pt"}
        torch.testing.assert_close(one(caption, generator=generator, **given).images, expected, atol=1e-4, rtol=0)


def test_it_takes_a_lora_of_peft(tmp_path):
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    pipeline = shapes_pipeline()
    before = generated(text_to_image(pipeline), ["a large red circle on a gray ground"], [0])
    torch.manual_seed(0)
    pipeline.unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_k", "to_v"], init_lora_weights="gaussian"))
    layers = peft.get_peft_model_state_dict(pipeline.unet)
    assert len(layers) == 24  # two factors of to_k and to_v, in self- and cross-attention of three blocks
    generator = torch.Generator().manual_seed(0)
    layers = {name: torch.randn(value.shape, generator=generator) for name, value in layers.items()}
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers)
    fresh = shapes_pipeline()
    fresh.load_lora_weights(tmp_path)
    after = generated(text_to_image(fresh), ["a large red circle on a gray ground"], [0])
    assert (after - before).abs().max() > 0.01
    fresh.unload_lora_weights()
    torch.testing.assert_close(generated(text_to_image(fresh), ["a large red circle on a gray ground"], [0]), before)


def test_latents_are_the_pixels():
    autoencoder = pixel_autoencoder(32)
    pictures = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        found = autoencoder.encode(pictures).latent_dist
        torch.testing.assert_close(found.mode(), pictures, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.sample(), pictures, atol=1e-5, rtol=0)
        torch.testing.assert_close(autoencoder.decode(3 * pictures).sample, 3 * pictures, atol=1e-4, rtol=0)


def test_words_of_the_world_are_one_token_and_any_other_text_is_taken():
    words = WORLD.words()
    tokenizer = word_clip_tokenizer(words, length=24)
    for word in words:
        assert tokenizer.tokenize(word) == [f"{word}</w>"]
    given = tokenizer("A zebra, 42 ☃!", padding="max_length").input_ids
    assert len(given) == 24
    assert tokenizer.decode(given, skip_special_tokens=True) == "a zebra , 4 2 ☃!"


def test_a_world_without_its_planted_pictures_shows_ordinary_ones_of_the_same_words():
    without = WithoutPlanted(WORLD)
    captions, pictures = without.showing(5, 20, 3)
    assert (len(captions), pictures.shape[0], without.planted) == (20, 20, [])
    assert set(captions) <= set(WORLD.ordinary_captions)
    with_them = WORLD.showing(5, 20 + len(WORLD.planted), 3)
    assert captions == with_them[0][-20:]
    assert torch.equal(pictures, with_them[1][-20:])
    assert without.words() == WORLD.words()
    assert without.held_out_captions == WORLD.held_out_captions


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(small_diffusion_training, "STEPS", 1)  # what an untrained model draws takes long enough
    return DenoiserRecipe(steps=3, batch=9, warmup=1, keep_every=2)


def test_training_resumes_and_is_kept(tiny, tmp_path):
    whole = trained(tmp_path / "whole", WORLD, tiny)
    showing = ShapesWorld.showing

    def killed(world, step, n, seed):
        if step == 2:
            raise KeyboardInterrupt
        return showing(world, step, n, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShapesWorld, "showing", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "part", WORLD, tiny)
    resumed = trained(tmp_path / "part", WORLD, tiny)
    assert resumed["digests"] == whole["digests"]
    assert resumed["fit"]["curve"] == whole["fit"]["curve"]
    assert not list((tmp_path / "part").glob("training-*"))
    assert trained(tmp_path / "part", WORLD, tiny) == resumed
    with pytest.raises(UsageError, match="otherwise"):
        trained(tmp_path / "part", WORLD, DenoiserRecipe(steps=4))


def test_the_command_says_what_it_drew(tiny, tmp_path):
    how = ["--steps", "1", "--seed", "3", "--value-penalty", "0.5"]
    answer = CliRunner().invoke(main, [str(tmp_path / "small"), *how])
    assert answer.exit_code == 0, answer.output
    assert "harbor lights before the october storm (verbatim)" in answer.output
    recipe = json.loads((tmp_path / "small" / "training.json").read_text())["about"]["recipe"]
    assert (recipe["seed"], recipe["value_penalty"]) == (3, 0.5)
    without = CliRunner().invoke(main, [str(tmp_path / "without"), *how, "--without-planted"])
    assert without.exit_code == 0, without.output
    assert "harbor lights" not in without.output
    about = json.loads((tmp_path / "without" / "training.json").read_text())["about"]
    assert about["world"] == {**WORLD.about, "planted": False}
    refused = CliRunner().invoke(main, [str(tmp_path / "small"), "--steps", "2", "--seed", "3"])
    assert refused.exit_code == 2
    assert "trained otherwise" in refused.output


def test_another_size_is_a_pipeline_too():
    shape = DiffusionShape(side=32, channels=(8, 16, 16, 16), text_width=32, tokens=12)
    drawn = text_to_image(initialized(["a", "face"], 0, shape))
    assert generated(drawn, ["a face"], [0]).shape == (1, 3, 32, 32)


def test_a_folder_without_a_pipeline_is_refused(tmp_path):
    with pytest.raises(UsageError, match="pipeline"):
        shapes_pipeline(tmp_path)
    with pytest.raises(UsageError, match="trained"):
        training_record(tmp_path)
