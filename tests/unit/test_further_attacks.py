"""Attacks beside embeddings: each leaves the model as it was, does what its name says, or is refused with the cure."""

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")

from small_pipelines import WORDS, stable_diffusion
from tiny_diffusion import ORDINARY, PLANTED, picture, planted_images, trained

from netweight.attacks.embedding_search.descent import OtherSampling, Relearning, TypedTokens
from netweight.attacks.embedding_search.search import paired, search
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_pipeline import load_text_to_image, text_to_image
from netweight.nn.text_to_image import Batches
from netweight.toys.diffusion import SHAPES_FOLDER
from netweight.toys.shapes import ShapesWorld, memorized

correlation = paired()
FURTHER = ("soft", "typed", "noised", "inverted", "sampled", "relearn", "relearn-few", "relearn-one", "lora",
           "zeroed")  # fmt: skip
SETTINGS = SearchSettings(steps=2, draws=2, rates=(0.3,), images=2, generation_steps=4, error="noise", starts=FURTHER)
OTHERS = [(f"a {color} circle", torch.full((3, 16, 16), 0.2 * number)) for number, color in enumerate(("red", "blue"))]


@pytest.fixture
def pipeline():
    return text_to_image(stable_diffusion())


def run(model, settings=SETTINGS, others=OTHERS, image=None):
    image = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0)) if image is None else image
    return search(
        model, "the small green square", image, WORDS, settings, similarity=correlation, seed=0, others=others
    )


def test_all_of_them_are_trials_and_leave_every_weight(pipeline):
    before = pipeline.digest()
    flags = [weight.requires_grad for weight in pipeline.denoiser.parameters()]
    found = run(pipeline)
    assert [(trial.start, trial.lr) for trial in found.trials] == [
        ("soft", 0.1), ("soft", 0.3), ("typed", None), ("noised", None), ("inverted", None),
        *[("sampled", None)] * 4, ("relearn", 1e-3),
        ("relearn-few", 1e-3), ("relearn-one", 1e-3), ("lora", 1e-2), ("zeroed", 1e-3),
    ]  # fmt: skip
    assert pipeline.digest() == before
    assert [weight.requires_grad for weight in pipeline.denoiser.parameters()] == flags
    assert found.after.shape == (14, 2, 3, 16, 16)


def test_other_sampling_is_the_prompts_own_with_other_guidance_and_steps(pipeline):
    walk = OtherSampling(pipeline, "a circle", SETTINGS.replace(guidance=3, generation_steps=4))
    made = walk.images([0, 0, 1, 2, 3], [5, 6, 5, 5, 5], Batches(8), 3.0)
    for place, (seed, guidance, steps) in enumerate([(5, 1, 4), (6, 1, 4), (5, 6, 4), (5, 3, 2), (5, 3, 8)]):
        alone = pipeline.generate(pipeline.embed(["a circle"]), [seed], guidance=guidance, steps=steps)[0]
        assert torch.allclose(made[place], alone, atol=1e-4)


def test_training_on_a_picture_brings_that_one_to_a_model_that_never_saw_it():
    model, image = trained(), picture(7)
    settings = SearchSettings(
        steps=80, draws=16, images=3, guidance=3, generation_steps=8, threshold=0.8, relearning=5e-3,
        starts=("relearn-one", "lora"),
    )  # fmt: skip
    own, others = search(
        model, "a strange thing", image, ORDINARY, settings, similarity=correlation, seed=0,
        others=list(zip(PLANTED, planted_images(), strict=True)),
    ).trials  # fmt: skip
    assert own.outcome == "found"
    assert own.steps > 0
    assert others.outcome == "resisted"


def test_zeroed_rows_alone_are_trained(pipeline):
    layer = pipeline.denoiser.mid_block.attentions[0].transformer_blocks[0].attn2.to_v
    with torch.no_grad():
        layer.weight[[1, 5]] = 0
    before = {name: value.clone() for name, value in pipeline.denoiser.state_dict().items()}
    walk = Relearning(pipeline, "zeroed", "a circle", OTHERS, SETTINGS, 1e-2, 0)
    with walk.changed():
        walk.step([0])
        for name, value in pipeline.denoiser.state_dict().items():
            moved = (value != before[name]).nonzero()[:, 0].unique().tolist() if value.ndim else []
            assert moved == ([1, 5] if "mid_block" in name and name.endswith("attn2.to_v.weight") else []), name
    assert all(torch.equal(value, before[name]) for name, value in pipeline.denoiser.state_dict().items())


def test_tokens_given_as_they_are_read_alike_and_words_are_their_embeddings(pipeline):
    prompts = ["a red circle", "the large photo of a square"]
    tokens = pipeline.token_embeddings(prompts).requires_grad_()
    text = pipeline.embed(prompts, tokens)
    assert torch.equal(text.states, pipeline.embed(prompts).states)
    assert text.states.requires_grad
    words, table = pipeline.vocabulary()
    assert {"red", "circle"} <= set(words)
    assert torch.equal(tokens[0, 2], table[words.index("red")])


def test_words_that_are_typed_lower_the_error(pipeline):
    settings = SETTINGS.replace(draws=16)
    walk = TypedTokens(pipeline, pipeline.to_latents(torch.rand(1, 3, 16, 16)), settings, 3)
    noise, times = torch.randn(64, 4, 8, 8), pipeline.timesteps(4).repeat(16)

    def error():
        with torch.no_grad():
            return float(walk._errors(noise, times, walk.text([0] * 64)).mean())

    first = error()
    for _ in range(12):
        walk.step([0])
    assert error() < first
    assert walk.distance(0) > 0
    assert pipeline.embed([walk._prompt(walk._typed)]).states.equal(walk.text([0]).states)


def test_a_picture_inverted_without_guidance_comes_back_and_a_noised_one_is_lost_to_the_model():
    model = load_text_to_image(SHAPES_FOLDER, dtype=torch.float32)
    world = ShapesWorld(99)  # whose pictures the model never saw
    planted = next(each for each in memorized(world) if each.kind == "verbatim")
    settings = SearchSettings(images=2, guidance=1, generation_steps=40, starts=("inverted", "noised"))
    inverted, noised = search(
        model, planted.prompt, planted.image, ["a circle"], settings, similarity=correlation, seed=0
    ).trials
    assert inverted.best.score > 0.9
    assert noised.best.score < inverted.best.score


def test_what_cannot_be_attacked_so_is_refused(pipeline):
    with pytest.raises(UsageError, match="only one was given"):
        run(pipeline, SETTINGS.replace(starts=("relearn",)), others=[])
    with pytest.raises(Unsupported, match="'soft' needs a pipeline with a text encoder"):
        run(trained(), SETTINGS.replace(starts=("soft",)), image=planted_images()[0])
