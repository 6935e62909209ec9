"""Images are those of the pipeline's own call, whatever its scheduler; what has no image is refused by name."""

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")

import diffusers
from small_pipelines import stable_diffusion, stable_diffusion_xl

from netweight.errors import UsageError
from netweight.hf.load_pipeline import text_to_image
from netweight.hf.pipeline_settings import PipelineSettings

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
PROMPTS = ["a large blue circle", "a red square on the green"]
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SCHEDULERS = {
    "TCD": lambda: diffusers.TCDScheduler(**BETAS),
    "LCM": lambda: diffusers.LCMScheduler(**BETAS),
    "ancestral": lambda: diffusers.EulerAncestralDiscreteScheduler(**BETAS),
    "DDPM": lambda: diffusers.DDPMScheduler(**BETAS, clip_sample=False),
    "Heun": lambda: diffusers.HeunDiscreteScheduler(**BETAS),
    "SDE": lambda: diffusers.DPMSolverMultistepScheduler(**BETAS, algorithm_type="sde-dpmsolver++"),
    "Karras": lambda: diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True),
    "zero SNR, velocity": lambda: diffusers.DDIMScheduler(
        **BETAS, clip_sample=False, rescale_betas_zero_snr=True, timestep_spacing="trailing",
        prediction_type="v_prediction",
    ),
    "zero SNR, sample": lambda: diffusers.DDIMScheduler(
        **BETAS, clip_sample=False, rescale_betas_zero_snr=True, timestep_spacing="trailing", prediction_type="sample"
    ),
}  # fmt: skip


def own_images(pipeline, **call):
    return torch.stack([
        pipeline(prompt, num_inference_steps=6, guidance_scale=5.0, output_type="pt",
                 generator=torch.Generator().manual_seed(seed), **call).images[0]
        for seed, prompt in enumerate(PROMPTS)
    ])  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULERS)
def test_images_are_the_pipelines_own(name):
    pipeline = stable_diffusion(scheduler=SCHEDULERS[name]())
    wanted = own_images(pipeline)
    model = text_to_image(pipeline)
    made = model.generate(model.embed(PROMPTS), [0, 1], guidance=5.0, steps=6)
    assert torch.allclose(made, wanted, atol=2e-5)


def test_zero_terminal_snr_with_a_prediction_of_noise_is_refused_by_name():
    scheduler = diffusers.DDIMScheduler(
        **BETAS, clip_sample=False, rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    model = text_to_image(stable_diffusion(scheduler=scheduler))
    with pytest.raises(UsageError, match=r"NaN or infinite with its DDIMScheduler \(prediction_type epsilon") as caught:
        model.generate(model.embed(PROMPTS), [0, 1], steps=6)
    assert '"prediction_type": "v_prediction"' in caught.value.cure


def test_a_denoiser_without_a_size_is_asked_for_one():
    pipeline = stable_diffusion()
    pipeline.unet.register_to_config(sample_size=None)
    with pytest.raises(UsageError, match="has no sample_size") as caught:
        text_to_image(pipeline)
    assert "--size" in caught.value.cure
    wanted = own_images(pipeline, height=16, width=24)
    model = text_to_image(pipeline, size=PipelineSettings(size="16x24").pixels)
    assert model.image_size == (16, 24)
    made = model.generate(model.embed(PROMPTS), [0, 1], guidance=5.0, steps=6)
    assert torch.allclose(made, wanted, atol=2e-5)


def test_a_size_that_the_autoencoder_cannot_make_is_refused():
    with pytest.raises(UsageError, match="multiples of 2"):
        text_to_image(stable_diffusion(), size=(15, 16))
    with pytest.raises(UsageError, match="'large' is not a size"):
        PipelineSettings(size="large")


def test_sdxl_without_a_size_has_that_of_its_pipeline():
    pipeline = stable_diffusion_xl()
    pipeline.unet.register_to_config(sample_size=None)
    pipeline.default_sample_size = 8
    assert text_to_image(pipeline).image_size == (16, 16)
