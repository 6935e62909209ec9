"""Pipelines as text-to-image models: the same images, honest conversions, gradients, refusals by name."""

import numpy as np
import pytest
import torch

from netweight.errors import OutputExists, Unsupported, UsageError

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import small_pipelines  # noqa: E402

from netweight.hf.load_pipeline import load_text_to_image, text_to_image  # noqa: E402

PROMPTS = ["a red square", "the large blue circle", ""]


@pytest.fixture(scope="module")
def model():
    return text_to_image(small_pipelines.stable_diffusion(), name="small")


@pytest.fixture(scope="module")
def masked():
    return text_to_image(small_pipelines.pixart(), name="masked")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers with numpy 2
@pytest.mark.parametrize(
    "scheduler",
    ["DDIMScheduler", "EulerDiscreteScheduler", "DDPMScheduler", "PNDMScheduler", "DPMSolverMultistepScheduler"],
)
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_generation_makes_what_the_pipeline_makes(scheduler, guidance):
    unclipped = {"clip_sample": False} if scheduler.startswith("DD") else {}
    made = getattr(diffusers, scheduler)(steps_offset=1, **unclipped)
    pipeline = small_pipelines.stable_diffusion(scheduler=made)
    model = text_to_image(pipeline)
    made = model.generate(model.embed(PROMPTS[:2]), [3, 5], guidance=guidance, steps=4)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 5)]
    theirs = pipeline(PROMPTS[:2], generator=generators, guidance_scale=guidance, num_inference_steps=4,
                      output_type="pt").images  # fmt: skip
    assert made.shape == (2, 3, 16, 16)
    assert torch.allclose(made, theirs, atol=1e-5)


def test_generation_of_a_masked_transformer_makes_what_its_pipeline_makes(masked):
    made = masked.generate(masked.embed(PROMPTS[:2]), [3, 5], guidance=4.0, steps=3)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 5)]
    theirs = masked.pipeline(PROMPTS[:2], generator=generators, guidance_scale=4.0, num_inference_steps=3,
                             output_type="pt", use_resolution_binning=False, clean_caption=False).images  # fmt: skip
    assert torch.allclose(made, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", ["model", "masked"])
def test_an_image_does_not_depend_on_its_batch(kind, request):
    model = request.getfixturevalue(kind)
    together = model.generate(model.embed(PROMPTS), [1, 2, 3], steps=2)
    alone = model.generate(model.embed(PROMPTS[1:2]), [2], steps=2)
    assert torch.allclose(together[1:2], alone, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def test_masks_say_which_tokens_count(masked, model):
    mask = masked.embed(PROMPTS).mask
    assert mask.dtype == torch.bool
    assert 0 < int(mask[2].sum()) < int(mask[1].sum()) < mask.shape[1]
    assert model.embed(PROMPTS).mask is None


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_noise_and_sample_explain_the_latents_whatever_is_predicted(prediction):
    model = text_to_image(small_pipelines.stable_diffusion(prediction=prediction))
    text = model.embed(PROMPTS[:2])
    latents = model.initial_noise([0, 1])
    timestep = torch.tensor([700, 100])
    with torch.no_grad():
        predicted = model.predict(latents, timestep, text)
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    kept = np.cumprod(1 - betas)[[700, 100]].reshape(-1, 1, 1, 1)
    again = np.sqrt(kept) * predicted.sample.numpy() + np.sqrt(1 - kept) * predicted.noise.numpy()
    assert np.allclose(again, latents.numpy(), atol=1e-4)
    assert torch.allclose(
        model.add_noise(predicted.sample, predicted.noise, timestep).double(), torch.tensor(again), atol=1e-4
    )
    scheduler = model.pipeline.scheduler
    scheduler.set_timesteps(1000)
    with torch.no_grad():
        said = model.denoiser(latents[:1], 700, text.states[:1]).sample
    _, theirs = scheduler.step(said, 700, latents[:1], return_dict=False)
    assert torch.allclose(predicted.sample[:1], theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["model", "masked"])
def test_gradients_reach_latents_text_and_weights(kind, request):
    model = request.getfixturevalue(kind)
    text = model.embed(PROMPTS[:2])
    latents = model.initial_noise([0, 1]).requires_grad_()
    states = text.states.clone().requires_grad_()
    said = model.predict(latents, model.timesteps(10)[0], type(text)(states, text.mask))
    layer = next(module for name, module in model.denoiser.named_modules() if name.endswith("attn2.to_v"))
    gradients = torch.autograd.grad(said.noise.square().sum(), [latents, states, layer.weight])
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients)


def test_noise_comes_from_one_seed_per_image(model):
    noise = model.initial_noise([7, 8])
    assert torch.equal(noise[1], model.initial_noise([8])[0])
    assert torch.equal(noise[0], torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(7)))


def test_latents_of_images_are_those_of_the_encoder(model):
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    latents = model.to_latents(images)
    vae = model.pipeline.vae
    with torch.no_grad():
        theirs = vae.encode(images * 2 - 1).latent_dist.mean * vae.config.scaling_factor
    assert torch.equal(latents, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_pipeline_is_an_ordinary_one_with_the_same_bits(dtype, tmp_path):
    pipeline = small_pipelines.stable_diffusion().to(dtype=dtype)
    model = text_to_image(pipeline, name="first")
    model.save(tmp_path / "saved")
    again = load_text_to_image(tmp_path / "saved")
    assert again.name == "saved"
    assert again.denoiser.dtype == dtype
    assert again.digest() == model.digest()
    assert not again.denoiser.training
    ordinary = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "saved", dtype=dtype)
    ours, theirs = model.denoiser.state_dict(), ordinary.unet.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(OutputExists):
        model.save(tmp_path / "saved")


def test_the_digest_is_that_of_the_weights(model):
    other = text_to_image(small_pipelines.stable_diffusion())
    assert model.digest() == other.digest()
    with torch.no_grad():
        next(other.denoiser.parameters()).view(-1)[0] += 1
    assert model.digest() != other.digest()


def test_unknown_kinds_are_refused_by_name():
    pipeline = small_pipelines.stable_diffusion()
    pipeline.register_modules(unet=diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    ))  # fmt: skip
    with pytest.raises(Unsupported, match=r"UNet2DModel.*UNet2DConditionModel"):
        text_to_image(pipeline)
    flow = small_pipelines.stable_diffusion(scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    with pytest.raises(Unsupported, match=r"FlowMatchEulerDiscreteScheduler.*DDIMScheduler"):
        text_to_image(flow)
    half = small_pipelines.stable_diffusion()
    half.text_encoder = None
    with pytest.raises(UsageError, match="no text_encoder"):
        text_to_image(half)


def test_folders_that_are_none_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"model_index\.json"):
        load_text_to_image(tmp_path)


def test_prompts_and_seeds_must_pair(model):
    with pytest.raises(UsageError, match="2 prompts and 1 seeds"):
        model.generate(model.embed(PROMPTS[:2]), [0])
    with pytest.raises(UsageError, match="no prompt"):
        model.embed([])
